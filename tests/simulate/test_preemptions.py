"""A recorded service is asked why somebody had to go, and how he left."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from layby.scheduling import MoveCosts
from layby.simulate.preemptions import Preemption, read_preemptions
from layby.simulate.recordings import replay_recording
from layby.simulate.traces import TraceError
from tests.engine.recorded import RecordedHarness, record
from tests.simulate.test_replay import rows_of, write

TIMES = {"out_s": 0.003, "in_s": 0.002}


def dear_and_cheap(harness: RecordedHarness, rng: random.Random) -> None:
    """What computing a token takes changes all the time, and with it the cheaper way."""
    harness.scheduler.set_costs(MoveCosts(**TIMES, token_s=rng.choice([1e-5, 0.01 / 3])))


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Victims leave by cost, and some find the swap pool full."""
    path = tmp_path_factory.mktemp("weighed") / "r"
    record(path, 3, requests=40, meddling=dear_and_cheap, num_swap_blocks=8)
    return path


def test_both_estimates_of_every_choice_are_in_the_recording(weighed: Path) -> None:
    found = list(read_preemptions([weighed]))
    summary = replay_recording([weighed]).summary
    by_mode = [sum(each.mode == mode for each in found) for mode in ("swap", "recompute")]
    assert by_mode == [summary.preempted_swap, summary.preempted_recompute]
    chosen = [each for each in found if each.weighing is not None]
    for each in chosen:
        weighing = each.weighing
        assert weighing is not None
        moving = TIMES["out_s"] * weighing.blocks_out + TIMES["in_s"] * weighing.blocks_in
        assert weighing.swap_s == moving
        assert weighing.recompute_s in (1e-5 * weighing.tokens, 0.01 / 3 * weighing.tokens)
        cheaper = "swap" if weighing.swap_s <= weighing.recompute_s else "recompute"
        assert each.mode == cheaper
    assert {each.mode for each in chosen} == {"swap", "recompute"}
    assert any(each.weighing is None for each in found)  # there was no room to park
    assert all(bool(each.why_not) == (each.weighing is None) for each in found)


def test_a_replay_comes_to_the_same_estimates_and_finds_one_that_was_changed(
    weighed: Path, tmp_path: Path
) -> None:
    check = replay_recording([weighed], check=True).check
    assert check is not None
    assert check.difference is None
    rows = rows_of(weighed)
    row = next(row for row in rows if row["e"] == "step" and "why" in row)
    row["why"][0][-1] *= 1 + 1e-15
    check = replay_recording([write(tmp_path / "changed", rows)], check=True).check
    assert check is not None
    assert check.difference is not None
    assert (check.difference.step, check.difference.what) == (row["k"], "decisions")


def test_a_recording_of_before_that_tells_no_estimates_is_still_proven(
    weighed: Path, tmp_path: Path
) -> None:
    rows = rows_of(weighed)
    for row in rows:
        if row["e"] == "step":
            row.pop("why", None)
    path = write(tmp_path / "changed", rows)
    check = replay_recording([path], check=True).check
    assert check is not None
    assert check.difference is None
    assert {each.weighing for each in read_preemptions([path])} == {None}


def test_times_count_from_the_beginning_of_the_first_file(weighed: Path) -> None:
    found = list(read_preemptions([weighed, weighed]))
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert all(isinstance(each, Preemption) and each.time_s > 0 for each in found)
    assert [each.time_s for each in found[:half]] == sorted(each.time_s for each in found[:half])


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        (
            {"num_swap_blocks": 8},
            {
                "no costs had been measured yet",
                "there was nothing to park, or no room for it in the swap pool",
            },
        ),
        ({"preemption_mode": "swap"}, {"the preemption mode is swap"}),
        ({"policy": "recompute-only"}, {"the policy is recompute-only"}),
        ({"num_swap_blocks": 0}, {"there is no swap pool"}),
    ],
)
def test_why_the_ways_out_were_not_compared_is_told(
    options: dict[str, Any], reasons: set[str], tmp_path: Path
) -> None:
    record(tmp_path / "r", 3, requests=40, **options)
    assert {each.why_not for each in read_preemptions([tmp_path / "r"])} == reasons


def test_no_reason_is_made_up_for_a_part_before_which_costs_may_have_been_told(
    tmp_path: Path,
) -> None:
    record(tmp_path / "r", 3, requests=40, num_swap_blocks=8)
    rows = rows_of(tmp_path / "r")
    rows[0]["part"] = 1
    found = list(read_preemptions([write(tmp_path / "changed", rows)]))
    assert {each.why_not for each in found if each.mode == "swap"} == {""}


@pytest.mark.parametrize("why", [[[1, 2, 3]], [[1, 2, 3, 4, 5.0, 6.0, 7.0]]])
def test_an_estimate_that_makes_no_sense_is_refused_with_its_line(
    weighed: Path, tmp_path: Path, why: list[list[float]]
) -> None:
    rows = rows_of(weighed)
    place = next(i for i, row in enumerate(rows) if row["e"] == "step" and "why" in row)
    rows[place]["why"] = why
    with pytest.raises(TraceError, match="preemptions") as caught:
        list(read_preemptions([write(tmp_path / "changed", rows)]))
    assert caught.value.line == place + 1
