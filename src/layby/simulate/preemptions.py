"""Who had to leave the device in a recording, by which way, and what spoke for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layby.engine.recording import Step
from layby.simulate.recordings import EventReader, open_recording


@dataclass(frozen=True, slots=True)
class Weighing:
    """What both ways out were expected to cost.

    Attributes:
        blocks_out, blocks_in: Blocks to move out and back.
        tokens: Tokens to compute again instead.
        swap_s, recompute_s: What moving and computing were expected to take, in seconds.
    """

    blocks_out: int
    blocks_in: int
    tokens: int
    swap_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class Preemption:
    """A request left the device.

    Attributes:
        time_s: When, in seconds after the recording began.
        step: Number of the step.
        request: Number of the request.
        mode: The way out, ``swap`` or ``recompute``.
        weighing: What spoke for it; None where the ways were not compared: the mode was set, no
            costs were known, there was nothing to park or no room for it.
    """

    time_s: float
    step: int
    request: int
    mode: str
    weighing: Weighing | None


def read_preemptions(paths: Sequence[str | Path]) -> Iterator[Preemption]:
    """The preemptions in the files of a recording, the oldest file first.

    Raises:
        TraceError: A file cannot be read, or holds a line that cannot be or makes no sense.
    """
    start_s: float | None = None
    for path in paths:
        with open_recording(path) as (reader, _):
            start_s = reader.head.clock if start_s is None else start_s
            for event in reader:
                if isinstance(event, Step) and event.preempted:
                    yield from _of_step(event, start_s, reader)


def _of_step(step: Step, start_s: float, reader: EventReader) -> Iterator[Preemption]:
    try:
        weighings = {
            int(request): Weighing(int(out), int(back), int(tokens), swap_s, recompute_s)
            for request, out, back, tokens, swap_s, recompute_s in step.decisions
        }
        leavers = list(zip(step.preempted, step.modes, strict=True))
    except ValueError as error:
        raise reader.error(f"preemptions: {error}") from None
    for request, mode in leavers:
        time_s = step.times[0] - start_s
        yield Preemption(time_s, step.step, request, mode, weighings.get(request))
