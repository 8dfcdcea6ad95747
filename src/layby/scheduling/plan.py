"""The scheduler's answer for one step: who runs, how far, and which blocks move first."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from layby.scheduling.request import Request, Sequence

if TYPE_CHECKING:
    from layby.scheduling.classes import ClassChange
    from layby.scheduling.costs import Decision


class BlockMove(NamedTuple):
    """Copy one block's content. ``src`` and ``dst`` index the pools named by the move's list."""

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The blocks of one parked request on their way between RAM and disk.

    It starts when the step's other moves are done and takes as long as it takes, beside the steps
    that follow. Nobody else touches its blocks in either pool until its end has been reported.

    Attributes:
        number: Unique among transfers; their ends are reported by it.
        moves: Swap block → disk block, or back; the list that holds it says which.
    """

    number: int
    moves: tuple[BlockMove, ...]


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """A transfer is over.

    Attributes:
        number: Which.
        fault: Why it failed, in a word (``eio``, ``enospc``, ``short``, ``checksum``, ``other``);
            empty if it did not. What a failed transfer has written is worth nothing; what it was
            to read is as it was.
    """

    number: int
    fault: str = ""


class PreemptionMode(Enum):
    """How a running request leaves the device."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's share of the step.

    The forward pass computes positions ``start … start + num_tokens - 1`` of the sequence, writing
    their KV through ``sequence.block_table``. If ``samplers`` is not empty, the logits of the last
    of these positions are sampled once for each sequence in it: for the sequence itself, or, at
    the end of a prompt with ``n > 1``, for all samples of the request.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samplers: tuple[Sequence, ...]


@dataclass(slots=True)
class StepPlan:
    """One step: moves first, in the order ``swap_out``, ``relocate``, ``swap_in``, ``copy``; then
    the forward pass.

    Beside it, transfers between RAM and disk begin; they outlast the step.

    Within one list all reads come before all writes, so a block may be the source of one move and
    the destination of another.

    Attributes:
        step: Number of the step, from 1.
        now: The scheduler's clock when the step was decided, in seconds.
        scheduled: What the forward pass computes: first who goes on as before, then the others in
            running order.
        swap_out: Device block → swap block.
        relocate: Device block → device block, out of the end of a pool that shrinks.
        swap_in: Swap block → device block.
        copy: Device block → device block (copy-on-write).
        next_in: The parked request that comes back next, if it lies in the swap pool: its blocks
            may be copied ahead.
        num_blocks: The device pool's new size, None if it stays. Blocks that come with it may be
            used by this step's moves; those that go are free once its moves are done.
        demote: Transfers that begin, swap block → disk block.
        promote: Transfers that begin, disk block → swap block.
        preempted: Requests that left the device in this step, and how.
        decisions: Where the costs of both ways out were compared: what spoke for the one taken.
        resumed: Requests that came back from the swap pool in this step.
        lost: Parked requests whose KV was given up for lack of room; they wait again.
        admitted: Requests that came from the waiting queue in this step.
        paused: Running sequences that sit the step out, for the sake of more urgent work.
        class_changes: Requests whose class changed since the step before, up to this decision.
        num_steady: So many of the first in ``scheduled`` go on decoding as in the step before.
        num_tokens: Tokens the forward pass computes.
        num_samples: Tokens to be sampled: the length of the list that ``Scheduler.update`` takes.
    """

    step: int
    now: float
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    swap_out: list[BlockMove] = field(default_factory=list)
    relocate: list[BlockMove] = field(default_factory=list)
    swap_in: list[BlockMove] = field(default_factory=list)
    copy: list[BlockMove] = field(default_factory=list)
    next_in: Request | None = None
    num_blocks: int | None = None
    demote: list[Transfer] = field(default_factory=list)
    promote: list[Transfer] = field(default_factory=list)
    preempted: list[tuple[Request, PreemptionMode]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    lost: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    class_changes: list[ClassChange] = field(default_factory=list)
    num_steady: int = 0
    num_tokens: int = 0
    num_samples: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do at all."""
        moves = self.swap_out or self.relocate or self.swap_in or self.copy
        transfers = self.demote or self.promote
        return not (self.scheduled or moves or transfers) and self.num_blocks is None
