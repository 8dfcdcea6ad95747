"""The network against transformers, on tiny random models of every architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from layby.errors import ModelError
from layby.execution.batch import build_batch
from layby.models.config import ModelConfig, RopeScaling
from layby.models.network import Network
from layby.models.transformer import Transformer
from layby.scheduling.plan import ScheduledSequence
from tests.execution.harness import (
    NETWORKS,
    TINY,
    Blocks,
    make_network,
    make_sequence,
    poisoned_pool,
    random_tokens,
    random_weights,
)

transformers = pytest.importorskip("transformers")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: class, what transformers is told, what our configuration says
    "llama": ("Llama", {}, {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    "llama, one key head per query head": (
        "Llama",
        {"num_key_value_heads": 6},
        {"num_kv_heads": 6},
    ),
    "llama with biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    ),
    "llama with linear rope scaling": (
        "Llama",
        {"rope": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": RopeScaling("linear", factor=4.0)},
    ),
    "llama 3": (
        "Llama",
        {"rope": LLAMA3_ROPE},
        {"rope_scaling": RopeScaling("llama3", factor=8.0, original_max_position=64)},
    ),
    "mistral": ("Mistral", {"sliding_window": None}, {}),
    "qwen2": ("Qwen2", {}, {"architecture": "qwen2", "qkv_bias": True}),
    "qwen3": (
        "Qwen3",
        {"head_dim": 16, "tie_word_embeddings": True},
        {"architecture": "qwen3", "qk_norm": True, "head_dim": 16, "tied_embeddings": True},
    ),
}


def build_oracle(kind: str, options: dict[str, Any]) -> Any:
    """A tiny random model; every parameter is random, so that none can be forgotten unseen."""
    options = dict(options)
    rope = {"rope_type": "default", "rope_theta": TINY.rope_theta} | options.pop("rope", {})
    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": TINY.vocab_size,
            "hidden_size": TINY.hidden_size,
            "intermediate_size": TINY.intermediate_size,
            "num_hidden_layers": TINY.num_layers,
            "num_attention_heads": TINY.num_heads,
            "num_key_value_heads": TINY.num_kv_heads,
            "max_position_embeddings": TINY.context_length,
            "rms_norm_eps": TINY.rms_norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "attn_implementation": "eager",
        }
        | options
    )
    torch.manual_seed(0)
    oracle = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    return oracle


def run(model: Network, tokens: list[int], cuts: list[int], block_size: int) -> torch.Tensor:
    """Logits of all positions, computed in chunks of the given sizes over a poisoned pool."""
    pool = poisoned_pool(model, 128, block_size)
    table = Blocks(128).take(-(-len(tokens) // block_size))
    sequence = make_sequence("a", tokens, block_table=table)
    logits, start = [], 0
    for count in cuts:
        batch = build_batch(
            [ScheduledSequence(sequence, start, count, ())],
            block_size=block_size,
        )
        hidden = model.forward(batch.flat, pool)
        logits.append(model.logits(hidden))
        start += count
    assert start == len(tokens)
    return torch.cat(logits)


@pytest.mark.parametrize("network", ["torch float32", "compiled float32", "cuda float32"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_however_the_prompt_is_cut(
    name: str, network: str
) -> None:
    """A wrong rotation, head order, norm or mask shows in the logits of some position."""
    if network not in NETWORKS:
        pytest.skip(f"{network} cannot be had here")
    kind, options, changes = CASES[name]
    block_size = 4
    if network == "compiled float32":  # whose heads and blocks are multiples of 16
        block_size = 16
        options, changes = {"head_dim": 16} | options, {"head_dim": 16} | changes
    oracle = build_oracle(kind, options)
    model = make_network(replace(TINY, **changes), _weights_of(oracle), network)
    tokens = random_tokens(200, TINY.vocab_size)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    for cuts in ([200], [70, 130], [190] + [1] * 10, [1] * 200):
        found = run(model, tokens, cuts, block_size).cpu()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def _weights_of(oracle: Any) -> dict[str, torch.Tensor]:
    weights = dict(oracle.state_dict())
    if oracle.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    return weights


def test_rope_factors_of_a_gguf_file_do_what_llama3_scaling_does() -> None:
    """GGUF stores the rule's outcome, one divisor per frequency, instead of the rule."""
    from layby.models.transformer import inverse_frequencies

    plain = inverse_frequencies(TINY)
    ruled = replace(TINY, rope_scaling=RopeScaling("llama3", factor=8.0, original_max_position=64))
    factors = tuple((plain / inverse_frequencies(ruled)).tolist())
    stored = replace(TINY, rope_scaling=RopeScaling("factors", factors=factors))
    torch.testing.assert_close(inverse_frequencies(stored), inverse_frequencies(ruled))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), "no tensor .*up_proj"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(3, 4)}), r"\[3, 4\], not \[97, 48\]"),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
            "no known use",
        ),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_refused(change: Any, message: str) -> None:
    """A model that misses a tensor, or has one nobody reads, would talk nonsense."""
    weights = random_weights(TINY)
    change(weights)
    with pytest.raises(ModelError, match=message):
        Transformer(TINY, weights)


def test_an_unknown_rope_scaling_is_refused() -> None:
    """Silently unscaled positions would only show in long contexts."""
    config: ModelConfig = replace(TINY, rope_scaling=RopeScaling("yarn"))
    with pytest.raises(ModelError, match="yarn"):
        Transformer(config, random_weights(TINY))
