"""Memory runs short, and not one token changes.

The short form runs by default; ``make pressure`` runs the long one: 64 requests of 200 prompt and
300 output tokens in 512 blocks.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from layby import LLM, RequestOutput, SamplingParams
from layby.engine import EngineStats
from layby.models import LoadedModel

LONG = os.environ.get("LAYBY_PRESSURE") == "long"
NUM_REQUESTS, PROMPT, OUTPUT, BLOCKS = (64, 200, 300, 512) if LONG else (12, 60, 60, 32)
AMPLE = NUM_REQUESTS * 2 * (PROMPT + OUTPUT) // 16
DTYPE = os.environ.get("LAYBY_PRESSURE_DTYPE", "float32")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


Tokens = list[list[list[int]]]
"""Token ids by request, sample and place."""


def generate(
    num_requests: int, n: int, **config: object
) -> tuple[list[RequestOutput], EngineStats]:
    """Seeded sampling at temperature 1, every answer to its full length."""
    rng = random.Random(20)
    prompts = [[rng.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(num_requests)]
    params = [
        SamplingParams(n=n, max_tokens=OUTPUT, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(num_requests)
    ]
    with LLM(model="smollm2", dtype=DTYPE, **config) as llm:
        return llm.generate(prompts, params), llm.stats()


def tokens(results: list[RequestOutput]) -> Tokens:
    return [[output.token_ids for output in result.outputs] for result in results]


def assert_complete(results: list[RequestOutput], n: int) -> None:
    for result in results:
        assert len(result.outputs) == n
        for output in result.outputs:
            assert len(output.token_ids) == OUTPUT
            assert output.finish_reason == "length"


@pytest.fixture(scope="module")
def undisturbed(smollm2: LoadedModel) -> Tokens:
    """What every run must say: ample blocks, nothing preempted."""
    results, stats = generate(NUM_REQUESTS, 1, num_blocks=AMPLE, swap_gib=0)
    assert_complete(results, 1)
    assert stats.preemptions_swap == stats.preemptions_recompute == 0
    return tokens(results)


@pytest.mark.parametrize("caching", [True, False])
def test_parking_changes_no_token_and_recomputes_none(undisturbed: Tokens, caching: bool) -> None:
    results, stats = generate(
        NUM_REQUESTS, 1, num_blocks=BLOCKS, swap_gib=4, enable_prefix_caching=caching
    )
    assert_complete(results, 1)
    assert stats.preemptions_swap > 0
    assert stats.recomputed_tokens == 0
    assert tokens(results) == undisturbed


def test_recomputing_changes_no_token(undisturbed: Tokens) -> None:
    results, stats = generate(
        NUM_REQUESTS, 1, num_blocks=BLOCKS, preemption_mode="recompute", enable_prefix_caching=False
    )
    assert_complete(results, 1)
    assert stats.preemptions_recompute > 0
    assert stats.recomputed_tokens > 0
    assert tokens(results) == undisturbed


def test_a_swap_pool_that_holds_hardly_anybody_changes_no_token(
    undisturbed: Tokens,
) -> None:
    """The largest victim fits, so that both ways out are taken."""
    largest = -(-(PROMPT + OUTPUT) // 16)
    results, stats = generate(NUM_REQUESTS, 1, num_blocks=BLOCKS, num_swap_blocks=largest)
    assert_complete(results, 1)
    assert stats.preemptions_recompute > 0
    assert tokens(results) == undisturbed


def test_parking_on_disk_changes_no_token(undisturbed: Tokens, tmp_path: Path) -> None:
    """RAM takes the largest victim and little more."""
    largest = -(-(PROMPT + OUTPUT) // 16)
    results, stats = generate(
        NUM_REQUESTS,
        1,
        num_blocks=BLOCKS,
        num_swap_blocks=2 * largest,
        swap_dir=tmp_path,
        swap_disk_gib=1,
    )
    assert_complete(results, 1)
    assert stats.demoted_blocks > 0
    assert stats.swap_faults == 0
    assert tokens(results) == undisturbed


def test_groups_of_four_samples_are_parked_together_and_change_no_token(
    smollm2: LoadedModel,
) -> None:
    number = NUM_REQUESTS // 4
    ample, _ = generate(number, 4, num_blocks=AMPLE, swap_gib=0)
    tight, stats = generate(number, 4, num_blocks=BLOCKS, swap_gib=4)
    assert_complete(tight, 4)
    assert stats.preemptions_swap > 0
    assert stats.recomputed_tokens == 0
    assert tokens(tight) == tokens(ample)
    assert len({tuple(output.token_ids) for output in tight[0].outputs}) == 4
