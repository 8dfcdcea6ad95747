"""Profiling: what is measured is what the engine did, and the fit finds what is behind it.

The executor here takes the time that a known cost model says, on a clock of its own.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.engine.toy import ByteTokenizer
from layby.errors import ConfigError, EngineUnavailableError
from layby.execution import StepResult
from layby.scheduling import SchedulerConfig
from layby.scheduling.plan import StepPlan
from layby.simulate.cost import CostModel, MoveCost, StepLoad
from layby.simulate.profiling import (
    GRID,
    Case,
    Measurement,
    Profiler,
    Timings,
    fit_cost,
    fit_error,
    nnls,
)

TRUTH = CostModel(
    rows_s=((0, 0.0), (1, 4e-3), (8, 6e-3), (64, 22e-3), (512, 165e-3), (2048, 650e-3)),
    samples_s=((0, 0.0), (1, 2e-3), (64, 15e-3)),
    decode_context_s=4e-7,
    prefill_context_s=1.2e-7,
    swap_out=MoveCost(2e-4, 1.5e-5),
    swap_in=MoveCost(1e-4, 2e-5),
    copy=MoveCost(3e-4, 3e-5),
)

SMALL_GRID = (
    *(
        Case(decodes=count, context=context)
        for count in (1, 2, 4, 8, 16, 32, 64)
        for context in (20, 60)
    ),
    *(
        Case(prompts=1, tokens=tokens, start=start)
        for tokens in (1, 2, 4, 8, 16, 32, 64)
        for start in (0, 64)
    ),
    Case(prompts=1, tokens=32, is_cut=True),
    Case(prompts=1, tokens=64, start=32, is_cut=True),
    Case(decodes=6, context=40, prompts=2, tokens=20, held_out=True),
    Case(decodes=24, context=30, held_out=True),
)


class Clockwork:
    """An executor whose steps take as long as a cost model says, give or take some noise."""

    def __init__(self, cost: CostModel, *, noise: float = 0.0) -> None:
        self.now_s = 0.0
        self.cost = cost
        self.noise = noise
        self.loads: list[StepLoad] = []
        self.released: Counter[str] = Counter()
        self.fails = False
        self._draw = random.Random(1)

    def clock(self) -> float:
        return self.now_s

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fails:
            raise RuntimeError("out of luck")
        load = StepLoad.of(plan)
        self.loads.append(load)
        self.now_s += self.cost.step_s(load) * (1 + self._draw.gauss(0, self.noise))
        return StepResult([ord("a")] * plan.num_samples)

    def release(self, request_id: str) -> None:
        self.released[request_id] += 1

    def close(self) -> None:
        raise AssertionError("whoever made the executor closes it")


def profiler(
    executor: Clockwork,
    *,
    num_blocks: int = 1024,
    num_swap_blocks: int = 256,
    max_model_len: int = 512,
) -> Profiler:
    settings = SchedulerConfig(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        max_queue=0,
        enable_prefix_caching=False,
    )
    tokenizer = ByteTokenizer()
    return Profiler(
        executor,
        settings,
        tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        clock=executor.clock,
    )


def synthetic(truth: CostModel, *, noise: float) -> Timings:
    """What measuring the whole grid would give, without an engine."""
    draw = random.Random(7)
    steps = [Measurement(None, StepLoad(), truth.step_s(StepLoad()))]
    for case in GRID:
        positions = case.prompts * (case.tokens * (2 * case.start + case.tokens + 1) // 2)
        load = StepLoad(
            decode_tokens=case.decodes,
            prefill_tokens=case.prompts * case.tokens,
            decode_context=sum(case.lengths()),
            prefill_context=positions,
            num_sequences=case.num_seqs,
            num_samples=case.decodes + case.prompts * (not case.is_cut),
        )
        steps.append(Measurement(case, load, truth.step_s(load) * (1 + draw.gauss(0, noise))))
    moves = {
        name: [
            (count, getattr(truth, name).seconds(count) * (1 + draw.gauss(0, noise)))
            for count in (1, 8, 32, 128)
        ]
        for name in ("swap_out", "swap_in", "copy")
    }
    return Timings(steps, moves)


def test_an_engine_is_measured_to_the_model_behind_it() -> None:
    """The whole way: cases set up, the right steps timed, loads counted, coefficients found."""
    executor = Clockwork(TRUTH)
    timings = profiler(executor).run(SMALL_GRID, rounds=2)
    assert {step.case for step in timings.steps} == {None, *SMALL_GRID}
    cost = fit_cost(timings)
    for held_out in (False, True):
        error = fit_error(cost, [step for step in timings.steps if step.held_out is held_out])
        assert error is not None
        assert error.max_pct < 1.0
    assert cost.decode_context_s == pytest.approx(TRUTH.decode_context_s, rel=0.05)
    for name in ("swap_out", "swap_in", "copy"):
        for count in (1, 20, 100):
            expected = getattr(TRUTH, name).seconds(count)
            assert getattr(cost, name).seconds(count) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("case", SMALL_GRID)
def test_a_measured_step_contains_what_its_case_says(case: Case) -> None:
    """A chunk cut elsewhere, a prefix not found in the cache, a sequence that had not settled:
    steps of another kind would be measured and nobody would know."""
    executor = Clockwork(TRUTH)
    [_, measured] = profiler(executor).run([case], rounds=1).steps[::-1]
    load = measured.load
    assert measured.case == case
    assert load.num_sequences == case.num_seqs
    assert load.decode_tokens + load.prefill_tokens == case.rows
    assert load.num_samples == case.decodes + case.prompts * (not case.is_cut)
    assert load.blocks_out == load.blocks_in == 0
    if case.decodes:
        assert case.context < load.decode_context / case.decodes <= case.context + 5
    if case.prompts and case.tokens > 1:
        first_row = load.prefill_context / case.prompts / case.tokens - (case.tokens + 1) / 2
        assert first_row == case.start
    assert measured.seconds == pytest.approx(TRUTH.step_s(load), rel=0.01)


def test_what_leads_up_to_a_step_is_not_computed() -> None:
    """64 prompts computed for the sake of one step: profiling would take half an hour."""
    executor = Clockwork(TRUTH)
    profiler(executor).run([Case(decodes=64, context=60)], rounds=1)
    assert all(load.prefill_tokens == 0 for load in executor.loads)


def test_noise_of_three_percent_leaves_the_curve_within_three() -> None:
    """A fit that follows the noise, or gives large steps all the say."""
    timings = synthetic(TRUTH, noise=0.03)
    cost = fit_cost(timings)
    errors = [
        abs(cost.step_s(step.load) / TRUTH.step_s(step.load) - 1)
        for step in timings.steps
        if step.case is not None
    ]
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.06
    assert cost.decode_context_s == pytest.approx(TRUTH.decode_context_s, rel=0.15)
    assert cost.prefill_context_s == pytest.approx(TRUTH.prefill_context_s, rel=0.15)
    assert cost.swap_in.block_s == pytest.approx(TRUTH.swap_in.block_s, rel=0.15)
    seen = fit_error(cost, [step for step in timings.steps if not step.held_out])
    assert seen is not None
    assert 0.5 < seen.mean_pct < 4.0


def test_without_noise_the_fit_is_exact_at_every_knot() -> None:
    """A piece of the curve that no column stands for, or two that stand for one."""
    truth = CostModel(rows_s=((0, 1e-3), (1, 5e-3), (64, 9e-3), (2048, 0.5)), sequence_s=1e-5)
    cost = fit_cost(synthetic(truth, noise=0.0))
    for rows in (1, 7, 64, 100, 512, 2048, 5000):
        load = StepLoad(prefill_tokens=rows, num_sequences=1, num_samples=1)
        assert cost.step_s(load) == pytest.approx(truth.step_s(load), rel=0.002)


def test_a_fit_does_not_see_what_is_held_out() -> None:
    """Else its error on that would say nothing."""
    timings = synthetic(TRUTH, noise=0.0)
    for index, step in enumerate(timings.steps):
        if step.held_out:
            timings.steps[index] = Measurement(step.case, step.load, 10 * step.seconds)
    cost = fit_cost(timings)
    assert cost == fit_cost(synthetic(TRUTH, noise=0.0))
    error = fit_error(cost, [step for step in timings.steps if step.held_out])
    assert error is not None
    assert error.mean_pct == pytest.approx(90, abs=2)


def test_the_error_is_that_of_the_steps_in_percent_of_the_measured() -> None:
    """Percent of the predicted, or a mean in which errors cancel out."""
    cost = CostModel(rows_s=((0, 0.0), (1, 1.0)))
    steps = [
        Measurement(Case(decodes=1), StepLoad(decode_tokens=1), seconds)
        for seconds in (0.8, 1.0, 2.0)
    ]
    error = fit_error(cost, [*steps, Measurement(None, StepLoad(), 1e-9)])
    assert error is not None
    assert error.points == 3
    assert error.mean_pct == pytest.approx((25 + 0 + 50) / 3, abs=0.001)
    assert error.max_pct == 50
    assert fit_error(cost, []) is None


def test_a_slow_engine_is_measured_as_far_as_time_allows() -> None:
    """An hour of profiling where minutes were promised; or small steps left out for large ones."""
    executor = Clockwork(TRUTH)
    timings = profiler(executor).run(SMALL_GRID, rounds=99, limit_s=0.5)
    assert executor.now_s < 1.0
    measured = [step.case for step in timings.steps if step.case is not None]
    assert 0 < len(measured) < len(SMALL_GRID)
    assert max(case.rows for case in measured) < max(case.rows for case in SMALL_GRID)
    fit_cost(timings)


def test_only_what_the_engine_can_hold_is_measured() -> None:
    """A batch larger than the pool would be preempted, and measured as something else."""
    executor = Clockwork(TRUTH)
    timings = profiler(executor, num_blocks=24, num_swap_blocks=0, max_model_len=100).run(
        SMALL_GRID, rounds=1
    )
    cases = [step.case for step in timings.steps if step.case is not None]
    assert cases
    assert all(case.num_blocks(16) <= 24 for case in cases)
    assert all(case.longest <= 100 for case in cases)
    assert set(timings.moves) == {"copy"}


def test_without_a_swap_pool_parking_costs_as_much_as_copying() -> None:
    """Free, a simulation with a swap pool would make a miracle of it."""
    timings = synthetic(TRUTH, noise=0.0)
    del timings.moves["swap_out"], timings.moves["swap_in"]
    cost = fit_cost(timings)
    assert cost.swap_out == cost.swap_in == cost.copy
    assert cost.copy.block_s == pytest.approx(TRUTH.copy.block_s)


def test_an_engine_that_can_hold_nothing_is_refused_with_its_size() -> None:
    """Rather than a fit to no points."""
    with pytest.raises(ConfigError, match=r"a pool of 1 blocks with max_model_len 8 holds none"):
        profiler(Clockwork(TRUTH), num_blocks=1, max_model_len=8).run(SMALL_GRID)
    with pytest.raises(ConfigError, match="no measured steps"):
        fit_cost(Timings([], {}))


def test_a_step_that_fails_ends_the_profiling_with_its_reason() -> None:
    """A profile made of failed steps would be a very fast one."""
    executor = Clockwork(TRUTH)
    executor.fails = True
    with pytest.raises(EngineUnavailableError, match="out of luck"):
        profiler(executor).run(SMALL_GRID)


def test_the_engine_is_built_before_torch_is_there() -> None:
    """Whether torch's threads spin is settled when it is imported; spinning, they made small steps
    look twice as long as they are in serving."""
    program = """
import sys
import layby.engine.build
from layby.engine.config import EngineConfig
from layby.simulate.profiling import profile_model

def build_engine(config):
    sys.exit("torch was first" if "torch" in sys.modules else 0)

layby.engine.build.build_engine = build_engine
profile_model(EngineConfig())
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_every_case_of_the_grid_is_there_once() -> None:
    """Measured under one name, two cases would have their times mixed up."""
    assert len(set(GRID)) == len(GRID)
    assert {case.held_out for case in GRID} == {False, True}


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=3, max_size=8),
    st.data(),
)
def test_no_step_to_either_side_is_better_than_the_least_squares(
    rows: Sequence[Sequence[float]], data: st.DataObject
) -> None:
    """The conditions for an optimum from 0 up (Karush, Kuhn, Tucker)."""
    matrix = np.round(np.array(rows), 2)
    target = np.array(data.draw(st.lists(st.floats(-5, 5), min_size=len(rows), max_size=len(rows))))
    found = nnls(matrix, target)
    assert (found >= 0).all()
    best = np.linalg.norm(matrix @ found - target)
    for index in range(3):
        for step in (-1e-3, 1e-3):
            moved = found.copy()
            moved[index] = max(0.0, moved[index] + step)
            assert np.linalg.norm(matrix @ moved - target) >= best - 1e-7
