"""The network: a dense decoder-only transformer over a paged KV cache.

One class covers Llama 2/3, SmolLM2, Mistral, Qwen2/2.5 and Qwen3: pre-norm blocks of grouped-query
attention with rotary positions and a SwiGLU feed-forward layer; the ``ModelConfig`` says which of
them have biases, norms on Q and K, or tied embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from layby.errors import ModelError
from layby.models.config import ModelConfig, RopeScaling
from layby.models.exact_products import ExactOps
from layby.models.network import FlatBatch, KVFormat
from layby.models.ops import AttentionBatch, Ops, TorchOps, measure_row_multiple


@dataclass(frozen=True, slots=True)
class Linear:
    """Weight ``[out, in]`` and bias ``[out]`` of one projection, or of several fused into one."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    """Parameters of one block. ``qkv`` gives all Q heads, then all K heads, then all V heads."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class Transformer:
    """A model ready to run.

    Args:
        config: Its geometry.
        weights: Tensors by Hugging Face's names (``model.layers.0.self_attn.q_proj.weight``, …).
            They are copied where they must be fused or converted, and shared otherwise.
        dtype: Number format of weights, activations and KV cache.
        device: Where it runs.
        ops: Kernels. None: plain torch, so that rows are exact on this machine.

    Raises:
        ModelError: A tensor is missing, has the wrong shape, or has no place in such a model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        reader = WeightReader(weights, dtype, self.device)
        hidden, vocab = config.hidden_size, config.vocab_size
        self._embedding = reader.take("model.embed_tokens.weight", vocab, hidden)
        self._layers = [_read_layer(reader, config, index) for index in range(config.num_layers)]
        self._final_norm = reader.take("model.norm.weight", hidden)
        if config.tied_embeddings:
            self._head = self._embedding
        else:
            self._head = reader.take("lm_head.weight", vocab, hidden)
        reader.check_nothing_is_left()
        self._inverse_frequencies = inverse_frequencies(config).to(self.device)
        self._ops = ops if ops is not None else self._exact_ops()

    @property
    def name(self) -> str:
        """See ``Network``."""
        return f"{str(self.dtype).removeprefix('torch.')} on {self.device.type}, plain torch"

    def kv_format(self, block_size: int) -> KVFormat:
        """Keys, index 0 of the second dimension, and values, in the model's number format."""
        config = self.config
        shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        return KVFormat(shape, self.dtype)

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, pool: Tensor) -> Tensor:
        """See ``Network``."""
        token_ids = torch.from_numpy(batch.token_ids).to(self.device)
        positions = torch.from_numpy(batch.positions).to(self.device)
        rows = AttentionBatch.of(batch, self.device)
        config, ops = self.config, self._ops
        num_rows = len(token_ids)
        padding = -num_rows % ops.row_multiple
        token_ids, positions = F.pad(token_ids, (0, padding)), F.pad(positions, (0, padding))
        # The float32 product is what the reference implementations take the cosine of.
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        attention = ops.attention(pool, rows, config.num_heads)
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps

        residual = F.embedding(token_ids, self._embedding)
        attended = residual.new_zeros((len(token_ids), heads * config.head_dim))
        normed = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            qkv = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
            qkv = qkv.view(-1, heads + 2 * kv_heads, config.head_dim)
            queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
            if layer.query_norm is not None and layer.key_norm is not None:
                queries.copy_(ops.rms_norm(queries, layer.query_norm, eps))
                keys.copy_(ops.rms_norm(keys, layer.key_norm, eps))
            ops.rotate(qkv[:, : heads + kv_heads], cos, sin)
            attention.write(index, qkv[:num_rows, heads:])
            attention.attend(index, queries[:num_rows], attended[:num_rows])
            output = ops.linear(attended, layer.output.weight, layer.output.bias)
            normed, residual = ops.add_rms_norm(output, residual, layer.post_norm, eps)
            gate_up = ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
            output = ops.linear(ops.silu_mul(gate_up), layer.down.weight, layer.down.bias)
            normed, residual = ops.add_rms_norm(output, residual, next_norm, eps)
        return normed[:num_rows]

    def run_dense(self, token_ids: list[int]) -> Tensor:
        """Logits ``[T, vocab]`` of one sequence by itself, over a KV cache of its own."""
        count = len(token_ids)
        batch = FlatBatch(
            token_ids=np.array(token_ids, np.int64),
            positions=np.arange(count),
            slots=np.arange(count),
            first_rows=np.zeros(1, np.int32),
            num_rows=np.array([count], np.int32),
            starts=np.zeros(1, np.int32),
            block_tables=np.arange(-(-count // 16), dtype=np.int32)[None],
            block_size=16,
        )
        kv_format = self.kv_format(16)
        shape = (batch.block_tables.shape[1], *kv_format.shape)
        pool = torch.zeros(shape, dtype=kv_format.dtype, device=self.device)
        return self.logits(self.forward(batch, pool))

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token, ``[R, vocab]`` float32, for rows ``hidden [R, hidden]``."""
        padded = F.pad(hidden, (0, 0, 0, -len(hidden) % self._ops.row_multiple))
        return self._ops.linear(padded, self._head, None)[: len(hidden)].float()

    def _exact_ops(self) -> Ops:
        config, layer = self.config, self._layers[0]
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down)
        weights = [*(projection.weight for projection in projections), self._head]
        kv_heads, head_dim = config.num_kv_heads, config.head_dim
        if self.device.type == "cuda":
            return ExactOps(weights, num_kv_heads=kv_heads, head_dim=head_dim)
        return TorchOps(measure_row_multiple(weights, kv_heads=kv_heads, head_dim=head_dim))


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary angle per position and pair of dimensions, ``[head_dim / 2]`` float32.

    Raises:
        ModelError: The scaling rule is unknown.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    if scaling.kind == "factors":
        if len(scaling.factors) != len(frequencies):
            raise ModelError(
                f"rope scaling has {len(scaling.factors)} factors, "
                f"but head_dim {config.head_dim} needs {len(frequencies)}"
            )
        return frequencies / torch.tensor(scaling.factors)
    raise ModelError(f"rope scaling {scaling.kind!r} is not supported")


def _llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: stretch long wavelengths, keep short ones, blend those in between."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / scaling.factor + keep * frequencies


class WeightReader:
    """Takes tensors out of a mapping by name, checks them, and notes which were taken."""

    def __init__(
        self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name`` of the given shape, converted and on the device."""
        tensor = self._weights.get(name)
        if tensor is None:
            raise ModelError(f"the model has no tensor {name}")
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        self._taken.add(name)
        return tensor.detach().to(self._device, self._dtype)

    def linear(self, prefix: str, outs: Mapping[str, int], size_in: int, *, bias: bool) -> Linear:
        """Projections ``{prefix}.{name}`` of the given widths, one below the other."""
        weights = [self.take(f"{prefix}.{name}.weight", out, size_in) for name, out in outs.items()]
        biases = [self.take(f"{prefix}.{name}.bias", out) for name, out in outs.items() if bias]
        return Linear(_stack(weights), _stack(biases) if bias else None)

    def check_nothing_is_left(self) -> None:
        """Refuse weights that the configuration does not know: the model would compute amiss."""
        left = [
            name
            for name in self._weights
            if name.startswith("model.layers.")
            and name not in self._taken
            and not name.endswith("rotary_emb.inv_freq")  # older checkpoints store what is computed
        ]
        if left:
            raise ModelError(
                f"the model has {len(left)} tensors of no known use, such as {left[0]}"
            )


def _stack(tensors: list[Tensor]) -> Tensor:
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


def _read_layer(reader: WeightReader, config: ModelConfig, index: int) -> _Layer:
    prefix, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def head_norm(name: str) -> Tensor | None:
        if not config.qk_norm:
            return None
        return reader.take(f"{prefix}.self_attn.{name}.weight", config.head_dim)

    return _Layer(
        input_norm=reader.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=reader.linear(
            f"{prefix}.self_attn",
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            hidden,
            bias=config.qkv_bias,
        ),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=reader.linear(
            f"{prefix}.self_attn", {"o_proj": hidden}, queries, bias=config.output_bias
        ),
        post_norm=reader.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=reader.linear(
            f"{prefix}.mlp", {"gate_proj": inner, "up_proj": inner}, hidden, bias=config.mlp_bias
        ),
        down=reader.linear(f"{prefix}.mlp", {"down_proj": hidden}, inner, bias=config.mlp_bias),
    )
