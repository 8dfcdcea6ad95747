"""The pressure on memory, judged from made-up series; and whose work a saturated engine refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.engine.pressure import (
    MAX_RETRY_AFTER_S,
    Load,
    LoadShedding,
    PressureGauge,
    PressureSettings,
    PressureState,
)
from layby.errors import ConfigError, QueueFullError, RequestTooLargeError
from layby.sampling_params import SamplingParams
from tests.engine.harness import Harness

OK, RISING, SATURATED = PressureState.OK, PressureState.RISING, PressureState.SATURATED

STEP_S = 0.05
"""Between two observations of a series; the gauge looks every 15 / 32 s."""

FULL_HOUSE = Load(running=10, waiting=40, swapped=10, finished=0, kv_usage=1.0, swap_usage=0.5)

Series = Callable[[float], Load]


def feed(
    gauge: PressureGauge, series: Series, seconds: float, *, start: float = 0.0
) -> list[tuple[float, PressureState]]:
    """Observe a series; returns the changes of state, with their times."""
    changes, before = [], gauge.state
    for step in range(round(seconds / STEP_S)):
        now = start + step * STEP_S
        gauge.observe(now, series(now))
        if gauge.state is not before:
            changes.append((now, gauge.state))
            before = gauge.state
    return changes


def overload(now: float, *, arrivals: float = 3.0, drain: float = 1.0, **fields: Any) -> Load:
    """More comes than goes, and memory is short: ten run, ten are parked, the rest waits."""
    waiting = max(0, int((arrivals - drain) * now) - 20)
    load = replace(FULL_HOUSE, waiting=waiting, finished=int(drain * now))
    return replace(load, **fields)


# --- growth and drain ---


def test_the_slope_of_a_line_is_its_slope() -> None:
    """Three a second, sampled as whole numbers, until it falls by two a second."""
    gauge = PressureGauge()
    feed(gauge, lambda now: replace(FULL_HOUSE, swapped=int(3 * now)), 20.0)
    assert gauge.swapped_queue_growth == pytest.approx(3.0, abs=0.05)
    feed(gauge, lambda now: replace(FULL_HOUSE, swapped=int(100 - 2 * now)), 20.0, start=20.0)
    assert gauge.swapped_queue_growth == pytest.approx(-2.0, abs=0.05)


def test_growth_is_not_told_before_a_quarter_of_the_window() -> None:
    gauge = PressureGauge()
    feed(gauge, lambda now: replace(FULL_HOUSE, swapped=int(10 * now)), 3.7)
    assert gauge.swapped_queue_growth == 0.0
    feed(gauge, lambda now: replace(FULL_HOUSE, swapped=int(10 * now)), 1.0, start=3.7)
    assert gauge.swapped_queue_growth == pytest.approx(10.0, abs=0.5)


def test_the_drain_rate_is_that_of_the_last_minute() -> None:
    """Four a second for 100 s, then one a second."""
    gauge = PressureGauge()
    feed(gauge, lambda now: replace(FULL_HOUSE, finished=int(4 * now)), 100.0)
    assert gauge.drain_rate == pytest.approx(4.0, abs=0.1)
    feed(gauge, lambda now: replace(FULL_HOUSE, finished=int(300 + now)), 30.0, start=100.0)
    assert gauge.drain_rate == pytest.approx((30 * 4 + 30) / 60, abs=0.1)
    feed(gauge, lambda now: replace(FULL_HOUSE, finished=int(300 + now)), 60.0, start=130.0)
    assert gauge.drain_rate == pytest.approx(1.0, abs=0.1)


def test_retry_after_is_backlog_over_drain_rate_within_bounds() -> None:
    gauge = PressureGauge()
    assert gauge.retry_after_s(7) == 60.0  # nothing has finished: the length of the window
    feed(gauge, lambda now: replace(FULL_HOUSE, finished=int(4 * now)), 60.0)
    assert gauge.retry_after_s(100) == pytest.approx(25.0, rel=0.05)
    assert gauge.retry_after_s(1) == 1.0
    assert gauge.retry_after_s(10**6) == MAX_RETRY_AFTER_S


# --- states ---


def test_an_overload_rises_first_and_saturates_after_a_window() -> None:
    changes = feed(PressureGauge(), overload, 60.0)
    assert [state for _, state in changes] == [RISING, SATURATED]
    (rose_s, _), (saturated_s, _) = changes
    assert rose_s < 15.0 < saturated_s < 30.0


@pytest.mark.parametrize(
    ("why", "series"),
    [
        (
            "work is parked, whatever the pool has free",
            lambda now: replace(FULL_HOUSE, waiting=int(now), kv_usage=0.3),
        ),
        (
            "the pool is full, though nobody is parked yet",
            lambda now: replace(FULL_HOUSE, waiting=int(now), swapped=0, swap_usage=0.0),
        ),
        (
            "running work is parked as it grows, and nothing else changes",
            lambda now: replace(FULL_HOUSE, running=60 - int(now), swapped=int(now)),
        ),
        (
            "work that waited is parked",
            lambda now: replace(FULL_HOUSE, waiting=60 - int(now), swapped=int(now)),
        ),
    ],
)
def test_pressure_rises_where(why: str, series: Series) -> None:
    assert [state for _, state in feed(PressureGauge(), series, 14.0)] == [RISING], why


def test_when_the_backlog_is_gone_it_is_ok_again_and_not_before() -> None:
    """Nothing comes any more, four a second go: 60 wait at the end of the overload."""
    gauge = PressureGauge()
    feed(gauge, overload, 40.0)
    assert gauge.state is SATURATED

    def drained(now: float) -> Load:
        left = max(1, 80 - int(4 * (now - 40)))
        running = min(10, left)
        swapped = min(10, left - running)
        return Load(
            running=running,
            waiting=left - running - swapped,
            swapped=swapped,
            finished=40 + int(4 * (now - 40)),
            kv_usage=running / 10,
            swap_usage=swapped / 20,
        )

    changes = feed(gauge, drained, 40.0, start=40.0)
    assert [state for _, state in changes] == [OK]
    # 80 live at 40 s; 15 are left, of which 5 wait, half of the 10 who run, after 65 / 4 s.
    assert 40 + 65 / 4 < changes[0][0] < 40 + 65 / 4 + 5.0


@pytest.mark.parametrize(
    ("why", "series"),
    [
        ("memory suffices", lambda now: overload(now, swapped=0, kv_usage=0.5, swap_usage=0.0)),
        ("nothing grows", lambda now: replace(FULL_HOUSE, finished=int(now))),
        (
            "it shrinks",
            lambda now: replace(FULL_HOUSE, waiting=int(140 - now), finished=int(2 * now)),
        ),
        (
            "some more come, but not a tenth of those who go",
            lambda now: overload(now, arrivals=10.8, drain=10.0),
        ),
    ],
)
def test_no_pressure_where(why: str, series: Series) -> None:
    assert feed(PressureGauge(), series, 120.0) == [], why


@pytest.mark.parametrize(
    ("why", "series"),
    [
        ("the backlog is short", lambda now: overload(now, arrivals=2.0, running=90)),
        ("it takes no ten seconds", lambda now: overload(now, arrivals=24.0, drain=20.0)),
    ],
)
def test_what_grows_is_no_saturation_where(why: str, series: Series) -> None:
    """In the minute that is looked at; a backlog that grows for ever will saturate."""
    assert {state for _, state in feed(PressureGauge(), series, 45.0)} == {RISING}, why


def test_a_crowd_of_fixed_size_never_saturates() -> None:
    """64 clients come within three seconds, each with the next request when it has its answer.

    Memory is soon full, and as sequences grow more and more of them are parked and wait; but
    nobody can be refused who would not be back at once, and nothing gets worse.
    """

    def crowd(now: float) -> Load:
        live = min(64, 1 + int(21 * now))
        running = max(12, 24 - int(now)) if live > 24 else live
        swapped = min(live - running, int(now / 2), 20)
        return Load(running, live - running - swapped, swapped, int(now), 1.0, 0.6)

    assert SATURATED not in [state for _, state in feed(PressureGauge(), crowd, 300.0)]


def test_a_full_swap_pool_saturates_sooner_and_without_growth_it_only_rises() -> None:
    def first(series: Series) -> float:
        changes = feed(PressureGauge(), series, 200.0)
        return next((now for now, state in changes if state is SATURATED), math.inf)

    def bursts(now: float, *, swap_usage: float) -> Load:
        """Twenty come at once every ten seconds."""
        return replace(
            FULL_HOUSE,
            waiting=20 + 20 * int(now / 10),
            finished=int(now),
            swap_usage=swap_usage,
        )

    assert first(lambda now: bursts(now, swap_usage=0.95)) < first(
        lambda now: bursts(now, swap_usage=0.5)
    )
    changes = feed(
        PressureGauge(), lambda now: replace(FULL_HOUSE, finished=int(now), swap_usage=0.95), 60.0
    )
    assert [state for _, state in changes] == [RISING]


def test_an_idle_engine_is_ok_at_once_and_starts_afresh() -> None:
    gauge = PressureGauge()
    feed(gauge, overload, 40.0)
    gauge.observe(40.01, Load(0, 0, 0, 40, 0.0, 0.0))
    assert gauge.state is OK
    assert gauge.swapped_queue_growth == gauge.drain_rate == 0.0
    assert feed(gauge, lambda now: replace(FULL_HOUSE, finished=40), 60.0, start=1000.0) == []


def test_an_oscillation_around_the_marks_does_not_flap() -> None:
    """The backlog swings around ten seconds of work, twice a second; the state stays."""
    gauge = PressureGauge()
    feed(gauge, overload, 40.0)
    swinging = lambda now: replace(  # noqa: E731
        FULL_HOUSE,
        waiting=2 + 6 * (int(4 * now) % 2),
        swapped=5,
        kv_usage=0.7 + 0.3 * (int(4 * now) % 2),
        finished=int(now),
    )
    assert feed(gauge, swinging, 120.0, start=40.0) == []
    assert gauge.state is SATURATED


@given(
    st.lists(
        st.builds(
            Load,
            running=st.integers(1, 20),
            waiting=st.integers(0, 100),
            swapped=st.integers(0, 20),
            finished=st.just(0),
            kv_usage=st.floats(0, 1),
            swap_usage=st.floats(0, 1),
        ),
        min_size=1,
        max_size=60,
    ),
    st.lists(st.integers(0, 20), min_size=60, max_size=60),
)
def test_no_state_is_left_within_a_quarter_of_a_window(
    loads: list[Load], finishing: list[int]
) -> None:
    """Whatever is seen, once a second (so a window is 32 s long); down, each step takes 8 looks."""
    gauge = PressureGauge()
    levels, entered, finished = list(PressureState), 0, 0
    for second, (load, more) in enumerate(zip(loads, finishing, strict=False)):
        before = gauge.state
        finished += more
        gauge.observe(float(second), replace(load, finished=finished))
        if levels.index(gauge.state) < levels.index(before):
            assert second - entered >= 8
        if gauge.state is not before:
            entered = second
        assert math.isfinite(gauge.swapped_queue_growth)
        assert 1.0 <= gauge.retry_after_s(load.backlog) <= MAX_RETRY_AFTER_S


def test_slow_steps_stretch_the_window() -> None:
    """A step of five seconds: 32 looks take 160 s, and an overload is found all the same."""
    gauge, states = PressureGauge(), []
    for step in range(80):
        gauge.observe(5.0 * step, overload(5.0 * step))
        states.append(gauge.state)
    assert SATURATED not in states[:31]
    assert states[-1] is SATURATED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_s": 0}, "window_s must be above 0"),
        ({"window_s": 90.0}, r"drain_window_s \(60\) must be at least window_s \(90\)"),
        ({"full": 1.5}, "full must be above 0 and at most 1"),
        ({"min_growth": -1}, "min_growth must be at least 0, got -1"),
    ],
)
def test_marks_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PressureSettings(**settings)


# --- who is refused ---


def saturated() -> tuple[PressureGauge, LoadShedding]:
    gauge = PressureGauge()
    feed(gauge, overload, 40.0)
    assert gauge.state is SATURATED
    return gauge, LoadShedding(gauge)


def refuses(shedding: LoadShedding, priority: int, live: list[int], now: float = 40.0) -> bool:
    try:
        shedding.check(now, priority, live, backlog=60)
    except QueueFullError as error:
        refusal = error
    else:
        return False
    assert refusal.retry_after_s == pytest.approx(60.0, rel=0.1)  # one a second drains
    assert f"priority {priority}" in str(refusal)
    assert "60 requests" in str(refusal)
    return True


def test_only_the_lowest_class_is_refused() -> None:
    _, shedding = saturated()
    assert refuses(shedding, 5, [0, 0, 5, 2])
    assert refuses(shedding, 7, [0, 0, 5, 2])
    assert not refuses(shedding, 2, [0, 0, 5, 2])
    assert not refuses(shedding, 0, [0, 0, 5, 2])
    assert shedding.num_refused == 2


def test_a_service_of_one_class_refuses_that() -> None:
    _, shedding = saturated()
    assert refuses(shedding, 0, [0, 0, 0])


def test_a_class_is_not_the_lowest_because_the_one_below_was_shut_out() -> None:
    """Once the last live batch job is gone its class still knocks; a minute after it does no
    more, the interactive class is alone."""
    _, shedding = saturated()
    assert refuses(shedding, 5, [0, 5], now=40.0)
    assert not refuses(shedding, 0, [0, 0], now=45.0)
    assert refuses(shedding, 5, [0, 0], now=50.0)
    assert not refuses(shedding, 0, [0, 0], now=109.0)
    assert refuses(shedding, 0, [0, 0], now=111.0)


@pytest.mark.parametrize("series", [lambda now: FULL_HOUSE, lambda now: overload(now / 2)])
def test_nobody_is_refused_before_saturation(series: Series) -> None:
    gauge = PressureGauge()
    feed(gauge, series, 14.0)
    assert gauge.state is not SATURATED
    assert not refuses(LoadShedding(gauge), 5, [0, 5])


# --- in the engine ---


def crowded(*, shed_load: bool) -> Harness:
    """Two requests of low class arrive per second for 40 s; twelve blocks let three run."""
    return Harness(
        num_blocks=12, num_swap_blocks=24, enable_prefix_caching=False, shed_load=shed_load
    )


def arrive(harness: Harness, priority: int) -> str | QueueFullError:
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    try:
        return harness.engine.add_request("x" * 40, params, priority=priority)
    except QueueFullError as refusal:
        return refusal


def flood(harness: Harness, seconds: int = 60) -> list[QueueFullError]:
    outcomes: list[str | QueueFullError] = []
    for _ in range(seconds):
        outcomes += [arrive(harness, 5), arrive(harness, 5)]
        harness.engine.step()
    return [one for one in outcomes if isinstance(one, QueueFullError)]


def test_a_flooded_engine_sheds_its_lowest_class_and_finishes_all_it_accepted() -> None:
    harness = crowded(shed_load=True)
    refusals = flood(harness)
    stats = harness.engine.stats()
    assert stats.pressure == stats["pressure"] == "saturated"
    assert stats.requests_shed == len(refusals) > 0
    assert all(1 <= one.retry_after_s <= MAX_RETRY_AFTER_S for one in refusals)
    assert harness.metric("layby_pressure_state", state="saturated") == 1
    assert harness.metric("layby_pressure_state", state="ok") == 0
    assert harness.metric("layby_pressure_state", state="rising") == 0
    assert harness.metric("layby_requests_shed_total") == len(refusals)
    assert harness.metric("layby_swapped_queue_growth") == stats.swapped_queue_growth
    assert isinstance(arrive(harness, 0), str)  # the higher class gets in
    assert isinstance(arrive(harness, 5), QueueFullError)
    assert harness.engine.stats().requests_shed == len(refusals) + 1  # known without a step
    with pytest.raises(RequestTooLargeError):  # not: come again later
        harness.engine.add_request("x" * 150, SamplingParams(max_tokens=100), priority=5)
    accepted = 2 * 60 - len(refusals) + 1
    harness.run(max_steps=20_000)
    stats = harness.engine.stats()
    assert stats.requests_finished == stats.requests_accepted == accepted
    assert stats.pressure == "ok"
    assert isinstance(arrive(harness, 5), str)


def test_with_shedding_off_the_state_is_told_and_nobody_is_refused() -> None:
    harness = crowded(shed_load=False)
    assert flood(harness) == []
    assert harness.engine.stats().pressure == "saturated"
    assert isinstance(arrive(harness, 5), str)


def test_states_are_entered_in_their_order() -> None:
    harness, seen = crowded(shed_load=True), [OK]
    for _ in range(60):
        flood(harness, 1)
        seen.append(harness.engine.stats().pressure)
    changes = [after for before, after in pairwise(seen) if after is not before]
    assert changes == [RISING, SATURATED]
