"""Runs summed up: medians, spreads, and how many times as fast as the fastest peer Layby is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from bench.peers.engines import BY_HAND, LAYBY
from bench.peers.running import Run
from bench.peers.workloads import Workload

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that came to nothing. No further one of this pair is tried."""

    workload: str
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The repetitions of one workload on one engine; times in seconds.

    Attributes:
        output_tokens_per_s: Of the median; for a start, which has one token, None.
        preemptions, recomputed_tokens: Medians too; None where the engine does not tell.
    """

    workload: str
    engine: str
    repetitions: int
    median_s: float
    min_s: float
    max_s: float
    output_tokens_per_s: float | None
    preemptions: float | None
    recomputed_tokens: float | None

    @property
    def spread(self) -> float:
        """From the fastest repetition to the slowest, as a share of the median."""
        return (self.max_s - self.min_s) / self.median_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """Layby's speed over another's: above 1, Layby is the faster one."""

    workload: str
    other: str
    speed: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one comparison came to.

    Attributes:
        date: When it began, in UTC.
        machine: What it ran on.
        versions: Distributions of each engine.
        workloads: What was asked for.
        not_set_up: Peers that are missing from the comparison, and why.
        runs, failures: In the order they happened.
    """

    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, Mapping[str, str]]
    workloads: Sequence[Workload]
    not_set_up: Mapping[str, str]
    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def summaries(self) -> list[Summary]:
        """One for each workload and engine that has a run, workload by workload."""
        return [
            summary
            for workload in self.workloads
            for engine in self.versions
            if (summary := summarise(workload, engine, self.runs)) is not None
        ]

    def ratios(self) -> list[Ratio]:
        """Layby against the fastest peer, and against itself set by hand, where both have runs."""
        found = []
        summaries = self.summaries()
        for workload in self.workloads:
            of_it = [summary for summary in summaries if summary.workload == workload.name]
            found += ratios_of(of_it)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "date": self.date,
            "machine": dict(self.machine),
            "versions": {name: dict(versions) for name, versions in self.versions.items()},
            "workloads": [
                {**asdict(workload), "kv_tokens": workload.kv_tokens} for workload in self.workloads
            ],
            "not_set_up": dict(self.not_set_up),
            "ratios": [asdict(ratio) for ratio in self.ratios()],
            "summaries": [
                {**asdict(summary), "spread": summary.spread} for summary in self.summaries()
            ],
            "failures": [asdict(failure) for failure in self.failures],
            "runs": [asdict(run) for run in self.runs],
        }


def summarise(workload: Workload, engine: str, runs: Sequence[Run]) -> Summary | None:
    """Sum up the runs of this pair among ``runs``; None if there are none."""
    mine = [run for run in runs if (run.workload, run.engine) == (workload.name, engine)]
    if not mine:
        return None
    times = [run.time_s for run in mine]
    median = statistics.median(times)
    return Summary(
        workload.name,
        engine,
        repetitions=len(mine),
        median_s=median,
        min_s=min(times),
        max_s=max(times),
        output_tokens_per_s=workload.output_tokens / median if workload.measures == "job" else None,
        preemptions=_median_if_told([run.preemptions for run in mine]),
        recomputed_tokens=_median_if_told([run.recomputed_tokens for run in mine]),
    )


def ratios_of(summaries: Sequence[Summary]) -> list[Ratio]:
    """The ratios among the summaries of one workload."""
    by_engine = {summary.engine: summary for summary in summaries}
    layby = by_engine.get(LAYBY)
    if layby is None:
        return []
    peers = [summary for name, summary in by_engine.items() if name not in (LAYBY, BY_HAND)]
    others = [min(peers, key=lambda summary: summary.median_s)] if peers else []
    if BY_HAND in by_engine:
        others.append(by_engine[BY_HAND])
    return [
        Ratio(layby.workload, other.engine, other.median_s / layby.median_s) for other in others
    ]


def show(report: Report, console: Console) -> None:
    """Print the machine, what is missing, and the tables."""
    from rich.table import Table

    machine = report.machine
    console.print(
        f"{report.date}; {machine['cpu']}, {machine['threads']} of {machine['cpus']} CPUs, "
        f"{machine['ram_gib']} GiB, {machine['copy_gb_per_s']:.0f} GB/s (copy, read and written)"
    )
    for versions in report.versions.values():
        console.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    figures = Table(title="Times", title_justify="left")
    for name in ("workload", "engine"):
        figures.add_column(name)
    for name in ("median", "fastest–slowest", "spread", "tokens/s out", "preempted", "recomputed"):
        figures.add_column(name, justify="right")
    last = None
    for summary in report.summaries():
        if last not in (None, summary.workload):
            figures.add_section()
        figures.add_row("" if summary.workload == last else summary.workload, *_cells(summary))
        last = summary.workload
    console.print(figures)
    ratios = Table(title="Layby's speed ÷ another's", title_justify="left")
    ratios.add_column("workload")
    ratios.add_column("fastest peer, or Layby set by hand")
    ratios.add_column("ratio", justify="right")
    for ratio in report.ratios():
        ratios.add_row(ratio.workload, ratio.other, f"{ratio.speed:.2f} ×")
    console.print(ratios)
    for name, reason in report.not_set_up.items():
        console.print(f"{name} is missing: {reason}", markup=False)
    for failure in report.failures:
        console.print(
            f"{failure.engine} failed at {failure.workload}: {failure.reason}", markup=False
        )


def _cells(summary: Summary) -> list[str]:
    return [
        summary.engine,
        f"{summary.median_s:.2f} s",
        f"{summary.min_s:.2f}–{summary.max_s:.2f}",
        f"{summary.spread:.0%}",
        _number(summary.output_tokens_per_s, 1),
        _number(summary.preemptions),
        _number(summary.recomputed_tokens),
    ]


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _median_if_told(values: Sequence[int | None]) -> float | None:
    told = [value for value in values if value is not None]
    return statistics.median(told) if len(told) == len(values) else None
