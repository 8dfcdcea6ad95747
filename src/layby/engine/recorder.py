"""Recordings: what came to the scheduler, what it decided and when, without a word of any text.

A recording is a file of JSON lines, one per event; each names its kind under ``e``. Together with
the configuration in its first line, a scheduler can be led through the same life again
(``layby replay --check``), and the arrivals are a trace (``layby simulate --trace``).

| kind    | what happened                                                                     |
|---------|-----------------------------------------------------------------------------------|
| `head`  | a file begins                                                                     |
| `state` | the engine is idle, and this is what its block pools look like                    |
| `gap`   | the file goes on where the one before it ended, in the middle of the work         |
| `in`    | a request came, and was queued or refused                                         |
| `run`   | steps in a row in which running requests decoded, and nothing was decided         |
| `step`  | any other step was decided                                                        |
| `done`  | the outcome of the step decided last, unless a `run` says that it had none        |
| `cut`   | a stop string ended a sample                                                      |
| `abort` | a request was aborted or failed                                                   |
| `class` | a request was put into another class                                              |
| `size`  | the device pool is to have another size                                           |
| `moved` | transfers of parked work between RAM and disk have ended                          |
| `lost`  | a parked request's KV was lost                                                    |
| `cost`  | what parking and computing cost, as measured: victims leave by it                 |
| `hash`  | content of blocks that samples have filled; stands before what depends on it      |
| `broken`| the scheduler raised an error; what follows proves nothing                        |
| `close` | the engine was closed in good order                                               |

The dataclasses below say what each line holds; a field at its default is left out. What the engine
turns away to shed load never comes to the scheduler, and so is not recorded.

**What is protected.** There is no text, no token id, no name of a request or user and no address.
Block contents appear as hashes of 48 bits under a key of 256 random bits, which is made anew for
each process and never written: contents can be neither guessed at nor compared with those of
another recording. **What is not:** when requests came, how long they and their answers were, their
classes, and which of the recording's prompts begin alike.

**Rotation.** A file that has reached its size gives way at the next idle moment: it becomes
``FILE.1``, ``FILE.1`` becomes ``FILE.2`` and so on, and the new one begins with a ``state``, so
that it can be replayed alone. An engine that is never idle goes on until twice the size; the new
file then begins with a ``gap``, and what follows can only be checked together with the file before
it, until there is an idle moment, at which a ``state`` is written. What another process left under
the name is moved out of the way likewise.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from layby.errors import ConfigError, InvalidRequestError, QueueFullError, shown
from layby.scheduling import (
    BlockMove,
    FinishReason,
    IdleState,
    MoveCosts,
    Policy,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    StepPlan,
    Transfer,
    TransferEnd,
)

logger = logging.getLogger("layby.engine")

FORMAT = 2
"""Changes when older readers would misread a recording."""

KEPT_FILES = 4
"""Older files of a recording that are kept: ``FILE.1`` is the youngest of them."""

FLUSH_S = 1.0
"""What has happened is on its way to the disk after so long, or a step later."""

MOST_UNWRITTEN_BYTES = 64 * 2**20
"""A disk that falls this far behind ends the recording."""

HASH_BYTES = 6
MOST_NUMBER = 2**62 - 1

# --- What the lines hold -------------------------------------------------------------------------

Ints = list[int]
Strs = list[str]
Rows = list[list[int]]
Times = list[float]
"""Readings of the scheduler's clock: in a file as :class:`TimeCode` writes them, else seconds."""


@dataclass(slots=True)
class Head:
    """A file begins.

    Attributes:
        format: Version of the format.
        recording: Names the run of the engine; its files have it in common.
        part: Number of the file in the recording, from 0.
        version: Layby's.
        model: Name of the model.
        scheduler: The scheduler's configuration, as ``SchedulerConfig``.
        wall_s: Seconds since 1970 when the file was begun.
        clock: The scheduler's clock when the recording began or had been read last.
    """

    format: int
    recording: str
    part: int
    version: str
    model: str
    scheduler: dict[str, Any]
    wall_s: float
    clock: float


@dataclass(slots=True)
class State:
    """The engine is idle. Attributes as those of ``IdleState``; contents as one text of hashes."""

    num_steps: int
    num_added: int
    device_free: Ints
    device_cached: Ints
    hashes: str = ""
    swap_free: Ints = field(default_factory=list)
    disk_free: Ints = field(default_factory=list)
    num_transfers: int = 0


@dataclass(slots=True)
class Gap:
    """The file goes on where the one before it ended."""


@dataclass(slots=True)
class Arrival:
    """A request came.

    Attributes:
        time: When.
        num_prompt_tokens, max_tokens, min_tokens, n, priority, use_prefix_cache: As ``Request``.
        request: The number by which other lines name it; 0 if it was refused.
        was_accepted: An earlier process had accepted it.
        outputs: Output tokens that each of its samples had then, if any had.
        reasons: Why each of those had ended, if any had.
        hashes: Contents of the prompt's full blocks.
        refused: Name of the error with which it was refused.
    """

    time: float
    num_prompt_tokens: int
    max_tokens: int
    request: int = 0
    min_tokens: int = 0
    n: int = 1
    priority: int = 0
    use_prefix_cache: bool = True
    was_accepted: bool = False
    outputs: Ints = field(default_factory=list)
    reasons: Strs = field(default_factory=list)
    hashes: str = ""
    refused: str = ""


@dataclass(slots=True)
class Run:
    """Steps in a row that held no decision.

    Attributes:
        step: Number of the first.
        num_steady: Requests that decode.
        times: When each step was decided and when its outcome came, in turn. An odd number: a
            ``done`` brings the outcome of the last.
        digest: Of all their plans.
    """

    step: int
    num_steady: int
    times: Times
    digest: str


@dataclass(slots=True)
class Step:
    """A step was decided.

    Attributes:
        step: Its number.
        times: When: one reading.
        num_steady: Requests that go on decoding.
        scheduled: What else is computed: request, sample, start, number of tokens.
        admitted, resumed, preempted: Requests.
        modes: How each of ``preempted`` left the device.
        swap_out, relocated, swap_in, copies: Block moves: source, destination, source,
            destination …
        num_blocks: The device pool's new size; 0: it stays.
        classes: Changes of class: request, class before, class after.
        demoted, promoted: Transfers that begin: number, source, destination, source …
        lost: Parked requests that were given up.
        digest: Of the plan.
    """

    step: int
    times: Times
    num_steady: int = 0
    scheduled: Rows = field(default_factory=list)
    admitted: Ints = field(default_factory=list)
    resumed: Ints = field(default_factory=list)
    preempted: Ints = field(default_factory=list)
    modes: Strs = field(default_factory=list)
    swap_out: Ints = field(default_factory=list)
    relocated: Ints = field(default_factory=list)
    swap_in: Ints = field(default_factory=list)
    copies: Ints = field(default_factory=list)
    num_blocks: int = 0
    classes: Rows = field(default_factory=list)
    demoted: Rows = field(default_factory=list)
    promoted: Rows = field(default_factory=list)
    lost: Ints = field(default_factory=list)
    digest: str = ""


@dataclass(slots=True)
class Done:
    """The outcome of a step.

    Attributes:
        times: When it came: one reading.
        stops: Samples that a stop token ended: request, sample.
        ended: Requests that ended: request, then the output tokens of each sample.
    """

    times: Times
    stops: Rows = field(default_factory=list)
    ended: Rows = field(default_factory=list)


@dataclass(slots=True)
class Cut:
    """A stop string ended a sample, and with it perhaps its request (``ended`` as ``Done``)."""

    request: int
    times: Times
    sample: int = 0
    ended: Rows = field(default_factory=list)


@dataclass(slots=True)
class Abort:
    """A request was aborted, or failed: ``reason`` is ``abort`` or ``error``.

    ``outputs`` are the output tokens of each of its samples.
    """

    request: int
    times: Times
    outputs: Ints = field(default_factory=list)
    reason: str = "abort"


@dataclass(slots=True)
class Reclassed:
    """A request was put into another class by hand."""

    request: int
    times: Times
    priority: int = 0


@dataclass(slots=True)
class Resize:
    """The device pool is to have so many blocks."""

    num_blocks: int


@dataclass(slots=True)
class Moved:
    """Transfers have ended.

    Attributes:
        transfers: Their numbers.
        times: When: one reading.
        faults: The fault of each; empty if none had one.
        lost: Requests whose KV could not be read back.
    """

    transfers: Ints
    times: Times
    faults: Strs = field(default_factory=list)
    lost: Ints = field(default_factory=list)


@dataclass(slots=True)
class Lost:
    """A parked request's KV was lost without a transfer."""

    request: int
    times: Times


@dataclass(slots=True)
class Costs:
    """The scheduler decides by these costs from now on. Attributes as those of ``MoveCosts``."""

    out_s: float
    in_s: float
    token_s: float


@dataclass(slots=True)
class Hashes:
    """Contents of blocks that lie behind the prompt's full ones: those of sample ``samples[i]`` of
    request ``requests[i]`` which follow its known ones are ``hashes[i]``."""

    requests: Ints
    samples: Ints
    hashes: Strs


@dataclass(slots=True)
class Broken:
    """The scheduler raised an error."""

    error: str


@dataclass(slots=True)
class Close:
    """The engine was closed."""


Event = (
    Head | State | Gap | Arrival | Run | Step | Done | Cut | Abort | Reclassed | Resize | Moved
    | Lost | Costs | Hashes | Broken | Close
)  # fmt: skip

_KINDS: dict[str, type[Event]] = {
    "head": Head,
    "state": State,
    "gap": Gap,
    "in": Arrival,
    "run": Run,
    "step": Step,
    "done": Done,
    "cut": Cut,
    "abort": Abort,
    "class": Reclassed,
    "size": Resize,
    "moved": Moved,
    "lost": Lost,
    "cost": Costs,
    "hash": Hashes,
    "broken": Broken,
    "close": Close,
}
_KIND_OF = {event: kind for kind, event in _KINDS.items()}


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) <= MOST_NUMBER


def _is_number(value: object) -> bool:
    return _is_int(value) or (type(value) is float and abs(value) < 1e18)


def _is_list(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: type(value) is list and all(map(check, value))


def _is_text(value: object) -> bool:
    return type(value) is str


_CHECKS: dict[str, Callable[[object], bool]] = {
    "int": _is_int,
    "float": _is_number,
    "str": _is_text,
    "bool": lambda value: type(value) is bool,
    "Ints": _is_list(_is_int),
    "Strs": _is_list(_is_text),
    "Rows": _is_list(_is_list(_is_int)),
    "Times": _is_list(_is_number),
    "dict[str, Any]": lambda value: type(value) is dict,
}


def _default_of(option: Any) -> Any:
    return option.default if option.default_factory is MISSING else option.default_factory()


_KEYS = {
    "num_steps": "steps",
    "num_added": "added",
    "device_free": "free",
    "device_cached": "cached",
    "hashes": "h",
    "time": "t",
    "num_prompt_tokens": "p",
    "max_tokens": "m",
    "request": "r",
    "min_tokens": "min",
    "priority": "pr",
    "use_prefix_cache": "cache",
    "was_accepted": "again",
    "refused": "no",
    "step": "k",
    "num_steady": "n",
    "times": "t",
    "digest": "d",
    "scheduled": "s",
    "admitted": "in",
    "resumed": "back",
    "preempted": "out",
    "modes": "how",
    "swap_out": "so",
    "relocated": "rl",
    "swap_in": "si",
    "copies": "cp",
    "num_blocks": "size",
    "classes": "cl",
    "demoted": "de",
    "promoted": "pm",
    "stops": "stop",
    "ended": "end",
    "sample": "i",
    "outputs": "o",
    "reason": "why",
    "requests": "r",
    "samples": "i",
}
"""Fields that have a shorter name in a line."""


# Attribute, name in a line, default and check of every field.
_LAYOUT: dict[type[Event], list[tuple[str, str, Any, Callable[[object], bool]]]] = {
    event: [
        (
            option.name,
            _KEYS.get(option.name, option.name),
            _default_of(option),
            _CHECKS[str(option.type)],
        )
        for option in fields(event)
    ]
    for event in _KINDS.values()
}

_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event_line(event: Event) -> str:
    """The line of an event, with its end."""
    row: dict[str, Any] = {"e": _KIND_OF[type(event)]}
    for name, key, default, _ in _LAYOUT[type(event)]:
        value = getattr(event, name)
        if value != default:
            row[key] = value
    return _to_json(row) + "\n"


def parse_event(row: Mapping[str, Any]) -> Event:
    """The event of a line's JSON object. Names that are not known are left alone.

    Raises:
        ValueError: It is none; the message says why.
    """
    kind = row.get("e")
    event = _KINDS.get(kind) if isinstance(kind, str) else None
    if event is None:
        raise ValueError(f"no event of a recording: e is {shown(kind)}")
    values = {}
    for name, key, default, check in _LAYOUT[event]:
        if key in row:
            if not check(row[key]):
                raise ValueError(f"{key} of {kind!r} is {shown(row[key])}")
            values[name] = row[key]
        elif default is MISSING:
            raise ValueError(f"{kind!r} lacks {key}")
    made: Event = event(**values)
    return made


# --- How numbers are written ---------------------------------------------------------------------


class TimeCode:
    """Times as differences: whole nanoseconds since the one before, or seconds if that would lose
    anything. Floats come back bit by bit.

    Args:
        start_s: Where the first difference starts.
    """

    __slots__ = ("_ns",)

    def __init__(self, start_s: float) -> None:
        self._ns = round(start_s * 1e9)

    def encode(self, seconds: float) -> int | float:
        """What to write for a time: an integer is a difference, a float the time itself."""
        ns = round(seconds * 1e9)
        difference, self._ns = ns - self._ns, ns
        return difference if ns / 1e9 == seconds else float(seconds)

    def decode(self, written: int | float) -> float:
        """The time that was written."""
        if isinstance(written, int):
            self._ns += written
            return self._ns / 1e9
        self._ns = round(written * 1e9)
        return written


def unpack_hashes(text: str) -> list[int]:
    """The hashes in a text.

    Raises:
        ValueError: It is none.
    """
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"not a text of hashes: {shown(text)}") from None
    if len(packed) % HASH_BYTES:
        raise ValueError(f"not a whole number of hashes: {shown(text)}")
    return [
        int.from_bytes(packed[start : start + HASH_BYTES], "big")
        for start in range(0, len(packed), HASH_BYTES)
    ]


def bounded(number: int) -> int:
    """What a client may choose freely, as a number that fits in a line."""
    return max(-MOST_NUMBER, min(number, MOST_NUMBER))


def is_steady(plan: StepPlan) -> bool:
    """Whether nothing was decided: everybody who runs decodes, and nobody comes or goes."""
    return plan.num_steady == len(plan.scheduled) and not (
        plan.admitted
        or plan.resumed
        or plan.preempted
        or plan.swap_out
        or plan.relocate
        or plan.swap_in
        or plan.copy
        or plan.num_blocks
        or plan.class_changes
        or plan.demote
        or plan.promote
        or plan.lost
    )


class PlanDigest:
    """A short digest of plans: what is computed and in which blocks, all moves and transfers, the
    pool's size, who was let in with what wishes, whose class changed, who was given up, and the
    time."""

    __slots__ = ("_hash", "_is_new")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self._is_new = True

    def add(self, plan: StepPlan) -> None:
        """Take in a plan, as ``schedule`` returned it.

        Of a steady decode the last block is enough: the others are those of the step before. Plans
        that are added to others decode the same sequences, each a position further.
        """
        steady = plan.num_steady
        numbers = [plan.step, steady, len(plan.scheduled)]
        sequences = [item.sequence for item in plan.scheduled[:steady]]
        numbers += [seq.block_table[-1] for seq in sequences]
        if self._is_new:
            self._is_new = False
            numbers += [seq.request.order for seq in sequences]
            numbers += [item.start for item in plan.scheduled[:steady]]
        for item in plan.scheduled[steady:]:
            seq = item.sequence
            numbers += (seq.request.order, seq.index, item.start, item.num_tokens)
            numbers += (len(item.samplers), len(seq.block_table))
            numbers += seq.block_table
        numbers.append(plan.num_blocks or 0)
        for moves in (plan.swap_out, plan.relocate, plan.swap_in, plan.copy):
            numbers.append(len(moves))
            for move in moves:
                numbers += move
        times = [plan.now]
        for request in plan.admitted:
            assert request.arrival_time is not None
            times.append(request.arrival_time)
            numbers += (request.order, request.num_prompt_tokens, request.max_tokens, request.n)
            numbers += (bounded(request.priority), bounded(request.min_tokens))
        for rows in (class_rows(plan), _transfers(plan.demote), _transfers(plan.promote)):
            numbers.append(len(rows))
            for row in rows:
                numbers.append(len(row))
                numbers += row
        numbers += [request.order for request in plan.lost]
        self._hash.update(struct.pack(f"<{len(times)}d{len(numbers)}q", *times, *numbers))

    def text(self) -> str:
        """The digest of all that was added."""
        return base64.b64encode(self._hash.digest()).decode()


def step_event(plan: StepPlan) -> Step:
    """What a step decided, without its time."""
    digest = PlanDigest()
    digest.add(plan)
    return Step(
        step=plan.step,
        times=[],
        num_steady=plan.num_steady,
        scheduled=[
            [item.sequence.request.order, item.sequence.index, item.start, item.num_tokens]
            for item in plan.scheduled[plan.num_steady :]
        ],
        admitted=[request.order for request in plan.admitted],
        resumed=[request.order for request in plan.resumed],
        preempted=[request.order for request, _ in plan.preempted],
        modes=[mode.value for _, mode in plan.preempted],
        swap_out=_flat(plan.swap_out),
        relocated=_flat(plan.relocate),
        swap_in=_flat(plan.swap_in),
        copies=_flat(plan.copy),
        num_blocks=plan.num_blocks or 0,
        classes=class_rows(plan),
        demoted=_transfers(plan.demote),
        promoted=_transfers(plan.promote),
        lost=[request.order for request in plan.lost],
        digest=digest.text(),
    )


def class_rows(plan: StepPlan) -> list[list[int]]:
    """The plan's changes of class: request, class before, class after."""
    return [
        [change.request.order, bounded(change.before), bounded(change.after)]
        for change in plan.class_changes
    ]


def _flat(moves: Iterable[BlockMove]) -> list[int]:
    return [block for move in moves for block in move]


def _transfers(transfers: Iterable[Transfer]) -> list[list[int]]:
    return [[transfer.number, *_flat(transfer.moves)] for transfer in transfers]


def ending(request: Request) -> list[int]:
    """How a request ended: its number, and the output tokens of each of its samples."""
    return [request.order, *(seq.num_output_tokens for seq in request.sequences)]


# --- The file ------------------------------------------------------------------------------------


def check_recordable(path: str | Path) -> None:
    """Find out early, before a model is loaded, that a file cannot be written.

    Raises:
        ConfigError: It cannot.
    """
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"cannot record to {path}: it is a directory")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot record to {path}: {folder} is no directory to write to")


def _open_private(path: Path) -> IO[bytes]:
    """A new file that only its owner may read."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


class RecordingFile:
    """A file that a thread of its own writes, so that a slow disk stops nobody.

    Nothing here raises once the file is open: a disk that fails ends the recording, with one line
    in the log and ``error`` set.

    Args:
        path: The file. What is there already is kept as ``path.1``.
        open_file: Makes a file to write to.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(
        self, path: str | Path, *, open_file: Callable[[Path], IO[bytes]] = _open_private
    ) -> None:
        self.path = Path(path)
        self.error: str | None = None
        self._open_file = open_file
        self._wake = threading.Condition()
        self._tasks: deque[bytes | None] = deque()  # None: go on in a new file
        self._unwritten = 0
        self._closed = False
        try:
            if self.path.is_file() and self.path.stat().st_size:
                self._shift()
            self._file = open_file(self.path)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._run, name="layby-recorder", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Have these lines written soon."""
        if self._unwritten > MOST_UNWRITTEN_BYTES:
            self.fail("the disk does not keep up")
        with self._wake:
            self._unwritten += len(data)
            self._tasks.append(data)
            self._wake.notify()

    def rotate(self) -> None:
        """Go on in a new file after what was given to ``write`` so far."""
        with self._wake:
            self._tasks.append(None)
            self._wake.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is left, and close the file."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def fail(self, reason: str) -> None:
        """End the recording before its time."""
        with self._wake:
            if self.error is not None:
                return
            self.error = reason
            self._wake.notify()
        logger.error("recording to %s stopped: %s; serving goes on", self.path, reason)

    def _run(self) -> None:
        try:
            while (tasks := self._next_tasks()) is not None:
                for task in tasks:
                    if task is None:
                        self._file.close()
                        self._shift()
                        self._file = self._open_file(self.path)
                    else:
                        self._file.write(task)
                self._file.flush()
                with self._wake:
                    self._unwritten -= sum(len(task) for task in tasks if task is not None)
        except OSError as error:
            self.fail(error.strerror or str(error))
        finally:
            with contextlib.suppress(OSError):  # it may still hold what could not be written
                self._file.close()

    def _next_tasks(self) -> list[bytes | None] | None:
        """What has come since the last time, waiting for it; None at the end."""
        with self._wake:
            while not (self._tasks or self._closed or self.error):
                self._wake.wait()
            tasks = list(self._tasks)
            self._tasks.clear()
            return None if self.error or not tasks else tasks

    def _shift(self) -> None:
        """Number the older files on, and this one 1; the oldest goes."""
        names = [self.path, *(Path(f"{self.path}.{i}") for i in range(1, KEPT_FILES + 1))]
        for older, younger in zip(names[:0:-1], names[-2::-1], strict=True):
            if younger.exists():
                os.replace(younger, older)


# --- The recorder --------------------------------------------------------------------------------


class Recorder:
    """Writes down what a :class:`RecordedScheduler` tells it.

    It is called in the engine's thread only. A run of steps without a decision becomes one line;
    lines are gathered, and handed to the file about once a second and whenever the engine falls
    idle.

    Args:
        file: Where to.
        model_name: For the files' heads.
        max_bytes: Size at which a file gives way to the next.

    Attributes:
        part: Number of the file that is written to, from 0.
    """

    def __init__(self, file: RecordingFile, *, model_name: str, max_bytes: int) -> None:
        self._file = file
        self._model_name = model_name
        self._max_bytes = max_bytes
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

    # --- what happens ---

    def arrived(
        self, request: Request, refusal: Exception | None = None, *, was_accepted: bool = False
    ) -> None:
        """A request was queued, or refused."""
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
                outputs=outputs if any(outputs) else [],
                reasons=reasons if any(reasons) else [],
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
        """Content addresses as they are written: short, and meaningless without the key."""
        key, packed = self._hash_key, bytearray()
        for address in addresses:
            content = address if isinstance(address, bytes) else repr(address).encode()
            packed += hashlib.blake2b(content, key=key, digest_size=HASH_BYTES).digest()
        return base64.b64encode(packed).decode()

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
            try:
                method(*args, **named)
            except Exception as fault:
                self.recorder.give_up(fault)
