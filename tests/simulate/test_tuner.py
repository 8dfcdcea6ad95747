"""The tuner finds what is known to be there, the same each time, and says what it is worth."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from layby.engine.config import GIB, EngineConfig
from layby.errors import ConfigError, LaybyError
from layby.scheduling import SchedulerConfig
from layby.simulate.cost import CostModel, MoveCost
from layby.simulate.laboratory import Bench, Outcome, leave_out_misfits
from layby.simulate.page import Chart, render_page
from layby.simulate.profiles import MEASURED, Profile, SchedulerDefaults
from layby.simulate.search_space import HELD, KNOBS, SearchSpace, written
from layby.simulate.slo import parse_slo
from layby.simulate.study import opened_study
from layby.simulate.traces import Trace, TraceRequest
from layby.simulate.tune_report import front_table, tune_page
from layby.simulate.tune_result import Trial, TuneResult, choose, cliffs_between, pareto_front
from layby.simulate.tuner import tune

BLOCK_BYTES = 2**20


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study is written through with every value, which here is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def make_profile(*, num_blocks: int = 60, max_num_seqs: int = 16, swap_s: float = 0.02) -> Profile:
    """A batch costs hardly more than one sequence, moving a block a lot."""
    move = MoveCost(0.0, swap_s)
    return Profile(
        name="toy",
        kind=MEASURED,
        model="toy",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        machine={},
        block_size=4,
        block_bytes=BLOCK_BYTES,
        scheduler=SchedulerDefaults(num_blocks, 2 * num_blocks, max_num_seqs, 64, 512),
        cost=CostModel(rows_s=((0, 0.01), (64, 0.02)), swap_out=move, swap_in=move),
        fit=None,
        held_out=None,
        created="2026-01-01",
    )


def make_trace(count: int = 8) -> Trace:
    """Requests that take 5 blocks when they come in, and 15 in the end."""
    return Trace("toy", [TraceRequest(i * 0.05, 20, 40) for i in range(count)])


SLO = parse_slo("e2e_p99<20s")
STORMY = {
    "headroom": 0.0,
    "preemption_mode": "swap",
    "max_num_batched_tokens": 64,
    "num_swap_blocks": 120,
}
"""Nothing but max_num_seqs can keep the pool from overflowing."""


@cache
def tuned(jobs: int = 1, seed: int = 0) -> TuneResult:
    return tune(make_trace(), make_profile(), SLO, trials=20, jobs=jobs, seed=seed)


@cache
def stormy() -> TuneResult:
    return tune(make_trace(24), make_profile(), SLO, fixed=STORMY, trials=24)


# --- the space ---


def test_every_setting_of_the_scheduler_is_searched_or_held_on_purpose() -> None:
    """A new field of the scheduler that the tuner never hears of."""
    searched = {knob.field or knob.option for knob in KNOBS}
    assert searched | set(HELD) == {field.name for field in fields(SchedulerConfig)}
    assert not searched & set(HELD)
    assert {name for knob in KNOBS for name in knob.names} <= {f.name for f in fields(EngineConfig)}


def test_defaults_are_among_the_rungs_and_change_nothing() -> None:
    space = SearchSpace(make_profile(max_num_seqs=13), several_classes=True, search_policy=True)
    for name, rungs in space.rungs.items():
        assert space.defaults[name] in rungs
        numbers = [math.inf if rung is None else rung for rung in rungs]
        assert isinstance(rungs[0], str) or numbers == sorted(numbers)
    assert space.config(space.defaults) == space.base
    assert space.base.max_num_seqs == 13
    assert space.base.max_queue is None
    assert len(space.rungs) == len(KNOBS)


def test_what_is_given_is_held_and_limits_the_rest() -> None:
    """A step of fewer tokens than there are sequences, which the scheduler refuses."""
    fixed = {"max_num_batched_tokens": 32, "num_swap_blocks": 7, "preemption_mode": "swap"}
    space = SearchSpace(make_profile(), fixed)
    assert set(space.rungs) == {"max_num_seqs", "headroom"}
    assert max(map(float, space.rungs["max_num_seqs"])) == 32
    config = space.config({"max_num_seqs": 32, "headroom": 2.0})
    assert (config.max_num_batched_tokens, config.num_swap_blocks) == (32, 7)
    assert (config.max_num_seqs, config.headroom) == (32, 2.0)


CLASS_SETTINGS = {
    "urgent_window",
    "background_tokens",
    "preemption_threshold",
    "priority_aging",
    "demote_after_tokens",
}


def test_settings_of_classes_are_searched_where_there_are_several() -> None:
    assert not CLASS_SETTINGS & set(SearchSpace(make_profile()).rungs)
    space = SearchSpace(make_profile(), {"priority_aging": 7.0}, several_classes=True)
    assert set(space.rungs) >= CLASS_SETTINGS - {"priority_aging"}
    assert space.base.priority_aging == 7.0


def test_what_is_off_is_written_so_and_has_no_neighbours() -> None:
    space = SearchSpace(make_profile(), several_classes=True)
    settings = dict(space.defaults) | {"preemption_threshold": 0.9, "demote_after_tokens": 64}
    flags = dict(space.serve_flags(settings))
    assert (flags["--preemption-threshold"], flags["--demote-after-tokens"]) == ("0.9", "64")
    assert "--priority-aging" not in flags  # serve has it off, too
    moved = [(name, moved[name]) for name, moved in space.neighbours(settings)]
    assert ("preemption_threshold", 1.0) in moved
    assert ("demote_after_tokens", 80) in moved
    assert "priority_aging" not in dict(moved)


def test_a_trace_of_two_classes_is_tuned_the_same_each_time() -> None:
    """With few trials, of which each must be one that the scheduler takes."""
    trace = Trace(
        "two", [TraceRequest(i * 0.05, 20, 40, priority=5 * (i % 3 > 0)) for i in range(9)]
    )
    first, again = (tune(trace, make_profile(), SLO, trials=9) for _ in range(2))
    assert first.as_dict() == again.as_dict()
    assert set(first.trials[0].settings) >= CLASS_SETTINGS
    assert any(trial.settings["priority_aging"] is not None for trial in first.trials)


def test_tokens_follow_sequences() -> None:
    space = SearchSpace(make_profile(num_blocks=600))
    settings = space.tidy({"max_num_seqs": 100, "max_num_batched_tokens": 64})
    assert settings["max_num_batched_tokens"] == 100
    assert space.config(settings).max_num_batched_tokens == 100
    held = SearchSpace(make_profile(num_blocks=600), {"max_num_batched_tokens": 64})
    assert held.tidy({"max_num_seqs": 100})["max_num_seqs"] == 64


def test_no_fewer_sequences_than_a_request_has_samples() -> None:
    """Settings under which some requests are refused."""
    space = SearchSpace(make_profile(), most_samples=5)
    assert min(map(float, space.rungs["max_num_seqs"])) == 5


def test_all_given_leaves_nothing_to_search() -> None:
    fixed = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "headroom": 2.0}
    with pytest.raises(ConfigError, match=r"every setting .* max_num_seqs=4"):
        SearchSpace(make_profile(), fixed | {"preemption_mode": "recompute"})


@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        ({}, {}),
        ({"max_num_seqs": 8, "swap_gib": 0.0, "headroom": 2.5}, {}),
        ({"max_num_batched_tokens": 512, "preemption_mode": "recompute"}, {"num_blocks": 50}),
        ({}, {"enable_prefix_caching": False, "kv_cache_gib": 1.0, "num_swap_blocks": 5}),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 512}, {"scheduling_policy": "reserve"}),
    ],
)
def test_pasted_flags_make_the_server_do_what_was_simulated(
    settings: dict[str, Any], fixed: dict[str, Any]
) -> None:
    """Read as ``layby serve`` reads them, flags give the scheduler the settings recommended."""
    profile = replace(make_profile(), block_size=16)
    space = SearchSpace(profile, fixed)
    full = space.tidy(settings)
    options: dict[str, Any] = {}
    kinds = {option.name: str(option.type) for option in fields(EngineConfig)}
    for flag, value in space.serve_flags(full):
        name = flag.removeprefix("--").replace("-", "_")
        if not value:
            options[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            kind = kinds[name].partition(" ")[0]
            options[name] = {"int": int, "float": float, "str": str}[kind](value)
    served = EngineConfig(**options).resolve(
        context_length=profile.scheduler.max_model_len,
        block_bytes=BLOCK_BYTES,
        host_bytes=2**40,
    )
    simulated = space.config(full)
    if not {"num_blocks", "kv_cache_gib"} & set(fixed):  # the server finds out for itself
        served = replace(served, num_blocks=simulated.num_blocks)
    assert replace(served, max_queue=None) == simulated


# --- the search ---


def test_it_finds_the_setting_that_is_best_of_all() -> None:
    """Too many sequences make the pool overflow, too few leave it empty."""
    space = SearchSpace(make_profile(), STORMY)
    bench = Bench(make_trace(24), make_profile(), SLO)
    known = {
        rung: bench.try_out(space.config({"max_num_seqs": rung}))
        for rung in space.rungs["max_num_seqs"]
    }
    best = max(outcome.throughput for outcome in known.values() if outcome.met)
    ends = (min(known), max(known))
    # The case is what it claims to be: the best is inside, and beyond it a storm.
    assert all(known[end].throughput < 0.8 * best for end in ends)
    assert known[max(known)].preemptions > 20

    result = stormy()
    assert result.outcome.met
    assert result.outcome.throughput >= 0.98 * best
    assert result.outcome == known[result.settings["max_num_seqs"]]
    assert result.outcome.throughput > 1.2 * result.default.outcome.throughput
    assert f"--max-num-seqs {result.settings['max_num_seqs']}" in result.command


def test_the_first_trial_is_the_profile_as_it_is() -> None:
    result = tuned()
    space = SearchSpace(make_profile())
    assert result.default.settings == space.defaults
    assert result.default.outcome == Bench(make_trace(), make_profile(), SLO).try_out(space.base)
    assert [trial.number for trial in result.trials] == list(range(20))


def test_the_same_seed_gives_the_same_result_on_any_number_of_processes() -> None:
    alone = tuned(jobs=1)
    assert tuned(jobs=2).as_dict() == alone.as_dict()
    other = tuned(jobs=1, seed=1)
    assert [t.settings for t in other.trials] != [t.settings for t in alone.trials]


class StopError(Exception):
    """Somebody pulls the plug."""


@pytest.mark.parametrize("simulations", [1, 8, 11])
def test_an_interrupted_study_goes_on_to_the_same_result(
    simulations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study"
    begun = [0]

    def breaks(self: Bench, config: SchedulerConfig) -> Outcome:
        begun[0] += 1
        if begun[0] > simulations:
            raise StopError
        return try_out(self, config)

    try_out = Bench.try_out
    with monkeypatch.context() as patched:
        patched.setattr(Bench, "try_out", breaks)
        with pytest.raises(StopError):
            tune(make_trace(), make_profile(), SLO, trials=20, study=file)
    again = [0]

    def counts(self: Bench, config: SchedulerConfig) -> Outcome:
        again[0] += 1
        return try_out(self, config)

    monkeypatch.setattr(Bench, "try_out", counts)
    resumed = tune(make_trace(), make_profile(), SLO, trials=20, study=file)
    assert resumed.as_dict() == tuned().as_dict()
    first = again[0]
    # All trials are known now; only what explains them is simulated again.
    assert tune(make_trace(), make_profile(), SLO, trials=20, study=file).as_dict() == (
        resumed.as_dict()
    )
    assert again[0] - first < first


@pytest.mark.parametrize("torn_bytes", [1, 37, -20])
def test_a_study_whose_last_line_is_torn_goes_on_to_the_same_result(
    torn_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk leaves half a line; what came behind it would have been lost with it. Also half
    of the first line, of which so many bytes are left."""
    file = tmp_path / "study"
    tune(make_trace(), make_profile(), SLO, trials=4, study=file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-torn_bytes])
    for _ in range(2):
        resumed = tune(make_trace(), make_profile(), SLO, trials=20, study=file)
        assert resumed.as_dict() == tuned().as_dict()
    [told] = [each.getMessage() for each in caplog.records if "half a line" in each.getMessage()]
    assert str(file) in told
    assert "bytes cut off" in told


def test_a_study_can_be_made_longer(tmp_path: Path) -> None:
    file = tmp_path / "study"
    short = tune(make_trace(), make_profile(), SLO, trials=10, study=file)
    longer = tune(make_trace(), make_profile(), SLO, trials=14, study=file)
    assert longer.trials[:10] == short.trials
    assert len(longer.trials) == 14


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"trace": make_trace(9)}, "a trace"),
        ({"profile": make_profile(swap_s=0.03)}, "a profile"),
        ({"slo": parse_slo("e2e_p99<21s")}, "an SLO"),
        ({"seed": 1}, "a seed"),
        ({"fixed": {"headroom": 2.0}}, "settings"),
        ({"seed": 1, "slo": parse_slo("ttft<1s")}, "an SLO and a seed"),
    ],
)
def test_a_study_of_something_else_is_refused(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Trials of two different questions in one answer."""
    file = tmp_path / "study"
    asked: dict[str, Any] = {"trace": make_trace(), "profile": make_profile(), "slo": SLO}
    tune(**asked, trials=1, study=file)
    with pytest.raises(ConfigError, match=f"begun with {what} other"):
        tune(**(asked | change), trials=1, study=file)


def test_a_file_that_is_no_study_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("milk\n")
    with pytest.raises(ConfigError, match=r"notes.txt is not a study"):
        tune(make_trace(), make_profile(), SLO, trials=2, study=file)
    assert file.read_text() == "milk\n"


def test_a_study_in_use_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "study"
    with (
        opened_study(file, {"seed": "0"}),
        pytest.raises(LaybyError, match="in use by another run"),
        opened_study(file, {"seed": "0"}),
    ):
        pass


def test_requests_that_never_fit_are_left_out_and_told() -> None:
    trace = Trace("toy", [*make_trace(3).requests, TraceRequest(1.0, 400, 10)])
    config = SearchSpace(make_profile()).base
    kept, misfits = leave_out_misfits(trace, config)
    assert len(kept) == 3
    assert misfits.count == 1
    assert "103 KV blocks" in str(misfits)
    with pytest.raises(ConfigError, match="no request of toy could ever be served"):
        leave_out_misfits(Trace("toy", trace.requests[3:]), config)


# --- what is made of it ---


def outcome(throughput: float, excess: float, *, preemptions: int = 0) -> Outcome:
    figures = {
        "output_tokens_per_s": throughput,
        "preemptions": {"swap": preemptions, "recompute": 0},
        "requests_finished": 100,
        "goodput": {"share": 1.0},
    }
    return Outcome(figures, excess, () if excess <= 1 else ("too slow",))


def trials(*pairs: tuple[float, float]) -> list[Trial]:
    return [Trial(number, {}, outcome(*pair)) for number, pair in enumerate(pairs)]


def test_the_front_has_what_nothing_beats() -> None:
    tried = trials((100, 2.0), (90, 0.5), (90, 0.5), (95, 3.0), (80, 0.6), (50, 0.1))
    assert [trial.number for trial in pareto_front(tried)] == [0, 1, 5]


def test_most_throughput_within_the_slo_is_chosen_with_room_to_spare() -> None:
    assert choose(pareto_front(trials((120, 1.5), (100, 0.99), (99.5, 0.5), (80, 0.1)))).number == 2
    assert choose(pareto_front(trials((120, 3.0), (100, 1.5)))).number == 1
    assert choose(pareto_front(trials((120, math.inf)))).number == 0


def test_ablations_say_what_each_setting_buys() -> None:
    """An ablation is the recommended settings with one of them reset; and each buys something."""
    result = tuned()
    space = SearchSpace(make_profile())
    bench = Bench(make_trace(), make_profile(), SLO)
    assert result.outcome == bench.try_out(space.config(result.settings))
    changed = space.changed(result.settings)
    assert changed
    assert [ablation.option for ablation in result.ablations] == list(changed)
    for ablation in result.ablations:
        reset = {**result.settings, ablation.option: space.defaults[ablation.option]}
        assert ablation.value == result.settings[ablation.option]
        assert ablation.outcome == bench.try_out(space.config(reset))
        assert (
            ablation.outcome.throughput < result.chosen.outcome.throughput * 0.995
            or ablation.outcome.excess > result.chosen.outcome.excess * 1.02
        )


def test_a_single_change_buys_all_there_is() -> None:
    result = stormy()
    assert [ablation.option for ablation in result.ablations] == ["max_num_seqs"]
    assert result.ablations[0].outcome == result.default.outcome


def test_where_nothing_helps_the_defaults_stay() -> None:
    """Advice that changes settings for no reason."""
    idle = Trace("idle", [TraceRequest(i * 100.0, 4, 4) for i in range(6)])
    result = tune(idle, make_profile(), SLO, trials=10)
    assert result.settings == result.default.settings
    assert not result.ablations
    assert not result.cliffs
    assert "Nothing that was tried is better" in result.verdict


def test_a_cliff_is_told() -> None:
    here = outcome(100, 0.9, preemptions=4)
    assert cliffs_between(here, outcome(91, 1.0, preemptions=7)) == ()
    assert cliffs_between(here, outcome(89, 0.9)) == ("throughput falls by 11%",)
    assert cliffs_between(here, outcome(100, 1.1)) == ("the SLO is missed (too slow)",)
    assert cliffs_between(outcome(100, 2.0), outcome(100, 3.0)) == ()
    storm = cliffs_between(here, outcome(100, 0.9, preemptions=9))
    assert storm == ("preemptions go from 4 to 9: a storm begins",)
    assert cliffs_between(outcome(100, 0.9), outcome(100, 0.9, preemptions=4)) == ()


def test_every_number_is_moved_both_ways() -> None:
    result = tuned()
    moved: dict[str, list[float]] = {}
    for neighbour in result.neighbours:
        assert not isinstance(neighbour.moved, str)
        moved.setdefault(neighbour.option, []).append(neighbour.moved)
    value = result.settings["max_num_seqs"]
    assert isinstance(value, int)
    assert min(moved["max_num_seqs"]) < value < max(moved["max_num_seqs"])


def test_the_page_has_it_all() -> None:
    result = tuned()
    page = tune_page(result)
    html = render_page(page)
    assert result.command in html
    assert "Pareto front" in html
    assert [section.title for section in page.sections] == [
        "Recommended settings",
        "What each setting buys",
        "Cliffs",
        "Trials",
    ]
    (chart,) = page.sections[3].charts
    assert isinstance(chart, Chart)
    shown = sum(len(curve.x) for curve in chart.curves if curve.kind == "points")
    finite = [t for t in result.trials if math.isfinite(t.outcome.excess)]
    assert shown == len(finite)
    starred = [row.name for row in front_table(result).rows if any(c.best for c in row.cells)]
    assert starred == [str(result.chosen.number)]


def test_the_json_is_the_result_schema_and_the_search() -> None:
    data = tuned().as_dict()
    assert data["requests_finished"] == 8
    assert data["output_tokens_per_s"] == tuned().outcome.throughput
    assert len(data["tune"]["trials"]) == 20
    assert data["tune"]["recommended"]["command"].startswith("layby serve")


@pytest.mark.parametrize(
    ("options", "message"),
    [({"trials": 0}, "at least 1"), ({"jobs": 0}, "at least 1"), ({"seed": -1}, "seed must be")],
)
def test_bad_numbers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tune(make_trace(), make_profile(), SLO, **options)  # type: ignore[arg-type]


def test_settings_are_written_as_on_a_command_line() -> None:
    assert [written(v) for v in (256, 4.0, 0.123456, None, "auto")] == [
        "256",
        "4",
        "0.1235",
        "none",
        "auto",
    ]
    assert GIB == 1024 * BLOCK_BYTES
