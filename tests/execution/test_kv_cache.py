"""Block moves: byte for byte, in one go."""

from __future__ import annotations

import pytest
import torch

from layby.execution.kv_cache import KVCache
from layby.models.network import KVFormat
from layby.scheduling.plan import BlockMove
from tests.execution.harness import Blocks


def make_cache(num_blocks: int = 200, num_swap_blocks: int = 150) -> KVCache:
    cache = KVCache(
        KVFormat((2, 2, 2, 4, 8), torch.float32),
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        device=torch.device("cpu"),
    )
    torch.manual_seed(0)
    for pool in (cache.pool, cache.swap_pool):
        pool.view(torch.int32).random_()  # any bits, NaNs among them
    return cache


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.int32).clone()


def test_a_parked_block_comes_back_byte_for_byte() -> None:
    """One layer or one head left behind would change the tokens of a resumed request."""
    cache = make_cache()
    before = bits(cache.pool)
    home, parked = Blocks(200, 1).take(100), Blocks(150, 2).take(100)
    cache.swap_out([BlockMove(*pair) for pair in zip(home, parked, strict=True)])
    assert torch.equal(bits(cache.swap_pool)[parked], before[home])
    cache.pool.fill_(0.0)
    elsewhere = Blocks(200, 3).take(100)
    cache.swap_in([BlockMove(*pair) for pair in zip(parked, elsewhere, strict=True)])
    assert torch.equal(bits(cache.pool)[elsewhere], before[home])


def test_moves_touch_no_other_block() -> None:
    """Runs of neighbouring blocks travel together; a run that is one too long would overwrite."""
    cache = make_cache()
    device, swap = bits(cache.pool), bits(cache.swap_pool)
    cache.swap_out([BlockMove(7, 3), BlockMove(2, 4), BlockMove(9, 6)])
    cache.swap_in([BlockMove(10, 0), BlockMove(11, 199)])
    swap[[3, 4, 6]] = device[[7, 2, 9]]
    device[[0, 199]] = swap[[10, 11]]
    assert torch.equal(bits(cache.swap_pool), swap)
    assert torch.equal(bits(cache.pool), device)


def test_a_copy_reads_everything_before_it_writes() -> None:
    """A block may be the source of one copy and the target of another."""
    cache = make_cache()
    before = bits(cache.pool)
    cache.copy([BlockMove(1, 2), BlockMove(2, 3), BlockMove(3, 1), BlockMove(1, 5)])
    after = bits(cache.pool)
    assert torch.equal(after[[2, 3, 1, 5]], before[[1, 2, 3, 1]])


def test_an_empty_swap_pool_and_empty_lists_are_fine() -> None:
    """Without swap space everything recomputes; no move is ever asked for."""
    cache = make_cache(num_swap_blocks=0)
    before = bits(cache.pool)
    cache.swap_out([])
    cache.swap_in([])
    cache.copy([])
    assert torch.equal(bits(cache.pool), before)


def test_a_block_outside_the_pool_is_an_error() -> None:
    """Wrapping around silently would corrupt another request."""
    cache = make_cache()
    with pytest.raises((IndexError, RuntimeError)):
        cache.copy([BlockMove(0, 200)])


def test_a_blocks_size_in_bytes_agrees_with_the_tensors() -> None:
    """--kv-cache-gib must not promise more blocks than fit."""
    cache = make_cache(num_blocks=10)
    assert cache.pool.nbytes == 10 * KVFormat((2, 2, 2, 4, 8), torch.float32).block_bytes
