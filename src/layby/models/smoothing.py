"""Making the inputs of the down projections easy to quantise: outlier channels are scaled down.

A few channels of a transformer's activations are far larger than the rest; a single int8 scale per
token then leaves little precision for the others. Dividing a channel by a factor where it is made
(in the rows of the up projection) and multiplying the matching column of the down projection by it
changes nothing in exact arithmetic, and moves part of the difficulty into the weights, which have a
scale per output channel (SmoothQuant, Xiao et al. 2023). Elsewhere a rotation does better, see
:mod:`layby.models.rotation`.

The factors come from one pass over a fixed text, so that the same model gives the same int8 weights
everywhere.
"""

from __future__ import annotations

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
    """Notes the largest magnitude of each channel between up and down, layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[Tensor] = []

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        result = super().silu_mul(gate_up)
        self.largest.append(result.abs().amax(0))
        return result


def smooth(config: ModelConfig, weights: dict[str, Tensor], tokens: list[int]) -> dict[str, Tensor]:
    """Weights of the same function whose activations have smaller outliers.

    Args:
        weights: float32, by Hugging Face's names.
        tokens: Of ``TEXT``, at least one.

    Returns:
        A new mapping.
    """
    recorder = _Recorder()
    Transformer(config, weights, ops=recorder).run_dense(tokens)
    weights = dict(weights)
    for index, largest in enumerate(recorder.largest):
        mlp = f"model.layers.{index}.mlp"
        down = weights[f"{mlp}.down_proj.weight"]
        column = down.abs().amax(0)
        factor = largest.clamp_min(1e-5) ** STRENGTH / column.clamp_min(1e-5) ** (1 - STRENGTH)
        factor = (factor / factor.log().mean().exp()).clamp(1e-2, 1e2)
        weights[f"{mlp}.down_proj.weight"] = down * factor
        weights[f"{mlp}.up_proj.weight"] = weights[f"{mlp}.up_proj.weight"] / factor.unsqueeze(1)
        if config.mlp_bias:
            weights[f"{mlp}.up_proj.bias"] = weights[f"{mlp}.up_proj.bias"] / factor
    return weights
