"""Recordings of a server, read again: as a trace, as a summary, and as proof.

The format is that of :mod:`layby.engine.recording`. Importing this module makes ``layby`` one of
the trace formats. A :class:`Replay` leads a scheduler through what was recorded and compares every
decision.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import IO, Final, cast

from layby.engine.recording import (
    FORMAT,
    Abort,
    Arrival,
    Broken,
    Close,
    Costs,
    Cut,
    Done,
    Event,
    Gap,
    Hashes,
    Head,
    Lost,
    Moved,
    PlanDigest,
    Reclassed,
    Resize,
    Run,
    State,
    Step,
    TimeCode,
    ending,
    is_steady,
    parse_event,
    step_event,
    unpack_hashes,
)
from layby.errors import (
    ConfigError,
    InvalidRequestError,
    LaybyError,
    QueueFullError,
    shown,
)
from layby.scheduling import (
    FinishReason,
    IdleState,
    KVTables,
    MoveCosts,
    PoolState,
    PreemptionMode,
    Request,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    TransferEnd,
)
from layby.simulate.executor import STOP_TOKEN, TOKEN, VirtualClock
from layby.simulate.resizes import MAX_BLOCKS, PoolResize, RecordedPools
from layby.simulate.traces import (
    MAX_TOKENS,
    READERS,
    TraceError,
    TraceLines,
    TraceReader,
    TraceRequest,
)

MAX_PROMPT_TOKENS = 10**8
"""A longer prompt is a broken line, not one to make room for."""


_MOST: Final = {
    "num_blocks": MAX_BLOCKS,
    "num_swap_blocks": MAX_BLOCKS,
    "num_disk_blocks": MAX_BLOCKS,
    "block_size": MAX_TOKENS,
    "max_num_seqs": MAX_TOKENS,
    "max_num_batched_tokens": MAX_TOKENS,
    "max_model_len": MAX_TOKENS,
}
"""A head that says more of one of them is a broken line as well."""


class EventReader(Iterator[Event]):
    """The events of one file, with their times in seconds.

    Attributes:
        line: Number of the line just read.
        head: The first of them.
        is_cut_off: The last line was incomplete, as after a crash, and is left out.

    Raises:
        TraceError: From ``__init__`` or ``__next__``, about a line that cannot be read.
    """

    def __init__(self, lines: TraceLines) -> None:
        self._lines = lines
        self.line = 0
        self.is_cut_off = False
        first = self._read()
        if not isinstance(first, Head):
            raise lines.error("not a recording: its first line must be a head", line=1)
        if first.format != FORMAT:
            raise lines.error(
                f"a recording of format {first.format}, made by Layby {first.version}; "
                f"this version reads format {FORMAT}"
            )
        self.head = first
        try:
            self.config = SchedulerConfig(**first.scheduler)
        except (ConfigError, TypeError) as error:
            raise self.error(f"scheduler: {error}") from None
        for name, most in _MOST.items():
            if (getattr(self.config, name) or 0) > most:
                raise self.error(
                    f"scheduler: {name} must be at most {most:,}, "
                    f"got {shown(getattr(self.config, name))}"
                )
        self._times = TimeCode(first.clock)

    def error(self, reason: str) -> TraceError:
        """The error to raise about the line just read."""
        return self._lines.error(reason, line=self.line)

    def __next__(self) -> Event:
        event = self._read()
        if event is None:
            raise StopIteration
        if isinstance(event, Head):
            raise self.error("a second head: these are two recordings in one file")
        if isinstance(event, Resize) and event.num_blocks > MAX_BLOCKS:
            raise self.error(
                f"size: a pool has at most {MAX_BLOCKS:,} blocks, got {shown(event.num_blocks)}"
            )
        if isinstance(event, Arrival):
            event.time = self._times.decode(event.time)
        elif isinstance(event, Run | Step | Done | Cut | Abort | Reclassed | Moved | Lost):
            if not isinstance(event, Run) and len(event.times) != 1:
                raise self.error(f"t must hold one time, got {shown(event.times)}")
            event.times = [self._times.decode(written) for written in event.times]
        return event

    def _read(self) -> Event | None:
        line = next(self._lines, None)
        if line is None:
            return None
        self.line = self._lines.number
        try:
            row = self._lines.json_object(line)
        except TraceError:
            if self.line > 1 and self._lines.peek() is None:
                self.is_cut_off = True
                return None
            raise
        try:
            return parse_event(row)
        except ValueError as error:
            raise self.error(str(error)) from None


@contextmanager
def open_recording(path: str | Path) -> Iterator[tuple[EventReader, Callable[[], int]]]:
    """The events of a file, plain or compressed with gzip, and how many of its bytes were read.

    Raises:
        TraceError: It cannot be read, or is no recording.
    """
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(open(path, "rb"))
            file: IO[bytes] = raw
            if raw.peek(2)[:2] == b"\x1f\x8b":
                file = cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=raw)))
        except OSError as error:
            raise TraceError(path, None, f"cannot be read: {error.strerror or error}") from None
        yield EventReader(TraceLines(path, file)), raw.tell


# --- As a trace ----------------------------------------------------------------------------------


def _read_layby(lines: TraceLines) -> Iterator[TraceRequest]:
    """The requests of a recording that were accepted and did not end without a token.

    Others are left out and counted. Answers are as long as they were, aborted ones included;
    samples of one prompt get their mean length, which keeps the work the same. Who had not ended
    when the file did gets the mean answer of the others, or all it was allowed if that is less.
    A new size of the device pool is given to the step that made it so.
    """
    reader = EventReader(lines)
    config = reader.config
    lines.pools = RecordedPools(config.num_blocks, config.num_swap_blocks, config.block_size)
    pool_blocks = config.num_blocks
    asked_blocks: int | None = None  # since the last step
    arrivals: dict[int, Arrival] = {}
    traced: list[tuple[int, TraceRequest]] = []
    for event in reader:
        ended: list[list[int]] = []
        match event:
            case Arrival(refused=""):
                arrivals[event.request] = event
            case Arrival():
                lines.skipped += 1
            case Done() | Cut():
                ended = event.ended
            case Abort():
                ended = [[event.request, *event.outputs]]
            case State() if len(event.device_free) + len(event.device_cached) != pool_blocks:
                asked_blocks = len(event.device_free) + len(event.device_cached)
            case Resize():
                asked_blocks = event.num_blocks
            case Run() | Step() if asked_blocks is not None:
                at_s = max(0.0, event.times[0])
                lines.resizes.append(PoolResize(at_s, asked_blocks, reader.config.block_size))
                pool_blocks, asked_blocks = asked_blocks, None
        for row in ended:
            arrival = arrivals.pop(row[0], None) if row else None
            if arrival is None:
                continue  # it came before this file
            if sum(row[1:]) == 0:
                lines.skipped += 1
                continue
            try:
                had = arrival.outputs or [0] * len(row[1:])
                outputs = [tokens - old for tokens, old in zip(row[1:], had, strict=False)]
                request = _as_traced(arrival, outputs, reader.config.block_size)
            except (ValueError, ConfigError) as error:
                raise reader.error(str(error)) from None
            traced.append((arrival.request, request))
    usual = _mean([request.num_output_tokens for _, request in traced]) or 1
    for arrival in arrivals.values():
        outputs = [min(usual, arrival.max_tokens - _mean(arrival.outputs))]
        traced.append((arrival.request, _as_traced(arrival, outputs, reader.config.block_size)))
    # They ended in another order than they came in, which matters to those that came together.
    yield from (request for _, request in sorted(traced, key=itemgetter(0)))


def _mean(numbers: Sequence[int]) -> int:
    return round(sum(numbers) / len(numbers)) if numbers else 0


def _as_traced(arrival: Arrival, outputs: Sequence[int], block_size: int) -> TraceRequest:
    num_output, had = max(1, _mean(outputs)), _mean(arrival.outputs)
    max_tokens = arrival.max_tokens - had
    prefix = tuple(unpack_hashes(arrival.hashes))
    return TraceRequest(
        arrival.time,
        arrival.num_prompt_tokens + had,  # all of it is computed anew
        num_output,
        priority=arrival.priority,
        prefix=prefix,
        prefix_block_tokens=block_size if prefix else 0,
        max_tokens=None if num_output == max_tokens else max_tokens,
        n=arrival.n,
        request_id=str(arrival.request),
    )


READERS["layby"] = TraceReader("jsonl", ("e", "recording", "scheduler"), _read_layby)


# --- As a summary --------------------------------------------------------------------------------


@dataclass(slots=True)
class Summary:
    """What happened in a recording, counted line by line.

    Attributes:
        arrived: Requests that came, refused ones included.
        refused, finished, aborted, failed: Of these; ``aborted`` without those that failed.
        cut: Samples that a stop string ended.
        prompt_tokens, output_tokens: Of the requests that came, and that ended.
        steps: Steps decided.
        quiet_steps: Those of them in which nothing was decided.
        admitted, resumed: Requests that came in from the waiting and from the swapped queue.
        preempted_swap, preempted_recompute: Requests that left the device.
        swapped_out_blocks, swapped_in_blocks: Blocks moved.
        demoted_blocks, promoted_blocks: Blocks that set out from RAM to disk, and back.
        lost: Parked requests whose KV was lost or given up, to be computed again.
        reclassed: Requests put into another class by hand.
        resized: Times that the device pool got another size.
        swapped_s: How long requests were parked, all together, in seconds.
        duration_s: First event to last, in seconds.
    """

    arrived: int = 0
    refused: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    cut: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    quiet_steps: int = 0
    admitted: int = 0
    resumed: int = 0
    preempted_swap: int = 0
    preempted_recompute: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    lost: int = 0
    reclassed: int = 0
    resized: int = 0
    swapped_s: float = 0.0
    duration_s: float = 0.0


class _Counter:
    """Makes the summary."""

    def __init__(self) -> None:
        self.summary = Summary()
        self._start_s: float | None = None
        self._swapped_since: dict[int, float] = {}

    def add(self, event: Event) -> None:
        summary = self.summary
        match event:
            case Arrival():
                summary.arrived += 1
                summary.refused += bool(event.refused)
                summary.prompt_tokens += event.num_prompt_tokens
                self._passed([event.time])
            case Run():
                steps = (len(event.times) + 1) // 2
                summary.steps += steps
                summary.quiet_steps += steps
                self._passed(event.times)
            case Step():
                summary.steps += 1
                self._decided(event)
                self._passed(event.times)
            case Done() | Cut():
                summary.finished += len(event.ended)
                summary.output_tokens += sum(sum(row[1:]) for row in event.ended)
                summary.cut += isinstance(event, Cut)
                self._passed(event.times)
            case Abort():
                failed = event.reason == FinishReason.ERROR.value
                summary.failed += failed
                summary.aborted += not failed
                summary.output_tokens += sum(event.outputs)
                self._end_parking(event.request, event.times[0])
                self._passed(event.times)
            case Reclassed():
                summary.reclassed += 1
                self._passed(event.times)
            case Moved():
                self._lost(event.lost, event.times[0])
                self._passed(event.times)
            case Lost():
                self._lost([event.request], event.times[0])
                self._passed(event.times)

    def _decided(self, step: Step) -> None:
        summary, now = self.summary, step.times[0]
        summary.admitted += len(step.admitted)
        summary.resumed += len(step.resumed)
        for request, mode in zip(step.preempted, step.modes, strict=False):
            if mode == PreemptionMode.SWAP.value:
                summary.preempted_swap += 1
                self._swapped_since[request] = now
            else:
                summary.preempted_recompute += 1
        for request in step.resumed:
            self._end_parking(request, now)
        summary.swapped_out_blocks += len(step.swap_out) // 2
        summary.swapped_in_blocks += len(step.swap_in) // 2
        summary.resized += bool(step.num_blocks)
        summary.demoted_blocks += sum(len(row) // 2 for row in step.demoted)
        summary.promoted_blocks += sum(len(row) // 2 for row in step.promoted)
        self._lost(step.lost, now)

    def _lost(self, requests: Sequence[int], now: float) -> None:
        self.summary.lost += len(requests)
        for request in requests:
            self._end_parking(request, now)

    def _end_parking(self, request: int, now: float) -> None:
        since = self._swapped_since.pop(request, None)
        if since is not None:
            self.summary.swapped_s += now - since

    def _passed(self, times: Sequence[float]) -> None:
        if times:
            if self._start_s is None:
                self._start_s = times[0]
            self.summary.duration_s = max(self.summary.duration_s, times[-1] - self._start_s)


# --- As proof ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay departs from its recording.

    Attributes:
        step: Number of the step, or of the last one before it.
        path, line: The line that says otherwise.
        what: What differs.
        recorded, replayed: Both sides, for people.
    """

    step: int
    path: str
    line: int
    what: str
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.path} line {self.line}: {self.what} differs; "
            f"recorded {self.recorded}, replayed {self.replayed}"
        )


@dataclass(slots=True)
class Check:
    """What a replay compared.

    Attributes:
        steps: Steps that were decided again, all alike but perhaps the last.
        decisions: Admissions, resumptions, preemptions and refusals in them, and ends of requests.
        unchecked_steps: Steps behind a gap, or before the recording's first idle moment.
        difference: Where it departed, and stopped; None: nowhere.
    """

    steps: int = 0
    decisions: int = 0
    unchecked_steps: int = 0
    difference: Difference | None = None


class _Departure(Exception):  # noqa: N818 - not an error of the program's
    """The replay has departed from its recording."""

    def __init__(self, what: str, recorded: object, replayed: object) -> None:
        super().__init__(what)
        self.what, self.recorded, self.replayed = what, str(recorded), str(replayed)


class _RecordedContent:
    """What the blocks of a recorded request hold; see ``BlockContent``.

    A block of which the recording does not say it is taken to be like no other.
    """

    __slots__ = ("_generated", "_number", "prompt")

    def __init__(self, number: int, prompt: list[int]) -> None:
        self._number = number
        self.prompt = prompt
        self._generated: dict[int, list[int]] = {}

    def extend(self, sample: int, hashes: list[int]) -> None:
        self._generated.setdefault(sample, []).extend(hashes)

    def addresses(self, sample: int, first: int, last: int) -> Iterable[Hashable]:
        """See ``BlockContent``."""
        known = [*self.prompt, *self._generated.get(sample, ())]
        for index in range(first, last):
            yield known[index] if index < len(known) else (self._number, sample, index)


class Replay:
    """A scheduler that is led through a recording, and must decide as was recorded.

    Args:
        config: As recorded.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.check = Check()
        self.step = 0
        self._clock = VirtualClock()
        self._costs: MoveCosts | None = None
        self._scheduler: Scheduler | None = None  # None: not known how things stand
        self._open_plan: StepPlan | None = None
        # Contents may be told before their request comes.
        self._contents: dict[int, _RecordedContent] = {}

    def start(self, state: IdleState | None = None) -> None:
        """Begin with a new scheduler, or with one that has come to rest.

        Raises:
            ValueError: The state does not fit the configuration.
        """
        self._clock = VirtualClock()
        self._scheduler = Scheduler(self.config, clock=self._clock)
        if self._costs is not None:
            self._scheduler.set_costs(self._costs)
        self._open_plan = None
        if state is not None:
            self._scheduler.restore(state)

    def stop(self) -> None:
        """From here on it is not known how things stand."""
        self._scheduler = None

    def add(self, event: Event) -> None:
        """Do what was done, and compare.

        Raises:
            _Departure: Something else came of it.
            ValueError: The event makes no sense.
        """
        match event:
            case State():
                self._meet(event)
            case Gap() | Broken():
                self.stop()
            case Close() | Head():
                pass
            case Costs():
                self._costs = MoveCosts(event.out_s, event.in_s, event.token_s)
                if self._scheduler is not None:
                    self._scheduler.set_costs(self._costs)
            case _ if self._scheduler is None:
                if isinstance(event, Run | Step):
                    self.check.unchecked_steps += (len(event.times) + 1) // 2
            case Hashes():
                for number, sample, text in zip(
                    event.requests, event.samples, event.hashes, strict=True
                ):
                    self._content(number).extend(sample, unpack_hashes(text))
            case Arrival():
                self._arrive(event, self._scheduler)
            case Run():
                self._run(event, self._scheduler)
            case Step():
                self._step(event, self._scheduler)
            case Done():
                self._outcome(event, self._scheduler)
            case Cut():
                self._cut(event, self._scheduler)
            case Abort():
                self._abort(event, self._scheduler)
            case Reclassed():
                request = _live(self._scheduler, event.request)
                self._clock.now = event.times[0]
                self._scheduler.set_priority(request.request_id, event.priority)
            case Resize():
                self._scheduler.resize(event.num_blocks)
            case Moved():
                self._moved(event, self._scheduler)
            case Lost():
                request = _live(self._scheduler, event.request)
                self._clock.now = event.times[0]
                if not self._scheduler.lose_kv(request.request_id):
                    raise ValueError(f"request {event.request} is not parked")

    # --- what comes from outside ---

    def _meet(self, state: State) -> None:
        """How the pools stood: as those of this scheduler, or where it begins."""
        cached = zip(state.device_cached, unpack_hashes(state.hashes), strict=True)
        recorded = IdleState(
            state.num_steps,
            state.num_added,
            state.num_transfers,
            PoolState(state.device_free, list(cached)),
            PoolState(state.swap_free, []),
            PoolState(state.disk_free, []),
        )
        if self._scheduler is None:
            self._contents.clear()
            self.start(recorded)
            return
        replayed = self._scheduler.idle_state()
        for option in fields(IdleState):
            one, other = getattr(recorded, option.name), getattr(replayed, option.name)
            _compare(f"{option.name} of the idle engine", one, other)

    def _arrive(self, arrival: Arrival, scheduler: Scheduler) -> None:
        if not 1 <= arrival.num_prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(f"a prompt of {arrival.num_prompt_tokens} tokens")
        content = self._content(arrival.request)
        content.prompt = unpack_hashes(arrival.hashes)
        refused = ""
        request = None
        try:
            request = Request(
                f"{arrival.request or 'refused'}",
                [TOKEN] * arrival.num_prompt_tokens,
                max_tokens=arrival.max_tokens,
                n=arrival.n,
                priority=arrival.priority,
                arrival_time=arrival.time,
                waits_since=arrival.waits_since,
                min_tokens=arrival.min_tokens,
                stop_token_ids=(STOP_TOKEN,),
                use_prefix_cache=arrival.use_prefix_cache,
                content=content,
            )
            if arrival.outputs:
                request.continue_from(_continued(arrival))
            if arrival.computed:
                kept = KVTables(tuple(arrival.computed), tuple(map(tuple, arrival.kept)))
                if scheduler.add_parked(request, kept) is None:
                    raise ValueError("there is no room for a request that came parked")
            else:
                scheduler.add_request(request, was_accepted=arrival.was_accepted)
        except (InvalidRequestError, QueueFullError) as error:
            refused = type(error).__name__
        self.check.decisions += bool(refused)
        _compare("what became of an arrival", arrival.refused or "queued", refused or "queued")
        if request is None or refused:
            self._contents.pop(arrival.request, None)
        else:
            _compare("the number of a request", arrival.request, request.order)

    def _cut(self, cut: Cut, scheduler: Scheduler) -> None:
        request = _live(scheduler, cut.request)
        if not 0 <= cut.sample < len(request.sequences):
            raise ValueError(f"request {cut.request} has no sample {cut.sample} yet")
        self._clock.now = cut.times[0]
        ends = scheduler.finish_sequence(request.sequences[cut.sample])
        self._compare_ended(cut.ended, [request] if ends else [])

    def _abort(self, abort: Abort, scheduler: Scheduler) -> None:
        request = _live(scheduler, abort.request)
        self._clock.now = abort.times[0]
        scheduler.abort(request.request_id, FinishReason(abort.reason))
        self._compare_ended([[abort.request, *abort.outputs]], [request])

    def _moved(self, moved: Moved, scheduler: Scheduler) -> None:
        faults = moved.faults or [""] * len(moved.transfers)
        self._clock.now = moved.times[0]
        lost = scheduler.transfers_ended(
            TransferEnd(*end) for end in zip(moved.transfers, faults, strict=True)
        )
        _compare("whose KV was lost", moved.lost, [request.order for request in lost])

    def _content(self, number: int) -> _RecordedContent:
        if number not in self._contents:
            self._contents[number] = _RecordedContent(number, [])
        return self._contents[number]

    # --- steps ---

    def _decide(self, scheduler: Scheduler, now: float) -> StepPlan:
        if self._open_plan is not None:
            raise ValueError(f"the outcome of step {self.step} is missing")
        self._clock.now = now
        self._open_plan = plan = scheduler.schedule()
        self.step = plan.step
        self.check.steps += 1
        self.check.decisions += len(plan.admitted) + len(plan.resumed) + len(plan.preempted)
        return plan

    def _run(self, run: Run, scheduler: Scheduler) -> None:
        digest = PlanDigest()
        for index, now in enumerate(run.times):
            if index % 2:
                self._commit(scheduler, now, [], [])
                continue
            plan = self._decide(scheduler, now)
            _compare("the number of a step", run.step + index // 2, plan.step)
            if not is_steady(plan) or plan.num_steady != run.num_steady:
                step = step_event(plan)
                expected = Step(plan.step, [], run.num_steady, digest=step.digest)
                _compare_steps(expected, step)
            digest.add(plan)
        what = "the digest (block numbers, order or time)"
        if len(run.times) > 2:
            what += f" of steps {run.step} to {self.step}"
        _compare(what, run.digest, digest.text())

    def _step(self, step: Step, scheduler: Scheduler) -> None:
        _compare_steps(step, step_event(self._decide(scheduler, step.times[0])))

    def _outcome(self, done: Done, scheduler: Scheduler) -> None:
        self._commit(scheduler, done.times[0], done.stops, done.ended)

    def _commit(
        self, scheduler: Scheduler, now: float, stops: list[list[int]], ended: list[list[int]]
    ) -> None:
        plan, self._open_plan = self._open_plan, None
        if plan is None:
            raise ValueError("an outcome, and no step that it could be of")
        self._clock.now = now
        tokens = [TOKEN] * plan.num_samples
        if stops:
            stopped = {tuple(stop) for stop in stops}
            samplers = [seq for item in plan.scheduled for seq in item.samplers]
            for place, seq in enumerate(samplers):
                if (seq.request.order, seq.index) in stopped:
                    tokens[place] = STOP_TOKEN
        self._compare_ended(ended, scheduler.update(plan, tokens))

    def _compare_ended(self, recorded: list[list[int]], ended: Sequence[Request]) -> None:
        _compare("who ended, and after how many tokens", recorded, [ending(each) for each in ended])
        self.check.decisions += len(ended)
        for request in ended:
            self._contents.pop(request.order, None)


def _continued(arrival: Arrival) -> list[tuple[list[int], FinishReason | None]]:
    """What each sample of a request of an earlier process had."""
    if not all(0 < tokens <= arrival.max_tokens for tokens in arrival.outputs):
        raise ValueError(f"{arrival.outputs} of {arrival.max_tokens} tokens")
    reasons = arrival.reasons or [""] * len(arrival.outputs)
    return [
        ([TOKEN] * tokens, FinishReason(reason) if reason else None)
        for tokens, reason in zip(arrival.outputs, reasons, strict=True)
    ]


def _live(scheduler: Scheduler, number: int) -> Request:
    request = scheduler.requests.get(str(number))
    if request is None:
        raise ValueError(f"there is no request {number} at this time")
    return request


def _compare(what: str, recorded: object, replayed: object) -> None:
    if recorded != replayed:
        raise _Departure(what, shown(recorded), shown(replayed))


def _compare_steps(recorded: Step, replayed: Step) -> None:
    """The first thing in which they differ: decisions before their consequences.

    What a file of before does not tell is not compared.
    """
    untold = {"times"} if recorded.decisions else {"times", "decisions"}
    differing = [
        option.name
        for option in fields(Step)
        if option.name not in untold
        and getattr(recorded, option.name) != getattr(replayed, option.name)
    ]
    if differing:
        what = "the digest (block numbers, order or time)"
        if differing != ["digest"]:
            differing = [name for name in differing if name != "digest"]
            what = ", ".join(name.replace("_", " ") for name in differing)
        sides = [
            ", ".join(f"{name} {getattr(side, name)}" for name in differing)
            for side in (recorded, replayed)
        ]
        raise _Departure(what, *sides)


# --- Files ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReplayReport:
    """What a recording told.

    Attributes:
        head: That of the first file.
        config: The scheduler's configuration.
        summary: What happened.
        check: What was proven; None if nobody asked.
        is_cut_off: The last line was incomplete: the process was killed, or the disk full.
        is_closed: The engine was closed in good order.
        broken: The error that the scheduler itself raised, if it did.
    """

    head: Head
    config: SchedulerConfig
    summary: Summary
    check: Check | None = None
    is_cut_off: bool = False
    is_closed: bool = False
    broken: str | None = field(default=None)

    def as_dict(self) -> dict[str, object]:
        """As JSON has it."""
        return asdict(self)


def replay_recording(
    paths: Sequence[str | Path],
    *,
    check: bool = False,
    progress: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Read a recording, and lead a scheduler through it if asked to.

    Args:
        paths: Its files that are to be read, one at least, in order: the oldest first.
        check: Decide everything again, and compare. Stops at the first difference.
        progress: Called now and then with the bytes read so far.

    Raises:
        TraceError: A file cannot be read, or holds a line that cannot be or makes no sense.
        LaybyError: The files do not follow each other, or nothing in them can be checked.
    """
    counter = _Counter()
    report: ReplayReport | None = None
    replay: Replay | None = None
    before: Head | None = None
    bytes_before = 0
    for path in paths:
        with open_recording(path) as (reader, bytes_read):
            head = reader.head
            if report is None:
                report = ReplayReport(head, reader.config, counter.summary)
            if check and replay is None:
                replay = Replay(reader.config)
                report.check = replay.check
                if head.part == 0:
                    replay.start()
            follows = before is not None
            if before is not None and (head.recording, head.part) != (
                before.recording,
                before.part + 1,
            ):
                raise LaybyError(
                    f"{path} is part {head.part} of recording {head.recording}, which does not "
                    f"follow part {before.part} of recording {before.recording}; "
                    "give the oldest first"
                )
            before = head
            for number, event in enumerate(reader):
                if progress is not None and number % 1000 == 0:
                    progress(bytes_before + bytes_read())
                if isinstance(event, Gap) and follows:
                    continue  # nothing is missing
                counter.add(event)
                report.is_closed |= isinstance(event, Close)
                if isinstance(event, Broken):
                    report.broken = event.error
                if replay is not None:
                    _replay_event(replay, event, reader, str(path))
                    if replay.check.difference is not None:
                        return report
            report.is_cut_off = reader.is_cut_off
            bytes_before += bytes_read()
    if report is None:
        raise LaybyError("no file to read")
    if progress is not None:
        progress(bytes_before)
    if report.check is not None and report.check.steps == 0 and report.check.unchecked_steps:
        raise LaybyError(
            f"nothing can be checked: {paths[0]} begins in the middle of the work and the engine "
            f"was never idle in it; give part {report.head.part - 1} of the recording before it"
        )
    return report


def _replay_event(replay: Replay, event: Event, reader: EventReader, path: str) -> None:
    try:
        replay.add(event)
    except _Departure as departure:
        what, recorded, replayed = departure.what, departure.recorded, departure.replayed
        replay.check.difference = Difference(
            replay.step, path, reader.line, what, recorded, replayed
        )
    except (ValueError, RuntimeError, LookupError, AssertionError) as error:
        # After a departure that nothing told of, anything may be asked of the scheduler.
        replay.check.difference = Difference(
            replay.step,
            path,
            reader.line,
            "what is possible",
            f"{type(event).__name__.lower()} {shown(asdict(event))}",
            f"{type(error).__name__}: {error}",
        )
