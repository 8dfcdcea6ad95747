"""Settings of the scheduler, checked together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from layby.errors import ConfigError

PREEMPTION_MODES = ("auto", "swap", "recompute")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Everything a scheduler needs to know.

    Attributes:
        num_blocks: Blocks of the device pool.
        num_swap_blocks: Blocks of the swap pool; 0 leaves recompute as the only way out.
        num_disk_blocks: Blocks on disk below the swap pool, through which they are filled; 0: no
            disk.
        block_size: Token slots of one block.
        max_num_seqs: Most sequences on the device at a time.
        max_num_batched_tokens: Most tokens one step computes.
        max_model_len: Most tokens, prompt and output, of one sequence. None: no limit but memory.
        preemption_mode: ``swap`` and ``auto`` park by swapping, and recompute what the swap pool
            cannot take; ``auto`` also recomputes what costs less that way, where costs are known;
            ``recompute`` never swaps.
        policy: ``swapped-first``, ``running-first``, ``recompute-only`` or ``reserve``.
        enable_prefix_caching: Reuse full blocks by content.
        headroom: Blocks kept free per running sequence when work is resumed or admitted.
        watermark: Share of the device pool kept free then, where that is more. No obstacle to the
            first of a class, nor to one who is more urgent than somebody who runs.
        urgent_window: Seconds for which less urgent newcomers leave room for what more urgent
            classes came to need; 0: none.
        background_tokens: Most prompt tokens per step, beyond one per sequence, for classes less
            urgent than one seen within the window.
        preemption_threshold: Share of the device pool above which the least urgent running work is
            parked ahead of need; 1: never.
        max_queue: Most sequences of new requests that wait beyond those that could run; None: no
            limit. Counts ``n`` per request, and never what was preempted.
        priority_aging: Seconds of waiting that move a request one class up, at least 0.001; None:
            waiting changes nothing.
        demote_after_tokens: Output tokens that move a request one class down; None: none do.

    Raises:
        ConfigError: A value, or a combination, cannot work.
    """

    num_blocks: int
    num_swap_blocks: int = 0
    num_disk_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    preemption_mode: str = "auto"
    policy: str = "swapped-first"
    enable_prefix_caching: bool = True
    headroom: float = 1.0
    watermark: float = 0.0
    urgent_window: float = 0.0
    background_tokens: int = 48
    preemption_threshold: float = 1.0
    max_queue: int | None = None
    priority_aging: float | None = None
    demote_after_tokens: int | None = None

    def __post_init__(self) -> None:
        from layby.scheduling.policy import POLICIES

        for name, low in (
            ("num_blocks", 1),
            ("num_swap_blocks", 0),
            ("num_disk_blocks", 0),
            ("block_size", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("background_tokens", 0),
            ("max_model_len", 1),
            ("max_queue", 0),
            ("demote_after_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "max_queue", "demote_after_tokens"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        if not (isinstance(self.headroom, int | float) and 0 <= self.headroom < math.inf):
            raise ConfigError(f"headroom must be a finite number from 0 up, got {self.headroom!r}")
        if not (isinstance(self.watermark, int | float) and 0 <= self.watermark < 1):
            raise ConfigError(
                f"watermark must be a share of the device pool, from 0 to less than 1, "
                f"got {self.watermark!r}; blocks per running sequence are the headroom"
            )
        if not (isinstance(self.urgent_window, int | float) and 0 <= self.urgent_window < math.inf):
            raise ConfigError(
                f"urgent_window must be a finite number of seconds from 0 up, "
                f"got {self.urgent_window!r}"
            )
        if not (
            isinstance(self.preemption_threshold, int | float)
            and 0 <= self.preemption_threshold <= 1
        ):
            raise ConfigError(
                f"preemption_threshold must be a number from 0 to 1, "
                f"got {self.preemption_threshold!r}"
            )
        aging_s = self.priority_aging
        if aging_s is not None and not (
            isinstance(aging_s, int | float)
            and not isinstance(aging_s, bool)
            and 0.001 <= aging_s < math.inf
        ):
            raise ConfigError(
                f"priority_aging must be a finite number of seconds from 0.001 up, got {aging_s!r}"
            )
        if self.num_disk_blocks and not self.num_swap_blocks:
            raise ConfigError(
                f"num_disk_blocks is {self.num_disk_blocks} and num_swap_blocks is 0: work reaches "
                "the disk through the swap pool, so it must hold something"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence gets a token per step"
            )
        for name, choices in (
            ("preemption_mode", PREEMPTION_MODES),
            ("policy", tuple(POLICIES)),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}"
                )
