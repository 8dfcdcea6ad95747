"""A model written as a Hugging Face directory is the model it was written from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layby.bench.export import config_json, export_hugging_face
from layby.errors import ModelError
from layby.models import RopeScaling, load

TEXT = "Ünïcode, 12 numbers\n\n  and <|im_end|> in one text."


def default_model() -> str:
    try:
        load("smollm2", allow_download=True)
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")
    return "smollm2"


def test_the_directory_holds_the_same_model(tmp_path: Path) -> None:
    """Peers that are measured on another geometry, other weights or other tokens."""
    original = load(default_model())
    export_hugging_face("smollm2", tmp_path)
    copy = load(str(tmp_path))
    assert copy.config == original.config
    assert copy.tokenizer.encode(TEXT) == original.tokenizer.encode(TEXT)
    assert copy.tokenizer.eos_ids == original.tokenizer.eos_ids
    assert copy.tokenizer.bos_id == original.tokenizer.bos_id
    ours, theirs = original.weights(torch.bfloat16), copy.weights(torch.bfloat16)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_other_libraries_read_the_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    original = load(default_model())
    export_hugging_face("smollm2", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(TEXT).input_ids == original.tokenizer.encode(TEXT)


def test_rope_scaling_is_said_or_refused() -> None:
    """Rotary frequencies that are silently dropped: nonsense after some thousand tokens."""
    model = load(default_model())
    linear = replace(model.config, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    rope = config_json(linear, model.tokenizer)["rope_parameters"]
    assert rope["rope_type"] == "linear"
    assert rope["factor"] == 4.0
    factors = replace(model.config, rope_scaling=RopeScaling(kind="factors", factors=(1.0,)))
    with pytest.raises(ModelError, match="divisor"):
        config_json(factors, model.tokenizer)
