"""The events of a recording: what each line holds, and how it is written and read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from layby.engine.recording.numbers import MOST_NUMBER
from layby.errors import shown

FORMAT = 2
"""Changes when older readers would misread a recording."""

Ints = list[int]
Strs = list[str]
Rows = list[list[int]]
Weighings = list[list[float]]
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
        waits_since: Since when it counts as waiting, in seconds of the clock, where that is not
            ``time``. Files of before have none: there it was ``time``.
        outputs: Output tokens that each of its samples had then, if any had.
        reasons: Why each of those had ended, if any had.
        computed: Positions of each of its live samples whose KV was kept, if any was: then it came
            parked.
        kept: For each of these the blocks they were kept in, numbered from 0.
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
    waits_since: float | None = None
    outputs: Ints = field(default_factory=list)
    reasons: Strs = field(default_factory=list)
    computed: Ints = field(default_factory=list)
    kept: Rows = field(default_factory=list)
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
        decisions: Why, where what both ways would cost was compared: request, blocks to move out,
            blocks to move back, tokens to compute again instead, and the seconds that moving and
            computing were expected to take. Files of before have none.
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
    decisions: Weighings = field(default_factory=list)
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
    "float | None": lambda value: value is None or _is_number(value),
    "str": _is_text,
    "bool": lambda value: type(value) is bool,
    "Ints": _is_list(_is_int),
    "Strs": _is_list(_is_text),
    "Rows": _is_list(_is_list(_is_int)),
    "Weighings": _is_list(_is_list(_is_number)),
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
    "decisions": "why",
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
