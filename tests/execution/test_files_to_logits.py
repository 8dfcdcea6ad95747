"""From a file that another library wrote to logits: nothing on the way is taken on trust."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from layby.models import gguf_model, hf_directory
from layby.models.config import ModelConfig
from layby.models.gguf_file import GgufFile
from layby.models.network import Network
from tests.execution.harness import NETWORKS, make_network, random_tokens
from tests.execution.test_transformer import run
from tests.models.test_weights import write_gguf, write_hf

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "max_shard_size": "20KB"}),
    ("Mistral", {}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
]

Weights = dict[str, torch.Tensor]


def networks(config: ModelConfig, weights: Weights) -> list[tuple[Network, int]]:
    """Both networks in float32, and a block size for each."""
    kinds = [kind for kind in ("torch float32", "compiled float32") if kind in NETWORKS]
    return [
        (make_network(config, weights, kind), 16 if kind.startswith("compiled") else 4)
        for kind in kinds
    ]


def assert_same_logits(config: ModelConfig, weights: Weights, oracle: Any) -> None:
    """Within 1e-4 for a whole prefill, a prefill in chunks, and decoding token by token."""
    tokens = random_tokens(60, config.vocab_size)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    for network, block_size in networks(config, weights):
        for cuts in ([60], [17, 43], [50] + [1] * 10):
            found = run(network, tokens, cuts, block_size)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "options"), FAMILIES)
def test_safetensors_give_the_logits_of_transformers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    write_hf(tmp_path, family, **options)
    config = hf_directory.read_config(tmp_path)
    weights = hf_directory.read_weights(tmp_path, config, dtype=torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same_logits(config, weights, oracle.eval())


def test_a_llama_gguf_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    """Its rows of Q and K are in another order; the frequencies' base is the file's own."""
    saved = write_hf(tmp_path, "Llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    write_gguf(tmp_path / "model.gguf", "llama", saved)
    file = GgufFile(tmp_path / "model.gguf")
    config = gguf_model.read_config(file)
    weights = gguf_model.read_weights(file, config, dtype=torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    # What write_gguf says of the norms; transformers' default is another.
    for module in oracle.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = config.rms_norm_eps
    assert oracle.config.rope_parameters["rope_theta"] == config.rope_theta
    assert_same_logits(config, weights, oracle.eval())
