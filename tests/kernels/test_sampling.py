"""The kernel that chooses tokens, against the torch implementation.

The two sum float32 weights in different orders, so a draw may fall on either side of a border
between two tokens that is within rounding of it. What the kernel chooses must therefore be what the
reference chooses with the same numbers, or lie between what it chooses with numbers ``ROUNDING``
smaller and larger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from layby import kernels
from layby.execution import reference_sampling
from layby.execution.reference_sampling import Draws

pytestmark = pytest.mark.skipif(not kernels.available(), reason="kernels are not compiled here")

ISAS = kernels.available_isas() if kernels.available() else []
ROUNDING = 3e-6
LARGEST = 1 - 2.0**-53
VOCABS = [1, 2, 15, 16, 17, 255, 256, 257, 1000, 5000]
LARGE_VOCABS = [49152, 151_936]
LOGITS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "flat": lambda rng, shape: rng.standard_normal(shape),
    "peaked": lambda rng, shape: rng.standard_normal(shape) * 5,
    "equal": lambda rng, shape: np.full(shape, rng.choice([0.0, -0.0, 3.5, -1e30, 3e38])),
    "many ties": lambda rng, shape: rng.integers(-3, 3, shape) / 2,
    "both zeros": lambda rng, shape: rng.choice([0.0, -0.0], shape),
    "far apart": lambda rng, shape: (
        rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-149, 127, shape)
    ),
    "neighbours": lambda rng, shape: np.float32(1) + rng.integers(0, 9, shape) * 2.0**-23,
    "mostly ruled out": lambda rng, shape: np.where(
        rng.random(shape) < 0.98, -np.inf, rng.standard_normal(shape)
    ),
    "one left": lambda rng, shape: np.full(shape, -np.inf),
}


@pytest.fixture
def restore() -> Iterator[None]:
    """Put the number of threads and the instruction set back."""
    before = kernels.num_threads()
    yield
    kernels.set_num_threads(before)
    kernels.set_isa(ISAS[-1])


def random_logits(rng: np.random.Generator, kind: str, rows: int, vocab: int) -> np.ndarray:
    logits = LOGITS[kind](rng, (rows, vocab)).astype(np.float32)
    alive = rng.integers(0, vocab, rows)
    logits[np.arange(rows), alive] = np.maximum(logits[np.arange(rows), alive], -3.4e38)
    return logits


def random_draws(rng: np.random.Generator, rows: int, vocab: int) -> Draws:
    """Parameters of every kind, extreme ones often."""
    k, p = rng.integers(1, vocab + 1, rows), rng.random(rows)
    return Draws(
        rng.choice([0, 1e-5, 1e-3, 0.7, 1, 1, 5, 100], rows).astype(np.float32),
        np.where(
            rng.random(rows) < 0.3, k, rng.choice([0, 0, 0, -1, 1, 2, 40, vocab - 1, 2**40], rows)
        ),
        np.where(rng.random(rows) < 0.3, p, rng.choice([1, 1, 0.9, 0.5, 1e-9, LARGEST], rows)),
        rng.choice([0, 0, 0, 0.05, 0.5, 1], rows).astype(np.float32),
        np.where(rng.random(rows) < 0.8, rng.random(rows), rng.choice([0, LARGEST], rows)),
    )


def run(logits: np.ndarray, draws: Draws) -> tuple[np.ndarray, np.ndarray]:
    tokens, faulty = np.full(len(logits), -7, np.int64), np.ones(len(logits), np.bool_)
    kernels.choose_tokens(
        logits,
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.numbers,
        tokens,
        faulty,
    )
    return tokens, faulty


def run_everywhere(logits: np.ndarray, draws: Draws) -> np.ndarray:
    """Tokens, the same on every instruction set."""
    results = []
    for isa in ISAS:
        kernels.set_isa(isa)
        tokens, faulty = run(logits, draws)
        assert not faulty.any()
        results.append(tokens)
    kernels.set_isa(ISAS[-1])
    for isa, tokens in zip(ISAS, results, strict=True):
        np.testing.assert_array_equal(tokens, results[-1], isa)
    return results[-1]


def reference(logits: np.ndarray, draws: Draws) -> np.ndarray:
    tokens, faulty = reference_sampling.choose(torch.from_numpy(logits), draws)
    assert not faulty
    return np.array(tokens)


def check_against_reference(logits: np.ndarray, draws: Draws) -> None:
    tokens, wanted = run_everywhere(logits, draws), reference(logits, draws)
    for row, token in enumerate(tokens):
        here, x = draws.of([row]), logits[row].astype(np.float64)
        if here.temperature[0] < 1e-5:
            assert token == wanted[row], "greedy leaves no choice"
            continue
        shares = np.exp((x - x.max()) / here.temperature[0])
        assert shares[token] > 0
        assert shares[token] >= here.min_p[0] * (1 - ROUNDING)
        if token == wanted[row]:
            continue
        undecided = np.abs(shares - here.min_p[0]) <= ROUNDING * here.min_p[0]
        if np.any(undecided & (x < x.max())):
            continue  # which tokens are left is itself a matter of rounding
        vocab = len(x)
        is_cut = here.top_p[0] < 1 or 0 < here.top_k[0] < vocab
        order = np.argsort(-logits[row], kind="stable") if is_cut else np.arange(vocab)
        place = np.argsort(order)
        borders = [
            place[reference(logits[[row]], replace(here, numbers=numbers, top_p=top_p))[0]]
            for numbers, top_p in product(around(here.numbers, 0), around(here.top_p, 1e-12))
        ]
        if here.numbers[0] + ROUNDING >= 1:
            borders.append(vocab)
        assert min(borders) <= place[token] <= max(borders), (row, here, token)


def around(number: np.ndarray, least: float) -> list[np.ndarray]:
    """The number less and plus ``ROUNDING``; but 1, which is exact, remains."""
    if number[0] == 1:
        return [number]
    return [np.clip(number + by, least, LARGEST) for by in (-ROUNDING, ROUNDING)]


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from(VOCABS), kind=st.sampled_from([*LOGITS]))
@settings(max_examples=150)
@example(seed=0, vocab=5000, kind="equal")
@example(seed=0, vocab=5000, kind="flat")
@example(seed=0, vocab=5000, kind="far apart")
def test_tokens_are_those_of_the_reference(seed: int, vocab: int, kind: str) -> None:
    """Every combination of parameters, on logits of every kind."""
    rng = np.random.default_rng(seed)
    check_against_reference(random_logits(rng, kind, 12, vocab), random_draws(rng, 12, vocab))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_tokens_of_large_vocabularies_are_those_of_the_reference(vocab: int, kind: str) -> None:
    """Beyond what the kernel's short list holds."""
    rng = np.random.default_rng(vocab)
    check_against_reference(random_logits(rng, kind, 6, vocab), random_draws(rng, 6, vocab))


@pytest.mark.parametrize("kind", ["flat", "many ties", "equal"])
@pytest.mark.parametrize("top_k", [1, 40, 256, 257, 2000, 4097, 19_999])
def test_the_number_at_rank_r_of_top_k_equal_shares_is_the_rth_token(kind: str, top_k: int) -> None:
    """With the temperature so high that all weigh the same, every rank can be asked for by name."""
    rng = np.random.default_rng(top_k)
    vocab, ranks = 20_000, np.unique([0, 1, top_k // 3, top_k // 2, top_k - 1])
    ranks = ranks[ranks < top_k]
    logits = random_logits(rng, kind, 1, vocab)
    draws = Draws(
        np.full(len(ranks), 1e9, np.float32),
        np.full(len(ranks), top_k),
        np.ones(len(ranks)),
        np.zeros(len(ranks), np.float32),
        (ranks + 0.5) / top_k,
    )
    order = np.argsort(-logits[0], kind="stable")
    tokens = run_everywhere(np.repeat(logits, len(ranks), axis=0), draws)
    np.testing.assert_array_equal(tokens, order[ranks])


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.5, 0.99])
def test_top_p_keeps_as_many_equal_tokens_as_it_needs(top_p: float) -> None:
    """The last of the kept is the first whose predecessors and itself reach top_p."""
    vocab = 10_001
    numbers = np.array([0.0, LARGEST])
    draws = Draws(
        np.ones(2, np.float32), np.zeros(2, np.int64), np.full(2, top_p),
        np.zeros(2, np.float32), numbers,
    )  # fmt: skip
    tokens = run_everywhere(np.full((2, vocab), -3.0, np.float32), draws)
    np.testing.assert_array_equal(tokens, [0, np.ceil(top_p * vocab) - 1])


def test_numbers_spread_evenly_over_the_row_draw_each_token_in_proportion() -> None:
    """A draw looks numbers up, so evenly spaced ones count out the distribution itself."""
    rng = np.random.default_rng(0)
    vocab, count = 700, 20_000
    row = rng.standard_normal(vocab).astype(np.float32)
    for top_k in (0, 300):
        draws = Draws(
            np.full(count, 0.8, np.float32),
            np.full(count, top_k),
            np.ones(count),
            np.zeros(count, np.float32),
            (np.arange(count) + 0.5) / count,
        )
        tokens = run_everywhere(np.tile(row, (count, 1)), draws)
        weights = np.exp(row.astype(np.float64) / np.float32(0.8))
        if top_k:
            weights[np.argsort(-row, kind="stable")[top_k:]] = 0
        expected = weights / weights.sum() * count
        assert np.abs(np.bincount(tokens, minlength=vocab) - expected).max() < 1.1


def test_the_token_depends_on_the_row_alone(restore: None) -> None:
    """Not on the other rows, nor on the threads."""
    rng = np.random.default_rng(0)
    rows, vocab = 60, 9000
    kinds = [*LOGITS]
    logits = np.concatenate(
        [random_logits(rng, kinds[row % len(kinds)], 1, vocab) for row in range(rows)]
    )
    draws = random_draws(rng, rows, vocab)
    whole = run_everywhere(logits, draws)
    for threads in (1, 2, 3):
        kernels.set_num_threads(threads)
        for first, last in [(0, rows), (7, 30), *((row, row + 1) for row in range(rows))]:
            part = draws.of([*range(first, last)])
            np.testing.assert_array_equal(run(logits[first:last], part)[0], whole[first:last])


@pytest.mark.parametrize("vocab", [1, 16, 17, 300])
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(
    vocab: int, poison: float, restore: None
) -> None:
    """Every column in turn; the row after it is left in peace."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((2 * vocab, vocab)).astype(np.float32)
    logits[2 * np.arange(vocab), np.arange(vocab)] = poison
    draws = random_draws(rng, 2 * vocab, vocab)
    for isa in ISAS:
        kernels.set_isa(isa)
        tokens, faulty = run(logits, draws)
        np.testing.assert_array_equal(faulty, np.arange(2 * vocab) % 2 == 0)
        assert not tokens[faulty].any()
        healthy = [*range(1, 2 * vocab, 2)]
        np.testing.assert_array_equal(tokens[healthy], run(logits[healthy], draws.of(healthy))[0])


@pytest.mark.parametrize("vocab", [1, 17, 1000])
def test_a_row_of_nothing_but_minus_infinity_is_faulty(vocab: int, restore: None) -> None:
    """There is nothing to choose; nothing must be read or written out of bounds either."""
    draws = random_draws(np.random.default_rng(0), 30, vocab)
    for isa in ISAS:
        kernels.set_isa(isa)
        tokens, faulty = run(np.full((30, vocab), -np.inf, np.float32), draws)
        assert faulty.all()
        assert not tokens.any()


def test_no_rows_are_no_work() -> None:
    """A step may have nothing to sample."""
    tokens, _ = run(np.empty((0, 100), np.float32), random_draws(np.random.default_rng(0), 0, 100))
    assert len(tokens) == 0


@pytest.mark.parametrize("value", [np.nan, -1.0, 2.0, np.inf, -np.inf, 0.0])
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "numbers"])
def test_senseless_parameters_still_give_some_token(name: str, value: float) -> None:
    """They are refused before; here they must at least not reach out of the row."""
    rng = np.random.default_rng(0)
    for vocab in (3, 6000):
        draws = replace(
            random_draws(rng, 40, vocab),
            **{
                name: np.full(40, value, np.float64 if name in ("top_p", "numbers") else np.float32)
            },
        )
        tokens = run_everywhere(random_logits(rng, "flat", 40, vocab), draws)
        assert tokens.min() >= 0
        assert tokens.max() < vocab


def test_arrays_that_do_not_fit_are_refused() -> None:
    """One number per row, in the kernel's own types."""
    draws = random_draws(np.random.default_rng(0), 3, 10)
    logits = np.zeros((3, 10), np.float32)
    with pytest.raises(ValueError, match="top_p has length 2, not 3"):
        run(logits, replace(draws, top_p=draws.top_p[:2]))
    with pytest.raises(ValueError, match="logits has 0 columns"):
        run(logits[:, :0].copy(), draws)
    with pytest.raises(TypeError):
        run(logits.astype(np.float64), draws)
