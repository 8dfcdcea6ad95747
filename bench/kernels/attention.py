"""How long paged attention takes: decode steps and prefill chunks, all layers of SmolLM2-135M.

    python bench/kernels/attention.py [--repeat N] [--threads N] [--case TEXT]

Prints medians, and what they come to in GB/s, with every key and value read once, and in GOPS, two
operations per multiply-add of both products.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from layby import _kernels

LAYERS, HEADS, KV_HEADS, DIM, BLOCK = 30, 9, 3, 64, 16


@dataclass(frozen=True, slots=True)
class Case:
    """``sequences`` of ``context`` tokens each, of which the last ``rows`` are computed now."""

    name: str
    sequences: int
    rows: int
    context: int


CASES = [
    Case("decode, 64 x 350", 64, 1, 350),
    Case("decode, 1 x 100", 1, 1, 100),
    Case("decode, 1 x 1000", 1, 1, 1000),
    Case("decode, 1 x 8000", 1, 1, 8000),
    Case("decode, 16 x 1000", 16, 1, 1000),
    Case("prefill, 512 at 0", 1, 512, 512),
    Case("prefill, 512 at 256", 1, 512, 768),
    Case("prefill, 512 at 500", 1, 512, 1012),
    Case("prefill, 512 at 1000", 1, 512, 1512),
    Case("prefill, 8 x 64 at 0", 8, 64, 64),
]


class Bench:
    """One case with random contents."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case = case
        self.layout = _kernels.KvLayout(
            dtype, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=BLOCK
        )
        width = -(-case.context // BLOCK)
        num_blocks = case.sequences * width
        self.pool = torch.zeros((num_blocks, self.layout.block_bytes), dtype=torch.uint8)
        rows = case.sequences * case.rows
        tables = torch.randperm(num_blocks, dtype=torch.int32).view(case.sequences, width)
        start = case.context - case.rows
        self.batch = _kernels.AttentionBatch(
            self.layout,
            num_heads=HEADS,
            num_blocks=num_blocks,
            first_rows=torch.arange(case.sequences, dtype=torch.int32) * case.rows,
            num_rows=torch.full((case.sequences,), case.rows, dtype=torch.int32),
            starts=torch.full((case.sequences,), start, dtype=torch.int32),
            block_tables=tables,
        )
        positions = torch.arange(case.context).repeat(case.sequences, 1)
        slots = tables.long().gather(1, positions // BLOCK) * BLOCK + positions % BLOCK
        self.cos_sin = torch.randn(case.context, DIM)
        self.qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * DIM)
        quantised = dtype == "int8"
        self.queries = torch.zeros(
            (rows, HEADS * DIM), dtype=torch.int8 if quantised else torch.float32
        )
        self.scales = torch.zeros(rows, HEADS) if quantised else None
        self.out = torch.zeros(rows, HEADS * DIM)
        # Fill the context: every layer, all positions but those of this step.
        for layer in range(LAYERS):
            for sequence in range(case.sequences):
                self._write(
                    layer,
                    torch.randn(case.context, self.qkv.shape[1]),
                    positions[sequence],
                    slots[sequence],
                    None,
                )
        self.positions = positions[:, start:].reshape(-1).contiguous()
        self.slots = slots[:, start:].reshape(-1).contiguous()
        self._as_arrays()

    def _write(self, layer, qkv, positions, slots, into) -> None:
        queries, scales = into or (
            torch.empty((len(qkv), HEADS * DIM), dtype=self.queries.dtype),
            None if self.scales is None else torch.empty(len(qkv), HEADS),
        )
        _kernels.rope_write(
            self.layout, self.pool, layer, qkv, positions, self.cos_sin, slots, queries, scales
        )

    def _as_arrays(self) -> None:
        """NumPy arrays take 2 us a call to hand over, torch tensors 10."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.numpy())

    def write(self) -> None:
        """Rotate and write the step's rows, in all layers."""
        for layer in range(LAYERS):
            self._write(layer, self.qkv, self.positions, self.slots, (self.queries, self.scales))

    def attend(self) -> None:
        """Attend in all layers."""
        for layer in range(LAYERS):
            self.batch.attend(self.pool, layer, self.queries, self.scales, self.out)


def seconds(work, repeat: int) -> float:
    """Median time of a call."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--case", default="", help="run cases whose name contains this")
    parser.add_argument("--dtype", default="int8", choices=["int8", "bfloat16", "float32"])
    args = parser.parse_args()
    if args.threads:
        _kernels.set_num_threads(args.threads)
    print(f"{_kernels.isa()}, {_kernels.num_threads()} threads, {args.dtype} KV cache")
    print(f"{'case':24}{'write ms':>10}{'attend ms':>11}{'us/row':>9}{'GB/s':>8}{'GOPS':>8}")
    for case in CASES:
        if args.case not in case.name:
            continue
        bench = Bench(case, args.dtype)
        write, attend = seconds(bench.write, args.repeat), seconds(bench.attend, args.repeat)
        rows = case.sequences * case.rows
        seen = sum(range(case.context - case.rows + 1, case.context + 1)) * case.sequences
        read = bench.layout.block_bytes / BLOCK * case.sequences * case.context
        operations = 4 * DIM * HEADS * LAYERS * seen
        print(
            f"{case.name:24}{write * 1e3:10.2f}{attend * 1e3:11.2f}{attend / rows * 1e6:9.1f}"
            f"{read / attend / 1e9:8.1f}{operations / attend / 1e9:8.0f}"
        )


if __name__ == "__main__":
    main()
