"""The fake executor: deterministic, free of torch, and quick to catch a wrong plan."""

from __future__ import annotations

import subprocess
import sys

import pytest

from layby.execution.fake_executor import FakeExecutor
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import (
    BlockMove,
    ScheduledSequence,
    StepPlan,
    Transfer,
    TransferEnd,
)
from layby.scheduling.request import Sequence
from tests.execution.harness import make_sequence, plan, rest_of


def make(**options: object) -> FakeExecutor:
    return FakeExecutor(block_size=4, num_blocks=16, num_swap_blocks=8, **options)  # type: ignore[arg-type]


def prefilled(executor: FakeExecutor, request_id: str = "a", first_block: int = 0) -> Sequence:
    """A sequence of 9 prompt tokens and one output token, with 9 positions computed."""
    blocks = list(range(first_block, first_block + 3))
    sequence = make_sequence(request_id, list(range(9)), block_table=blocks)
    sequence.tokens += executor.execute(plan(rest_of(sequence))).tokens
    return sequence


def test_it_needs_neither_torch_nor_numpy() -> None:
    """The scheduler's tests and a bare machine use it."""
    code = (
        "import sys; from layby.execution import FakeExecutor; FakeExecutor(block_size=4); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_package_names_what_it_exports() -> None:
    """Names are loaded lazily: a typo in the table would only show when used."""
    from layby import execution

    for name in execution.__all__:
        assert getattr(execution, name).__name__ == name
    with pytest.raises(AttributeError, match="Nothing"):
        _ = execution.Nothing  # type: ignore[attr-defined]


def test_tokens_depend_on_context_seed_sample_and_position_alone() -> None:
    """Block numbers, batch mates and chunks must not matter; everything else must."""
    first = prefilled(make()).tokens[-1]
    crowded = make()
    prefilled(crowded, "b", 8)
    assert prefilled(crowded, "c", 3).tokens[-1] == first
    chunked, sequence = make(), make_sequence("a", list(range(9)), block_table=[5, 2, 9])
    chunked.execute(plan(ScheduledSequence(sequence, 0, 6, ())))
    assert chunked.execute(plan(rest_of(sequence, 6))).tokens == [first]

    others = []
    for seed, tokens in ((7, range(9)), (None, range(1, 10)), (None, range(8))):
        params = SamplingParams(seed=seed)
        sequence = make_sequence("a", list(tokens), params, block_table=[0, 1, 2])
        others += make(vocab_size=100000).execute(plan(rest_of(sequence))).tokens
    assert len({*others}) == 3


def test_stop_tokens_come_only_from_a_script() -> None:
    """Lengths in tests are exact unless a test says otherwise."""
    stops = tuple(range(30))
    for seed in range(50):
        params = SamplingParams(seed=seed)
        sequence = make_sequence("a", [1], params, block_table=[0], stop_token_ids=stops)
        assert make(vocab_size=32).execute(plan(rest_of(sequence))).tokens[0] >= 30
    scripted = make(script={"a": [7, 3]})
    sequence = make_sequence("a", [1], block_table=[0], stop_token_ids=stops)
    for wanted in (7, 3):
        (token,) = scripted.execute(plan(rest_of(sequence, len(sequence.tokens) - 1))).tokens
        assert token == wanted
        sequence.tokens.append(token)
    by_function = make(script=lambda seq: 9 if seq.index == 0 else None)
    assert by_function.execute(plan(rest_of(make_sequence("b", [1], block_table=[3])))).tokens == [
        9
    ]


def test_a_request_or_a_step_can_be_told_to_fail() -> None:
    """To test that the engine survives the one and reports the other."""
    executor = make()
    executor.failing_requests.add("bad")
    good = make_sequence("good", [1], block_table=[0])
    bad = make_sequence("bad", [1], block_table=[1])
    result = executor.execute(plan(rest_of(bad), rest_of(good)))
    assert list(result.failures) == ["bad"]
    assert len(result.tokens) == 2
    executor.failing_steps[2] = RuntimeError("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        executor.execute(plan(rest_of(good), step=2))


def test_logprobs_are_reported_in_the_shape_asked_for() -> None:
    """Servers are tested against it."""
    params = SamplingParams(logprobs=2, prompt_logprobs=1)
    sequence = make_sequence("a", [4, 5, 6], params, block_table=[0])
    result = make().execute(plan(rest_of(sequence)))
    (report,) = result.logprobs
    assert report is not None
    assert report.chosen.token_id == result.tokens[0]
    assert len(report.top) == 2
    reports = result.prompt_logprobs["a"]
    assert [(position, r.chosen.token_id) for position, r in reports] == [(1, 5), (2, 6)]


def test_parked_kv_is_found_again_where_it_was_moved() -> None:
    """A right plan passes: out, in to other blocks, and a copy of the last block."""
    executor = make()
    sequence = prefilled(executor)
    out = [BlockMove(0, 5), BlockMove(1, 6), BlockMove(2, 7)]
    executor.execute(StepPlan(step=2, now=0.0, swap_out=out))
    prefilled(executor, "b", 0)
    step = plan(rest_of(sequence, 9))
    step.swap_in = [BlockMove(5, 10), BlockMove(6, 11), BlockMove(7, 12)]
    step.copy = [BlockMove(12, 9)]
    sequence.block_table = [10, 11, 9]
    executor.execute(step)
    assert executor.moved_blocks == 7
    assert executor.computed_tokens == 19


def test_copies_read_before_they_write() -> None:
    """Two blocks may change places in one list."""
    executor = make()
    sequence = prefilled(executor)
    step = plan(rest_of(sequence, 9))
    step.copy = [BlockMove(0, 1), BlockMove(1, 0)]
    sequence.block_table = [1, 0, 2]
    executor.execute(step)


def test_a_prefix_shared_in_the_step_that_writes_it_is_right() -> None:
    """Rows are checked after everyone has written."""
    executor = make()
    owner = make_sequence("a", list(range(9)), block_table=[0, 1, 2])
    guest = make_sequence("b", list(range(9)), block_table=[0, 1, 3])
    executor.execute(plan(rest_of(guest, 8), rest_of(owner)))


def wrong_swap_in(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    executor.execute(StepPlan(step=2, now=0.0, swap_out=[BlockMove(0, 5), BlockMove(1, 6)]))
    prefilled(executor, "b", 0)
    step = plan(rest_of(sequence, 9))
    step.swap_in = [BlockMove(6, 0), BlockMove(5, 1)]
    return step


def block_freed_too_early(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    thief = make_sequence("b", [50, 51], block_table=[1])
    executor.execute(plan(rest_of(thief)))
    return plan(rest_of(sequence, 9))


def last_slots_overwritten(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    other = make_sequence("b", [0, 1, 77], block_table=[0])
    executor.execute(plan(rest_of(other)))
    return plan(rest_of(sequence, 9))


def stale_cache(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    guest = make_sequence("b", [9, 1, 2, 3, 4], block_table=[0, 8])
    return plan(rest_of(guest, 4))


def skipped_position(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    sequence.tokens += [1, 2]
    return plan(rest_of(sequence, 11))


def same_block_for_two(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    other = make_sequence("b", [1, 2, 3], block_table=[2])
    return plan(rest_of(sequence, 9), rest_of(other))


def table_too_short(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    sequence.block_table = [0, 1]
    return plan(rest_of(sequence, 9))


def sampled_too_early(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    return plan(ScheduledSequence(sequence, 8, 1, (sequence,)))


def block_outside_the_pool(executor: FakeExecutor, sequence: Sequence) -> StepPlan:
    return StepPlan(step=2, now=0.0, swap_out=[BlockMove(0, 8)])


@pytest.mark.parametrize(
    "fault",
    [
        wrong_swap_in,
        block_freed_too_early,
        last_slots_overwritten,
        stale_cache,
        skipped_position,
        same_block_for_two,
        table_too_short,
        sampled_too_early,
        block_outside_the_pool,
    ],
    ids=lambda fault: fault.__name__.replace("_", " "),
)
def test_a_wrong_plan_is_caught_in_its_step(fault: object) -> None:
    """A scheduler's fault must surface where it happens, not as odd text later."""
    executor = make()
    sequence = prefilled(executor)
    step = fault(executor, sequence)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=r"block|position"):
        executor.execute(step)


class TestTransfers:
    """Between RAM and disk: what is under way may be touched by nobody."""

    OUT, BACK = Transfer(1, (BlockMove(5, 2),)), Transfer(2, (BlockMove(2, 6),))

    def started(self, **options: object) -> tuple[FakeExecutor, Sequence]:
        """A sequence of ten tokens whose first block was parked and is on its way to disk."""
        executor = make(num_disk_blocks=3, **options)
        sequence = prefilled(executor)
        step = StepPlan(step=2, now=0.0, swap_out=[BlockMove(0, 5)], demote=[self.OUT])
        assert executor.execute(step).transfer_ends == []
        executor.execute(plan(rest_of(make_sequence("b", [50, 51], block_table=[0]))))
        return executor, sequence

    def resume(self, sequence: Sequence) -> StepPlan:
        step = plan(rest_of(sequence, 9))
        step.swap_in = [BlockMove(6, 0)]
        return step

    def test_a_block_comes_back_from_disk(self) -> None:
        executor, sequence = self.started()
        executor.execute(StepPlan(step=4, now=0.0, promote=[self.BACK]))
        assert executor.execute(plan()).transfer_ends == [TransferEnd(2)]
        executor.execute(self.resume(sequence))

    def test_a_block_that_is_not_back_yet_is_caught(self) -> None:
        executor, sequence = self.started()
        executor.execute(StepPlan(step=4, now=0.0, promote=[self.BACK]))
        with pytest.raises(AssertionError, match="never written"):
            executor.execute(self.resume(sequence))

    def test_a_source_overwritten_on_the_way_is_caught(self) -> None:
        executor, sequence = self.started(transfer_steps=2)
        executor.execute(StepPlan(step=4, now=0.0, swap_out=[BlockMove(0, 5)]))
        executor.execute(StepPlan(step=5, now=0.0, promote=[self.BACK]))
        executor.execute(plan())
        executor.execute(plan())
        with pytest.raises(AssertionError, match="position 3 in slot 3 of device block 0"):
            executor.execute(self.resume(sequence))

    def test_an_end_comes_as_late_and_with_the_fault_it_was_told(self) -> None:
        executor, _ = self.started(transfer_steps=3)
        executor.failing_transfers[1] = "eio"
        assert executor.execute(plan()).transfer_ends == []
        assert executor.execute(plan()).transfer_ends == [TransferEnd(1, "eio")]
