"""A soak: thousands of short requests on a pool too small for them, and nothing is left behind.

They come one by one and in bursts ten times as dense; clients abort some at a random moment, and
the device pool changes its size again and again. Every request must finish, be aborted by its
client or be refused because the queue is full; no block stays held in any pool, no file stays open
or in the swap directory; and after warm-up the process's resident memory (RSS) must not grow.

python -m bench.soak [--requests N] [--seed N]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tests.execution.harness import NETWORKS, TINY, make_network, random_weights

from layby.engine import Engine
from layby.engine.toy import ByteTokenizer
from layby.errors import QueueFullError
from layby.execution.torch_executor import TorchExecutor
from layby.models.network import Network
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig

NUM_REQUESTS = 20_000
WARM_UP = 0.25
"""Share of the requests after which memory is looked at."""

MAX_GROWTH_KIB = 2048.0
"""Most that the fitted line of RSS may rise from warm-up to the end."""

BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS, NUM_DISK_BLOCKS = 16, 24, 12, 48
MAX_PROMPT, MAX_OUTPUT = 60, 24
LARGEST = 2 * -(-(MAX_PROMPT + MAX_OUTPUT) // BLOCK_SIZE)  # blocks of the largest request
ARRIVALS_PER_STEP, BURST_FACTOR, BURST_EVERY, BURST_STEPS = 0.4, 10, 400, 20
ABORTED = 0.1
RESIZE_EVERY = 150


@dataclass
class Report:
    """What a soak found.

    Attributes:
        outcomes: How many requests finished, were aborted or were refused.
        wrong: What should not have been, in words.
        rss_kib: Resident memory after warm-up, by number of requests that had come.
        stats: What shows that memory was short.
    """

    seconds: float = 0.0
    steps: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    rss_kib: list[tuple[int, float]] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)

    @property
    def slope_kib(self) -> float:
        """Growth of RSS per 1,000 requests after warm-up, by least squares."""
        requests, rss = np.array(self.rss_kib).T
        return float(np.polyfit(requests / 1000, rss, 1)[0])

    @property
    def growth_kib(self) -> float:
        """What the fitted line rises by from warm-up to the end."""
        return self.slope_kib * (self.rss_kib[-1][0] - self.rss_kib[0][0]) / 1000

    def text(self) -> str:
        """All of it, for people."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        stats = ", ".join(f"{name} {value}" for name, value in self.stats.items())
        first, last = self.rss_kib[0][1] / 1024, self.rss_kib[-1][1] / 1024
        lines = [
            f"{self.outcomes.total()} requests in {self.seconds:.0f} s, {self.steps} steps",
            counts,
            stats,
            f"RSS {first:.1f} MiB after warm-up, {last:.1f} MiB at the end",
            f"slope {self.slope_kib:+.2f} KiB per 1,000 requests",
            f"growth by that slope {self.growth_kib:+.0f} KiB",
            *(f"WRONG: {what}" for what in self.wrong),
        ]
        return "\n".join(lines)


class Soak:
    """One soak.

    Args:
        num_requests: How many come.
        seed: Of all that is random.
        swap_dir: Where parked work lies on disk; must be empty.
    """

    def __init__(self, num_requests: int, seed: int, swap_dir: Path) -> None:
        self._rng = random.Random(seed)
        self._num_requests = num_requests
        self._swap_dir = swap_dir
        self._num_files = _num_open_files()
        self._report = Report()
        self._wanted: dict[str, SamplingParams] = {}  # of live requests
        self._got: Counter[str] = Counter()  # tokens of live requests
        self._to_abort: list[tuple[int, str]] = []
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=NUM_SWAP_BLOCKS,
            num_disk_blocks=NUM_DISK_BLOCKS,
            block_size=BLOCK_SIZE,
            preemption_mode="swap",  # computing a tiny model again may cost less than parking
            max_num_seqs=12,
            max_num_batched_tokens=128,
            max_queue=24,
        )
        executor = TorchExecutor(
            _network(),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=NUM_SWAP_BLOCKS,
            num_disk_blocks=NUM_DISK_BLOCKS,
            swap_dir=str(swap_dir),
        )
        self._scheduler = Scheduler(config)
        self._engine = Engine(
            self._scheduler, executor, ByteTokenizer(), max_model_len=MAX_PROMPT + MAX_OUTPUT
        )

    def run(self) -> Report:
        """Do it."""
        report, engine = self._report, self._engine
        start = time.perf_counter()
        num_come, next_sample = 0, int(WARM_UP * self._num_requests)
        while num_come < self._num_requests or engine.has_unfinished:
            report.steps += 1
            if num_come < self._num_requests:
                for _ in range(min(self._num_arrivals(), self._num_requests - num_come)):
                    self._add()
                    num_come += 1
                self._resize()
            self._abort()
            self._step()
            if num_come >= next_sample and next_sample < self._num_requests:
                report.rss_kib.append((num_come, _rss_kib()))
                next_sample += max(1, self._num_requests // 100)
        report.seconds = time.perf_counter() - start
        self._check_end()
        return report

    def _num_arrivals(self) -> int:
        in_burst = self._report.steps % BURST_EVERY < BURST_STEPS
        mean = ARRIVALS_PER_STEP * (BURST_FACTOR if in_burst else 1)
        whole = int(mean)
        return whole + (self._rng.random() < mean - whole)

    def _add(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, MAX_PROMPT))]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2]),
            max_tokens=rng.randint(1, MAX_OUTPUT),
            logprobs=1 if rng.random() < 0.05 else None,
            ignore_eos=True,
        )
        try:
            name = self._engine.add_request(prompt, params, priority=rng.randint(0, 2))
        except QueueFullError:
            self._report.outcomes["refused"] += 1
            return
        self._wanted[name] = params
        if rng.random() < ABORTED:
            self._to_abort.append((self._report.steps + rng.randint(0, 40), name))

    def _abort(self) -> None:
        due = [name for step, name in self._to_abort if step <= self._report.steps]
        self._to_abort = [(s, name) for s, name in self._to_abort if s > self._report.steps]
        for name in due:
            if self._engine.abort(name) is not None:
                self._report.outcomes["aborted"] += 1
                self._forget(name)

    def _resize(self) -> None:
        if self._report.steps % RESIZE_EVERY == 0:
            self._engine.resize_kv_pool(self._rng.randint(LARGEST, 2 * NUM_BLOCKS))

    def _step(self) -> None:
        for delta in self._engine.step():
            name = delta.request_id
            self._got[name] += sum(len(piece.token_ids) for piece in delta.outputs)
            if delta.finished:
                params = self._wanted[name]
                if delta.error is not None:
                    self._report.wrong.append(f"request {name} failed: {delta.error}")
                elif self._got[name] != params.n * (params.max_tokens or 0):
                    self._report.wrong.append(f"request {name} has {self._got[name]} tokens")
                self._report.outcomes["finished"] += 1
                self._forget(name)

    def _forget(self, name: str) -> None:
        del self._wanted[name]
        self._got.pop(name, None)

    def _check_end(self) -> None:
        scheduler, wrong, stats = self._scheduler, self._report.wrong, self._engine.stats()
        scheduler.check_integrity()
        if self._wanted:
            wrong.append(f"{len(self._wanted)} requests got no end")
        if self._report.outcomes.total() != self._num_requests:
            wrong.append(f"{self._num_requests} came, {self._report.outcomes.total()} ended")
        for name in ("device", "swap", "disk"):
            held = getattr(scheduler, f"{name}_pool").num_held
            if held:
                wrong.append(f"{held} blocks are still held in the {name} pool")
        self._report.stats = {
            name: getattr(stats, name)
            for name in (
                "preemptions_swap", "preemptions_recompute", "swapped_in_blocks",
                "demoted_blocks", "promoted_blocks", "swap_faults", "kv_losses",
            )
        }  # fmt: skip
        self._engine.close()
        left = [entry.name for entry in self._swap_dir.iterdir()]
        if left:
            wrong.append(f"files are left in the swap directory: {left}")
        if (more := _num_open_files() - self._num_files) > 0:
            wrong.append(f"{more} files are still open")
        if self._report.growth_kib > MAX_GROWTH_KIB:
            wrong.append(
                f"RSS grew by {self._report.growth_kib:.0f} KiB, more than {MAX_GROWTH_KIB:.0f}"
            )


def run(num_requests: int, seed: int = 0) -> Report:
    """A soak with a swap directory of its own."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps so small are slower on several
    gc.collect()
    gc.freeze()  # so that collecting at every sample looks only at what came since
    try:
        with tempfile.TemporaryDirectory(prefix="layby-soak-") as directory:
            return Soak(num_requests, seed, Path(directory)).run()
    finally:
        gc.unfreeze()
        torch.set_num_threads(num_threads)


def _network() -> Network:
    """A random model, as small as the kernels at hand allow."""
    model = replace(
        TINY, vocab_size=ByteTokenizer().vocab_size, hidden_size=64, num_heads=4, head_dim=16
    )
    kind = "compiled float32" if "compiled float32" in NETWORKS else "torch float32"
    return make_network(model, random_weights(model), kind)


def _rss_kib() -> float:
    gc.collect()  # what waits for the collector is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


def _num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run(options.requests, options.seed)
    print(report.text())
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
