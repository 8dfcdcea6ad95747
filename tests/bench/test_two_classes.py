"""Batch jobs fill the machine, and the urgent hardly notice: the case that parking is for."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.two_classes import simulated
from bench.two_classes.loads import BATCH, LARGE, SMALL, URGENT, VARIANTS, Scale, bursts, merged
from bench.two_classes.outcomes import TARGETS, Outcome, compared, pooled_p99
from bench.two_classes.real import play_on

from layby.simulate.profiles import load_profile
from layby.simulate.traces import Trace, TraceRequest
from tests.engine.harness import Harness

CPU_PROFILE = Path(simulated.__file__).with_name("smollm2-int8.json")
JOBS = 150


@pytest.mark.parametrize(
    ("profile_name", "scale", "seeds"),
    [(str(CPU_PROFILE), SMALL, (6, 8)), ("a100-llama3-8b", LARGE, (7,))],
    ids=["cpu", "a100"],
)
def test_a_batch_neither_delays_the_urgent_nor_is_delayed_nor_thrashes(
    profile_name: str, scale: Scale, seeds: tuple[int, ...]
) -> None:
    profile = load_profile(profile_name)
    runs: list[dict[str, Outcome]] = []
    for seed in seeds:
        both = merged(scale, seed, JOBS)
        runs.append({"alone": simulated.simulate(bursts(scale, seed), profile, scale.pools)})
        for name in ("recompute", "default"):
            options = scale.pools | VARIANTS[name]
            runs[-1][name] = simulated.simulate(both, profile, options)
        rows = {row.variant: row for row in compared(seed, runs[-1])}
        assert rows["default"].done_to_recompute <= TARGETS["done_to_recompute"]
        assert rows["default"].moves_per_job <= TARGETS["moves_per_job"]
        assert rows["default"].unfinished == 0
        assert rows["recompute"].moves_per_job > 0.3  # or the load is too light to tell anything
    p99_s = pooled_p99(runs)
    assert p99_s["default"] <= TARGETS["ttft_p99_to_alone"] * p99_s["alone"]
    assert p99_s["default"] < 0.95 * p99_s["recompute"]


def test_ttft_counts_from_when_the_trace_says_even_if_a_step_was_in_the_way() -> None:
    harness = Harness()  # a step takes a second
    clock = harness.clock

    def sleep(seconds: float) -> None:
        clock.now += seconds

    trace = Trace(
        "test",
        [
            TraceRequest(0.0, 4, 3, BATCH),
            TraceRequest(0.25, 4, 1, URGENT),
            TraceRequest(9.5, 4, 1, URGENT),
        ],
    )
    ended: list[None] = []
    ttfts_s, job_ends_s = play_on(
        harness.engine,
        trace,
        [[9] * 4] * 3,
        lambda: ended.append(None),
        clock=clock,
        sleep=sleep,
    )
    assert ttfts_s == [1.75, 1.0]  # the rest of one step and one of its own; at once
    assert job_ends_s == [3.0]
    assert len(ended) == 3
