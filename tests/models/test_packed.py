"""int8 weights: smoothing keeps the function, and the packed form on disk is trusted only whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from layby import kernels
from layby.models import packed_file
from layby.models.compiled import pack_model
from layby.models.smoothing import smooth
from layby.models.transformer import Transformer
from tests.execution.harness import TINY, random_tokens, random_weights


def test_smoothing_changes_the_weights_and_not_the_function() -> None:
    weights = random_weights(TINY)
    weights["model.layers.0.input_layernorm.weight"][3] = 40.0  # an outlier channel
    tokens = random_tokens(50, TINY.vocab_size)
    smoothed = smooth(TINY, weights, tokens)
    name = "model.layers.0.input_layernorm.weight"
    assert smoothed[name][3] < weights[name][3] / 2
    wanted = Transformer(TINY, weights).run_dense(tokens)
    found = Transformer(TINY, smoothed).run_dense(tokens)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


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
