"""A device pool of another size: what stays, what goes back to the system, and the same tokens."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from layby.engine.memory import available_host_bytes
from layby.errors import ConfigError
from layby.execution import FakeExecutor
from layby.execution.host_memory import HostMemory, installed_bytes
from layby.execution.kv_cache import KVCache
from layby.execution.torch_executor import TorchExecutor
from layby.models.network import KVFormat
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler, SchedulerConfig
from layby.scheduling.plan import BlockMove, StepPlan
from tests.execution.harness import (
    NETWORKS,
    TINY,
    make_network,
    make_sequence,
    plan,
    random_tokens,
    random_weights,
    rest_of,
)

SMALL = replace(TINY, head_dim=16)  # the least that the compiled kernels take
CPU = torch.device("cpu")
GIB = 2**30


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def make_cache(num_blocks: int, block_floats: int = 16) -> KVCache:
    kv_format = KVFormat((block_floats,), torch.float32)
    return KVCache(kv_format, num_blocks=num_blocks, num_swap_blocks=8, device=CPU)


# --- memory ---


@pytest.mark.skipif(available_host_bytes() < 2 * GIB, reason="touches 1 GiB of RAM")
def test_what_a_pool_gives_up_goes_back_to_the_system() -> None:
    """1 GiB, all of it written, down to an eighth: the process is smaller by the difference."""
    cache = make_cache(4096, 65536)  # blocks of 256 KiB
    before = resident_bytes()
    cache.pool.fill_(1.0)
    full = resident_bytes()
    cache.resize(512)
    small = resident_bytes()
    assert full - before > 0.99 * GIB
    assert full - small > 0.99 * 0.875 * GIB
    assert cache.pool.eq(1.0).all()
    cache.resize(4096)
    assert resident_bytes() - small < 0.05 * GIB  # nothing is taken before it is needed


def test_blocks_that_stay_keep_their_bytes_and_their_place() -> None:
    """Blocks of 64 bytes: the end of the pool lies in the middle of a page."""
    cache = make_cache(1000)
    cache.pool.copy_(torch.arange(16000.0).view(1000, 16))
    wanted, address = cache.pool.clone(), cache.pool.data_ptr()
    for num_blocks in (501, 77, 3000, 1):
        cache.resize(num_blocks)
        kept = min(num_blocks, len(wanted))
        assert cache.num_blocks == len(cache.pool) == num_blocks
        assert torch.equal(cache.pool[:kept], wanted[:kept])
        assert cache.pool.data_ptr() == address
        wanted = cache.pool.clone()


def test_moves_know_the_new_size() -> None:
    cache = make_cache(4)
    cache.resize(8)
    cache.pool.copy_(torch.arange(128.0).view(8, 16))
    wanted = cache.pool[7].clone()
    cache.swap_out([BlockMove(7, 0)])
    cache.resize(2)
    cache.swap_in([BlockMove(0, 1)])
    assert torch.equal(cache.pool[1], wanted)
    with pytest.raises((IndexError, RuntimeError)):
        cache.copy([BlockMove(0, 2)])


def test_a_pool_can_grow_to_what_is_free_and_what_the_machine_has() -> None:
    cache = make_cache(100)
    assert cache.most_blocks(640) == 110
    assert cache.most_blocks(2**60) == installed_bytes() // 64
    assert make_cache(1).most_blocks(0) == 1


def test_a_pool_beyond_the_machines_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device pool of .* GiB on cpu, which cannot be had"):
        make_cache(2**50)


def test_without_address_space_to_spare_there_is_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``ulimit -v`` or strict overcommit: the pool can shrink and come back, but not outgrow."""
    real = mmap.mmap

    def tight(fileno: int, length: int, **options: int) -> mmap.mmap:
        if length > 10_000:
            raise OSError(12, "Cannot allocate memory")
        return real(fileno, length, **options)

    monkeypatch.setattr(mmap, "mmap", tight)
    assert HostMemory(8_000, 20_000).num_bytes == 8_000
    with pytest.raises(MemoryError):
        HostMemory(12_000)


def test_whole_pages_go_and_nothing_before_them() -> None:
    memory = HostMemory(4 * mmap.PAGESIZE)
    tensor = memory.tensor().fill_(7)
    memory.give_back(mmap.PAGESIZE + 1)
    assert tensor[: 2 * mmap.PAGESIZE].eq(7).all()
    assert tensor[2 * mmap.PAGESIZE :].eq(0).all()
    memory.give_back(4 * mmap.PAGESIZE)


@pytest.mark.skipif(available_host_bytes() < GIB, reason="touches 256 MiB of RAM")
def test_free_swap_blocks_give_their_memory_back_and_others_keep_their_bytes() -> None:
    """Blocks of 160 KiB and a half page: their ends lie in the middle of pages."""
    kv_format = KVFormat((160 * 256 + 512,), torch.float32)
    cache = KVCache(kv_format, num_blocks=1, num_swap_blocks=1600, device=CPU)
    before = resident_bytes()
    cache.swap_pool.fill_(1.0)
    full = resident_bytes()
    assert full - before > 0.99 * 1600 * cache.block_bytes
    kept = {0, 7, 8, 900, 1598}
    cache.give_back_parked([block for block in range(1600) if block not in kept])
    assert full - resident_bytes() > 0.95 * 1600 * cache.block_bytes
    assert all(cache.swap_pool[block].eq(1.0).all() for block in kept)
    cache.give_back_parked([])


def test_a_pool_that_is_copied_keeps_what_stays_and_its_memory_where_a_copy_has_no_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a GPU does, with tensors in RAM: a smaller copy that has no room ends nothing."""
    cache = make_cache(10)
    cache._host = None
    cache.pool = torch.arange(160.0).view(10, 16)
    assert (cache.most_blocks(64 * 12), cache.most_blocks(0)) == (12, 10)
    wanted, new_empty = cache.pool.clone(), torch.Tensor.new_empty
    cache.resize(6)
    assert torch.equal(cache.pool, wanted[:6])
    cache.resize(12)
    assert torch.equal(cache.pool[:6], wanted[:6])

    def full(*args: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    cache.resize(4)
    assert "no room to copy 4 blocks" in caplog.text
    assert torch.equal(cache.pool, wanted[:4])
    with pytest.raises(torch.OutOfMemoryError):
        cache.resize(5)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    cache.resize(5)
    assert torch.equal(cache.pool[:4], wanted[:4])


# --- executors ---


def test_the_fake_executor_follows_and_checks_the_size() -> None:
    executor = FakeExecutor(block_size=4, num_blocks=16)
    sequence = make_sequence("a", list(range(9)), block_table=[0, 14, 15])
    sequence.tokens += executor.execute(plan(rest_of(sequence))).tokens
    sequence.num_computed = 9
    moved = StepPlan(2, 0.0, relocate=[BlockMove(14, 1), BlockMove(15, 2)], num_blocks=3)
    sequence.block_table = [0, 1, 2]
    moved.scheduled = [rest_of(sequence, 9)]
    executor.execute(moved)
    lost = StepPlan(3, 0.0, relocate=[BlockMove(2, 3)])
    with pytest.raises(AssertionError, match="no block 3 in the device pool of 3"):
        executor.execute(lost)


def serve(
    executor: TorchExecutor, num_blocks: int, sizes: Callable[[Scheduler], Iterator[int | None]]
) -> tuple[dict[str, list[list[int]]], Scheduler]:
    """Nine seeded requests, two of them pairs; before each step the pool gets the next size."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_swap_blocks=24,
        block_size=16,
        max_num_seqs=6,
        max_num_batched_tokens=64,
    )
    scheduler = Scheduler(config)
    requests = []
    for number, length in enumerate((12, 120, 68, 36, 96, 20, 48, 160, 32)):
        params = SamplingParams(temperature=1.0, seed=number)
        requests.append(
            Request(
                str(number),
                random_tokens(length, TINY.vocab_size, seed=number),
                max_tokens=40,
                n=2 if number in (2, 6) else 1,
                priority=number % 2,
                payload=params,
            )
        )
        scheduler.add_request(requests[-1])
    ask = sizes(scheduler)
    while scheduler.has_unfinished:
        size = next(ask)
        if size is not None:
            scheduler.resize(size)
        step = scheduler.schedule()
        scheduler.update(step, executor.execute(step).tokens)
        scheduler.check_integrity()
        assert executor.cache.num_blocks == scheduler.device_pool.num_blocks
    return {r.request_id: [seq.output_tokens for seq in r.sequences] for r in requests}, scheduler


@pytest.mark.parametrize("kind", NETWORKS)
def test_tokens_are_the_same_while_the_pool_shrinks_and_grows(kind: str) -> None:
    """Down to one request's worth and up beyond the first size, every few steps."""
    model = make_network(SMALL, random_weights(SMALL), kind)

    def make(num_blocks: int) -> TorchExecutor:
        return TorchExecutor(model, block_size=16, num_blocks=num_blocks, num_swap_blocks=24)

    wanted, _ = serve(make(400), 400, lambda _: itertools.repeat(None))

    def up_and_down(scheduler: Scheduler) -> Iterator[int | None]:
        for size in itertools.cycle((1, 60, 25, 33, 16, 90, 20)):
            yield size
            yield from (None, None)

    found, scheduler = serve(make(48), 48, up_and_down)
    assert found == wanted
    assert scheduler.metrics.preemptions_swap > 2
