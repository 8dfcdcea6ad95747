"""What moving and computing take on this machine, learned from the steps as they go by."""

from __future__ import annotations

from layby.execution.executor import StepResult
from layby.scheduling import MoveCosts, StepPlan

WEIGHT = 0.2
"""Share of the newest measurement in the mean."""

NOTEWORTHY = 0.1
"""Relative change from which on the scheduler is told."""

LEAST_TOKENS = 32
"""Prompt tokens of a step from which on it says something about prefill."""


class CostMeter:
    """Running means of the seconds per block moved and per prompt token computed.

    What a step takes beyond its moves and beyond an ordinary decode step is its prefill.
    """

    __slots__ = ("_block_s", "_decode_s", "_token_s", "_told")

    def __init__(self) -> None:
        self._block_s: float | None = None
        self._token_s: float | None = None
        self._decode_s: float | None = None
        self._told: MoveCosts | None = None

    def observe(self, plan: StepPlan, result: StepResult, step_s: float) -> MoveCosts | None:
        """Learn from a step; returns the costs if the scheduler should know them anew.

        Args:
            plan: What was executed, as it was decided.
            result: Says what its moves took.
            step_s: Seconds it took in all.
        """
        if plan.num_blocks is not None:
            return None  # nobody knows what the other size of the pool took
        num_moved = len(plan.swap_out) + len(plan.swap_in)
        if num_moved and result.moved_s > 0:
            self._block_s = _mean(self._block_s, result.moved_s / num_moved)
        computed_s = step_s - result.moved_s
        num_prefilled = sum(
            item.num_tokens for item in plan.scheduled[plan.num_steady :] if item.num_tokens > 1
        )
        # Where some sat the step out, it holds less decoding than an ordinary one.
        if num_prefilled >= LEAST_TOKENS and not plan.paused:
            prefill_s = computed_s - (self._decode_s or 0.0 if plan.num_steady else 0.0)
            if prefill_s > 0:
                self._token_s = _mean(self._token_s, prefill_s / num_prefilled)
        elif plan.num_steady and not num_prefilled:
            self._decode_s = _mean(self._decode_s, computed_s)
        return self._news()

    def _news(self) -> MoveCosts | None:
        if self._block_s is None or self._token_s is None:
            return None
        if self._told is not None and not (
            _differs(self._told.out_s, self._block_s) or _differs(self._told.token_s, self._token_s)
        ):
            return None
        self._told = MoveCosts(self._block_s, self._block_s, self._token_s)
        return self._told


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + WEIGHT * (value - mean)


def _differs(told: float, value: float) -> bool:
    return abs(value - told) > NOTEWORTHY * told
