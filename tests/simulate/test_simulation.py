"""The simulation does what the engine would do, takes the time it should, and loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.engine import Engine
from layby.engine.pressure import PressureGauge, PressureSettings
from layby.engine.toy import ByteTokenizer
from layby.errors import QueueFullError, RequestTooLargeError
from layby.execution import FakeExecutor
from layby.execution.executor import StepResult
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from layby.scheduling.policy import POLICIES
from layby.scheduling.request import Sequence as Sample
from layby.simulate.cost import CostModel, MoveCost, StepLoad
from layby.simulate.executor import VirtualClock
from layby.simulate.observations import RequestLog, SimulationReport
from layby.simulate.profiles import ANALYTIC, Profile, SchedulerDefaults
from layby.simulate.resizes import PoolResize
from layby.simulate.simulation import Simulation, StalledError, simulate
from layby.simulate.traces import Trace, TraceRequest

BLOCK = 4

FLAT = CostModel(rows_s=((0, 0.0), (1, 1.0), (2, 1.0)))
"""Every step takes a second, whatever is in it."""

DEAR = CostModel(
    rows_s=((0, 0.01), (1, 0.1), (8, 0.13), (64, 0.4)),
    samples_s=((0, 0.0), (4, 0.003)),
    decode_context_s=1e-4,
    prefill_context_s=3e-5,
    sequence_s=1e-3,
    swap_out=MoveCost(0.004, 0.002),
    swap_in=MoveCost(0.003, 0.001),
    copy=MoveCost(0.001, 0.0005),
)
"""Everything costs something of its own."""


def profile(cost: CostModel = FLAT) -> Profile:
    return Profile(
        name="toy",
        kind=ANALYTIC,
        model="toy",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        machine={"cpu": "abacus"},
        block_size=BLOCK,
        block_bytes=1000,
        scheduler=SchedulerDefaults(64, 64, 8, 32, 256),
        cost=cost,
        fit=None,
        held_out=None,
        created="2026-01-01",
    )


def config(**changed: Any) -> SchedulerConfig:
    known = {
        "num_blocks": 64,
        "num_swap_blocks": 64,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 256,
        "headroom": 0.0,
    }
    return SchedulerConfig(**known | changed)


def run(trace: Trace, cost: CostModel = FLAT, **changed: Any) -> tuple[Simulation, RequestLog]:
    log = RequestLog(max_records=100_000)
    simulation = Simulation(trace, profile(cost), config(**changed), log=log)
    simulation.run()
    simulation.scheduler.check_integrity()
    return simulation, log


def report_of(simulation: Simulation) -> SimulationReport:
    return simulation.report("toy", wall_s=1.0)


def trace_of(*requests: tuple[Any, ...] | TraceRequest) -> Trace:
    """Of requests, or of their arrival, prompt and answer."""
    return Trace("t", [r if isinstance(r, TraceRequest) else TraceRequest(*r) for r in requests])


def changes(simulation: Simulation, column: str) -> dict[float, float]:
    """When a column of the timeline changes, and to what."""
    line = report_of(simulation).timeline
    values = line.mean[column]
    return {
        round(at_s, 2): value
        for i, (at_s, value) in enumerate(zip(line.start_s, values, strict=True))
        if i == 0 or value != values[i - 1]
    }


def all_the_same(value: float) -> dict[str, Any]:
    names = ("mean", "p50", "p90", "p99", "max")
    return dict.fromkeys(names, pytest.approx(value, abs=1e-9))


# --- random work ---


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Few requests with everything that makes a difference, and some that cannot be served."""
    requests = []
    for _ in range(draw(st.integers(1, 14))):
        prompt = draw(st.integers(1, 40))
        output = draw(st.one_of(st.integers(1, 60), st.just(400)))
        prefix = draw(st.lists(st.integers(0, 2), max_size=-(-prompt // 8)))
        early = draw(st.integers(0, 30))
        requests.append(
            TraceRequest(
                arrival_s=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 3.01, 9.0])),
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                priority=draw(st.sampled_from([0, 0, 0, 1, 5])),
                prefix=tuple(prefix),
                prefix_block_tokens=8 if prefix else 0,
                max_tokens=output + early if early > 20 else None,
                n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            )
        )
    times = sorted(draw(st.sets(st.sampled_from([0.0, 0.6, 2.0, 3.0, 7.5, 15.0]), max_size=3)))
    resizes = [PoolResize(at_s, draw(st.sampled_from([8, 14, 30, 64]))) for at_s in times]
    return Trace("random", requests, resizes=resizes)


def flood(classes: Sequence[int]) -> Trace:
    """More than the server can take, for long enough to be sure of it; then somebody alone."""
    requests = [
        TraceRequest(0.2 * i, 4, 10 + 7 * i % 30, priority=classes[i % len(classes)])
        for i in range(60)
    ]
    return Trace("flood", [*requests, TraceRequest(90.0, 3, 5)])


def gauge() -> PressureGauge:
    """One that is quick to judge."""
    return PressureGauge(
        PressureSettings(
            window_s=1.5, drain_window_s=3.0, full=0.5, deep_wait_s=0.5, min_growth=0.01
        )
    )


CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([12, 20, 26, 40, 64]),
        "num_swap_blocks": st.sampled_from([0, 6, 64]),
        "policy": st.sampled_from(list(POLICIES)),
        "preemption_mode": st.sampled_from(["auto", "recompute"]),
        "max_num_seqs": st.sampled_from([3, 8]),
        "enable_prefix_caching": st.booleans(),
        "headroom": st.sampled_from([0.0, 1.0]),
        "urgent_window": st.sampled_from([0.0, 2.0, 30.0]),
        "background_tokens": st.sampled_from([0, 8]),
        "preemption_threshold": st.sampled_from([1.0, 1.0, 0.7]),
        "max_queue": st.sampled_from([None, 2]),
        "priority_aging": st.sampled_from([None, None, 0.4, 3.0]),
        "demote_after_tokens": st.sampled_from([None, 7]),
    }
)


def alike(one: Any, other: Any, where: str = "") -> None:
    """Plain data is the same up to the rounding of sums."""
    if isinstance(one, dict):
        assert list(one) == list(other), where
        for name in one:
            alike(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            alike(left, right, f"{where}[{index}]")
    elif isinstance(one, float) and isinstance(other, float):
        assert math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9), f"{where}: {one} {other}"
    else:
        assert one == other, where


@settings(max_examples=50)
@given(traces(), CONFIGS, st.booleans())
def test_taking_quiet_steps_at_once_changes_nothing(
    trace: Trace, changed: dict[str, Any], shed_load: bool
) -> None:
    same_with_and_without_skips(trace, changed, shed_load=shed_load)


@pytest.mark.parametrize("classes", [(0,), (0, 5), (0, 0, 5, 9)])
@pytest.mark.parametrize("changed", [{"num_swap_blocks": 0}, {"priority_aging": 2.0}])
def test_who_is_shed_is_the_same_with_and_without_skips_and_in_the_engine(
    classes: Sequence[int], changed: dict[str, Any]
) -> None:
    trace, changed = flood(classes), changed | {"num_blocks": 26}
    refused = same_with_and_without_skips(trace, changed, shed_load=True)
    assert refused["shed"] > 0
    assert list(refused["shed_by_class"]) == [str(max(classes))]
    same_as_the_engine(trace, changed, shed_load=True)
    assert same_with_and_without_skips(trace, changed, shed_load=False)["shed"] == 0


def same_with_and_without_skips(
    trace: Trace, changed: dict[str, Any], *, shed_load: bool
) -> dict[str, Any]:
    """Returns who was refused."""
    reports = []
    for skips in (True, False):
        simulation = Simulation(
            trace,
            profile(DEAR),
            config(**changed),
            log=RequestLog(slo={"ttft_s": 2.0, "itl_s": 0.3}),
            shed_load=shed_load,
            pressure=gauge(),
            skips=skips,
        )
        simulation.run()
        reports.append(report_of(simulation))
    with_skips, without = (report.as_dict() for report in reports)
    # Steps that are taken at once leave no rows of their own in the timeline, so its stretches
    # are cut elsewhere; the areas under its curves are the same.
    lines = [known.pop("timeline") for known in (with_skips, without)]
    alike(with_skips, without)
    for name in ("waiting", "running", "swapped", "num_blocks", "pressure"):
        areas = []
        for line in lines:
            ends = [*line["start_s"], line["end_s"]]
            areas.append(
                sum(value * (ends[i + 1] - ends[i]) for i, value in enumerate(line["mean"][name]))
            )
        assert areas[0] == pytest.approx(areas[1], rel=1e-6, abs=1e-6), name
    for one, other in zip(reports[0].records, reports[1].records, strict=True):
        alike(
            [(span[0].value, *span[1:]) for span in one.spans],
            [(span[0].value, *span[1:]) for span in other.spans],
        )
    return reports[0].refusals.as_dict()


@settings(max_examples=25)
@given(traces(), CONFIGS)
def test_nothing_is_lost(trace: Trace, changed: dict[str, Any]) -> None:
    """Every request is finished or refused, and every token but a sample's first ends a gap."""
    simulation, log = run(trace, DEAR, **changed)
    report = report_of(simulation)
    overall = log.overall()
    assert overall.requests_finished + simulation.refusals.total == len(trace)
    records = log.records()
    assert len(records) == overall.requests_finished
    tokens = sum(record.num_output_tokens for record in records)
    assert tokens == overall.output_tokens
    samples = sum(record.n for record in records)
    assert overall.itl_s.count == tokens - samples
    assert overall.ttft_s.count == overall.queueing_s.count == len(records)
    asked = {traced.request_id or str(index): traced for index, traced in enumerate(trace.requests)}
    for record in records:
        traced = asked[record.request_id]
        assert record.num_output_tokens == traced.num_output_tokens * traced.n
        assert record.spans[0][1] == record.arrival_s == traced.arrival_s
        assert record.spans[-1][2] == record.finish_s
        for before, after in zip(record.spans, record.spans[1:], strict=False):
            assert before[2] == after[1]
        if traced.n == 1 and traced.num_output_tokens > 1:
            assert record.itl_s is not None
    # Gaps and first tokens together are the time from arrival to end, for single samples.
    if all(traced.n == 1 for traced in trace.requests) and records:
        total = (overall.itl_s.mean_s or 0) * overall.itl_s.count
        total += sum(record.ttft_s or 0 for record in records)
        assert total == pytest.approx(sum(record.e2e_s or 0 for record in records))
    counts = simulation.scheduler.metrics
    assert sum(record.preemptions_swap for record in records) == counts.preemptions_swap
    assert sum(record.preemptions_recompute for record in records) == counts.preemptions_recompute
    swapped_s = sum(record.swapped_s for record in records)
    assert swapped_s == pytest.approx(counts.swapped_s_total)
    [moves] = report.moves
    assert moves.out_blocks == counts.swapped_out_blocks
    assert moves.in_bytes == counts.swapped_in_blocks * 1000


@settings(max_examples=15)
@given(traces(), CONFIGS)
def test_the_classes_add_up_to_the_whole(trace: Trace, changed: dict[str, Any]) -> None:
    simulation, _ = run(trace, DEAR, **changed)
    known = report_of(simulation).as_dict()
    classes = known["classes"].values()
    for name in ("requests_finished", "output_tokens"):
        assert sum(figures[name] for figures in classes) == known[name]
    for name in ("ttft_s", "e2e_s", "queueing_s"):
        sums = [(f[name]["mean"] or 0.0) * f["requests_finished"] for f in classes]
        assert sum(sums) == pytest.approx((known[name]["mean"] or 0) * known["requests_finished"])
        most = [f[name]["max"] for f in classes if f[name]["max"] is not None]
        assert known[name]["max"] == (max(most) if most else None)


# --- by hand ---


def test_one_request_takes_what_the_cost_model_says() -> None:
    """A prompt of 40 tokens with 32 in a step; then each decode step reads one position more."""
    simulation, _ = run(trace_of((0.0, 40, 4)), DEAR)
    first = StepLoad(prefill_tokens=32, prefill_context=32 * 33 // 2, num_sequences=1)
    second = StepLoad(
        prefill_tokens=8,
        prefill_context=sum(range(33, 41)),
        num_sequences=1,
        num_samples=1,
    )
    decodes = [
        DEAR.step_s(
            StepLoad(decode_tokens=1, decode_context=context, num_sequences=1, num_samples=1)
        )
        for context in (41, 42, 43)
    ]
    ttft_s = DEAR.step_s(first) + DEAR.step_s(second)
    known = report_of(simulation).as_dict()
    assert known["ttft_s"] == all_the_same(ttft_s)
    assert known["e2e_s"] == all_the_same(ttft_s + sum(decodes))
    assert known["itl_s"]["mean"] == pytest.approx(sum(decodes) / 3, rel=1e-12)
    assert known["itl_s"]["max"] == pytest.approx(decodes[-1], rel=1e-12)
    assert known["queueing_s"] == all_the_same(0.0)
    assert known["steps"] == 5
    assert known["simulated_s"] == known["duration_s"] == pytest.approx(ttft_s + sum(decodes))
    assert known["output_tokens_per_s"] == pytest.approx(4 / known["duration_s"])


def test_the_second_of_two_queues_for_the_only_place() -> None:
    """It comes at 0.5 s, in the midst of a step; the first ends at 3 s."""
    simulation, log = run(trace_of((0.0, 4, 3), (0.5, 4, 2)), max_num_seqs=1)
    first, second = log.records()
    assert (first.ttft_s, first.e2e_s) == (1.0, 3.0)
    assert (second.queueing_s, second.ttft_s, second.e2e_s) == (2.5, 3.5, 4.5)
    assert log.overall().itl_s.distribution().max == 1.0
    # The server looks who has come when a step has ended.
    assert changes(simulation, "waiting") == {0.0: 0.0, 1.0: 1.0, 3.0: 0.0}
    assert changes(simulation, "running") == {0.0: 1.0}


def test_a_server_without_work_sleeps_until_somebody_comes() -> None:
    simulation, log = run(trace_of((0.0, 4, 1), (1000.25, 4, 1)))
    assert [record.ttft_s for record in log.records()] == [1.0, 1.0]
    assert simulation.clock.now == 1001.25
    assert simulation.steps == 2
    line = report_of(simulation).timeline
    ends = [*line.start_s[1:], line.end_s]
    spent = [m * (e - s) for m, s, e in zip(line.mean["running"], line.start_s, ends, strict=True)]
    assert sum(spent) == pytest.approx(2.0)


def test_a_swap_moves_the_blocks_and_takes_its_time() -> None:
    """Two requests of one block grow in a pool of four blocks; the second must go and come back.

    The first ends with 12 positions stored, in 3 blocks; both together hold 2 blocks each from
    their fifth position on, and the step that stores a ninth finds no fifth block.
    """
    cost = replace(FLAT, swap_out=MoveCost(10.0, 1.0), swap_in=MoveCost(20.0, 2.0))
    simulation, log = run(
        trace_of((0.0, 4, 9), (0.0, 4, 9)), cost, num_blocks=4, preemption_mode="swap"
    )
    first, second = log.records()
    # Step 1 prefills both, steps 2 to 5 store positions 4 to 7 (tokens 2 to 5); step 6 wants the
    # ninth position: the second leaves with its two blocks. The first has 9 tokens after step 9.
    assert first.spans[0][1:] == (0.0, first.finish_s)
    assert first.finish_s == 5 + (1 + 10 + 2) + 3
    assert second.preemptions_swap == 1
    [running, parked, again] = second.spans
    assert [span[0].value for span in second.spans] == ["running", "swapped", "running"]
    assert running[1:] == (0.0, 5.0)
    assert parked[1:] == (5.0, 21.0)
    # Back with two blocks, of which the first has left one alone; four tokens to go, and nothing is
    # computed again.
    assert again[2] == 21 + (1 + 20 + 2) + 3
    report = report_of(simulation)
    [moves] = report.moves
    assert (moves.out_blocks, moves.in_blocks) == (2, 1)
    assert (moves.out_bytes, moves.in_bytes) == (2000, 1000)
    assert report.result.recomputed_tokens == 0
    assert report.result.avg_swapped_duration_s == 16.0
    # The token after the parking comes 16 s + 23 s after the one before it.
    assert report.result.itl_s.max == 39.0
    assert log.overall().itl_s.count == 16


def test_a_pool_that_shrinks_parks_the_latest_until_it_grows_again() -> None:
    """The sixth step, at 5 s, stores a ninth position each: six blocks, of which there are five."""
    trace = replace(
        trace_of((0.0, 4, 16), (0.0, 4, 16)),
        resizes=[PoolResize(3.5, 5), PoolResize(8.5, 40)],
    )
    simulation, log = run(trace, num_blocks=20, preemption_mode="swap")
    first, second = log.records()
    assert first.finish_s == 16.0
    states = [(state.value, start_s, end_s) for state, start_s, end_s in second.spans]
    assert states[:2] == [("running", 0.0, 5.0), ("swapped", 5.0, 9.0)]
    assert second.finish_s == 20.0
    assert simulation.scheduler.metrics.preemptions_swap == 1
    assert changes(simulation, "num_blocks") == {0.0: 20.0, 4.0: 5.0, 9.0: 40.0}


def test_an_idle_server_changes_its_pool_at_once() -> None:
    trace = replace(trace_of((0.0, 4, 1), (50.0, 4, 1)), resizes=[PoolResize(20.0, 7)])
    simulation, log = run(trace, replace(FLAT, rows_s=((0, 0.5), (1, 1.0), (2, 1.0))))
    reached = [at_s for at_s, size in changes(simulation, "num_blocks").items() if size == 7.0]
    assert reached[0] == pytest.approx(20.0, abs=0.1)
    assert [record.ttft_s for record in log.records()] == [1.0, 1.0]
    assert simulation.steps == 3


def test_without_a_swap_pool_the_same_is_computed_again() -> None:
    simulation, log = run(trace_of((0.0, 4, 9), (0.0, 4, 9)), num_blocks=4, num_swap_blocks=0)
    first, second = log.records()
    assert first.finish_s == 9.0
    # Eight positions are done again in one step, which also brings the sixth token.
    assert second.finish_s == 9 + 4
    report = report_of(simulation)
    assert report.result.preemptions.recompute == second.preemptions_recompute == 1
    # Prefix caching finds what nobody has taken over meanwhile: here the first took one block.
    assert 0 < report.result.recomputed_tokens <= 8
    assert [(m.out_blocks, m.in_blocks) for m in report.moves] == [(0, 0)]


def test_an_answer_may_end_before_what_was_allowed() -> None:
    early = TraceRequest(0.0, 4, 3, max_tokens=50)
    simulation, log = run(trace_of(early))
    [record] = log.records()
    assert record.num_output_tokens == 3
    assert record.e2e_s == 3.0
    assert report_of(simulation).result.settings["answer_lengths_known"] is False
    # What is allowed is what the pool must hold.
    simulation, log = run(trace_of(early), num_blocks=8)
    assert simulation.refusals.too_large == 1


def test_who_cannot_be_served_is_refused_and_counted() -> None:
    trace = trace_of((0.0, 4, 400), (0.0, 4, 20), (0.0, 4, 20), (0.0, 4, 20))
    simulation, log = run(trace, max_queue=1, max_num_seqs=1)
    assert (simulation.refusals.too_large, simulation.refusals.queue_full) == (1, 1)
    assert log.overall().requests_finished == 2
    settings_told = report_of(simulation).result.settings
    assert settings_told["requests_refused"] == 2
    assert "404" in settings_told["first_refusal"]


def test_prefix_ids_are_found_in_the_cache() -> None:
    """Mooncake's kind: two prompts share two ids of 8 tokens, and a third shares one."""
    prompts = [(1, 2, 3), (1, 2, 4), (1, 5), (2, 1)]
    requests = [
        TraceRequest(10.0 * i, 20, 2, prefix=ids, prefix_block_tokens=8)
        for i, ids in enumerate(prompts)
    ]
    simulation, _ = run(trace_of(*requests))
    assert simulation.scheduler.metrics.prefix_cache_hit_tokens == 16 + 8
    simulation, _ = run(trace_of(*requests), enable_prefix_caching=False)
    assert simulation.scheduler.metrics.prefix_cache_hit_tokens == 0
    # What no id covers is nobody else's, though it is made of the same tokens.
    simulation, _ = run(trace_of((0.0, 20, 2), (10.0, 20, 2)))
    assert simulation.scheduler.metrics.prefix_cache_hit_tokens == 0


def test_an_id_that_covers_parts_of_blocks_is_shared_as_far_as_blocks_are_full() -> None:
    """Ids of 6 tokens, blocks of 4: one common id is one common block, two are three."""
    for ids, hit in (((1, 9), 4), ((1, 2), 12)):
        requests = [
            TraceRequest(10.0 * i, 18, 1, prefix=prefix, prefix_block_tokens=6)
            for i, prefix in enumerate([(1, 2), ids])
        ]
        simulation, _ = run(trace_of(*requests))
        assert simulation.scheduler.metrics.prefix_cache_hit_tokens == hit


def test_blocks_of_another_size_cost_what_their_tokens_do() -> None:
    """The profile is of blocks of 4; with blocks of 8 half as many of twice the weight move."""
    cost = replace(FLAT, swap_out=MoveCost(0.0, 1.0))
    trace = trace_of((0.0, 8, 17), (0.0, 8, 17))
    seconds, moved = [], []
    for size in (4, 8):
        changed = config(num_blocks=32 // size, block_size=size, preemption_mode="swap")
        report = simulate(trace, profile(cost), changed)
        seconds.append(report.simulated_s)
        moved.append((report.moves[0].out_blocks, report.moves[0].out_bytes))
    assert moved == [(4, 4000), (2, 4000)]
    assert seconds[0] == seconds[1]


def test_a_scheduler_that_never_plans_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_schedule_waiting", lambda self, step: None)
    with pytest.raises(StalledError, match="waiting 1"):
        run(trace_of((0.0, 4, 1)))


def test_progress_ends_with_everybody() -> None:
    told: list[tuple[int, int]] = []
    requests = [(float(i), 4, 2) for i in range(50)]
    simulate(
        trace_of(*requests),
        profile(),
        config(),
        progress=lambda ended, of: told.append((ended, of)),
    )
    assert told == sorted(told)
    assert told[-1] == (50, 50)


def test_the_same_simulation_gives_the_same_bits() -> None:
    trace = trace_of(*[(0.3 * i, 3 + i % 7, 2 + i % 11) for i in range(40)])
    known = [simulate(trace, profile(DEAR), config(num_blocks=10)).as_dict() for _ in range(2)]
    assert known[0] == known[1]


# --- the engine ---

Decision = tuple[Any, ...]


def decision(plan: StepPlan, name: Callable[[str], str]) -> Decision:
    """All that a plan says, and when."""
    return (
        round(plan.now, 9),
        [(name(r.request_id), mode.value) for r, mode in plan.preempted],
        [name(r.request_id) for r in plan.resumed],
        [name(r.request_id) for r in plan.admitted],
        list(plan.swap_out),
        list(plan.swap_in),
        list(plan.copy),
        list(plan.relocate),
        plan.num_blocks,
        [
            (name(i.sequence.request.request_id), i.sequence.index, i.start, i.num_tokens)
            for i in plan.scheduled
        ],
    )


class Clockwork:
    """An executor that computes as the fake one does, takes time, and keeps the decisions."""

    def __init__(self, clock: VirtualClock, script: Callable[[Sample], int | None]) -> None:
        self.clock = clock
        self.fake = FakeExecutor(block_size=BLOCK, vocab_size=256, script=script)
        self.decisions: list[Decision] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.decisions.append(decision(plan, str))
        result = self.fake.execute(plan)
        self.clock.now += DEAR.step_s(StepLoad.of(plan))
        return result

    def release(self, request_id: str) -> None:
        self.fake.release(request_id)

    def close(self) -> None:
        self.fake.close()


def prompt_of(index: int, traced: TraceRequest) -> list[int]:
    """Tokens that have in common what the prefix ids say: block k of id i is i, i, i, …"""
    shared = [10 + number for number in traced.prefix for _ in range(traced.prefix_block_tokens)]
    own = [100 + index] * traced.num_prompt_tokens
    return (shared + own)[: traced.num_prompt_tokens]


def decisions_of_engine(
    trace: Trace, changed: dict[str, Any], *, shed_load: bool
) -> tuple[list[Decision], int, int]:
    """What the real engine decides, fed as the server feeds it; and how many it refused, those
    shed among them."""
    clock = VirtualClock()
    asked = {str(index): traced for index, traced in enumerate(trace.requests)}

    def script(seq: Sample) -> int | None:
        ends = seq.num_output_tokens + 1 >= asked[seq.request.request_id].num_output_tokens
        return ByteTokenizer.EOS if ends and seq.stop_token_ids else None

    executor = Clockwork(clock, script)
    engine = Engine(
        Scheduler(config(**changed), clock=clock),
        executor,
        ByteTokenizer(),
        max_model_len=256,
        seed=0,
        shed_load=shed_load,
        pressure=gauge(),
        clock=clock,
    )
    arrived = refused = resized = 0
    while arrived < len(trace) or engine.has_unfinished:
        while resized < len(trace.resizes) and trace.resizes[resized].at_s <= clock.now:
            engine.resize_kv_pool(trace.resizes[resized].num_blocks)
            resized += 1
        now = clock.now
        while arrived < len(trace) and trace.requests[arrived].arrival_s <= now:
            traced = trace.requests[arrived]
            clock.now = traced.arrival_s  # prepared by the server's thread, while the step runs
            params = SamplingParams(
                max_tokens=traced.max_tokens or traced.num_output_tokens,
                n=traced.n,
                ignore_eos=traced.max_tokens in (None, traced.num_output_tokens),
            )
            try:
                prepared = engine.prepare(
                    prompt_of(arrived, traced),
                    params,
                    request_id=str(arrived),
                    priority=traced.priority,
                )
                clock.now = now
                engine.submit(prepared)
            except (RequestTooLargeError, QueueFullError):
                refused += 1
            except ValueError:  # other reasons why it can never run
                refused += 1
            clock.now = now
            arrived += 1
        if engine.has_unfinished:
            engine.step()
            assert engine.error is None
        elif arrived < len(trace):
            coming = [trace.requests[arrived].arrival_s]
            coming += [each.at_s for each in trace.resizes[resized:]]
            clock.now = max(clock.now, min(coming))
    return executor.decisions, refused, engine.stats().requests_shed


@settings(max_examples=60)
@given(traces(), CONFIGS, st.booleans())
def test_the_simulation_decides_as_the_engine_does(
    trace: Trace, changed: dict[str, Any], shed_load: bool
) -> None:
    """Every plan is the same, at the same time: queues, moves, tokens."""
    same_as_the_engine(trace, changed, shed_load=shed_load)


def same_as_the_engine(trace: Trace, changed: dict[str, Any], *, shed_load: bool) -> None:
    simulation = Simulation(
        trace,
        profile(DEAR),
        config(**changed),
        shed_load=shed_load,
        pressure=gauge(),
        skips=False,
    )
    decisions: list[Decision] = []
    schedule = simulation.scheduler.schedule

    def watched() -> StepPlan:
        plan = schedule()
        decisions.append(decision(plan, str))
        return plan

    simulation.scheduler.schedule = watched  # type: ignore[method-assign]
    simulation.run()
    expected, refused, shed = decisions_of_engine(trace, changed, shed_load=shed_load)
    assert simulation.refusals.total == refused
    assert simulation.refusals.shed.total() == shed
    for step, (one, other) in enumerate(zip(decisions, expected, strict=True)):
        assert one == other, f"step {step + 1}"
