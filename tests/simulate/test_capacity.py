"""Capacity where it is known beforehand: one server, one request at a time, always as long."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import layby.simulate.capacity as module
from layby.errors import ConfigError
from layby.scheduling import SchedulerConfig
from layby.simulate.capacity import (
    TOLERANCE,
    capacity,
    natural_rate,
    played,
    replicas,
    saturated_rate,
)
from layby.simulate.cost import CostModel
from layby.simulate.profiles import MEASURED, Profile, SchedulerDefaults
from layby.simulate.settings import scheduler_config
from layby.simulate.slo import parse_slo
from layby.simulate.traces import Trace, TraceRequest

NUM_REQUESTS = 160
STEP_S = 0.25
TOKENS = 4
SERVICE_S = TOKENS * STEP_S
"""One request takes so many steps: the prompt is computed in the one that gives the first token."""


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made for testing needs no large numbers."""
    monkeypatch.setattr(module, "MIN_REQUESTS", NUM_REQUESTS)


def make_profile(*, max_num_seqs: int = 1) -> Profile:
    """Every step takes as long, whatever is in it."""
    return Profile(
        name="clockwork",
        kind=MEASURED,
        model="toy",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        machine={},
        block_size=4,
        block_bytes=1024,
        scheduler=SchedulerDefaults(64, 0, max_num_seqs, 64, 64),
        cost=CostModel(rows_s=((0, STEP_S), (1, STEP_S))),
        fit=None,
        held_out=None,
        created="2026-01-01",
    )


def make_config(profile: Profile) -> SchedulerConfig:
    return scheduler_config(profile, max_queue=None)


def even_trace(count: int = 20, *, gap_s: float = 3.0) -> Trace:
    return Trace("even", [TraceRequest(i * gap_s, 4, TOKENS) for i in range(count)])


def test_one_server_takes_what_it_can_finish() -> None:
    """Evenly spaced requests never wait below that rate, and ever longer above it."""
    profile = make_profile()
    found = capacity(even_trace(), profile, make_config(profile), parse_slo("ttft_p99<1.5s"))
    assert found.saturated_rate == pytest.approx(1 / SERVICE_S)
    assert found.rate == pytest.approx(1 / SERVICE_S, rel=TOLERANCE)
    assert found.num_requests == NUM_REQUESTS
    assert found.best.met


@pytest.mark.parametrize("slo", ["itl_p99<300ms", "e2e_p99<600m"])
def test_an_overload_that_the_slo_does_not_see_counts_for_nothing(slo: str) -> None:
    """ITL knows no queue; and under a limit of hours a short trace is over before it is reached."""
    profile = make_profile()
    found = capacity(even_trace(5), profile, make_config(profile), parse_slo(slo))
    assert found.rate == found.saturated_rate == pytest.approx(1 / SERVICE_S)
    assert found.limit == "more than that is never finished, whatever is promised"


def test_pairs_wait_for_one_another() -> None:
    """Two come together every so often: the second waits for the first, at any rate."""
    pairs = Trace("pairs", [TraceRequest(i // 2 * 4.0, 4, TOKENS) for i in range(40)])
    profile = make_profile()
    config = make_config(profile)
    assert capacity(pairs, profile, config, parse_slo("ttft_max<1.3s")).rate > 0.9
    with pytest.raises(ConfigError, match=r"missed at any rate: .* p99 TTFT is 1.25 s"):
        capacity(pairs, profile, config, parse_slo("ttft_p99<1.2s"))


def test_twice_the_places_take_twice_the_rate() -> None:
    profile = make_profile(max_num_seqs=2)
    found = capacity(even_trace(), profile, make_config(profile), parse_slo("ttft_p99<1.5s"))
    assert found.rate == pytest.approx(2 / SERVICE_S, rel=2 * TOLERANCE)


def test_the_answer_lies_between_what_is_met_and_what_is_missed() -> None:
    """Requests in pairs, and each pair soon after another: how densely may they come?"""
    gaps = [2.0 * (i // 4 * 5 + i % 4 // 2) for i in range(80)]
    pairs = Trace("pairs", [TraceRequest(gap, 4, TOKENS) for gap in gaps])
    profile = make_profile()
    # The fourth waits for as much of the three before it as is not done in the gap of two seconds
    # at the trace's own rate of 0.4 per second: 3 s + STEP_S - 0.8 s / rate.
    found = capacity(pairs, profile, make_config(profile), parse_slo("ttft_max<1.75s"))
    assert found.rate == pytest.approx(0.8 / (3 + STEP_S - 1.75), rel=2 * TOLERANCE)
    missed = [attempt.rate for attempt in found.attempts if not attempt.met]
    assert found.rate < min(missed) <= found.rate * (1 + TOLERANCE)
    assert found.limit.startswith(f"at {min(missed):.4g} per second max TTFT is")
    assert all(attempt.met for attempt in found.attempts if attempt.rate <= found.rate)


def test_the_trace_is_played_on_end_at_the_rate_asked_for() -> None:
    prefixed = [
        TraceRequest(i * 2.0, 8, 2, prefix=(7, i), prefix_block_tokens=4, request_id=f"r{i}")
        for i in range(3)
    ]
    trace = Trace("three", prefixed)
    assert natural_rate(trace) == 0.5
    long = played(trace, 1.0, 7)
    assert [request.arrival_s for request in long.requests] == [0, 1, 2, 3, 4, 5, 6]
    assert natural_rate(long) == 1.0
    # Within one playing prompts have as much in common as before, and nothing with the next.
    firsts = [request.prefix[0] for request in long.requests]
    assert firsts == [7, 7, 7, firsts[3], firsts[3], firsts[3], firsts[6]]
    assert len(set(firsts)) == 3
    seconds = [request.prefix[1] for request in long.requests]
    assert len(set(seconds)) == 7
    assert not set(firsts) & set(seconds)


def test_a_replica_gets_its_turn() -> None:
    part = played(even_trace(6), 3.0, 4, every=3)
    assert [request.arrival_s for request in part.requests] == pytest.approx([0, 1, 2, 3])
    assert natural_rate(part) == pytest.approx(1.0)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 1), (0.9, 1), (1.5, 2), (9.5, 10)])
def test_a_rate_needs_so_many_servers(rate: float, count: int) -> None:
    profile = make_profile()
    found = capacity(even_trace(), profile, make_config(profile), parse_slo("ttft_p99<1.5s"))
    needed = replicas(found, rate)
    assert needed.count == count
    assert needed.confirmed.met
    assert needed.confirmed.rate == rate / count
    assert needed.as_dict()["count"] == count


def test_where_a_replica_misses_the_slo_with_its_part_there_are_more() -> None:
    """Two kinds of requests in turn: of two servers, one would get all the long ones."""
    mixed = Trace(
        "mixed", [TraceRequest(i * 3.0, 4, 1 if i % 2 else 2 * TOKENS - 1) for i in range(40)]
    )
    profile = make_profile()
    found = capacity(mixed, profile, make_config(profile), parse_slo("ttft_p99<2.5s"))
    needed = replicas(found, 1.9 * found.rate)
    assert math.ceil(1.9) == 2
    assert needed.count == 3
    assert needed.confirmed.met


def test_the_saturated_rate_leaves_out_how_the_server_runs_empty() -> None:
    """Where the last request is by far the longest, its end is no measure of throughput."""
    requests = [TraceRequest(i * 1.0, 4, TOKENS) for i in range(100)]
    trace = Trace("tail", [*requests[:-1], replace(requests[-1], num_output_tokens=60)])
    profile = make_profile(max_num_seqs=4)
    rate = saturated_rate(trace, profile, make_config(profile), 100)
    assert rate == pytest.approx(4 / SERVICE_S, rel=0.05)


def test_requests_that_never_fit_are_left_out() -> None:
    trace = Trace("mixed", [*even_trace().requests, TraceRequest(60.0, 1000, 1)])
    profile = make_profile()
    found = capacity(trace, profile, make_config(profile), parse_slo("ttft_p99<1.5s"))
    assert found.misfits.count == 1
    assert found.rate == pytest.approx(1 / SERVICE_S, rel=TOLERANCE)


def test_what_has_no_answer_is_told() -> None:
    profile = make_profile()
    config = make_config(profile)
    at_once = Trace("heap", [TraceRequest(0.0, 4, TOKENS) for _ in range(3)])
    with pytest.raises(ConfigError, match="heap has no request rate: its 3 requests all come"):
        capacity(at_once, profile, config, parse_slo("ttft<1s"))
    with pytest.raises(ConfigError, match=r"the SLO ttft_p99<100ms is missed at any rate"):
        capacity(even_trace(), profile, config, parse_slo("ttft<100ms"))
    found = capacity(even_trace(), profile, config, parse_slo("ttft<2s"))
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="rate must be a positive finite number"):
            replicas(found, rate)


def test_the_json_is_the_result_schema_and_the_search() -> None:
    profile = make_profile()
    found = capacity(even_trace(), profile, make_config(profile), parse_slo("ttft<1.5s"))
    data = found.as_dict()
    assert data["requests_finished"] == found.num_requests
    assert data["capacity"]["requests_per_s"] == found.rate
    assert len(data["capacity"]["attempts"]) == len(found.attempts)
