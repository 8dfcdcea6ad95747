"""A model's configuration and weights from a directory as Hugging Face's libraries write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layby.errors import ModelError
from layby.models.config import ModelConfig, RopeScaling
from layby.models.weights import LM_HEAD, check_shapes

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""``model_type`` → architecture. Mistral differs from Llama in its window alone."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises:
        ModelError: The file cannot be read or holds something else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def read_config(directory: Path) -> ModelConfig:
    """The model's geometry from ``config.json``.

    The context length is ``max_position_embeddings`` as written: whether a RoPE-scaled model
    counts it before or after the stretch differs, and the smaller reading is always safe.

    Raises:
        ModelError: The architecture, or an option of the model, is not supported; or a needed
            entry is missing. The message names it.
    """
    path = directory / CONFIG_FILE
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise ModelError(
            f"{path}: model_type is {model_type!r}; supported: {', '.join(_ARCHITECTURES)}"
        )
    architecture = _ARCHITECTURES[model_type]
    _refuse_unsupported(path, raw)
    hidden_size = _required(path, raw, "hidden_size")
    num_heads = _required(path, raw, "num_attention_heads")
    attention_bias = bool(raw.get("attention_bias", False))
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    scaling, theta = _rope(path, raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_required(path, raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(path, raw, "intermediate_size"),
        num_layers=_required(path, raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or default_head_dim,
        context_length=_context_length(path, raw),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=architecture == "qwen2" or attention_bias,
        output_bias=architecture != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def read_weights(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """All weights under the names in the files, as ``dtype``.

    A weight already of that type shares the file's memory map.

    Raises:
        ModelError: There are no safetensors files, one is missing or damaged, or a tensor is
            missing, unknown or of the wrong shape.
    """
    from safetensors import SafetensorError, safe_open

    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    weights: dict[str, torch.Tensor] = {}
    shards = weight_files(directory)
    try:
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the handle is no mapping
                    if _is_redundant(name, config):
                        continue
                    where[name] = shard
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        check_shapes(config, shapes, source=str(directory))
        for shard in shards:
            with safe_open(shard, framework="pt") as file:
                for name, path in where.items():
                    if path == shard:
                        weights[name] = file.get_tensor(name).to(dtype)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read the weights in {shard}: {error}") from error
    return weights


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model: those its index names, or all there are.

    Raises:
        ModelError: There are none, or one that the index names is not there.
    """
    index = read_json(directory / INDEX_FILE)
    if index:
        names = sorted({str(name) for name in index.get("weight_map", {}).values()})
        files = [directory / name for name in names]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise ModelError(f"{directory}: {INDEX_FILE} names {absent[0]}, which is not there")
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{directory} holds no *.safetensors file, the only weight format read from a directory"
        )
    return files


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Tensors that carry no information: rotary tables, and the copy of a tied embedding."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_embeddings and name == LM_HEAD)


def _refuse_unsupported(path: Path, raw: dict[str, Any]) -> None:
    for key in ("num_local_experts", "num_experts"):
        if raw.get(key):
            raise ModelError(
                f"{path}: {key} is {raw[key]}, a mixture of experts; Layby runs dense models only"
            )
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method")
        raise ModelError(
            f"{path}: weights are quantised with {method!r}; supported are plain safetensors "
            "and every quantisation of GGUF"
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{path}: hidden_act is {activation!r}; only 'silu' is supported")


def _rope(path: Path, raw: dict[str, Any]) -> tuple[RopeScaling | None, float]:
    """(scaling, theta) from ``rope_parameters``, or ``rope_scaling`` and ``rope_theta`` of old."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"{path}: RoPE differs from layer to layer, which is not supported")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelError(f"{path}: partial_rotary_factor is {partial}; only 1.0 is supported")
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None, theta
    if kind not in ("linear", "llama3"):
        raise ModelError(f"{path}: RoPE scaling {kind!r} is not supported")
    try:
        if kind == "linear":
            return RopeScaling(kind="linear", factor=float(rope["factor"])), theta
        scaling = RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as error:
        raise ModelError(f"{path}: RoPE scaling {kind!r} lacks {error}") from error
    return scaling, theta


def _context_length(path: Path, raw: dict[str, Any]) -> int:
    longest = _required(path, raw, "max_position_embeddings")
    window = raw.get("sliding_window")
    if not window:
        return longest
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        slides = "sliding_attention" in layer_types
    else:
        # Qwen writes a window also where it is switched off; Mistral has no such switch.
        slides = bool(raw.get("use_sliding_window", raw["model_type"] == "mistral"))
    return min(longest, int(window)) if slides else longest


def _required(path: Path, raw: dict[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{path}: {key} is {'missing' if value is None else repr(value)}")
    return value
