"""Who had to leave the device in a recording, by which way, and what spoke for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from layby.engine.recording import Costs, Step
from layby.scheduling import PreemptionMode
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
        weighing: What spoke for it; None where the ways were not compared.
        why_not: Why they were not; empty if they were, or if that is not known.
    """

    time_s: float
    step: int
    request: int
    mode: str
    weighing: Weighing | None
    why_not: str = ""


def read_preemptions(paths: Sequence[str | Path]) -> Iterator[Preemption]:
    """The preemptions in the files of a recording, the oldest file first.

    Raises:
        TraceError: A file cannot be read, or holds a line that cannot be or makes no sense.
    """
    start_s: float | None = None
    has_costs: bool | None = None  # not known
    for path in paths:
        with open_recording(path) as (reader, _):
            start_s = reader.head.clock if start_s is None else start_s
            if reader.head.part == 0:
                has_costs = False
            for event in reader:
                if isinstance(event, Costs):
                    has_costs = True
                elif isinstance(event, Step) and event.preempted:
                    yield from _of_step(event, start_s, reader, has_costs=has_costs)


def _of_step(
    step: Step, start_s: float, reader: EventReader, *, has_costs: bool | None
) -> Iterator[Preemption]:
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
        weighing = weighings.get(request)
        why_not = "" if weighing else _why_not(mode, reader, has_costs=has_costs)
        yield Preemption(time_s, step.step, request, mode, weighing, why_not)


def _why_not(mode: str, reader: EventReader, *, has_costs: bool | None) -> str:
    """Why the ways out were not compared; empty if that is not known."""
    config = reader.config
    if config.policy == "recompute-only":
        return f"the policy is {config.policy}"
    if config.preemption_mode != "auto":
        return f"the preemption mode is {config.preemption_mode}"
    if not config.num_swap_blocks:
        return "there is no swap pool"
    if mode == PreemptionMode.RECOMPUTE.value:
        return "there was nothing to park, or no room for it in the swap pool"
    return "no costs had been measured yet" if has_costs is False else ""
