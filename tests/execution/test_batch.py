"""The arrays of a step, carried on from the step before, are those made afresh."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.errors import RequestTooLargeError
from layby.execution.batch import BatchBuilder, StepBatch, build_batch
from layby.scheduling import Request, Scheduler, SchedulerConfig


def assert_equal(found: StepBatch, wanted: StepBatch) -> None:
    assert found.items == wanted.items
    assert found.samplers == wanted.samplers
    np.testing.assert_array_equal(found.sample_rows, wanted.sample_rows)
    np.testing.assert_array_equal(found.sample_places, wanted.sample_places)
    for name in (field.name for field in fields(wanted.flat)):
        np.testing.assert_array_equal(getattr(found.flat, name), getattr(wanted.flat, name), name)


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.sampled_from([14, 40, 200]),
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 40), st.integers(1, 2)),
        min_size=1,
        max_size=8,
    ),
    aborted=st.integers(0, 60),
)
def test_steps_by_difference(
    num_blocks: int, requests: list[tuple[int, int, int, int]], aborted: int
) -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=num_blocks, num_swap_blocks=50, block_size=8, max_num_seqs=4,
                        max_num_batched_tokens=24)
    )  # fmt: skip
    builder = BatchBuilder(8)
    arrivals = sorted((step, number) for number, (step, *_) in enumerate(requests))
    step = 0
    while arrivals or scheduler.has_unfinished:
        while arrivals and arrivals[0][0] <= step:
            number = arrivals.pop(0)[1]
            _, prompt, output, n = requests[number]
            request = Request(
                str(number), range(100 * number, 100 * number + prompt), max_tokens=output, n=n
            )
            with suppress(RequestTooLargeError):
                scheduler.add_request(request)
        if step == aborted:
            scheduler.abort("0")
        plan = scheduler.schedule()
        batch = builder.build(plan)
        assert_equal(batch, build_batch(plan.scheduled, block_size=8))
        in_plan_order = [seq for item in plan.scheduled for seq in item.samplers]
        assert [in_plan_order[place] for place in batch.sample_places] == batch.samplers
        scheduler.update(plan, [step] * plan.num_samples)
        step += 1


def test_a_request_can_be_left_out_and_places_stay_those_of_the_plan() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20))
    for name in "abc":
        scheduler.add_request(Request(name, [1, 2, 3], max_tokens=5))
    plan = scheduler.schedule()
    batch = BatchBuilder(16).build(plan, without=frozenset("b"))
    assert [item.sequence.request.request_id for item in batch.items] == ["a", "c"]
    assert batch.sample_places.tolist() == [0, 2]
    assert batch.sample_rows.tolist() == [2, 5]
