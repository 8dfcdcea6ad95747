"""Configuration and weights, read back from files that other libraries wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant

from layby.errors import ModelError
from layby.models import ModelFiles, RopeScaling, gguf_model, hf_directory
from layby.models.gguf_file import GgufFile

GEOMETRY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_hf(directory: Path, family: str, **options: Any) -> dict[str, torch.Tensor]:
    """A tiny random model as transformers writes it; returns its weights."""
    shard = options.pop("max_shard_size", "1GB")
    config = getattr(transformers, f"{family}Config")(**GEOMETRY, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(directory, max_shard_size=shard)
    weights = dict(model.state_dict())
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"head_dim": 32}),
        ("Llama", {"max_shard_size": "20KB"}),
        ("Mistral", {}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_every_supported_family_loads_the_weights_it_was_saved_with(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Shards, biases, head norms, tying and an explicit head size each change the set of names."""
    saved = write_hf(tmp_path, family, **options)
    config = hf_directory.read_config(tmp_path)
    loaded = hf_directory.read_weights(tmp_path, config, dtype=torch.float32)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    if "max_shard_size" in options:
        assert len(hf_directory.weight_files(tmp_path)) > 1


def test_weights_come_in_the_type_that_was_asked_for(tmp_path: Path) -> None:
    saved = write_hf(tmp_path, "Llama")
    config = hf_directory.read_config(tmp_path)
    loaded = hf_directory.read_weights(tmp_path, config, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(loaded[name], saved[name].to(torch.bfloat16))


def test_a_llama_config_is_read_in_full(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama", rms_norm_eps=1e-5)
    edit_config(tmp_path, rope_parameters=None, rope_theta=5e5, rope_scaling=None)
    config = hf_directory.read_config(tmp_path)
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("llama", 32, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.head_dim, config.intermediate_size, config.context_length) == (16, 96, 128)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 5e5, None)
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))


LLAMA3_RULE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_llama3_rope_is_read_from_old_and_new_configs(tmp_path: Path, key: str) -> None:
    """transformers 5 renamed the entry and moved theta into it."""
    write_hf(tmp_path, "Llama")
    edit_config(tmp_path, rope_parameters=None, rope_theta=7e4)
    edit_config(tmp_path, **{key: {**LLAMA3_RULE, "rope_theta": 7e4}})
    config = hf_directory.read_config(tmp_path)
    assert config.rope_theta == 7e4
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_linear_rope_is_read_under_its_old_name(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama")
    edit_config(tmp_path, rope_parameters=None, rope_scaling={"type": "linear", "factor": 2.0})
    assert hf_directory.read_config(tmp_path).rope_scaling == RopeScaling("linear", 2.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    """Running such a model anyway would give plausible nonsense."""
    write_hf(tmp_path, "Llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=named):
        hf_directory.read_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "options", "length"),
    [
        ("Mistral", {"sliding_window": 48}, 48),
        ("Mistral", {"sliding_window": None}, 128),
        ("Qwen2", {"sliding_window": 48, "use_sliding_window": False}, 128),
        (
            "Qwen2",
            {"sliding_window": 48, "use_sliding_window": True, "max_window_layers": 1},
            48,
        ),
    ],
)
@pytest.mark.parametrize("with_layer_types", [True, False])
def test_a_sliding_window_in_use_caps_the_context(
    tmp_path: Path, family: str, options: dict[str, Any], length: int, with_layer_types: bool
) -> None:
    """Beyond the window full attention would differ from what the model was trained on."""
    write_hf(tmp_path, family, **options)
    if not with_layer_types:
        edit_config(tmp_path, layer_types=None)
    assert hf_directory.read_config(tmp_path).context_length == length


def test_a_mis_shaped_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama")
    edit_config(tmp_path, intermediate_size=80)
    config = hf_directory.read_config(tmp_path)
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \(96, 64\).*\(80, 64\)"):
        hf_directory.read_weights(tmp_path, config, dtype=torch.float32)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama")
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"layers\.2\..*missing.*more"):
        hf_directory.read_weights(tmp_path, hf_directory.read_config(tmp_path), dtype=torch.float32)
    edit_config(tmp_path, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"layers\.1\..*no place"):
        hf_directory.read_weights(tmp_path, hf_directory.read_config(tmp_path), dtype=torch.float32)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama", max_shard_size="20KB")
    gone = hf_directory.weight_files(tmp_path)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=gone.name):
        hf_directory.weight_files(tmp_path)


def test_a_truncated_safetensors_file_is_a_model_error(tmp_path: Path) -> None:
    write_hf(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        hf_directory.read_weights(tmp_path, hf_directory.read_config(tmp_path), dtype=torch.float32)


# --- GGUF ----------------------------------------------------------------------------------------

GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_TOP_NAMES:
        return f"{GGUF_TOP_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_LAYER_NAMES[part]}.{kind}"


def interleave_rotary_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """What a converter does to Q and K of a llama: row i and row i + d/2 become neighbours."""
    dim = weight.shape[0] // heads
    order = [
        head * dim + half * dim // 2 + i
        for head in range(heads)
        for i in range(dim // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(weight[order])


def write_gguf(
    path: Path,
    architecture: str,
    weights: dict[str, torch.Tensor],
    *,
    quant: Quant = Quant.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    for key, value in (metadata or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](f"{architecture}.{key}", value)
    for name, tensor in weights.items():
        values = tensor.detach().float().numpy()
        if architecture == "llama" and "q_proj" in name:
            values = interleave_rotary_rows(values, 4)
        if architecture == "llama" and "k_proj" in name:
            values = interleave_rotary_rows(values, 2)
        if values.ndim == 2 and quant != Quant.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(gguf_name(name), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
    ],
)
def test_a_gguf_gives_back_the_weights_it_was_made_from(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """Rows of Q and K are stored in another order in llama files, and only in those."""
    saved = write_hf(tmp_path, family, **options)
    path = tmp_path / "model.gguf"
    write_gguf(path, family.lower(), saved)
    file = GgufFile(path)
    config = gguf_model.read_config(file)
    loaded = gguf_model.read_weights(file, config, dtype=torch.float32)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name
    from_hf = hf_directory.read_config(tmp_path)
    for field in ("architecture", "vocab_size", "head_dim", "num_kv_heads", "qkv_bias", "qk_norm"):
        assert getattr(config, field) == getattr(from_hf, field), field
    assert config.tied_embeddings == from_hf.tied_embeddings
    assert config.rope_theta == 5e5


@pytest.mark.parametrize(
    "quant", [Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q8_0, Quant.Q5_0]
)
def test_quantised_tensors_equal_those_of_the_gguf_package(tmp_path: Path, quant: Quant) -> None:
    """The common types are dequantised by code of our own; the values must be the same bits."""
    saved = write_hf(tmp_path, "Qwen2")
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", saved, quant=quant)
    file = GgufFile(path)
    loaded = gguf_model.read_weights(file, gguf_model.read_config(file), dtype=torch.float32)
    for name, tensor in saved.items():
        if tensor.ndim == 2:
            packed = gguf.quantize(tensor.float().numpy(), quant)
            assert np.array_equal(loaded[name].numpy(), gguf.dequantize(packed, quant)), name


def test_rope_factors_of_a_gguf_become_rope_scaling(tmp_path: Path) -> None:
    saved = write_hf(tmp_path, "Llama")
    path = tmp_path / "model.gguf"
    factors = np.arange(1, 9, dtype=np.float32)
    write_gguf(path, "llama", saved, extra={"rope_freqs.weight": factors})
    file = GgufFile(path)
    config = gguf_model.read_config(file)
    assert config.rope_scaling == RopeScaling("factors", factors=tuple(factors.tolist()))
    assert gguf_model.read_weights(file, config, dtype=torch.float32).keys() == saved.keys()


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"expert_count": 8}, "8 experts"),
        ({"rope.scaling.type": "yarn"}, "yarn"),
        ({"rope.dimension_count": 8}, "rotary"),
    ],
)
def test_unsupported_options_of_a_gguf_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, Any], named: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", write_hf(tmp_path, "Llama"), metadata=metadata)
    with pytest.raises(ModelError, match=named):
        gguf_model.read_config(GgufFile(path))


def test_linear_scaling_and_a_window_are_read_from_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    options = {
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "attention.sliding_window": 32,
    }
    write_gguf(path, "llama", write_hf(tmp_path, "Llama"), metadata=options)
    config = gguf_model.read_config(GgufFile(path))
    assert config.rope_scaling == RopeScaling("linear", 4.0)
    assert config.context_length == 32


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "mamba", {})
    with pytest.raises(ModelError, match="mamba"):
        gguf_model.read_config(GgufFile(path))


def test_a_gguf_cut_anywhere_is_a_model_error(tmp_path: Path) -> None:
    """A half-copied file must not end in a crash of the reader, wherever the copy stopped."""
    whole = tmp_path / "whole.gguf"
    write_gguf(whole, "llama", write_hf(tmp_path, "Llama"))
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 10, 23, *range(24, 2400, 97), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError):  # noqa: PT012 - the header may be whole, the data not
            file = GgufFile(cut)
            gguf_model.read_weights(file, gguf_model.read_config(file), dtype=torch.float32)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(path)


# --- The default model ---------------------------------------------------------------------------


def test_the_default_model_has_the_geometry_it_is_known_for(smollm2_gguf: GgufFile) -> None:
    config = gguf_model.read_config(smollm2_gguf)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert (config.context_length, config.rope_theta, config.tied_embeddings) == (8192, 1e5, True)


def test_the_default_model_loads_fast(smollm2_files: ModelFiles) -> None:
    """From process start to the first token there are five seconds in all."""
    start = time.process_time()
    file = GgufFile(smollm2_files.path)
    config = gguf_model.read_config(file)
    weights = gguf_model.read_weights(file, config, dtype=torch.float32)
    assert time.process_time() - start < 4.0
    assert sum(weight.numel() for weight in weights.values()) == 134_515_008
