"""What the scheduler counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from layby.scheduling.plan import PreemptionMode


@dataclass(slots=True)
class SchedulerMetrics:
    """Totals since the scheduler was made.

    Attributes:
        requests_accepted, requests_finished, requests_aborted: Requests; ``finished`` are those
            that ended by themselves.
        preemptions_swap, preemptions_recompute: Requests that left the device, by mode.
        decisions_swap, decisions_recompute: Victims whose way out was chosen by its cost.
        recomputed_tokens: Positions computed again after a preemption by recompute or a
            restart of the process.
        swapped_queue_size_max: Longest the swapped queue has been at the end of a step.
        swaps_completed: Parked requests that came back or ended while parked.
        swapped_s_total: Seconds they were parked, all together.
        swapped_out_blocks, swapped_in_blocks: Blocks moved.
        demoted_blocks, promoted_blocks: Blocks moved from RAM to disk, and back.
        swap_faults: Failed transfers between RAM and disk, by kind.
        kv_losses: Parked requests whose KV was lost, to be computed again.
        swap_in_reused_blocks: Blocks that needed no move because their content was still there.
        prefix_cache_queried_tokens, prefix_cache_hit_tokens: Tokens of admitted requests, and how
            many of them were found computed.
        kv_usage_max: Largest share of the device pool that was held at the end of a step.
        promotions, demotions: Classes that requests rose by waiting, and sank by running long.
        on_swapped: Called with the seconds of each completed parking.
    """

    requests_accepted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    decisions_swap: int = 0
    decisions_recompute: int = 0
    recomputed_tokens: int = 0
    swapped_queue_size_max: int = 0
    swaps_completed: int = 0
    swapped_s_total: float = 0.0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    swap_faults: dict[str, int] = field(default_factory=dict)
    kv_losses: int = 0
    swap_in_reused_blocks: int = 0
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    kv_usage_max: float = 0.0
    promotions: int = 0
    demotions: int = 0
    on_swapped: Callable[[float], None] | None = field(default=None, repr=False)

    @property
    def preemptions(self) -> int:
        """Preemptions of either mode."""
        return self.preemptions_swap + self.preemptions_recompute

    @property
    def preemption_rate(self) -> float:
        """Preemptions per accepted request; 0 before the first."""
        return self.preemptions / self.requests_accepted if self.requests_accepted else 0.0

    @property
    def avg_swapped_duration_s(self) -> float:
        """Mean seconds of a completed parking; 0 before the first."""
        return self.swapped_s_total / self.swaps_completed if self.swaps_completed else 0.0

    def count_preemption(self, mode: PreemptionMode) -> None:
        """One request left the device."""
        if mode is PreemptionMode.SWAP:
            self.preemptions_swap += 1
        else:
            self.preemptions_recompute += 1

    def count_fault(self, kind: str) -> None:
        """One transfer failed."""
        self.swap_faults[kind] = self.swap_faults.get(kind, 0) + 1

    def count_decision(self, mode: PreemptionMode) -> None:
        """One way out was chosen by its cost."""
        if mode is PreemptionMode.SWAP:
            self.decisions_swap += 1
        else:
            self.decisions_recompute += 1

    def count_swapped(self, duration_s: float) -> None:
        """One parking ended, by resumption or otherwise."""
        self.swaps_completed += 1
        self.swapped_s_total += duration_s
        if self.on_swapped is not None:
            self.on_swapped(duration_s)
