"""The load: jobs that are all there at the start, and bursts of requests more urgent than they."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from layby.simulate.arrivals import merge, parse_arrivals
from layby.simulate.traces import Trace, TraceRequest

URGENT, BATCH = 0, 5

PLAIN: dict[str, Any] = {"urgent_window": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": PLAIN | {"preemption_mode": "recompute"},
    "plain": PLAIN,
    "default": {},
}
"""What each sets, beside the machine's sizes; ``default`` is what ``layby serve`` does."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A load that fits a machine.

    Attributes:
        rate: Interactive requests per second of a burst.
        burst_prompt, burst_output, batch_prompt, batch_output: Tokens; medians of the bursts',
            means of the jobs'.
        duration_s: For so long bursts come, 10 s on and 20 s off.
        pools: The engine's options.
    """

    rate: float
    burst_prompt: int
    burst_output: int
    duration_s: int
    batch_prompt: int
    batch_output: int
    pools: dict[str, Any]


LARGE = Scale(12, 600, 150, 180, 2000, 1000, {"kv_cache_gib": 16.0, "swap_gib": 200.0})
SMALL = Scale(4, 100, 60, 90, 200, 300, {"num_blocks": 512, "num_swap_blocks": 8192})


def bursts(scale: Scale, seed: int) -> Trace:
    """Interactive requests: 10 s on, 20 s off."""
    return parse_arrivals(
        f"on-off:rate={scale.rate},idle-rate=0.01,on=10,off=20,duration={scale.duration_s},"
        f"prompt=lognormal({scale.burst_prompt},0.5),output=lognormal({scale.burst_output},0.5),"
        f"priority={URGENT}",
        seed=seed,
    )


def batch(scale: Scale, num_jobs: int) -> Trace:
    """Jobs that are all there at the start."""
    draw = random.Random(3).randint

    def around(mean: int) -> int:
        return draw(mean // 2, mean * 3 // 2)

    return Trace(
        "batch",
        [
            TraceRequest(0.0, around(scale.batch_prompt), around(scale.batch_output), BATCH)
            for _ in range(num_jobs)
        ],
    )


def merged(scale: Scale, seed: int, num_jobs: int) -> Trace:
    """Both."""
    return merge([bursts(scale, seed), batch(scale, num_jobs)])
