"""Blocks leave an executor and come into another one byte for byte, whatever pool they lie in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layby.execution import FakeExecutor
from layby.execution.block_io import BlockFaultError
from layby.execution.faults import Faults
from layby.execution.torch_executor import TorchExecutor
from layby.models.transformer import Transformer
from layby.scheduling import BlockMove, StepPlan, Tier
from tests.execution.harness import TINY, random_weights

BLOCKS = [5, 2, 3, 9]


def make_executor(directory: Path, dtype: torch.dtype, faults: str = "") -> TorchExecutor:
    model = Transformer(TINY, random_weights(TINY), dtype=dtype)
    executor = TorchExecutor(
        model,
        block_size=4,
        num_blocks=10,
        num_swap_blocks=10,
        num_disk_blocks=10,
        swap_dir=str(directory),
        faults=Faults.parse(faults),
    )
    for number, pool in enumerate((executor.cache.pool, executor.cache.swap_pool)):
        generator = torch.Generator().manual_seed(number)
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return executor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [Tier.RAM, Tier.DISK])
def test_blocks_are_exchanged_byte_for_byte(
    tmp_path: Path, dtype: torch.dtype, target: Tier
) -> None:
    one, other = make_executor(tmp_path, dtype), make_executor(tmp_path, dtype)
    assert one.block_format == other.block_format
    for source in (Tier.DEVICE, Tier.RAM):
        pool = one.cache.pool if source is Tier.DEVICE else one.cache.swap_pool
        content = one.export_blocks(source, BLOCKS)
        assert len(content) == len(BLOCKS) * one.block_format.num_bytes
        other.import_blocks(target, [9, 0, 1, 7], content)
        assert other.export_blocks(target, [9, 0, 1, 7]) == content
        if target is Tier.RAM:
            assert torch.equal(other.cache.swap_pool[[9, 0, 1, 7]], pool[BLOCKS])
    one.close()
    other.close()


def test_an_export_is_a_copy(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, torch.float32)
    content = executor.export_blocks(Tier.DEVICE, BLOCKS)
    before = bytes(content)
    executor.cache.pool.zero_()
    assert content == before
    executor.close()


def test_what_the_disk_returns_is_checked(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, torch.float32, "disk.read=corrupt:1")
    executor.import_blocks(Tier.DISK, [1], executor.export_blocks(Tier.RAM, [1]))
    with pytest.raises(BlockFaultError, match="checksum"):
        executor.export_blocks(Tier.DISK, [1])
    executor.close()


def test_other_numbers_and_other_shapes_have_other_names(tmp_path: Path) -> None:
    names = set()
    for dtype in (torch.float32, torch.bfloat16):
        executor = make_executor(tmp_path, dtype)
        names.add(executor.block_format.name)
        executor.close()
    assert len(names) == 2


def test_the_fake_executor_exchanges_what_it_remembers() -> None:
    one, other = (FakeExecutor(block_size=4) for _ in range(2))
    empty = one.export_blocks(Tier.DEVICE, [3])
    assert len(empty) == one.block_format.num_bytes
    other.import_blocks(Tier.RAM, [1], empty)
    other.execute(StepPlan(1, 0.0, swap_in=[BlockMove(1, 2)]))
    assert other.export_blocks(Tier.DEVICE, [2]) == empty
