"""Who must go, and by which way: for lack of blocks, ahead of need, or for somebody better."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain

from layby.scheduling.classes import Classes
from layby.scheduling.config import SchedulerConfig
from layby.scheduling.costs import Decision, MoveCosts, decide
from layby.scheduling.entry import Entry, Fit
from layby.scheduling.memory import KVMemory
from layby.scheduling.metrics import SchedulerMetrics
from layby.scheduling.plan import BlockMove, PreemptionMode
from layby.scheduling.policy import Policy
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import Request, RequestStatus
from layby.scheduling.step import Shares, Step
from layby.scheduling.tiers import SwapTiers

logger = logging.getLogger("layby.scheduling")

MOST_DOUBLINGS = 6
"""How often the time for which a resumed request is protected doubles."""


class Preemption:
    """Takes running requests off the device.

    Args:
        config, policy, memory, tiers, classes, metrics: The scheduler's.
        queues: The queue of every state.
        entry: Whether somebody can come in.
        shares: Takes back what a step had planned for a victim.
        leave_running: Takes a request out of the running queue.

    Attributes:
        costs: What ``preemption_mode=auto`` decides by; None: not known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        memory: KVMemory,
        tiers: SwapTiers,
        classes: Classes,
        queues: Mapping[RequestStatus, RequestQueue],
        metrics: SchedulerMetrics,
        *,
        entry: Entry,
        shares: Shares,
        leave_running: Callable[[Request], None],
    ) -> None:
        self.config = config
        self.policy = policy
        self.memory = memory
        self.tiers = tiers
        self._classes = classes
        self.metrics = metrics
        self.entry = entry
        self.shares = shares
        self.running = queues[RequestStatus.RUNNING]
        self.waiting = queues[RequestStatus.WAITING]
        self.swapped = queues[RequestStatus.SWAPPED]
        self._leave_running = leave_running
        self.costs: MoveCosts | None = None

    def park_ahead(self, step: Step) -> None:
        """Above the threshold, park the least urgent running work before anybody needs its blocks:
        as long as a more urgent class runs or has been seen lately, and never all of it."""
        memory = self.memory
        while memory.device.num_free < self.entry.spare_blocks and len(self.running) > 1:
            least = self.running.tail
            if least is None or not self.entry.yields(least, step.plan.now):
                return
            candidates = [r for r in self.running if r.rank == least.rank]
            # Nobody else would get on if the only one of a class were parked again and again.
            if len(candidates) == 1 and least.num_preemptions:
                return
            self.preempt(self.victim(candidates, step), step)

    def make_room(self, newcomer: Request, step: Step) -> None:
        """Preempt running work of less urgent classes for a newcomer, or for one who comes back,
        if that gets him in.

        Only for blocks and seats. Tokens are there again in the next step.
        """
        if not self.policy.parks_for_urgent or step.budget.remaining_tokens < len(
            newcomer.ready_sequences
        ):
            return
        least = self.running.tail
        if least is None or least.rank <= newcomer.claim:
            return
        is_parked = newcomer.status is RequestStatus.SWAPPED
        if is_parked and not self.tiers.is_in_ram(newcomer):
            return
        # Nobody leaves in a step that let somebody in or back who may not go ahead of him.
        came_back = (request.rank for request in step.plan.resumed)
        came_in = (request.claim for request in step.plan.admitted)
        bar = max(chain([newcomer.claim], came_back, came_in))
        candidates = [
            request
            for request in self.running
            if request.rank > bar and request not in step.entered
        ]
        if not candidates or not self._would_fit(newcomer, candidates, step):
            return
        if is_parked:
            self.tiers.keep_in_ram(newcomer)  # whoever is parked for it
        while candidates and self.entry.can_come_in(newcomer, step) is Fit.LATER:
            victim = self.victim(candidates, step)
            candidates.remove(victim)
            self.preempt(victim, step)

    def _would_fit(self, newcomer: Request, without: list[Request], step: Step) -> bool:
        """Whether there would be blocks and a seat if all of these had left."""
        leaving = set(without)
        staying = [request for request in self.running if request not in leaving]
        seats = step.budget.curr_seqs - sum(request.num_live_seqs for request in without)
        least = staying[-1] if staying else None
        headroom = self.entry.room_to_grow(staying, least, seats, newcomer)
        headroom += self.entry.room_to_keep(newcomer, least, step.plan.now)
        headroom += step.set_aside_blocks - sum(map(self.memory.growth, without))
        return (
            seats + newcomer.num_live_seqs <= step.budget.max_num_seqs
            and self.memory.would_fit(newcomer, without=without, headroom=headroom)
        )  # fmt: skip

    def victim(self, candidates: list[Request], step: Step) -> Request:
        """Whom to preempt: of the least urgent class, the latest who has not come back just now.

        The head of the running queue, which is always to get on, only if there is no other.
        """
        least = max(request.rank for request in candidates)
        head = self.running.head
        choices = [
            request
            for request in candidates
            if request.rank == least
            and request is not head
            and not self._is_protected(request, step)
        ]
        return self.policy.victim(choices or candidates)

    def _is_protected(self, request: Request, step: Step) -> bool:
        """Whether one that was preempted has been back for less than the time it takes to fill a
        block; twice as long with every time that it was preempted before."""
        if not request.num_preemptions:
            return False
        steps = step.plan.step - request.entered_step
        return steps < self.config.block_size << min(request.num_preemptions - 1, MOST_DOUBLINGS)

    def preempt(self, victim: Request, step: Step) -> None:
        """running → swapped, or running → waiting. What this step had planned for the victim is
        undone: its place, its blocks and its share of the budget."""
        self.shares.unplan(victim, step)
        self._leave_running(victim)
        mode = self.policy.way_out(victim, can_swap=self.tiers.can_park(victim))
        if mode is PreemptionMode.SWAP and (decision := self._weigh(victim)) is not None:
            mode = decision.mode
            step.plan.decisions.append(decision)
        if mode is PreemptionMode.SWAP:
            self.tiers.make_room(victim)
            victim.move_to(RequestStatus.SWAPPED)
            moves = self.memory.park(victim)
            step.plan.swap_out += _before(step.plan.relocate, moves)
            self.metrics.swapped_out_blocks += len(moves)
            victim.swapped_since = step.plan.now
            self._classes.begin_wait(victim, step.plan.now)
            self.swapped.add(victim)
        else:
            victim.move_to(RequestStatus.WAITING)
            self.memory.drop(victim)
            self._classes.begin_wait_again(victim, step.plan.now)
            self.waiting.add(victim)
        victim.num_preemptions += 1
        step.plan.preempted.append((victim, mode))
        self.metrics.count_preemption(mode)

    def _weigh(self, victim: Request) -> Decision | None:
        """Which way out is cheaper for one that could be parked; None if nobody asks or knows."""
        if self.costs is None or self.config.preemption_mode != "auto":
            return None
        load = self.memory.leaving_load(victim)
        decision = decide(victim.request_id, load, self.costs)
        self.metrics.count_decision(decision.mode)
        logger.debug(
            "%s leaves by %s: swap %.2f ms (%d blocks out, %d in), recompute %.2f ms (%d tokens)",
            victim.request_id,
            decision.mode.value,
            1e3 * decision.swap_s,
            load.blocks_out,
            load.blocks_in,
            1e3 * decision.recompute_s,
            load.tokens,
        )
        return decision


def _before(relocated: list[BlockMove], moves: list[BlockMove]) -> list[BlockMove]:
    """The same moves out of the places that the blocks have before they are relocated."""
    if not relocated:
        return moves
    old_of = {move.dst: move.src for move in relocated}
    return [BlockMove(old_of.get(move.src, move.src), move.dst) for move in moves]
