"""The KV cache: a device pool and a swap pool of blocks, and the moves between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from layby.errors import ConfigError
from layby.execution.host_memory import HostMemory, installed_bytes
from layby.execution.staging import STAGED_BYTES, CudaLane, Lane, Staging
from layby.models.network import KVFormat
from layby.scheduling.plan import BlockMove

logger = logging.getLogger("layby.execution")

_STAGED_BLOCKS = 64
"""Blocks that a swap copies at once: bounds the memory it borrows."""


class KVCache:
    """Blocks on the device and parked blocks in host memory.

    A block is contiguous in either pool, with all of its layers, so that parking it is one copy.
    Neither pool is initialised: readers must mask what was never written. On a CPU the system hands
    out their pages as they are first written.

    The device pool can change its size. On a CPU it does so in place, and what it gives up goes
    back to the system at once. A GPU offers no such thing: there the blocks are copied into a
    tensor of the new size, and for that moment there must be room for both. The memory of swap
    blocks that nobody uses can go back to the system as well, on a CPU.

    On a GPU the swap pool is pinned, and moves from and to it overlap the forward passes, see
    ``layby.execution.staging``.

    Args:
        kv_format: What a block is made of.
        num_blocks, num_swap_blocks: Sizes of the pools; the swap pool may be empty.
        device: Where the device pool lies.
        lane: What copies between device and host beside the main flow; None: a stream on a GPU,
            nothing on a CPU.
        staged_bytes: See ``Staging``.

    Raises:
        ConfigError: A pool is larger than the memory there is.
    """

    def __init__(
        self,
        kv_format: KVFormat,
        *,
        num_blocks: int,
        num_swap_blocks: int,
        device: torch.device,
        lane: Lane | None = None,
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        block, dtype, size = kv_format.shape, kv_format.dtype, kv_format.block_bytes
        on_gpu = device.type == "cuda"

        def allocate(what: str, count: int, where: torch.device) -> Tensor:
            pin = on_gpu and where.type == "cpu" and count > 0
            try:
                return torch.empty((count, *block), dtype=dtype, device=where, pin_memory=pin)
            except (RuntimeError, MemoryError) as error:
                raise ConfigError(_too_large(what, count, size, where.type, error)) from error

        def reserve(what: str, count: int, most_bytes: int) -> tuple[HostMemory, Tensor]:
            try:
                host = HostMemory(count * size, most_bytes)
            except MemoryError as error:
                raise ConfigError(_too_large(what, count, size, "cpu", error)) from error
            most = host.num_bytes // size
            return host, host.tensor()[: most * size].view(dtype).view(most, *block)

        self.block_bytes = size
        self._host: HostMemory | None = None
        self._swap_host: HostMemory | None = None
        if on_gpu:
            self.pool = allocate("device", num_blocks, device)
        else:
            self._host, self._whole = reserve("device", num_blocks, installed_bytes())
            self.pool = self._whole[:num_blocks]
        if on_gpu or num_swap_blocks == 0:
            self.swap_pool = allocate("swap", num_swap_blocks, torch.device("cpu"))
        else:
            self._swap_host, self.swap_pool = reserve("swap", num_swap_blocks, 0)
        self._blocks, self._parked = _words(self.pool, size), _words(self.swap_pool, size)
        self._staging: Staging | None = None
        if lane is None and on_gpu:
            lane = CudaLane(device)
        if lane is not None and num_swap_blocks:
            try:
                self._staging = Staging(self._blocks, self._parked, lane, staged_bytes=staged_bytes)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"beside a device pool of {num_blocks} blocks there is no room for "
                    f"{2 * staged_bytes / 2**20:.0f} MiB to move blocks through: {error}"
                ) from error

    @property
    def num_blocks(self) -> int:
        """Blocks of the device pool."""
        return len(self.pool)

    def most_blocks(self, free_bytes: int) -> int:
        """Blocks that the device pool can grow to if the device has so much memory left."""
        if self._host is None:  # the old pool stays until the new one is filled
            return max(self.num_blocks, free_bytes // self.block_bytes)
        return min(len(self._whole), self.num_blocks + free_bytes // self.block_bytes)

    def give_back_parked(self, blocks: Sequence[int]) -> None:
        """Return the memory of swap blocks that nobody uses to the system.

        Nothing happens on a GPU, whose swap pool is pinned. Parts of pages stay.

        Args:
            blocks: In order.
        """
        if self._swap_host is None or not blocks:
            return
        size, first = self.block_bytes, blocks[0]
        for block, following in zip(blocks, [*blocks[1:], -1], strict=True):
            if following != block + 1:
                self._swap_host.give_back(first * size, (block + 1) * size)
                first = following

    @torch.inference_mode()
    def resize(self, num_blocks: int) -> None:
        """Give the device pool so many blocks, at most ``most_blocks``. Those that stay keep their
        content; new ones are not initialised."""
        if self._host is not None:
            if num_blocks < self.num_blocks:
                self._host.give_back(num_blocks * self.block_bytes)
            self.pool = self._whole[:num_blocks]
        else:
            self.pool = self._copied_to_other_size(num_blocks)
        self._blocks = _words(self.pool, self.block_bytes)
        if self._host is None:
            torch.cuda.empty_cache()  # else torch would keep what the old pool had

    @torch.inference_mode()
    def swap_out(self, moves: Sequence[BlockMove]) -> None:
        """Copy device blocks into swap blocks."""
        if self._staging is not None:
            self._staging.swap_out(self._blocks, moves)
            return
        for device_blocks, runs in _swaps([(move.dst, move.src) for move in moves]):
            index = self._index(device_blocks)
            if len(runs) == 1:  # straight into its place
                _, end, first = runs[0]
                torch.index_select(self._blocks, 0, index, out=self._parked[first : first + end])
                continue
            staged = self._blocks.index_select(0, index)
            for begin, end, swap_block in runs:
                self._parked[swap_block : swap_block + end - begin].copy_(staged[begin:end])

    @torch.inference_mode()
    def swap_in(self, moves: Sequence[BlockMove]) -> None:
        """Copy swap blocks into device blocks."""
        if self._staging is not None:
            self._staging.swap_in(self._blocks, moves)
            return
        for device_blocks, runs in _swaps([(move.src, move.dst) for move in moves]):
            index = self._index(device_blocks)
            if len(runs) == 1:
                _, end, first = runs[0]
                self._blocks.index_copy_(0, index, self._parked[first : first + end])
                continue
            staged = self._blocks.new_empty((len(device_blocks), self._blocks.shape[1]))
            for begin, end, swap_block in runs:
                staged[begin:end].copy_(self._parked[swap_block : swap_block + end - begin])
            self._blocks.index_copy_(0, index, staged)

    @property
    def copies_ahead(self) -> bool:
        """Whether ``prefetch`` does anything."""
        return self._staging is not None

    @torch.inference_mode()
    def prefetch(self, swap_blocks: Sequence[int]) -> None:
        """These are swapped in next, in this order: where moves overlap, begin to copy them."""
        if self._staging is not None:
            self._staging.prefetch(swap_blocks)

    def overwritten(self, swap_blocks: Iterable[int]) -> None:
        """Others than ``swap_out`` are about to write these, once the ``fence`` is passed."""
        if self._staging is not None:
            self._staging.forget(swap_blocks)

    @torch.inference_mode()
    def copy(self, moves: Sequence[BlockMove]) -> None:
        """Copy device blocks onto device blocks; all are read before any is written."""
        if not moves:
            return
        staged = self._blocks.index_select(0, self._index([move.src for move in moves]))
        self._blocks.index_copy_(0, self._index([move.dst for move in moves]), staged)

    @torch.inference_mode()
    def export_blocks(self, blocks: Sequence[int], *, parked: bool) -> memoryview:
        """A copy of what device blocks, or parked ones, hold, one after the other."""
        self.synchronize()
        pool = self._parked if parked else self._blocks
        index = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
        copied = pool.index_select(0, index).cpu()
        return memoryview(copied.view(torch.uint8).reshape(-1).numpy().data)

    @torch.inference_mode()
    def import_parked(self, blocks: Sequence[int], content: memoryview) -> None:
        """Fill blocks of the swap pool."""
        self.overwritten(blocks)
        self.synchronize()
        words = torch.frombuffer(content, dtype=self._parked.dtype).view(len(blocks), -1)
        self._parked.index_copy_(0, torch.tensor(blocks, dtype=torch.int64), words)

    def fence(self) -> Callable[[], None]:
        """A function that returns when the copies between the pools begun so far are done, and the
        swap pool's bytes may be read or written by other means."""
        return (lambda: None) if self._staging is None else self._staging.fence()

    def synchronize(self) -> None:
        """Wait for them, and for whatever else the device is at."""
        self.fence()()
        if self.pool.device.type == "cuda":
            torch.cuda.synchronize(self.pool.device)

    def _copied_to_other_size(self, num_blocks: int) -> Tensor:
        """A pool of so many blocks that begins as the old one does; a part of the old one where a
        smaller one has no room beside it. It has never run on a GPU."""
        kept = min(num_blocks, self.num_blocks)
        try:
            with torch.inference_mode(False):  # else it could be written in inference mode alone
                pool = self.pool.new_empty((num_blocks, *self.pool.shape[1:]))
        except torch.OutOfMemoryError:
            if num_blocks > kept:
                raise
            logger.warning("no room to copy %d blocks: the old pool keeps its memory", num_blocks)
            return self.pool[:kept]
        pool[:kept].copy_(self.pool[:kept])
        return pool

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.pool.device)


def _too_large(what: str, count: int, block_bytes: int, where: str, why: Exception) -> str:
    return (
        f"the {what} pool of {count} blocks takes {count * block_bytes / 2**30:.2f} GiB "
        f"on {where}, which cannot be had: {why}"
    )


def _words(pool: Tensor, block_bytes: int) -> Tensor:
    """The pool as ``[blocks, words]``: torch copies words of eight bytes far faster than bytes."""
    flat = pool.view(torch.uint8).reshape(len(pool), block_bytes)
    return flat.view(torch.int64) if block_bytes % 8 == 0 else flat


def _swaps(
    pairs: list[tuple[int, int]],
) -> Iterator[tuple[list[int], list[tuple[int, int, int]]]]:
    """Cut ``(swap block, device block)`` pairs into batches that need few copies.

    Pairs are sorted by swap block, so that neighbours in the swap pool travel together; the device
    side, scattered as it is, is one index operation per batch.

    Yields:
        The device blocks of a batch, and its runs: ``(begin, end, first swap block)`` says that
        entries ``begin … end - 1`` of the batch are consecutive in the swap pool.
    """
    pairs = sorted(pairs)
    for low in range(0, len(pairs), _STAGED_BLOCKS):
        batch = pairs[low : low + _STAGED_BLOCKS]
        starts = [
            index
            for index, (swap_block, _) in enumerate(batch)
            if index == 0 or swap_block != batch[index - 1][0] + 1
        ]
        ends = [*starts[1:], len(batch)]
        runs = [(begin, end, batch[begin][0]) for begin, end in zip(starts, ends, strict=True)]
        yield [device_block for _, device_block in batch], runs
