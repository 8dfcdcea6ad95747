"""The loop: requests of a trace arrive, the scheduler decides, the clock moves, somebody watches.

Scheduler, policies, block pools and admission are those of the server. Where the scheduler says
that the next steps hold no decision, they are taken at once: a steady decode costs by what changes,
not by token.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from layby.errors import InvalidRequestError, LaybyError, QueueFullError
from layby.scheduling import Request, RequestStatus, Scheduler, SchedulerConfig
from layby.scheduling import Sequence as Sample
from layby.scheduling.plan import PreemptionMode, ScheduledSequence, StepPlan
from layby.simulate.executor import (
    TOKEN,
    SimulatedExecutor,
    VirtualClock,
    make_request,
    payload_of,
)
from layby.simulate.observations import RequestLog, SimulationReport, TierMoves, Timeline
from layby.simulate.profiles import Profile
from layby.simulate.settings import with_block_size
from layby.simulate.traces import Trace

COLUMNS = ("waiting", "running", "swapped", "kv_usage", "swap_usage")
"""What is recorded over time."""

STALL_STEPS = 100
"""So many steps on end that plan nothing while work is there: the engine gives up, too."""


class StalledError(LaybyError):
    """The scheduler planned nothing although there was work: a bug in Layby."""


@dataclass(slots=True)
class Refusals:
    """Requests that the server would have refused.

    Attributes:
        too_large: They could not fit in pool or context even alone.
        queue_full: Too many waited.
        first_reason: What the first of them was told.
    """

    too_large: int = 0
    queue_full: int = 0
    first_reason: str | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.too_large + self.queue_full

    def add(self, error: InvalidRequestError | QueueFullError) -> None:
        """Count one."""
        if isinstance(error, QueueFullError):
            self.queue_full += 1
        else:
            self.too_large += 1
        self.first_reason = self.first_reason or str(error)


@dataclass(slots=True)
class _Observer:
    """Watches a simulation and keeps what its report tells."""

    log: RequestLog
    priorities: frozenset[int]
    timeline: Timeline = field(default_factory=lambda: Timeline(COLUMNS))
    # When the last token came of those that have not got one in every step since, and how long
    # they were then.
    _last_tokens: dict[Sample, tuple[float, int]] = field(default_factory=dict)
    _last_step_end: float = 0.0

    def decided(self, plan: StepPlan) -> None:
        """A step begins: some requests change their queue, some sit it out."""
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
        skips: bool = True,
    ) -> None:
        profile = with_block_size(profile, config.block_size)
        self.trace = trace
        self.profile = profile
        self.clock = VirtualClock()
        self.scheduler = Scheduler(config, clock=self.clock)
        self.scheduler.set_costs(profile.cost.move_costs(config.max_num_batched_tokens))
        self.executor = SimulatedExecutor(profile.cost, self.clock)
        self.refusals = Refusals()
        self.steps = 0
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
        requests, total = self.trace.requests, len(self.trace.requests)
        told = 0
        while self._num_arrived < total or self.scheduler.has_unfinished:
            self._arrive()
            if not self.scheduler.has_unfinished:
                self._note()
                if self._num_arrived < total:  # idle until somebody comes
                    self.clock.now = max(self.clock.now, requests[self._num_arrived].arrival_s)
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
                **{name: getattr(config, name) for name in config.__slots__},
                **(settings or {}),
            },
            machine=self.profile.machine,
        )

    # --- the loop's parts ---

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
                self.scheduler.add_request(make_request(traced, record, self.profile.block_size))
            except (InvalidRequestError, QueueFullError) as error:
                self.refusals.add(error)

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
        """Take quiet steps until somebody comes."""
        items = self.scheduler.steady_decodes
        context = sum(item.start + 1 for item in items)
        base_s, slope_s = self.profile.cost.decode_line(len(items))
        until = float("inf")
        if self._num_arrived < len(self.trace.requests):
            until = self.trace.requests[self._num_arrived].arrival_s
        until = min(until, self.scheduler.quiet_until())
        now, ends = self.clock.now, list[float]()
        while len(ends) < most_steps and now < until:
            now += base_s + slope_s * context
            context += len(items)
            ends.append(now)
        self._observer.decoded(items, ends)
        self._observer.passed(now)
        self.scheduler.skip(len(ends), lambda seq: TOKEN)
        self.clock.now = now
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
            ),
        )


def simulate(
    trace: Trace,
    profile: Profile,
    config: SchedulerConfig,
    *,
    title: str | None = None,
    log: RequestLog | None = None,
    settings: Mapping[str, object] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationReport:
    """Play a trace and sum up. Arguments as those of :class:`Simulation` and its methods."""
    started = time.perf_counter()
    simulation = Simulation(trace, profile, config, log=log)
    simulation.run(progress)
    return simulation.report(
        title or config.policy, wall_s=time.perf_counter() - started, settings=settings
    )
