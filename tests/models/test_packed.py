"""int8 weights: what precedes packing keeps the function; the file is trusted only whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from layby import kernels
from layby.execution.batch import build_batch
from layby.models import packed_file
from layby.models.compiled import CompiledTransformer, pack_model
from layby.models.config import ModelConfig
from layby.models.rotation import rotate
from layby.models.smoothing import smooth
from layby.models.transformer import Transformer
from layby.scheduling import Request, ScheduledSequence
from tests.execution.harness import TINY, random_tokens, random_weights

MODELS = {
    "llama": TINY,
    "tied": replace(TINY, tied_embeddings=True),
    "one head per group": replace(TINY, num_heads=4, num_kv_heads=4),
    "odd width": replace(TINY, hidden_size=45),
    "qwen2": replace(TINY, architecture="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(TINY, architecture="qwen3", qk_norm=True),
    "all biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True),
}
"""Of every kind that can be loaded."""


def weights_with_outliers(config: ModelConfig) -> dict[str, Tensor]:
    """As trained models have them, in a channel of the residual stream and one within an MLP."""
    weights = random_weights(config)
    generator = torch.Generator().manual_seed(1)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes: dict[str, int] = {}
    if config.qkv_bias:
        sizes |= {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    if config.output_bias:
        sizes |= {"self_attn.o_proj": hidden}
    if config.mlp_bias:
        sizes |= {"mlp.gate_proj": inner, "mlp.up_proj": inner, "mlp.down_proj": hidden}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name, size in sizes.items():
            weights[f"{prefix}.{name}.bias"] = torch.randn(size, generator=generator)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                norm = torch.rand(config.head_dim, generator=generator) + 0.5
                weights[f"{prefix}.self_attn.{name}.weight"] = norm
        weights[f"{prefix}.mlp.up_proj.weight"][5] *= 40.0
    weights["model.embed_tokens.weight"][:, 3] *= 40.0
    return weights


def logits(config: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    if config.tied_embeddings and "lm_head.weight" in weights:
        config = replace(config, tied_embeddings=False)
    return Transformer(config, weights).run_dense(tokens)


@pytest.mark.parametrize("kind", MODELS)
def test_smoothing_and_rotating_keep_the_function(kind: str) -> None:
    config = MODELS[kind]
    weights = weights_with_outliers(config)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    tokens = random_tokens(50, config.vocab_size)
    wanted = logits(config, weights, tokens)
    smoothed = smooth(config, weights, tokens)
    torch.testing.assert_close(logits(config, smoothed, tokens), wanted, atol=1e-3, rtol=1e-3)
    rotated = rotate(config, smoothed)
    torch.testing.assert_close(logits(config, rotated, tokens), wanted, atol=1e-3, rtol=1e-3)
    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor), f"{name} of the caller has changed"


def peaks(x: Tensor) -> Tensor:
    """How far the largest channel stands out: 1 if all are equal."""
    return x.abs().amax(-1) / x.square().mean(-1).sqrt()


def test_outliers_are_gone_after_rotating_and_smoothing() -> None:
    config = replace(TINY, mlp_bias=True)
    weights = weights_with_outliers(config)
    embedding, up = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj"
    assert peaks(weights[embedding]).median() > 6
    assert peaks(rotate(config, weights)[embedding]).median() < 2.5
    smoothed = smooth(config, weights, random_tokens(50, config.vocab_size))
    for name in (f"{up}.weight", f"{up}.bias"):
        assert (smoothed[name][5] / weights[name][5]).abs().max() < 0.5


def test_rotating_leaves_ones_for_norms_and_does_not_depend_on_chance() -> None:
    weights = weights_with_outliers(TINY)
    first, second = rotate(TINY, weights), rotate(TINY, weights)
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("model.norm.weight", "model.layers.1.post_attention_layernorm.weight"):
        assert torch.equal(first[name], torch.ones(TINY.hidden_size))


@pytest.mark.skipif(not kernels.available(), reason="this installation lacks the compiled kernels")
@pytest.mark.parametrize("inner", [64, 68])
def test_int8_with_outliers_is_near_float32(inner: int) -> None:
    """The kernels mix the inputs of the down projections, which its packed weights must match."""
    config = replace(
        TINY, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=inner, mlp_bias=True
    )
    weights = weights_with_outliers(config)
    tokens = random_tokens(50, config.vocab_size)
    wanted = logits(config, weights, tokens)
    conditioned = rotate(config, smooth(config, weights, tokens))
    found = run_compiled(config, conditioned, tokens)
    plain = run_compiled(config, weights, tokens)
    error, plain_error = ((x - wanted).square().mean().sqrt() for x in (found, plain))
    assert error < 0.05 * wanted.std()
    assert error < plain_error * 0.75


def run_compiled(config: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """int8 logits of one sequence."""
    network = CompiledTransformer(config, pack_model(config, weights, "int8"), kv_dtype="int8")
    sequence = Request("a", tokens, max_tokens=1).sequences[0]
    sequence.block_table = list(range(-(-len(tokens) // 16)))
    item = ScheduledSequence(sequence, 0, len(tokens), ())
    kv_format = network.kv_format(16)
    pool = torch.zeros((len(sequence.block_table), *kv_format.shape), dtype=kv_format.dtype)
    return network.logits(network.forward(build_batch([item], block_size=16).flat, pool))


@pytest.mark.skipif(not kernels.available(), reason="this installation lacks the compiled kernels")
def test_packed_weights_come_back_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was damaged would give a model that talks nonsense."""
    monkeypatch.setenv("LAYBY_HOME", str(tmp_path))
    packed = pack_model(TINY, random_weights(TINY), "int8")
    assert packed_file.read("model", TINY.num_layers) is None
    packed_file.save(packed, "model")
    found = packed_file.read("model", TINY.num_layers)
    assert found is not None
    np.testing.assert_array_equal(found.embedding, packed.embedding)
    for mine, theirs in zip(found.layers, packed.layers, strict=True):
        np.testing.assert_array_equal(mine.qkv.weight.packed, theirs.qkv.weight.packed)
        np.testing.assert_array_equal(mine.down.weight.packed, theirs.down.weight.packed)
        np.testing.assert_array_equal(mine.post_norm, theirs.post_norm)
    assert packed_file.read("another", TINY.num_layers) is None
    path = packed_file.packed_path("model")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert packed_file.read("model", TINY.num_layers) is None
