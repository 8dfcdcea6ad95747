"""The network on the compiled CPU kernels: int8, bfloat16 or float32 weights, one flow for all.

Between the kernels the residual stream is float32. With int8 weights every matrix product is
W8A8: weights have a scale per output channel, activations one per token, found as they are made;
the sums are exact integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layby import kernels
from layby.errors import ConfigError
from layby.kernels import Bfloat16Weight, Float32Weight, Int8Weight
from layby.models.config import ModelConfig
from layby.models.network import FlatBatch, KVFormat
from layby.models.transformer import WeightReader, inverse_frequencies

F32 = NDArray[np.float32]
I8 = NDArray[np.int8]
Weight = Int8Weight | Bfloat16Weight | Float32Weight

PRECISIONS = ("int8", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Projection:
    """A packed matrix of ``size_out`` channels, and its bias ``[size_out]``."""

    weight: Weight
    bias: F32 | None
    size_out: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters of one block; norms are float32."""

    input_norm: F32
    qkv: Projection
    query_norm: F32 | None
    key_norm: F32 | None
    output: Projection
    post_norm: F32
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class PackedModel:
    """All parameters in the layout of the kernels.

    Attributes:
        embedding: ``[vocab, hidden]``; float16 beside int8 weights, else float32.
    """

    precision: str
    embedding: NDArray[np.float16] | F32
    layers: tuple[Layer, ...]
    final_norm: F32
    head: Projection


def pack_model(config: ModelConfig, weights: Mapping[str, Tensor], precision: str) -> PackedModel:
    """Lay out a model's weights for the kernels, quantising them for ``int8``.

    Raises:
        ModelError: A tensor is missing, has the wrong shape, or has no place in such a model.
    """
    reader = WeightReader(weights, torch.float32, torch.device("cpu"))
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim

    def project(
        prefix: str, outs: dict[str, int], size_in: int, bias: bool, *, mixed: bool = False
    ) -> Projection:
        linear = reader.linear(prefix, outs, size_in, bias=bias)
        added = None if linear.bias is None else linear.bias.numpy()
        weight = linear.weight
        if mixed and precision == "int8":
            weight = torch.from_numpy(kernels.mix(weight.numpy()))
        return Projection(_pack(weight, precision), added, sum(outs.values()))

    def vector(name: str, size: int) -> F32:
        values: F32 = reader.take(name, size).contiguous().numpy()
        return values

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = [
            vector(f"{attention}.{name}.weight", config.head_dim) if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        ]
        layers.append(
            Layer(
                input_norm=vector(f"{prefix}.input_layernorm.weight", hidden),
                qkv=project(
                    attention,
                    {"q_proj": queries, "k_proj": keys, "v_proj": keys},
                    hidden,
                    config.qkv_bias,
                ),
                query_norm=norms[0],
                key_norm=norms[1],
                output=project(attention, {"o_proj": hidden}, queries, config.output_bias),
                post_norm=vector(f"{prefix}.post_attention_layernorm.weight", hidden),
                gate_up=project(
                    mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias
                ),
                # Its inputs come mixed from silu_mul_quant.
                down=project(mlp, {"down_proj": hidden}, inner, config.mlp_bias, mixed=True),
            )
        )
    embedding = reader.take("model.embed_tokens.weight", config.vocab_size, hidden)
    head = embedding
    if "lm_head.weight" in weights:  # also if it was tied once, see layby.models.rotation
        head = reader.take("lm_head.weight", config.vocab_size, hidden)
    final_norm = vector("model.norm.weight", hidden)
    reader.check_nothing_is_left()
    return PackedModel(
        precision=precision,
        embedding=(embedding.half() if precision == "int8" else embedding).contiguous().numpy(),
        layers=tuple(layers),
        final_norm=final_norm,
        head=Projection(_pack(head, precision), None, config.vocab_size),
    )


def _pack(weight: Tensor, precision: str) -> Weight:
    if precision == "int8":
        return Int8Weight.quantise(weight.contiguous().numpy())
    if precision == "bfloat16":
        return Bfloat16Weight.pack(weight.bfloat16().contiguous().view(torch.uint16).numpy())
    return Float32Weight.pack(weight.contiguous().numpy())


class CompiledTransformer:
    """A model ready to run on the compiled kernels; see ``Network``.

    Args:
        config: Its geometry.
        model: Its parameters.
        kv_dtype: ``int8``, ``bfloat16`` or ``float32``: the number format of the KV cache.

    Raises:
        ConfigError: The kernels are not there, or cannot do this geometry.
    """

    def __init__(self, config: ModelConfig, model: PackedModel, *, kv_dtype: str) -> None:
        if not kernels.available():
            raise ConfigError(
                "dtype int8 needs the compiled kernels, which this installation lacks"
            )
        if config.head_dim % 16 or config.head_dim > 256:
            raise ConfigError(
                f"the compiled kernels need head_dim to be a multiple of 16, at most 256; "
                f"this model has {config.head_dim}"
            )
        self.config = config
        self.device = torch.device("cpu")
        self.kv_dtype = kv_dtype
        self._model = model
        self._rotations = _rotations(config)
        self._work: _Workspace | None = None

    @property
    def name(self) -> str:
        """See ``Network``."""
        return (
            f"{self._model.precision} on cpu, KV cache in {self.kv_dtype}, "
            f"compiled kernels for {kernels.isa()}"
        )

    def kv_format(self, block_size: int) -> KVFormat:
        """Bytes, in the order that ``csrc/attention.h`` draws.

        Raises:
            ConfigError: The block size is not a multiple of 16.
        """
        if block_size % 16:
            raise ConfigError(
                f"the compiled kernels need block_size to be a multiple of 16, got {block_size}"
            )
        return KVFormat((self._layout(block_size).block_bytes,), torch.uint8)

    def _layout(self, block_size: int) -> kernels.KvLayout:
        config = self.config
        return kernels.KvLayout(
            self.kv_dtype,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
        )

    def forward(self, batch: FlatBatch, pool: Tensor) -> Tensor:
        """See ``Network``."""
        config, model = self.config, self._model
        num_rows, eps = len(batch.token_ids), config.rms_norm_eps
        layout = self._layout(batch.block_size)
        blocks: NDArray[np.uint8] = pool.numpy()
        attention = kernels.AttentionBatch(
            layout,
            num_heads=config.num_heads,
            num_blocks=len(blocks),
            first_rows=batch.first_rows,
            num_rows=batch.num_rows,
            starts=batch.starts,
            block_tables=batch.block_tables,
        )
        work = self._workspace(num_rows)
        work.residual[...] = model.embedding[batch.token_ids]
        delta: F32 | None = None
        for index, layer in enumerate(model.layers):
            x = work.norm(delta, layer.input_norm, eps)
            work.project(layer.qkv, x, work.qkv)
            kernels.rope_write(
                layout,
                blocks,
                index,
                work.qkv,
                batch.positions,
                self._rotations,
                batch.slots,
                work.queries,
                work.query_scales,
                layer.query_norm,
                layer.key_norm,
                eps,
            )
            attention.attend(blocks, index, work.queries, work.query_scales, work.attended)
            work.project(layer.output, work.quantised_attended(), work.delta)
            x = work.norm(work.delta, layer.post_norm, eps)
            work.project(layer.gate_up, x, work.gate_up)
            work.project(layer.down, work.activated(), work.delta)
            delta = work.delta
        hidden = np.empty((num_rows, config.hidden_size), np.float32)
        kernels.add_rms_norm(work.residual, delta, model.final_norm, eps, hidden)
        return torch.from_numpy(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Network``."""
        rows: F32 = hidden.contiguous().numpy()
        out = np.empty((len(rows), self._model.head.size_out), np.float32)
        head = self._model.head
        if isinstance(head.weight, Int8Weight):
            q, scale = np.empty(rows.shape, np.int8), np.empty(len(rows), np.float32)
            kernels.quantise_rows(rows, q, scale)
            head.weight.linear(q, scale, head.bias, out)
        else:
            head.weight.linear(rows, head.bias, out)
        return torch.from_numpy(out)

    def _workspace(self, num_rows: int) -> _Workspace:
        """Buffers for so many rows. Kept between steps: fresh ones would be paged in anew."""
        if self._work is None or self._work.capacity < num_rows:
            capacity = max(64, 1 << (num_rows - 1).bit_length())
            self._work = _Workspace(
                self.config,
                capacity,
                quantised=self._model.precision == "int8",
                quantised_queries=self.kv_dtype == "int8",
            )
        self._work.use(num_rows)
        return self._work


Activations = tuple[I8, F32] | tuple[F32, None]
"""Rows as int8 with a scale for each, or as they are."""


class _Workspace:
    """Intermediate results of one forward pass, ``num_rows`` of them in use."""

    def __init__(
        self, config: ModelConfig, capacity: int, *, quantised: bool, quantised_queries: bool
    ) -> None:
        self.capacity = capacity
        self._quantised = quantised
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads

        def floats(width: int) -> F32:
            return np.empty((capacity, width), np.float32)

        self._buffers: dict[str, NDArray[np.generic]] = {
            "residual": floats(hidden),
            "delta": floats(hidden),
            "qkv": floats((heads + 2 * kv_heads) * dim),
            "attended": floats(heads * dim),
            "gate_up": floats(2 * inner),
            "queries": np.empty(
                (capacity, heads * dim), np.int8 if quantised_queries else np.float32
            ),
        }
        if quantised_queries:
            self._buffers["query_scales"] = floats(heads)
        number = np.int8 if quantised else np.float32
        for name, width in (("normed", hidden), ("mixed", heads * dim), ("inner", inner)):
            self._buffers[name] = np.empty((capacity, width), number)
            self._buffers[f"{name}_scale"] = np.empty(capacity, np.float32)

    def use(self, num_rows: int) -> None:
        """Work on so many rows."""
        views = {name: buffer[:num_rows] for name, buffer in self._buffers.items()}
        self.residual: F32 = views["residual"]  # type: ignore[assignment]
        self.delta: F32 = views["delta"]  # type: ignore[assignment]
        self.qkv: F32 = views["qkv"]  # type: ignore[assignment]
        self.attended: F32 = views["attended"]  # type: ignore[assignment]
        self.gate_up: F32 = views["gate_up"]  # type: ignore[assignment]
        self.queries = views["queries"]
        self.query_scales: F32 | None = views.get("query_scales")  # type: ignore[assignment]
        self._views = views

    def norm(self, delta: F32 | None, weight: F32, eps: float) -> Activations:
        """Add ``delta`` to the residual stream and normalise it."""
        if self._quantised:
            q, scale = self._out("normed")
            kernels.add_rms_norm_quant(self.residual, delta, weight, eps, q, scale)
            return q, scale
        out = self._views["normed"]
        kernels.add_rms_norm(self.residual, delta, weight, eps, out)  # type: ignore[arg-type]
        return out, None  # type: ignore[return-value]

    def quantised_attended(self) -> Activations:
        """What attention gave, as the output projection takes it."""
        if not self._quantised:
            return self.attended, None
        q, scale = self._out("mixed")
        kernels.quantise_rows(self.attended, q, scale)
        return q, scale

    def activated(self) -> Activations:
        """SiLU of the gate times up."""
        if self._quantised:
            q, scale = self._out("inner")
            kernels.silu_mul_quant(self.gate_up, q, scale)
            return q, scale
        out = self._views["inner"]
        kernels.silu_mul(self.gate_up, out)  # type: ignore[arg-type]
        return out, None  # type: ignore[return-value]

    def project(self, projection: Projection, x: Activations, out: F32) -> None:
        """``x @ weight.T + bias``."""
        weight = projection.weight
        if isinstance(weight, Int8Weight):
            weight.linear(x[0], x[1], projection.bias, out)  # type: ignore[arg-type]
        else:
            weight.linear(x[0], projection.bias, out)  # type: ignore[arg-type]

    def _out(self, name: str) -> tuple[I8, F32]:
        return self._views[name], self._views[f"{name}_scale"]  # type: ignore[return-value]


def _rotations(config: ModelConfig) -> F32:
    """Cosines, then sines, of every position's angles: ``[context_length, head_dim]``."""
    positions = torch.arange(config.context_length).float()
    angles = positions.unsqueeze(1) * inverse_frequencies(config)
    table: F32 = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous().numpy()
    return table


__all__ = ["PRECISIONS", "CompiledTransformer", "PackedModel", "pack_model"]
