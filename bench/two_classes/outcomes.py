"""What runs came to, beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from layby.results import Distribution

TARGETS = {"ttft_p99_to_alone": 1.25, "done_to_recompute": 1.0, "moves_per_job": 4.0}
"""The case is won where no figure is above its own, and no job is left."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        ttfts_s: Of the interactive requests.
        batch_done_s: When the last batch job was done; 0 without any.
        moves_per_job: Preemptions per batch job.
        unfinished: Batch jobs that came to no end.
    """

    ttfts_s: tuple[float, ...]
    batch_done_s: float
    moves_per_job: float
    unfinished: int

    def ttft_s(self, percent: int) -> float:
        """Percentile 50 or 99; 0 if no interactive request came."""
        of_all = Distribution.of(self.ttfts_s)
        return {50: of_all.p50, 99: of_all.p99}[percent] or 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One run in figures, compared with the others of its seed.

    Attributes:
        ttft_p99_to_alone: Over that of the same bursts without any batch job.
        done_to_recompute: ``batch_done_s`` over that with recompute.
    """

    seed: int
    variant: str
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p99_to_alone: float
    batch_done_s: float
    done_to_recompute: float
    moves_per_job: float
    unfinished: int


def compared(seed: int, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """The rows of one seed.

    Args:
        seed: For the table.
        outcomes: By variant; ``alone`` and ``recompute`` are what the others are compared with.
    """
    alone_s, recompute_s = outcomes["alone"].ttft_s(99), outcomes["recompute"].batch_done_s
    return [
        Row(
            seed,
            name,
            ttft_p50_s=outcome.ttft_s(50),
            ttft_p99_s=outcome.ttft_s(99),
            ttft_p99_to_alone=outcome.ttft_s(99) / alone_s,
            batch_done_s=outcome.batch_done_s,
            done_to_recompute=outcome.batch_done_s / recompute_s,
            moves_per_job=outcome.moves_per_job,
            unfinished=outcome.unfinished,
        )
        for name, outcome in outcomes.items()
    ]


def medians(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """For each variant the median over the seeds of every figure that has a target."""
    return {
        name: {
            figure: median(getattr(row, figure) for row in rows if row.variant == name)
            for figure in TARGETS
        }
        for name in dict.fromkeys(row.variant for row in rows)
    }


def pooled_p99(runs: Sequence[Mapping[str, Outcome]]) -> dict[str, float]:
    """For each variant the p99 TTFT of the requests of all seeds together, in seconds: in a run
    of some hundred requests it is that of the second slowest."""
    return {
        name: Distribution.of(ttft for run in runs for ttft in run[name].ttfts_s).p99 or 0.0
        for name in runs[0]
    }
