"""Tiny models, sequences and plans for the tests of execution."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from layby import kernels
from layby.execution.torch_executor import TorchExecutor
from layby.models.compiled import CompiledTransformer, pack_model
from layby.models.config import ModelConfig
from layby.models.network import Network
from layby.models.transformer import Transformer
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import ScheduledSequence, StepPlan
from layby.scheduling.request import Request, Sequence

TINY = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    context_length=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights under Hugging Face's names, of a size that lets logits differ visibly."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(out: int, size_in: int) -> torch.Tensor:
        return torch.randn(out, size_in, generator=generator) * size_in**-0.5

    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * hidden**0.5,
        "model.norm.weight": torch.rand(hidden, generator=generator) + 0.5,
    }
    if not config.tied_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, hidden)
    for layer in range(config.num_layers):
        for name, out, size_in in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(out, size_in)
        for name in ("input_layernorm", "post_attention_layernorm"):
            scale = torch.rand(hidden, generator=generator) + 0.5
            weights[f"model.layers.{layer}.{name}.weight"] = scale
    return weights


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

NETWORKS = [
    "torch float32",
    "torch bfloat16",
    *(["compiled int8", "compiled bfloat16", "compiled float32"] if kernels.available() else []),
    *(["cuda float32", "cuda bfloat16"] if "cuda" in DEVICES else []),
]
"""Kernels and number format; ``cuda`` is torch on a GPU."""


def make_network(config: ModelConfig, weights: Mapping[str, torch.Tensor], kind: str) -> Network:
    """One of ``NETWORKS``; its KV cache has the format of its weights."""
    kernels_name, dtype = kind.split()
    if kernels_name != "compiled":
        device = "cuda" if kernels_name == "cuda" else "cpu"
        return Transformer(config, weights, dtype=getattr(torch, dtype), device=device)
    return CompiledTransformer(config, pack_model(config, weights, dtype), kv_dtype=dtype)


def poisoned_pool(model: Network, num_blocks: int, block_size: int) -> torch.Tensor:
    """A pool that holds NaN, or the largest integers, wherever nothing was written."""
    kv_format = model.kv_format(block_size)
    shape = (num_blocks, *kv_format.shape)
    pool = torch.empty(shape, dtype=kv_format.dtype, device=model.device)
    return pool.fill_(255 if kv_format.dtype == torch.uint8 else float("nan"))


def make_executor(
    config: ModelConfig = TINY,
    *,
    block_size: int = 4,
    num_blocks: int = 256,
    num_swap_blocks: int = 64,
    dtype: torch.dtype = torch.float32,
    model: Transformer | None = None,
) -> TorchExecutor:
    """An executor whose pools hold NaN wherever nothing was written: stale reads cannot hide."""
    if model is None:
        model = Transformer(config, random_weights(config), dtype=dtype)
    executor = TorchExecutor(
        model, block_size=block_size, num_blocks=num_blocks, num_swap_blocks=num_swap_blocks
    )
    executor.cache.pool.fill_(float("nan"))
    executor.cache.swap_pool.fill_(float("nan"))
    return executor


def make_sequence(
    request_id: str,
    prompt: list[int],
    params: SamplingParams | None = None,
    *,
    block_table: list[int] | None = None,
    stop_token_ids: tuple[int, ...] = (),
) -> Sequence:
    """The first sequence of a new request."""
    params = params or SamplingParams(temperature=0.0)
    request = Request(
        request_id,
        prompt,
        max_tokens=1000,
        n=params.n,
        min_tokens=params.min_tokens,
        stop_token_ids=stop_token_ids,
        payload=params,
    )
    request.sequences[0].block_table = block_table or []
    return request.sequences[0]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Token ids."""
    source = random.Random(seed)
    return [source.randrange(vocab_size) for _ in range(count)]


class Blocks:
    """Hands out block numbers in a shuffled order."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._free = list(range(count))
        random.Random(seed).shuffle(self._free)

    def take(self, count: int) -> list[int]:
        """That many new blocks."""
        taken, self._free = self._free[:count], self._free[count:]
        assert len(taken) == count, "the test's pool is too small"
        return taken


def plan(*items: ScheduledSequence, step: int = 1) -> StepPlan:
    """A plan without moves."""
    return StepPlan(step=step, now=0.0, scheduled=list(items))


def rest_of(sequence: Sequence, start: int = 0, *, sample: bool = True) -> ScheduledSequence:
    """Compute all positions from ``start`` on."""
    samplers = (sequence,) if sample else ()
    return ScheduledSequence(sequence, start, len(sequence.tokens) - start, samplers)
