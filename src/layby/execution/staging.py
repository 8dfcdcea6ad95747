"""Block moves of a GPU that overlap the forward pass, by way of staging memory beside the pool.

It has never run on a GPU: the bookkeeping is tested with a lane that is as late as it may be.

Between pool and staging memory blocks are gathered and scattered on the device, in order with the
forward passes. Between staging memory and the swap pool, which is pinned, they are copied by a lane
of their own::

    out   pool ──gather──▶ ring ···copy···▶ swap pool       the forward pass goes on meanwhile
    in    pool ◀─scatter── ring ◀··copy···  swap pool       waits for the copy
          pool ◀─scatter── ahead ◀·copy···  swap pool       copied in steps before
                 main               lane

The lane copies one thing after another, so whatever it reads in the swap pool has been written,
and nothing is overwritten that it has yet to read. Others (the disk, a restart) touch the swap pool
only behind a ``fence``, and ``forget`` what they write. The pool is touched by the main flow alone,
so that its size can change without a thought of copies under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from layby.scheduling.plan import BlockMove

STAGED_BYTES = 256 * 2**20
"""Most memory of the device for the ring, and as much again for what is copied ahead."""

_RING_PARTS = 4
"""Parts of the ring that are filled and emptied as one: while one is copied, the next is filled."""


class Lane(Protocol):
    """A flow of work beside the main one, in order within itself."""

    def submit(self, work: Callable[[], None]) -> Any:
        """Do something once all that the main flow was given so far is done.

        Returns:
            A mark, for ``join`` and ``wait``: that this, and all submitted before it, is done.
        """
        ...

    def join(self, mark: Any) -> None:
        """Let the main flow go on only when the mark is reached. The caller does not wait."""
        ...

    def wait(self, mark: Any) -> None:
        """Return when the mark is reached; any thread may call it."""
        ...


class CudaLane:
    """A stream beside the current one of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def submit(self, work: Callable[[], None]) -> torch.cuda.Event:
        """See ``Lane``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def join(self, mark: torch.cuda.Event) -> None:
        """See ``Lane``."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def wait(self, mark: torch.cuda.Event) -> None:
        """See ``Lane``."""
        mark.synchronize()


@dataclass(slots=True)
class _Part:
    """Blocks of the ring, and when they may be overwritten; None: they were never used."""

    blocks: Tensor
    free: Any = None


class Staging:
    """Moves between a pool on the device and a swap pool in pinned memory.

    What is copied ahead is a copy of swap blocks, whoever they belong to: it holds until one of
    them is written again, so it does not matter what becomes of the request it was made for.

    Args:
        pool: ``[blocks, words]``, the device pool at present.
        swap_pool: ``[swap blocks, words]``, in host memory.
        lane: What copies between the two.
        staged_bytes: Most memory for the ring, and for what is copied ahead, each.
    """

    def __init__(
        self, pool: Tensor, swap_pool: Tensor, lane: Lane, *, staged_bytes: int = STAGED_BYTES
    ) -> None:
        self._swap_pool, self._lane = swap_pool, lane
        words = swap_pool.shape[1]
        most = staged_bytes // (words * swap_pool.element_size())
        count = max(1, min(most, len(swap_pool)))
        size = max(1, count // _RING_PARTS)
        ring = pool.new_empty((size * _RING_PARTS, words))
        self._ring = [_Part(blocks) for blocks in ring.split(size)]
        self._next_part = 0
        self._ahead = pool.new_empty((count, words))
        self._places: dict[int, int] = {}  # of swap blocks in _ahead
        self._ahead_done: Any = None
        self._last: Any = None  # mark of what the lane was given last

    def swap_out(self, pool: Tensor, moves: Sequence[BlockMove]) -> None:
        """Copy device blocks into swap blocks; the device blocks may be overwritten at once."""
        self.forget(move.dst for move in moves)
        for batch in self._batches(sorted((move.dst, move.src) for move in moves)):
            part = self._take_part()
            staged = part.blocks[: len(batch)]
            torch.index_select(pool, 0, _index([block for _, block in batch], pool), out=staged)
            part.free = self._copy(enumerate(swap for swap, _ in batch), staged, to_host=True)

    def swap_in(self, pool: Tensor, moves: Sequence[BlockMove]) -> None:
        """Copy swap blocks into device blocks."""
        ahead = sorted((self._places[m.src], m.dst) for m in moves if m.src in self._places)
        if ahead:
            self._lane.join(self._ahead_done)
            for place, first, count in _runs(enumerate(place for place, _ in ahead)):
                targets = _index([block for _, block in ahead[place : place + count]], pool)
                pool.index_copy_(0, targets, self._ahead[first : first + count])
        rest = sorted((m.src, m.dst) for m in moves if m.src not in self._places)
        for batch in self._batches(rest):
            part = self._take_part()
            staged = part.blocks[: len(batch)]
            copied = self._copy(enumerate(swap for swap, _ in batch), staged, to_host=False)
            self._lane.join(copied)
            pool.index_copy_(0, _index([block for _, block in batch], pool), staged)

    def prefetch(self, swap_blocks: Sequence[int]) -> None:
        """Begin to copy these ahead, as many of the first as there is room for; others make way."""
        wanted = swap_blocks[: len(self._ahead)]
        missing = sorted(block for block in wanted if block not in self._places)
        if not missing:
            return
        kept = set(wanted)
        self._places = {block: place for block, place in self._places.items() if block in kept}
        free = sorted(set(range(len(self._ahead))) - set(self._places.values()))
        pairs = list(zip(free, missing, strict=False))
        self._ahead_done = self._copy(pairs, self._ahead, to_host=False)
        self._places.update((block, place) for place, block in pairs)

    def forget(self, swap_blocks: Iterable[int]) -> None:
        """These are about to be written: what was copied of them ahead is worth nothing."""
        for block in swap_blocks:
            self._places.pop(block, None)

    def fence(self) -> Callable[[], None]:
        """A function that returns when all copies begun so far are done."""
        mark = self._last
        return (lambda: None) if mark is None else (lambda: self._lane.wait(mark))

    def _batches(self, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        size = len(self._ring[0].blocks)
        return (pairs[low : low + size] for low in range(0, len(pairs), size))

    def _take_part(self) -> _Part:
        """The part of the ring whose turn it is, as soon as its last copy is done."""
        part = self._ring[self._next_part]
        self._next_part = (self._next_part + 1) % len(self._ring)
        if part.free is not None:
            self._lane.join(part.free)
        return part

    def _copy(self, pairs: Iterable[tuple[int, int]], staged: Tensor, *, to_host: bool) -> Any:
        """Copy between places of ``staged`` and swap blocks, ``(place, swap block)``, in the lane;
        neighbours on both sides travel together."""
        runs = list(_runs(pairs))

        def copy() -> None:
            for place, block, count in runs:
                here, there = staged[place : place + count], self._swap_pool[block : block + count]
                source, target = (here, there) if to_host else (there, here)
                target.copy_(source, non_blocking=True)

        self._last = self._lane.submit(copy)
        return self._last


def _index(blocks: Sequence[int], pool: Tensor) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=pool.device)


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Cut rising pairs into runs in which both numbers rise by one.

    Yields:
        The first pair of each run, and how many pairs it has.
    """
    first: tuple[int, int] | None = None
    count = 0
    for one, other in pairs:
        if first is not None and (one, other) == (first[0] + count, first[1] + count):
            count += 1
            continue
        if first is not None:
            yield (*first, count)
        first, count = (one, other), 1
    if first is not None:
        yield (*first, count)
