"""What a simulation collects: durations, values over time, requests; and all of it as one report.

Plain data, cheap to add to, and bounded in memory by what is alive, not by how long it goes on.
"""

from __future__ import annotations

import bisect
import csv
import heapq
import math
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Self, TextIO

import numpy as np
import numpy.typing as npt

from layby.errors import ConfigError, shown
from layby.results import ClassResult, Distribution, Preemptions, RunResult, SchedulerCounts
from layby.scheduling import RequestStatus
from layby.simulate.events import DecisionLog, Refusals

# --- Durations -----------------------------------------------------------------------------------

_BINS_PER_E: Final = 256  # bins while a value grows e-fold: each is 0.39% wide
_BUFFERED: Final = 4096  # values or rows that are kept as they come, then summed up together

_Array = npt.NDArray[np.float64]


class Durations:
    """A distribution of durations in seconds that takes any number of them.

    Count, mean, smallest and largest are exact. Percentiles come from bins that are equal on a log
    scale and 0.4% wide, so they are right to 0.2%.
    """

    __slots__ = ("_bins", "_count", "_max_s", "_min_s", "_new", "_total_s", "_weights", "_zeros")

    def __init__(self) -> None:
        self._new = array("d")
        self._weights = array("q")
        self._bins: dict[int, int] = {}  # bin → how many
        self._zeros = 0  # they have no logarithm
        self._count = 0
        self._total_s = 0.0
        self._min_s = math.inf
        self._max_s = -math.inf

    @classmethod
    def merged(cls, parts: Iterable[Durations]) -> Self:
        """All values of several distributions."""
        merged = cls()
        for part in parts:
            part._flush()
            for index, weight in part._bins.items():
                merged._bins[index] = merged._bins.get(index, 0) + weight
            merged._zeros += part._zeros
            merged._count += part._count
            merged._total_s += part._total_s
            merged._min_s = min(merged._min_s, part._min_s)
            merged._max_s = max(merged._max_s, part._max_s)
        return merged

    def add(self, value_s: float, weight: int = 1) -> None:
        """Take ``weight`` (at least 1) durations of ``value_s`` each.

        Raises:
            ValueError: The duration is negative or not a number.
        """
        if not value_s >= 0:
            raise ValueError(f"a duration cannot be {value_s} s")
        self._new.append(value_s)
        self._weights.append(weight)
        if len(self._new) >= _BUFFERED:
            self._flush()

    @property
    def count(self) -> int:
        """Durations taken."""
        self._flush()
        return self._count

    @property
    def mean_s(self) -> float | None:
        """None if there were none."""
        self._flush()
        return self._total_s / self._count if self._count else None

    def _flush(self) -> None:
        if not self._new:
            return
        values, weights = np.array(self._new), np.array(self._weights)
        self._new, self._weights = array("d"), array("q")
        self._count += int(weights.sum())
        self._total_s += float((values * weights).sum())
        self._min_s = min(self._min_s, float(values.min()))
        self._max_s = max(self._max_s, float(values.max()))
        positive = values > 0
        self._zeros += int(weights[~positive].sum())
        if not positive.any():
            return
        indices = np.floor(np.log(values[positive]) * _BINS_PER_E).astype(np.int64)
        lowest = int(indices.min())
        sums = np.bincount(indices - lowest, weights[positive])  # exact: far below 2**53
        for above in np.flatnonzero(sums).tolist():
            index = lowest + above
            self._bins[index] = self._bins.get(index, 0) + int(sums[above])

    def distribution(self) -> Distribution:
        """Mean, percentiles (between the two nearest ranks, linearly) and largest."""
        if not self.count:
            return Distribution()
        last = self._count - 1
        values, ends = self._ranked()

        def at(rank: int) -> float:
            # The first and the last are known exactly, which matters when there are few.
            if rank in (0, last):
                return self._max_s if rank else self._min_s
            return values[bisect.bisect_right(ends, rank)]

        def percentile(percent: float) -> float:
            rank = last * percent / 100
            below = math.floor(rank)
            low, high = at(below), at(min(below + 1, last))
            return low + (high - low) * (rank - below)

        return Distribution(
            mean=self.mean_s,
            p50=percentile(50),
            p90=percentile(90),
            p99=percentile(99),
            max=self._max_s,
        )

    def cdf(self, max_points: int = 200) -> list[tuple[float, float]]:
        """Points ``(duration_s, share of all that took at most as long)`` of a curve.

        Neither coordinate ever falls; the last point is ``(max, 1)``. At most about
        ``max_points``, dense where the curve rises and where it spans much time.
        """
        if not self.count:
            return []
        points = [(self._min_s, max(self._zeros, 1) / self._count)]
        indices = sorted(self._bins)
        if not indices:
            return [(0.0, 1.0)]
        step = 2 / max_points
        span = max(indices[-1] - indices[0], 1)
        seen, last_share, last_index = self._zeros, points[0][1], indices[0]
        for index in indices[:-1]:
            seen += self._bins[index]
            share = seen / self._count
            if share - last_share >= step or (index - last_index) / span >= step:
                value_s = math.exp((index + 1) / _BINS_PER_E)
                points.append((min(value_s, self._max_s), share))
                last_share, last_index = share, index
        if points[-1][0] >= self._max_s:
            points.pop()
        return [*points, (self._max_s, 1.0)]

    def _ranked(self) -> tuple[list[float], list[int]]:
        """Each bin's value, smallest first, and how many there are up to its end."""
        items = sorted(self._bins.items())
        values = [math.exp((index + 0.5) / _BINS_PER_E) for index, _ in items]
        values = [min(max(value, self._min_s), self._max_s) for value in values]
        weights = [weight for _, weight in items]
        return [0.0, *values], list(accumulate([self._zeros, *weights]))


# --- Values over time ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, summed up in stretches of time.

    Attributes:
        start_s: When each stretch begins; it lasts until the next begins.
        end_s: When the last one ends.
        mean: For each column, its mean over each stretch, weighted by time.
        high: For each column, its largest value in each stretch.
    """

    start_s: Sequence[float]
    end_s: float
    mean: Mapping[str, Sequence[float]]
    high: Mapping[str, Sequence[float]]

    def coarser(self, max_points: int) -> Series:
        """The same in at most ``max_points`` stretches: neighbours are merged."""
        times = [*self.start_s, self.end_s]
        per_stretch = math.ceil(len(self.start_s) / max_points)
        if per_stretch <= 1:
            return self
        bounds = [*range(0, len(self.start_s), per_stretch), len(self.start_s)]
        parts = [range(low, high) for low, high in pairwise(bounds)]

        def mean(values: Sequence[float], part: range) -> float:
            area = sum(values[i] * (times[i + 1] - times[i]) for i in part)
            return area / (times[part.stop] - times[part.start])

        return Series(
            start_s=[times[part.start] for part in parts],
            end_s=self.end_s,
            mean={name: [mean(vs, part) for part in parts] for name, vs in self.mean.items()},
            high={
                name: [max(vs[part.start : part.stop]) for part in parts]
                for name, vs in self.high.items()
            },
        )


class Timeline:
    """Named values that change together: each holds until the next :meth:`add`.

    Memory does not grow: time is cut into at most ``max_points`` stretches of equal length, and
    when they are used up, neighbours are merged. Areas under the curves are kept exactly, and so
    are peaks, unless they lasted no time at all.

    Args:
        columns: Their names.
        max_points: Stretches to keep, an even number.
    """

    __slots__ = (
        "_areas",
        "_buffer",
        "_flush_at",
        "_highs",
        "_max_points",
        "_origin_s",
        "_pack",
        "_seconds",
        "_width_s",
        "columns",
    )

    def __init__(self, columns: Sequence[str], *, max_points: int = 2000) -> None:
        if max_points < 2 or max_points % 2:
            raise ValueError(f"max_points must be even and at least 2, got {max_points}")
        self.columns = tuple(columns)
        self._max_points = max_points
        # Rows of time and values, as they come.
        row = struct.Struct(f"{1 + len(self.columns)}d")
        self._pack = row.pack
        self._buffer = bytearray()
        self._flush_at = _BUFFERED * row.size
        self._origin_s = 0.0
        self._width_s = 0.0  # of one stretch; 0 before time has passed
        self._areas: _Array = np.zeros((max_points, len(self.columns)))
        self._highs: _Array = np.full((max_points, len(self.columns)), -np.inf)
        self._seconds: _Array = np.zeros(max_points)

    def add(self, time_s: float, values: Sequence[float]) -> None:
        """From ``time_s`` on the columns have these values; of several at a time, the last counts.

        Raises:
            ValueError: There is not one value per column. (That time ran backwards is noticed
                later, when rows are summed up.)
        """
        try:
            self._buffer += self._pack(time_s, *values)
        except struct.error:
            raise ValueError(
                f"the columns {', '.join(self.columns)} got the values {shown(values)}"
            ) from None
        if len(self._buffer) >= self._flush_at:
            self._flush()

    def series(self, *, end_s: float | None = None) -> Series:
        """What was seen so far.

        Args:
            end_s: Until when the last values hold; the time of the last :meth:`add` if None.
        """
        self._flush()
        if end_s is not None and self._buffer:
            self.add(end_s, self._rows()[-1, 1:].tolist())
            self._flush()
        if not self._width_s:
            none: dict[str, list[float]] = {name: [] for name in self.columns}
            return Series([], self._origin_s, none, none)
        used = np.count_nonzero(self._seconds)  # a prefix: time has no gaps
        highs = self._highs[:used]
        means = np.minimum(self._areas[:used] / self._seconds[:used, None], highs)
        # Where nothing changes but by rounding, one stretch tells it all.
        rows = np.concatenate([means, highs], axis=1)
        same = np.isclose(rows[1:], rows[:-1], rtol=1e-9, atol=1e-12).all(axis=1)
        kept = np.flatnonzero(np.concatenate([[True], ~same]))
        return Series(
            start_s=(self._origin_s + kept * self._width_s).tolist(),
            end_s=float(self._origin_s + self._seconds.sum()),
            mean={name: means[kept, i].tolist() for i, name in enumerate(self.columns)},
            high={name: highs[kept, i].tolist() for i, name in enumerate(self.columns)},
        )

    def _flush(self) -> None:
        """Sum up all rows; the last stays, since it holds on."""
        if not self._buffer:
            return
        rows = self._rows()
        times = rows[:, 0]
        if not np.all(times[1:] >= times[:-1]):
            at = int(np.flatnonzero(~(times[1:] >= times[:-1]))[0])
            raise ValueError(f"time runs from {times[at]} s to {times[at + 1]} s")
        if times[-1] > times[0]:
            self._integrate(times, rows[:-1, 1:])
        self._buffer = bytearray(rows[-1].tobytes())

    def _rows(self) -> _Array:
        return np.frombuffer(bytes(self._buffer)).reshape(-1, 1 + len(self.columns))

    def _integrate(self, times: _Array, values: _Array) -> None:
        """Add ``values[i]``, which hold from ``times[i]`` to ``times[i + 1]``."""
        if not self._width_s:
            self._origin_s = float(times[0])
            # Not so short that borders could fall on one another by rounding.
            least_s = max(1e-9, 4 * np.spacing(times[-1]))
            self._width_s = float(max((times[-1] - times[0]) / self._max_points, least_s))
        # What lies beyond the last border by rounding only belongs to the last stretch.
        while times[-1] - self._origin_s > self._width_s * self._max_points * (1 + 1e-9):
            self._halve()
        # Cut at the stretches' borders, so that every piece lies in one of them.
        borders = self._origin_s + self._width_s * np.arange(1, self._max_points)
        inside = borders[(borders > times[0]) & (borders < times[-1])]
        cuts = np.concatenate([times, inside])
        cuts.sort()
        lasting = cuts[1:] > cuts[:-1]
        begins, lengths = cuts[:-1][lasting], np.diff(cuts)[lasting]
        pieces = values[np.searchsorted(times, begins, side="right") - 1]
        stretch = np.searchsorted(borders, begins, side="right")
        where, first = np.unique(stretch, return_index=True)
        self._areas[where] += np.add.reduceat(pieces * lengths[:, None], first)
        self._seconds[where] += np.add.reduceat(lengths, first)
        self._highs[where] = np.maximum(self._highs[where], np.maximum.reduceat(pieces, first))

    def _halve(self) -> None:
        """Merge neighbours; the second half is free again."""
        half = self._max_points // 2
        self._areas[:half] = self._areas[::2] + self._areas[1::2]
        self._highs[:half] = np.maximum(self._highs[::2], self._highs[1::2])
        self._seconds[:half] = self._seconds[::2] + self._seconds[1::2]
        self._areas[half:], self._highs[half:], self._seconds[half:] = 0, -np.inf, 0
        self._width_s *= 2


# --- Requests ------------------------------------------------------------------------------------

Span = tuple[RequestStatus, float, float]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request's life, in seconds on the virtual clock.

    Made by :meth:`RequestLog.start`. States and all that follows from them change in :meth:`enter`
    only; ``first_token_s`` is for whoever sees the token.

    Attributes:
        index: Its number among the requests of the log, from 0.
        request_id, priority, n: As in :class:`layby.scheduling.Request`.
        arrival_s: When it came.
        first_scheduled_s: When its queueing ended.
        first_token_s: When its first token of any sample came.
        finish_s: When it ended.
        num_prompt_tokens: Length of its prompt.
        num_output_tokens: Tokens of all its samples.
        preemptions_swap, preemptions_recompute: How often it left the device before its end.
        swapped_s: How long it was parked, altogether.
        spans: ``(state, start_s, end_s)``, in order and without gaps.
    """

    index: int
    request_id: str
    priority: int
    arrival_s: float
    num_prompt_tokens: int
    n: int = 1
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finish_s: float | None = None
    num_output_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swapped_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    _state: RequestStatus = field(default=RequestStatus.WAITING, repr=False)
    _since_s: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        self._since_s = self.arrival_s

    def enter(self, state: RequestStatus, time_s: float) -> None:
        """From ``time_s`` on it is in this state; a preemption is told by the two states."""
        left, since_s = self._state, self._since_s
        if time_s > since_s:
            self.spans.append((left, since_s, time_s))
        if left is RequestStatus.RUNNING:
            if state is RequestStatus.SWAPPED:
                self.preemptions_swap += 1
            elif state is RequestStatus.WAITING:
                self.preemptions_recompute += 1
        elif left is RequestStatus.SWAPPED:
            self.swapped_s += time_s - since_s
        if state is RequestStatus.RUNNING and self.first_scheduled_s is None:
            self.first_scheduled_s = time_s
        self._state, self._since_s = state, time_s

    @property
    def preemptions(self) -> int:
        """Preemptions of either mode."""
        return self.preemptions_swap + self.preemptions_recompute

    @property
    def queueing_s(self) -> float | None:
        """Arrival to the first step that computed something for it."""
        return _since(self.first_scheduled_s, self.arrival_s)

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return _since(self.first_token_s, self.arrival_s)

    @property
    def itl_s(self) -> float | None:
        """Mean time from a token to the next, parking included; None with fewer than two."""
        gaps = self.num_output_tokens / self.n - 1
        whole_s = _since(self.finish_s, self.first_token_s)
        return whole_s / gaps if whole_s is not None and gaps > 0 else None

    @property
    def e2e_s(self) -> float | None:
        """Arrival to end."""
        return _since(self.finish_s, self.arrival_s)

    def spans_at_most(self, limit: int) -> list[Span]:
        """No more than ``limit`` spans: the shortest are counted to the one before them."""
        if len(self.spans) <= limit:
            return self.spans
        by_length = sorted(
            range(1, len(self.spans)), key=lambda i: self.spans[i][1] - self.spans[i][2]
        )
        starts = [0, *sorted(by_length[: limit - 1])]
        ends = [*(i - 1 for i in starts[1:]), len(self.spans) - 1]
        return [
            (self.spans[i][0], self.spans[i][1], self.spans[j][2])
            for i, j in zip(starts, ends, strict=True)
        ]


def _since(end_s: float | None, start_s: float | None) -> float | None:
    return None if end_s is None or start_s is None else end_s - start_s


@dataclass(frozen=True, slots=True)
class Goodput:
    """How much of the work met its service-level objective.

    Attributes:
        slo: The most that each of a request's durations may be, in seconds.
        requests_met: Requests that kept all of it.
        requests_per_s: The same per second of the run.
        share: The same of all requests; 0 if there were none.
    """

    slo: Mapping[str, float]
    requests_met: int
    requests_per_s: float
    share: float


@dataclass(slots=True, eq=False)
class ClassLog:
    """What is known of the finished requests of one priority class, or of all.

    Attributes:
        queueing_s, ttft_s, e2e_s: One value per request.
        itl_s: One value per pair of a sample's successive tokens; the simulation adds them.
        requests_finished, output_tokens: As in :class:`layby.results.ClassResult`.
        requests_met: Requests that met the SLO.
    """

    queueing_s: Durations = field(default_factory=Durations)
    ttft_s: Durations = field(default_factory=Durations)
    itl_s: Durations = field(default_factory=Durations)
    e2e_s: Durations = field(default_factory=Durations)
    requests_finished: int = 0
    output_tokens: int = 0
    requests_met: int = 0

    @classmethod
    def merged(cls, parts: Sequence[ClassLog]) -> Self:
        """Several classes as one."""
        return cls(
            queueing_s=Durations.merged(part.queueing_s for part in parts),
            ttft_s=Durations.merged(part.ttft_s for part in parts),
            itl_s=Durations.merged(part.itl_s for part in parts),
            e2e_s=Durations.merged(part.e2e_s for part in parts),
            requests_finished=sum(part.requests_finished for part in parts),
            output_tokens=sum(part.output_tokens for part in parts),
            requests_met=sum(part.requests_met for part in parts),
        )

    def result(self) -> ClassResult:
        """In the words of the result schema."""
        return ClassResult(
            requests_finished=self.requests_finished,
            output_tokens=self.output_tokens,
            ttft_s=self.ttft_s.distribution(),
            itl_s=self.itl_s.distribution(),
            e2e_s=self.e2e_s.distribution(),
        )


class RequestLog:
    """What became of the requests: durations of all, and the whole lives of some.

    Whole records are kept of at most ``max_records``: of those that were preempted most, of those
    that took longest, and of an even sample of all by arrival.

    Args:
        slo: Most seconds for any of ``queueing_s``, ``ttft_s``, ``itl_s`` (a request's mean) and
            ``e2e_s``; what goodput is counted against.
        csv_file: Where to write a row for each request as it finishes, if anywhere.
        max_records: See above.

    Raises:
        ConfigError: The SLO names something else or is no positive number of seconds.
    """

    SLO_NAMES: Final = ("queueing_s", "ttft_s", "itl_s", "e2e_s")
    CSV_COLUMNS: Final = (
        "request_id",
        "priority",
        "arrival_s",
        "first_scheduled_s",
        "first_token_s",
        "finish_s",
        "queueing_s",
        "ttft_s",
        "itl_s",
        "e2e_s",
        "num_prompt_tokens",
        "num_output_tokens",
        "preemptions_swap",
        "preemptions_recompute",
        "swapped_s",
    )

    def __init__(
        self,
        *,
        slo: Mapping[str, float] | None = None,
        csv_file: TextIO | None = None,
        max_records: int = 400,
    ) -> None:
        self.slo = dict(slo or {})
        for name, limit_s in self.slo.items():
            if name not in self.SLO_NAMES:
                raise ConfigError(
                    f"an SLO may limit {', '.join(self.SLO_NAMES)}, not {shown(name)}"
                )
            if not limit_s > 0:
                raise ConfigError(f"the SLO's {name} must be more than 0 s, got {shown(limit_s)}")
        self.classes: dict[int, ClassLog] = {}
        self._csv = csv.writer(csv_file, lineterminator="\n") if csv_file is not None else None
        if self._csv is not None:
            self._csv.writerow(self.CSV_COLUMNS)
        self._num_started = 0
        self._first_arrival_s = math.inf
        self._last_finish_s = -math.inf
        self._preempted = _Largest(max_records // 4)
        self._longest = _Largest(max_records // 4)
        self._sample = _EvenSample(max_records // 2)

    def start(
        self,
        request_id: str,
        *,
        arrival_s: float,
        num_prompt_tokens: int,
        priority: int = 0,
        n: int = 1,
    ) -> RequestRecord:
        """A request arrives and waits; whoever moves it tells the record."""
        record = RequestRecord(
            self._num_started, request_id, priority, arrival_s, num_prompt_tokens, n
        )
        self._num_started += 1
        return record

    def of_class(self, priority: int) -> ClassLog:
        """The log of one class, made on first use."""
        log = self.classes.get(priority)
        if log is None:
            log = self.classes[priority] = ClassLog()
        return log

    def finish(self, record: RequestRecord, time_s: float, num_output_tokens: int) -> None:
        """The request has ended with so many tokens, over all samples."""
        record.enter(RequestStatus.FINISHED, time_s)
        record.finish_s = time_s
        record.num_output_tokens = num_output_tokens
        e2e_s = time_s - record.arrival_s
        log = self.of_class(record.priority)
        log.requests_finished += 1
        log.output_tokens += num_output_tokens
        log.e2e_s.add(e2e_s)
        if record.queueing_s is not None:
            log.queueing_s.add(record.queueing_s)
        if record.ttft_s is not None:
            log.ttft_s.add(record.ttft_s)
            log.requests_met += self._is_met(record)
        self._first_arrival_s = min(self._first_arrival_s, record.arrival_s)
        self._last_finish_s = max(self._last_finish_s, time_s)
        if record.preemptions:
            self._preempted.offer((record.preemptions, e2e_s), record)
        self._longest.offer((e2e_s,), record)
        self._sample.offer(record)
        if self._csv is not None:
            self._csv.writerow(
                "" if value is None else f"{value:.6f}" if isinstance(value, float) else value
                for value in (getattr(record, name) for name in self.CSV_COLUMNS)
            )

    def _is_met(self, record: RequestRecord) -> bool:
        # A request of one token has no ITL to miss.
        return all(
            (value := getattr(record, name)) is None or value <= limit_s
            for name, limit_s in self.slo.items()
        )

    @property
    def duration_s(self) -> float:
        """First arrival to last end."""
        return max(0.0, self._last_finish_s - self._first_arrival_s)

    def overall(self) -> ClassLog:
        """All classes as one."""
        return ClassLog.merged(list(self.classes.values()))

    def goodput(self, log: ClassLog) -> Goodput | None:
        """Goodput of one of the classes, or of all; None without an SLO."""
        if not self.slo:
            return None
        met, finished = log.requests_met, log.requests_finished
        return Goodput(
            slo=self.slo,
            requests_met=met,
            requests_per_s=met / self.duration_s if self.duration_s > 0 else 0.0,
            share=met / finished if finished else 0.0,
        )

    def records(self) -> list[RequestRecord]:
        """The records that were kept, by arrival."""
        kept = {
            record.index: record
            for group in (self._preempted, self._longest, self._sample)
            for record in group.records()
        }
        return [kept[index] for index in sorted(kept)]

    def result(
        self,
        counts: SchedulerCounts,
        *,
        settings: Mapping[str, Any] | None = None,
        machine: Mapping[str, Any] | None = None,
    ) -> RunResult:
        """The run so far, with the totals of its scheduler, in the one result schema."""
        overall = self.overall().result()
        return RunResult(
            requests_finished=overall.requests_finished,
            duration_s=self.duration_s,
            output_tokens=overall.output_tokens,
            output_tokens_per_s=(
                overall.output_tokens / self.duration_s if self.duration_s > 0 else 0.0
            ),
            ttft_s=overall.ttft_s,
            itl_s=overall.itl_s,
            e2e_s=overall.e2e_s,
            preemptions=Preemptions(counts.preemptions_swap, counts.preemptions_recompute),
            recomputed_tokens=counts.recomputed_tokens,
            swapped_queue_size_max=counts.swapped_queue_size_max,
            avg_swapped_duration_s=counts.avg_swapped_duration_s,
            preemption_rate=counts.preemption_rate,
            kv_usage_max=counts.kv_usage_max,
            classes={str(p): self.classes[p].result() for p in sorted(self.classes)},
            settings=dict(settings or {}),
            machine=dict(machine or {}),
        )


class _Largest:
    """The records with the largest keys; among equal ones, those that came first."""

    __slots__ = ("_heap", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[tuple[float, ...], int, RequestRecord]] = []

    def offer(self, key: tuple[float, ...], record: RequestRecord) -> None:
        entry = (key, -record.index, record)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        elif self._heap and entry > self._heap[0]:
            heapq.heapreplace(self._heap, entry)

    def records(self) -> list[RequestRecord]:
        return [record for _, _, record in self._heap]


class _EvenSample:
    """Every k-th record, k being the power of two at which they are few enough."""

    __slots__ = ("_limit", "_records", "_stride")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stride = 1
        self._records: list[RequestRecord] = []

    def offer(self, record: RequestRecord) -> None:
        if record.index % self._stride or not self._limit:
            return
        self._records.append(record)
        while len(self._records) > self._limit:
            self._stride *= 2
            self._records = [r for r in self._records if r.index % self._stride == 0]

    def records(self) -> list[RequestRecord]:
        return self._records


# --- The whole -----------------------------------------------------------------------------------

_JSON_POINTS: Final = 200  # of the timeline


@dataclass(frozen=True, slots=True)
class TierMoves:
    """What moved between one tier of parked work and the one above it.

    Attributes:
        tier: ``ram``, below the device, or ``disk``, below that.
        out_blocks, in_blocks: Blocks moved down to it, and back.
        out_bytes, in_bytes: The same in bytes.
    """

    tier: str
    out_blocks: int
    in_blocks: int
    out_bytes: int
    in_bytes: int


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """All that is told of one simulated run.

    Attributes:
        title: What sets this run apart, such as the name of its policy.
        result: The figures that every run has, with settings and machine.
        queueing_s: Arrival to first step, one value per request.
        queueing_by_class: The same per priority, as in ``result.classes``.
        goodput, goodput_by_class: Against the SLO; None and empty if there is none.
        moves: One per tier.
        timeline: The columns over time; a report plots ``waiting``, ``running``, ``swapped``
            (requests), ``kv_usage``, ``swap_usage`` (shares, 0 to 1), ``num_blocks`` (size of the
            device pool) and ``pressure`` (0 ok, 1 rising, 2 saturated).
        records: Some requests' lives, by arrival.
        cdfs: Curves of ``ttft_s``, ``itl_s``, ``e2e_s``: see :meth:`Durations.cdf`.
        profile: One line on the machine that was simulated.
        simulated_s: Seconds that passed on the virtual clock.
        wall_s: Seconds that the simulation took.
        steps: Scheduler steps.
        refusals: Requests that never came in.
        decisions: Choices between the two ways out.
    """

    title: str
    result: RunResult
    queueing_s: Distribution
    queueing_by_class: Mapping[str, Distribution]
    goodput: Goodput | None
    goodput_by_class: Mapping[str, Goodput]
    moves: Sequence[TierMoves]
    timeline: Series
    records: Sequence[RequestRecord]
    cdfs: Mapping[str, Sequence[tuple[float, float]]]
    profile: str
    simulated_s: float
    wall_s: float
    steps: int
    refusals: Refusals = field(default_factory=Refusals)
    decisions: DecisionLog = field(default_factory=DecisionLog)

    @classmethod
    def of(
        cls,
        title: str,
        log: RequestLog,
        timeline: Timeline,
        counts: SchedulerCounts,
        *,
        profile: str,
        simulated_s: float,
        wall_s: float,
        steps: int,
        moves: Sequence[TierMoves] = (),
        settings: Mapping[str, Any] | None = None,
        machine: Mapping[str, Any] | None = None,
        refusals: Refusals | None = None,
        decisions: DecisionLog | None = None,
    ) -> Self:
        """Sum up what a run collected."""
        overall = log.overall()
        classes = {str(priority): log.classes[priority] for priority in sorted(log.classes)}
        by_class = {name: log.goodput(part) for name, part in classes.items()}
        return cls(
            title=title,
            result=log.result(counts, settings=settings, machine=machine),
            queueing_s=overall.queueing_s.distribution(),
            queueing_by_class={
                name: part.queueing_s.distribution() for name, part in classes.items()
            },
            goodput=log.goodput(overall),
            goodput_by_class={name: met for name, met in by_class.items() if met is not None},
            moves=tuple(moves),
            timeline=timeline.series(),
            records=log.records(),
            cdfs={
                "ttft_s": overall.ttft_s.cdf(),
                "itl_s": overall.itl_s.cdf(),
                "e2e_s": overall.e2e_s.cdf(),
            },
            profile=profile,
            simulated_s=simulated_s,
            wall_s=wall_s,
            steps=steps,
            refusals=refusals or Refusals(),
            decisions=decisions or DecisionLog(),
        )

    def as_dict(self) -> dict[str, Any]:
        """The result schema with more keys, for JSON.

        Queueing and goodput stand beside the other figures, overall and per class. The wall time
        is left out, so that the same simulation gives the same bytes; the timeline is coarse.
        """
        known = self.result.as_dict()
        for name, figures in known["classes"].items():
            figures["queueing_s"] = asdict(self.queueing_by_class[name])
            if name in self.goodput_by_class:
                figures["goodput"] = asdict(self.goodput_by_class[name])
        return known | {
            "title": self.title,
            "profile": self.profile,
            "queueing_s": asdict(self.queueing_s),
            "goodput": None if self.goodput is None else asdict(self.goodput),
            "moves": [asdict(tier) for tier in self.moves],
            "refusals": self.refusals.as_dict(),
            "decisions": self.decisions.as_dict(),
            "simulated_s": self.simulated_s,
            "steps": self.steps,
            "timeline": asdict(self.timeline.coarser(_JSON_POINTS)),
        }
