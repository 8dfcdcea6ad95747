"""What an engine reports: one snapshot per step, Prometheus metrics made of it, and a log line."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from layby.engine.pressure import PressureState
from layby.execution.block_io import FAULT_KINDS

logger = logging.getLogger("layby.engine")

LOG_INTERVAL_S = 10.0
"""Seconds between two log lines of a busy engine."""

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_BUCKETS_S = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0,
    7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_E2E_BUCKETS_S = (
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_SWAPPED_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class EngineStats(Mapping[str, Any]):
    """State and totals of an engine between two steps.

    Reads as a mapping of its fields, too: ``stats["running"]`` and ``dict(stats)``.

    Attributes:
        running, waiting, swapped: Requests in each queue now.
        num_blocks, num_free_blocks: Device pool; free includes reusable cached blocks.
        num_target_blocks: Size that the device pool is to have; see ``Engine.resize_kv_pool``.
        num_swap_blocks, num_free_swap_blocks: The same of the swap pool.
        num_disk_blocks, num_free_disk_blocks: The same of the disk below it.
        kv_usage, swap_usage, disk_usage: Share of each that is held now, 0 to 1.
        swapped_out_blocks, swapped_in_blocks: Blocks moved to the swap pool, and back.
        demoted_blocks, promoted_blocks: Blocks moved from there to disk, and back.
        swap_faults: Transfers between RAM and disk that failed.
        pool_shrinks, pool_growths: How often memory has called for another size of the device pool.
        kv_losses: Parked requests that had to be recomputed because of it, or for lack of room.
        kv_usage_max: Largest ``kv_usage`` at the end of a step.
        requests_accepted, requests_finished, requests_aborted: Totals; finished are those that
            ended by themselves, aborted all others.
        requests_failed: Those of the aborted that ended with an error.
        requests_shed: Requests refused because the engine was saturated; not accepted ones.
        pressure: ``ok``, ``rising`` or ``saturated``.
        swapped_queue_growth: Requests per second by which the swapped queue grows.
        prompt_tokens: Prompt tokens of the requests that have reached their first token.
        generation_tokens: Tokens sampled.
        preemptions_swap, preemptions_recompute: Requests that left the device, by mode.
        preemption_rate: Preemptions per accepted request.
        decisions_swap, decisions_recompute: Victims whose way out was chosen by its cost.
        recomputed_tokens: Positions computed again after a preemption.
        swapped_queue_size_max: Longest the swapped queue has been.
        swaps_completed: Parked requests that came back, or ended parked.
        avg_swapped_duration_s: Mean seconds of those parkings.
        promotions, demotions: Classes that requests rose by waiting, and sank by running long.
        prefix_cache_queried_tokens, prefix_cache_hit_tokens: Tokens looked up in the prefix cache
            at admission, and found.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    num_blocks: int = 0
    num_target_blocks: int = 0
    num_free_blocks: int = 0
    num_swap_blocks: int = 0
    num_free_swap_blocks: int = 0
    kv_usage: float = 0.0
    swap_usage: float = 0.0
    num_disk_blocks: int = 0
    num_free_disk_blocks: int = 0
    disk_usage: float = 0.0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    demoted_blocks: int = 0
    promoted_blocks: int = 0
    swap_faults: int = 0
    pool_shrinks: int = 0
    pool_growths: int = 0
    kv_losses: int = 0
    kv_usage_max: float = 0.0
    requests_accepted: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    requests_shed: int = 0
    pressure: PressureState = PressureState.OK
    swapped_queue_growth: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    preemption_rate: float = 0.0
    decisions_swap: int = 0
    decisions_recompute: int = 0
    recomputed_tokens: int = 0
    swapped_queue_size_max: int = 0
    swaps_completed: int = 0
    avg_swapped_duration_s: float = 0.0
    promotions: int = 0
    demotions: int = 0
    prefix_cache_queried_tokens: int = 0
    prefix_cache_hit_tokens: int = 0

    def __getitem__(self, name: str) -> Any:
        if name not in _STATS_NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(_STATS_NAMES)

    def __len__(self) -> int:
        return len(_STATS_NAMES)

    def as_dict(self) -> dict[str, Any]:
        """A plain dictionary, for JSON."""
        return dict(self)


_STATS_NAMES = tuple(field.name for field in fields(EngineStats))


class EngineMetrics:
    """Prometheus metrics of one engine, in a registry of its own.

    Gauges and counters are read from one snapshot at every scrape, so that they agree with each
    other and can never lag behind or drift; only the histograms are kept here.

    Args:
        model_name: Value of the ``model_name`` label.
        read_stats: Gives the latest snapshot; called at scrape time, from any thread.
        swap_faults: Failed transfers between RAM and disk so far, by kind; read at scrape time.
    """

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], EngineStats],
        swap_faults: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._finished_by_reason: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS_S
        )
        self._inter_token_latency = _BatchHistogram(
            "vllm:inter_token_latency_seconds",
            "From one token of a sample to its next.",
            _ITL_BUCKETS_S,
            model_name,
        )
        self.registry.register(self._inter_token_latency)
        self._e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "Arrival to end, of requests that ended by themselves.",
            _E2E_BUCKETS_S,
        )
        self._swapped_duration = Histogram(
            "layby_swapped_duration_seconds",
            "How long parked requests stayed parked.",
            buckets=_SWAPPED_BUCKETS_S,
            registry=self.registry,
        )
        self.registry.register(
            _StatsCollector(model_name, read_stats, self._finished_by_reason, swap_faults)
        )

    def observe_first_token(self, seconds: float) -> None:
        """A request's first token came so long after its arrival."""
        self._time_to_first_token.observe(seconds)

    def observe_inter_token(self, seconds: float, count: int = 1) -> None:
        """So many samples' next token came so long after the one before it."""
        self._inter_token_latency.add(seconds, count)

    def observe_end(self, reason: str, seconds: float) -> None:
        """A request ended, so long after its arrival; ``reason`` is that of its last sample."""
        self._finished_by_reason[reason] += 1
        if reason in ("stop", "length"):
            self._e2e_latency.observe(seconds)

    def observe_swapped(self, seconds: float) -> None:
        """A parked request came back, or ended, after so long."""
        self._swapped_duration.observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            name, help_text, labelnames=["model_name"], buckets=buckets, registry=self.registry
        ).labels(self._model_name)


def _number(value: float) -> str:
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text


class _BatchHistogram(Collector):
    """A histogram that takes many equal values at once.

    A step gives most of its sequences the same inter-token latency. One thread adds.
    """

    def __init__(
        self, name: str, help_text: str, buckets: tuple[float, ...], model_name: str
    ) -> None:
        self._name, self._help_text, self._model_name = name, help_text, model_name
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def add(self, value: float, count: int) -> None:
        """Add a value so many times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=["model_name"])
        buckets = [
            (_number(bound), float(count))
            for bound, count in zip(self._bounds, accumulate(self._counts), strict=True)
        ]
        family.add_metric([self._model_name], buckets, self._sum)
        yield family


class _StatsCollector(Collector):
    """Turns a snapshot into gauges and counters, under Layby's own and the customary names."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], EngineStats],
        finished_by_reason: Mapping[str, int],
        swap_faults: Mapping[str, int],
    ) -> None:
        self._model_name = model_name
        self._read_stats = read_stats
        self._finished_by_reason = finished_by_reason
        self._swap_faults = swap_faults

    def collect(self) -> Iterator[Metric]:
        stats = self._read_stats()
        yield from self._own(stats)
        yield from self._tiers(stats)
        yield from self._customary(stats)

    def _own(self, stats: EngineStats) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "layby_swapped_queue_size", "Requests parked now.", value=stats.swapped
        )
        yield GaugeMetricFamily(
            "layby_kv_blocks_total", "Blocks of the device pool now.", value=stats.num_blocks
        )
        yield GaugeMetricFamily(
            "layby_kv_blocks_target",
            "Blocks that the device pool is to have.",
            value=stats.num_target_blocks,
        )
        resizes = CounterMetricFamily(
            "layby_kv_pool_resizes",
            "How often memory has called for another size of the device pool.",
            labels=["direction"],
        )
        resizes.add_metric(["shrink"], stats.pool_shrinks)
        resizes.add_metric(["grow"], stats.pool_growths)
        yield resizes
        yield GaugeMetricFamily(
            "layby_preemption_rate", "Preemptions per request.", value=stats.preemption_rate
        )
        yield _by_label(
            GaugeMetricFamily,
            "layby_pressure_state",
            "1 for the state of memory now, 0 for others.",
            state={state: float(state is stats.pressure) for state in PressureState},
        )
        yield GaugeMetricFamily(
            "layby_swapped_queue_growth",
            "Requests per second by which the swapped queue grows.",
            value=stats.swapped_queue_growth,
        )
        yield CounterMetricFamily(
            "layby_requests_shed",
            "Requests refused because memory was saturated.",
            value=stats.requests_shed,
        )
        yield _by_label(
            CounterMetricFamily,
            "layby_preemptions",
            "Requests that left the device before their end.",
            mode={"swap": stats.preemptions_swap, "recompute": stats.preemptions_recompute},
        )
        yield _by_label(
            CounterMetricFamily,
            "layby_preemption_decisions",
            "Preemptions whose way out was chosen by its cost.",
            choice={"swap": stats.decisions_swap, "recompute": stats.decisions_recompute},
        )
        yield CounterMetricFamily(
            "layby_recomputed_tokens",
            "Positions computed again after a preemption.",
            value=stats.recomputed_tokens,
        )
        yield CounterMetricFamily(
            "layby_promotions",
            "Classes that requests rose because they waited.",
            value=stats.promotions,
        )
        yield CounterMetricFamily(
            "layby_demotions",
            "Classes that requests sank because they ran long.",
            value=stats.demotions,
        )

    def _tiers(self, stats: EngineStats) -> Iterator[Metric]:
        yield _by_label(
            GaugeMetricFamily,
            "layby_swap_usage",
            "Share of each tier of parked work in use, 0 to 1.",
            tier={"ram": stats.swap_usage, "disk": stats.disk_usage},
        )
        yield _by_label(
            CounterMetricFamily,
            "layby_swap_moved_blocks",
            "Blocks of parked work moved: device to RAM (out), RAM to disk (demote), and back.",
            move={
                "out": stats.swapped_out_blocks,
                "in": stats.swapped_in_blocks,
                "demote": stats.demoted_blocks,
                "promote": stats.promoted_blocks,
            },
        )
        yield _by_label(
            CounterMetricFamily,
            "layby_swap_faults",
            "Transfers between RAM and disk that failed, by what went wrong.",
            kind=dict.fromkeys(FAULT_KINDS, 0) | dict(self._swap_faults),
        )
        yield CounterMetricFamily(
            "layby_kv_losses",
            "Parked requests recomputed because of a fault, or because no tier had room.",
            value=stats.kv_losses,
        )

    def _customary(self, stats: EngineStats) -> Iterator[Metric]:
        for name, help_text, value in (
            ("num_requests_running", "Requests running now.", stats.running),
            ("num_requests_waiting", "Requests waiting now.", stats.waiting),
            ("num_requests_swapped", "Requests parked now.", stats.swapped),
            ("kv_cache_usage_perc", "Share of the device pool in use, 0 to 1.", stats.kv_usage),
            ("cpu_cache_usage_perc", "Share of the swap pool in use, 0 to 1.", stats.swap_usage),
        ):
            of_model = {self._model_name: value}
            yield _by_label(GaugeMetricFamily, f"vllm:{name}", help_text, model_name=of_model)
        for name, help_text, value in (
            (
                "num_preemptions",
                "Preemptions of either mode.",
                stats.preemptions_swap + stats.preemptions_recompute,
            ),
            (
                "prompt_tokens",
                "Prompt tokens of requests past their first token.",
                stats.prompt_tokens,
            ),
            ("generation_tokens", "Tokens generated.", stats.generation_tokens),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                stats.prefix_cache_queried_tokens,
            ),
            ("prefix_cache_hits", "Tokens found there.", stats.prefix_cache_hit_tokens),
        ):
            of_model = {self._model_name: value}
            yield _by_label(CounterMetricFamily, f"vllm:{name}", help_text, model_name=of_model)
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Requests ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._finished_by_reason.items():
            ended.add_metric([self._model_name, reason], count)
        yield ended


def _by_label(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    help_text: str,
    /,
    **values: Mapping[str, float],
) -> Metric:
    """A family of one label: ``_by_label(kind, name, help, LABEL={value of the label: count})``."""
    [(label, counts)] = values.items()
    family = kind(name, help_text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


class BusyLog:
    """Logs one line every few seconds of a busy engine."""

    def __init__(self, now: float) -> None:
        self._since = now
        self._before = EngineStats()

    def step(self, now: float, stats: EngineStats) -> None:
        """To be called after every step, at ``now`` seconds."""
        elapsed = now - self._since
        if elapsed < LOG_INTERVAL_S:
            return
        tokens_in = stats.prompt_tokens - self._before.prompt_tokens
        tokens_out = stats.generation_tokens - self._before.generation_tokens
        logger.info(
            "running %d, waiting %d, swapped %d | KV %.1f%%, swap %.1f%% | "
            "%.1f tokens/s in, %.1f tokens/s out",
            stats.running,
            stats.waiting,
            stats.swapped,
            100 * stats.kv_usage,
            100 * stats.swap_usage,
            tokens_in / elapsed,
            tokens_out / elapsed,
        )
        self._since, self._before = now, stats

    def restart(self, now: float, stats: EngineStats) -> None:
        """The engine has work again after an idle time, which is not to dilute the rates."""
        self._since, self._before = now, stats
