"""Cases 7 and 10, on the real model: where numbers could differ, they must not."""

from __future__ import annotations

import pytest

from layby import LLM, SamplingParams
from layby.models import LoadedModel

pytestmark = pytest.mark.slow


def prompt(length: int, first: int = 1000) -> list[int]:
    return [first + 37 * place for place in range(length)]


class TestCase07SeedStartsAfresh:
    """After a preemption the random stream began again and penalties forgot what was generated."""

    @pytest.mark.parametrize("mode", ["recompute", "swap"])
    def test_a_preempted_answer_equals_the_undisturbed_one(self, roomy_llm: LLM, mode: str) -> None:
        prompts = [prompt(40), prompt(40, first=3000)]
        params = SamplingParams(
            max_tokens=80, temperature=1.0, seed=7, presence_penalty=1.0, ignore_eos=True
        )
        wanted = [result.outputs[0].token_ids for result in roomy_llm.generate(prompts, params)]
        with LLM(
            model="smollm2",
            dtype="float32",
            num_blocks=12,
            num_swap_blocks=24,
            preemption_mode=mode,
        ) as llm:
            results = llm.generate(prompts, params)
            stats = llm.stats()
        assert stats.preemptions_swap + stats.preemptions_recompute > 0
        assert [result.outputs[0].token_ids for result in results] == wanted


class TestCase10ReusedPrefixAtABlocksEdge:
    """An answer changed when its prompt, or part of it, was found in the cache."""

    def test_a_cached_prompt_is_answered_as_an_uncached_one(
        self, smollm2: LoadedModel, roomy_llm: LLM
    ) -> None:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
        lengths = [15, 16, 17, 31, 32, 33]
        prompts = [prompt(length) for length in lengths]
        with LLM(
            model="smollm2", dtype="float32", num_blocks=256, enable_prefix_caching=False
        ) as llm:
            wanted = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        for repetition in range(5):
            cold = [prompt(50, first=20000 + repetition)]
            calls = [[one] for one in prompts] if repetition % 2 else [[*prompts, *cold]]
            results = [result for call in calls for result in roomy_llm.generate(call, params)]
            answers = [result.outputs[0].token_ids for result in results[: len(prompts)]]
            assert answers == wanted
        assert roomy_llm.engine.scheduler.metrics.prefix_cache_hit_tokens > 0
