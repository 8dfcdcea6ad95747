"""The one schema in which benchmarks and simulations report what a run came to.

Everything here is plain data, so that a run on a model and a run on a virtual clock are summed up
by the same code. Field names are a contract: they are those of the JSON that ``--json`` writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol, Self


class SchedulerCounts(Protocol):
    """The totals that a result takes over; scheduler metrics and engine stats both have them."""

    @property
    def preemptions_swap(self) -> int: ...
    @property
    def preemptions_recompute(self) -> int: ...
    @property
    def recomputed_tokens(self) -> int: ...
    @property
    def swapped_queue_size_max(self) -> int: ...
    @property
    def avg_swapped_duration_s(self) -> float: ...
    @property
    def preemption_rate(self) -> float: ...
    @property
    def kv_usage_max(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When things happened to one finished request, in seconds on any one clock.

    Attributes:
        arrival_s, finish_s: Its first and its last moment.
        token_times_s: For each sample, when each of its tokens came.
        priority: Its class.
    """

    arrival_s: float
    finish_s: float
    token_times_s: Sequence[Sequence[float]]
    priority: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(map(len, self.token_times_s))

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first token of any sample; None without a token."""
        firsts = [times[0] for times in self.token_times_s if times]
        return min(firsts) - self.arrival_s if firsts else None

    @property
    def itl_s(self) -> list[float]:
        """From each token of a sample to its next, over all samples."""
        return [
            later - earlier for times in self.token_times_s for earlier, later in pairwise(times)
        ]

    @property
    def e2e_s(self) -> float:
        """Arrival to end."""
        return self.finish_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is told of many durations, in seconds; all None if there were none to measure.

    Percentiles interpolate linearly between the two nearest ranks.
    """

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Sum up ``values``, in any order."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        return cls(
            mean=math.fsum(ordered) / len(ordered),
            p50=_percentile(ordered, 50),
            p90=_percentile(ordered, 90),
            p99=_percentile(ordered, 99),
            max=ordered[-1],
        )


@dataclass(frozen=True, slots=True)
class ClassResult:
    """What a run came to for the requests of one priority class.

    Attributes:
        requests_finished: Requests.
        output_tokens: Tokens generated, over all samples.
        ttft_s: Arrival to first token, one value per request.
        itl_s: Token to next token of the same sample, one value per such pair.
        e2e_s: Arrival to end, one value per request.
    """

    requests_finished: int
    output_tokens: int
    ttft_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution

    @classmethod
    def of(cls, requests: Sequence[RequestTimes]) -> Self:
        """Sum up these requests."""
        return cls(
            requests_finished=len(requests),
            output_tokens=sum(request.output_tokens for request in requests),
            ttft_s=Distribution.of(
                request.ttft_s for request in requests if request.ttft_s is not None
            ),
            itl_s=Distribution.of(gap for request in requests for gap in request.itl_s),
            e2e_s=Distribution.of(request.e2e_s for request in requests),
        )


@dataclass(frozen=True, slots=True)
class Preemptions:
    """Requests that left the device before their end, by mode."""

    swap: int
    recompute: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to. The JSON has these fields, under these names and in this order.

    Attributes:
        requests_finished, output_tokens, ttft_s, itl_s, e2e_s: As in :class:`ClassResult`, over
            all classes.
        duration_s: First arrival to last end.
        output_tokens_per_s: Throughput over that time; 0 if it is 0.
        preemptions: By mode.
        recomputed_tokens: Positions computed again after a preemption.
        swapped_queue_size_max: Most requests that were parked at a time.
        avg_swapped_duration_s: Mean seconds of a parking.
        preemption_rate: Preemptions per request.
        kv_usage_max: Largest share of the device pool in use, 0 to 1.
        classes: The same latencies per priority, most urgent first.
        settings: What the run was asked to do.
        machine: What it ran on.
    """

    requests_finished: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    preemptions: Preemptions
    recomputed_tokens: int
    swapped_queue_size_max: int
    avg_swapped_duration_s: float
    preemption_rate: float
    kv_usage_max: float
    classes: Mapping[str, ClassResult]
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestTimes],
        counts: SchedulerCounts,
        *,
        settings: Mapping[str, Any] | None = None,
        machine: Mapping[str, Any] | None = None,
    ) -> Self:
        """Sum up the finished requests of a run and the totals of its scheduler."""
        overall = ClassResult.of(requests)
        duration_s = (
            max(request.finish_s for request in requests)
            - min(request.arrival_s for request in requests)
            if requests
            else 0.0
        )
        return cls(
            requests_finished=overall.requests_finished,
            duration_s=duration_s,
            output_tokens=overall.output_tokens,
            output_tokens_per_s=overall.output_tokens / duration_s if duration_s > 0 else 0.0,
            ttft_s=overall.ttft_s,
            itl_s=overall.itl_s,
            e2e_s=overall.e2e_s,
            preemptions=Preemptions(counts.preemptions_swap, counts.preemptions_recompute),
            recomputed_tokens=counts.recomputed_tokens,
            swapped_queue_size_max=counts.swapped_queue_size_max,
            avg_swapped_duration_s=counts.avg_swapped_duration_s,
            preemption_rate=counts.preemption_rate,
            kv_usage_max=counts.kv_usage_max,
            classes={
                str(priority): ClassResult.of(
                    [request for request in requests if request.priority == priority]
                )
                for priority in sorted({request.priority for request in requests})
            },
            settings=dict(settings or {}),
            machine=dict(machine or {}),
        )

    def as_dict(self) -> dict[str, Any]:
        """Nested plain dictionaries, for JSON."""
        return asdict(self)


def _percentile(ordered: Sequence[float], percent: float) -> float:
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)
