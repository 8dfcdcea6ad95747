"""What every network offers the executor, whichever kernels it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layby.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The rows of one forward pass: ``T`` tokens of ``S`` spans, a span being part of one sequence.

    Spans lie side by side, those of equal length together, longest context first.

    Attributes:
        token_ids, positions: ``[T]`` int64.
        slots: ``[T]`` int64, ``block * block_size + offset`` where each row's KV goes.
        first_rows, num_rows: ``[S]`` int32, the rows of each span.
        starts: ``[S]`` int32, position of each span's first row.
        block_tables: ``[S, longest]`` int32, 0 beyond a span's context.
        block_size: Slots of one block.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    first_rows: NDArray[np.int32]
    num_rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    block_size: int


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one block of KV cache looks: ``shape`` numbers of type ``dtype``, contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Network(Protocol):
    """A model ready to run. A row's result depends on nothing but its sequence."""

    config: ModelConfig
    device: torch.device

    @property
    def name(self) -> str:
        """What it computes with, for people."""
        ...

    def kv_format(self, block_size: int) -> KVFormat:
        """What a pool for this network is made of."""
        ...

    def forward(self, batch: FlatBatch, pool: Tensor) -> Tensor:
        """Run the network and store the rows' keys and values.

        All of a layer's keys and values are written before any is read, so a row may attend to
        what another one stores.

        Args:
            batch: The rows.
            pool: ``[blocks, *kv_format.shape]``.

        Returns:
            ``[T, hidden]``, after the last norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, ``[R, vocab]`` float32, for rows ``hidden [R, hidden]``."""
        ...
