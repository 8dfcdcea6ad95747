"""What the scheduler leaves to taste: order, victims, the way out, and the room to keep."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from layby.scheduling.memory import KVMemory
from layby.scheduling.plan import PreemptionMode
from layby.scheduling.queues import Urgency
from layby.scheduling.request import Request


class Phase(Enum):
    """The queue a part of a step deals with."""

    SWAPPED = "swapped"
    RUNNING = "running"
    WAITING = "waiting"


class Policy:
    """The questions a scheduler asks. The answers given here are those of swapped-first.

    Attributes:
        phases: The queues in the order in which a step looks at them.
        resumes_after_preemption: Whether parked work may come in during a step that preempted.
        parks_for_urgent: Whether running work is preempted to let a more urgent class in.
    """

    phases: tuple[Phase, ...] = (Phase.SWAPPED, Phase.RUNNING, Phase.WAITING)
    resumes_after_preemption = True
    parks_for_urgent = True

    def __init__(self, *, preemption_mode: str, headroom: float) -> None:
        self.preemption_mode = preemption_mode
        self.headroom = headroom

    def urgency(self, request: Request) -> Urgency:
        """Place within every queue: class, then arrival; ``order`` settles ties."""
        assert request.arrival_time is not None
        return (request.rank, request.arrival_time, request.order)

    def victim(self, candidates: Iterable[Request]) -> Request:
        """Whom to preempt: the least urgent, latest-arrived of the candidates (at least one)."""
        return max(candidates, key=self.urgency)

    def way_out(self, victim: Request, *, can_swap: bool) -> PreemptionMode:
        """How the victim leaves. ``can_swap`` says whether the swap pool can take it.

        Who has computed nothing has nothing to park.
        """
        if self.preemption_mode == "recompute" or not can_swap:
            return PreemptionMode.RECOMPUTE
        return PreemptionMode.SWAP

    def may_admit(self, request: Request, blockers: Iterable[Request]) -> bool:
        """Whether a waiting request may come in although ``blockers`` have left the device.

        Blockers are the swapped requests and those preempted in this step. Only a strictly more
        urgent class goes ahead of them.
        """
        return all(request.claim < blocker.rank for blocker in blockers)

    def headroom_blocks(
        self, memory: KVMemory, running: Iterable[Request], *, num_seqs: int
    ) -> int:
        """Blocks to leave free when somebody comes in, so that he can run a while.

        ``num_seqs`` is the number of sequences of the running requests.
        """
        return -int(-self.headroom * num_seqs // 1)

    def admission_blocks(self, memory: KVMemory, request: Request, needed: int) -> int:
        """Blocks that must be there to admit a request which takes ``needed`` at once."""
        return needed


class SwappedFirst(Policy):
    """The policy Layby stands for: swapped first, running next, waiting last."""


class RunningFirst(Policy):
    """As the early block-manager engines: resume last, and only when nothing was preempted.

    New work comes in before parked work is looked at, though only while none is parked. For
    comparison.
    """

    # Who was resumed gets its tokens in a second look at the running queue.
    phases = (Phase.RUNNING, Phase.WAITING, Phase.SWAPPED, Phase.RUNNING)
    resumes_after_preemption = False
    parks_for_urgent = False

    def may_admit(self, request: Request, blockers: Iterable[Request]) -> bool:
        """Only when nobody is parked or was preempted."""
        return not any(True for _ in blockers)


class RecomputeOnly(Policy):
    """Never swaps: a victim's KV is dropped and computed again. For comparison."""

    def way_out(self, victim: Request, *, can_swap: bool) -> PreemptionMode:
        """Always recompute."""
        return PreemptionMode.RECOMPUTE


class Reserve(Policy):
    """Admits only what fits to its very end, so that nothing is ever preempted. For comparison."""

    parks_for_urgent = False

    def headroom_blocks(
        self, memory: KVMemory, running: Iterable[Request], *, num_seqs: int
    ) -> int:
        """What the running requests may still come to need."""
        return sum(
            max(0, memory.worst_case_blocks(request) - memory.held_blocks(request))
            for request in running
        )

    def admission_blocks(self, memory: KVMemory, request: Request, needed: int) -> int:
        """Room for the longest answer the request may give."""
        return max(needed, memory.worst_case_blocks(request))


POLICIES: dict[str, type[Policy]] = {
    "swapped-first": SwappedFirst,
    "running-first": RunningFirst,
    "recompute-only": RecomputeOnly,
    "reserve": Reserve,
}
