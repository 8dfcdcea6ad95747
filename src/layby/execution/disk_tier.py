"""The disk below the swap pool: a file of blocks, and a thread that reads and writes it."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from layby.errors import ConfigError
from layby.execution.block_io import BlockFaultError, expect_bytes, fault_of, inject
from layby.execution.faults import Faults
from layby.scheduling.plan import BlockMove, Transfer, TransferEnd

_RUN_BLOCKS = 64
"""Most blocks of one call to the system."""

_MIB = 2**20


class _Job(NamedTuple):
    transfer: Transfer
    is_write: bool
    wait_ready: Callable[[], None]


class DiskTier:
    """A file of blocks that are filled from, and read back into, the blocks of a pool in RAM.

    One thread does the transfers, reads before writes, and the caller asks for their ends: whatever
    the disk does, nobody waits for it but whoever chooses to. Every block has a checksum, kept in
    RAM, so that what is read is what was written or is reported as a fault.

    The file is allocated in full and has no name: it vanishes with the process, however that ends.

    Args:
        directory: Where the file is made; made itself if it does not exist.
        pool: The blocks in RAM, contiguous, on the CPU.
        num_blocks: Size of the file.
        faults: Faults to inject.

    Raises:
        ConfigError: The directory cannot be used, or has not the room.
    """

    def __init__(
        self, directory: str, pool: Tensor, num_blocks: int, faults: Faults | None = None
    ) -> None:
        self._blocks = pool.view(torch.uint8).reshape(-1).numpy().data
        self._block_bytes = len(self._blocks) // len(pool)
        self._checksums: dict[int, int] = {}  # of the disk blocks written so far
        self._faults = faults or Faults({})
        self._file = _open_unnamed(directory, num_blocks * self._block_bytes)
        self._wake = threading.Condition()
        self._reads: deque[_Job] = deque()
        self._writes: deque[_Job] = deque()
        self._ends: list[TransferEnd] = []
        self._num_pending = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="layby-disk", daemon=True)
        self._thread.start()

    # --- for the caller ---

    def begin(
        self,
        demote: Sequence[Transfer],
        promote: Sequence[Transfer],
        wait_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin transfers: ``demote`` to disk, ``promote`` back.

        Args:
            demote, promote: As in ``StepPlan``.
            wait_ready: Returns when the pool holds what is to be written; called by the thread.
        """
        with self._wake:
            self._writes += [_Job(transfer, True, wait_ready) for transfer in demote]
            self._reads += [_Job(transfer, False, wait_ready) for transfer in promote]
            self._num_pending += len(demote) + len(promote)
            self._wake.notify_all()

    def ends(self, *, wait_s: float = 0.0) -> list[TransferEnd]:
        """The transfers that have ended since the last call.

        Args:
            wait_s: If none has, and some are under way, wait so long for one.
        """
        with self._wake:
            if wait_s and self._num_pending and not self._ends:
                self._wake.wait_for(lambda: self._ends, wait_s)
            ends, self._ends = self._ends, []
        return ends

    def export_blocks(self, blocks: Sequence[int]) -> memoryview:
        """What blocks of the file hold, one after the other; beside transfers.

        Raises:
            OSError, BlockFaultError: They cannot be read as they were written.
        """
        content = memoryview(bytearray(len(blocks) * self._block_bytes))
        for moves in _runs(_numbered(blocks), by_source=True):
            self._read_run(moves[0].src, self._parts(content, moves))
        return content

    def import_blocks(self, blocks: Sequence[int], content: memoryview) -> None:
        """Fill blocks of the file that no transfer is concerned with.

        Raises:
            OSError, BlockFaultError: They cannot be written.
        """
        for moves in _runs(_numbered(blocks), by_source=True):
            self._write_run(moves[0].src, self._parts(content, moves))

    def close(self) -> None:
        """Stop the thread after the transfer it is at; the file and its blocks are gone."""
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    # --- in the thread ---

    def _run(self) -> None:
        while (job := self._next()) is not None:
            fault = ""
            try:
                job.wait_ready()
                for moves in _runs(job.transfer.moves, by_source=not job.is_write):
                    (self._write if job.is_write else self._read)(moves)
            except Exception as error:  # reported whatever it is, or the request waits for ever
                fault = fault_of(error)
            with self._wake:
                self._num_pending -= 1
                self._ends.append(TransferEnd(job.transfer.number, fault))
                self._wake.notify_all()

    def _next(self) -> _Job | None:
        with self._wake:
            self._wake.wait_for(lambda: self._reads or self._writes or self._is_closing)
            if self._is_closing:
                return None
            return (self._reads or self._writes).popleft()

    def _write(self, moves: Sequence[BlockMove]) -> None:
        """Write blocks that follow each other in the file."""
        self._write_run(moves[0].dst, [self._view(move.src) for move in moves])

    def _read(self, moves: Sequence[BlockMove]) -> None:
        """Read blocks that follow each other in the file, and check them."""
        self._read_run(moves[0].src, [self._view(move.dst) for move in moves])

    # --- in either thread ---

    def _write_run(self, first: int, views: Sequence[memoryview]) -> None:
        """Write the blocks of the file from ``first`` on."""
        inject(self._faults, "disk.write")
        for block, view in enumerate(views, start=first):
            self._checksums[block] = zlib.crc32(view)
        expect_bytes(os.pwritev(self._file, views, first * self._block_bytes), views)

    def _read_run(self, first: int, views: Sequence[memoryview]) -> None:
        """Read the blocks of the file from ``first`` on, and check them."""
        corrupt = inject(self._faults, "disk.read")
        expect_bytes(os.preadv(self._file, views, first * self._block_bytes), views)
        if corrupt:
            views[-1][-1] ^= 1
        for block, view in enumerate(views, start=first):
            if zlib.crc32(view) != self._checksums.get(block):
                raise BlockFaultError("checksum")

    def _view(self, block: int) -> memoryview:
        """A block of the pool."""
        return self._blocks[block * self._block_bytes : (block + 1) * self._block_bytes]

    def _parts(self, content: memoryview, moves: Sequence[BlockMove]) -> list[memoryview]:
        size = self._block_bytes
        return [content[move.dst * size : (move.dst + 1) * size] for move in moves]


def _numbered(blocks: Sequence[int]) -> list[BlockMove]:
    """Each block, and its place in what holds them one after the other."""
    return [BlockMove(block, place) for place, block in enumerate(blocks)]


def _runs(moves: Sequence[BlockMove], *, by_source: bool) -> Iterator[list[BlockMove]]:
    """Cut moves into runs that follow each other in the file, which is their source or target."""
    place = 0 if by_source else 1
    run: list[BlockMove] = []
    for move in sorted(moves, key=lambda move: move[place]):
        if run and (move[place] != run[-1][place] + 1 or len(run) == _RUN_BLOCKS):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def _open_unnamed(directory: str, num_bytes: int) -> int:
    """A file without a name, readable by nobody else, with all its bytes allocated.

    Raises:
        ConfigError: It cannot be made, or there is no room for it.
    """
    try:
        system = os.statvfs(directory)
        descriptor, name = tempfile.mkstemp(prefix="layby-swap-", dir=directory)
        os.unlink(name)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"swap_dir {directory!r} cannot be used: {why}") from error
    free_bytes = system.f_bavail * system.f_frsize
    try:
        if num_bytes > free_bytes:  # trying would fill the disk for a moment, to the harm of others
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(
            f"the swap file takes {num_bytes / _MIB:.0f} MiB, which cannot be had in "
            f"{directory!r}, where {free_bytes / _MIB:.0f} MiB are free: {error.strerror}"
        ) from error
    return descriptor
