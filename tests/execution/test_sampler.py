"""Sampling: what each parameter does, and that a row's token depends on that row alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from layby import kernels
from layby.execution.philox import philox_4x32, uniforms
from layby.execution.reference_sampling import top_tokens
from layby.execution.sampler import Sampler, Samples, describe
from layby.sampling_params import SamplingParams
from layby.scheduling.request import Sequence
from tests.execution.harness import make_sequence

VOCAB = 1000


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run each test with the compiled kernel and with the torch implementation."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "available", lambda: False)
    elif not kernels.available():
        pytest.skip("kernels are not compiled here")
    return str(request.param)


def draw(logits: torch.Tensor, sequences: list[Sequence]) -> Samples:
    return Sampler().sample(logits.clone(), sequences)


def draw_many(row: Iterable[float], count: int = 4000, **options: Any) -> list[int]:
    """Tokens drawn from one distribution under ``count`` seeds."""
    sequences = [
        make_sequence(str(seed), [0], SamplingParams(seed=seed, **options)) for seed in range(count)
    ]
    return draw(torch.tensor(list(row)).expand(count, -1), sequences).tokens


def draw_one(row: Iterable[float], sequence: Sequence) -> int:
    return draw(torch.tensor([list(row)]), [sequence]).tokens[0]


def chi_square_is_plausible(tokens: list[int], probabilities: torch.Tensor) -> bool:
    """Pearson's test, by the Wilson-Hilferty normal approximation, at 5 standard deviations."""
    expected = probabilities.numpy() * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any(), "an impossible token was drawn"
    used = expected > 0
    statistic = ((counts[used] - expected[used]) ** 2 / expected[used]).sum()
    freedom = used.sum() - 1
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 5)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    """Vectors of the authors' own Random123 library."""
    words = philox_4x32(np.array([counter], np.uint32), np.array([key], np.uint32))
    assert words[0].tolist() == expected


def test_uniforms_are_spread_evenly_and_depend_on_every_input() -> None:
    """Two samples or positions that share a number would repeat each other."""
    numbers = uniforms(range(20000), [0] * 20000, [7] * 20000)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 120
    few = uniforms([1, 2, 1, 1, -1, 2**64 - 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0])
    assert len(set(few[:5])) == 5
    assert few[4] == few[5], "seeds are taken modulo 2^64"


def test_greedy_takes_the_most_likely_token_and_the_smaller_id_of_equals() -> None:
    """A tie that falls by chance would make greedy output irreproducible."""
    row = [0.0] * VOCAB
    row[700] = row[300] = row[901] = 2.0
    assert draw_one(row, make_sequence("a", [0])) == 300
    assert draw_one(row, make_sequence("a", [0], SamplingParams(temperature=1e-7, seed=1))) == 300


def test_plain_sampling_follows_the_softmax() -> None:
    """Chi-square over 300 tokens, more than one block of the cumulative sum."""
    torch.manual_seed(0)
    row = torch.randn(300)
    tokens = draw_many(row.tolist(), 20000)
    assert chi_square_is_plausible(tokens, row.softmax(-1))


def test_temperature_divides_the_logits() -> None:
    """Chi-square at a temperature that changes the distribution visibly."""
    row = torch.linspace(-2, 2, 40)
    tokens = draw_many(row.tolist(), 8000, temperature=0.5)
    assert chi_square_is_plausible(tokens, (row * 2).softmax(-1))
    assert not chi_square_is_plausible(tokens, row.softmax(-1))


def test_top_k_keeps_that_many_and_the_smaller_ids_of_equals() -> None:
    """Which of several equal tokens are kept must not be left to a sort's whims."""
    row = torch.zeros(VOCAB)
    row[[10, 500]] = 1.0
    tokens = draw_many(row.tolist(), 3000, top_k=4)
    expected = torch.full((VOCAB,), -math.inf)
    expected[[0, 1, 10, 500]] = row[[0, 1, 10, 500]]
    assert chi_square_is_plausible(tokens, expected.softmax(-1))


@pytest.mark.parametrize("flatness", [0.2, 3.0], ids=["flat: many kept", "peaked: few kept"])
def test_top_p_keeps_the_smallest_set_that_reaches_it(flatness: float) -> None:
    """Also where the set is wider than the candidates that are looked at first."""
    torch.manual_seed(0)
    row = torch.randn(VOCAB) * flatness
    ranked = row.softmax(-1).sort(descending=True)
    kept = int((ranked.values.double().cumsum(-1) < 0.7).sum()) + 1
    assert (kept > 256) == (flatness < 1)
    tokens = draw_many(row.tolist(), 12000, top_p=0.7)
    expected = torch.zeros(VOCAB)
    expected[ranked.indices[:kept]] = ranked.values[:kept]
    assert chi_square_is_plausible(tokens, expected / expected.sum())


def test_top_p_counts_against_what_top_k_left() -> None:
    """0.5, 0.3, 0.2: top-k 2 leaves 0.625 and 0.375, so top-p 0.6 keeps the first alone."""
    row = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert set(draw_many(row, 500, top_k=2, top_p=0.6)) == {0}
    assert set(draw_many(row, 500, top_p=0.6)) == {0, 1}


def test_a_top_k_beyond_the_first_candidates_is_honoured() -> None:
    """600 of 1000 equal tokens."""
    tokens = draw_many([0.0] * VOCAB, 6000, top_k=600)
    assert max(tokens) < 600
    assert max(tokens) > 550


def test_min_p_drops_what_is_far_less_likely_than_the_best() -> None:
    """Relative to the largest probability, after temperature."""
    row = torch.tensor([0.5, 0.26, 0.24]).log().tolist()
    assert set(draw_many(row, 500, min_p=0.5)) == {0, 1}
    assert set(draw_many(row, 500, min_p=0.5, temperature=2.0)) == {0, 1, 2}
    assert set(draw_many(row, 500, min_p=0.5, top_p=0.5)) == {0}


def test_repetition_penalty_counts_prompt_and_output_whatever_the_sign() -> None:
    """Dividing a negative logit would reward the repeated token."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    sequence = make_sequence("a", [0], params)
    sequence.tokens.append(1)
    assert draw_one([3.0, 2.9, 1.6, -9.0], sequence) == 2
    assert draw_one([-1.0, -1.1, -1.9, -9.0], sequence) == 2


def test_presence_and_frequency_penalties_count_output_only() -> None:
    """OpenAI's rule: logit - presence * (count > 0) - frequency * count."""
    sequence = make_sequence(
        "a", [0, 0], SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    )
    sequence.tokens += [1, 1]
    assert draw_one([1.0, 2.01, 0.0], sequence) == 1
    assert draw_one([1.0, 1.99, 0.0], sequence) == 0


def test_token_counts_keep_up_with_a_growing_sequence() -> None:
    """The counts are built once and then extended; a token must not be missed or counted twice."""
    sampler = Sampler()
    sequence = make_sequence("a", [5, 6], SamplingParams(temperature=0.0, frequency_penalty=1.0))
    row = torch.arange(40, 0, -1).float().mul(0.6)
    for _ in range(60):
        output = sequence.output_tokens
        wanted = row - torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=40)
        token = sampler.sample(row.clone().unsqueeze(0), [sequence]).tokens[0]
        assert token == int(wanted.argmax())
        sequence.tokens.append(token)
    # After a preemption by recompute nothing is scheduled differently for the sampler.
    assert (
        draw(row.unsqueeze(0), [sequence]).tokens
        == sampler.sample(row.clone().unsqueeze(0), [sequence]).tokens
    )
    sampler.release("a")
    sampler.release("never seen")
    again = make_sequence("a", [5, 6], SamplingParams(temperature=0.0, frequency_penalty=1.0))
    assert sampler.sample(row.clone().unsqueeze(0), [again]).tokens == [0]


def test_logit_bias_is_added_after_the_penalties() -> None:
    """A bias of 100 forces a token even if it is penalised."""
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0, logit_bias={0: 100.0, 1: -100})
    assert draw_one([1.0, 50.0, 40.0], make_sequence("a", [0], params)) == 0


def test_stop_tokens_are_ruled_out_until_min_tokens() -> None:
    """The token after the last forbidden one may end the sequence."""
    params = SamplingParams(temperature=0.0, min_tokens=2)
    sequence = make_sequence("a", [0], params, stop_token_ids=(1, 2))
    found = []
    for _ in range(4):
        found.append(draw_one([1.0, 3.0, 2.0, 0.0], sequence))
        sequence.tokens.append(found[-1])
    assert found == [0, 0, 1, 1]


PARAMETERS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.7, logprobs=3),
    SamplingParams(seed=3, top_p=0.9),
    SamplingParams(seed=4, top_p=0.5),
    SamplingParams(seed=5, top_k=20),
    SamplingParams(seed=6, top_k=700, top_p=0.95),
    SamplingParams(seed=7, min_p=0.1),
    SamplingParams(seed=8, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(seed=9, logit_bias={3: 5.0}, presence_penalty=1.0, logprobs=0),
]


def test_a_row_gives_the_same_token_and_logprobs_in_any_company() -> None:
    """Sums over one single row are split over threads; over several they are not."""
    torch.manual_seed(0)
    vocab, rows = 50000, 40
    logits = torch.randn(rows, vocab) * 2
    logits[1::3] = (logits[1::3] * 4).round() / 4  # many ties, as bfloat16 logits have
    sequences = [
        make_sequence(str(i), [i, 3, i], PARAMETERS[i % len(PARAMETERS)]) for i in range(rows)
    ]
    together = draw(logits, sequences)
    order = torch.randperm(rows).tolist()
    shuffled = draw(logits[order], [sequences[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled.tokens[place] == together.tokens[i]
        assert shuffled.logprobs[place] == together.logprobs[i]
    for i in range(rows):
        alone = draw(logits[i : i + 1], [sequences[i]])
        assert alone.tokens == [together.tokens[i]], PARAMETERS[i % len(PARAMETERS)]
        assert (alone.logprobs or [None]) == [together.logprobs[i]]


def test_the_seed_the_sample_and_the_position_decide_and_nothing_else() -> None:
    """A restart, a new batch or another request id must not change a seeded result."""
    row = [0.0] * VOCAB
    sequence = make_sequence("a", [1, 2, 3], SamplingParams(seed=5))
    token = draw_one(row, sequence)
    assert draw_one(row, make_sequence("b", [7, 8, 9], SamplingParams(seed=5))) == token
    other_seed = make_sequence("a", [1, 2, 3], SamplingParams(seed=6))
    other_place = make_sequence("a", [1, 2], SamplingParams(seed=5))
    other_sample = make_sequence("a", [1, 2, 3], SamplingParams(seed=5))
    other_sample.index = 1
    others = {draw_one(row, s) for s in (other_seed, other_place, other_sample)}
    assert len(others | {token}) == 4


@pytest.mark.parametrize(
    "poison",
    [
        lambda row: row.fill_(math.nan),
        lambda row: row[5:6].fill_(math.nan),
        lambda row: row[5:6].fill_(math.inf),
        lambda row: row.fill_(-math.inf),
    ],
    ids=["all NaN", "one NaN", "one inf", "all -inf"],
)
def test_a_row_that_is_not_finite_fails_its_request_alone(poison: Any) -> None:
    """One broken request must neither crash the batch nor change its neighbours."""
    torch.manual_seed(0)
    logits = torch.randn(len(PARAMETERS), VOCAB)
    sequences = [make_sequence(str(i), [1], p) for i, p in enumerate(PARAMETERS)]
    healthy = draw(logits, sequences)
    for i in range(len(sequences)):
        poisoned = logits.clone()
        poison(poisoned[i])
        result = draw(poisoned, sequences)
        assert list(result.failures) == [str(i)]
        assert [t for j, t in enumerate(result.tokens) if j != i] == [
            t for j, t in enumerate(healthy.tokens) if j != i
        ]
        assert 0 <= result.tokens[i] < VOCAB


def test_parameters_that_rule_out_every_token_fail_their_request_alone() -> None:
    """A vocabulary of nothing but stop tokens, with min_tokens."""
    bad = make_sequence("bad", [0], SamplingParams(seed=1, min_tokens=1), stop_token_ids=(0, 1))
    good = make_sequence("good", [0])
    result = draw(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), [bad, good])
    assert list(result.failures) == ["bad"]
    assert result.tokens[1] == 1


def test_logprobs_are_the_models_own_before_temperature_and_penalties() -> None:
    """As OpenAI and vLLM report them; ranks count from 1, equals by token id."""
    row = torch.tensor([1.0, 3.0, 2.0, 3.0])
    params = SamplingParams(temperature=0.0, logit_bias={2: 50.0}, logprobs=3)
    result = draw(row.unsqueeze(0), [make_sequence("a", [0], params)])
    (report,) = result.logprobs
    assert report is not None
    own = row.log_softmax(-1).tolist()
    assert (report.chosen.token_id, report.chosen.rank) == (2, 3)
    assert report.chosen.logprob == pytest.approx(own[2])
    assert [(t.token_id, t.rank) for t in report.top] == [(1, 1), (3, 2), (2, 3)]
    assert [t.logprob for t in report.top] == pytest.approx([own[1], own[3], own[2]])


def test_nobody_who_did_not_ask_gets_logprobs() -> None:
    """An empty list when nobody asked; None beside those who did."""
    quiet, asking = make_sequence("a", [0]), make_sequence("b", [0], PARAMETERS[2])
    assert draw(torch.zeros(1, 9), [quiet]).logprobs == []
    first, second = draw(torch.zeros(2, 9), [quiet, asking]).logprobs
    assert first is None
    assert second is not None
    assert describe(torch.zeros(1, 9), [4], [0])[0].top == ()


def test_top_tokens_agrees_with_a_stable_sort() -> None:
    """With ties everywhere, at the edge too."""
    torch.manual_seed(0)
    values = torch.randint(0, 6, (30, 400)).float()
    values[:5, 7:] = -math.inf
    best, ids = top_tokens(values, 50)
    wanted = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(ids, wanted.indices[:, :50])
    assert torch.equal(best, wanted.values[:, :50])
