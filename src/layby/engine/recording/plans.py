"""What a recording keeps of a step's plan: what was decided, and a digest of everything else."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterable

from layby.engine.recording.events import Step
from layby.engine.recording.numbers import HASH_BYTES, bounded
from layby.scheduling import BlockMove, Request, StepPlan, Transfer


def is_steady(plan: StepPlan) -> bool:
    """Whether nothing was decided: everybody who runs decodes, and nobody comes or goes."""
    return plan.num_steady == len(plan.scheduled) and not (
        plan.admitted
        or plan.resumed
        or plan.preempted
        or plan.swap_out
        or plan.relocate
        or plan.swap_in
        or plan.copy
        or plan.num_blocks
        or plan.class_changes
        or plan.demote
        or plan.promote
        or plan.lost
    )


class PlanDigest:
    """A short digest of plans: what is computed and in which blocks, all moves and transfers, the
    pool's size, who was let in with what wishes, whose class changed, who was given up, and the
    time."""

    __slots__ = ("_hash", "_is_new")

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=HASH_BYTES)
        self._is_new = True

    def add(self, plan: StepPlan) -> None:
        """Take in a plan, as ``schedule`` returned it.

        Of a steady decode the last block is enough: the others are those of the step before. Plans
        that are added to others decode the same sequences, each a position further.
        """
        steady = plan.num_steady
        numbers = [plan.step, steady, len(plan.scheduled)]
        sequences = [item.sequence for item in plan.scheduled[:steady]]
        numbers += [seq.block_table[-1] for seq in sequences]
        if self._is_new:
            self._is_new = False
            numbers += [seq.request.order for seq in sequences]
            numbers += [item.start for item in plan.scheduled[:steady]]
        for item in plan.scheduled[steady:]:
            seq = item.sequence
            numbers += (seq.request.order, seq.index, item.start, item.num_tokens)
            numbers += (len(item.samplers), len(seq.block_table))
            numbers += seq.block_table
        numbers.append(plan.num_blocks or 0)
        for moves in (plan.swap_out, plan.relocate, plan.swap_in, plan.copy):
            numbers.append(len(moves))
            for move in moves:
                numbers += move
        times = [plan.now]
        for request in plan.admitted:
            assert request.arrival_time is not None
            times.append(request.arrival_time)
            numbers += (request.order, request.num_prompt_tokens, request.max_tokens, request.n)
            numbers += (bounded(request.priority), bounded(request.min_tokens))
        for rows in (class_rows(plan), _transfers(plan.demote), _transfers(plan.promote)):
            numbers.append(len(rows))
            for row in rows:
                numbers.append(len(row))
                numbers += row
        numbers += [request.order for request in plan.lost]
        self._hash.update(struct.pack(f"<{len(times)}d{len(numbers)}q", *times, *numbers))

    def text(self) -> str:
        """The digest of all that was added."""
        return base64.b64encode(self._hash.digest()).decode()


def step_event(plan: StepPlan) -> Step:
    """What a step decided, without its time."""
    digest = PlanDigest()
    digest.add(plan)
    return Step(
        step=plan.step,
        times=[],
        num_steady=plan.num_steady,
        scheduled=[
            [item.sequence.request.order, item.sequence.index, item.start, item.num_tokens]
            for item in plan.scheduled[plan.num_steady :]
        ],
        admitted=[request.order for request in plan.admitted],
        resumed=[request.order for request in plan.resumed],
        preempted=[request.order for request, _ in plan.preempted],
        modes=[mode.value for _, mode in plan.preempted],
        decisions=_weighings(plan),
        swap_out=_flat(plan.swap_out),
        relocated=_flat(plan.relocate),
        swap_in=_flat(plan.swap_in),
        copies=_flat(plan.copy),
        num_blocks=plan.num_blocks or 0,
        classes=class_rows(plan),
        demoted=_transfers(plan.demote),
        promoted=_transfers(plan.promote),
        lost=[request.order for request in plan.lost],
        digest=digest.text(),
    )


def class_rows(plan: StepPlan) -> list[list[int]]:
    """The plan's changes of class: request, class before, class after."""
    return [
        [change.request.order, bounded(change.before), bounded(change.after)]
        for change in plan.class_changes
    ]


def _weighings(plan: StepPlan) -> list[list[float]]:
    """The plan's choices between the two ways out, with what spoke for them."""
    numbers = {request.request_id: request.order for request, _ in plan.preempted}
    return [
        [
            numbers[decision.request_id],
            decision.load.blocks_out,
            decision.load.blocks_in,
            decision.load.tokens,
            decision.swap_s,
            decision.recompute_s,
        ]
        for decision in plan.decisions
    ]


def _flat(moves: Iterable[BlockMove]) -> list[int]:
    return [block for move in moves for block in move]


def _transfers(transfers: Iterable[Transfer]) -> list[list[int]]:
    return [[transfer.number, *_flat(transfer.moves)] for transfer in transfers]


def ending(request: Request) -> list[int]:
    """How a request ended: its number, and the output tokens of each of its samples."""
    return [request.order, *(seq.num_output_tokens for seq in request.sequences)]
