"""Where requests' KV lies: block tables, and their moves between the device and swap pools.

One verb per move, each with the question that must be asked first::

    can_admit   → admit      waiting → device: cached prefix shared, the rest allocated
    growth      → grow       blocks, and private copies, for the next token
    can_park    → park       device → swap pool
    resume_need → resume     swap pool → device; content still on the device is not moved
                  lose       parked → nowhere
                  drop       device → nowhere: the tokens stay, their KV does not
                  relocate   stranded blocks → free blocks of a device pool that shrinks
                  fork       samples share what their prompt has computed
                  release    a sequence has ended
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from layby.scheduling.blocks import BlockPool
from layby.scheduling.costs import LeavingLoad
from layby.scheduling.plan import BlockMove
from layby.scheduling.request import Request, RequestStatus, Sequence


@dataclass(slots=True)
class _Placement:
    """How one sequence would be placed at admission: reused blocks, then new ones."""

    sequence: Sequence
    from_leader: int  # blocks shared with the request's first live sequence
    cached: list[int]  # blocks found by content, following those
    num_new: int


class KVMemory:
    """Block tables of all requests over the pools.

    Parked work comes and goes through the swap pool. What is moved between that and the disk is
    decided in ``tiers.py``.

    Args:
        num_blocks, num_swap_blocks, num_disk_blocks: Pool sizes in blocks.
        block_size: Token slots per block.
        enable_prefix_caching: Find full blocks by content.

    Attributes:
        target_blocks: Size that the device pool is to have; new requests must fit into it. The
            pool itself is larger while a live request may come to need more.
    """

    def __init__(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        num_disk_blocks: int = 0,
    ) -> None:
        self.device = BlockPool(num_blocks)
        self.swap = BlockPool(num_swap_blocks)
        self.disk = BlockPool(num_disk_blocks)
        self.target_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # Swap blocks being read by the step in flight: swap-outs are executed before swap-ins, so
        # within one step they must not be handed out again.
        self._leaving: list[int] = []
        self._arriving: list[tuple[int, Hashable]] = []  # device blocks being filled by it

    # --- sizes ---

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-num_tokens // self.block_size)

    def worst_case_blocks(self, request: Request) -> int:
        """Blocks the request needs alone, if every sequence runs to ``max_tokens``.

        The last sampled token is never stored. Samples share the full blocks of the prompt.
        """
        return self.worst_case(request.num_prompt_tokens, request.max_tokens, request.n)

    def worst_case(self, num_prompt_tokens: int, max_tokens: int, n: int) -> int:
        """The same for given counts."""
        if max_tokens == 1:
            return self.blocks_for(num_prompt_tokens)  # all samples come from the last prompt row
        shared = num_prompt_tokens // self.block_size
        return shared + n * (self.blocks_for(num_prompt_tokens + max_tokens - 1) - shared)

    def max_output_tokens(self, num_prompt_tokens: int, n: int) -> int:
        """Largest ``max_tokens`` whose worst case fits the target; 0 if the prompt does not.

        O(1).
        """
        shared = num_prompt_tokens // self.block_size
        per_sequence = (self.target_blocks - shared) // n
        positions = (shared + per_sequence) * self.block_size
        if per_sequence >= 0 and positions > num_prompt_tokens:
            return positions - num_prompt_tokens + 1
        return int(self.blocks_for(num_prompt_tokens) <= self.target_blocks)

    def held_blocks(self, request: Request) -> int:
        """Different device blocks in the request's tables."""
        if request.n == 1:
            return len(request.sequences[0].block_table)
        return len({block for seq in request.sequences for block in seq.block_table})

    def parked_blocks(self, request: Request) -> int:
        """Different swap blocks in the request's tables."""
        return len({slot for seq in request.sequences for slot in seq.swap_table})

    def would_fit(self, newcomer: Request, *, without: list[Request], headroom: int) -> bool:
        """Whether a waiting or parked request could come in if ``without`` had left the device.

        Cached blocks that only they hold would be free, so the newcomer would have to take them.
        """
        holders = Counter(b for r in without for seq in r.sequences for b in seq.block_table)
        freed = {block for block, count in holders.items() if self.device.ref_count(block) == count}
        if newcomer.status is RequestStatus.SWAPPED:
            needed = self.resume_need(newcomer, freed=freed)
        else:
            placements = self._place(newcomer)
            reused = {block for placed in placements for block in placed.cached}
            needed = self._need(placements) + len(reused & freed)
        return needed + headroom <= self.device.num_free + len(freed)

    # --- waiting → device ---

    def admission_need(self, request: Request) -> int:
        """Blocks to take for everything the request must compute, cached ones deducted.

        A cached block that nobody holds counts, because keeping it makes one block fewer free.
        """
        return self._need(self._place(request))

    def admit(self, request: Request) -> int:
        """Give the request blocks for all its tokens; returns the tokens found computed.

        Only called when ``admission_need`` blocks are free.
        """
        placements = self._place(request)
        found = 0
        leader = placements[0].sequence
        for placed in placements:  # keep what is found before anything is taken over it
            self.device.share(placed.cached)
            placed.sequence.block_table = placed.cached
        leader.block_table = leader.block_table + self.device.allocate(placements[0].num_new)
        for placed in placements[1:]:
            shared = leader.block_table[: placed.from_leader]
            self.device.share(shared)
            new = self.device.allocate(placed.num_new)
            placed.sequence.block_table = shared + placed.cached + new
        for placed in placements:
            known = placed.from_leader + len(placed.cached)
            placed.sequence.num_computed = known * self.block_size
            placed.sequence.num_published = known
            found += len(placed.cached) * self.block_size
        if any(p.from_leader * self.block_size > leader.num_computed for p in placements):
            request.prefix_owner = leader
        return found

    def _place(self, request: Request) -> list[_Placement]:
        """One placement per live sequence, the one that computes the shared prefix first.

        Samples that had diverged before they were dropped share the full blocks of their prompt
        again; were it otherwise, a request could need more blocks the second time.
        """
        live = request.live_sequences
        shared = request.num_prompt_tokens // self.block_size
        placements = []
        for number, seq in enumerate(live):
            from_leader = 0 if number == 0 else shared
            # One token at least is computed, because its logits are wanted.
            reusable = (seq.num_tokens - 1) // self.block_size
            cached = self._find_cached(seq, from_leader, reusable)
            num_new = self.blocks_for(seq.num_tokens) - from_leader - len(cached)
            placements.append(_Placement(seq, from_leader, cached, num_new))
        return placements

    def _find_cached(self, seq: Sequence, first: int, last: int) -> list[int]:
        """Device blocks whose content equals the sequence's blocks ``first … last - 1``."""
        if not (self.enable_prefix_caching and seq.request.use_prefix_cache):
            return []
        cached = []
        for address in seq.hash_full_blocks(last, self.block_size)[first:last]:
            block = self.device.find(address)
            if block is None:
                break
            cached.append(block)
        return cached

    def _need(self, placements: list[_Placement]) -> int:
        evictable = {
            block
            for placed in placements
            for block in placed.cached
            if self.device.ref_count(block) == 0
        }
        return sum(placed.num_new for placed in placements) + len(evictable)

    # --- on the device ---

    def growth(self, request: Request) -> int:
        """Blocks to take before the request can compute its next tokens.

        A new block where a sequence's next token starts one, and a private copy where it would
        write into a block that other samples read.
        """
        if request.n == 1:
            seq = request.sequences[0]
            return self.blocks_for(len(seq.tokens)) - len(seq.block_table)
        need = 0
        writers: Counter[int] = Counter()
        for seq in request.sequences:
            if seq.finish_reason is None:
                need += self.blocks_for(len(seq.tokens)) - len(seq.block_table)
                tail = self._shared_tail(seq)
                if tail is not None:
                    writers[seq.block_table[tail]] += 1
        return need + sum(
            min(count, self.device.ref_count(block) - 1) for block, count in writers.items()
        )

    def grow(self, request: Request) -> list[BlockMove]:
        """Take those blocks; returns the copies to make. Only called when they are free."""
        copies = []
        for seq in request.sequences:
            if seq.finish_reason is not None:
                continue
            missing = self.blocks_for(len(seq.tokens)) - len(seq.block_table)
            if missing:
                seq.block_table += self.device.allocate(missing)
            if request.n > 1 and (tail := self._shared_tail(seq)) is not None:
                shared = seq.block_table[tail]
                [own] = self.device.allocate(1)
                self.device.release([shared])
                seq.block_table[tail] = own
                copies.append(BlockMove(shared, own))
        return copies

    def append_blocks(self, seq: Sequence, count: int) -> None:
        """Give a decoding sequence blocks, its last one being full. Only called when they are
        free."""
        seq.block_table += self.device.allocate(count)
        self.publish(seq)

    def undo_copies(self, request: Request, copies: list[BlockMove]) -> list[BlockMove]:
        """Take back the request's own among ``copies``, not yet executed; returns the others.

        The source is still held: of the samples that shared it, the last writes in place.
        """
        source_of = {move.dst: move.src for move in copies}
        undone = set()
        for seq in request.sequences:
            for place, block in enumerate(seq.block_table):
                if block in source_of:
                    self.device.share([source_of[block]])
                    self.device.release([block])
                    seq.block_table[place] = source_of[block]
                    undone.add(block)
        return [move for move in copies if move.dst not in undone]

    def _shared_tail(self, seq: Sequence) -> int | None:
        """Place of the partly filled block the sequence writes next, if others hold it too."""
        if seq.request.prefix_owner is seq:
            return None  # computes the common prefix for the others, in the blocks they share
        place, offset = divmod(seq.num_computed, self.block_size)
        if offset == 0 or place >= len(seq.block_table):
            return None  # the next token starts a block of its own, or none is stored yet
        return place if self.device.ref_count(seq.block_table[place]) > 1 else None

    def relocate(self, running: Iterable[Request]) -> tuple[list[BlockMove], list[Request]]:
        """Move stranded blocks into free ones. Only called when there are as many.

        Returns:
            The moves to make, none for blocks without anything computed in them, and the requests
            whose tables have changed.
        """
        limit = self.device.limit
        new_of: dict[int, int] = {}
        stored: set[int] = set()
        moved: dict[Request, None] = {}
        for request in running:
            for seq in request.sequences:
                num_stored = self.blocks_for(seq.num_computed)
                for place, block in enumerate(seq.block_table):
                    if block < limit:
                        continue
                    if block not in new_of:
                        new_of[block] = self.device.relocate(block)
                    if place < num_stored:
                        stored.add(block)
                    seq.block_table[place] = new_of[block]
                    moved[request] = None
        moves = [BlockMove(block, new) for block, new in new_of.items() if block in stored]
        return moves, list(moved)

    def fork(self, request: Request) -> None:
        """Let the other samples share what the first has computed of the prompt."""
        first, *others = request.sequences
        for seq in others:
            seq.block_table = list(first.block_table)
            seq.num_computed = seq.most_computed = first.num_computed
            seq.num_published = first.num_published
            seq.block_hashes = list(first.block_hashes)
            self.device.share(seq.block_table)

    def publish(self, seq: Sequence) -> None:
        """Make the sequence's full blocks findable by their content."""
        full = seq.num_computed // self.block_size
        if full > seq.num_published and self.enable_prefix_caching:
            new = slice(seq.num_published, full)
            hashes = seq.hash_full_blocks(full, self.block_size)
            self.device.publish(seq.block_table[new], hashes[new])
            seq.num_published = full

    # --- device ↔ swap pool ---

    def can_park(self, request: Request, *, spare: int = 0) -> bool:
        """Whether the swap pool can take what the request has computed.

        ``spare`` blocks of it are held, but could be given up at once.

        A request that has computed nothing has nothing to park. One whose samples still wait for
        their common prefix to be computed again cannot be parked: their KV has a gap.
        """
        stored = self._stored_blocks(request)
        room = self.swap.num_free + spare
        return bool(stored) and request.prefix_owner is None and len(stored) <= room

    def stored_blocks(self, request: Request) -> int:
        """Different device blocks with something computed in them: what parking would move."""
        return len(self._stored_blocks(request))

    def park(self, request: Request) -> list[BlockMove]:
        """Move what is computed to the swap pool and leave the device; returns the moves."""
        stored = self._stored_blocks(request)
        slot_of = dict(zip(stored, self.swap.allocate(len(stored)), strict=True))
        moves = [BlockMove(block, slot) for block, slot in slot_of.items()]
        placed: set[int] = set()
        for seq in request.live_sequences:
            table = seq.block_table[: self.blocks_for(seq.num_computed)]
            seq.swap_table = [slot_of[block] for block in table]
            self.swap.share(slot for slot in seq.swap_table if slot in placed)
            placed.update(seq.swap_table)
        self._leave_device(request)
        return moves

    def leaving_load(self, request: Request) -> LeavingLoad:
        """What moving the request out and back would take, against computing it again.

        What others hold stays on the device; with prefix caching it is found there by either way.
        """
        stored = self._stored_blocks(request)
        own = Counter(block for seq in request.live_sequences for block in seq.block_table)
        kept = sum(self.device.ref_count(block) > own[block] for block in stored)
        kept *= self.enable_prefix_caching
        positions = sum(seq.num_computed for seq in request.live_sequences)
        found = kept if request.use_prefix_cache else 0
        tokens = min(positions, (len(stored) - found) * self.block_size)
        return LeavingLoad(len(stored), len(stored) - kept, tokens)

    def _stored_blocks(self, request: Request) -> list[int]:
        """Different device blocks with something computed in them, in table order."""
        return list(
            dict.fromkeys(
                block
                for seq in request.live_sequences
                for block in seq.block_table[: self.blocks_for(seq.num_computed)]
            )
        )

    def resume_need(self, request: Request, *, freed: Collection[int] = ()) -> int:
        """Device blocks to take for a parked request: its own, and those of its next tokens.

        ``freed`` are held, but will not be.
        """
        need = 0
        seen: set[int] = set()
        writers: Counter[int] = Counter()
        for seq in request.live_sequences:
            need += self.blocks_for(seq.num_tokens) - len(seq.swap_table)
            for place, slot in enumerate(seq.swap_table):
                if slot not in seen:
                    seen.add(slot)
                    found = self._find_parked(seq, place)
                    need += found is None or found in freed or self.device.ref_count(found) == 0
            place, offset = divmod(seq.num_computed, self.block_size)
            if offset:
                writers[seq.swap_table[place]] += 1
        return need + sum(count - 1 for count in writers.values())

    def resume(self, request: Request) -> list[BlockMove]:
        """Bring a parked request back; returns the moves for what is not still on the device.

        Only called when ``resume_need`` blocks are free. The blocks of the next tokens are left
        to ``grow``.
        """
        block_of: dict[int, int] = {}
        missing: list[tuple[int, Hashable | None]] = []
        for seq in request.live_sequences:
            for place, slot in enumerate(seq.swap_table):
                if slot in block_of:
                    continue
                found = self._find_parked(seq, place)
                if found is None:
                    block_of[slot] = -1  # named below, once all that is found has been kept
                    missing.append((slot, self._address(seq, place)))
                else:
                    self.device.share([found])
                    block_of[slot] = found
        moves = []
        new_blocks = self.device.allocate(len(missing))
        for (slot, _), block in zip(missing, new_blocks, strict=True):
            block_of[slot] = block
            moves.append(BlockMove(slot, block))
        placed: set[int] = set()
        for seq in request.live_sequences:
            seq.block_table = [block_of[slot] for slot in seq.swap_table]
            self.device.share(block_of[slot] for slot in seq.swap_table if slot in placed)
            placed.update(seq.swap_table)
            self._leaving += seq.swap_table
            seq.swap_table = []
        self.leave_disk(request)
        # Findable when the moves are done: a step that breaks off must not leave a false promise.
        self._arriving += [
            (block, address)
            for (_, address), block in zip(missing, new_blocks, strict=True)
            if address is not None
        ]
        return moves

    def _address(self, seq: Sequence, place: int) -> Hashable | None:
        """Content address of a stored block; None if it is not full or caching is off."""
        if not self.enable_prefix_caching or (place + 1) * self.block_size > seq.num_computed:
            return None
        return seq.hash_full_blocks(place + 1, self.block_size)[place]

    def _find_parked(self, seq: Sequence, place: int) -> int | None:
        """The device block that still holds the content of a parked one."""
        address = self._address(seq, place)
        return None if address is None else self.device.find(address)

    def settle(self) -> None:
        """The step's moves are done: swap blocks that were read may be used again, and device
        blocks that were filled can be found."""
        leaving, self._leaving = self._leaving, []
        arriving, self._arriving = self._arriving, []
        self.swap.release(leaving)
        for block, address in arriving:
            if self.device.ref_count(block):  # else its request was aborted in the meantime
                self.device.publish([block], [address])

    # --- leaving ---

    def drop(self, request: Request) -> None:
        """Forget the request's KV; its tokens stay."""
        self._leave_device(request)
        for seq in request.live_sequences:
            seq.most_computed = max(seq.most_computed, seq.num_computed)
            seq.num_computed = seq.num_published = 0
        request.prefix_owner = None

    def lose(self, request: Request) -> None:
        """Forget a parked request's KV; its tokens stay."""
        self.leave_swap(request)
        self.leave_disk(request)
        self.drop(request)

    def leave_swap(self, request: Request) -> None:
        """Give up a parked request's place in the swap pool."""
        for seq in request.live_sequences:
            self.swap.release(seq.swap_table)
            seq.swap_table = []

    def leave_disk(self, request: Request) -> None:
        """Give up a parked request's place on disk."""
        for seq in request.live_sequences:
            self.disk.release(seq.disk_table)
            seq.disk_table = []

    def release(self, seq: Sequence) -> None:
        """Give up everything a sequence holds, in any pool."""
        if seq.request.prefix_owner is seq:
            self._hand_prefix_over(seq)
        if seq.block_table:
            self.publish(seq)
        self.device.release(seq.block_table)
        self.swap.release(seq.swap_table)
        self.disk.release(seq.disk_table)
        seq.block_table, seq.swap_table, seq.disk_table = [], [], []

    def _hand_prefix_over(self, owner: Sequence) -> None:
        """Another sample goes on with computing the prefix that all of them share."""
        heir = next(iter(owner.request.live_sequences), None)
        owner.request.prefix_owner = heir
        if heir is not None:
            heir.num_computed = owner.num_computed
            heir.num_published = min(heir.num_published, owner.num_published)

    def _leave_device(self, request: Request) -> None:
        for seq in request.live_sequences:
            self.publish(seq)
            self.device.release(seq.block_table)
            seq.block_table = []

    def check_integrity(
        self,
        requests: list[Request],
        *,
        moving_swap: Iterable[int] = (),
        moving_disk: Iterable[int] = (),
    ) -> None:
        """Verify all pools, and that reference counts equal what the tables hold.

        Args:
            requests: All that are alive.
            moving_swap, moving_disk: Blocks that transfers hold, beside the tables.

        Raises:
            AssertionError: They do not.
        """
        for pool in (self.device, self.swap, self.disk):
            pool.check_integrity()
        on_device = Counter(b for r in requests for seq in r.sequences for b in seq.block_table)
        in_swap = Counter(b for r in requests for seq in r.sequences for b in seq.swap_table)
        in_swap.update(self._leaving)
        in_swap.update(moving_swap)
        on_disk = Counter(b for r in requests for seq in r.sequences for b in seq.disk_table)
        on_disk.update(moving_disk)
        for pool, tables in (
            (self.device, on_device),
            (self.swap, in_swap),
            (self.disk, on_disk),
        ):
            holders = pool.holders()
            assert holders == tables, (
                f"blocks count other holders than stand in the tables, "
                f"as (block, count): {sorted(holders.items() ^ tables.items())}"
            )
