"""Which weights a model must have, in Hugging Face's names, and the check that it has them."""

from __future__ import annotations

from collections.abc import Mapping

from layby.errors import ModelError
from layby.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight the model needs, by name. Linear weights are ``(outputs, inputs)``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        linears = (
            ("self_attn.q_proj", queries, hidden, config.qkv_bias),
            ("self_attn.k_proj", keys, hidden, config.qkv_bias),
            ("self_attn.v_proj", keys, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, queries, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        )
        for name, outputs, inputs, bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (outputs, inputs)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (outputs,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def check_shapes(config: ModelConfig, found: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Compare the tensors of a file with what the model needs, before any of them is read.

    Raises:
        ModelError: A tensor is missing, of another shape, or unknown. ``source`` names the file.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{source}: tensor {missing[0]} of shape {expected[missing[0]]} is missing"
            + _others(missing)
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(
                f"{source}: tensor {name} has shape {tuple(found[name])}, "
                f"the model's configuration asks for {shape}"
            )
    unknown = [name for name in found if name not in expected]
    if unknown:
        # Computing without a weight that the model was trained with would give plausible nonsense.
        raise ModelError(
            f"{source}: tensor {unknown[0]} of shape {tuple(found[unknown[0]])} has no place in "
            f"a {config.architecture} model" + _others(unknown)
        )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
