"""A step while it is being decided, and what it gives to those who run: seats, blocks, tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layby.scheduling.budget import SchedulingBudget
from layby.scheduling.memory import KVMemory
from layby.scheduling.plan import ScheduledSequence, StepPlan
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import Request
from layby.scheduling.reserve import UrgentRoom


@dataclass(slots=True)
class Step:
    """A step while it is being decided.

    ``set_aside_blocks`` are device blocks that running work needs in this very step and has not
    taken yet: nobody who comes in may have them. ``entered`` came in during this step and is no
    victim in it; ``planned`` has its tokens, which are in ``scheduled``. Steady decodes appear in
    none of them. ``background_tokens`` are what less urgent prefills may still take;
    ``prefill_class`` is the most urgent class that prefills. ``has_cleared`` says that work was
    parked before any queue was looked at: then none comes back in this step.
    """

    plan: StepPlan
    budget: SchedulingBudget
    background_tokens: int
    prefill_class: float = math.inf
    has_cleared: bool = False
    set_aside_blocks: int = 0
    entered: set[Request] = field(default_factory=set)
    planned: set[Request] = field(default_factory=set)
    scheduled: list[ScheduledSequence] = field(default_factory=list)

    @property
    def preempted(self) -> list[Request]:
        """Who was preempted in it so far."""
        return [request for request, _ in self.plan.preempted]


class Shares:
    """Everybody's share of a step, promised or planned, and taken back from a victim.

    Args:
        memory: Where blocks come from.
        waiting: Those who want tokens of the step, too.
        urgent: Which classes were seen lately.
    """

    __slots__ = ("_urgent", "memory", "waiting")

    def __init__(self, memory: KVMemory, waiting: RequestQueue, urgent: UrgentRoom) -> None:
        self.memory = memory
        self.waiting = waiting
        self._urgent = urgent

    def take_seat(self, request: Request, step: Step) -> None:
        """Reserve the request's sequences, a token for each that can compute, and its growth."""
        step.budget.add(num_tokens=len(request.ready_sequences), num_seqs=request.num_live_seqs)
        step.set_aside_blocks += self.memory.growth(request)

    def plan_tokens(self, request: Request, step: Step) -> None:
        """Take the request's blocks and plan as many of its tokens as the budget still pays.

        The first token of each sequence is paid for already; an unfinished prefill takes more. It
        leaves what is left to a more urgent class that waits, and, if the prompt takes several
        steps anyway, half of it to its own: a long job does not block short ones.
        """
        step.planned.add(request)
        step.plan.copy += self.memory.grow(request)
        for seq in request.ready_sequences:
            item = ScheduledSequence(seq, seq.num_computed, 1, ())
            missing = seq.num_tokens - seq.num_computed
            self._extend(item, self._share(request, missing, step), step)
            step.scheduled.append(item)

    def _share(self, request: Request, missing: int, step: Step) -> int:
        """Tokens that a prefill may take before the waiting queue is looked at."""
        newcomer = self.waiting.head
        if newcomer is None or missing == 1:
            return step.budget.remaining_tokens
        if newcomer.claim < request.rank:
            return 0
        if missing > step.budget.token_budget:
            return step.budget.remaining_tokens // 2
        return step.budget.remaining_tokens

    def spend_rest(self, step: Step) -> None:
        """What nobody came for goes to the prefills that left it."""
        for item in step.scheduled:
            if step.budget.remaining_tokens == 0:
                return
            if not item.samplers:
                self._extend(item, step.budget.remaining_tokens, step)

    def _extend(self, item: ScheduledSequence, most_tokens: int, step: Step) -> None:
        """Plan up to so many more tokens of a sequence, and its sampling if it ends there."""
        seq, request = item.sequence, item.sequence.request
        missing = seq.num_tokens - item.start - item.num_tokens
        extra = min(missing, most_tokens)
        if extra and self._urgent.seen(request.rank, step.plan.now):
            # A long step is a long wait for the urgent one who comes while it runs.
            is_in_the_way = step.prefill_class < request.rank
            extra = 0 if is_in_the_way else min(extra, step.background_tokens)
            step.background_tokens -= extra
        if extra:
            step.prefill_class = min(step.prefill_class, request.rank)
        step.budget.add(num_tokens=extra, num_seqs=0)
        item.num_tokens += extra
        if extra < missing:
            return
        if not request.has_forked:
            request.fork()
            item.samplers = tuple(request.sequences)
        else:
            item.samplers = (seq,)

    def _tokens_of(self, request: Request, step: Step) -> int:
        """Tokens the step has promised or planned for the request."""
        if request not in step.planned:
            return len(request.ready_sequences)
        return sum(i.num_tokens for i in step.scheduled if i.sequence.request is request)

    def unplan(self, request: Request, step: Step) -> None:
        """Take back what the step has promised or planned for a running request."""
        step.budget.give_back(
            num_tokens=self._tokens_of(request, step), num_seqs=request.num_live_seqs
        )
        if request not in step.planned:
            step.set_aside_blocks -= self.memory.growth(request)  # none, if it is steady
            return
        step.planned.remove(request)
        mine = [item for item in step.scheduled if item.sequence.request is request]
        step.scheduled = [item for item in step.scheduled if item.sequence.request is not request]
        step.plan.copy = self.memory.undo_copies(request, step.plan.copy)
        if len(mine[0].samplers) > 1:
            request.unfork()
