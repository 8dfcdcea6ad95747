"""KV that outlives the process: where it lies when that ends, and where it goes in the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from layby.scheduling.memory import KVMemory
from layby.scheduling.request import Request, RequestStatus


class Tier(Enum):
    """A pool of blocks."""

    DEVICE = "device"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class KVTables:
    """What is computed of a request, and the blocks that hold it.

    Attributes:
        computed: For every live sequence, how many positions are stored.
        tables: For every live sequence, the numbers of the blocks that hold positions 0, 1, …;
            one that several samples share stands in the table of each.
    """

    computed: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]

    @property
    def blocks(self) -> list[int]:
        """The different blocks, in the order of the tables."""
        return list(dict.fromkeys(block for table in self.tables for block in table))

    def renumbered(self, number_of: Mapping[int, int]) -> KVTables:
        """The same in blocks of other numbers."""
        tables = tuple(tuple(number_of[block] for block in table) for table in self.tables)
        return KVTables(self.computed, tables)


class KVPlace(NamedTuple):
    """Where a request's KV lies."""

    tier: Tier
    tables: KVTables


def locate(memory: KVMemory, request: Request, *, is_in_ram: bool) -> KVPlace | None:
    """Where what is computed of a request lies, between two steps.

    ``is_in_ram`` says of a parked request whether RAM has it. None if there is nothing, or if it
    has a gap: samples may wait for their common prefix to be computed again.
    """
    live = request.live_sequences
    computed = tuple(seq.num_computed for seq in live)
    if request.status is RequestStatus.WAITING or request.prefix_owner or not all(computed):
        return None
    if request.status is RequestStatus.RUNNING:
        tier, tables = Tier.DEVICE, [seq.block_table for seq in live]
    elif is_in_ram:
        tier, tables = Tier.RAM, [seq.swap_table for seq in live]
    else:
        tier, tables = Tier.DISK, [seq.disk_table for seq in live]
    stored = tuple(
        tuple(table[: memory.blocks_for(count)])
        for table, count in zip(tables, computed, strict=True)
    )
    return KVPlace(tier, KVTables(computed, stored))


def check_kept(memory: KVMemory, request: Request, kept: KVTables) -> None:
    """Raise ValueError if the request cannot go on from there."""
    live = request.live_sequences
    if not len(live) == len(kept.computed) == len(kept.tables):
        raise ValueError(
            f"request {request.request_id} has {len(live)} live sequences, but KV is kept of "
            f"{len(kept.computed)} in {len(kept.tables)} tables"
        )
    for seq, count, table in zip(live, kept.computed, kept.tables, strict=True):
        if not 0 < count < seq.num_tokens or len(table) != memory.blocks_for(count):
            raise ValueError(f"{seq!r} cannot go on from {count} positions in {len(table)} blocks")
    most = memory.worst_case_blocks(request)
    if len(kept.blocks) > most:
        raise ValueError(
            f"the KV of request {request.request_id} is kept in {len(kept.blocks)} blocks, but it "
            f"can never need more than {most}"
        )


def take_place(memory: KVMemory, request: Request, kept: KVTables) -> KVPlace | None:
    """Give the request blocks for what is kept of it: in RAM if they are free, else on disk.

    None if there is no room, and on disk also if RAM could never take it back.
    """
    blocks = kept.blocks
    if len(blocks) <= memory.swap.num_free:
        tier, pool = Tier.RAM, memory.swap
    elif len(blocks) <= min(memory.disk.num_free, memory.swap.num_blocks):
        tier, pool = Tier.DISK, memory.disk
    else:
        return None
    placed = kept.renumbered(dict(zip(blocks, pool.allocate(len(blocks)), strict=True)))
    held: set[int] = set()
    for seq, count, table in zip(request.live_sequences, kept.computed, placed.tables, strict=True):
        pool.share(block for block in table if block in held)
        held.update(table)
        seq.num_computed = count
        seq.num_published = count // memory.block_size  # as they arrive on the device
        seq.most_computed = max(seq.most_computed, count)
        if tier is Tier.RAM:
            seq.swap_table = list(table)
        else:
            seq.disk_table = list(table)
    return KVPlace(tier, placed)
