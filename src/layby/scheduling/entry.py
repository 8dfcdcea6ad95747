"""Whether a request can come in now, and the room that it must leave to others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum

from layby.scheduling.config import SchedulerConfig
from layby.scheduling.memory import KVMemory
from layby.scheduling.policy import Policy
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import Request, RequestStatus
from layby.scheduling.reserve import UrgentRoom
from layby.scheduling.step import Step
from layby.scheduling.tiers import SwapTiers


class Fit(Enum):
    """Whether a request can come in now. What never fits is refused by ``add_request``."""

    OK = "ok"
    LATER = "later"


class Entry:
    """The questions to ask before anybody is resumed or admitted. Decides; moves nobody.

    Args:
        config, policy, memory, tiers, urgent: The scheduler's.
        queues: The queue of every state.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        memory: KVMemory,
        tiers: SwapTiers,
        urgent: UrgentRoom,
        queues: Mapping[RequestStatus, RequestQueue],
    ) -> None:
        self.config = config
        self.policy = policy
        self.memory = memory
        self.tiers = tiers
        self._urgent = urgent
        self.running = queues[RequestStatus.RUNNING]
        self.waiting = queues[RequestStatus.WAITING]
        self.swapped = queues[RequestStatus.SWAPPED]

    def can_resume(self, request: Request, step: Step) -> Fit:
        """Whether a parked request can come back in this step."""
        if not self.tiers.is_in_ram(request):
            return Fit.LATER
        return self._fits(request, self.memory.resume_need(request), step)

    def can_admit(self, request: Request, step: Step) -> Fit:
        """Whether a waiting request can come in in this step."""
        needed = self.memory.admission_need(request)
        return self._fits(request, self.policy.admission_blocks(self.memory, request, needed), step)

    def can_come_in(self, request: Request, step: Step) -> Fit:
        """Whichever of the two it is."""
        if request.status is RequestStatus.SWAPPED:
            return self.can_resume(request, step)
        return self.can_admit(request, step)

    def _fits(self, request: Request, needed_blocks: int, step: Step) -> Fit:
        """Whether blocks, with room to grow for who runs already, and budget allow one more."""
        least = self.running.tail
        kept = self.room_to_grow(self.running, least, step.budget.curr_seqs, request)
        kept += self.room_to_keep(request, least, step.plan.now)
        free = self.memory.device.num_free - step.set_aside_blocks - kept
        affordable = step.budget.can_schedule(
            num_tokens=len(request.ready_sequences), num_seqs=request.num_live_seqs
        )
        return Fit.OK if needed_blocks <= free and affordable else Fit.LATER

    def room_to_grow(
        self, running: Iterable[Request], least: Request | None, num_seqs: int, newcomer: Request
    ) -> int:
        """Blocks to leave free when somebody comes in beside ``running``, of whom ``least`` is the
        least urgent: the policy's headroom, or the watermark if that is more.

        The watermark is nothing to one who is more urgent than ``least``, who gives way when room
        runs short; nor to the first of a class, since beside more urgent ones, of whom there may
        always be some, it might never be kept.
        """
        headroom = self.policy.headroom_blocks(self.memory, running, num_seqs=num_seqs)
        if least is None or not newcomer.rank <= least.rank <= newcomer.claim:
            return headroom
        return max(headroom, math.ceil(self.config.watermark * self.memory.device.limit))

    def room_to_keep(self, request: Request, least: Request | None, now: float) -> int:
        """Blocks that a newcomer must leave to more urgent classes, which came to need them lately.

        ``least`` is the least urgent that runs. The first of a class comes in anyhow, so that it
        gets on, and half of the pool is the most that is kept for those who may never come again.
        A parked one that holds up somebody more urgent, who waits for it to come back,
        leaves what he would leave: else all three would wait for the window to pass.
        """
        if least is None or least.rank < request.rank or not self.policy.parks_for_urgent:
            return 0
        rank, room = request.rank, 0
        if request.status is RequestStatus.SWAPPED and (waits := self.waiting.head) is not None:
            rank = min(rank, waits.rank)
        if peak := self._urgent.peak(rank, now):
            room = min(peak - self._held_by(rank - 1), self.memory.device.limit // 2)
        if self.config.preemption_threshold < 1 and self.yields(request, now):
            room = max(room, self.spare_blocks)
        return max(room, 0)

    @property
    def spare_blocks(self) -> int:
        """Blocks above the preemption threshold."""
        return math.ceil((1 - self.config.preemption_threshold) * self.memory.device.limit)

    def yields(self, request: Request, now: float) -> bool:
        """Whether a more urgent class runs, waits or has been seen lately."""
        return (
            any(
                queue.head is not None and queue.head.rank < request.rank
                for queue in (self.running, self.waiting, self.swapped)
            )
            or self._urgent.seen(request.rank, now)
        )  # fmt: skip

    def _held_by(self, claim: int) -> int:
        """Blocks held by those of this claim and better ones."""
        least = self.running.tail
        if self.config.priority_aging is None and (least is None or least.rank <= claim):
            return self.memory.device.num_held
        held = 0
        for request in self.running:
            if request.rank > claim:
                break
            if request.claim <= claim:
                held += self.memory.held_blocks(request)
        return held

    def note_need(self, request: Request, now: float) -> None:
        """Remember what this request's class and those more urgent hold."""
        if self._urgent.window_s:
            self._urgent.note(request.claim, now, self._held_by(request.claim))
