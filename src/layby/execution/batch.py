"""The flat batch of one step, laid out for the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from layby.models.ops import AttentionBatch, QueryGroup
from layby.scheduling.plan import ScheduledSequence


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of the forward pass.

    Attributes:
        token_ids, positions: ``[T]`` int64.
        attention: Slots and block tables.
        items: What is computed, in the order of its rows, which differs from the plan's.
        first_rows: Row at which each item begins.
    """

    token_ids: Tensor
    positions: Tensor
    attention: AttentionBatch
    items: list[ScheduledSequence]
    first_rows: list[int]


def build_batch(
    scheduled: Iterable[ScheduledSequence], *, block_size: int, device: torch.device
) -> ForwardBatch:
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
    slots = tables[row_items, positions // block_size] * block_size + positions % block_size

    groups = []
    first = 0
    for num_queries, members in groupby(items, key=lambda item: item.num_tokens):
        size = sum(1 for _ in members)
        here = slice(first, first + size)
        width = -(-(int(starts[first]) + num_queries) // block_size)
        groups.append(
            QueryGroup(
                first_row=int(first_rows[first]),
                num_queries=num_queries,
                starts=tuple(starts[here].tolist()),
                block_tables=torch.from_numpy(tables[here, :width]).to(device),
            )
        )
        first += size
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=AttentionBatch(torch.from_numpy(slots).to(device), tuple(groups)),
        items=items,
        first_rows=first_rows.tolist(),
    )


def _block_tables(
    items: list[ScheduledSequence], lengths: np.ndarray, block_size: int
) -> np.ndarray:
    """Blocks that hold each item's context, ``[items, longest]`` int64, 0 beyond it.

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
    tables = np.zeros(used.shape, dtype=np.int64)
    tables[used] = np.fromiter(
        chain.from_iterable(
            item.sequence.block_table[:count]
            for item, count in zip(items, needed.tolist(), strict=True)
        ),
        dtype=np.int64,
        count=int(needed.sum()),
    )
    return tables
