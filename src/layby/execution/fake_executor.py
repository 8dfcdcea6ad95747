"""An executor without a model, for tests: imitates the pools and checks every plan against them.

It needs nothing but Python. Its pools remember, for every token slot, which token of which context
was written there; block moves carry that along as real ones carry bytes. Before a row "attends",
the blocks behind it are compared with what the sequence ought to find there. A scheduler that
moves the wrong block, frees one too early or trusts a stale cache is caught at that step.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from layby.execution.executor import BlockFormat, PositionLogprobs, StepResult, TokenLogprob
from layby.sampling_params import SamplingParams
from layby.scheduling.kept import Tier
from layby.scheduling.plan import (
    BlockMove,
    ScheduledSequence,
    StepPlan,
    Transfer,
    TransferEnd,
)
from layby.scheduling.request import Sequence

Script = Mapping[str, Seq[int]] | Callable[[Sequence], int | None]
"""Forced tokens: output token ids by request id, or the next one for a sequence (None: no wish)."""

_MASK = 2**64 - 1
_SLOT = struct.Struct("<qQ")
_UNWRITTEN = -1
"""Position of an exported slot in which nothing was stored."""


class _Slot(NamedTuple):
    """What one token slot holds. ``digest`` stands for the token and everything before it."""

    position: int
    digest: int


_Block = list[_Slot]
"""The written slots of a block, from the first; each continues the context of the one before."""


class FakeExecutor:
    """Imitates an executor, deterministically.

    A token is a pure function of the tokens before it, the request's seed, the sample's index and
    the position: neither batch mates nor parking can change it. Tokens that would end a sequence
    come only from a script.

    Args:
        block_size: Tokens per block.
        num_blocks, num_swap_blocks, num_disk_blocks: Sizes of the pools, checked if given.
        transfer_steps: A transfer between RAM and disk ends with so many steps after its own.
        vocab_size: Tokens are below this; at least 2 more than a request has stop tokens.
        script: Forces tokens; see ``Script``. A list that has run out forces nothing.

    Attributes:
        failing_requests: Request ids; each fails alone in every step that samples it.
        failing_steps: Step number → the exception to raise in it.
        failing_transfers: Transfer number → the fault it ends with.
        steps: Steps executed.
        moved_blocks: Blocks swapped out, swapped in, relocated and copied so far.
        computed_tokens: Rows computed so far.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int | None = None,
        num_swap_blocks: int | None = None,
        num_disk_blocks: int | None = None,
        transfer_steps: int = 1,
        vocab_size: int = 256,
        script: Script | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.script = script
        self.failing_requests: set[str] = set()
        self.failing_steps: dict[int, Exception] = {}
        self.failing_transfers: dict[int, str] = {}
        self.steps = 0
        self.moved_blocks = 0
        self.computed_tokens = 0
        self._device = _Pool("device", num_blocks)
        self._swap = _Pool("swap", num_swap_blocks)
        self._disk = _Pool("disk", num_disk_blocks)
        self._transfer_steps = transfer_steps
        self._transfers: list[_Underway] = []
        self._contexts: dict[str, dict[int, _Context]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``.

        Raises:
            AssertionError: The plan is wrong: it names sequence, position and block.
        """
        if plan.step in self.failing_steps:
            raise self.failing_steps[plan.step]
        self.steps += 1
        self._device.grow(plan.num_blocks)
        self._move(plan.swap_out, self._device, self._swap)
        self._move(plan.relocate, self._device, self._device)
        self._move(plan.swap_in, self._swap, self._device)
        self._move(plan.copy, self._device, self._device)
        self._device.shrink(plan.num_blocks)
        for item in plan.scheduled:
            self._write(item)
        # Only now: rows may attend to what other sequences store in the same step.
        for item in plan.scheduled:
            self._check(item)
        result = self._answer(plan)
        result.transfer_ends = self._end_transfers()
        self._begin_transfers(plan.demote, self._swap, self._disk)
        self._begin_transfers(plan.promote, self._disk, self._swap)
        return result

    @property
    def block_format(self) -> BlockFormat:
        """See ``Executor``."""
        return BlockFormat("imitated", self.block_size * _SLOT.size)

    def export_blocks(self, tier: Tier, blocks: Seq[int]) -> memoryview:
        """See ``Executor``."""
        content = bytearray()
        for number in blocks:
            block = self._pool(tier).read(number)
            content += b"".join(_SLOT.pack(*slot) for slot in block)
            content += _SLOT.pack(_UNWRITTEN, 0) * (self.block_size - len(block))
        return memoryview(content)

    def import_blocks(self, tier: Tier, blocks: Seq[int], content: memoryview) -> None:
        """See ``Executor``."""
        assert tier is not Tier.DEVICE, "blocks are imported into RAM or onto disk"
        slots = [_Slot(*values) for values in _SLOT.iter_unpack(content)]
        for place, number in enumerate(blocks):
            block = slots[place * self.block_size : (place + 1) * self.block_size]
            self._pool(tier).write(number, [s for s in block if s.position != _UNWRITTEN])

    def _pool(self, tier: Tier) -> _Pool:
        return {Tier.DEVICE: self._device, Tier.RAM: self._swap, Tier.DISK: self._disk}[tier]

    def release(self, request_id: str) -> None:
        """See ``Executor``."""
        self._contexts.pop(request_id, None)

    def close(self) -> None:
        """See ``Executor``."""
        self._contexts.clear()

    def _move(self, moves: list[BlockMove], source: _Pool, target: _Pool) -> None:
        contents = [list(source.read(move.src)) for move in moves]
        for move, content in zip(moves, contents, strict=True):
            target.write(move.dst, content)
        self.moved_blocks += len(moves)

    def _begin_transfers(self, transfers: Seq[Transfer], source: _Pool, target: _Pool) -> None:
        for transfer in transfers:
            for move in transfer.moves:
                target.write(move.dst, [])  # who reads it before the end finds nothing
            until = self.steps + self._transfer_steps
            self._transfers.append(_Underway(until, transfer, source, target))

    def _end_transfers(self) -> list[TransferEnd]:
        """Only now is read and written: nobody else may have touched the blocks meanwhile."""
        due = [underway for underway in self._transfers if underway.until_step <= self.steps]
        self._transfers = [one for one in self._transfers if one.until_step > self.steps]
        ends = []
        for _, transfer, source, target in due:
            fault = self.failing_transfers.get(transfer.number, "")
            if not fault:
                for move in transfer.moves:
                    target.write(move.dst, list(source.read(move.src)))
            ends.append(TransferEnd(transfer.number, fault))
        return ends

    def _write(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        end = item.start + item.num_tokens
        assert item.num_tokens > 0, f"{sequence!r} is scheduled for {item.num_tokens} tokens"
        assert end <= len(sequence.tokens), (
            f"{sequence!r} is scheduled to position {end - 1}, beyond its tokens"
        )
        assert not item.samplers or end == len(sequence.tokens), (
            f"{sequence!r} is sampled at position {end - 1}, which is not its last token"
        )
        assert len(sequence.block_table) * self.block_size >= end, (
            f"{sequence!r} has {len(sequence.block_table)} blocks, too few for position {end - 1}"
        )
        digests = self._context(sequence).digests()
        for position in range(item.start, end):
            index, offset = divmod(position, self.block_size)
            block = self._device.read(sequence.block_table[index])
            slot = _Slot(position, digests[position])
            if offset < len(block) and block[offset] == slot:
                continue  # computed again with the same result
            # What followed in this block belonged to another context, and no one may rely on it.
            del block[offset:]
            assert len(block) == offset, (
                f"{sequence!r} writes position {position} into slot {offset} of block "
                f"{sequence.block_table[index]}, but only {len(block)} slots before it are written"
            )
            block.append(slot)
        self.computed_tokens += item.num_tokens

    def _check(self, item: ScheduledSequence) -> None:
        """Every position up to the item's end must be where its block table says.

        A block is a run of one context, so its last slot stands for the whole block.
        """
        sequence = item.sequence
        end = item.start + item.num_tokens
        digests = self._context(sequence).digests()
        for index in range(-(-end // self.block_size)):
            number = sequence.block_table[index]
            last = min(end, (index + 1) * self.block_size) - 1
            block = self._device.read(number)
            offset = last - index * self.block_size
            found = block[offset] if offset < len(block) else None
            assert found == _Slot(last, digests[last]), (
                f"{sequence!r} needs the KV of position {last} in slot {offset} of device block "
                f"{number}, but that slot "
                + ("was never written" if found is None else f"holds other KV ({found})")
            )
            # The run must also be this sequence's from its first slot on.
            first = index * self.block_size
            assert block[0] == _Slot(first, digests[first]), (
                f"{sequence!r} needs the KV of position {first} in slot 0 of device block "
                f"{number}, but that slot holds other KV ({block[0]})"
            )

    def _answer(self, plan: StepPlan) -> StepResult:
        result = StepResult([])
        samplers = [seq for item in plan.scheduled for seq in item.samplers]
        logprobs: list[PositionLogprobs | None] = []
        for sequence in samplers:
            request = sequence.request
            if request.request_id in self.failing_requests:
                result.failures[request.request_id] = "the fake executor was told to fail it"
                result.tokens.append(0)
                logprobs.append(None)
                continue
            token = self._next_token(sequence)
            result.tokens.append(token)
            count = _params(sequence).logprobs
            logprobs.append(None if count is None else self._report(token, count))
        if any(report is not None for report in logprobs):
            result.logprobs = logprobs
        for item in plan.scheduled:
            count = _params(item.sequence).prompt_logprobs
            if count is not None and item.sequence.index == 0:
                self._report_prompt(item, count, result)
        return result

    def _next_token(self, sequence: Sequence) -> int:
        forced = self._forced(sequence)
        if forced is not None:
            return forced
        digest = self._context(sequence).digests()[-1]
        seed = _params(sequence).seed or 0
        number = _mix(digest, seed, sequence.index, len(sequence.tokens))
        stops = sequence.request.stop_token_ids
        for offset in range(len(stops) + 1):
            token = (number + offset) % self.vocab_size
            if token not in stops:
                return token
        raise ValueError(f"all of the {self.vocab_size} tokens end {sequence!r}")

    def _forced(self, sequence: Sequence) -> int | None:
        if self.script is None:
            return None
        if callable(self.script):
            return self.script(sequence)
        wanted = self.script.get(sequence.request.request_id, ())
        place = sequence.num_output_tokens
        return wanted[place] if place < len(wanted) else None

    def _report(self, token: int, count: int) -> PositionLogprobs:
        """Made-up log-probabilities: the chosen token leads, its neighbours follow."""
        count = min(count, self.vocab_size)
        top = tuple(
            TokenLogprob((token + place) % self.vocab_size, -0.5 * (place + 1), place + 1)
            for place in range(count)
        )
        return PositionLogprobs(TokenLogprob(token, -0.5, 1), top)

    def _report_prompt(self, item: ScheduledSequence, count: int, result: StepResult) -> None:
        sequence = item.sequence
        end = min(item.start + item.num_tokens, sequence.num_prompt_tokens - 1)
        if end > item.start:
            result.prompt_logprobs[sequence.request.request_id] = [
                (position, self._report(sequence.tokens[position], count))
                for position in range(item.start + 1, end + 1)
            ]

    def _context(self, sequence: Sequence) -> _Context:
        of_request = self._contexts.setdefault(sequence.request.request_id, {})
        context = of_request.get(sequence.index)
        if context is None or context.sequence is not sequence:
            context = of_request[sequence.index] = _Context(sequence)
        return context


class _Pool:
    """Blocks by number; one that was never written is empty."""

    def __init__(self, name: str, num_blocks: int | None) -> None:
        self._name, self._num_blocks = name, num_blocks
        self._blocks: dict[int, _Block] = {}

    def read(self, number: int) -> _Block:
        """The block itself, to be changed in place."""
        self._check(number)
        return self._blocks.setdefault(number, [])

    def write(self, number: int, content: _Block) -> None:
        self._check(number)
        self._blocks[number] = content

    def grow(self, num_blocks: int | None) -> None:
        """Let there be so many blocks, if there are fewer; None: it stays as it is."""
        if num_blocks is not None and self._num_blocks is not None:
            self._num_blocks = max(num_blocks, self._num_blocks)

    def shrink(self, num_blocks: int | None) -> None:
        """Drop the blocks from this number on; None: it stays as it is."""
        if num_blocks is not None:
            self._num_blocks = num_blocks
            self._blocks = {n: block for n, block in self._blocks.items() if n < num_blocks}

    def _check(self, number: int) -> None:
        size = self._num_blocks
        exists = number >= 0 if size is None else 0 <= number < size
        assert exists, f"there is no block {number} in the {self._name} pool" + (
            "" if size is None else f" of {size}"
        )


class _Underway(NamedTuple):
    """A transfer, and the step with which it ends."""

    until_step: int
    transfer: Transfer
    source: _Pool
    target: _Pool


class _Context:
    """Running digests of one sequence's tokens: entry p covers positions 0 … p."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._digests: list[int] = []

    def digests(self) -> list[int]:
        """Up to date with the sequence's tokens; costs only what is new."""
        digests = self._digests
        last = digests[-1] if digests else 0
        for token in self.sequence.tokens[len(digests) :]:
            last = _mix(last, token)
            digests.append(last)
        return digests


def _params(sequence: Sequence) -> SamplingParams:
    payload = sequence.request.payload
    return payload if isinstance(payload, SamplingParams) else _DEFAULTS


_DEFAULTS = SamplingParams(max_tokens=None)


def _mix(*values: int) -> int:
    """A 64-bit digest of integers: SplitMix64's finaliser (Steele, Lea & Flood 2014), chained."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
