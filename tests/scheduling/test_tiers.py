"""Parked work between RAM and disk: who goes down, who comes up, and what a fault costs."""

from __future__ import annotations

import pytest

from layby.errors import ConfigError
from layby.scheduling import Request, RequestStatus, SchedulerConfig
from tests.scheduling.harness import Harness, expected_tokens


def tiny(**config: object) -> Harness:
    """Eight device blocks of four tokens, and a disk below the swap pool."""
    return Harness(
        **{
            "block_size": 4,
            "num_blocks": 8,
            "num_swap_blocks": 8,
            "num_disk_blocks": 100,
            "headroom": 0,
            "enable_prefix_caching": False,
            **config,
        }
    )


def park_two(harness: Harness) -> tuple[Request, Request]:
    """Two requests with two blocks each, parked in one step for an urgent one that takes all.

    Returns them in the order of the swapped queue.
    """
    first, second = harness.add(8, 12, priority=5), harness.add(8, 12, priority=5)
    harness.step()
    harness.add(24, 9, priority=0, name="urgent")
    harness.step()
    assert list(harness.scheduler.swapped) == [first, second]
    return first, second


def waves(harness: Harness) -> list[Request]:
    """Two requests every two steps, each wave more urgent than the last: ten of them are parked.

    Together they have more than twice the blocks of a swap pool of sixteen.
    """
    requests = []
    for priority in range(9, 3, -1):
        requests += [harness.add(16, 8, priority=priority) for _ in range(2)]
        harness.step()
        harness.step()
    return requests


def in_waves() -> Harness:
    return tiny(num_blocks=16, num_swap_blocks=16)


def where(harness: Harness, request: Request) -> str:
    """``ram``, ``disk`` or ``both``, as the tables have it."""
    seq = request.sequences[0]
    assert request.status is RequestStatus.SWAPPED
    return {(1, 0): "ram", (0, 1): "disk", (1, 1): "both"}[
        bool(seq.swap_table), bool(seq.disk_table)
    ]


def assert_right_tokens(*requests: Request) -> None:
    for request in requests:
        seq = request.sequences[0]
        prompt = seq.tokens[: seq.num_prompt_tokens]
        assert seq.output_tokens == expected_tokens(prompt, 0, request.max_tokens)


class TestWrittenBehind:
    def test_nothing_is_written_while_half_of_ram_is_free(self) -> None:
        """Short parkings must not cost disk writes."""
        harness = tiny()
        first, second = park_two(harness)
        harness.step()
        assert where(harness, first) == where(harness, second) == "ram"
        assert not harness.scheduler.tiers.num_transfers

    def test_the_least_urgent_goes_first_and_stays_in_ram_until_room_is_needed(self) -> None:
        harness = tiny(num_swap_blocks=6)
        first, second = park_two(harness)
        [transfer] = harness.plans[-1].demote
        assert [move.src for move in transfer.moves] == second.sequences[0].swap_table
        harness.step()
        assert where(harness, first) == "ram"
        assert where(harness, second) == "both"

    def test_victims_find_room_in_ram_though_it_has_been_filled_before(self) -> None:
        """The least urgent work gives up its RAM in the same step; nobody is recomputed."""
        harness = in_waves()
        requests = waves(harness)
        assert sum(where(harness, r) == "disk" for r in harness.scheduler.swapped) >= 5
        harness.run()
        assert_right_tokens(*requests)
        metrics = harness.scheduler.metrics
        assert metrics.preemptions_swap >= 10
        assert metrics.preemptions_recompute == metrics.kv_losses == 0

    def test_it_may_be_resumed_while_it_is_written(self) -> None:
        """Its RAM must not be given to anybody before the disk has done with it."""
        harness = tiny(num_swap_blocks=4)
        harness.ends_transfers = False
        first, second = park_two(harness)
        [transfer] = harness.plans[-1].demote
        harness.scheduler.abort("urgent")
        harness.step()
        assert second.status is RequestStatus.RUNNING
        assert harness.scheduler.swap_pool.num_held == len(transfer.moves)
        harness.end_transfer(transfer.number)
        assert harness.scheduler.swap_pool.num_held == 0
        assert harness.scheduler.disk_pool.num_held == 0
        harness.run()
        assert_right_tokens(first, second)

    def test_what_could_not_be_written_stays_in_ram_and_is_not_tried_again(self) -> None:
        """A full disk must neither cost tokens nor be written to for ever."""
        harness = tiny(num_swap_blocks=4)
        harness.ends_transfers = False
        first, second = park_two(harness)
        [transfer] = harness.plans[-1].demote
        assert harness.end_transfer(transfer.number, "enospc") == []
        assert where(harness, second) == "ram"
        assert harness.scheduler.disk_pool.num_held == 0
        [transfer] = harness.step().demote
        assert [move.src for move in transfer.moves] == first.sequences[0].swap_table
        harness.ends_transfers = True
        harness.run()
        assert_right_tokens(first, second)
        assert harness.scheduler.metrics.swap_faults == {"enospc": 1}
        assert harness.scheduler.metrics.recomputed_tokens == 0


class TestReadAhead:
    def test_the_order_of_reading_is_the_order_of_return(self) -> None:
        harness = in_waves()
        waves(harness)
        order = list(harness.scheduler.swapped)
        read = []
        while harness.scheduler.has_unfinished:
            plan = harness.step()
            for transfer in plan.promote:
                table = [move.dst for move in transfer.moves]
                read += [r for r in order if r.sequences[0].swap_table == table]
        assert len(read) >= 5
        assert read == sorted(read, key=harness.scheduler.policy.urgency)

    def test_it_comes_before_the_need(self) -> None:
        """While there is other work to run, no step is empty for want of the disk."""
        harness = in_waves()
        waves(harness)
        harness.run()
        assert sum(not plan.scheduled for plan in harness.plans) <= 2
        assert harness.scheduler.metrics.promoted_blocks > 20

    def test_ram_is_used_as_soon_as_it_is_free(self) -> None:
        """What a resumed request leaves is free only after its step, when nobody may look."""
        harness = in_waves()
        waves(harness)
        looked = 0
        while harness.scheduler.has_unfinished:
            moved = bool(harness.shadow.transfers)
            plan = harness.step()
            on_disk = [r for r in harness.scheduler.swapped if where(harness, r) == "disk"]
            if on_disk and not (moved or harness.shadow.transfers or plan.swap_in):
                looked += 1
                size = len(on_disk[0].sequences[0].disk_table)
                assert size > harness.scheduler.swap_pool.num_free
        assert looked

    def test_a_full_disk_and_a_full_ram_cannot_block_each_other(self) -> None:
        """What lies on disk becomes the first to return, RAM is full of what follows, and none of
        that can be written: the last of it is computed again."""
        harness = tiny(num_blocks=16, num_swap_blocks=16, num_disk_blocks=16)
        requests = waves(harness)
        scheduler = harness.scheduler
        parked = list(scheduler.swapped)
        for request in parked:
            scheduler.set_priority(request.request_id, 20 - request.priority)
        harness.run()
        assert_right_tokens(*requests)
        assert scheduler.metrics.kv_losses == 1


def read_back(harness: Harness) -> tuple[int, Request]:
    """The number of a reading that is under way, and whose it is."""
    waves(harness)
    for _ in range(100):
        for transfer in harness.step().promote:
            table = [move.dst for move in transfer.moves]
            for request in harness.scheduler.swapped:
                if request.sequences[0].swap_table == table:
                    return transfer.number, request
    raise AssertionError("nothing was read back")


class TestFaults:
    def test_what_cannot_be_read_back_is_computed_again(self) -> None:
        harness = in_waves()
        number, request = read_back(harness)
        others = list(harness.scheduler.requests.values())
        assert harness.end_transfer(number, "checksum") == [request]
        assert request.status is RequestStatus.WAITING
        assert not request.sequences[0].disk_table
        harness.run()
        assert_right_tokens(*others)
        metrics = harness.scheduler.metrics
        assert metrics.swap_faults == {"checksum": 1}
        assert metrics.kv_losses == 1
        assert 16 <= metrics.recomputed_tokens < 24

    def test_a_request_that_ends_while_it_is_read_frees_its_blocks_afterwards(self) -> None:
        harness = in_waves()
        number, request = read_back(harness)
        harness.scheduler.abort(request.request_id)
        harness.scheduler.check_integrity()
        assert harness.end_transfer(number, "eio") == []
        harness.run()

    def test_an_unknown_transfer_is_an_error(self) -> None:
        harness = in_waves()
        number, _ = read_back(harness)
        end = harness.shadow.end_transfer(number)
        harness.scheduler.transfers_ended([end])
        with pytest.raises(ValueError, match=f"transfer {number} is not under way"):
            harness.scheduler.transfers_ended([end])

    def test_only_parked_work_can_lose_its_kv(self) -> None:
        harness = tiny()
        request = harness.add(8, 4)
        harness.step()
        assert not harness.scheduler.lose_kv(request.request_id)
        assert not harness.scheduler.lose_kv("nobody")
        assert request.status is RequestStatus.RUNNING


def test_a_step_that_waits_for_the_disk_is_not_called_quiet() -> None:
    """A simulator would skip past the moment at which the transfer ends."""
    harness = tiny(num_swap_blocks=4)
    harness.ends_transfers = False
    park_two(harness)
    for _ in range(3):
        harness.step()
    assert harness.scheduler.tiers.num_transfers
    assert harness.scheduler.quiet_steps() == 0


def test_a_disk_without_a_swap_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_disk_blocks is 5 and num_swap_blocks is 0"):
        SchedulerConfig(num_blocks=4, num_disk_blocks=5)
