"""Where a step's time goes, by stage, on the default model in int8.

    python -m bench.stages

Each stage is timed around its kernel calls, so what is left over is Python between them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from layby import kernels
from layby.engine import EngineConfig
from layby.engine.build import build_engine
from layby.models import compiled
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, ScheduledSequence, Sequence, StepPlan

REPEATS = 15
CASES = {  # name: sequences, rows of each, position of the first
    "decode 64 x 350": (64, 1, 350),
    "decode 1 x 100": (1, 1, 100),
    "prefill 512 at 500": (1, 512, 500),
}

seconds: dict[str, float] = defaultdict(float)


def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        seconds[stage] += time.perf_counter() - start
        return result

    return wrapper


class TimedBatch:
    """Stands in for the kernels' AttentionBatch, whose methods cannot be replaced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._batch = kernels_batch(*args, **kwargs)
        self.attend = timed("attention", self._batch.attend)


kernels_batch = kernels.AttentionBatch


def sequence_of(number: int, length: int, first_block: int) -> Sequence:
    request = Request(
        str(number),
        [1000 + (number * 31 + place * 7) % 40000 for place in range(length)],
        max_tokens=1,
        payload=SamplingParams(temperature=1.0, seed=number),
    )
    sequence = request.sequences[0]
    blocks = -(-length // 16)
    sequence.block_table = list(range(first_block, first_block + blocks))
    return sequence


def main() -> None:
    engine = build_engine(EngineConfig(dtype="int8", num_blocks=64 * 24 + 128, swap_gib=0))
    executor: Any = engine.executor
    executor.cache.pool.zero_()
    for name, stage in (
        ("add_rms_norm_quant", "norm and quantise"),
        ("quantise_rows", "norm and quantise"),
        ("add_rms_norm", "norm and quantise"),
        ("silu_mul_quant", "SiLU and quantise"),
        ("rope_write", "rotate and write KV"),
    ):
        setattr(compiled.kernels, name, timed(stage, getattr(kernels, name)))
    compiled.kernels.AttentionBatch = TimedBatch  # type: ignore[misc, assignment]
    projections = timed("matrix products", compiled._Workspace.project)
    compiled._Workspace.project = projections  # type: ignore[method-assign]
    executor.model.logits = timed("output head", executor.model.logits)
    executor._sampler.sample = timed("sampling", executor._sampler.sample)

    for case, (count, rows, start) in CASES.items():
        width = -(-(start + rows) // 16)
        sequences = [sequence_of(n, start + rows, n * width) for n in range(count)]
        plan = StepPlan(
            1,
            0.0,
            scheduled=[ScheduledSequence(s, start, rows, (s,)) for s in sequences],
            num_samples=count,
        )
        runs: list[dict[str, float]] = []
        for _ in range(REPEATS + 2):
            seconds.clear()
            began = time.perf_counter()
            executor.execute(plan)
            whole = time.perf_counter() - began
            runs.append({**seconds, "the rest": whole - sum(seconds.values()), "step": whole})
        print(f"\n{case}: milliseconds, median of {REPEATS}")
        for stage in runs[0]:
            values = [run[stage] * 1e3 for run in runs[2:]]
            print(f"  {stage:22s} {statistics.median(values):8.2f}   (best {min(values):.2f})")
    print(f"\n{kernels.num_threads()} threads, {kernels.isa()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
