"""A model's configuration and weights from a GGUF file."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from layby.errors import ModelError
from layby.models.config import ModelConfig, RopeScaling
from layby.models.gguf_file import GgufFile
from layby.models.weights import check_shapes

if TYPE_CHECKING:
    import torch

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's rule, computed by the converter: one divisor per rotary frequency."""

_MAX_READERS = 8
"""Most threads that dequantise at the same time; more would only wait for memory."""

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def read_config(file: GgufFile) -> ModelConfig:
    """The model's geometry.

    Raises:
        ModelError: The architecture, or an option of the model, is not supported; or a needed
            key is missing. The message names it.
    """
    architecture = file.text("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of architecture {architecture!r}; "
            f"supported in GGUF: {', '.join(_ARCHITECTURES)}"
        )
    _refuse_unsupported(file, architecture)
    hidden_size = _required(file, f"{architecture}.embedding_length")
    num_heads = _required(file, f"{architecture}.attention.head_count")
    head_dim = file.integer(f"{architecture}.attention.key_length") or hidden_size // num_heads
    value_dim = file.integer(f"{architecture}.attention.value_length") or head_dim
    rotary_dim = file.integer(f"{architecture}.rope.dimension_count") or head_dim
    if not head_dim == value_dim == rotary_dim:
        raise ModelError(
            f"{file.path}: keys have {head_dim} dimensions per head, values {value_dim} and the "
            f"rotary embedding {rotary_dim}; Layby runs models where they are equal"
        )
    context_length = _required(file, f"{architecture}.context_length")
    window = file.integer(f"{architecture}.attention.sliding_window")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=_required(file, f"{architecture}.feed_forward_length"),
        num_layers=_required(file, f"{architecture}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.integer(f"{architecture}.attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        context_length=min(context_length, window) if window else context_length,
        rms_norm_eps=file.number(f"{architecture}.attention.layer_norm_rms_epsilon") or 1e-6,
        rope_theta=file.number(f"{architecture}.rope.freq_base") or 10000.0,
        rope_scaling=_rope_scaling(file, architecture, head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        tied_embeddings="output.weight" not in file.tensors,
    )


def read_weights(
    file: GgufFile, config: ModelConfig, *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All weights under Hugging Face's names, dequantised to ``dtype``.

    Raises:
        ModelError: A tensor is missing, unknown, of the wrong shape or cannot be dequantised.
    """
    names = {
        gguf_name: _hugging_face_name(gguf_name)
        for gguf_name in file.tensors
        if gguf_name != _ROPE_FACTORS
    }
    found = {name: file.tensors[gguf_name].shape for gguf_name, name in names.items()}
    check_shapes(config, found, source=str(file.path))

    def read(gguf_name: str) -> torch.Tensor:
        tensor = file.tensor(gguf_name)
        if config.architecture == "llama":
            if ".attn_q." in gguf_name:
                tensor = _unpermute(tensor, config.num_heads)
            elif ".attn_k." in gguf_name:
                tensor = _unpermute(tensor, config.num_kv_heads)
        return tensor.to(dtype)

    with ThreadPoolExecutor(max_workers=min(_MAX_READERS, os.cpu_count() or 1)) as pool:
        return dict(zip(names.values(), pool.map(read, names), strict=True))


def _refuse_unsupported(file: GgufFile, architecture: str) -> None:
    if (file.integer("split.count") or 1) > 1:
        raise ModelError(
            f"{file.path} is one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    if experts := file.integer(f"{architecture}.expert_count"):
        raise ModelError(
            f"{file.path} is a mixture of {experts} experts; Layby runs dense models only"
        )
    scaling = file.text(f"{architecture}.rope.scaling.type")
    if scaling not in (None, "none", "linear"):
        raise ModelError(f"{file.path} uses RoPE scaling {scaling!r}, which is not supported")
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(f"{file.path} uses RoPE scaling 'longrope', which is not supported")


def _rope_scaling(file: GgufFile, architecture: str, head_dim: int) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        factors = tuple(file.tensor(_ROPE_FACTORS).float().tolist())
        if len(factors) != head_dim // 2:
            raise ModelError(
                f"{file.path}: tensor {_ROPE_FACTORS} has {len(factors)} entries, "
                f"half the head dimension is {head_dim // 2}"
            )
        return RopeScaling(kind="factors", factors=factors)
    # Old files write rope.scale_linear and no type.
    factor = file.number(f"{architecture}.rope.scaling.factor") or file.number(
        f"{architecture}.rope.scale_linear"
    )
    if file.text(f"{architecture}.rope.scaling.type") == "none" or not factor or factor == 1.0:
        return None
    return RopeScaling(kind="linear", factor=factor)


def _required(file: GgufFile, key: str) -> int:
    value = file.integer(key)
    if value is None or value <= 0:
        raise ModelError(f"{file.path}: {key} is {'missing' if value is None else value}")
    return value


def _hugging_face_name(gguf_name: str) -> str:
    """The tensor's name in Hugging Face's scheme; an unknown name is returned as it is."""
    if match := _LAYER_TENSOR.fullmatch(gguf_name):
        layer, part, kind = match.groups()
        if part in _PER_LAYER:
            return f"model.layers.{layer}.{_PER_LAYER[part]}.{kind}"
    stem, _, kind = gguf_name.rpartition(".")
    return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL else gguf_name


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of Q and K in GGUF's llama architecture.

    ggml rotates neighbouring rows (2i, 2i+1) of a head; Hugging Face's layout rotates row i of
    the head's first half with row i of its second half. Weights ``[rows, inputs]`` or biases.
    """
    import torch

    # Moved as bytes by NumPy, which knows no bfloat16 but keeps to this thread.
    rows = tensor.reshape(tensor.shape[0], -1).view(torch.uint8).numpy()
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    ordered = np.ascontiguousarray(pairs.swapaxes(1, 2))
    return torch.from_numpy(ordered).view(tensor.dtype).view(tensor.shape)
