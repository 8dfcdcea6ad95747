"""On a GPU, too, a row has the same bits whatever rows share the call, for real models' shapes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from layby.execution.reference_sampling import Draws, choose
from layby.execution.sampler import log_probabilities
from layby.models.exact_products import (
    ROW_MULTIPLE,
    BatchedProducts,
    measure_row_counts,
    product,
)
from layby.models.ops import TorchOps

ROW_COUNTS = [*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 500, 777, 1500]


@dataclass(frozen=True)
class Shape:
    """Of a model, as far as its products go."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def matrices(self) -> set[tuple[int, int]]:
        queries = self.heads * self.head_dim
        fused = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            (fused, self.hidden),
            (self.hidden, queries),
            (2 * self.inner, self.hidden),
            (self.hidden, self.inner),
            (self.vocab, self.hidden),
        }


SHAPES = {
    "llama 3 8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "llama 3.2 1B": Shape(2048, 8192, 32, 8, 64, 128256),
    "smollm2 135M": Shape(576, 1536, 9, 3, 64, 49152),
    "qwen2.5 0.5B": Shape(896, 4864, 14, 2, 64, 151936),
    "tiny": Shape(48, 64, 6, 2, 8, 97),
}
TRIED = [
    *((name, torch.bfloat16) for name in SHAPES),
    ("llama 3.2 1B", torch.float32),
    ("llama 3.2 1B", torch.float16),
    ("smollm2 135M", torch.float32),
    ("tiny", torch.float32),
]


def sample(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(7)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check_rows(whole: Tensor, part_of: Callable[[slice], Tensor]) -> None:
    """Rows by themselves, from the beginning and from somewhere else, are those of the whole."""
    source = random.Random(0)
    for count in ROW_COUNTS:
        if count > len(whole):
            break
        for first in (0, source.randint(0, len(whole) - count)):
            rows = slice(first, first + count)
            assert torch.equal(part_of(rows), whole[rows]), f"rows {first} … {first + count - 1}"


@pytest.mark.parametrize(("name", "dtype"), TRIED, ids=str)
def test_products_with_matrices_are_row_exact(
    name: str, dtype: torch.dtype, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Here a library picks its kernels by the number of rows."""
    for size_out, size_in in sorted(SHAPES[name].matrices):
        weight = sample((size_out, size_in), device, dtype) * size_in**-0.5
        counts = measure_row_counts(weight)
        print(f"{name} {dtype} {size_out}x{size_in}: {counts}")
        x = sample((1600 if size_out < 50_000 else 300, size_in), device, dtype)
        whole = product(x, weight, counts)
        check_rows(whole, lambda rows, x=x, w=weight, c=counts: product(x[rows], w, c))
        wanted = x[:64].double() @ weight.double().T
        assert (whole[:64].double() - wanted).abs().max() < 0.05
    assert not caplog.records, "there is no exact set of sizes"


@pytest.mark.parametrize("name", SHAPES)
def test_batched_products_are_exact_in_every_number_of_sequences_and_rows(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    shape = SHAPES[name]
    kv_heads = shape.kv_heads
    products = BatchedProducts.measured(
        device, kv_heads=kv_heads, head_dim=shape.head_dim, chunk_tokens=128
    )
    print(f"{name}: {products.sizes}")
    assert not caplog.records, "there is no exact set of sizes"
    queries = sample((100 * kv_heads, 48, shape.head_dim), device, torch.float32)
    keys = sample((100 * kv_heads, 128, shape.head_dim), device, torch.float32)
    whole = products.bmm(queries, keys.transpose(1, 2))
    torch.testing.assert_close(whole, torch.bmm(queries, keys.transpose(1, 2)), atol=1e-3, rtol=0)
    for seqs in (1, 2, 3, 5, 8, 13, 31, 64, 77):
        part = slice((100 - seqs) * kv_heads, None)
        found = products.bmm(queries[part], keys[part].transpose(1, 2))
        assert torch.equal(found, whole[part]), f"{seqs} sequences"
    for rows in (16, 32, 48):
        found = products.bmm(queries[:, :rows], keys.transpose(1, 2))
        assert torch.equal(found, whole[:, :rows]), f"{rows} rows"
    many = sample((kv_heads, 5000, 128), device, torch.float32)
    whole = products.bmm(many, keys[:kv_heads])
    for rows in (16, 112, 2048, 4000):
        assert torch.equal(products.bmm(many[:, :rows], keys[:kv_heads]), whole[:, :rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden", [48, 576, 2048, 4096, 8192])
def test_everything_between_the_products_is_row_exact(
    hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Once rows are padded to a multiple, which is what the network does."""
    ops = TorchOps(ROW_MULTIPLE)
    x, weight = sample((512, hidden), device, dtype), sample((hidden,), device, dtype)
    normed = ops.rms_norm(x, weight, 1e-5)
    activated = ops.silu_mul(x.clone())
    heads = x.view(512, -1, 8).clone()
    angles = sample((512, 4), device, torch.float32) * 100
    ops.rotate(heads, angles.cos(), angles.sin())
    for count in (16, 32, 48, 64, 80, 256):
        rows = slice(512 - count, 512)
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-5), normed[rows])
        assert torch.equal(ops.silu_mul(x[rows].clone()), activated[rows])
        turned = x[rows].view(count, -1, 8).clone()
        ops.rotate(turned, angles[rows].cos(), angles[rows].sin())
        assert torch.equal(turned, heads[rows])
    weights = sample((8, 48, 128), device, torch.float32).exp()
    whole = weights.sum(-1, keepdim=True)
    for rows in (16, 32):
        assert torch.equal(weights[:, -rows:].sum(-1, keepdim=True), whole[:, -rows:])
        assert torch.equal(weights[:1, -rows:].sum(-1, keepdim=True), whole[:1, -rows:])


@pytest.mark.parametrize("vocab", [97, 258, 1000, 1025, 32001, 49152, 128256, 151936])
def test_what_is_said_and_what_is_reported_depend_on_the_row_alone(
    vocab: int, device: torch.device
) -> None:
    logits = sample((64, vocab), device, torch.float32) * 3
    reported = log_probabilities(logits)
    torch.testing.assert_close(reported, torch.log_softmax(logits, -1), atol=1e-4, rtol=0)
    rng = np.random.default_rng(0)
    draws = Draws(
        temperature=rng.choice([0, 0.7, 1, 1.5], 64).astype(np.float32),
        top_k=rng.choice([0, 0, 5, 40, 300], 64),
        top_p=rng.choice([1, 1, 0.9, 0.5], 64),
        min_p=rng.choice([0, 0, 0.05], 64).astype(np.float32),
        numbers=rng.random(64),
    )
    tokens, faulty = choose(logits.clone(), draws)
    assert not faulty
    for first, count in ((0, 1), (1, 1), (2, 1), (63, 1), (5, 2), (17, 3), (20, 7), (30, 17)):
        rows = slice(first, first + count)
        assert torch.equal(log_probabilities(logits[rows]), reported[rows])
        assert torch.equal(log_probabilities(logits[rows].clone()), reported[rows])
        own = draws.of(list(range(first, first + count)))
        assert choose(logits[rows].clone(), own)[0] == tokens[rows]
