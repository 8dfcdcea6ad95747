"""Simulates settings against an SLO, several at a time, and none twice."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

from layby.errors import ConfigError, InvalidRequestError, LaybyError, counted
from layby.scheduling import SchedulerConfig
from layby.scheduling.intake import Intake
from layby.scheduling.memory import KVMemory
from layby.simulate.observations import RequestLog
from layby.simulate.profiles import Profile
from layby.simulate.simulation import simulate
from layby.simulate.slo import Slo
from layby.simulate.traces import Trace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        figures: The simulation's report in the one result schema, without its timeline.
        excess: See ``Slo.excess``; up to 1 the SLO is met.
        misses: A sentence for each promise that was not kept.
    """

    figures: Mapping[str, Any]
    excess: float
    misses: tuple[str, ...]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return float(self.figures["output_tokens_per_s"])

    @property
    def met(self) -> bool:
        """Whether the SLO is."""
        return self.excess <= 1

    @property
    def preemptions(self) -> int:
        """Of either mode."""
        return int(sum(self.figures["preemptions"].values()))

    @property
    def goodput_share(self) -> float:
        """Part of the requests that each kept every limit."""
        return float(self.figures["goodput"]["share"])

    def latency_s(self, metric: str, statistic: str) -> float | None:
        """Such as of ``ttft_s`` the ``p99``."""
        value: float | None = self.figures[metric][statistic]
        return value

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity."""
        return {
            "figures": dict(self.figures),
            "excess": self.excess if math.isfinite(self.excess) else None,
            "misses": list(self.misses),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """What ``as_dict`` made."""
        excess = math.inf if data["excess"] is None else data["excess"]
        return cls(data["figures"], excess, tuple(data["misses"]))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all simulations have in common."""

    trace: Trace
    profile: Profile
    slo: Slo

    def try_out(self, config: SchedulerConfig) -> Outcome:
        """Simulate these settings."""
        log = RequestLog(slo=self.slo.limits, max_records=0)
        report = simulate(self.trace, self.profile, config, log=log)
        figures = replace(report, timeline=report.timeline.coarser(1)).as_dict()
        del figures["timeline"]  # the bulk of it
        return Outcome(figures, self.slo.excess(report), tuple(self.slo.misses(report)))


_bench: Bench | None = None  # of a worker process


def _start_worker(bench: Bench) -> None:
    global _bench  # noqa: PLW0603  # handed over once, not with every simulation
    _bench = bench
    # The program says what there is to say about Ctrl-C, not each of its workers.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _work(config: SchedulerConfig) -> Outcome:
    assert _bench is not None
    return _bench.try_out(config)


class Laboratory:
    """Simulates settings, several at a time, and none twice. A context manager.

    Args:
        bench: Trace, profile and SLO.
        jobs: Processes; 1: this one.
    """

    def __init__(self, bench: Bench, jobs: int = 1) -> None:
        self.bench = bench
        self.jobs = jobs
        self._known: dict[SchedulerConfig, Outcome] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def remember(self, config: SchedulerConfig, outcome: Outcome) -> None:
        """It is known from an earlier run."""
        self._known[config] = outcome

    def run(self, configs: Sequence[SchedulerConfig]) -> Iterator[Outcome]:
        """What each comes to, in order, as soon as it is known.

        Raises:
            LaybyError: A simulation failed, or a process died.
        """
        new = [config for config in dict.fromkeys(configs) if config not in self._known]
        outcomes = self._outcomes(new)
        coming = iter(new)
        for config in configs:
            while config not in self._known:
                self._known[next(coming)] = next(outcomes)
            yield self._known[config]

    def _outcomes(self, configs: Sequence[SchedulerConfig]) -> Iterator[Outcome]:
        if self.jobs == 1 or not configs:
            yield from map(self.bench.try_out, configs)
            return
        if self._pool is None:
            # Spawned: a fork would copy the locks of whatever threads there are.
            self._pool = ProcessPoolExecutor(
                self.jobs, get_context("spawn"), _start_worker, (self.bench,)
            )
        try:
            yield from self._pool.map(_work, configs)
        except BrokenProcessPool:
            raise LaybyError(
                f"one of {self.jobs} simulating processes died, perhaps for lack of memory; "
                "fewer jobs take less"
            ) from None


@dataclass(frozen=True, slots=True)
class Misfits:
    """Requests that no setting makes possible.

    Attributes:
        count: How many.
        reason: What the first would be told; empty if there are none.
    """

    count: int = 0
    reason: str = ""

    def __str__(self) -> str:
        """A sentence, or nothing."""
        if not self.count:
            return ""
        who = counted(self.count, "request")
        return f"Left out: {who} that could never be served ({self.reason})."


def leave_out_misfits(trace: Trace, config: SchedulerConfig) -> tuple[Trace, Misfits]:
    """The requests that pool and context can hold: others are refused under any setting.

    Raises:
        ConfigError: No request is left.
    """
    sizes = replace(config, max_num_seqs=2**30, max_num_batched_tokens=2**30)
    intake = Intake(
        sizes, KVMemory(sizes.num_blocks, 0, sizes.block_size, enable_prefix_caching=False)
    )
    kept, reason = [], ""
    for traced in trace.requests:
        most = traced.max_tokens or traced.num_output_tokens
        try:
            intake.check_lengths(traced.num_prompt_tokens, most, traced.n)
        except InvalidRequestError as error:
            reason = reason or str(error)
        else:
            kept.append(traced)
    if not kept:
        raise ConfigError(f"no request of {trace.name} could ever be served: {reason or 'empty'}")
    if len(kept) == len(trace):
        return trace, Misfits()
    return replace(trace, requests=kept), Misfits(len(trace) - len(kept), reason)
