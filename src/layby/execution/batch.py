"""The flat batch of one step, laid out for the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from layby.models.network import FlatBatch
from layby.scheduling.plan import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Inputs of the forward pass.

    Attributes:
        flat: The rows.
        items: What is computed, in the order of its rows, which differs from the plan's.
    """

    flat: FlatBatch
    items: list[ScheduledSequence]


def build_batch(scheduled: Iterable[ScheduledSequence], *, block_size: int) -> StepBatch:
    """Lay out a step's sequences: equally many rows side by side, longest context first.

    Python's work is linear in sequences and blocks; tokens are handled by numpy.
    """
    items = sorted(scheduled, key=lambda item: (item.num_tokens, -item.start))
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
            raise ValueError(
                f"{item.sequence!r} has {len(item.sequence.block_table)} blocks, "
                f"but positions up to {item.start + item.num_tokens - 1} need {count}"
            )
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
