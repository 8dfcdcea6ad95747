"""Norm, activation and quantisation of the compiled kernels against NumPy."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from layby import kernels

pytestmark = pytest.mark.skipif(not kernels.available(), reason="kernels are not compiled here")

ISAS = kernels.available_isas() if kernels.available() else []
WIDTHS = [1, 7, 15, 16, 17, 33, 100, 576, 1536, 4096]
EPS = 1e-5


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


def random_f32(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32) * 3


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, scale = np.full(x.shape, 99, np.int8), np.full(len(x), np.nan, np.float32)
    kernels.quantise_rows(x, q, scale)
    return q, scale


def reference_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPS) * weight


def reference_silu_mul(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_rounded_to_the_nearest_127th_of_their_peak(rows: int, width: int) -> None:
    x = random_f32(rows, width)
    q, scale = quantised(x)
    np.testing.assert_allclose(scale, np.abs(x).max(axis=1, initial=0) / 127, rtol=1e-6)
    assert np.all(np.abs(q * scale[:, None].astype(np.float64) - x) <= 0.50001 * scale[:, None])
    assert np.all(np.abs(q).max(axis=1, initial=0) == 127) if width else True


@pytest.mark.parametrize("peak", [0.0, 1e-45, 1e-38, 1e-30, 1e30, 3e38])
def test_rows_of_extreme_size_do_not_overflow(peak: float) -> None:
    x = np.linspace(-1, 1, 33, dtype=np.float32)[None] * np.float32(peak)
    q, scale = quantised(x)
    assert np.all(np.isfinite(scale))
    assert np.all(np.abs(q * scale[:, None].astype(np.float64) - x) <= max(0.51 * scale[0], 1e-36))


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_delta", [True, False])
def test_add_rms_norm(rows: int, width: int, with_delta: bool) -> None:
    residual, weight = random_f32(rows, width), random_f32(width)
    delta = random_f32(rows, width)[::-1].copy() if with_delta else None
    expected = residual if delta is None else residual + delta

    updated, out = residual.copy(), np.full((rows, width), np.nan, np.float32)
    kernels.add_rms_norm(updated, delta, weight, EPS, out)
    np.testing.assert_array_equal(updated, expected)
    np.testing.assert_allclose(out, reference_norm(expected, weight), rtol=2e-6, atol=1e-12)

    updated, q, scale = (
        residual.copy(),
        np.empty((rows, width), np.int8),
        np.empty(rows, np.float32),
    )
    kernels.add_rms_norm_quant(updated, delta, weight, EPS, q, scale)
    np.testing.assert_array_equal(updated, expected)
    expected_q, expected_scale = quantised(out)
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_array_equal(scale, expected_scale)


@pytest.mark.parametrize("rows", [0, 1, 3, 70])
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(rows: int, width: int) -> None:
    gate_up = random_f32(rows, 2 * width) * 4
    out = np.full((rows, width), np.nan, np.float32)
    kernels.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, reference_silu_mul(gate_up), rtol=1e-6, atol=1e-30)

    q, scale = np.empty((rows, width), np.int8), np.empty(rows, np.float32)
    kernels.silu_mul_quant(gate_up.copy(), q, scale)
    mixed = kernels.mix(out).astype(np.float64)
    np.testing.assert_allclose(scale, np.abs(mixed).max(axis=1, initial=0) / 127, rtol=1e-5)
    assert np.all(np.abs(q * scale[:, None].astype(np.float64) - mixed) <= 0.5001 * scale[:, None])


@pytest.mark.parametrize("width", WIDTHS)
def test_mixing_is_undone_by_mixing_and_keeps_products(width: int) -> None:
    x, weight = random_f32(3, width), random_f32(5, width)
    np.testing.assert_allclose(kernels.mix(kernels.mix(x)), x, atol=1e-5)
    found = kernels.mix(x).astype(np.float64) @ kernels.mix(weight).T
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("width", [16, 48, 1536])
def test_mixing_spreads_an_outlier_over_sixteen_channels(width: int) -> None:
    x = np.zeros((1, width), np.float32)
    x[0, 5] = 4.0
    mixed = np.abs(kernels.mix(x))
    assert np.count_nonzero(mixed == 1.0) == 16
    assert np.count_nonzero(mixed) == 16


def test_silu_of_far_away_numbers_is_zero_or_the_number() -> None:
    gate_up = np.array([[-1e30, -200, -90, 0, 90, 200, 1e30, *[1.0] * 7]], np.float32)
    out = np.empty((1, 7), np.float32)
    kernels.silu_mul(gate_up, out)
    np.testing.assert_allclose(out, [[0, 0, 0, 0, 90, 200, 1e30]], atol=1e-7)


def test_exp_is_within_two_units_in_the_last_place() -> None:
    from layby import _kernels

    x = np.concatenate([np.linspace(-87, 88, 400_003), np.linspace(-1, 1, 100_001)])
    x = x.astype(np.float32)
    out = np.empty_like(x)
    _kernels.exp(x, out)
    exact = np.exp(x.astype(np.float64))
    ulp = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert np.max(np.abs(out - exact) / ulp) <= 2.0


def all_kernels(first: int, last: int, width: int) -> list[np.ndarray]:
    """Every result of the kernels for some rows out of the same hundred."""
    rows, weight = slice(first, last), random_f32(width)
    x, gate_up = random_f32(100, width)[rows], random_f32(100, 2 * width)[rows]
    normed, activated = np.empty_like(x), np.empty_like(x)
    kernels.add_rms_norm(x.copy(), x, weight, EPS, normed)
    kernels.silu_mul(gate_up, activated)
    results: list[np.ndarray] = [normed, activated]
    quantisers: list[Callable[[np.ndarray, np.ndarray], None]] = [
        lambda q, scale: kernels.quantise_rows(x, q, scale),
        lambda q, scale: kernels.add_rms_norm_quant(x.copy(), x, weight, EPS, q, scale),
        lambda q, scale: kernels.silu_mul_quant(gate_up.copy(), q, scale),
    ]
    for quantise in quantisers:
        q, scale = np.empty_like(x, np.int8), np.empty(len(x), np.float32)
        quantise(q, scale)
        results += [q, scale]
    return results


@pytest.mark.parametrize("width", [5, 31, 112, 576])
def test_bits_depend_on_the_row_alone(width: int, threads: None) -> None:
    """Not on the other rows, on the threads, or on the instruction set."""
    in_use = kernels.isa()
    kernels.set_isa("generic")
    whole = all_kernels(0, 100, width)
    kernels.set_isa(in_use)
    for count in (1, 2, 3):
        kernels.set_num_threads(count)
        for first, last in ((0, 1), (7, 8), (3, 6), (40, 97), (0, 100)):
            for part, full in zip(all_kernels(first, last, width), whole, strict=True):
                np.testing.assert_array_equal(part, full[first:last])


@pytest.mark.parametrize("column", range(17))
def test_a_number_maps_to_the_same_bits_wherever_it_lies_in_its_row(column: int) -> None:
    """The masked tail of a row must round like its body."""
    gate_up = np.full((1, 34), 0.7, np.float32)
    gate_up[0, column], gate_up[0, 17 + column] = -1.2345, 0.777
    first = np.array([[-1.2345, 0.777]], np.float32)
    out, alone = np.empty((1, 17), np.float32), np.empty((1, 1), np.float32)
    kernels.silu_mul(gate_up, out)
    kernels.silu_mul(first, alone)
    assert out[0, column] == alone[0, 0]


def test_python_threads_may_call_at_once() -> None:
    """The GIL is released, so the pool must keep two callers apart."""
    x = random_f32(64, 576)
    expected = quantised(x)
    wrong = []

    def call() -> None:
        for _ in range(50):
            q, scale = quantised(x)
            if not (np.array_equal(q, expected[0]) and np.array_equal(scale, expected[1])):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


FORK_AND_EXIT = """
import os, numpy as np
from layby import kernels
x = np.ones((512, 576), np.float32)
q, scale = np.empty(x.shape, np.int8), np.empty(512, np.float32)
kernels.set_num_threads(3)
kernels.quantise_rows(x, q, scale)
child = os.fork()
q[:] = 0
kernels.quantise_rows(x, q, scale)
assert (q == 127).all()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print("both done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_kernels_work_on_both_sides_of_a_fork_and_the_process_ends() -> None:
    """A child has none of its parent's threads; waiting for them would hang it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK_AND_EXIT],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("both done\n", 0), done.stderr
