"""Records a scheduler: writes down what came to it and what it answered.

What a recording holds is said in :mod:`layby.engine.recording`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict

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
    RecordingFile,
    Resize,
    Run,
    State,
    TimeCode,
    bounded,
    ending,
    event_line,
    is_steady,
    pack_hashes,
    step_event,
)
from layby.errors import InvalidRequestError, QueueFullError
from layby.scheduling import (
    FinishReason,
    IdleState,
    KVPlace,
    KVTables,
    MoveCosts,
    Policy,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepPlan,
    TransferEnd,
)

logger = logging.getLogger("layby.engine")

FLUSH_S = 1.0
"""What has happened is on its way to the disk after so long, or a step later."""


class Recorder:
    """Writes down what a :class:`RecordedScheduler` tells it.

    It is called in the engine's thread only, but for ``break_off``. A run of steps without a
    decision becomes one line; lines are gathered, and handed to the file about once a second and
    whenever the engine falls idle.

    Args:
        file: Where to.
        model_name: For the files' heads.
        max_bytes: Size at which a file gives way to the next.

    Attributes:
        part: Number of the file that is written to, from 0.
        lock: Held while it is told something.
    """

    def __init__(self, file: RecordingFile, *, model_name: str, max_bytes: int) -> None:
        self._file = file
        self._model_name = model_name
        self._max_bytes = max_bytes
        self.lock = threading.Lock()
        self._hash_key = os.urandom(32)
        self._recording = os.urandom(6).hex()
        self.part = 0
        self._part_bytes = 0
        self._in_gap = False
        self._lines: list[str] = []
        self._handed_over_s = 0.0
        # The steps since the last line, if there was nothing to them.
        self._run_times: list[float] = []
        self._run_start = (0, 0)  # number of the first step, requests that decode
        self._run_digest = PlanDigest()
        self._ended: list[Request] = []  # since lines were last handed over
        self._num_hashed: dict[Sequence, int] = {}  # blocks of which the content is written

    @property
    def error(self) -> str | None:
        """Why nothing is recorded any more; None as long as it is."""
        return self._file.error

    def give_up(self, fault: Exception) -> None:
        """Stop recording: the recorder itself is at fault."""
        logger.debug("the recorder failed", exc_info=fault)
        self._file.fail(f"{type(fault).__name__}: {fault}")

    def begin(self, scheduler: Scheduler) -> None:
        """Record this scheduler from now on; it is new."""
        self._scheduler = scheduler
        self._last_s = scheduler.clock()
        self._begin_file()

    def close(self) -> None:
        """Write what is left, and that the end was a good one."""
        if self.error is None:
            self._add(Close())
            self._hand_over()
        self._file.close()

    def break_off(self, timeout_s: float) -> None:
        """Write what is left before the process ends in the middle of the work; for any thread.

        Nothing is recorded after it. It gives up when so many seconds have passed.
        """
        if self.error is None and self.lock.acquire(timeout=timeout_s):  # for ever
            self._hand_over()
            self._file.close(timeout_s)

    # --- what happens ---

    def arrived(
        self,
        request: Request,
        refusal: Exception | None = None,
        *,
        was_accepted: bool = False,
        kept: KVTables | None = None,
    ) -> None:
        """A request was queued, parked (with what was kept of it) or refused."""
        full_blocks = request.num_prompt_tokens // self._scheduler.config.block_size
        hashes = ""
        if refusal is None:  # what is refused costs no hashing
            leader = request.sequences[0]
            addresses = leader.hash_full_blocks(full_blocks, self._scheduler.config.block_size)
            hashes = self._hashes(addresses[:full_blocks])
        arrival_s = request.arrival_time
        outputs = [seq.num_output_tokens for seq in request.sequences]
        reasons = [
            seq.finish_reason.value if seq.finish_reason else "" for seq in request.sequences
        ]
        self._add(
            Arrival(
                time=self._code(self._last_s if arrival_s is None else arrival_s),
                num_prompt_tokens=request.num_prompt_tokens,
                max_tokens=request.max_tokens,
                request=request.order,
                min_tokens=bounded(request.min_tokens),
                n=request.n,
                priority=bounded(request.priority),
                use_prefix_cache=request.use_prefix_cache,
                was_accepted=was_accepted,
                waits_since=request.waits_since if was_accepted else None,
                outputs=outputs if any(outputs) else [],
                reasons=reasons if any(reasons) else [],
                computed=[] if kept is None else list(kept.computed),
                kept=[] if kept is None else [list(table) for table in kept.tables],
                hashes=hashes,
                refused="" if refusal is None else type(refusal).__name__,
            )
        )
        self._pause()

    def decided(self, plan: StepPlan) -> None:
        """A step was decided."""
        if is_steady(plan):
            if not self._run_times or self._run_start[1] != plan.num_steady:
                self._end_run()
                self._run_start = (plan.step, plan.num_steady)
            self._run_digest.add(plan)
            self._run_times.append(self._code(plan.now))
        else:
            self._end_run()
            step = step_event(plan)
            step.times.append(self._code(plan.now))
            self._add(step)
        self._pause()

    def updated(self, plan: StepPlan, finished: SequenceOf[Request], now: float) -> None:
        """The outcome of the step came."""
        stops = [
            [r.order, 0] for r in finished if r.n == 1 and r.sequences[0].stop_token is not None
        ]
        for item in plan.scheduled[plan.num_steady :]:
            if item.sequence.request.n > 1:
                stops += [
                    [seq.request.order, seq.index]
                    for seq in item.samplers
                    if seq.stop_token is not None
                ]
        if self._run_times and not finished and not stops:
            self._run_times.append(self._code(now))
        else:
            self._end_run()
            self._add(Done([self._code(now)], stops, [ending(request) for request in finished]))
        self._ended += finished
        self._pause()

    def cut(self, seq: Sequence, *, ends_request: bool, now: float) -> None:
        """A stop string ended a sample."""
        request = seq.request
        ended = [ending(request)] if ends_request else []
        self._add(Cut(request.order, [self._code(now)], seq.index, ended))
        if ends_request:
            self._ended.append(request)
        self._pause()

    def aborted(self, request: Request, reason: FinishReason, now: float) -> None:
        """A request was aborted, or failed."""
        self._add(Abort(request.order, [self._code(now)], ending(request)[1:], reason.value))
        self._ended.append(request)
        self._pause()

    def reclassed(self, request: Request, now: float) -> None:
        """A request was put into another class by hand."""
        self._add(Reclassed(request.order, [self._code(now)], bounded(request.priority)))
        self._pause()

    def resized(self, num_blocks: int) -> None:
        """The device pool is to have so many blocks."""
        self._add(Resize(num_blocks))
        self._pause()

    def moved(self, ends: SequenceOf[TransferEnd], lost: SequenceOf[Request], now: float) -> None:
        """Transfers have ended, and with them the KV of these requests is lost."""
        faults = [end.fault for end in ends]
        self._add(
            Moved(
                [end.number for end in ends],
                [self._code(now)],
                faults if any(faults) else [],
                [request.order for request in lost],
            )
        )
        self._pause()

    def lost(self, request: Request, now: float) -> None:
        """A parked request's KV was lost."""
        self._add(Lost(request.order, [self._code(now)]))
        self._pause()

    def told(self, costs: MoveCosts) -> None:
        """The scheduler was told what moving and computing cost."""
        self._add(Costs(costs.out_s, costs.in_s, costs.token_s))

    def broken(self, fault: BaseException) -> None:
        """The scheduler raised an error."""
        self._add(Broken(type(fault).__name__))  # its text might say anything
        self._hand_over()

    # --- lines ---

    def _add(self, event: Event) -> None:
        self._end_run()
        self._lines.append(event_line(event))

    def _code(self, seconds: float) -> float:
        self._last_s = seconds
        return self._times.encode(seconds)

    def _hashes(self, addresses: Iterable[Hashable]) -> str:
        return pack_hashes(addresses, self._hash_key)

    def _end_run(self) -> None:
        if self._run_times:
            step, num_steady = self._run_start
            run = Run(step, num_steady, self._run_times, self._run_digest.text())
            self._lines.append(event_line(run))
            self._run_times = []
            self._run_digest = PlanDigest()

    def _pause(self) -> None:
        """After every event: time to hand something over?"""
        if not self._scheduler.requests:
            self._hand_over()
            if self._scheduler.is_idle:
                self._be_idle()
        elif time.monotonic() - self._handed_over_s >= FLUSH_S:
            self._hand_over()
            if self._part_bytes >= 2 * self._max_bytes:
                self._next_file()
                self._lines.append(event_line(Gap()))
                self._in_gap = True
                self._hand_over()

    def _be_idle(self) -> None:
        """Nothing is held or queued: a good moment for a new file, or to end a gap."""
        is_full = self._part_bytes >= self._max_bytes
        if is_full:
            self._next_file()
        if is_full or self._in_gap:
            self._add(self._state(self._scheduler.idle_state()))
            self._in_gap = False
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the file what has gathered. Contents come first: a file that breaks off anywhere
        has them for every step it tells of."""
        self._handed_over_s = time.monotonic()
        self._end_run()
        if not self._lines:
            return
        data = (self._new_hashes() + "".join(self._lines)).encode()
        self._lines.clear()
        self._part_bytes += len(data)
        self._file.write(data)

    def _new_hashes(self) -> str:
        config = self._scheduler.config
        line = Hashes([], [], [])
        if config.enable_prefix_caching:  # else nobody asks for them
            for request in (*self._scheduler.requests.values(), *self._ended):
                full_blocks = request.num_prompt_tokens // config.block_size
                for seq in request.sequences:
                    known = self._num_hashed.get(seq, full_blocks)
                    if len(seq.block_hashes) > known:
                        line.requests.append(request.order)
                        line.samples.append(seq.index)
                        line.hashes.append(self._hashes(seq.block_hashes[known:]))
                        self._num_hashed[seq] = len(seq.block_hashes)
        for request in self._ended:
            for seq in request.sequences:
                self._num_hashed.pop(seq, None)
        self._ended.clear()
        return event_line(line) if line.requests else ""

    # --- files ---

    def _begin_file(self) -> None:
        import layby

        self._times = TimeCode(self._last_s)
        self._add(
            Head(
                format=FORMAT,
                recording=self._recording,
                part=self.part,
                version=layby.__version__,
                model=self._model_name,
                scheduler=asdict(self._scheduler.config),
                wall_s=time.time(),
                clock=float(self._last_s),
            )
        )
        if (costs := self._scheduler.costs) is not None:
            self.told(costs)
        self._hand_over()

    def _next_file(self) -> None:
        """Everything has been handed over."""
        self._file.rotate()
        self.part += 1
        self._part_bytes = 0
        self._begin_file()

    def _state(self, idle: IdleState) -> State:
        return State(
            num_steps=idle.num_steps,
            num_added=idle.num_added,
            device_free=idle.device.free,
            device_cached=[block for block, _ in idle.device.cached],
            hashes=self._hashes(content for _, content in idle.device.cached),
            swap_free=idle.swap.free,
            disk_free=idle.disk.free,
            num_transfers=idle.num_transfers,
        )


class _WatchedClock:
    """A clock that remembers what it last said."""

    __slots__ = ("_clock", "last")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.last = 0.0

    def __call__(self) -> float:
        self.last = now = self._clock()
        return now


class RecordedScheduler(Scheduler):
    """A scheduler that tells a recorder what came in and what it answered.

    It decides as any other. A recorder that fails is left alone from then on.

    Args:
        config, clock, policy: As ``Scheduler``.
        recorder: Told everything.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
        policy: Policy | None = None,
    ) -> None:
        self._watched = _WatchedClock(clock)
        super().__init__(config, clock=self._watched, policy=policy)
        self.recorder = recorder
        recorder.begin(self)

    def add_request(self, request: Request, *, was_accepted: bool = False) -> None:
        """See ``Scheduler``."""
        is_new = request.order == 0 and request.request_id not in self.requests
        try:
            super().add_request(request, was_accepted=was_accepted)
        except (InvalidRequestError, QueueFullError) as refusal:
            if is_new:  # else a mistake of the caller's, who has lost count of his ids
                self._tell(self.recorder.arrived, request, refusal, was_accepted=was_accepted)
            raise
        self._tell(self.recorder.arrived, request, was_accepted=was_accepted)

    def add_parked(self, request: Request, kept: KVTables) -> KVPlace | None:
        """See ``Scheduler``."""
        place = super().add_parked(request, kept)
        if place is not None:  # else the caller adds it in the other way
            numbers = {block: number for number, block in enumerate(kept.blocks)}
            tables = kept.renumbered(numbers)
            self._tell(self.recorder.arrived, request, was_accepted=True, kept=tables)
        return place

    def schedule(self) -> StepPlan:
        """See ``Scheduler``."""
        try:
            plan = super().schedule()
        except BaseException as fault:
            self._tell(self.recorder.broken, fault)
            raise
        self._tell(self.recorder.decided, plan)
        return plan

    def update(self, plan: StepPlan, tokens: SequenceOf[int]) -> list[Request]:
        """See ``Scheduler``."""
        try:
            finished = super().update(plan, tokens)
        except BaseException as fault:
            self._tell(self.recorder.broken, fault)
            raise
        self._tell(self.recorder.updated, plan, finished, self._watched.last)
        return finished

    def set_costs(self, costs: MoveCosts) -> None:
        """See ``Scheduler``."""
        super().set_costs(costs)
        self._tell(self.recorder.told, costs)

    def finish_sequence(self, seq: Sequence, reason: FinishReason = FinishReason.STOP) -> bool:
        """See ``Scheduler``."""
        had_ended = seq.is_finished
        ends_request = super().finish_sequence(seq, reason)
        if not had_ended:
            now = self._watched.last
            self._tell(self.recorder.cut, seq, ends_request=ends_request, now=now)
        return ends_request

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """See ``Scheduler``."""
        request = super().abort(request_id, reason)
        if request is not None:
            self._tell(self.recorder.aborted, request, reason, self._watched.last)
        return request

    def set_priority(self, request_id: str, priority: int) -> bool:
        """See ``Scheduler``."""
        is_live = super().set_priority(request_id, priority)
        if is_live:
            self._tell(self.recorder.reclassed, self.requests[request_id], self._watched.last)
        return is_live

    def resize(self, num_blocks: int) -> None:
        """See ``Scheduler``."""
        super().resize(num_blocks)
        self._tell(self.recorder.resized, num_blocks)

    def transfers_ended(self, ends: Iterable[TransferEnd]) -> list[Request]:
        """See ``Scheduler``."""
        ends = list(ends)
        lost = super().transfers_ended(ends)
        if ends:
            self._tell(self.recorder.moved, ends, lost, self._watched.last)
        return lost

    def lose_kv(self, request_id: str) -> bool:
        """See ``Scheduler``."""
        was_parked = super().lose_kv(request_id)
        if was_parked:
            self._tell(self.recorder.lost, self.requests[request_id], self._watched.last)
        return was_parked

    def _tell(self, method: Callable[..., None], *args: object, **named: object) -> None:
        if self.recorder.error is None:
            with self.recorder.lock:
                try:
                    method(*args, **named)
                except Exception as fault:
                    self.recorder.give_up(fault)
