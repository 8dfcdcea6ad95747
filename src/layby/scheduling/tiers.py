"""Where parked work lies: in the swap pool (RAM), below it on disk, or in both.

Work is parked to RAM and resumed from RAM; the disk is reached from there by transfers, which run
beside the steps. A parked request is in one of these states::

    RAM           as it was parked
    RAM → disk    being written; may be resumed meanwhile
    both          RAM can be given up at once, when somebody needs it
    disk          must be read back before it can be resumed
    disk → RAM    being read

So RAM is a write-back cache of the disk. Two rules keep it so that nobody has to wait:

* **Written behind.** As long as less than half of the swap pool is free or could be given up, the
  least urgent parked work is written to disk. The next victim then finds room in RAM at once.
* **Read ahead.** The order of the swapped queue is the order of return. Whatever lies on disk
  alone is read back in that order as soon as RAM is free, or is taken from less urgent work that
  is on disk as well.

A transfer holds its blocks in both pools until its end is reported, whatever happens to its
request in the meantime.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from layby.scheduling.blocks import BlockPool
from layby.scheduling.memory import KVMemory
from layby.scheduling.metrics import SchedulerMetrics
from layby.scheduling.plan import BlockMove, StepPlan, Transfer, TransferEnd
from layby.scheduling.queues import RequestQueue
from layby.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class _Moving:
    """A transfer under way, and whose blocks it moves."""

    request: Request
    transfer: Transfer
    is_demotion: bool


class SwapTiers:
    """Decides which parked work is written to disk, and what is read back.

    Costs nothing without a disk. With one, it looks at the parked requests only in steps after
    something changed among them.

    Args:
        memory: The pools.
        swapped: The parked requests, in order of return.
        metrics: Where moves are counted.

    Attributes:
        num_begun: Transfers begun so far.
    """

    def __init__(self, memory: KVMemory, swapped: RequestQueue, metrics: SchedulerMetrics) -> None:
        self._memory = memory
        self._swapped = swapped
        self._metrics = metrics
        self._has_changed = False
        self.num_begun = 0
        self._transfers: dict[int, _Moving] = {}  # all under way
        self._moving: dict[Request, _Moving] = {}  # those whose request is still parked
        self._clean: dict[Request, int] = {}  # who is in both, and the blocks it has in RAM
        self._unwritable: set[Request] = set()  # whose writing failed; not tried again

    @property
    def num_transfers(self) -> int:
        """Transfers under way."""
        return len(self._transfers)

    # --- what the scheduler asks and tells ---

    def is_in_ram(self, request: Request) -> bool:
        """Whether a parked request can be resumed as it lies."""
        moving = self._moving.get(request)
        if moving is not None:
            return moving.is_demotion
        return any(seq.swap_table for seq in request.live_sequences)

    def can_park(self, request: Request) -> bool:
        """Whether RAM can take what a running request has computed."""
        return self._memory.can_park(request, spare=sum(self._clean.values()))

    def make_room(self, request: Request) -> None:
        """Give up RAM for a request that is about to be parked. Only if ``can_park``."""
        self._has_changed = True
        if self._clean:
            self._free(self._memory.stored_blocks(request), list(self._clean))

    def keep_in_ram(self, request: Request) -> None:
        """The request is about to be resumed: its place in RAM is not given up for a victim."""
        if self._clean.pop(request, None) is not None:
            self._memory.leave_disk(request)

    def forget(self, request: Request) -> None:
        """The request is no longer parked."""
        self._has_changed = True
        self._moving.pop(request, None)
        self._clean.pop(request, None)
        self._unwritable.discard(request)

    def reorder(self) -> None:
        """The order among the parked requests is another one than before."""
        self._has_changed = True

    # --- one step ---

    def tend(self, plan: StepPlan, *, is_idle: bool) -> list[Request]:
        """Begin transfers.

        Args:
            plan: The step they begin in.
            is_idle: Nothing runs, so that parked work must be got back at any price.

        Returns:
            Parked requests to give up: the first one cannot be read back for lack of room, and
            nothing that happens will make any.
        """
        if not (self._memory.disk.num_blocks and (self._has_changed or is_idle)):
            return []
        self._has_changed = bool(plan.swap_in)  # what that leaves is free after the step
        parked = list(self._swapped)
        blocked = self._read_ahead(parked, plan)
        self._write_behind(parked, blocked, plan)
        if blocked is None or blocked is not parked[0] or not is_idle or self._transfers:
            return []
        return self._least_urgent_in_ram(parked, self._size(blocked))

    def end(self, end: TransferEnd) -> Request | None:
        """Note the end of a transfer; returns the request whose KV is lost by it, if any.

        Raises:
            ValueError: There is no such transfer.
        """
        moving = self._transfers.pop(end.number, None)
        if moving is None:
            raise ValueError(f"transfer {end.number} is not under way")
        self._has_changed = True
        memory, request, transfer = self._memory, moving.request, moving.transfer
        source, target = self._pools(moving)
        source.release(move.src for move in transfer.moves)
        target.release(move.dst for move in transfer.moves)
        if end.fault:
            self._metrics.count_fault(end.fault)
        elif moving.is_demotion:
            self._metrics.demoted_blocks += len(transfer.moves)
        else:
            self._metrics.promoted_blocks += len(transfer.moves)
        if self._moving.get(request) is not moving:
            return None  # it was resumed or has ended in the meantime
        del self._moving[request]
        if not end.fault:
            self._clean[request] = len(transfer.moves)
            return None
        if not moving.is_demotion:
            return request
        memory.leave_disk(request)
        self._unwritable.add(request)
        return None

    def _read_ahead(self, parked: list[Request], plan: StepPlan) -> Request | None:
        """Read back what lies on disk alone, most urgent first; returns the first for which there
        is no room.

        Work being read cannot be given up for a victim, so no more than half of RAM is read into
        at a time.
        """
        swap = self._memory.swap
        for place, request in enumerate(parked):
            if request in self._moving or self.is_in_ram(request):
                continue
            size = self._size(request)
            reading = sum(len(m.transfer.moves) for m in self._moving.values() if not m.is_demotion)
            if reading and reading + size > swap.num_blocks // 2:
                return None
            givers = [other for other in parked[place + 1 :] if other in self._clean]
            if swap.num_free + sum(self._clean[other] for other in givers) < size:
                return request
            self._free(size, givers)
            plan.promote.append(self._begin(request, is_demotion=False))
        return None

    def _write_behind(self, parked: list[Request], blocked: Request | None, plan: StepPlan) -> None:
        """Write the least urgent to disk until enough of RAM could be given up."""
        swap, disk = self._memory.swap, self._memory.disk
        wanted = max((swap.num_blocks + 1) // 2, 0 if blocked is None else self._size(blocked))
        available = swap.num_free + sum(self._clean.values())
        available += sum(len(m.transfer.moves) for m in self._moving.values() if m.is_demotion)
        for request in reversed(parked):
            if available >= wanted:
                return
            if self._is_in_ram_alone(request) and request not in self._unwritable:
                size = self._size(request)
                if size <= disk.num_free:
                    plan.demote.append(self._begin(request, is_demotion=True))
                    available += size

    def _least_urgent_in_ram(self, parked: list[Request], wanted: int) -> list[Request]:
        """Who must be given up so that ``wanted`` blocks of RAM can be had."""
        available = self._memory.swap.num_free + sum(self._clean.values())
        given_up = []
        for request in reversed(parked):
            if available >= wanted:
                break
            if self._is_in_ram_alone(request):
                given_up.append(request)
                available += self._size(request)
        return given_up

    def _free(self, wanted: int, givers: list[Request]) -> None:
        """Take RAM from requests that are on disk as well, least urgent first, until ``wanted``
        blocks are free."""
        memory = self._memory
        urgency = {request: place for place, request in enumerate(self._swapped)}
        for request in sorted(givers, key=urgency.__getitem__, reverse=True):
            if memory.swap.num_free >= wanted:
                return
            memory.leave_swap(request)
            del self._clean[request]

    def _begin(self, request: Request, *, is_demotion: bool) -> Transfer:
        """Take the blocks that a request's KV is moved to, and hold them and those it is in."""
        source, target = (
            (self._memory.swap, self._memory.disk)
            if is_demotion
            else (self._memory.disk, self._memory.swap)
        )
        sequences = request.live_sequences
        tables = [seq.swap_table if is_demotion else seq.disk_table for seq in sequences]
        holders = Counter(block for table in tables for block in table)
        target_of = dict(zip(holders, target.allocate(len(holders)), strict=True))
        for seq, table in zip(sequences, tables, strict=True):
            copied = [target_of[block] for block in table]
            if is_demotion:
                seq.disk_table = copied
            else:
                seq.swap_table = copied
        for block, count in holders.items():
            target.share([target_of[block]] * count)  # of which one for the transfer
        source.share(holders)
        self.num_begun += 1
        transfer = Transfer(self.num_begun, tuple(BlockMove(*pair) for pair in target_of.items()))
        moving = _Moving(request, transfer, is_demotion)
        self._transfers[transfer.number] = self._moving[request] = moving
        return transfer

    # --- small questions ---

    def _pools(self, moving: _Moving) -> tuple[BlockPool, BlockPool]:
        """Where a transfer reads, and where it writes."""
        memory = self._memory
        return (memory.swap, memory.disk) if moving.is_demotion else (memory.disk, memory.swap)

    def _is_in_ram_alone(self, request: Request) -> bool:
        return not (request in self._moving or request in self._clean) and self.is_in_ram(request)

    def _size(self, request: Request) -> int:
        """Blocks of a parked request, in whichever tier."""
        live = request.live_sequences
        return len({b for seq in live for b in seq.swap_table or seq.disk_table})

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Verify all pools against tables and transfers, and the states of parked requests.

        Raises:
            AssertionError: They do not agree.
        """
        moving_swap, moving_disk = list[int](), list[int]()
        for moving in self._transfers.values():
            sources = [move.src for move in moving.transfer.moves]
            targets = [move.dst for move in moving.transfer.moves]
            moving_swap += sources if moving.is_demotion else targets
            moving_disk += targets if moving.is_demotion else sources
        self._memory.check_integrity(
            list(requests), moving_swap=moving_swap, moving_disk=moving_disk
        )
        parked = set(self._swapped)
        assert parked.issuperset(self._moving)
        assert parked.issuperset(self._clean)
        assert parked.issuperset(self._unwritable)
        for request in parked:
            live = request.live_sequences
            in_ram = all(seq.swap_table for seq in live)
            on_disk = all(seq.disk_table for seq in live)
            assert in_ram or on_disk, f"{request} is parked nowhere"
            assert (in_ram and on_disk) == (request in self._moving or request in self._clean)
            assert not (request in self._moving and request in self._clean)
