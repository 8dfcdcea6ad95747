"""Matrix products of the compiled kernels against NumPy, on every instruction set there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from layby import kernels
from layby.kernels import Bfloat16Weight, Float32Weight, Int8Weight

pytestmark = pytest.mark.skipif(not kernels.available(), reason="kernels are not compiled here")

ISAS = kernels.available_isas() if kernels.available() else []
DEFAULT_MODEL = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # qkv, o, gate+up, down
ODD = [(1, 1), (1, 4), (5, 3), (16, 8), (31, 5), (33, 66), (48, 127), (65, 130)]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test on every instruction set of this processor."""
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(ISAS[-1])


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = kernels.num_threads()
    yield
    kernels.set_num_threads(before)


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_int8(rows: int, k: int) -> np.ndarray:
    return rng(rows, k, 1).integers(-127, 128, (rows, k)).astype(np.int8)


def random_f32(*shape: int) -> np.ndarray:
    return rng(*shape).standard_normal(shape).astype(np.float32)


def unpack(weight: Int8Weight) -> np.ndarray:
    """The int8 matrix that a packed weight stands for, by the drawing in csrc/gemm.h."""
    n, groups = len(weight.scale), -(-weight.size_in // 4)
    panels = weight.packed.reshape(-1, groups, 32, 4).transpose(0, 2, 1, 3)
    return (panels.reshape(-1, groups * 4)[:n, : weight.size_in].astype(np.int16) - 128).astype(
        np.int8
    )


def int8_product(weight: Int8Weight, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), len(weight.scale)), np.nan, np.float32)
    weight.linear(x, np.linspace(0.5, 2.0, len(x), dtype=np.float32), bias, out)
    return out


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("n", "k"), ODD)
def test_weights_are_rounded_per_channel_and_lie_where_the_layout_says(n: int, k: int) -> None:
    w = random_f32(n, k)
    w[0] = 0.0
    weight = Int8Weight.quantise(w)
    peak = np.abs(w).max(axis=1)
    np.testing.assert_allclose(weight.scale, peak / 127, rtol=1e-6)
    q = unpack(weight)
    assert np.all(np.abs(q * weight.scale[:, None] - w) <= 0.5001 * weight.scale[:, None])
    assert np.all(np.abs(q).max(axis=1)[peak > 0] == 127)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 12, 13, 64, 250])
@pytest.mark.parametrize(("n", "k"), ODD)
def test_int8_product_is_exact_for_any_shape(rows: int, n: int, k: int) -> None:
    """The integer sum is exact, so only the scaling rounds, in a known order."""
    weight = Int8Weight.quantise(random_f32(n, k))
    x, bias = random_int8(rows, k), random_f32(n)
    sums = x.astype(np.int32) @ unpack(weight).astype(np.int32).T
    x_scale = np.linspace(0.5, 2.0, rows, dtype=np.float32)
    expected = sums.astype(np.float32) * (x_scale[:, None] * weight.scale)
    np.testing.assert_array_equal(int8_product(weight, x), expected)
    np.testing.assert_array_equal(int8_product(weight, x, bias), expected + bias)


@pytest.mark.parametrize(("n", "k"), [*DEFAULT_MODEL, (49152, 576)])
def test_int8_product_at_the_default_models_sizes(n: int, k: int) -> None:
    weight = Int8Weight.quantise(random_f32(n, k))
    x = random_int8(17, k)
    sums = x.astype(np.float64) @ unpack(weight).astype(np.float64).T  # exact below 2^53
    x_scale = np.linspace(0.5, 2.0, 17, dtype=np.float32)
    expected = sums.astype(np.float32) * (x_scale[:, None] * weight.scale)
    np.testing.assert_array_equal(int8_product(weight, x), expected)


def test_int8_product_does_not_saturate_at_the_extremes() -> None:
    """Pairs of u8 times s8 exceed 16 bits; the sums of the longest rows come near 32 bits."""
    for k in (8, 131072):
        weight = Int8Weight.quantise(np.ones((2, k), np.float32))
        for value in (127, -127):
            out = np.empty((1, 2), np.float32)
            weight.linear(np.full((1, k), value, np.int8), np.ones(1, np.float32), None, out)
            np.testing.assert_array_equal(
                out, np.full_like(out, np.float32(127 * value * k) * weight.scale[0])
            )


def test_a_row_has_the_same_bits_whatever_shares_the_call(threads: None) -> None:
    """Parked work resumes beside other rows, perhaps on other threads, with the same tokens."""
    n, k = 100, 130
    w = random_f32(n, k)
    x8, x = random_int8(300, k), random_f32(300, k)
    scale = random_f32(300)
    int8, bf16, f32 = Int8Weight.quantise(w), Bfloat16Weight.pack(to_bf16(w)), Float32Weight.pack(w)

    def products(first: int, last: int) -> np.ndarray:
        outs = np.empty((3, last - first, n), np.float32)
        int8.linear(x8[first:last], scale[first:last], None, outs[0])
        bf16.linear(x[first:last], None, outs[1])
        f32.linear(x[first:last], None, outs[2])
        return outs

    kernels.set_num_threads(1)
    whole = products(0, 300)
    for count in (1, 2, 3, 5):
        kernels.set_num_threads(count)
        for first, rows in ((0, 1), (7, 1), (3, 2), (5, 11), (12, 12), (1, 13), (40, 64), (0, 300)):
            np.testing.assert_array_equal(
                products(first, first + rows), whole[:, first : first + rows]
            )


@pytest.mark.parametrize("rows", [0, 1, 3, 13, 40])
@pytest.mark.parametrize(("n", "k"), [*ODD, *DEFAULT_MODEL])
def test_float_products_agree_with_double_precision(rows: int, n: int, k: int) -> None:
    w, x, bias = random_f32(n, k), random_f32(rows, k), random_f32(n)
    tolerance = 2e-6 * np.sqrt(k) * 4

    out = np.full((rows, n), np.nan, np.float32)
    Float32Weight.pack(w).linear(x, bias, out)
    np.testing.assert_allclose(out, x.astype(np.float64) @ w.T + bias, atol=tolerance, rtol=1e-5)

    Bfloat16Weight.pack(to_bf16(w)).linear(x, bias, out)
    rounded = from_bf16(to_bf16(x)).astype(np.float64) @ from_bf16(to_bf16(w)).T + bias
    np.testing.assert_allclose(out, rounded, atol=tolerance, rtol=1e-5)


def test_arrays_that_do_not_fit_are_refused_with_the_numbers() -> None:
    weight = Int8Weight.quantise(random_f32(8, 16))
    x, scale = random_int8(3, 16), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"out has shape \[3, 9\], not \[3, 8\]"):
        weight.linear(x, scale, None, np.empty((3, 9), np.float32))
    with pytest.raises(ValueError, match="x_scale has length 2, not 3"):
        weight.linear(x, scale[:2], None, np.empty((3, 8), np.float32))
    with pytest.raises(ValueError, match="w has length 512"):
        weight.linear(random_int8(3, 20), scale, None, np.empty((3, 8), np.float32))
    with pytest.raises(TypeError):
        weight.linear(x.astype(np.int32), scale, None, np.empty((3, 8), np.float32))
    with pytest.raises(TypeError):
        weight.linear(x, scale, None, np.empty((8, 3), np.float32).T)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction set 'avx9000'"):
        kernels.set_isa("avx9000")
