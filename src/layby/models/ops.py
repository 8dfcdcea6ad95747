"""The operators a dense transformer is made of, and their plain-torch reference.

``Ops`` is what the network calls; faster kernels go behind the same interface. ``TorchOps`` is the
reference: right first, on any device torch knows.

Every operator is **row-exact**: a row's result has the same bits whatever other rows share the
call, and however a sequence was cut into prefill chunks. Measured with torch 2.13 on x86:

* Matrix products in float32 give other last bits for some small row counts (1-3, 5-7, 9-11). So
  callers pad rows to a multiple of ``row_multiple``, which ``measure_row_multiple`` finds for the
  machine at hand. bfloat16 needs no padding.
* ``F.silu`` and ``torch.sigmoid`` use another exponential in the scalar tail of a buffer than in
  its vector body, so the same number maps to other bits depending on where it lies. ``exp``,
  ``cos``, ``sin`` do not; SiLU is built from ``exp`` here.
* A reduction to a single number is split over the threads, any other is not. Nothing here reduces
  one row alone, because of the padding.
* On a GPU padding is not enough, see ``layby.models.exact_products``.
* Attention walks the context in chunks that are aligned to position 0 and of one fixed size, and a
  chunk that a row may not see leaves that row's state untouched to the bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from layby.models.network import FlatBatch

CHUNK_TOKENS = 128
"""Context positions that attention handles at once, rounded to whole blocks."""

_log = logging.getLogger(__name__)


def chunk_tokens(block_size: int) -> int:
    """Context positions that attention handles at once, for blocks of this size."""
    return max(1, CHUNK_TOKENS // block_size) * block_size


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with the same number of query rows, side by side in the flat batch.

    Attributes:
        first_row: Row of the flat batch where the group begins; it holds sequence after sequence.
        num_queries: Rows per sequence.
        starts: Position of each sequence's first row, never increasing. A sequence attends to
            positions ``0 … start + num_queries - 1``, each row up to itself.
        block_tables: ``[sequences, blocks]`` int64; entries beyond a sequence's context are 0.
    """

    first_row: int
    num_queries: int
    starts: tuple[int, ...]
    block_tables: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each row's key and value go, and what each row may see.

    Attributes:
        slots: ``[T]`` int64, ``block * block_size + offset`` of every row.
        groups: Together they hold every row once.
    """

    slots: Tensor
    groups: tuple[QueryGroup, ...]

    @classmethod
    def of(cls, batch: FlatBatch, device: torch.device) -> AttentionBatch:
        """Group the spans of a batch by their length."""
        groups = []
        first = 0
        for num_queries, members in groupby(batch.num_rows.tolist()):
            size = sum(1 for _ in members)
            here = slice(first, first + size)
            width = -(-(int(batch.starts[first]) + num_queries) // batch.block_size)
            tables = batch.block_tables[here, :width].astype(np.int64)
            groups.append(
                QueryGroup(
                    first_row=int(batch.first_rows[first]),
                    num_queries=num_queries,
                    starts=tuple(batch.starts[here].tolist()),
                    block_tables=torch.from_numpy(tables).to(device),
                )
            )
            first += size
        return cls(torch.from_numpy(batch.slots).to(device), tuple(groups))


class PagedAttention(Protocol):
    """Attention of one batch over one pool of blocks ``[blocks, layers, 2, Hkv, block_size, D]``.

    Index 0 of the pool's third dimension is keys, 1 is values.
    """

    def write(self, layer: int, kv: Tensor) -> None:
        """Store ``kv [T, 2 * Hkv, D]`` (all key heads, then all value heads) in the slots."""
        ...

    def attend(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """Attend with ``queries [T, H, D]`` and put the result into ``out [T, H * D]``."""
        ...


class Ops(Protocol):
    """What a network asks of its kernels."""

    row_multiple: int
    """Row counts must be multiples of this for results to be row-exact."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``x [T, in]`` times ``weight [out, in]`` transposed, plus ``bias [out]``."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Scale each vector of ``x [..., n]`` to unit root mean square, then by ``weight [n]``."""
        ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``(rms_norm(x + residual), x + residual)``, both ``[T, n]``; may overwrite either."""
        ...

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate ``heads [T, H, D]`` in place by angles whose ``cos``, ``sin`` are ``[T, D/2]``.

        Dimension i pairs with i + D/2 (Su et al. 2021, in the half-split layout of GPT-NeoX).
        """
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` for ``gate_up [T, 2n]``; ``[T, n]``. May overwrite its argument."""
        ...

    def attention(self, pool: Tensor, batch: AttentionBatch, num_heads: int) -> PagedAttention:
        """Prepare what all layers of one forward pass share."""
        ...


class TorchOps:
    """The reference, in plain torch."""

    def __init__(self, row_multiple: int = 16) -> None:
        self.row_multiple = row_multiple

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See ``Ops``. Row-exact if the row count is a multiple of ``row_multiple``."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See ``Ops``. The mean is taken in float32."""
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See ``Ops``. ``residual`` is updated in place."""
        residual += x
        return self.rms_norm(residual, weight, eps), residual

    def rotate(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """See ``Ops``. The products are float32."""
        half = heads.shape[-1] // 2
        low, high = heads[..., :half], heads[..., half:]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        # Products and sums one by one: a fused multiply-add would round vector body and tail apart.
        turned_low = (low * cos).sub_(high * sin)
        turned_high = (high * cos).add_(low * sin)
        low.copy_(turned_low)
        high.copy_(turned_high)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See ``Ops``. Written with ``exp`` because ``F.silu`` is not row-exact on a CPU."""
        gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
        return gate.neg().exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up).to(gate_up.dtype)

    def attention(self, pool: Tensor, batch: AttentionBatch, num_heads: int) -> PagedAttention:
        """See ``Ops``."""
        return ChunkedAttention(pool, batch, num_heads, self.row_multiple)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of context for the sequences of a group that reach it (the first ``num_seqs``).

    Query rows are (position, head of the group) pairs, position-major, padded at the end.

    Attributes:
        rows: Pool rows of layer 0, ``[2 * num_seqs * Hkv * blocks]``, see ``ChunkedAttention``.
        first_row: Rows before this one cannot see the chunk, in any sequence.
        mask: True where a row must not see a position: ``[sequences, 1, rows, CHUNK]`` for the
            sequences from ``mask_from`` on and the rows from ``first_row`` on; None if all see all.
        stale: Indices into the values ``[num_seqs * Hkv * CHUNK]`` of positions that lie beyond the
            context; None if there are none.
    """

    num_seqs: int
    rows: Tensor
    first_row: int
    mask_from: int
    mask: Tensor | None
    stale: Tensor | None


class ChunkedAttention:
    """Softmax attention with a running maximum, sum and weighted sum (Milakov & Gimelshein 2018).

    Chunk by chunk the blocks are gathered into one contiguous buffer for all sequences of a group,
    so Python's work grows with the number of chunks, never with blocks or tokens. The arithmetic
    is float32 whatever the pool holds.

    ``bmm`` multiplies matrix by matrix; its outcome may lie in a larger buffer.

    The pool is seen as rows of ``block_size * D`` numbers, row
    ``((block * layers + layer) * 2 + is_value) * Hkv + head``: one layer is a fixed offset.
    """

    def __init__(
        self,
        pool: Tensor,
        batch: AttentionBatch,
        num_heads: int,
        row_multiple: int,
        bmm: Callable[[Tensor, Tensor], Tensor] = torch.bmm,
    ) -> None:
        _, num_layers, _, kv_heads, block_size, head_dim = pool.shape
        self._kv_heads, self._block_size, self._head_dim = kv_heads, block_size, head_dim
        self._heads_per_kv = num_heads // kv_heads
        self._row_multiple, self._bmm = row_multiple, bmm
        self._layer_rows = 2 * kv_heads
        self._block_rows = num_layers * self._layer_rows
        self._pool_rows = pool.view(-1, block_size * head_dim)
        self._pool_slots = pool.view(-1, head_dim)
        self._chunk_tokens = chunk_tokens(block_size)
        self._chunk_blocks = self._chunk_tokens // block_size
        self._scale = 1.0 / math.sqrt(head_dim)
        device = pool.device

        block = batch.slots.div(block_size, rounding_mode="floor")
        offset = batch.slots - block * block_size
        heads = torch.arange(2 * kv_heads, device=device)
        rows = (block * self._block_rows).unsqueeze(1) + heads
        self._write_slots = (rows * block_size + offset.unsqueeze(1)).view(-1)
        self._groups = [(group, list(self._chunks(group))) for group in batch.groups]

    def write(self, layer: int, kv: Tensor) -> None:
        """See ``PagedAttention``."""
        slots = self._write_slots + layer * self._layer_rows * self._block_size
        self._pool_slots.index_copy_(0, slots, kv.reshape(-1, self._head_dim))

    def attend(self, layer: int, queries: Tensor, out: Tensor) -> None:
        """See ``PagedAttention``."""
        for group, chunks in self._groups:
            rows = slice(group.first_row, group.first_row + len(group.starts) * group.num_queries)
            out[rows] = self._attend_group(layer, queries[rows], group, chunks)

    def _attend_group(
        self, layer: int, queries: Tensor, group: QueryGroup, chunks: list[_Chunk]
    ) -> Tensor:
        """Attention of ``queries [sequences * num_queries, H, D]``; ``[…, H * D]``."""
        seqs, kv_heads, dim = len(group.starts), self._kv_heads, self._head_dim
        per_kv, used = self._heads_per_kv, group.num_queries * self._heads_per_kv
        query = queries.new_zeros((seqs, kv_heads, self._padded(used), dim), dtype=torch.float32)
        by_head = (seqs, kv_heads, group.num_queries, per_kv, dim)
        query[:, :, :used].view(by_head).copy_(
            queries.reshape(seqs, group.num_queries, kv_heads, per_kv, dim).transpose(1, 2)
        )
        query = query.mul_(self._scale).view(seqs * kv_heads, -1, dim)

        first, *rest = chunks
        scores, values = self._scores(layer, query, first)
        maximum = scores.amax(-1, keepdim=True)
        weights = scores.sub_(maximum).exp_()
        total = weights.sum(-1, keepdim=True)
        result = self._bmm(weights, values)
        for chunk in rest:
            # Basic slices: views, so the updates below land in the state itself.
            live = (slice(0, chunk.num_seqs * kv_heads), slice(chunk.first_row, None))
            scores, values = self._scores(layer, query, chunk)
            old = maximum[live]
            new = torch.maximum(old, scores.amax(-1, keepdim=True))
            weights = scores.sub_(new).exp_()
            # A row that sees nothing here: new == old, decay == 1, weights == 0. Exactly nothing.
            decay = (old - new).exp_()
            maximum[live] = new
            total[live].mul_(decay).add_(weights.sum(-1, keepdim=True))
            result[live].mul_(decay).add_(self._bmm(weights, values))
        means: Tensor = result.div_(total).unflatten(0, (seqs, kv_heads))
        return means[:, :, :used].view(by_head).transpose(1, 2).reshape(-1, kv_heads * per_kv * dim)

    def _scores(self, layer: int, query: Tensor, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """Masked scores ``[n * Hkv, rows, CHUNK]`` and values ``[n * Hkv, CHUNK, D]``."""
        heads = chunk.num_seqs * self._kv_heads
        gathered = self._pool_rows.index_select(0, chunk.rows + layer * self._layer_rows).float()
        keys, values = gathered.view(2, heads, self._chunk_tokens, self._head_dim)
        scores = self._bmm(query[:heads, chunk.first_row :], keys.transpose(1, 2))
        if chunk.mask is not None:
            by_seq = scores.unflatten(0, (chunk.num_seqs, self._kv_heads))
            masked = by_seq[chunk.mask_from :, :, : chunk.mask.shape[2]]
            masked.masked_fill_(chunk.mask, -math.inf)
        if chunk.stale is not None:
            # Whatever lies there may be NaN, and 0 * NaN would reach the sum.
            values.view(-1, self._head_dim).index_fill_(0, chunk.stale, 0.0)
        return scores, values

    def _padded(self, rows: int) -> int:
        return -(-rows // self._row_multiple) * self._row_multiple

    def _chunks(self, group: QueryGroup) -> Iterable[_Chunk]:
        """Cut a group's context into chunks; what is the same for all layers is done here."""
        device, size, per_kv = group.block_tables.device, self._chunk_tokens, self._heads_per_kv
        num_rows = self._padded(group.num_queries * per_kv)
        starts = torch.tensor(group.starts, device=device)
        head = torch.arange(self._kv_heads, device=device).view(1, 1, -1, 1)
        is_value = torch.arange(2, device=device).view(2, 1, 1, 1)
        offset = is_value * self._kv_heads + head
        longest = group.starts[0] + group.num_queries
        num_chunks = -(-longest // size)
        missing = num_chunks * self._chunk_blocks - group.block_tables.shape[1]
        tables = F.pad(group.block_tables, (0, missing)) * self._block_rows
        tables = tables.view(1, len(group.starts), 1, -1)

        for index in range(num_chunks):
            low, high = index * size, (index + 1) * size
            num_seqs = _count(start + group.num_queries > low for start in group.starts)
            blocks = slice(index * self._chunk_blocks, (index + 1) * self._chunk_blocks)
            positions = torch.arange(low, high, device=device)

            unseen = max(0, low - group.starts[0]) * per_kv
            first_row = unseen // self._row_multiple * self._row_multiple
            mask, mask_from = None, _count(start >= high - 1 for start in group.starts)
            # Rows from here on see the whole chunk in every sequence.
            last_row = min(num_rows, max(0, high - 1 - group.starts[num_seqs - 1]) * per_kv)
            if mask_from < num_seqs and first_row < last_row:
                row = torch.arange(first_row, last_row, device=device) // per_kv
                seen_to = starts[mask_from:num_seqs].view(-1, 1, 1, 1) + row.view(1, 1, -1, 1)
                mask = positions > seen_to
            stale = None
            if group.starts[num_seqs - 1] + group.num_queries < high:
                ends = starts[:num_seqs].view(-1, 1, 1) + group.num_queries
                beyond = (positions >= ends).expand(-1, self._kv_heads, -1)
                stale = beyond.reshape(-1).nonzero().squeeze(1)
            yield _Chunk(
                num_seqs=num_seqs,
                rows=(tables[:, :num_seqs, :, blocks] + offset).reshape(-1),
                first_row=first_row,
                mask_from=mask_from,
                mask=mask,
                stale=stale,
            )


def _count(flags: Iterable[bool]) -> int:
    """How many are true."""
    return sum(flags)


@torch.inference_mode()
def measure_row_multiple(
    weights: Iterable[Tensor], *, kv_heads: int, head_dim: int, chunk_tokens: int = CHUNK_TOKENS
) -> int:
    """Find the smallest padding of row counts that makes matrix products row-exact here.

    Which row counts take another path, and so round differently, depends on the processor, the
    number format and the library, so it is measured on the shapes that will be used.

    Args:
        weights: Matrices ``[out, in]`` of the model, one of each shape.
        kv_heads, head_dim, chunk_tokens: Geometry of attention.

    Returns:
        The multiple. If none of the candidates is exact it is the largest one, and a warning is
        logged: then a result may depend on what shares its batch.
    """
    candidates = (4, 8, 16, 32)
    weights = list(weights)
    device = weights[0].device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    keys = random(kv_heads, chunk_tokens, head_dim)
    products: list[tuple[Tensor, Callable[[Tensor], Tensor]]] = [
        (random(_PROBE_ROWS, weight.shape[1]).to(weight.dtype), partial(F.linear, weight=weight))
        for weight in weights
    ]
    products.append((random(_PROBE_ROWS, head_dim), lambda x: _attention_products(x, keys)))
    wholes = [product(x) for x, product in products]
    for multiple in candidates:
        if all(
            torch.equal(product(x[:rows]), whole[:rows])
            for (x, product), whole in zip(products, wholes, strict=True)
            for rows in (multiple, 2 * multiple, 3 * multiple, 5 * multiple)
            if rows <= _PROBE_ROWS
        ):
            return multiple
    _log.warning(
        "matrix products on %s round differently for different row counts: the tokens of a request "
        "may depend on what shares its batch",
        device,
    )
    return candidates[-1]


_PROBE_ROWS = 64


def _attention_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Both batched products of attention on ``[rows, D]``; ``[rows, Hkv, D]``."""
    batch = queries.expand(keys.shape[0], -1, -1).contiguous()
    scores = torch.bmm(batch, keys.transpose(1, 2))
    return torch.bmm(scores, keys).transpose(0, 1)
