"""Making activations easy to quantise: outlier channels are scaled down where they arise.

A few channels of a transformer's activations are far larger than the rest; a single int8 scale per
token then leaves little precision for the others. Dividing a channel by a factor where it is made
(in the norm before a projection, or in the rows of the up projection) and multiplying the matching
column of the projection by it changes nothing in exact arithmetic, and moves part of the difficulty
into the weights, which have a scale per output channel (SmoothQuant, Xiao et al. 2023).

The factors come from one pass over a fixed text, so that the same model gives the same int8 weights
everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from layby.models.config import ModelConfig
from layby.models.ops import TorchOps
from layby.models.transformer import Transformer

STRENGTH = 0.5
"""0 leaves all difficulty with the activations, 1 moves all of it into the weights."""

TEXT = """The harbour was quiet when the ferry came in. Two children counted the gulls on the wall,
lost count at forty, and began again. "How many do you think there are?" asked the older one.

To cook rice, rinse it until the water runs clear, then use one and a half cups of water for every
cup of rice. Bring it to the boil, cover it, and leave it on the lowest heat for 15 minutes.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

In 1869 Dmitri Mendeleev arranged 63 known elements by atomic weight and left gaps for those that
were still missing. Gallium (1875) and germanium (1886) filled two of them within 20 years.

| city | population | founded |
|------|-----------:|--------:|
| Oslo |    717,710 |    1040 |

1. Open the settings. 2. Choose "Network". 3. Enter the address 192.168.0.1 and press OK.
Dear Ms Ortiz, thank you for your letter of 3 May. We are sorry that the parcel arrived late.
El tren sale a las ocho. Der Zug fährt um acht Uhr ab. Le train part à huit heures.
SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;
{"id": 17, "tags": ["red", "blue"], "price": 9.99, "in_stock": true, "note": null}
Why is the sky blue? Air scatters short wavelengths more than long ones, so blue light reaches us
from every direction, while at sunset the long way through the air leaves mostly orange and red.
"""


class _Recorder(TorchOps):
    """Notes the largest magnitude of each input channel of every product, in order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[Tensor] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.largest.append(x.abs().amax(0))
        return super().linear(x, weight, bias)


def smooth(config: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> dict[str, Tensor]:
    """Weights of the same function whose activations have smaller outliers.

    Args:
        weights: float32, by Hugging Face's names.
        tokens: Of ``TEXT``, at least one.

    Returns:
        A new mapping; ``lm_head.weight`` is in it even if the model ties it to the embedding,
        because it no longer equals it.
    """
    recorder = _Recorder()
    model = Transformer(config, weights, ops=recorder)
    model.run_dense(tokens)
    weights = dict(weights)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    inputs = iter(recorder.largest)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        _move(
            weights,
            next(inputs),
            [f"{prefix}.input_layernorm.weight"],
            [f"{attention}.{name}_proj.weight" for name in "qkv"],
        )
        next(inputs)  # the output projection's inputs are averages of values: no outliers there
        _move(
            weights,
            next(inputs),
            [f"{prefix}.post_attention_layernorm.weight"],
            [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"],
        )
        made_by = [f"{mlp}.up_proj.weight"]
        if config.mlp_bias:
            made_by.append(f"{mlp}.up_proj.bias")
        _move(weights, next(inputs), made_by, [f"{mlp}.down_proj.weight"])
    _move(weights, next(inputs), ["model.norm.weight"], ["lm_head.weight"])
    return weights


def _move(
    weights: dict[str, Tensor], largest: Tensor, made_by: list[str], taken_by: list[str]
) -> None:
    """Divide channels by factors where they are made, multiply where they are taken.

    ``made_by`` are vectors, or matrices whose rows are the channels; ``taken_by`` are matrices
    whose columns are.
    """
    column = torch.stack([weights[name].abs().amax(0) for name in taken_by]).amax(0)
    factor = largest.clamp_min(1e-5) ** STRENGTH / column.clamp_min(1e-5) ** (1 - STRENGTH)
    factor = (factor / factor.log().mean().exp()).clamp(1e-2, 1e2)
    for name in made_by:
        values = weights[name]
        weights[name] = values / (factor if values.dim() == 1 else factor.unsqueeze(1))
    for name in taken_by:
        weights[name] = weights[name] * factor
