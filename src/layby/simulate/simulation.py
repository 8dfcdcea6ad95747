"""The loop: requests of a trace arrive, the scheduler decides, the clock moves, somebody watches.

Scheduler, policies, block pools and admission are those of the server. Where the scheduler says
that the next steps hold no decision, they are taken at once: a steady decode costs by what changes,
not by token.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layby.engine.pressure import Load, LoadShedding, PressureGauge, PressureState
from layby.errors import InvalidRequestError, LaybyError, QueueFullError
from layby.scheduling import Request, RequestStatus, Scheduler, SchedulerConfig
from layby.scheduling import Sequence as Sample
from layby.scheduling.plan import PreemptionMode, ScheduledSequence, StepPlan
from layby.simulate.events import DecisionLog, Refusals
from layby.simulate.executor import (
    TOKEN,
    SimulatedExecutor,
    VirtualClock,
    make_request,
    payload_of,
)
from layby.simulate.observations import RequestLog, SimulationReport, TierMoves, Timeline
from layby.simulate.profiles import Profile
from layby.simulate.resizes import written_resizes
from layby.simulate.settings import with_block_size
from layby.simulate.traces import Trace

COLUMNS = (
    "waiting",
    "running",
    "swapped",
    "kv_usage",
    "swap_usage",
    "num_blocks",
    "pressure",
)
"""What is recorded over time; ``pressure`` as the place of its state in ``PressureState``."""

_PLACES = {state: place for place, state in enumerate(PressureState)}

STALL_STEPS = 100
"""So many steps on end that plan nothing while work is there: the engine gives up, too."""


class StalledError(LaybyError):
    """The scheduler planned nothing although there was work: a bug in Layby."""


@dataclass(slots=True)
class _Observer:
    """Watches a simulation and keeps what its report tells."""

    log: RequestLog
    priorities: frozenset[int]
    timeline: Timeline = field(default_factory=lambda: Timeline(COLUMNS))
    decisions: DecisionLog = field(default_factory=DecisionLog)
    # When the last token came of those that have not got one in every step since, and how long
    # they were then.
    _last_tokens: dict[Sample, tuple[float, int]] = field(default_factory=dict)
    _last_step_end: float = 0.0

    def decided(self, plan: StepPlan) -> None:
        """A step begins: some requests change their queue, some sit it out."""
        for decision in plan.decisions:
            self.decisions.add(plan.now, decision)
        for seq in plan.paused:
            self._last_tokens[seq] = (self._last_token_s(seq), len(seq.tokens))
        for request, mode in plan.preempted:
            for seq in request.sequences:
                self._last_tokens[seq] = (self._last_token_s(seq), len(seq.tokens))
            state = RequestStatus.SWAPPED if mode is PreemptionMode.SWAP else RequestStatus.WAITING
            payload_of(request).record.enter(state, plan.now)
        for request in (*plan.resumed, *plan.admitted):
            payload_of(request).record.enter(RequestStatus.RUNNING, plan.now)
        for request in plan.lost:
            payload_of(request).record.enter(RequestStatus.WAITING, plan.now)

    def sampled(self, plan: StepPlan, finished: Sequence[Request], now: float) -> None:
        """A step has ended."""
        self.decoded(plan.scheduled[: plan.num_steady], [now])
        for item in plan.scheduled[plan.num_steady :]:
            for seq in item.samplers:
                record = payload_of(seq.request).record
                if seq.num_output_tokens > 1:
                    self._gap(record.priority, now - self._last_token_s(seq, before=1), 1)
                elif record.first_token_s is None:
                    record.first_token_s = now
                self._last_tokens[seq] = (now, len(seq.tokens))
        for request in finished:
            tokens = 0
            for seq in request.sequences:
                tokens += seq.num_output_tokens
                self._last_tokens.pop(seq, None)
            self.log.finish(payload_of(request).record, now, tokens)

    def decoded(self, items: Sequence[ScheduledSequence], step_ends: Sequence[float]) -> None:
        """These got a token in each of so many steps, and in the step before those."""
        if not items:
            return
        if len(self.priorities) == 1:
            shares = [(items[0].sequence.request.priority, len(items))]
        else:
            shares = list(Counter(item.sequence.request.priority for item in items).items())
        before = self._last_step_end
        for end in step_ends:
            for priority, count in shares:
                self._gap(priority, end - before, count)
            before = end

    def passed(self, now: float) -> None:
        """Steps have ended."""
        self._last_step_end = now

    def _gap(self, priority: int, seconds: float, count: int) -> None:
        self.log.of_class(priority).itl_s.add(seconds, count)

    def _last_token_s(self, seq: Sample, before: int = 0) -> float:
        """When the sequence's last token but ``before`` came."""
        known = self._last_tokens.get(seq)
        if known is not None and known[1] == len(seq.tokens) - before:
            return known[0]
        return self._last_step_end


class Simulation:
    """One trace on one machine under one scheduler configuration.

    Args:
        trace: What arrives.
        profile: What a step costs; blocks are as large as ``config`` has them.
        config: The scheduler's settings.
        log: Where requests are noted; one without SLO or CSV file if None.
        shed_load: Refuse new work of the lowest class while memory is saturated, as the engine
            does.
        pressure: Says when that is; one with the usual marks if None.
        skips: Whether steps without a decision are taken at once. It changes nothing but the time
            that the simulation takes; a test compares.
    """

    def __init__(
        self,
        trace: Trace,
        profile: Profile,
        config: SchedulerConfig,
        *,
        log: RequestLog | None = None,
        shed_load: bool = False,
        pressure: PressureGauge | None = None,
        skips: bool = True,
    ) -> None:
        profile = with_block_size(profile, config.block_size)
        self.trace = trace
        self.profile = profile
        self.clock = VirtualClock()
        self.scheduler = Scheduler(config, clock=self.clock)
        self.scheduler.set_costs(profile.cost.move_costs(config.max_num_batched_tokens))
        self.executor = SimulatedExecutor(profile.cost, self.clock)
        self.pressure = pressure or PressureGauge()
        self.refusals = Refusals()
        self.steps = 0
        self._shedding = LoadShedding(self.pressure) if shed_load else None
        self._resizes = deque(trace.resizes)
        self._skips = skips
        self._observer = _Observer(
            log or RequestLog(), frozenset(request.priority for request in trace.requests)
        )
        self._num_arrived = 0
        self._empty_steps = 0
        # Where a model stops before max_tokens, the scheduler cannot foresee the end.
        self._stops_early = any(request.max_tokens is not None for request in trace.requests)

    def run(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Play the trace to the end of its last request.

        Args:
            progress: Called now and then with requests ended, and requests of the trace.

        Raises:
            StalledError: The scheduler stopped planning.
        """
        total = len(self.trace.requests)
        told = 0
        while self._num_arrived < total or self._has_work:
            self._resize()
            self._arrive()
            if not self._has_work:
                self._note()
                if self._num_arrived < total:  # idle until something happens
                    self.clock.now = max(self.clock.now, self._next_event_s)
                continue
            steps = self._quiet_steps() if self._skips else 0
            if steps:
                self._skip(steps)
            else:
                self._step()
            ended = self._num_arrived - len(self.scheduler.requests)
            if progress is not None and ended - told >= max(1, total // 200):
                told = ended
                progress(ended, total)
        self._note()
        if progress is not None:
            progress(total, total)

    def report(
        self, title: str, *, wall_s: float, settings: Mapping[str, object] | None = None
    ) -> SimulationReport:
        """What the run came to.

        Args:
            title: What sets it apart.
            wall_s: How long the simulation took.
            settings: What was asked for, besides trace, profile and scheduler.
        """
        metrics, block_bytes = self.scheduler.metrics, self.profile.block_bytes
        config = self.scheduler.config
        moves = [("ram", metrics.swapped_out_blocks, metrics.swapped_in_blocks)]
        if config.num_disk_blocks:
            moves.append(("disk", metrics.demoted_blocks, metrics.promoted_blocks))
        return SimulationReport.of(
            title,
            self._observer.log,
            self._observer.timeline,
            metrics,
            profile=f"{self.profile.name}: {self.profile.model} in {self.profile.dtype}, "
            f"{self.profile.kind}",
            simulated_s=self.clock.now,
            wall_s=wall_s,
            steps=self.steps,
            moves=[
                TierMoves(tier, out, back, out * block_bytes, back * block_bytes)
                for tier, out, back in moves
            ],
            settings={
                "trace": self.trace.name,
                "requests": len(self.trace),
                "requests_refused": self.refusals.total,
                "first_refusal": self.refusals.first_reason,
                # Whether max_tokens, which the scheduler goes by, is just what each answer takes.
                "answer_lengths_known": not self._stops_early,
                "resize": written_resizes(self.trace.resizes),
                "shed_load": self._shedding is not None,
                **{name: getattr(config, name) for name in config.__slots__},
                **(settings or {}),
            },
            machine=self.profile.machine,
            refusals=self.refusals,
            decisions=self._observer.decisions,
        )

    # --- the loop's parts ---

    @property
    def _has_work(self) -> bool:
        """Whether the server takes steps, be it only to give the pool its size."""
        return self.scheduler.has_unfinished or self.scheduler.is_resizing

    @property
    def _next_event_s(self) -> float:
        """When something comes from outside next; infinity if nothing does."""
        resize_s = self._resizes[0].at_s if self._resizes else math.inf
        if self._num_arrived == len(self.trace.requests):
            return resize_s
        return min(resize_s, self.trace.requests[self._num_arrived].arrival_s)

    def _resize(self) -> None:
        """Give the pool the size that it is to have by now; an idle server does so at once."""
        while self._resizes and self._resizes[0].at_s <= self.clock.now:
            size = self._resizes.popleft().blocks_of(self.scheduler.config.block_size)
            self.scheduler.resize(size)
            if self.scheduler.is_resizing and not self.scheduler.has_unfinished:
                self._step()

    def _arrive(self) -> None:
        """Queue everybody who has come by now, as a server does between two steps."""
        requests, now = self.trace.requests, self.clock.now
        while self._num_arrived < len(requests) and requests[self._num_arrived].arrival_s <= now:
            traced = requests[self._num_arrived]
            record = self._observer.log.start(
                traced.request_id or str(self._num_arrived),
                arrival_s=traced.arrival_s,
                num_prompt_tokens=traced.num_prompt_tokens,
                priority=traced.priority,
                n=traced.n,
            )
            self._num_arrived += 1
            most = traced.max_tokens or traced.num_output_tokens
            try:
                # First, because a trace may ask for prompts that no list could hold.
                self.scheduler.check_lengths(traced.num_prompt_tokens, most, traced.n)
                if not self._is_shed(traced.priority):
                    request = make_request(traced, record, self.profile.block_size)
                    self.scheduler.add_request(request)
                    self._gauge()
            except (InvalidRequestError, QueueFullError) as error:
                self.refusals.add(error, traced.priority)

    def _is_shed(self, priority: int) -> bool:
        """Whether a newcomer of this class is refused to shed load; then it is counted."""
        if self._shedding is None:
            return False
        scheduler = self.scheduler
        live = (request.priority for request in scheduler.requests.values())
        backlog = len(scheduler.waiting) + len(scheduler.swapped)
        try:
            self._shedding.check(self.clock.now, priority, live, backlog)
        except QueueFullError as error:
            self.refusals.add(error, priority, is_shed=True)
            return True
        return False

    def _gauge(self) -> None:
        """Let the pressure gauge look, as the engine does whenever something has changed."""
        now, scheduler = self.clock.now, self.scheduler
        if scheduler.has_unfinished and now < self.pressure.next_look_s:
            return
        before = self.pressure.state
        self.pressure.observe(
            now,
            Load(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                swapped=len(scheduler.swapped),
                finished=scheduler.metrics.requests_finished,
                kv_usage=scheduler.device_pool.usage,
                swap_usage=scheduler.swap_pool.usage,
            ),
        )
        if self.pressure.state is not before:
            self._note()

    def _step(self) -> None:
        """One step, as the engine takes it."""
        plan = self.scheduler.schedule()
        self._observer.decided(plan)
        self._note()
        result = self.executor.execute(plan)
        finished = self.scheduler.update(plan, result.tokens)
        self.scheduler.transfers_ended(result.transfer_ends)
        self.steps += 1
        self._observer.sampled(plan, finished, self.clock.now)
        self._observer.passed(self.clock.now)
        self._gauge()
        stalls = plan.is_empty and not (result.transfer_ends or self.scheduler.tiers.num_transfers)
        self._empty_steps = self._empty_steps + 1 if stalls else 0
        if self._empty_steps >= STALL_STEPS:
            raise StalledError(
                f"nothing was scheduled in {STALL_STEPS} steps, with requests "
                f"waiting {len(self.scheduler.waiting)}, swapped {len(self.scheduler.swapped)}"
            )

    def _quiet_steps(self) -> int:
        steps = self.scheduler.quiet_steps()
        if steps and self._stops_early:
            ends = (
                payload_of(item.sequence.request).most_tokens - len(item.sequence.tokens)
                for item in self.scheduler.steady_decodes
            )
            steps = min(steps, min(ends) - 1)
        return max(0, steps)

    def _skip(self, most_steps: int) -> None:
        """Take quiet steps until something comes, or the pressure gauge is to look."""
        items = self.scheduler.steady_decodes
        context = sum(item.start + 1 for item in items)
        base_s, slope_s = self.profile.cost.decode_line(len(items))
        until = min(self._next_event_s, self.scheduler.quiet_until(), self.pressure.next_look_s)
        now, ends = self.clock.now, list[float]()
        # One in any case: nobody comes before it, and whoever looks too early looks again.
        while not ends or (len(ends) < most_steps and now < until):
            now += base_s + slope_s * context
            context += len(items)
            ends.append(now)
        self._observer.decoded(items, ends)
        self._observer.passed(now)
        self.scheduler.skip(len(ends), lambda seq: TOKEN)
        self.clock.now = now
        self._gauge()
        self._note()
        self.steps += len(ends)

    def _note(self) -> None:
        """From now on it stands like this."""
        scheduler = self.scheduler
        self._observer.timeline.add(
            self.clock.now,
            (
                len(scheduler.waiting),
                len(scheduler.running),
                len(scheduler.swapped),
                scheduler.device_pool.usage,
                scheduler.swap_pool.usage,
                scheduler.device_pool.num_blocks,
                _PLACES[self.pressure.state],
            ),
        )


def simulate(
    trace: Trace,
    profile: Profile,
    config: SchedulerConfig,
    *,
    title: str | None = None,
    log: RequestLog | None = None,
    shed_load: bool = False,
    settings: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationReport:
    """Play a trace and sum up. Arguments as those of :class:`Simulation` and its methods."""
    started = time.perf_counter()
    simulation = Simulation(trace, profile, config, log=log, shed_load=shed_load)
    simulation.run(progress)
    return simulation.report(
        title or config.policy, wall_s=time.perf_counter() - started, settings=settings
    )
