"""What an engine learns of its machine's costs, and that a recording keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from layby.engine.costs import CostMeter
from layby.execution.executor import StepResult
from layby.sampling_params import SamplingParams
from layby.scheduling import BlockMove, MoveCosts, Request, ScheduledSequence, StepPlan
from layby.simulate.recordings import replay_recording
from tests.engine.recorded import RecordedHarness


def prefill(tokens: int) -> StepPlan:
    sequence = Request("a", [1] * tokens, max_tokens=1).sequences[0]
    return StepPlan(1, 0.0, scheduled=[ScheduledSequence(sequence, 0, tokens, ())])


def moves(count: int) -> StepPlan:
    return StepPlan(1, 0.0, swap_out=[BlockMove(block, block) for block in range(count)])


def test_nothing_is_told_until_both_costs_are_known() -> None:
    meter = CostMeter()
    assert meter.observe(prefill(100), StepResult([]), 0.5) is None
    assert meter.observe(moves(4), StepResult([]), 0.1) is None  # not timed
    costs = meter.observe(moves(4), StepResult([], moved_s=0.08), 0.1)
    assert costs is not None
    assert costs.out_s == costs.in_s == pytest.approx(0.02)
    assert costs.token_s == pytest.approx(0.005)


def test_a_step_that_some_sat_out_says_nothing_of_prefill() -> None:
    meter = CostMeter()
    plan = prefill(100)
    plan.paused = [Request("b", [1], max_tokens=1).sequences[0]]
    meter.observe(plan, StepResult([]), 0.5)
    assert meter.observe(moves(4), StepResult([], moved_s=0.08), 0.1) is None
    costs = meter.observe(prefill(100), StepResult([]), 0.7)
    assert costs is not None
    assert costs.token_s == pytest.approx(0.007)


def test_small_changes_are_not_told() -> None:
    meter = CostMeter()
    meter.observe(prefill(100), StepResult([]), 0.5)
    assert meter.observe(moves(4), StepResult([], moved_s=0.08), 0.1) is not None
    assert meter.observe(moves(4), StepResult([], moved_s=0.09), 0.1) is None
    told = [meter.observe(moves(4), StepResult([], moved_s=0.16), 0.2) for _ in range(9)]
    last = [costs for costs in told if costs is not None][-1]
    assert 0.03 < last.out_s < 0.04


def test_a_recording_is_replayed_with_the_costs_that_were_measured(tmp_path: Path) -> None:
    path = tmp_path / "file"
    harness = RecordedHarness(path, num_blocks=8, num_swap_blocks=40, block_size=4)
    for token_s in (0.0, 1.0):
        harness.scheduler.set_costs(MoveCosts(1.0, 1.0, token_s))
        for _ in range(3):
            harness.engine.add_request([97] * 9, SamplingParams(max_tokens=12))
        while harness.engine.has_unfinished:
            harness.engine.step()
    metrics = harness.scheduler.metrics
    harness.close()
    assert min(metrics.decisions_recompute, metrics.decisions_swap) > 0
    check = replay_recording([path], check=True).check
    assert check is not None
    assert check.difference is None
    assert check.unchecked_steps == 0
