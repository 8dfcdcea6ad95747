"""Moves by way of staging memory, whatever the lane beside the main flow gets round to when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.execution.kv_cache import KVCache
from layby.execution.staging import Lane, Staging
from layby.models.network import KVFormat
from layby.scheduling.plan import BlockMove
from tests.execution.harness import DEVICES

NUM_BLOCKS, NUM_SWAP_BLOCKS = 24, 20
FORMAT = KVFormat((2, 4), torch.int64)
BLOCK_BYTES = FORMAT.block_bytes


class LazyLane:
    """Does its work in order, but as late as it may, or a little of it now and then."""

    def __init__(self, source: random.Random | None) -> None:
        self._source = source  # None: it does nothing unasked
        self._work: list[Callable[[], None]] = []
        self._done = 0

    def submit(self, work: Callable[[], None]) -> int:
        self._work.append(work)
        mark = len(self._work)
        if self._source is not None and self._source.random() < 0.3:
            self.wait(self._source.randint(self._done, mark))
        return mark

    def join(self, mark: int) -> None:
        self.wait(mark)

    def wait(self, mark: int) -> None:
        while self._done < mark:
            self._work[self._done]()
            self._done += 1

    @property
    def num_late(self) -> int:
        return len(self._work) - self._done


def make_cache(device: str, source: random.Random, staged_blocks: int) -> KVCache:
    lane: Lane | None = LazyLane(source) if device == "cpu" else None
    return KVCache(
        FORMAT,
        num_blocks=NUM_BLOCKS,
        num_swap_blocks=NUM_SWAP_BLOCKS,
        device=torch.device(device),
        lane=lane,
        staged_bytes=staged_blocks * BLOCK_BYTES,
    )


class Model:
    """Both pools as numpy arrays, where every move is done at once."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.pool = np.arange(NUM_BLOCKS)
        self.swap = -1 - np.arange(NUM_SWAP_BLOCKS)
        self.fresh = 1000
        self._write(cache.pool, range(NUM_BLOCKS), self.pool)
        self._write(cache.swap_pool, range(NUM_SWAP_BLOCKS), self.swap)

    def _write(self, pool: torch.Tensor, blocks: Sequence[int], values: np.ndarray) -> None:
        for block, value in zip(blocks, values, strict=True):
            pool[block] = int(value)

    def forward(self, blocks: list[int]) -> None:
        """What a forward pass does: it overwrites blocks of the pool, in the main flow."""
        for block in blocks:
            self.fresh += 1
            self.pool[block] = self.fresh
            self.cache.pool[block] = self.fresh

    def read_from_disk(self, blocks: list[int]) -> None:
        """What a thread does with the swap pool, once it may."""
        self.cache.overwritten(blocks)
        self.cache.fence()()
        for block in blocks:
            self.fresh += 1
            self.swap[block] = self.fresh
            self.cache.swap_pool[block] = self.fresh

    def bring_back(self, blocks: list[int]) -> None:
        """What a restart does with the swap pool."""
        values = np.arange(self.fresh + 1, self.fresh + 1 + len(blocks))
        self.fresh += len(blocks)
        self.swap[blocks] = values
        content = np.repeat(values, BLOCK_BYTES // 8)
        self.cache.import_parked(blocks, memoryview(content.view(np.uint8)))

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self.cache.swap_out([BlockMove(*pair) for pair in pairs])
        self.swap[[dst for _, dst in pairs]] = self.pool[[src for src, _ in pairs]]

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self.cache.swap_in([BlockMove(*pair) for pair in pairs])
        self.pool[[dst for _, dst in pairs]] = self.swap[[src for src, _ in pairs]]

    def relocate(self, pairs: list[tuple[int, int]]) -> None:
        self.cache.copy([BlockMove(*pair) for pair in pairs])
        self.pool[[dst for _, dst in pairs]] = self.pool[[src for src, _ in pairs]]

    def resize(self, num_blocks: int) -> None:
        kept = min(num_blocks, len(self.pool))
        pool = np.zeros(num_blocks, np.int64)
        pool[:kept] = self.pool[:kept]
        self.pool = pool
        self.cache.resize(num_blocks)
        for block in range(kept, num_blocks):
            self.cache.pool[block] = 0

    def check(self) -> None:
        self.cache.synchronize()
        for pool, wanted in ((self.cache.pool, self.pool), (self.cache.swap_pool, self.swap)):
            found = pool.cpu().numpy().reshape(len(wanted), -1)
            assert (found == wanted[:, None]).all()


def pairs(source: random.Random, sources: int, targets: int) -> list[tuple[int, int]]:
    count = source.randint(0, min(sources, targets))
    if source.random() < 0.5:  # neighbours, as a rule
        first, other = source.randint(0, sources - count), source.randint(0, targets - count)
        return [(first + place, other + place) for place in range(count)]
    chosen = source.sample(range(sources), count)
    return list(zip(chosen, source.sample(range(targets), count), strict=True))


MOVES = ["out", "in", "ahead", "forward", "disk", "restart", "relocate", "resize"]


@pytest.mark.parametrize("device", DEVICES)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_pools_hold_what_they_would_if_every_move_were_done_at_once(device: str, seed: int) -> None:
    """Staging memory that is used again too early, or a stale copy ahead, is another's KV."""
    source = random.Random(seed)
    model = Model(make_cache(device, source, staged_blocks=source.choice([1, 3, 8, 50])))
    for _ in range(30):
        size = len(model.pool)
        match source.choice(MOVES):
            case "out":
                model.swap_out(pairs(source, size, NUM_SWAP_BLOCKS))
            case "in":
                model.swap_in(pairs(source, NUM_SWAP_BLOCKS, size))
            case "ahead":
                count = source.randint(0, NUM_SWAP_BLOCKS)
                model.cache.prefetch(source.sample(range(NUM_SWAP_BLOCKS), count))
            case "forward":
                model.forward(source.sample(range(size), source.randint(0, size)))
            case "disk":
                count = source.randint(0, 4)
                model.read_from_disk(source.sample(range(NUM_SWAP_BLOCKS), count))
            case "restart":
                count = source.randint(1, 4)
                model.bring_back(source.sample(range(NUM_SWAP_BLOCKS), count))
            case "relocate":
                model.relocate(pairs(source, size, size))
            case "resize":
                model.resize(source.randint(4, 2 * NUM_BLOCKS))
    model.check()


def test_what_was_copied_ahead_is_not_copied_again_and_nobody_waits_for_what_leaves() -> None:
    """The point of it: a resume finds its blocks on the device, a step goes on beside a park."""
    lane = LazyLane(None)
    swap_pool = torch.arange(40).view(20, 2)
    pool = torch.zeros((24, 2), dtype=torch.int64)
    staging = Staging(pool, swap_pool, lane, staged_bytes=8 * 16)
    staging.prefetch(range(4, 10))
    lane.wait(1)
    staging.swap_in(pool, [BlockMove(block, block + 10) for block in range(4, 10)])
    assert lane.num_late == 0
    assert torch.equal(pool[14:20], swap_pool[4:10])
    staging.swap_out(pool, [BlockMove(14, 0), BlockMove(15, 1)])
    assert lane.num_late == 1
    pool[14:16] = -1  # the forward pass
    staging.fence()()
    assert torch.equal(swap_pool[:2], swap_pool[4:6])


def test_a_copy_ahead_stops_at_the_memory_there_is_and_is_dropped_for_the_next() -> None:
    source = random.Random(0)
    model = Model(make_cache("cpu", source, staged_blocks=4))
    model.cache.prefetch(list(range(10)))
    model.cache.prefetch([9, 3, 2, 15, 16])
    model.swap_in([(block, block) for block in (0, 9, 3, 2, 15, 16)])
    model.check()
