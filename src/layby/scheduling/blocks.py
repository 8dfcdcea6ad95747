"""A pool of KV-cache blocks: who holds which, and what freed blocks still contain."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple


class PoolState(NamedTuple):
    """Everything a pool's next answers depend on while nobody holds a block.

    ``free`` are blocks without known content, the first to be taken last; ``cached`` the others
    with their contents, least recently used first.
    """

    free: list[int]
    cached: list[tuple[int, Hashable]]


class OutOfBlocksError(RuntimeError):
    """More blocks were taken than the pool has: a caller did not ask first."""


class BlockPool:
    """Reference-counted blocks, content-addressed once they are full.

    A block is in one of three states::

        free        no holder, no known content         taken first
        evictable   no holder, content still readable   taken next, least recently used first
        held        one holder or more

    Every operation costs O(blocks touched).

    The pool can be closed down to fewer blocks while some of the others are held: those are
    stranded until they are released or moved, and count as blocks of the pool so long.

    Args:
        num_blocks: Size of the pool, in blocks; may be 0.

    Attributes:
        limit: Only blocks below this number are handed out.
        num_stranded: Held blocks from ``limit`` on.
    """

    __slots__ = (
        "_content",
        "_evictable",
        "_free",
        "_index",
        "_ref_counts",
        "_touched",
        "limit",
        "num_stranded",
    )

    def __init__(self, num_blocks: int) -> None:
        self.limit = num_blocks
        self.num_stranded = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._touched = bytearray(num_blocks)  # 1: handed out since its memory was given back
        self._content: dict[int, Hashable] = {}  # block → content address
        self._index: dict[Hashable, int] = {}  # content address → block

    @property
    def num_blocks(self) -> int:
        """Blocks there are: those that can be handed out, and stranded ones."""
        return self.limit + self.num_stranded

    @property
    def extent(self) -> int:
        """Block numbers are below this; more than ``limit`` until ``trim``."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_evictable(self) -> int:
        """Blocks without a holder whose content can still be reused."""
        return len(self._evictable)

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        """Share of the pool that is held, from 0 to 1 (0 for an empty pool)."""
        return self.num_held / self.num_blocks if self.num_blocks else 0.0

    def ref_count(self, block: int) -> int:
        """How many holders the block has."""
        return self._ref_counts[block]

    def holders(self) -> dict[int, int]:
        """How many holders every held block has. O(blocks)."""
        return {block: count for block, count in enumerate(self._ref_counts) if count}

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, each with one holder and no known content.

        Raises:
            OutOfBlocksError: Fewer are available; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked of a pool with {self.num_free} to give")
        from_free = min(count, len(self._free))
        blocks = self._free[len(self._free) - from_free :][::-1]
        del self._free[len(self._free) - from_free :]
        for _ in range(count - from_free):
            block, _ = self._evictable.popitem(last=False)
            del self._index[self._content.pop(block)]
            blocks.append(block)
        for block in blocks:
            self._ref_counts[block] = self._touched[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; an evictable one is thereby kept."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take a holder from each block, given in table order.

        A block left without holders stays evictable if its content is known. Of one table the
        tail is given up first, because a prefix serves more requests than what follows it.
        """
        counts, content = self._ref_counts, self._content
        for block in reversed(list(blocks)):
            count = counts[block] - 1
            if count < 0:
                raise OutOfBlocksError(f"block {block} was released more often than it was taken")
            counts[block] = count
            if count == 0:
                if block >= self.limit:
                    self._forget(block)
                    self.num_stranded -= 1
                elif block in content:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def publish(self, blocks: Iterable[int], addresses: Iterable[Hashable]) -> None:
        """Make full blocks findable by their content; the first of equal ones is the one found."""
        content, index = self._content, self._index
        for block, address in zip(blocks, addresses, strict=True):
            if address not in index and block not in content:
                index[address] = block
                content[block] = address

    def find(self, address: Hashable) -> int | None:
        """A block with this content, held or evictable; None if there is none."""
        return self._index.get(address)

    def idle_state(self) -> PoolState:
        """What to ``restore`` in another pool of this size. Only while nobody holds a block."""
        if self.num_held:
            raise ValueError(f"{self.num_held} blocks of the pool are held")
        return PoolState(list(self._free), [(b, self._content[b]) for b in self._evictable])

    def restore(self, state: PoolState) -> None:
        """Become like the pool that ``state`` is of. Only while nobody holds a block.

        Raises:
            ValueError: A block is held, or the state is of no pool of this size.
        """
        blocks = sorted([*state.free, *(block for block, _ in state.cached)])
        content = dict(state.cached)
        index = {address: block for block, address in state.cached}
        if self.num_held or blocks != list(range(self.num_blocks)):
            raise ValueError(f"not the state of an idle pool of {self.num_blocks} blocks")
        if len(index) < len(state.cached):
            raise ValueError("two blocks of the pool's state have the same content")
        self._free = list(state.free)
        self._evictable = OrderedDict.fromkeys(content)
        self._content, self._index = content, index
        for block in content:
            self._touched[block] = 1

    # --- another size ---

    def resize(self, num_blocks: int) -> None:
        """Hand out blocks below this number only. Costs O(size of the pool).

        Free and evictable blocks from there on are given up, held ones are stranded. Blocks that
        come anew are free.
        """
        before, self.limit = self.limit, num_blocks
        counts = self._ref_counts
        if num_blocks < before:
            self._free = [block for block in self._free if block < num_blocks]
            for block in [block for block in self._evictable if block >= num_blocks]:
                del self._evictable[block]
                self._forget(block)
        else:
            counts += [0] * (num_blocks - len(counts))
            self._touched += bytes(len(counts) - len(self._touched))
            opened = [block for block in range(before, num_blocks) if counts[block] == 0]
            self._free = opened[::-1] + self._free  # the lower ones are taken first
        self.num_stranded = sum(count > 0 for count in counts[num_blocks:])

    def relocate(self, block: int) -> int:
        """Give a stranded block's holders and known content to a free block; returns that one.

        Raises:
            OutOfBlocksError: There is none.
        """
        [new] = self.allocate(1)
        self._ref_counts[new], self._ref_counts[block] = self._ref_counts[block], 0
        self.num_stranded -= 1
        if block in self._content:
            address = self._content[new] = self._content.pop(block)
            self._index[address] = new
        return new

    def trim(self) -> None:
        """Forget the block numbers that are given up; nothing may be stranded."""
        assert self.num_stranded == 0, f"{self.num_stranded} blocks from {self.limit} on are held"
        del self._ref_counts[self.limit :]
        del self._touched[self.limit :]

    # --- the memory behind it ---

    @property
    def num_touched(self) -> int:
        """Blocks that were handed out since their memory was last given back: only these take
        any. Costs O(size of the pool)."""
        return self._touched.count(1)

    def reclaim(self) -> list[int]:
        """The touched ones among the blocks that nobody can read, in order: their memory is to be
        given back now. Costs O(size of the pool)."""
        blocks = sorted(block for block in self._free if self._touched[block])
        for block in blocks:
            self._touched[block] = 0
        return blocks

    def _forget(self, block: int) -> None:
        """The block's content cannot be found any more."""
        if block in self._content:
            del self._index[self._content.pop(block)]

    def check_integrity(self) -> None:
        """Verify free + evictable + held = total and that the indexes agree.

        Raises:
            AssertionError: They do not.
        """
        held = sum(count > 0 for count in self._ref_counts)
        total = len(self._free) + len(self._evictable) + held
        assert total == self.num_blocks, f"{total} blocks accounted for of {self.num_blocks}"
        assert self.num_stranded == sum(count > 0 for count in self._ref_counts[self.limit :])
        assert len(self._touched) == len(self._ref_counts)
        assert all(self._touched[b] for b, count in enumerate(self._ref_counts) if count)
        assert all(block < self.limit for block in (*self._free, *self._evictable))
        assert all(self._ref_counts[b] == 0 and b not in self._content for b in self._free)
        assert all(self._ref_counts[b] == 0 and b in self._content for b in self._evictable)
        assert {block: address for address, block in self._index.items()} == self._content
