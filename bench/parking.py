"""What parking costs: swap a sequence out and in again, against computing it again.

python -m bench.parking [--tokens 1000]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from layby.engine import EngineConfig
from layby.engine.build import build_engine
from layby.sampling_params import SamplingParams
from layby.scheduling import BlockMove, Request, ScheduledSequence, StepPlan

REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of one prefill step")
    options = parser.parse_args()
    num_blocks = -(-options.tokens // 16)
    engine = build_engine(EngineConfig(num_blocks=4 * num_blocks, num_swap_blocks=2 * num_blocks))
    executor = engine.executor
    prompt = [1000 + 7 * place for place in range(options.tokens)]
    payload = SamplingParams(temperature=0)
    request = Request("a", prompt, max_tokens=1, payload=payload)
    sequence = request.sequences[0]
    sequence.block_table = list(range(1, 2 * num_blocks, 2))  # scattered, as in use
    slots = list(range(num_blocks))
    out = [BlockMove(block, slot) for block, slot in zip(sequence.block_table, slots, strict=True)]
    back = [BlockMove(slot, block) for block, slot in out]

    def compute() -> None:
        for start in range(0, options.tokens, options.chunk):
            count = min(options.chunk, options.tokens - start)
            item = ScheduledSequence(sequence, start, count, ())
            executor.execute(StepPlan(1, 0.0, scheduled=[item]))

    def park() -> None:
        executor.execute(StepPlan(1, 0.0, swap_out=out))
        executor.execute(StepPlan(1, 0.0, swap_in=back))

    seconds: dict[str, list[float]] = {"compute": [], "park": []}
    compute()
    park()
    for _ in range(REPEATS):  # in turn, so that a slow moment of the machine meets both
        for name, action in (("compute", compute), ("park", park)):
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    moved = 2 * sum(block.nbytes for block in executor.cache.pool[sequence.block_table])
    print(f"{options.tokens} tokens, {num_blocks} blocks, {engine.dtype} on {engine.device}")
    print(f"compute again        {medians['compute'] * 1e3:8.2f} ms")
    print(
        f"swap out and in      {medians['park'] * 1e3:8.2f} ms  "
        f"({moved / medians['park'] / 2**30:.1f} GiB/s)"
    )
    print(f"share                {medians['park'] / medians['compute']:8.2%}")


if __name__ == "__main__":
    main()
