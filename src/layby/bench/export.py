"""A model written out as a Hugging Face directory, for engines that cannot read its own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layby.errors import ModelError
from layby.models import ModelConfig, load

if TYPE_CHECKING:
    from layby.models.tokenizer import Tokenizer

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export_hugging_face(model: str, directory: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` in bfloat16, and the tokenizer's two files.

    Args:
        model: As :func:`layby.models.load` takes it; it must be on this machine.
        directory: Made if need be; files of these names in it are replaced.

    Raises:
        ModelError: The model cannot be read, or cannot be said in these files.
    """
    import torch
    from safetensors.torch import save_file

    loaded = load(model)
    config = config_json(loaded.config, loaded.tokenizer)
    directory.mkdir(parents=True, exist_ok=True)
    weights = loaded.weights(torch.bfloat16)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded.tokenizer._backend.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", _tokenizer_json(loaded.config, loaded.tokenizer))
    _write(directory / "config.json", config)


def config_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        ModelError: The rotary frequencies follow a rule for which there is no entry.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "factors":
        raise ModelError(
            "the model's file holds one RoPE divisor per frequency, which config.json cannot say"
        )
    if scaling is not None:
        rope.update(rope_type=scaling.kind, factor=scaling.factor)
    if scaling is not None and scaling.kind == "llama3":
        rope.update(
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_position_embeddings=scaling.original_max_position,
        )
    return {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": sorted(tokenizer.eos_ids),
        "torch_dtype": "bfloat16",
    }


def _tokenizer_json(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    names = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.bos_id is not None:
        names["bos_token"] = tokenizer.token_text(tokenizer.bos_id)
    if tokenizer.eos_ids:
        names["eos_token"] = tokenizer.token_text(min(tokenizer.eos_ids))
    return {**names, "model_max_length": config.context_length, "add_prefix_space": False}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
