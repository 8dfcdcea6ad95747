"""Service-level objectives: what is promised of latencies, and whether a run kept it."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from layby.errors import ConfigError, counted, shown
from layby.results import Distribution
from layby.simulate.observations import SimulationReport
from layby.simulate.page import duration

METRICS: Final = ("ttft_s", "itl_s", "e2e_s", "queueing_s")
STATISTICS: Final = ("mean", "p50", "p90", "p99", "max")

DEFAULT_STATISTIC: Final = "p99"
"""Of a metric that is named alone."""

_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_TERM: Final = re.compile(
    r"(?P<metric>[a-z0-9]+)(?:_s)?(?:_(?P<statistic>[a-z0-9]+))?\s*<=?\s*"
    r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?P<unit>[a-zµ]*)",
    re.IGNORECASE,
)
_NAMES: Final = {"ttft_s": "TTFT", "itl_s": "ITL", "e2e_s": "E2E", "queueing_s": "queueing"}


@dataclass(frozen=True, slots=True)
class SloTerm:
    """One promise.

    Attributes:
        metric: ``ttft_s``, ``itl_s``, ``e2e_s`` or ``queueing_s``.
        statistic: ``mean``, ``p50``, ``p90``, ``p99`` or ``max``, over a run.
        limit_s: The most that it may be.

    Raises:
        ConfigError: There is no such metric or statistic, or the limit is no time.
    """

    metric: str
    statistic: str
    limit_s: float

    def __post_init__(self) -> None:
        for what, value, choices in (
            ("metric", self.metric, METRICS),
            ("statistic", self.statistic, STATISTICS),
        ):
            if value not in choices:
                raise ConfigError(
                    f"an SLO's {what} must be one of {', '.join(choices)}; got {shown(value)}"
                )
        if not 0 < self.limit_s < math.inf:
            raise ConfigError(
                f"an SLO's limit must be more than 0 s and finite, got {shown(self.limit_s)}"
            )

    def __str__(self) -> str:
        return f"{self.metric.removesuffix('_s')}_{self.statistic}<{_written(self.limit_s)}"

    @property
    def name(self) -> str:
        """For people: ``p99 TTFT``."""
        return f"{self.statistic} {_NAMES[self.metric]}"

    def value_s(self, report: SimulationReport) -> float | None:
        """What it was in a run; None if nothing was measured."""
        distribution: Distribution = (
            report.queueing_s
            if self.metric == "queueing_s"
            else getattr(report.result, self.metric)
        )
        value: float | None = getattr(distribution, self.statistic)
        return value


@dataclass(frozen=True, slots=True)
class Slo:
    """Promises that hold together; ``str`` of it is what :func:`parse_slo` reads.

    Attributes:
        terms: At least one, no two about the same statistic of the same metric.

    Raises:
        ConfigError: There are none, or two say different things about one figure.
    """

    terms: tuple[SloTerm, ...]

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("an SLO must promise something, such as ttft_p99<2s")
        seen: set[tuple[str, str]] = set()
        for term in self.terms:
            figure = (term.metric, term.statistic)
            if figure in seen:
                raise ConfigError(f"the SLO limits {term.name} twice: {self}")
            seen.add(figure)

    def __str__(self) -> str:
        return ",".join(map(str, self.terms))

    @property
    def limits(self) -> Mapping[str, float]:
        """For each metric the most seconds that a single request may take to count as goodput.

        The loosest of its terms: with ``ttft_p50<1s,ttft_p99<3s``, two seconds are as promised.
        """
        limits: dict[str, float] = {}
        for term in self.terms:
            limits[term.metric] = max(term.limit_s, limits.get(term.metric, 0.0))
        return limits

    def misses(self, report: SimulationReport) -> list[str]:
        """A sentence for each promise that a run did not keep; empty if it kept them all."""
        refused = _refused(report)
        misses = [] if not refused else [f"{counted(refused, 'request')} refused"]
        if not report.result.requests_finished:
            return [*misses, "no request finished"]
        for term in self.terms:
            value = term.value_s(report)
            if value is not None and value > term.limit_s:
                misses.append(
                    f"{term.name} is {duration(value)}, {_times(value / term.limit_s)} the limit "
                    f"of {duration(term.limit_s)}"
                )
        return misses

    def excess(self, report: SimulationReport) -> float:
        """The largest share of a limit that a run took: up to 1, all promises were kept.

        Infinite where requests were refused or none finished. What was never measured, such as ITL
        where answers have one token, exceeds nothing.
        """
        if _refused(report) or not report.result.requests_finished:
            return math.inf
        values = [(term.value_s(report), term.limit_s) for term in self.terms]
        return max((value / limit for value, limit in values if value is not None), default=0.0)


def parse_slo(text: str) -> Slo:
    """Read an SLO such as ``ttft_p99<2s,itl_p99<200ms``.

    Each term is a metric (``ttft``, ``itl``, ``e2e``, ``queueing``), a statistic (``mean``,
    ``p50``, ``p90``, ``p99``, ``max``; p99 if none is named) and a time in ``us``, ``ms``, ``s``
    or ``m`` (minutes).

    Raises:
        ConfigError: It cannot be read; the message has the term.
    """
    return Slo(tuple(_parse_term(part.strip()) for part in text.split(",")))


def _parse_term(text: str) -> SloTerm:
    match = _TERM.fullmatch(text)
    if match is None:
        raise ConfigError(f"an SLO's terms look like ttft_p99<2s; got {shown(text)}")
    metric = match["metric"].lower()
    statistic = (match["statistic"] or DEFAULT_STATISTIC).lower()
    metrics = [name.removesuffix("_s") for name in METRICS]
    for what, word, choices in (
        ("metric", metric, metrics),
        ("statistic", statistic, list(STATISTICS)),
    ):
        if word not in choices:
            near = difflib.get_close_matches(word, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(choices)}"
            raise ConfigError(f"{shown(text)}: there is no {what} {shown(word)}; {hint}")
    unit = match["unit"].lower().replace("µ", "u")
    if unit not in _UNITS:
        raise ConfigError(
            f"{shown(text)}: the time must have one of the units {', '.join(_UNITS)}"
            + (f", not {shown(unit)}" if unit else "")
        )
    return SloTerm(f"{metric}_s", statistic, _seconds(float(match["number"]), unit))


def _seconds(number: float, unit: str) -> float:
    """Divided where that is exact: 200 ms are 0.2 s, to the bit."""
    per_second = {"us": 1e6, "ms": 1e3}.get(unit)
    return number * _UNITS[unit] if per_second is None else number / per_second


def _written(value_s: float) -> str:
    """Seconds in a unit that :func:`parse_slo` reads, with no more digits than it needs."""
    unit = "s" if value_s >= 1 else "ms" if value_s >= 1e-3 else "us"
    for digits in range(1, 18):
        number = float(f"{value_s / _UNITS[unit]:.{digits}g}")
        if _seconds(number, unit) == value_s:
            return str(number).removesuffix(".0") + unit
    return f"{value_s!r}s"


def _times(factor: float) -> str:
    return f"{factor:,.0f} times" if factor >= 10 else f"{factor:.2f} times"


def _refused(report: SimulationReport) -> int:
    return int(report.result.settings.get("requests_refused", 0))
