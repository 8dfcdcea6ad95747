"""Products in calls of fixed sizes: nothing is left out, nothing twice, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from layby.models.exact_products import (
    BatchedProducts,
    ExactOps,
    cut,
    measure_row_counts,
    product,
)
from layby.models.transformer import Transformer
from tests.execution.harness import TINY, random_tokens, random_weights
from tests.execution.test_transformer import run


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).float()


def test_rows_are_cut_into_few_calls_that_cover_them() -> None:
    for counts in ((16,), (64, 256), (16, 32, 64, 128, 256, 512, 1024, 2048), (32, 2048)):
        for rows in range(1, 3000, 7):
            parts = cut(rows, counts)
            assert set(parts) <= set(counts)
            assert sum(parts[:-1]) < rows <= sum(parts)
    assert cut(1, (64, 256)) == [64]
    assert cut(100, (64, 256)) == [64, 64]
    assert cut(150, (64, 128, 256)) == [256]
    assert cut(900, (64, 256, 1024)) == [1024]
    assert cut(2100, (64, 2048)) == [2048, 64]


@pytest.mark.parametrize("counts", [(16,), (16, 64), (32, 256)])
def test_a_product_in_several_calls_is_the_product(counts: tuple[int, ...]) -> None:
    """Sums of small whole numbers are exact in any order, so the two must be equal."""
    weight = numbers(24, 40)
    for rows in (1, 15, 16, 17, 100, 300):
        x = numbers(rows, 40)
        assert torch.equal(product(x, weight, counts), x @ weight.T)


@pytest.mark.parametrize("sizes", [{16: (1,)}, {16: (4, 1), 64: (2, 1)}])
def test_batched_products_in_several_calls_are_the_products(
    sizes: dict[int, tuple[int, ...]],
) -> None:
    products = BatchedProducts(3, sizes)
    for seqs in (1, 2, 3, 7):
        for rows in (16, 48, 112, 150):
            a, b = numbers(3 * seqs, rows, 8), numbers(3 * seqs, 8, 20)
            assert torch.equal(products.bmm(a, b), torch.bmm(a, b))


def test_only_sizes_that_round_alike_wherever_a_row_lies_are_used_together(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that rounds otherwise from 128 rows on, and in 32 rows by the row's place."""

    def library(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        torch.matmul(a, b, out=out)
        if len(a) >= 128:
            out.mul_(1 + 2**-20)
        if len(a) == 32:
            out[::2].mul_(1 + 2**-20)
        return out

    monkeypatch.setattr(torch, "mm", library)
    counts = measure_row_counts(numbers(24, 40))
    assert counts in ((16, 64), (128, 256, 512, 1024, 2048))
    assert not caplog.records


def test_a_library_without_any_exact_size_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def library(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return torch.matmul(a, b, out=out).mul_(torch.arange(len(a))[:, None] + 1)

    monkeypatch.setattr(torch, "mm", library)
    measure_row_counts(numbers(24, 40))
    assert "round differently" in caplog.text


def test_a_network_with_exact_products_computes_what_it_does_without() -> None:
    weights = random_weights(TINY)
    matrices = [tensor for tensor in weights.values() if tensor.dim() == 2]
    plain = Transformer(TINY, weights, dtype=torch.float32)
    matrices += [torch.empty(plain._layers[0].qkv.weight.shape), plain._layers[0].gate_up.weight]
    ops = ExactOps(matrices, num_kv_heads=TINY.num_kv_heads, head_dim=TINY.head_dim)
    exact = Transformer(TINY, weights, dtype=torch.float32, ops=ops)
    tokens = random_tokens(200, TINY.vocab_size, seed=0)
    for cuts in ([200], [70, 130], [190] + [1] * 10):
        found = run(exact, tokens, cuts, block_size=4)
        torch.testing.assert_close(found, run(plain, tokens, cuts, block_size=4), atol=1e-4, rtol=0)
