"""The cost model against sums worked out by hand, and what must hold for every one of them."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.errors import ConfigError
from layby.scheduling import BlockMove, Request, ScheduledSequence, StepPlan
from layby.simulate.cost import CostModel, MoveCost, StepLoad, positions_read

COST = CostModel(
    rows_s=((0, 1.0), (1, 10.0), (4, 16.0), (10, 40.0)),
    samples_s=((0, 0.0), (1, 5.0), (3, 6.0)),
    decode_context_s=0.5,
    prefill_context_s=0.25,
    sequence_s=2.0,
    swap_out=MoveCost(100.0, 1.0),
    swap_in=MoveCost(200.0, 2.0),
    copy=MoveCost(300.0, 3.0),
)

seconds = st.floats(0, 1e3)
counts = st.integers(0, 5000)


@st.composite
def curves(draw: st.DrawFn, start: float | None = None) -> tuple[tuple[int, float], ...]:
    rises = draw(st.lists(st.tuples(st.integers(1, 500), seconds), min_size=1, max_size=6))
    count, value = 0, draw(seconds) if start is None else start
    knots = [(count, value)]
    for step, rise in rises:
        count, value = count + step, value + rise
        knots.append((count, value))
    return tuple(knots)


move_costs = st.builds(MoveCost, seconds, seconds, st.none() | seconds)
cost_models = st.builds(
    CostModel,
    rows_s=curves(start=1.0),
    samples_s=curves(start=0.0),
    decode_context_s=seconds,
    prefill_context_s=seconds,
    sequence_s=seconds,
    swap_out=move_costs,
    swap_in=move_costs,
    copy=move_costs,
)
loads = st.builds(StepLoad, *[counts] * len(fields(StepLoad)))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (StepLoad(), 1.0),
        # 2 rows: 10 + 6/3; 2 samples: 5 + 1/2; 2 sequences; 30 positions
        (StepLoad(decode_tokens=2, decode_context=30, num_sequences=2, num_samples=2), 36.5),
        # 7 rows: half-way from 16 to 40; nothing sampled; 1 sequence; 28 positions
        (StepLoad(prefill_tokens=7, prefill_context=28, num_sequences=1), 28.0 + 2 + 7),
        # beyond the last knots: rows go on at 4 per row, samples at 1/2
        (StepLoad(decode_tokens=11, prefill_tokens=1, num_samples=5), 48.0 + 7.0),
        (StepLoad(blocks_out=4), 1 + 104.0),
        (StepLoad(blocks_in=5), 1 + 210.0),
        (StepLoad(blocks_copied=6), 1 + 318.0),
        (StepLoad(decode_tokens=1, blocks_out=1, blocks_in=1), 10 + 101.0 + 202.0),
    ],
)
def test_a_step_costs_the_sum_of_what_is_in_it(load: StepLoad, expected: float) -> None:
    """A term forgotten, counted twice or read off the wrong piece of a curve."""
    assert COST.step_s(load) == pytest.approx(expected, rel=1e-12)


@given(cost_models, loads, st.sampled_from([f.name for f in fields(StepLoad)]), counts)
def test_more_of_anything_is_never_cheaper(
    cost: CostModel, load: StepLoad, name: str, extra: int
) -> None:
    """A tuner would find the setting where it is."""
    more = replace(load, **{name: getattr(load, name) + extra})
    before, after = cost.step_s(load), cost.step_s(more)
    assert 0 <= before < math.inf
    assert after >= before * (1 - 1e-12)


@given(cost_models, st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 40))
def test_steps_of_decoding_are_the_steps_one_by_one(
    cost: CostModel, num_decodes: int, context: int, steps: int
) -> None:
    """Time that depends on whether steps were skipped would make a simulation irreproducible."""
    alone = []
    for step in range(steps):
        load = StepLoad(
            decode_tokens=num_decodes,
            decode_context=context + step * num_decodes,
            num_sequences=num_decodes,
            num_samples=num_decodes,
        )
        alone.append(cost.step_s(load))
    base, slope = cost.decode_line(num_decodes)
    together = [base + slope * (context + step * num_decodes) for step in range(steps)]
    assert together == alone  # to the bit


@given(st.integers(0, 200), st.integers(0, 200))
def test_positions_read_are_those_up_to_each_row(start: int, num_tokens: int) -> None:
    """Off by one per row, or by the row's own position."""
    read = sum(position + 1 for position in range(start, start + num_tokens))
    assert positions_read(start, num_tokens) == read


def test_a_plan_is_counted_by_what_its_rows_do() -> None:
    """Rows of a chunk counted as decodes, or samples of a forked prompt counted once."""
    decode, chunk, prompt = (
        Request(name, list(range(length)), max_tokens=9, n=n)
        for name, length, n in (("decode", 20, 1), ("chunk", 50, 1), ("prompt", 12, 3))
    )
    prompt.fork()
    plan = StepPlan(
        1,
        0.0,
        scheduled=[
            ScheduledSequence(decode.sequences[0], 19, 1, (decode.sequences[0],)),
            ScheduledSequence(chunk.sequences[0], 10, 5, ()),
            ScheduledSequence(prompt.sequences[0], 0, 12, tuple(prompt.sequences)),
        ],
        swap_out=[BlockMove(0, 1)],
        swap_in=[BlockMove(1, 2)] * 2,
        copy=[BlockMove(2, 3)] * 3,
    )
    assert StepLoad.of(plan) == StepLoad(
        decode_tokens=1,
        prefill_tokens=17,
        decode_context=20,
        prefill_context=11 + 12 + 13 + 14 + 15 + 78,
        num_sequences=3,
        num_samples=4,
        blocks_out=1,
        blocks_in=2,
        blocks_copied=3,
    )


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"decode_context_s": -1e-9}, "decode_context_s must be a finite number from 0 up"),
        ({"sequence_s": math.nan}, "sequence_s .* got nan"),
        ({"prefill_context_s": math.inf}, "prefill_context_s .* got inf"),
        ({"prefill_context_s": 10**400}, "prefill_context_s .* an integer of"),
        ({"sequence_s": True}, "sequence_s .* got True"),
        ({"rows_s": ((0, 1.0),)}, "rows_s must be two or more pairs"),
        ({"rows_s": ((1, 1.0), (2, 1.0))}, "rows_s must begin at count 0, got 1"),
        ({"rows_s": ((0, 1.0), (0, 2.0))}, "rows_s must have rising counts, got 0 after 0"),
        ({"rows_s": ((0, 2.0), (5, 1.5))}, "rows_s must not fall: 2 s at 0, 1.5 s at 5"),
        ({"rows_s": ((0, 0.0), (5, 0.0))}, "rows_s must be above 0 at one row"),
        ({"rows_s": ((0, 0.0), (1.5, 1.0))}, "rows_s must have whole counts, got 1.5"),
        ({"samples_s": ((0, 0.0), (1, math.nan))}, "samples_s at 1 .* got nan"),
        ({"samples_s": ((0, 0.0), 7)}, "samples_s must be pairs of count and seconds, got 7"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    """A clock that runs backwards, or not at all."""
    with pytest.raises(ConfigError, match=complaint):
        replace(COST, **change)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, "1"])
def test_a_move_that_costs_no_number_is_refused(bad: Any) -> None:
    """The same, for block moves."""
    with pytest.raises(ConfigError, match=r"fixed_s must be a finite number"):
        MoveCost(fixed_s=bad)
    with pytest.raises(ConfigError, match=r"block_s must be a finite number"):
        MoveCost(block_s=bad)


def test_what_runs_beside_a_step_costs_only_what_it_takes_longer() -> None:
    """Out and in at once, beside a forward pass of a second; what is in the way stays so."""
    cost = CostModel(
        rows_s=((0, 0.0), (1, 1.0), (2, 1.0)),
        swap_out=MoveCost(0.1, 0.01, 0.2),
        swap_in=MoveCost(0.1, 0.01, 0.3),
    )
    assert cost.step_s(StepLoad(decode_tokens=1, blocks_out=5)) == pytest.approx(1.15)
    assert cost.step_s(StepLoad(decode_tokens=1, blocks_out=10)) == pytest.approx(2.0 + 0.2)
    both = StepLoad(decode_tokens=1, blocks_out=5, blocks_in=4)
    assert cost.step_s(both) == pytest.approx(1.2 + 0.15 + 0.14)
    assert cost.step_s(StepLoad(blocks_in=2)) == pytest.approx(0.12 + 0.6)


def test_the_choice_of_a_way_out_counts_the_whole_of_a_move() -> None:
    cost = CostModel(rows_s=((0, 0.0), (1, 1.0)), swap_out=MoveCost(9.0, 0.01, 0.2))
    assert cost.move_costs(1).out_s == pytest.approx(0.21)


def test_what_runs_beside_grows_with_the_block() -> None:
    assert MoveCost(1.0, 2.0, 3.0).scaled(2) == MoveCost(1.0, 4.0, 6.0)
    assert MoveCost(1.0, 2.0).scaled(2) == MoveCost(1.0, 4.0)
