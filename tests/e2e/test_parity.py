"""The default model says what the reference implementation says."""

from __future__ import annotations

import pytest
import torch
import transformers

from layby import LLM, SamplingParams
from layby.models import LoadedModel

NUM_TOKENS = 64
TIE = 1e-4
"""Logits closer than this are a tie, which rounding may decide either way."""

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about autumn leaves.",
    "Explain what a KV cache is, in two sentences.",
    "List three prime numbers larger than 50.",
    "Translate 'good morning' into Spanish, German and Italian.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "What is 17 times 23?",
    "Who wrote Pride and Prejudice?",
    "Write a Python function that reverses a string.",
    "Tell me a joke about computers.",
    "What are the planets of the solar system?",
    "Describe the taste of a lemon.",
    "How do I tie a bow tie?",
    "What happened in 1969?",
    "Name five rivers in Europe.",
    "Is a tomato a fruit or a vegetable?",
    "Write the first sentence of a mystery novel.",
    "What does HTTP stand for?",
    "Count from ten down to one.",
]


@pytest.fixture(scope="module")
def oracle(smollm2: LoadedModel) -> transformers.LlamaForCausalLM:
    """transformers' own network around the same weights."""
    config = smollm2.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    missing, unexpected = model.load_state_dict(smollm2.weights(torch.float32), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model.eval()


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(
    roomy_llm: LLM, oracle: transformers.LlamaForCausalLM
) -> None:
    """Twenty answers; each token is the oracle's first choice after the same tokens.

    By induction that is equality of the whole greedy answers. Where the oracle prefers another
    token, it must be a tie.
    """
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    results = roomy_llm.chat(conversations, params)
    ties = 0
    for result in results:
        prompt, answer = result.prompt_token_ids, result.outputs[0].token_ids
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best, first_choice = logits.max(-1)
        chosen = torch.tensor(answer)
        gap = best - logits.gather(1, chosen[:, None])[:, 0]
        assert gap[first_choice != chosen].le(TIE).all()
        ties += int((first_choice != chosen).sum())
    assert ties <= len(QUESTIONS)
