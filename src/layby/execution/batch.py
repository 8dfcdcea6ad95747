"""The flat batch of one step, laid out for the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from operator import is_

import numpy as np
from numpy.typing import NDArray

from layby.models.network import FlatBatch
from layby.scheduling.plan import ScheduledSequence, StepPlan
from layby.scheduling.request import Sequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of the forward pass, and what is to be sampled of its outcome.

    Attributes:
        flat: The rows.
        items: What is computed, in the order of its rows, which differs from the plan's.
        samplers: Whom to sample for, in the order of rows.
        sample_rows: ``[len(samplers)]`` int64, the row whose logits each one is sampled from.
        sample_places: ``[len(samplers)]`` int64, each one's place among the plan's samplers.
    """

    flat: FlatBatch
    items: list[ScheduledSequence]
    samplers: list[Sequence]
    sample_rows: NDArray[np.int64]
    sample_places: NDArray[np.int64]


class BatchBuilder:
    """Lays steps out for the model, each by its difference from the one before.

    While nobody comes or goes, a decode step differs from the last by one position per sequence,
    and by a block here and there: the arrays are carried on and Python looks at no block table.

    Args:
        block_size: Tokens per KV block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._last: StepBatch | None = None
        self._turns: list[ScheduledSequence] = []  # of the last step, in the plan's order

    def build(self, plan: StepPlan, *, without: frozenset[str] = frozenset()) -> StepBatch:
        """The batch of a step, less the requests whose ids are ``without``.

        Raises:
            ValueError: A block table does not reach to the end of what is to be computed.
        """
        turns = plan.scheduled if plan.num_steady == len(plan.scheduled) and not without else []
        goes_on = len(turns) == len(self._turns) and all(map(is_, turns, self._turns))
        if turns and goes_on and self._last is not None:
            self._last = self._next(self._last)
        else:
            self._last = build_batch(plan.scheduled, block_size=self.block_size, without=without)
        self._turns = turns
        return self._last

    def _next(self, last: StepBatch) -> StepBatch:
        """One decode step on, with the same sequences."""
        size, flat = self.block_size, last.flat
        positions = flat.positions + 1
        slots = flat.slots + 1
        tables = flat.block_tables
        for row in np.flatnonzero(positions % size == 0).tolist():
            place = int(positions[row]) // size
            if place == tables.shape[1]:
                tables = np.pad(tables, ((0, 0), (0, 1)))
            table = last.items[row].sequence.block_table
            if len(table) <= place:
                raise ValueError(_too_short(last.items[row], place + 1))
            tables[row, place] = table[place]
            slots[row] = table[place] * size
        return replace(
            last,
            flat=replace(
                flat,
                token_ids=np.array([item.sequence.tokens[-1] for item in last.items], np.int64),
                positions=positions,
                slots=slots,
                starts=positions.astype(np.int32),
                block_tables=tables,
            ),
        )


def build_batch(
    planned: list[ScheduledSequence], *, block_size: int, without: frozenset[str] = frozenset()
) -> StepBatch:
    """Lay out a step's sequences: equally many rows side by side, longest context first.

    Python's work is linear in sequences and blocks; tokens are handled by numpy.
    """
    order = [
        index
        for index, item in enumerate(planned)
        if not without or item.sequence.request.request_id not in without
    ]
    order.sort(key=lambda index: (planned[index].num_tokens, -planned[index].start))
    items = [planned[index] for index in order]
    counts = np.array([item.num_tokens for item in items], dtype=np.int64)
    starts = np.array([item.start for item in items], dtype=np.int64)
    first_rows = np.cumsum(counts) - counts
    num_rows = int(counts.sum())
    positions = np.arange(num_rows) - np.repeat(first_rows - starts, counts)
    token_ids = np.fromiter(
        chain.from_iterable(
            item.sequence.tokens[item.start : item.start + item.num_tokens] for item in items
        ),
        dtype=np.int64,
        count=num_rows,
    )
    tables = _block_tables(items, starts + counts, block_size)
    row_items = np.repeat(np.arange(len(items)), counts)
    blocks = tables[row_items, positions // block_size].astype(np.int64)
    samples = np.array([len(item.samplers) for item in items], dtype=np.int64)
    first_places = np.cumsum([0, *(len(item.samplers) for item in planned)])[order]
    first_samples = np.cumsum(samples) - samples
    return StepBatch(
        flat=FlatBatch(
            token_ids=token_ids,
            positions=positions,
            slots=blocks * block_size + positions % block_size,
            first_rows=first_rows.astype(np.int32),
            num_rows=counts.astype(np.int32),
            starts=starts.astype(np.int32),
            block_tables=tables,
            block_size=block_size,
        ),
        items=items,
        samplers=[sampler for item in items for sampler in item.samplers],
        sample_rows=np.repeat(first_rows + counts - 1, samples),
        sample_places=np.arange(int(samples.sum()))
        + np.repeat(first_places - first_samples, samples),
    )


def _block_tables(
    items: list[ScheduledSequence], lengths: np.ndarray, block_size: int
) -> np.ndarray:
    """Blocks that hold each item's context, ``[items, longest]`` int32, 0 beyond it.

    Raises:
        ValueError: A block table does not reach to the end of what is to be computed.
    """
    needed = -(-lengths // block_size)
    for item, count in zip(items, needed.tolist(), strict=True):
        if len(item.sequence.block_table) < count:
            raise ValueError(_too_short(item, count))
    used = np.arange(needed.max(initial=0)) < needed[:, None]
    tables = np.zeros(used.shape, dtype=np.int32)
    tables[used] = np.fromiter(
        chain.from_iterable(
            item.sequence.block_table[:count]
            for item, count in zip(items, needed.tolist(), strict=True)
        ),
        dtype=np.int32,
        count=int(needed.sum()),
    )
    return tables


def _too_short(item: ScheduledSequence, needed: int) -> str:
    return (
        f"{item.sequence!r} has {len(item.sequence.block_table)} blocks, but positions up to "
        f"{item.start + item.num_tokens - 1} need {needed}"
    )
