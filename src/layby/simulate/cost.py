"""How long a step takes, from what it contains: pure Python, deterministic, about a microsecond.

A step costs, in seconds, the sum of

    rows_s(rows)             the matrix products, and what every step costs; piecewise linear
    samples_s(samples)       output head and sampling; piecewise linear
    sequence_s               per sequence in the step
    prefill_context_s        per position that a prefill row attends to
    decode_context_s         per position that a decode row attends to
    swap_out, swap_in, copy  a fixed part if there are any, and a part per block

Transfers between RAM and disk run beside the steps, and cost their own time only.

Everything is additive because the engine does one thing after another. There is one exception: on
a GPU, the way between device and host is long, and the forward pass goes on meanwhile. Of such a
move only gathering or scattering its blocks on the device is in the way (``block_s``); the rest
(``beside_block_s``) costs what it takes longer than the rest of the step:

    step = in the way + max(forward pass, beside of all that goes out, beside of all that comes in)

Out and in do not hinder each other, and what comes back is taken to be fetched during the step
that resumes it, though an engine that looks ahead begins earlier. What does not grow in
proportion (a few rows cost as much as one, as long as reading the weights takes longest) is in the
curves: a roofline ``max(bandwidth, compute)`` is one with a bend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from layby.errors import ConfigError, shown
from layby.scheduling.costs import MoveCosts
from layby.scheduling.plan import StepPlan

Knots = tuple[tuple[int, float], ...]
"""A curve: ``(count, seconds)`` pairs, linear in between and, as the last piece goes on, beyond."""

_ENDLESS_S = 1e12
"""No step takes so long: a number from here on is a mistake."""


def positions_read(start: int, num_tokens: int) -> int:
    """Positions attended to by the rows at ``start … start + num_tokens - 1``, summed over them.

    The row at position p reads p + 1 of them, its own included.
    """
    return num_tokens * (2 * start + num_tokens + 1) // 2


def _check_seconds(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < _ENDLESS_S):  # type: ignore[operator]
        raise ConfigError(f"{name} must be a finite number from 0 up, got {shown(value)}")


def _check_knots(name: str, knots: object) -> None:
    if not isinstance(knots, Sequence) or len(knots) < 2:
        raise ConfigError(
            f"{name} must be two or more pairs of count and seconds, got {shown(knots)}"
        )
    before: tuple[int, float] | None = None
    for knot in knots:
        if not isinstance(knot, Sequence) or isinstance(knot, str) or len(knot) != 2:
            raise ConfigError(f"{name} must be pairs of count and seconds, got {shown(knot)}")
        count, value = knot
        if isinstance(count, bool) or not isinstance(count, int):
            raise ConfigError(f"{name} must have whole counts, got {shown(count)}")
        _check_seconds(f"{name} at {count}", value)
        if before is None and count != 0:
            raise ConfigError(f"{name} must begin at count 0, got {count}")
        if before is not None and count <= before[0]:
            raise ConfigError(f"{name} must have rising counts, got {count} after {before[0]}")
        if before is not None and value < before[1]:
            raise ConfigError(
                f"{name} must not fall: {before[1]:g} s at {before[0]}, {value:g} s at {count}"
            )
        before = (count, value)


@dataclass(slots=True)
class StepLoad:
    """What one step contains.

    A row is a decode row if it is its sequence's only one in the step, whatever the sequence makes
    of it: it costs the same.

    Attributes:
        decode_tokens: Decode rows.
        prefill_tokens: All other rows.
        decode_context: Positions read by decode rows (``positions_read``).
        prefill_context: Positions read by the other rows.
        num_sequences: Sequences with rows in the step.
        num_samples: Tokens sampled.
        blocks_out: Blocks moved to the swap pool.
        blocks_in: Blocks moved back.
        blocks_copied: Blocks copied on the device.
    """

    decode_tokens: int = 0
    prefill_tokens: int = 0
    decode_context: int = 0
    prefill_context: int = 0
    num_sequences: int = 0
    num_samples: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    blocks_copied: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        """Count a plan, before ``Scheduler.update`` moves its sequences on. O(sequences)."""
        load = cls(
            num_sequences=len(plan.scheduled),
            blocks_out=len(plan.swap_out),
            blocks_in=len(plan.swap_in),
            blocks_copied=len(plan.copy) + len(plan.relocate),
        )
        for item in plan.scheduled:
            load.num_samples += len(item.samplers)
            if item.num_tokens == 1:
                load.decode_tokens += 1
                load.decode_context += item.start + 1
            else:
                load.prefill_tokens += item.num_tokens
                load.prefill_context += positions_read(item.start, item.num_tokens)
        return load


@dataclass(frozen=True, slots=True)
class MoveCost:
    """What it costs to move blocks from one pool to another, or within one.

    Attributes:
        fixed_s: If a step moves any.
        block_s: Per block, while nothing else happens.
        beside_block_s: Per block, beside the forward pass; None: nothing of a move is.

    Raises:
        ConfigError: A number is negative or not finite.
    """

    fixed_s: float = 0.0
    block_s: float = 0.0
    beside_block_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("fixed_s", "block_s"):
            _check_seconds(name, getattr(self, name))
        if self.beside_block_s is not None:
            _check_seconds("beside_block_s", self.beside_block_s)

    def seconds(self, num_blocks: int) -> float:
        """Time for which moving so many is in the way."""
        return self.fixed_s + self.block_s * num_blocks if num_blocks else 0.0

    def beside_s(self, num_blocks: int) -> float:
        """Time that moving so many takes beside that."""
        return (self.beside_block_s or 0.0) * num_blocks

    @property
    def whole_block_s(self) -> float:
        """Per block, in the way or not."""
        return self.block_s + (self.beside_block_s or 0.0)

    def scaled(self, ratio: float) -> MoveCost:
        """The same for blocks of so many times the size."""
        beside_s = None if self.beside_block_s is None else self.beside_block_s * ratio
        return MoveCost(self.fixed_s, self.block_s * ratio, beside_s)


class _Curve:
    """Linear interpolation between knots, and along the last piece beyond them."""

    __slots__ = ("_counts", "_slopes", "_values")

    def __init__(self, knots: Knots) -> None:
        self._counts = [count for count, _ in knots]
        self._values = [float(value) for _, value in knots]
        slopes = [
            (value - value_before) / (count - count_before)
            for (count_before, value_before), (count, value) in pairwise(knots)
        ]
        self._slopes = [*slopes, slopes[-1]]

    def at(self, count: int) -> float:
        piece = bisect_right(self._counts, count) - 1
        return self._values[piece] + self._slopes[piece] * (count - self._counts[piece])


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients of the sum that the module's first lines draw; all in seconds, none negative.

    Attributes:
        rows_s: Over decode and prefill rows together. The value at 0 is what a step without rows
            costs.
        samples_s: Over sampled tokens.
        decode_context_s: Per position read by decode rows.
        prefill_context_s: Per position read by prefill rows.
        sequence_s: Per sequence.
        swap_out, swap_in, copy: Block moves, by where from and where to.
        demote, promote: Transfers from RAM to disk and back, each; None: not known.

    Raises:
        ConfigError: A number is negative or not finite, a curve does not begin at 0, falls, or has
            fewer than two knots, or a step of one row takes no time.
    """

    rows_s: Knots
    samples_s: Knots = ((0, 0.0), (1, 0.0))
    decode_context_s: float = 0.0
    prefill_context_s: float = 0.0
    sequence_s: float = 0.0
    swap_out: MoveCost = MoveCost()
    swap_in: MoveCost = MoveCost()
    copy: MoveCost = MoveCost()
    demote: MoveCost | None = None
    promote: MoveCost | None = None
    _rows: _Curve = field(init=False, repr=False, compare=False)
    _samples: _Curve = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("rows_s", "samples_s"):
            _check_knots(name, getattr(self, name))
        for name in ("decode_context_s", "prefill_context_s", "sequence_s"):
            _check_seconds(name, getattr(self, name))
        object.__setattr__(self, "_rows", _Curve(self.rows_s))
        object.__setattr__(self, "_samples", _Curve(self.samples_s))
        if self._rows.at(1) <= 0:
            raise ConfigError(f"rows_s must be above 0 at one row, got {self._rows.at(1)}")

    def step_s(self, load: StepLoad) -> float:
        """Duration of a step, in seconds."""
        seconds = (
            self._rows.at(load.decode_tokens + load.prefill_tokens)
            + self._samples.at(load.num_samples)
            + self.sequence_s * load.num_sequences
            + self.prefill_context_s * load.prefill_context
        )
        decode_s = self.decode_context_s * load.decode_context
        if load.blocks_out or load.blocks_in or load.blocks_copied:
            beside_s = max(
                self.swap_out.beside_s(load.blocks_out), self.swap_in.beside_s(load.blocks_in)
            )
            seconds += max(0.0, beside_s - seconds - decode_s) + (
                self.swap_out.seconds(load.blocks_out)
                + self.swap_in.seconds(load.blocks_in)
                + self.copy.seconds(load.blocks_copied)
            )
        return seconds + decode_s  # last, so that decode_line() gives the same bits

    def move_costs(self, step_tokens: int) -> MoveCosts:
        """What parking and computing cost, to choose between them: the whole of a move, for
        bandwidth is used up though nobody waits for it; a prompt is computed in steps of so many
        tokens, whose attention is left out."""
        return MoveCosts(
            self.swap_out.whole_block_s,
            self.swap_in.whole_block_s,
            self._rows.at(step_tokens) / step_tokens,
        )

    def decode_line(self, num_decodes: int) -> tuple[float, float]:
        """Duration of a step in which so many sequences decode and nothing else happens.

        Returns:
            ``base`` and ``slope``: the step takes ``base + slope * decode_context``, to the bit
            what ``step_s`` says of it.
        """
        base = self.step_s(
            StepLoad(decode_tokens=num_decodes, num_sequences=num_decodes, num_samples=num_decodes)
        )
        return base, self.decode_context_s
