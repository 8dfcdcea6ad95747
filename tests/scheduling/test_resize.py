"""The device pool shrinks and grows while requests run."""

from __future__ import annotations

import pytest

from layby.errors import ConfigError, RequestTooLargeError
from layby.scheduling import Request, StepPlan
from layby.scheduling.blocks import BlockPool
from tests.scheduling.harness import Harness, expected_tokens


def make(num_blocks: int = 12, **config: object) -> Harness:
    """Blocks of 4, room to park everybody."""
    return Harness(num_blocks=num_blocks, **{"num_swap_blocks": 40, "block_size": 4, **config})


def assert_complete(*requests: Request) -> None:
    """Each sample says what it would have said alone; the shadow checked what lay behind it."""
    for request in requests:
        for seq in request.sequences:
            prompt = seq.tokens[: seq.num_prompt_tokens]
            assert seq.output_tokens == expected_tokens(prompt, seq.index, request.max_tokens)


def all_blocks(harness: Harness) -> set[int]:
    """Blocks in the tables of running requests."""
    return {b for r in harness.scheduler.running for seq in r.sequences for b in seq.block_table}


# --- the pool ---


def test_a_pool_that_is_closed_down_hands_out_nothing_beyond() -> None:
    pool = BlockPool(8)
    held = pool.allocate(6)
    pool.release([held[1]])
    pool.resize(3)
    assert (pool.num_blocks, pool.num_stranded, pool.num_free) == (6, 3, 1)
    pool.check_integrity()
    assert pool.allocate(1) == [1]
    assert pool.num_free == 0
    pool.release([5])
    assert (pool.num_blocks, pool.num_free) == (5, 0)
    pool.check_integrity()


def test_known_content_moves_with_its_block() -> None:
    """A prefix that is found at a number that no longer exists would be read beyond the pool."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, "abcd")
    pool.share([blocks[3]])
    pool.release(blocks[:2])
    pool.resize(2)
    assert pool.find("d") == blocks[3]
    new = pool.relocate(blocks[3])
    assert new < 2
    assert pool.find("d") == new
    assert pool.ref_count(new) == 2
    pool.release([blocks[2]])
    assert pool.find("c") is None
    pool.trim()
    assert pool.extent == 2
    pool.check_integrity()


def test_cached_blocks_beyond_the_end_are_forgotten() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.publish(blocks, "abcd")
    pool.release(blocks)
    pool.resize(2)
    assert [pool.find(c) is not None for c in "abcd"] == [True, True, False, False]
    pool.resize(4)
    assert pool.num_free == 4
    pool.check_integrity()


def test_only_blocks_that_were_handed_out_take_memory_and_only_unreadable_ones_give_it_back() -> (
    None
):
    """Held and cached blocks keep theirs; what a smaller pool gives up is gone with its blocks."""
    pool = BlockPool(8)
    blocks = pool.allocate(6)
    pool.publish(blocks[:1], ["a"])
    pool.release([*blocks[:1], *blocks[2:4]])
    assert pool.num_touched == 6
    assert pool.reclaim() == sorted(blocks[2:4])
    assert pool.num_touched == 4
    assert pool.reclaim() == []
    again = pool.allocate(1)
    assert pool.num_touched == 5
    pool.check_integrity()
    pool.release([blocks[1], *blocks[4:], *again])
    pool.resize(1)
    pool.trim()
    pool.resize(8)
    assert pool.num_touched == 1
    restored = BlockPool(8)
    restored.restore(pool.idle_state())
    restored.share([restored.find("a")])  # type: ignore[list-item]
    restored.check_integrity()


def test_a_pool_that_opens_again_before_it_was_emptied_keeps_what_is_held() -> None:
    pool = BlockPool(6)
    held = pool.allocate(5)
    pool.resize(2)
    pool.resize(9)
    assert (pool.num_blocks, pool.num_free, pool.num_stranded) == (9, 4, 0)
    assert set(pool.allocate(4)).isdisjoint(held)
    pool.check_integrity()


# --- shrinking ---


def test_held_blocks_move_down_where_there_is_room_and_nobody_is_parked() -> None:
    harness = make()
    first = harness.add(8, 8)
    second = harness.add(8, 8)
    harness.step()
    harness.scheduler.abort(first.request_id)
    third = harness.add(4, 4)
    harness.step()
    high = {b for b in all_blocks(harness) if b >= 5}
    harness.scheduler.resize(5)
    plan = harness.step()
    assert {move.src for move in plan.relocate} <= high | set(range(5, 12))
    assert plan.num_blocks == 5
    assert not plan.preempted
    assert max(all_blocks(harness)) < 5
    harness.run()
    assert_complete(second, third)


def test_only_what_is_computed_is_copied() -> None:
    """A long prompt holds its blocks before it has filled them."""
    harness = make(20, max_num_batched_tokens=8, max_num_seqs=4)
    short = harness.add(8, 20)
    harness.step()
    long = harness.add(40, 4)
    harness.step()
    harness.scheduler.abort(short.request_id)
    assert max(all_blocks(harness)) >= 11
    harness.scheduler.resize(11)
    plan = harness.step()
    assert plan.relocate == []
    assert max(all_blocks(harness)) < 11
    harness.run()
    assert_complete(long)


def test_the_least_urgent_is_parked_where_there_is_no_room() -> None:
    harness = make()
    urgent = harness.add(16, 4, priority=0)
    batch = [harness.add(8, 8, priority=5), harness.add(8, 4, priority=5)]
    harness.step()
    harness.scheduler.resize(8)
    plan = harness.step()
    assert [victim for victim, _ in plan.preempted] == batch[1:]
    assert plan.num_blocks == 8
    harness.run()
    assert harness.scheduler.metrics.recomputed_tokens == 0
    assert_complete(urgent, *batch)


def test_who_must_go_for_the_growth_of_others_is_not_moved_first() -> None:
    """Three decodes that all start a block in this step, in a pool that loses one."""
    harness = make()
    filler, *others = [harness.add(8, 20) for _ in range(4)]
    harness.step()
    harness.scheduler.abort(filler.request_id)
    harness.scheduler.resize(7)
    plan = harness.step()
    assert [victim for victim, _ in plan.preempted] == others[2:]
    assert plan.relocate == []
    harness.run()
    assert_complete(*others)


def test_without_swap_space_the_least_urgent_is_recomputed() -> None:
    harness = make(num_swap_blocks=0)
    requests = [harness.add(12, 8) for _ in range(2)]
    harness.step()
    harness.scheduler.resize(5)
    plan = harness.step()
    assert [victim for victim, _ in plan.preempted] == requests[1:]
    harness.run()
    assert harness.scheduler.metrics.preemptions_recompute == 1
    assert_complete(*requests)


def test_who_is_parked_leaves_by_the_blocks_that_his_neighbours_move_into() -> None:
    """All in one step: his blocks are read before others are moved over them."""
    harness = make(12)
    for number in range(3):
        harness.add(12, 4, name=f"R{number}")
    harness.step()
    harness.scheduler.resize(4)
    plan = harness.step()
    left_by = {move.src for move in plan.swap_out}
    assert len(plan.preempted) == 2
    assert all(move.dst < 4 for move in plan.relocate)
    assert left_by
    assert_complete(*harness.run())


def test_who_was_moved_and_must_go_all_the_same_is_read_at_its_old_place() -> None:
    """An urgent newcomer in the same step: swap-outs are executed before relocations."""
    harness = make(16)
    long, batch = harness.add(28, 4, priority=5), harness.add(12, 4, priority=5)
    harness.step()
    harness.scheduler.abort(long.request_id)
    urgent = harness.add(16, 4, priority=0)
    harness.scheduler.resize(6)
    plan = harness.step()
    assert [victim for victim, _ in plan.preempted] == [batch]
    assert plan.admitted == [urgent]
    assert {move.src for move in plan.swap_out} == {move.src for move in plan.relocate}
    harness.run()
    assert harness.scheduler.metrics.recomputed_tokens == 0
    assert_complete(batch, urgent)


def test_samples_that_share_blocks_move_together() -> None:
    harness = make(24, enable_prefix_caching=True)
    first = harness.add(30, 4)
    group = harness.add(10, 10, n=3)
    for _ in range(6):
        harness.step()
    assert first.is_finished
    harness.scheduler.resize(harness.scheduler.memory.worst_case_blocks(group))
    plan = harness.step()
    assert plan.relocate
    harness.run()
    assert_complete(first, group)


def test_a_prefix_is_found_where_it_was_moved_to() -> None:
    harness = make(16)
    filler = harness.add(20, 10)
    prompt = list(range(1, 17))
    owner = harness.add(16, 12, prompt=prompt)
    for _ in range(3):
        harness.step()
    harness.scheduler.abort(filler.request_id)
    harness.scheduler.resize(9)
    harness.step()
    assert max(all_blocks(harness)) < 9
    heir = harness.add(16, 2, prompt=prompt)
    harness.step()
    assert harness.scheduler.metrics.prefix_cache_hit_tokens == 12
    harness.run()
    assert_complete(owner, heir)


# --- not below what was accepted ---


def test_a_target_below_accepted_requests_is_approached_as_they_end() -> None:
    harness = make(20)
    medium, large = harness.add(16, 8), harness.add(16, 16)
    harness.step()
    harness.scheduler.resize(2)
    harness.step()
    device = harness.scheduler.device_pool
    sizes = [device.num_blocks]
    with pytest.raises(RequestTooLargeError, match=r"need 3 KV blocks .* the pool has 2"):
        harness.add(8, 4)
    fitting = harness.add(4, 4)
    while harness.scheduler.has_unfinished:
        harness.step()
        sizes.append(device.num_blocks)
    harness.step()
    sizes.append(device.num_blocks)
    assert list(dict.fromkeys(sizes)) == [8, 2]
    assert_complete(medium, large, fitting)


def test_an_aborted_request_keeps_the_pool_large_no_longer() -> None:
    harness = make(20)
    medium, large = harness.add(16, 8), harness.add(16, 16)
    harness.step()
    harness.scheduler.resize(2)
    harness.step()
    harness.scheduler.abort(large.request_id)
    plan = harness.step()
    assert plan.num_blocks == harness.scheduler.device_pool.num_blocks == 6
    harness.run()
    assert_complete(medium)


@pytest.mark.parametrize("policy", ["swapped-first", "running-first", "recompute-only", "reserve"])
def test_shrinking_to_one_requests_worth_and_back_loses_nothing(policy: str) -> None:
    harness = make(60, policy=policy, num_swap_blocks=12)
    requests = [harness.add(8 + i % 5, 12, n=1 + i % 2, priority=i % 2) for i in range(9)]
    need = max(map(harness.scheduler.memory.worst_case_blocks, requests))
    for num_blocks in (need, 60, 1, 20, need, 100):
        for _ in range(3):
            harness.step()
        harness.scheduler.resize(num_blocks)
        harness.step()
        assert num_blocks <= harness.scheduler.device_pool.num_blocks <= max(num_blocks, need)
    assert len(harness.run()) == 9
    assert_complete(*requests)


def test_growing_lets_parked_work_back_in_at_once() -> None:
    harness = make(12)
    requests = [harness.add(12, 8) for _ in range(3)]
    harness.step()
    harness.scheduler.resize(5)
    harness.step()
    assert len(harness.scheduler.swapped) == 2
    harness.scheduler.resize(40)
    plan = harness.step()
    assert plan.num_blocks == 40
    assert plan.resumed == requests[1:]
    harness.run()
    assert_complete(*requests)


# --- manners ---


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "4", None])
def test_what_is_no_size_is_refused(size: object) -> None:
    harness = make()
    with pytest.raises(ConfigError, match="num_blocks must be an integer of at least 1"):
        harness.scheduler.resize(size)  # type: ignore[arg-type]
    assert harness.scheduler.target_blocks == 12


def test_a_size_that_is_already_there_changes_nothing() -> None:
    harness = make()
    harness.scheduler.resize(12)
    assert not harness.scheduler.is_resizing
    harness.scheduler.resize(5)
    harness.scheduler.resize(12)
    plan = harness.step()
    assert plan.num_blocks is None
    assert plan.is_empty


def test_an_idle_pool_changes_its_size_in_a_step_of_its_own() -> None:
    harness = make()
    harness.scheduler.resize(5)
    plan = harness.step()
    assert plan.num_blocks == 5
    assert not plan.is_empty
    assert harness.step().is_empty


def test_no_step_is_quiet_while_the_pool_is_to_change() -> None:
    harness = make(40)
    harness.add(4, 60)
    for _ in range(3):
        harness.step()
    scheduler = harness.scheduler
    assert scheduler.quiet_steps() > 0
    scheduler.resize(30)
    assert scheduler.quiet_steps() == 0
    harness.step()
    assert scheduler.quiet_steps() > 0


def test_the_executor_is_told_once() -> None:
    harness = make(40)
    harness.add(4, 60)
    harness.scheduler.resize(30)
    plans: list[StepPlan] = [harness.step() for _ in range(3)]
    assert [plan.num_blocks for plan in plans] == [30, None, None]
