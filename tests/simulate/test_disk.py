"""Parked work on a simulated disk: it takes its time, beside the steps."""

from __future__ import annotations

import pytest

from layby.scheduling import BlockMove, SchedulerConfig, StepPlan, Transfer
from layby.simulate.cost import CostModel, MoveCost
from layby.simulate.executor import SimulatedExecutor, VirtualClock
from layby.simulate.profiles import load_profile
from layby.simulate.simulation import Simulation
from layby.simulate.traces import Trace, TraceRequest

BURSTS = Trace(
    "bursts",
    [
        TraceRequest(0.5 * number, 300, 200, priority=30 - number // 2 if number < 30 else 0)
        for number in range(40)
    ],
)
"""Each pair more urgent than the last, so that most are parked."""


def play(*, num_disk_blocks: int, skips: bool = True) -> Simulation:
    config = SchedulerConfig(
        num_blocks=120, num_swap_blocks=150, num_disk_blocks=num_disk_blocks, headroom=0
    )
    simulation = Simulation(BURSTS, load_profile("a100-llama3-8b"), config, skips=skips)
    simulation.run()
    return simulation


def test_the_disk_keeps_what_ram_has_no_room_for() -> None:
    without = play(num_disk_blocks=0).scheduler.metrics
    simulation = play(num_disk_blocks=5000)
    metrics = simulation.scheduler.metrics
    assert metrics.requests_finished == len(BURSTS)
    assert without.preemptions_recompute > metrics.preemptions_recompute
    tiers = {moves.tier: moves for moves in simulation.report("t", wall_s=0.0).moves}
    assert tiers["disk"].out_blocks == metrics.demoted_blocks > 0
    assert tiers["disk"].in_blocks == metrics.promoted_blocks > 0


@pytest.mark.parametrize("num_disk_blocks", [0, 5000])
def test_skipping_changes_nothing(num_disk_blocks: int) -> None:
    one_by_one = play(num_disk_blocks=num_disk_blocks, skips=False)
    skipped = play(num_disk_blocks=num_disk_blocks)
    assert skipped.scheduler.metrics == one_by_one.scheduler.metrics
    assert skipped.clock.now == one_by_one.clock.now


def test_one_transfer_at_a_time_and_reads_before_writes() -> None:
    clock = VirtualClock()
    cost = CostModel(
        rows_s=((0, 0.001), (1, 0.001)), demote=MoveCost(1.0, 1.0), promote=MoveCost(2.0, 0.5)
    )
    executor = SimulatedExecutor(cost, clock)
    moves = (BlockMove(0, 0), BlockMove(1, 1))
    plan = StepPlan(1, 0.0)
    plan.demote += [Transfer(1, moves), Transfer(2, moves)]
    plan.promote.append(Transfer(3, moves))
    ended = {end.number: clock.now for end in executor.execute(plan).transfer_ends}
    while len(ended) < 3:
        ends = executor.execute(StepPlan(2, 0.0)).transfer_ends
        ended |= {end.number: clock.now for end in ends}
    assert list(ended) == [3, 1, 2]
    # A step that computes nothing waits for a hundredth of a second at most.
    assert list(ended.values()) == pytest.approx([3.0, 6.0, 9.0], abs=0.02)
