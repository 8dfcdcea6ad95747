"""Attention kernels against float64, and to the bit against themselves in other company."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

_kernels = pytest.importorskip("layby._kernels", reason="no compiled kernels here")

BOUNDS = {"int8": 2e-2, "bfloat16": 4e-3, "float32": 2e-6}
"""Largest root mean square error, relative to the result's.

int8: rounding random queries, keys and values to 8 bits costs 1.05% together, rounding weights 0.8%
more; they add up as squares. It is worst where contexts are long and attention is diffuse.
"""


@pytest.fixture(autouse=True)
def _restore():
    """Leave the instruction set and the number of threads as they were."""
    isa, threads = _kernels.isa(), _kernels.num_threads()
    yield
    _kernels.set_isa(isa)
    _kernels.set_num_threads(threads)


@pytest.fixture(params=_kernels.available_isas())
def isa(request):
    """Every instruction set that this machine has."""
    _kernels.set_isa(request.param)
    return request.param


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads and cache of a model."""

    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    dtype: str = "int8"
    block_size: int = 16
    layers: int = 2


class Model:
    """Random sequences ``[tokens, (H + 2 Hkv) * D]`` and a pool to compute them in."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.layout = _kernels.KvLayout(
            shape.dtype,
            num_layers=shape.layers,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            block_size=shape.block_size,
        )
        columns = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.sequences = [torch.randn(n, columns, generator=generator) for n in lengths]
        angles = torch.arange(max(lengths, default=1)).unsqueeze(1) * 10000 ** -torch.linspace(
            0, 1, shape.dim // 2 + 1
        )[:-1].unsqueeze(0)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        needed = [-(-n // shape.block_size) for n in lengths]
        self.num_blocks = sum(needed) + 3
        order = torch.randperm(self.num_blocks, generator=generator, dtype=torch.int32)
        self.tables = torch.zeros(len(lengths), max(needed, default=0), dtype=torch.int32)
        for index, count in enumerate(needed):
            self.tables[index, :count] = order[sum(needed[:index]) :][:count]
        self.poison()

    def poison(self, byte: int = 0xFF) -> None:
        """Fill the pool: 0xff is NaN as a scale and as a float."""
        self.pool = torch.full((self.num_blocks, self.layout.block_bytes), byte, dtype=torch.uint8)

    def step(self, spans: list[tuple[int, int, int]], layer: int = 1, **norms: object) -> Tensor:
        """Compute rows ``start … start + count - 1`` of sequences: ``(sequence, start, count)``."""
        shape, size = self.shape, self.shape.block_size
        rows, positions, slots = [], [], []
        for sequence, start, count in spans:
            here = torch.arange(start, start + count)
            rows.append(self.sequences[sequence][start : start + count])
            positions.append(here)
            slots.append(self.tables[sequence].long()[here // size] * size + here % size)
        qkv = torch.cat(rows)
        counts = torch.tensor([count for *_, count in spans], dtype=torch.int32)
        quantised = shape.dtype == "int8"
        queries = torch.empty(
            (len(qkv), shape.heads * shape.dim), dtype=torch.int8 if quantised else torch.float32
        )
        scales = torch.empty(len(qkv), shape.heads) if quantised else None
        _kernels.rope_write(
            self.layout, self.pool, layer, qkv, torch.cat(positions), self.cos_sin,
            torch.cat(slots), queries, scales, **norms,
        )  # fmt: skip
        batch = _kernels.AttentionBatch(
            self.layout,
            num_heads=shape.heads,
            num_blocks=self.num_blocks,
            first_rows=(counts.cumsum(0) - counts).int(),
            num_rows=counts,
            starts=torch.tensor([start for _, start, _ in spans], dtype=torch.int32),
            block_tables=self.tables[[sequence for sequence, *_ in spans]],
        )
        out = torch.full((len(qkv), shape.heads * shape.dim), math.nan)
        batch.attend(self.pool, layer, queries, scales, out)
        return out

    def reference(self, sequence: int, **norms: Tensor | float) -> Tensor:
        """All rows of a sequence in float64."""
        shape = self.shape
        qkv = (
            self.sequences[sequence].double().view(-1, shape.heads + 2 * shape.kv_heads, shape.dim)
        )
        query, key, value = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)

        def norm(x: Tensor, weight: Tensor | float | None) -> Tensor:
            if weight is None:
                return x
            mean = x.square().mean(-1, keepdim=True)
            return x * (mean + norms["norm_eps"]).rsqrt() * weight

        def turn(x: Tensor) -> Tensor:
            cos, sin = self.cos_sin[: len(x)].double().unsqueeze(1).chunk(2, -1)
            low, high = x.chunk(2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

        query, key = (
            turn(norm(query, norms.get("query_norm"))),
            turn(norm(key, norms.get("key_norm"))),
        )
        groups = shape.heads // shape.kv_heads
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(shape.dim)
        scores.masked_fill_(torch.ones(scores.shape[1:]).triu(1).bool(), -math.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def check(result: Tensor, expected: Tensor, dtype: str) -> None:
    """Fail unless the root mean square error is within the bound."""
    error = (result.double() - expected).square().mean().sqrt()
    assert error <= BOUNDS[dtype] * expected.square().mean().sqrt()


SHAPES = [
    Shape(),
    Shape(heads=4, kv_heads=4, dim=128),
    Shape(heads=8, kv_heads=2, dim=128),
    Shape(heads=8, kv_heads=1, dim=64, block_size=32),
    Shape(heads=6, kv_heads=2, dim=80),
    Shape(heads=2, kv_heads=1, dim=256),
    Shape(heads=14, kv_heads=2, dim=64, dtype="float32"),
    Shape(heads=4, kv_heads=2, dim=128, dtype="float32", block_size=64),
    Shape(heads=9, kv_heads=3, dim=64, dtype="bfloat16"),
    Shape(heads=3, kv_heads=3, dim=48, dtype="bfloat16"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_a_prompt_is_as_in_float64(isa, shape, length):
    """At the edges of groups, tiles and row vectors."""
    model = Model(shape, [length])
    check(model.step([(0, 0, length)]), model.reference(0), shape.dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("length", [2048, 8192])
def test_a_long_context_is_as_in_float64(dtype, length):
    """Many tiles, whose partial sums are folded one after the other."""
    model = Model(Shape(heads=2, kv_heads=1, dtype=dtype, layers=1), [length])
    chunks = [model.step([(0, start, 512)], layer=0) for start in range(0, length, 512)]
    last = 256
    query = model.sequences[0]
    expected = _last_rows(model, query, last)
    check(torch.cat(chunks)[-last:], expected, dtype)


def _last_rows(model: Model, qkv: Tensor, count: int) -> Tensor:
    """The reference without the square of the length."""
    dim = model.shape.dim
    heads = qkv.double().view(len(qkv), -1, dim)
    cos, sin = model.cos_sin.double().unsqueeze(1).chunk(2, -1)
    low, high = heads[:, :-1].chunk(2, -1)
    turned = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    query, key, value = turned[-count:, :-1], turned[:, -1], heads[:, -1]
    scores = torch.einsum("qhd,kd->hqk", query, key) / math.sqrt(dim)
    seen = torch.arange(len(qkv)) <= torch.arange(len(qkv) - count, len(qkv)).unsqueeze(1)
    scores.masked_fill_(~seen, -math.inf)
    return torch.einsum("hqk,kd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2], SHAPES[6], SHAPES[8]], ids=str)
def test_chunks_give_the_bits_of_the_whole(isa, shape):
    """Decode, short chunks and long ones are different kernels."""
    length = 150
    whole = Model(shape, [length]).step([(0, 0, length)])
    for sizes in ([1], [3], [5, 1, 1, 30], [11], [16], [17, 4], [64], [100]):
        model, start, parts = Model(shape, [length]), 0, []
        while start < length:
            count = min(sizes[len(parts) % len(sizes)], length - start)
            parts.append(model.step([(0, start, count)]))
            start += count
        assert torch.equal(torch.cat(parts), whole), sizes


@pytest.mark.parametrize("dtype", BOUNDS)
def test_company_and_threads_do_not_change_a_bit(isa, dtype):
    """Rows of other sequences, in any order, on any number of threads."""
    lengths = [1, 16, 17, 64, 65, 200, 90, 33]
    spans = [
        (i, max(0, n - (1, 7, 40)[i % 3]), min(n, (1, 7, 40)[i % 3])) for i, n in enumerate(lengths)
    ]
    alone = Model(Shape(dtype=dtype), lengths)
    model = Model(Shape(dtype=dtype), lengths)
    for index, (_, start, _) in enumerate(spans):
        if start:
            alone.step([(index, 0, start)])
    before = [(i, 0, start) for i, start, _ in spans if start]
    model.step(before[::-1])
    expected = [alone.step([span]) for span in spans]
    for threads in (1, 2, 3):
        _kernels.set_num_threads(threads)
        for order in (spans, spans[::-1]):
            results = model.step(order).split([count for *_, count in order])
            for (index, *_), result in zip(order, results, strict=True):
                assert torch.equal(result, expected[index])


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_what_was_in_a_block_before_does_not_matter(isa, dtype, byte):
    """Blocks are handed on without being cleared, NaN and all."""
    spans = [(0, 0, 21), (1, 0, 70)]
    clean, dirty = Model(Shape(dtype=dtype), [21, 70]), Model(Shape(dtype=dtype), [21, 70])
    clean.poison(0)
    dirty.poison(byte)
    assert torch.equal(clean.step(spans), dirty.step(spans))
    for model in (clean, dirty):
        model.sequences = [torch.cat([s, s]) for s in model.sequences]
        model.cos_sin = torch.cat([model.cos_sin, model.cos_sin])
    after = [(0, 21, 1), (1, 70, 1)]
    assert torch.equal(clean.step(after), dirty.step(after))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_batch_may_be_empty(isa, dtype):
    """And a sequence in it may have no rows."""
    model = Model(Shape(dtype=dtype), [5, 4])
    assert model.step([(0, 0, 0)]).shape == (0, 9 * 64)
    some = model.step([(0, 0, 5), (1, 0, 0)])
    assert torch.equal(some, model.step([(0, 0, 5)]))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_queries_and_keys_are_normalised_if_asked(isa, dtype):
    """As Qwen3 does it: per head, before rotation."""
    shape = Shape(dtype=dtype)
    model = Model(shape, [40])
    norms = {
        "query_norm": torch.rand(shape.dim) + 0.5,
        "key_norm": torch.rand(shape.dim) + 0.5,
        "norm_eps": 1e-6,
    }
    check(model.step([(0, 0, 40)], **norms), model.reference(0, **norms), dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_zeros_are_no_special_case(isa, dtype):
    """A scale of zero must not divide: all keys alike, the mean of the values comes out."""
    model = Model(Shape(dtype=dtype), [70])
    model.sequences[0][:, : 12 * 64] = 0
    check(model.step([(0, 0, 70)]), model.reference(0), dtype)
    model.sequences[0].zero_()
    assert model.step([(0, 0, 70)]).abs().max() == 0


def test_a_padding_row_is_not_stored(isa):
    """Its slot is negative."""
    model = Model(Shape(), [1])
    before = model.pool.clone()
    _kernels.rope_write(
        model.layout, model.pool, 0, model.sequences[0], torch.zeros(1, dtype=torch.int64),
        model.cos_sin, torch.tensor([-1]), torch.empty(1, 9 * 64, dtype=torch.int8),
        torch.empty(1, 9),
    )  # fmt: skip
    assert torch.equal(model.pool, before)


def test_a_block_outside_the_pool_is_refused():
    """Before anything is read."""
    layout = _kernels.KvLayout("int8", num_layers=1, num_kv_heads=1, head_dim=64, block_size=16)
    one = torch.ones(1, dtype=torch.int32)
    for block, start, message in [(4, 0, "block 4 in a pool of 4"), (0, 40, "needs 3 blocks")]:
        with pytest.raises(ValueError, match=message):
            _kernels.AttentionBatch(
                layout,
                num_heads=1,
                num_blocks=4,
                first_rows=one * 0,
                num_rows=one,
                starts=one * start,
                block_tables=torch.full((1, 1), block, dtype=torch.int32),
            )
