"""Turning the residual stream, so that no channel of it stands out.

In the usual basis a few channels of the residual stream are far larger than the rest, and a single
int8 scale per token leaves little precision for the others. An RMS norm without weights does not
see a rotation, so the stream can be kept in another basis: what writes to it (embedding, output and
down projections) is turned, and what reads it (Q, K and V, gate and up, head) turned back. In exact
arithmetic nothing changes and nothing is to be computed at run time (QuaRot, Ashkboos et al. 2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from layby.models.config import ModelConfig


def rotate(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the same function over a turned residual stream.

    The weights of the norms go into what they feed, so that ones are left.

    Args:
        weights: float32, by Hugging Face's names.

    Returns:
        A new mapping; ``lm_head.weight`` is in it even if the model ties it to the embedding,
        because it no longer equals it.
    """
    weights = dict(weights)
    embedding = "model.embed_tokens.weight"
    weights.setdefault("lm_head.weight", weights[embedding])
    signs = _signs(config.hidden_size)

    def turn_inputs(names: list[str], norm: str) -> None:
        for name in names:
            weights[name] = _turn(weights[name] * weights[norm], signs)
        weights[norm] = torch.ones_like(weights[norm])

    def turn_outputs(prefix: str, bias: bool) -> None:
        weights[f"{prefix}.weight"] = _turn(weights[f"{prefix}.weight"].T, signs).T.contiguous()
        if bias:
            weights[f"{prefix}.bias"] = _turn(weights[f"{prefix}.bias"], signs)

    weights[embedding] = _turn(weights[embedding], signs)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        turn_inputs(
            [f"{attention}.{name}_proj.weight" for name in "qkv"],
            f"{prefix}.input_layernorm.weight",
        )
        turn_outputs(f"{attention}.o_proj", config.output_bias)
        turn_inputs(
            [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"],
            f"{prefix}.post_attention_layernorm.weight",
        )
        turn_outputs(f"{mlp}.down_proj", config.mlp_bias)
    turn_inputs(["lm_head.weight"], "model.norm.weight")
    return weights


def _signs(size: int) -> Tensor:
    """-1 or 1 for each channel, the same ones everywhere."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


def _turn(x: Tensor, signs: Tensor) -> Tensor:
    """Rows of ``x`` in the new basis: the Hartley transform of ``x * signs``.

    It is orthonormal for any size and spreads each channel evenly: its numbers are
    ``(cos(a) + sin(a)) / sqrt(n)``. The signs keep channels that resemble each other from adding
    up.
    """
    spectrum = torch.fft.fft(x * signs, norm="ortho")
    turned: Tensor = spectrum.real - spectrum.imag
    return turned
