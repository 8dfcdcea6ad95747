"""When the device pool gets another size: as an operator says, or as a recording tells.

60s=3000,120s=11000        3,000 blocks from the first minute on, 11,000 from the second
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from layby.errors import ConfigError, shown
from layby.simulate.traces import parse_time

NONE: Final = "none"
"""How it is said that no size changes, whatever a recording tells."""

MAX_BLOCKS: Final = 10**8
"""A larger pool is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class PoolResize:
    """The device pool is to have another size.

    Attributes:
        at_s: When, in seconds on the trace's clock.
        num_blocks: Its size.
        block_tokens: Token slots of such a block; None: those of the simulated pool.

    Raises:
        ConfigError: A number is out of range.
    """

    at_s: float
    num_blocks: int
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise ConfigError(f"the pool cannot get another size at {shown(self.at_s)} s")
        if not 1 <= self.num_blocks <= MAX_BLOCKS:
            raise ConfigError(
                f"a pool must have from 1 to {MAX_BLOCKS:,} blocks, got {shown(self.num_blocks)}"
            )

    def blocks_of(self, block_size: int) -> int:
        """The same size in blocks of so many tokens, one at least."""
        if self.block_tokens is None:
            return self.num_blocks
        return max(1, self.num_blocks * self.block_tokens // block_size)

    def __str__(self) -> str:
        return f"{self.at_s:g}s={self.num_blocks}"


@dataclass(frozen=True, slots=True)
class RecordedPools:
    """What a server's pools were when its recording began.

    Attributes:
        num_blocks: Blocks of the device pool.
        num_swap_blocks: Blocks of the swap pool.
        block_tokens: Token slots of one.
    """

    num_blocks: int
    num_swap_blocks: int
    block_tokens: int

    def in_blocks_of(self, block_size: int) -> dict[str, int]:
        """The same sizes as settings, in blocks of so many tokens; one on the device at least."""
        return {
            "num_blocks": max(1, self.num_blocks * self.block_tokens // block_size),
            "num_swap_blocks": self.num_swap_blocks * self.block_tokens // block_size,
        }


def parse_resizes(text: str) -> tuple[PoolResize, ...]:
    """Read sizes over time, such as ``60s=3000,120s=11000``; ``none`` is no change at all.

    Raises:
        ConfigError: A part has another form, or times do not rise.
    """
    if text.strip().lower() == NONE:
        return ()
    resizes: list[PoolResize] = []
    for part in text.split(","):
        time, _, blocks = (word.strip() for word in part.partition("="))
        if not (blocks.isascii() and blocks.isdigit() and len(blocks) < 20):
            raise ConfigError(
                f"resize must be TIME=BLOCKS,… such as 60s=3000,120s=11000, or {NONE}; "
                f"got {shown(part)}"
            )
        resize = PoolResize(parse_time("resize", time), int(blocks))
        if resizes and resize.at_s <= resizes[-1].at_s:
            raise ConfigError(f"resize must have rising times, got {resize} after {resizes[-1]}")
        resizes.append(resize)
    return tuple(resizes)


def written_resizes(resizes: Sequence[PoolResize]) -> str | None:
    """As ``parse_resizes`` reads them; None for none."""
    return ",".join(map(str, resizes)) or None
