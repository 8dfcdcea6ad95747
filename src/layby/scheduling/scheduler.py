"""The three queues and the step: swapped first, running next, waiting last; a budget pays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from layby.errors import ConfigError, InvalidRequestError
from layby.scheduling.blocks import BlockPool, PoolState
from layby.scheduling.budget import SchedulingBudget
from layby.scheduling.classes import Classes
from layby.scheduling.config import SchedulerConfig
from layby.scheduling.costs import MoveCosts
from layby.scheduling.entry import Entry, Fit
from layby.scheduling.intake import Intake
from layby.scheduling.kept import KVPlace, KVTables, check_kept, locate, take_place
from layby.scheduling.memory import KVMemory
from layby.scheduling.metrics import SchedulerMetrics
from layby.scheduling.plan import ScheduledSequence, StepPlan, TransferEnd
from layby.scheduling.policy import POLICIES, Phase, Policy
from layby.scheduling.preemption import Preemption
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import (
    FinishReason,
    Request,
    RequestStatus,
    Sequence,
    check_priority,
)
from layby.scheduling.reserve import UrgentRoom
from layby.scheduling.steady import SteadyDecodes
from layby.scheduling.step import Shares, Step
from layby.scheduling.tiers import SwapTiers


@dataclass(frozen=True, slots=True)
class IdleState:
    """Everything the decisions of a scheduler without requests depend on, but its configuration.

    Attributes:
        num_steps, num_added, num_transfers: Steps decided, requests accepted and transfers begun so
            far: all are numbered on.
        device, swap, disk: The block pools.
    """

    num_steps: int
    num_added: int
    num_transfers: int
    device: PoolState
    swap: PoolState
    disk: PoolState


class Scheduler:
    """Decides, step by step, which requests compute and which are parked.

    Usage: ``plan = schedule()``, run the plan, ``update(plan, tokens)``, again. Requests may be
    added and finished between ``update`` and the next ``schedule``, and aborted at any time; what
    a step brings for an aborted request is ignored.

    Args:
        config: Pool sizes and limits.
        clock: Seconds; read once in ``schedule`` and once in ``update``. A simulator hands in its
            own.
        policy: Used instead of the one that ``config`` names.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        policy: Policy | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.policy = policy or POLICIES[config.policy](
            preemption_mode=config.preemption_mode, headroom=config.headroom
        )
        self.memory = KVMemory(
            config.num_blocks,
            config.num_swap_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_disk_blocks=config.num_disk_blocks,
        )
        self._intake = Intake(config, self.memory)
        self._urgent = UrgentRoom(config.urgent_window)
        self.waiting = RequestQueue(self.policy.urgency)
        self.running = RequestQueue(self.policy.urgency)
        self.swapped = RequestQueue(self.policy.urgency)
        self._executor_blocks = config.num_blocks  # what it was last told of the device pool
        self.requests: dict[str, Request] = {}
        # The running queue again, divided: those that go on by themselves, and the others.
        self._steady = SteadyDecodes()
        self._attended: set[Request] = set()
        self.metrics = SchedulerMetrics()
        self._queues = {
            RequestStatus.WAITING: self.waiting,
            RequestStatus.RUNNING: self.running,
            RequestStatus.SWAPPED: self.swapped,
        }
        self._classes = Classes(config, self._queues, self.metrics)
        self.tiers = SwapTiers(self.memory, self.swapped, self.metrics)
        self._shares = Shares(self.memory, self.waiting, self._urgent)
        self._entry = Entry(
            config, self.policy, self.memory, self.tiers, self._urgent, self._queues
        )
        self._preemption = Preemption(
            config,
            self.policy,
            self.memory,
            self.tiers,
            self._classes,
            self._queues,
            self.metrics,
            entry=self._entry,
            shares=self._shares,
            leave_running=self._leave_running,
        )
        self._num_steps = 0
        self._num_added = 0
        self._open_plan: StepPlan | None = None
        self._is_quiet = False  # nothing but decoding happened since the last step was decided
        self._quiet_until = math.inf  # when more room may be given than in that step
        self._num_queued_seqs = 0  # samples of requests that were never admitted
        self._num_placed_seqs = 0  # live sequences of all others

    # --- coming in ---

    def add_request(self, request: Request, *, was_accepted: bool = False) -> None:
        """Put a new request in the waiting queue.

        Args:
            request: A new one, or one that continues from what an earlier process had.
            was_accepted: An earlier process accepted it, so the queue's limit is not asked.

        Raises:
            InvalidRequestError: Its id is taken, it has been added before, or it wants more
                samples or tokens than allowed.
            RequestTooLargeError: It would not fit in the device pool even alone.
            QueueFullError: ``max_queue`` is reached.
        """
        self._check_new(request, was_accepted=was_accepted)
        self._take_in(request)
        self.waiting.add(request)
        self._num_queued_seqs += request.n

    def add_parked(self, request: Request, kept: KVTables) -> KVPlace | None:
        """Put a request in the swapped queue whose KV an earlier process has kept.

        Its blocks are taken, and must be filled before the next step; if they cannot be, call
        ``lose_kv``. Who was parked by the end of a process is treated as who was preempted.

        Args:
            request: As for ``add_request``; an earlier process accepted it.
            kept: What is kept of it, in blocks of any numbers.

        Returns:
            The blocks to fill, in RAM or on disk, in the order of ``kept``. None if there is no
            room for them: the request has not been added.

        Raises:
            InvalidRequestError, RequestTooLargeError: As ``add_request``.
            ValueError: It cannot go on from what is kept.
        """
        self._check_new(request, was_accepted=True)
        check_kept(self.memory, request, kept)
        place = take_place(self.memory, request, kept)
        if place is None:
            return None
        self._take_in(request)
        request.move_to(RequestStatus.SWAPPED)
        request.swapped_since = self.clock()
        request.num_preemptions = 1
        self.swapped.add(request)
        self.tiers.reorder()
        self._num_placed_seqs += request.num_live_seqs
        return place

    def locate_kv(self, request: Request) -> KVPlace | None:
        """Where the KV of a live request lies, between two steps; None: there is none of use."""
        return locate(self.memory, request, is_in_ram=self.tiers.is_in_ram(request))

    def _check_new(self, request: Request, *, was_accepted: bool) -> None:
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"a request with id {request.request_id!r} is already being served",
                param="request_id",
            )
        if request.order or request.status is not RequestStatus.WAITING:
            raise InvalidRequestError(
                f"request {request.request_id!r} was added before and is {request.status.value}",
                param="request_id",
            )
        self._intake.check_size(request)
        if not was_accepted:
            self._intake.check_queue(request, self._num_queued_seqs, self._num_placed_seqs)

    def _take_in(self, request: Request) -> None:
        """Number a request that comes; the caller puts it in a queue."""
        if request.arrival_time is None:
            request.arrival_time = self.clock()
        self._num_added += 1
        request.order = self._num_added
        self.requests[request.request_id] = request
        since, request.waits_since = request.waits_since, None
        self._classes.begin_wait(request, request.arrival_time if since is None else since)
        self._is_quiet = False
        self.metrics.requests_accepted += 1

    def check_size(self, request: Request) -> None:
        """Refuse what could never be served; raises as ``add_request``, which does so, too."""
        self._intake.check_size(request)

    def check_lengths(self, num_prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        """The same for a request that has not been made yet."""
        self._intake.check_lengths(num_prompt_tokens, max_tokens, n)

    def max_output_tokens(self, num_prompt_tokens: int, n: int = 1) -> int:
        """Largest ``max_tokens`` that context and device pool allow; 0 or less if none does."""
        return self._intake.max_output_tokens(num_prompt_tokens, n)

    def waited_s(self, request: Request) -> float:
        """Seconds that a live request has waited, as far as they count for its class."""
        return self._classes.waited_s(request, self.clock())

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Put a live request into another class, in whichever queue it is; from the next step on.

        Its claims by waiting and its run begin anew.

        Returns:
            Whether there is such a request.

        Raises:
            InvalidRequestError: ``priority`` is no integer.
        """
        check_priority(request_id, priority)
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._classes.set_priority(request, priority, self.clock())
        self._is_quiet = False
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running or swapped."""
        return bool(self.requests)

    # --- one step ---

    def schedule(self) -> StepPlan:
        """Decide one step. The plan must be executed, and ``update`` called, before the next.

        Raises:
            RuntimeError: ``update`` has not been called for the plan before.
        """
        step = self._stand_fast()
        if self.is_resizing:
            self._change_pool(step)
        if self.config.preemption_threshold < 1:
            self._preemption.park_ahead(step)
        step.has_cleared = bool(step.plan.preempted)
        for phase in self.policy.phases:
            match phase:
                case Phase.SWAPPED:
                    self._schedule_swapped(step)  # let parked work back in
                case Phase.RUNNING:
                    self._schedule_running(step)  # give running work its next tokens
                case Phase.WAITING:
                    self._schedule_waiting(step)  # admit new work with what is left
        self._shares.spend_rest(step)
        self._pause(step)
        self._tend_tiers(step)
        return self._commit_step(step)

    def _stand_fast(self) -> Step:
        """Running work keeps its place: a seat and a token per sequence, and the blocks it needs
        for this step, are its own before anybody else is looked at."""
        if self._open_plan is not None:
            raise RuntimeError(f"step {self._open_plan.step} was scheduled and not updated")
        self._num_steps += 1
        step = Step(
            plan=StepPlan(step=self._num_steps, now=self.clock()),
            budget=SchedulingBudget(self.config.max_num_batched_tokens, self.config.max_num_seqs),
            background_tokens=self.config.background_tokens,
        )
        self._classes.promote(step.plan.now)
        self._classes.demote(self._num_steps)
        if self._classes.changes:
            self.tiers.reorder()
        for request in self._attended:
            self._shares.take_seat(request, step)
        self._grow_steady(step)
        step.budget.add(num_tokens=len(self._steady), num_seqs=len(self._steady))
        return step

    def _grow_steady(self, step: Step) -> None:
        """Steady decodes that have filled their last block get the next one and go on; if blocks
        are short, they are attended to, because somebody must go."""
        due = self._steady.due(self._num_steps)
        if len(due) + step.set_aside_blocks <= self.memory.device.num_free:
            for request in due:
                self.memory.append_blocks(request.sequences[0], 1)
                self._steady.renew(request, until_step=self._num_steps + self.config.block_size)
            return
        for request in due:
            self._steady.discard(request)
            self._classes.forget_demotion(request)
            self._attended.add(request)
            self._shares.take_seat(request, step)

    def _commit_step(self, step: Step) -> StepPlan:
        """Put the plan together and note the peaks."""
        plan = step.plan
        plan.scheduled = self._steady.turns()
        plan.num_steady = len(plan.scheduled)
        plan.class_changes, self._classes.changes = self._classes.changes, []
        plan.scheduled += step.scheduled
        plan.num_tokens = plan.num_steady + sum(item.num_tokens for item in step.scheduled)
        plan.num_samples = plan.num_steady + sum(len(item.samplers) for item in step.scheduled)
        head = self.swapped.head
        plan.next_in = head if head is not None and self.tiers.is_in_ram(head) else None
        metrics = self.metrics
        metrics.swapped_queue_size_max = max(metrics.swapped_queue_size_max, len(self.swapped))
        metrics.kv_usage_max = max(metrics.kv_usage_max, self.memory.device.usage)
        self._open_plan = plan
        self._is_quiet = not (step.scheduled or plan.preempted)
        self._quiet_until = self._urgent.changes_at(plan.now)
        return plan

    def _schedule_swapped(self, step: Step) -> None:
        """Bring parked requests back, most urgent first; nobody overtakes the first that must
        stay. A more urgent class that waits goes ahead, and nobody comes back for whose equals, or
        betters, somebody has just left."""
        if step.has_cleared or (step.plan.preempted and not self.policy.resumes_after_preemption):
            return
        while (request := self.swapped.head) is not None:
            newcomer = self.waiting.head
            if newcomer is not None and self.policy.may_admit(newcomer, [request]):
                return
            if any(request.rank >= victim.rank for victim in step.preempted):
                return
            if self._entry.can_resume(request, step) is Fit.LATER:
                self._preemption.make_room(request, step)
                if self._entry.can_resume(request, step) is Fit.LATER:
                    return
            self._resume(request, step)

    def _schedule_running(self, step: Step) -> None:
        """Give each running request blocks and tokens, most urgent first; when blocks run out,
        the least urgent is preempted, which may be the request itself."""
        for request in sorted(self._attended, key=self.policy.urgency):
            if request.status is not RequestStatus.RUNNING or request in step.planned:
                continue
            while (growth := self.memory.growth(request)) > self.memory.device.num_free:
                candidates = [r for r in self.running if r not in step.entered]
                victim = self._preemption.victim(candidates, step)
                self._preemption.preempt(victim, step)
                if victim is request:
                    break
            else:
                step.set_aside_blocks -= growth
                self._shares.plan_tokens(request, step)

    def _schedule_waiting(self, step: Step) -> None:
        """Admit new requests, most urgent first, unless parked or just preempted work of the same
        urgency has a better claim; the first that must stay ends it."""
        while (request := self.waiting.head) is not None:
            parked = self.swapped.head  # the most urgent of the parked speaks for all
            blockers = step.preempted if parked is None else [parked, *step.preempted]
            if not self.policy.may_admit(request, blockers):
                return
            if self._entry.can_admit(request, step) is Fit.LATER:
                self._preemption.make_room(request, step)
                if self._entry.can_admit(request, step) is Fit.LATER:
                    return
            self._admit(request, step)

    def _tend_tiers(self, step: Step) -> None:
        """Let parked work move between RAM and disk."""
        while given_up := self.tiers.tend(step.plan, is_idle=not self.running):
            for request in given_up:
                self._lose(request, step.plan.now)
            step.plan.lost += given_up

    # --- verbs: status, memory and queue change together ---

    def _resume(self, request: Request, step: Step) -> None:
        """swapped → running."""
        self.swapped.remove(request)
        request.move_to(RequestStatus.RUNNING)
        num_parked = self.memory.parked_blocks(request)
        moves = self.memory.resume(request)
        self.tiers.forget(request)
        step.plan.swap_in += moves
        step.plan.resumed.append(request)
        step.entered.add(request)
        request.entered_step = self._num_steps
        self._join_running(request, step)
        self._end_parking(request, step.plan.now)
        self.metrics.swapped_in_blocks += len(moves)
        self.metrics.swap_in_reused_blocks += num_parked - len(moves)

    def _admit(self, request: Request, step: Step) -> None:
        """waiting → running."""
        self._leave_waiting(request)
        request.move_to(RequestStatus.RUNNING)
        self.metrics.prefix_cache_hit_tokens += self.memory.admit(request)
        self.metrics.prefix_cache_queried_tokens += sum(
            seq.num_tokens for seq in request.live_sequences
        )
        step.plan.admitted.append(request)
        step.entered.add(request)
        request.entered_step = self._num_steps
        self._join_running(request, step)
        self._shares.plan_tokens(request, step)
        self._entry.note_need(request, step.plan.now)

    def _finish(self, request: Request, now: float) -> None:
        """any state → finished, once every sequence has ended."""
        match request.status:
            case RequestStatus.WAITING:
                self._leave_waiting(request)
                self._classes.end_wait(request, now)
            case RequestStatus.SWAPPED:
                self.swapped.remove(request)
                self._classes.end_wait(request, now)
                self.tiers.forget(request)
                self._end_parking(request, now)
            case _:
                self._entry.note_need(request, now)
                self._leave_running(request)
        request.move_to(RequestStatus.FINISHED)
        self._is_quiet = False
        request.finish_time = now
        for seq in request.sequences:
            self.memory.release(seq)
        del self.requests[request.request_id]
        if self.memory.device.limit > self.memory.target_blocks:
            self._aim()  # it may have been the one that kept the pool large
        if not self.requests:
            self._urgent.forget()  # so that an idle scheduler has no past, see IdleState

    def _join_running(self, request: Request, step: Step) -> None:
        self._classes.end_wait(request, step.plan.now)
        self.running.add(request)
        self._attended.add(request)
        self._shares.take_seat(request, step)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self._classes.forget_demotion(request)
        if not self._steady.discard(request):
            self._attended.remove(request)

    def _leave_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.num_preemptions == 0:
            self._num_queued_seqs -= request.n
            self._num_placed_seqs += request.num_live_seqs

    def _end_parking(self, request: Request, now: float) -> None:
        assert request.swapped_since is not None
        duration_s = max(0.0, now - request.swapped_since)
        request.swapped_since = None
        request.swapped_s += duration_s
        self.metrics.count_swapped(duration_s)

    # --- what a step takes back ---

    def _pause(self, step: Step) -> None:
        """Decodes less urgent than a prompt that is computed sit this step out, which makes it
        shorter. In the next they are attended to, so nobody misses two on end."""
        if not self._urgent.window_s or step.prefill_class == math.inf:
            return
        for request in self.running:
            if request.rank > step.prefill_class and self._steady.discard(request):
                self._classes.forget_demotion(request)
                self._attended.add(request)
                step.plan.paused.append(request.sequences[0])

    # --- what a step brought ---

    def update(self, plan: StepPlan, tokens: SequenceOf[int]) -> list[Request]:
        """Take the step's outcome; returns the requests that it finished.

        Args:
            plan: What ``schedule`` returned last.
            tokens: One token id for every sampler, in plan order.

        Raises:
            ValueError: The plan is another one, or the number of tokens is not that of samplers.
        """
        if plan is not self._open_plan:
            raise ValueError(f"step {plan.step} is not the one that was scheduled last")
        if len(tokens) != plan.num_samples:
            raise ValueError(f"the plan samples {plan.num_samples} tokens, got {len(tokens)}")
        now = self.clock()
        self._open_plan = None
        self.memory.settle()
        finished: list[Request] = []
        self._update_steady(plan, tokens, now, finished)
        sampled = iter(tokens[plan.num_steady :])
        for item in plan.scheduled[plan.num_steady :]:
            request = item.sequence.request
            if not request.is_finished:  # aborted in the meantime
                self._commit(item)
            for seq in item.samplers:
                token = next(sampled)
                if request.is_finished or seq.is_finished:
                    continue
                reason = self._append(seq, token, now)
                if reason is not None and self._end_sequence(seq, reason, now):
                    finished.append(request)
            self._classes.has_run(item.sequence)
            self._settle_down(request)
        return finished

    def _update_steady(
        self, plan: StepPlan, tokens: SequenceOf[int], now: float, finished: list[Request]
    ) -> None:
        """As the loop in ``update``, for sequences that only decode. It runs once per sequence
        and step, so it does nothing that can be known beforehand."""
        for item, token in zip(plan.scheduled[: plan.num_steady], tokens, strict=False):
            item.start += 1
            seq = item.sequence
            if seq.finish_reason is not None:  # aborted in the meantime
                continue
            seq.tokens.append(token)
            if len(seq.tokens) >= seq.most_tokens or token in seq.stop_token_ids:
                reason = self._reason_to_end(seq, token)
                if reason is not None and self._end_sequence(seq, reason, now):
                    finished.append(seq.request)

    def _settle_down(self, request: Request) -> None:
        """Let a request go on by itself if its next decode steps need no decision."""
        if request.n > 1 or request.is_finished or not request.sequences[0].is_decoding:
            return
        seq = request.sequences[0]
        room = len(seq.block_table) * self.config.block_size - seq.num_tokens + 1
        if room > 0:
            self._attended.remove(request)
            self._steady.add(request, until_step=self._num_steps + room + 1)
            self._classes.book_demotion(request, self._num_steps)

    def _commit(self, item: ScheduledSequence) -> None:
        """The sequence's positions are stored; those done before count as recomputed."""
        seq, request = item.sequence, item.sequence.request
        end = item.start + item.num_tokens
        self.metrics.recomputed_tokens += max(0, min(end, seq.most_computed) - item.start)
        seq.num_computed = end
        seq.most_computed = max(seq.most_computed, end)
        self.memory.publish(seq)
        if len(item.samplers) > 1:
            self.memory.fork(request)
        if request.prefix_owner is seq and (
            end // self.config.block_size >= request.num_prompt_tokens // self.config.block_size
        ):
            request.prefix_owner = None

    def _append(self, seq: Sequence, token: int, now: float) -> FinishReason | None:
        """Add a sampled token; says whether and why the sequence ends with it."""
        seq.tokens.append(token)
        seq.is_decoding = True
        if seq.request.first_token_time is None:
            seq.request.first_token_time = now
        return self._reason_to_end(seq, token)

    def _reason_to_end(self, seq: Sequence, token: int) -> FinishReason | None:
        """Whether and why a sequence ends with its last token."""
        if token in seq.stop_token_ids and seq.num_output_tokens > seq.request.min_tokens:
            seq.stop_token = token
            return FinishReason.STOP
        return FinishReason.LENGTH if seq.num_tokens >= seq.most_tokens else None

    def _end_sequence(self, seq: Sequence, reason: FinishReason, now: float) -> bool:
        """End one sequence; True if that ends its request."""
        request = seq.request
        seq.finish_reason = reason
        self._num_placed_seqs -= 1
        self.memory.release(seq)
        if request.num_live_seqs:
            return False
        self._finish(request, now)
        self.metrics.requests_finished += 1
        return True

    # --- what parked work went through ---

    def transfers_ended(self, ends: Iterable[TransferEnd]) -> list[Request]:
        """Take the ends of transfers between RAM and disk, after ``update``.

        Returns:
            Requests whose KV could not be read back; they are in the waiting queue now.

        Raises:
            ValueError: There is no such transfer.
        """
        lost = []
        now = self.clock()
        for end in ends:
            self._is_quiet = False
            if (request := self.tiers.end(end)) is not None:
                self._lose(request, now)
                lost.append(request)
        return lost

    def lose_kv(self, request_id: str) -> bool:
        """swapped → waiting: a parked request's KV is gone, and is to be computed again.

        Returns:
            False if no request of this id is parked.
        """
        request = self.requests.get(request_id)
        if request is None or request.status is not RequestStatus.SWAPPED:
            return False
        self._lose(request, self.clock())
        return True

    def _lose(self, request: Request, now: float) -> None:
        self.swapped.remove(request)
        self.tiers.forget(request)
        self._classes.end_wait(request, now)
        request.move_to(RequestStatus.WAITING)
        self.memory.lose(request)
        self._end_parking(request, now)
        self._classes.begin_wait_again(request, now)
        self.waiting.add(request)
        self._is_quiet = False
        self.metrics.kv_losses += 1

    # --- many steps at once ---

    def quiet_steps(self) -> int:
        """How many of the next steps hold no decision, if nothing comes from outside.

        In such a step every running sequence decodes one token, takes a block where it needs one,
        and goes on; who waits or is parked had no room in the last step and has less in these.
        A sequence that reaches ``max_tokens`` ends in a step of its own. 0 if unknown. Holds for
        steps that begin before ``quiet_until()``.
        """
        if not self._is_quiet or self._attended or self._open_plan is not None:
            return 0
        if self.tiers.num_transfers:
            return 0  # their ends come from outside
        if self.config.preemption_threshold < 1 and self._yields_any():
            return 0
        if self.quiet_until() <= self.clock():
            return 0
        sequences = [item.sequence for item in self._steady.turns()]
        steps = min((seq.most_tokens - len(seq.tokens) for seq in sequences), default=1) - 1
        to_demotion = self._classes.steps_to_demotion(self._num_steps)
        steps = steps if to_demotion is None else min(steps, to_demotion)
        if self._blocks_to_grow(sequences, steps) <= self.memory.device.num_free:
            return steps
        return self._steady.steps_with(
            self.memory.device.num_free,
            after_step=self._num_steps,
            most=min(steps, self.config.block_size),
        )

    def quiet_until(self) -> float:
        """When ``quiet_steps`` ends by the clock alone, in seconds on it: room that was kept for
        urgent work is given up then, and somebody may come in, or somebody who waits rises.
        Infinity if it does not."""
        if not (self.swapped or self.waiting):
            return math.inf
        return min(self._quiet_until, self._classes.next_rise)

    def _yields_any(self) -> bool:
        least = self.running.tail
        return least is not None and self._entry.yields(least, self.clock())

    def skip(self, steps: int, next_token: Callable[[Sequence], int]) -> None:
        """Take so many steps at once.

        As so many calls of ``schedule`` and ``update`` while the clock stands still, at the price
        of one, except that new blocks may be dealt out in another order. For simulators, which know
        the tokens beforehand.

        Args:
            steps: At most ``quiet_steps()``.
            next_token: What the sequence samples in each of them; nothing that ends it.
        """
        block_size = self.config.block_size
        first = self._num_steps + 1
        self._num_steps += steps
        self._steady.forget_bookings(range(first, first + steps))
        for item in self._steady.turns():
            seq = item.sequence
            seq.tokens.extend([next_token(seq)] * steps)
            item.start += steps
            room = len(seq.block_table) * block_size - len(seq.tokens) + 1
            if room < 0:
                self.memory.append_blocks(seq, -(room // block_size))
                room %= block_size
                self._steady.renew(seq.request, until_step=self._num_steps + room + 1)
        self.metrics.kv_usage_max = max(self.metrics.kv_usage_max, self.memory.device.usage)

    @property
    def steady_decodes(self) -> list[ScheduledSequence]:
        """Their shares of the next step: of those that go on decoding by themselves."""
        return self._steady.turns()

    def _blocks_to_grow(self, sequences: list[Sequence], steps: int) -> int:
        """Blocks that so many more steps of decoding take."""
        size = self.config.block_size
        return sum(
            max(0, (len(seq.tokens) + steps - 2) // size + 1 - len(seq.block_table))
            for seq in sequences
        )

    # --- the pool's size ---

    def resize(self, num_blocks: int) -> None:
        """Give the device pool another size; the next step makes it so.

        Who must give way is parked, the least urgent first. Whatever was accepted must still be
        able to finish: while a live request may come to need more blocks than these, the pool
        stays as large as that, and shrinks further as such requests end. New requests must fit
        into ``num_blocks`` from now on. The swap pool stays as it is.

        Raises:
            ConfigError: ``num_blocks`` is no whole number from 1 up.
        """
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ConfigError(f"num_blocks must be an integer of at least 1, got {num_blocks!r}")
        self.memory.target_blocks = num_blocks
        self._aim()

    @property
    def target_blocks(self) -> int:
        """Size of the device pool that was asked for last."""
        return self.memory.target_blocks

    @property
    def is_resizing(self) -> bool:
        """Whether the next step changes the size of the device pool."""
        return self.memory.device.limit != self._executor_blocks

    def _aim(self) -> None:
        """Go for the target, or for what the most demanding live request may come to need."""
        needs = map(self.memory.worst_case_blocks, self.requests.values())
        limit = max(self.memory.target_blocks, max(needs, default=0))
        if limit != self.memory.device.limit:
            self.memory.device.resize(limit)
            self._is_quiet = False

    def _change_pool(self, step: Step) -> None:
        """Empty the blocks that are given up, by parking if there is no room for what they hold.

        One running request at least stays: the pool is never smaller than its need.
        """
        device = self.memory.device
        while len(self.running) > 1 and (
            device.num_stranded + step.set_aside_blocks > device.num_free
        ):
            self._preemption.preempt(self.policy.victim(self.running), step)
        step.plan.relocate, moved = self.memory.relocate(self.running)
        for request in moved:  # who knows their block tables by heart must look again
            if self._steady.discard(request):
                self._classes.forget_demotion(request)
                self._attended.add(request)
        device.trim()
        step.plan.num_blocks = self._executor_blocks = device.limit

    # --- costs ---

    @property
    def costs(self) -> MoveCosts | None:
        """What ``preemption_mode=auto`` decides by; None: not known, and victims are parked."""
        return self._preemption.costs

    def set_costs(self, costs: MoveCosts) -> None:
        """Decide by these costs from the next step on."""
        self._preemption.costs = costs

    # --- ending early ---

    def finish_sequence(self, seq: Sequence, reason: FinishReason = FinishReason.STOP) -> bool:
        """End one sequence between steps (a stop string was found); True if its request ends.

        A sequence that has ended already is left alone.

        Raises:
            ValueError: It has no output yet, so that nothing can have been found in it.
        """
        if seq.is_finished:
            return False
        if seq.num_output_tokens == 0:
            raise ValueError(f"{seq!r} has no output to end")
        return self._end_sequence(seq, reason, self.clock())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """End a request between steps, in whichever queue it is, and free what it holds.

        Returns:
            The request, or None if there is none of this id (any more).
        """
        request = self.requests.get(request_id)
        if request is None:
            return None
        num_live = request.num_live_seqs
        self._finish(request, self.clock())
        self._num_placed_seqs -= num_live
        for seq in request.live_sequences:
            seq.finish_reason = reason
        self.metrics.requests_aborted += 1
        return request

    # --- looking in ---

    @property
    def device_pool(self) -> BlockPool:
        """The blocks the model attends to."""
        return self.memory.device

    @property
    def swap_pool(self) -> BlockPool:
        """The blocks parked work lies in."""
        return self.memory.swap

    @property
    def disk_pool(self) -> BlockPool:
        """The blocks on disk below it."""
        return self.memory.disk

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there, in flight or about to happen: pools that nobody uses."""
        is_busy = self.requests or self._open_plan is not None or self.tiers.num_transfers
        return not (is_busy or self.is_resizing or self._classes.changes)

    def idle_state(self) -> IdleState:
        """What to ``restore`` in a new scheduler, for it to decide as this one will.

        Raises:
            ValueError: It is not idle.
        """
        self._check_idle()
        return IdleState(
            self._num_steps,
            self._num_added,
            self.tiers.num_begun,
            self.memory.device.idle_state(),
            self.memory.swap.idle_state(),
            self.memory.disk.idle_state(),
        )

    def restore(self, state: IdleState) -> None:
        """Go on where an idle scheduler of the same configuration was.

        The device pool gets the size that it had.

        Raises:
            ValueError: This one is not idle, or the state is of no such scheduler.
        """
        self._check_idle()
        num_blocks = len(state.device.free) + len(state.device.cached)
        if num_blocks != self.memory.device.num_blocks:
            self.memory.device.resize(num_blocks)
            self.memory.device.trim()
            self.memory.target_blocks = self._executor_blocks = num_blocks
        self.memory.device.restore(state.device)
        self.memory.swap.restore(state.swap)
        self.memory.disk.restore(state.disk)
        self._num_steps, self._num_added = state.num_steps, state.num_added
        self.tiers.num_begun = state.num_transfers

    def _check_idle(self) -> None:
        if not self.is_idle:
            raise ValueError(f"the scheduler is not idle: it has {len(self.requests)} requests")

    def check_integrity(self) -> None:
        """Verify that queues, requests and block pools agree.

        Costs O(blocks); meant for tests and debugging.

        Raises:
            AssertionError: They do not.
        """
        assert sum(map(len, self._queues.values())) == len(self.requests)
        steady = {item.sequence.request for item in self._steady.turns()}
        assert steady | self._attended == set(self.running)
        assert not steady & self._attended
        placed = [r for r in self.requests.values() if r.num_preemptions or r not in self.waiting]
        assert self._num_placed_seqs == sum(r.num_live_seqs for r in placed)
        assert self._num_queued_seqs == sum(r.n for r in self.waiting if r.num_preemptions == 0)
        for request in self.requests.values():
            assert request in self._queues[request.status]
            for seq in request.sequences:
                assert not seq.block_table or request.status is RequestStatus.RUNNING
                assert not seq.swap_table or request.status is RequestStatus.SWAPPED
                assert not seq.disk_table or request.status is RequestStatus.SWAPPED
        last_step = self._num_steps - (self._open_plan is not None)
        self._classes.check_integrity(self.requests.values(), steady, last_step)
        self.tiers.check_integrity(self.requests.values())
        if not self.is_resizing:
            assert self.memory.device.num_stranded == 0
