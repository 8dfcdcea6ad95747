"""What happened in a simulation beside its requests' lives: refusals, and choices of a way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from layby.errors import InvalidRequestError, QueueFullError
from layby.scheduling.costs import Decision
from layby.scheduling.plan import PreemptionMode

_MOST_DECISIONS: Final = 200  # that are kept one by one


@dataclass(slots=True)
class Refusals:
    """Requests that the server would have refused.

    Attributes:
        too_large: They could not fit in pool or context even alone.
        queue_full: Too many waited.
        shed: They were of the lowest class while memory was saturated: how many of each class.
        first_reason: What the first of them was told.
    """

    too_large: int = 0
    queue_full: int = 0
    shed: Counter[int] = field(default_factory=Counter)
    first_reason: str | None = None

    @property
    def total(self) -> int:
        """All of them."""
        return self.too_large + self.queue_full + self.shed.total()

    def add(
        self, error: InvalidRequestError | QueueFullError, priority: int, *, is_shed: bool = False
    ) -> None:
        """Count one of that class."""
        if is_shed:
            self.shed[priority] += 1
        elif isinstance(error, QueueFullError):
            self.queue_full += 1
        else:
            self.too_large += 1
        self.first_reason = self.first_reason or str(error)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "too_large": self.too_large,
            "queue_full": self.queue_full,
            "shed": self.shed.total(),
            "shed_by_class": {str(priority): self.shed[priority] for priority in sorted(self.shed)},
        }


@dataclass(frozen=True, slots=True)
class DecisionEvent:
    """A victim's two ways out were compared: when, and with what result."""

    time_s: float
    decision: Decision

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        decision, load = self.decision, self.decision.load
        return {
            "time_s": self.time_s,
            "request_id": decision.request_id,
            "mode": decision.mode.value,
            "swap_s": decision.swap_s,
            "recompute_s": decision.recompute_s,
            "blocks_out": load.blocks_out,
            "blocks_in": load.blocks_in,
            "tokens": load.tokens,
        }


@dataclass(slots=True)
class DecisionLog:
    """How victims left where both ways were open.

    All are counted; an even sample of at most 200 is kept.
    """

    counts: Counter[PreemptionMode] = field(default_factory=Counter)
    _kept: list[DecisionEvent] = field(default_factory=list)
    _stride: int = 1

    def add(self, time_s: float, decision: Decision) -> None:
        """One was taken."""
        if self.counts.total() % self._stride == 0:
            self._kept.append(DecisionEvent(time_s, decision))
            if len(self._kept) > _MOST_DECISIONS:
                self._stride *= 2
                self._kept = self._kept[::2]
        self.counts[decision.mode] += 1

    @property
    def events(self) -> Sequence[DecisionEvent]:
        """Those that were kept, in order."""
        return self._kept

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **{mode.value: self.counts[mode] for mode in PreemptionMode},
            "events": [event.as_dict() for event in self._kept],
        }
