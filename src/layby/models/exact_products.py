"""Matrix products on a GPU whose rows have the same bits whatever rows share the call.

It has never run on a GPU; its arithmetic is tested on a CPU.

A GPU's library picks another kernel for another number of rows, one that may add up in another
order. So products are cut into calls of a few fixed sizes, for which it is tried out when the model
is loaded that they round alike and that a row's place in the call does not matter::

    100 rows   [   64   ][ 36 + 28 of padding ]      if 64, 256 and 1024 were found to be alike
    900 rows   [      900 + 124 of padding      ]

What was tried stays true as long as the library picks the same kernel for the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from layby.models.ops import (
    AttentionBatch,
    ChunkedAttention,
    PagedAttention,
    TorchOps,
    chunk_tokens,
)

ROW_COUNTS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Sizes that are tried, rising."""

ROW_MULTIPLE = 16
"""Rows that everything else is padded to, because few are reduced by other numbers of threads."""

_FREE_ROWS = 192
"""Up to about so many rows a product is taken to cost no more than reading its matrix."""

_MOST_BATCH_ROWS = 8192
"""Rows of one batched call, all sequences together: bounds what must be measured."""

_PROBE_BYTES = 2**28
"""Memory for the outcome of a trial."""

_TYPICAL_ROWS = (1, 16, 64, 300, 512, 2048)
"""What a choice between several sets of sizes is made for."""

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def cut(rows: int, counts: tuple[int, ...]) -> list[int]:
    """Calls that so many rows are cut into; the last may have rows to spare.

    Args:
        rows: At least 1.
        counts: Sizes of calls, rising.
    """
    parts = []
    while rows > 0:
        covering = next((count for count in counts if count >= rows), None)
        fitting = max((count for count in counts if count <= rows), default=None)
        if covering is not None and (fitting is None or covering <= max(2 * rows, _FREE_ROWS)):
            parts.append(covering)
            break
        assert fitting is not None
        parts.append(fitting)
        rows -= fitting
    return parts


class ExactOps(TorchOps):
    """Plain torch, row-exact on a GPU.

    Args:
        weights: Matrices ``[out, in]`` of the model, one of each shape at least.
        num_kv_heads, head_dim: Geometry of attention.
    """

    def __init__(self, weights: Iterable[Tensor], *, num_kv_heads: int, head_dim: int) -> None:
        super().__init__(ROW_MULTIPLE)
        # Sums of parts of a product are otherwise rounded to the format of its outcome.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self._kv_heads, self._head_dim = num_kv_heads, head_dim
        self._counts: dict[torch.Size, tuple[int, ...]] = {}
        for weight in weights:
            if weight.shape not in self._counts:
                self._counts[weight.shape] = measure_row_counts(weight)
        self._batches: dict[int, BatchedProducts] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Ops``."""
        out = product(x, weight, self._counts[weight.shape])
        return out if bias is None else out.add_(bias)

    def attention(self, pool: Tensor, batch: AttentionBatch, num_heads: int) -> PagedAttention:
        """See ``Ops``."""
        size = chunk_tokens(pool.shape[4])
        if size not in self._batches:
            self._batches[size] = BatchedProducts.measured(
                pool.device, kv_heads=self._kv_heads, head_dim=self._head_dim, chunk_tokens=size
            )
        bmm = self._batches[size].bmm
        return ChunkedAttention(pool, batch, num_heads, self.row_multiple, bmm)

    @property
    def description(self) -> str:
        """Sizes of calls in use, for people."""
        linear = ", ".join(
            f"{out}x{size_in}: {_listed(counts)}" for (out, size_in), counts in self._counts.items()
        )
        batched = ", ".join(f"{size}: {b.sizes}" for size, b in self._batches.items())
        return f"{linear}; attention {batched}"


def product(x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
    """``x [T, in]`` times ``weight [out, in]`` transposed: ``[T, out]``, cut into calls."""
    rows = len(x)
    parts = cut(rows, counts)
    x = _padded(x, sum(parts))
    out = x.new_empty((len(x), len(weight)))
    first = 0
    for part in parts:
        here = slice(first, first + part)
        torch.mm(x[here], weight.t(), out=out[here])
        first += part
    return out[:rows]


def _padded(x: Tensor, rows: int) -> Tensor:
    """``x [..., R, n]`` with so many rows."""
    missing = rows - x.shape[-2]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


@dataclass(frozen=True, slots=True)
class BatchedProducts:
    """Batched products in calls of fixed sizes.

    Attributes:
        unit: Matrices of one sequence.
        sizes: Rows of a matrix → sequences per call, falling, the last is 1.
    """

    unit: int
    sizes: Mapping[int, tuple[int, ...]]

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """``a [n * unit, R, k]`` times ``b [n * unit, k, m]``, matrix by matrix."""
        batch, rows, _ = a.shape
        parts = cut(rows, tuple(self.sizes))
        a = _padded(a, sum(parts))
        out = a.new_empty((batch, a.shape[1], b.shape[2]))
        first_row = 0
        for part in parts:
            here = slice(first_row, first_row + part)
            first = 0
            for count in _binary(batch // self.unit, self.sizes[part]):
                those = slice(first * self.unit, (first + count) * self.unit)
                torch.bmm(a[those, here], b[those], out=out[those, here])
                first += count
            first_row += part
        return out[:, :rows]

    @classmethod
    def measured(
        cls, device: torch.device, *, kv_heads: int, head_dim: int, chunk_tokens: int
    ) -> BatchedProducts:
        """Find sizes for the products of queries with keys, and of weights with values."""
        probe = _BatchProbe(device, kv_heads, head_dim, chunk_tokens)
        pairs = [
            (rows, seqs)
            for rows in ROW_COUNTS
            for seqs in (64, 32, 16, 8, 4, 2, 1)
            if rows * seqs <= _MOST_BATCH_ROWS
        ]
        alike = _classes(pairs, probe.run)
        sets = [_sizes_of(members) for members in alike]
        sets = [sizes for sizes in sets if sizes]
        if not sets:
            _warn(device)
            return cls(kv_heads, {ROW_COUNTS[-1]: (1,)})
        return cls(kv_heads, min(sets, key=lambda sizes: _cost(tuple(sizes))))


def _sizes_of(pairs: list[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """Sequences per call by rows, for those rows that one sequence can have."""
    sizes: dict[int, tuple[int, ...]] = {}
    for rows in ROW_COUNTS:
        seqs = tuple(sorted((s for r, s in pairs if r == rows), reverse=True))
        if seqs and seqs[-1] == 1:
            sizes[rows] = seqs
    return sizes


def _binary(total: int, counts: tuple[int, ...]) -> list[int]:
    """``total`` as a sum of these, as many of the large ones as go in; the last of them is 1."""
    parts = []
    for count in counts:
        parts += [count] * (total // count)
        total %= count
    return parts


@torch.inference_mode()
def measure_row_counts(weight: Tensor) -> tuple[int, ...]:
    """Sizes of calls that a product with ``weight [out, in]`` may be cut into, rising.

    Where none is exact, a warning is logged.
    """
    most = _PROBE_BYTES // (len(weight) * weight.element_size())
    counts = [count for count in ROW_COUNTS if count <= max(most, ROW_COUNTS[0])]
    x = _random(counts[-1], weight.shape[1], device=weight.device).to(weight.dtype)

    def run(count: int, shift: int) -> Tensor:
        return product(x.roll(shift, 0), weight, (count,)).roll(-shift, 0)

    sets = [tuple(members) for members in _classes(counts, run)]
    if weight.device.type == "cuda":
        torch.cuda.empty_cache()
    if not sets:
        _warn(weight.device)
        return (counts[-1],)
    return min(sets, key=_cost)


def _classes(candidates: list[_T], run: Callable[[_T, int], Tensor]) -> list[list[_T]]:
    """Those that give the same bits wherever a row lies, in sets that give the same bits.

    Args:
        candidates: What is tried.
        run: The outcome, with all rows shifted by so many places in the calls, and back again.
    """
    found: list[tuple[Tensor, list[_T]]] = []
    for candidate in candidates:
        outcome = run(candidate, 0)
        if not all(torch.equal(run(candidate, shift), outcome) for shift in (1, 7)):
            continue
        for known, members in found:
            if torch.equal(known, outcome):
                members.append(candidate)
                break
        else:
            found.append((outcome, [candidate]))
    return [members for _, members in found]


class _BatchProbe:
    """Both products of attention over random queries, cut into calls of a given size."""

    def __init__(
        self, device: torch.device, kv_heads: int, head_dim: int, chunk_tokens: int
    ) -> None:
        self._rows = _random(_MOST_BATCH_ROWS, head_dim, device=device)
        self._keys = _random(kv_heads, chunk_tokens, head_dim, device=device, seed=1)
        self._values = _random(kv_heads, chunk_tokens, head_dim, device=device, seed=2)

    def run(self, size: tuple[int, int], shift: int) -> Tensor:
        """``[kv_heads, _MOST_BATCH_ROWS, chunk_tokens + head_dim]``."""
        (rows, seqs), kv_heads = size, len(self._keys)
        count = _MOST_BATCH_ROWS // rows  # sequences
        products = BatchedProducts(kv_heads, {rows: (seqs, 1)})
        queries = self._rows.roll(shift, 0).view(count, 1, rows, -1)
        queries = queries.expand(-1, kv_heads, -1, -1).reshape(count * kv_heads, rows, -1)
        keys = self._keys.repeat(count, 1, 1)
        scores = products.bmm(queries, keys.transpose(1, 2))
        results = products.bmm(scores, self._values.repeat(count, 1, 1))
        both = torch.cat([scores, results], -1).view(count, kv_heads, rows, -1)
        return both.transpose(0, 1).reshape(kv_heads, _MOST_BATCH_ROWS, -1).roll(-shift, 1)


def _random(*shape: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def _cost(counts: tuple[int, ...]) -> int:
    """What products of typical numbers of rows take in calls of such sizes."""
    return sum(max(part, _FREE_ROWS) for rows in _TYPICAL_ROWS for part in cut(rows, counts))


def _listed(counts: Iterable[int]) -> str:
    return "/".join(map(str, counts))


def _warn(device: torch.device) -> None:
    _log.warning(
        "matrix products on %s round differently for different row counts: the tokens of a request "
        "may depend on what shares its batch",
        device,
    )


__all__ = ["ExactOps", "BatchedProducts", "cut", "measure_row_counts", "product"]
