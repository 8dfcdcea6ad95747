"""What a dense decoder-only model looks like, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        kind: ``linear`` (Chen et al. 2023), ``llama3`` (Llama 3.1's wavelength-dependent rule),
            or ``factors`` (one divisor per frequency, as GGUF stores Llama 3's rule).
        factor: Stretch for ``linear`` and ``llama3``.
        low_freq_factor, high_freq_factor, original_max_position: Bounds of the ``llama3`` rule.
        factors: ``head_dim / 2`` divisors for ``factors``.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and options of one model.

    Attributes:
        architecture: ``llama`` (Llama 2/3, SmolLM2, Mistral), ``qwen2`` or ``qwen3``.
        context_length: Most positions a sequence may have. For a model with a sliding window it
            is at most the window, because Layby attends to everything.
        qkv_bias: Q, K and V projections have a bias (Qwen2).
        qk_norm: RMSNorm over each head of Q and K before the rotation (Qwen3).
        tied_embeddings: The output projection is the input embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
