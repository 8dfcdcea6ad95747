"""What parking costs: each move between the pools, against computing the same tokens again.

    python -m bench.parking [--tokens 1000] [--rounds 15] [--dir DIR]

Everything is done once per round, in turn, so that a slow moment of the machine meets all of it.
Beside the time that passed stands the processor time of all threads, which a busy machine hardly
changes.
The last lines tell whether it pays to copy a victim's blocks in a thread beside the forward pass of
the others, on a CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from layby import kernels
from layby.engine import EngineConfig
from layby.engine.build import build_engine
from layby.execution.disk_tier import DiskTier
from layby.execution.torch_executor import TorchExecutor
from layby.sampling_params import SamplingParams
from layby.scheduling import BlockMove, Request, ScheduledSequence, Sequence, StepPlan
from layby.scheduling.plan import Transfer

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
ROWS, CONTEXT = 64, 350
"""The decode step beside which blocks are copied."""


class Moves:
    """The moves of one sequence whose blocks are scattered over the device pool."""

    def __init__(self, executor: TorchExecutor, num_tokens: int, directory: str) -> None:
        self.executor, self.num_blocks = executor, -(-num_tokens // BLOCK_SIZE)
        self.sequence = sequence_of(0, num_tokens, range(1, 2 * self.num_blocks, 2))
        self.disk = DiskTier(directory, executor.cache.swap_pool, self.num_blocks)
        home = self.sequence.block_table
        self._out = [BlockMove(block, place) for place, block in enumerate(home)]
        self._back = [BlockMove(move.dst, move.src) for move in self._out]
        self._straight = tuple(BlockMove(place, place) for place in range(self.num_blocks))
        self._others = decode_plan(first_block=2 * self.num_blocks)

    def compute(self) -> None:
        """The sequence's tokens, as a prompt."""
        count = self.sequence.num_prompt_tokens
        for start in range(0, count, CHUNK_TOKENS):
            item = ScheduledSequence(self.sequence, start, min(CHUNK_TOKENS, count - start), ())
            self.executor.execute(StepPlan(1, 0.0, scheduled=[item]))

    def out(self) -> None:
        """Device → RAM."""
        self.executor.cache.swap_out(self._out)

    def back(self) -> None:
        """RAM → device."""
        self.executor.cache.swap_in(self._back)

    def write(self) -> None:
        """RAM → disk, as far as the page cache."""
        self.disk.begin([Transfer(1, self._straight)], [])
        self._wait()

    def read(self) -> None:
        """Disk → RAM."""
        self.disk.begin([], [Transfer(1, self._straight)])
        self._wait()

    def leave_page_cache(self) -> None:
        """So that the next read is one from the device."""
        os.fdatasync(self.disk._file)
        os.posix_fadvise(self.disk._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def forward(self) -> None:
        """A step of the others."""
        self.executor.execute(self._others)

    def out_then_forward(self) -> None:
        """A step that parks, as it is."""
        self.out()
        self.forward()

    def out_beside_forward(self) -> None:
        """A step that parks, as it would be with a thread for the copies."""
        thread = threading.Thread(target=self.out)
        thread.start()
        self.forward()
        thread.join()

    def _wait(self) -> None:
        while not (ends := self.disk.ends(wait_s=1.0)):
            pass
        assert not ends[0].fault, ends[0].fault


def sequence_of(number: int, num_tokens: int, blocks: range) -> Sequence:
    prompt = [1000 + (31 * number + 7 * place) % 40000 for place in range(num_tokens)]
    payload = SamplingParams(temperature=0)
    [sequence] = Request(str(number), prompt, max_tokens=1, payload=payload).sequences
    sequence.block_table = list(blocks)
    return sequence


def decode_plan(first_block: int) -> StepPlan:
    width = -(-(CONTEXT + 1) // BLOCK_SIZE)
    starts = [first_block + number * width for number in range(ROWS)]
    sequences = [
        sequence_of(number, CONTEXT + 1, range(start, start + width))
        for number, start in enumerate(starts)
    ]
    items = [ScheduledSequence(sequence, CONTEXT, 1, (sequence,)) for sequence in sequences]
    return StepPlan(1, 0.0, scheduled=items, num_samples=ROWS)


@dataclass
class Times:
    """Milliseconds, a value for each round."""

    passed: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def take(self, action: Callable[[], None]) -> None:
        start, busy = time.perf_counter(), time.process_time()
        action()
        self.passed.append(1e3 * (time.perf_counter() - start))
        self.processor.append(1e3 * (time.process_time() - busy))


def measure(moves: Moves, rounds: int) -> dict[str, Times]:
    """Everything, by what was done."""
    actions: list[tuple[str, Callable[[], None]]] = [
        ("device → RAM", moves.out),
        ("RAM → device", moves.back),
        ("RAM → disk, into the page cache", moves.write),
        ("disk → RAM, from the page cache", moves.read),
        ("disk → RAM, from the device", moves.read),
        ("compute again", moves.compute),
        ("decode alone", moves.forward),
        ("out, then decode", moves.out_then_forward),
        ("out beside decode", moves.out_beside_forward),
        ("out, then decode, again", moves.out_then_forward),
        ("out beside decode, again", moves.out_beside_forward),
    ]
    for _, action in actions:
        action()  # warms up
    times = {name: Times() for name, _ in actions}
    for _ in range(rounds):
        for name, action in actions:
            if name == "disk → RAM, from the device":
                moves.leave_page_cache()
            times[name].take(action)
    return times


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the swap file is")
    options = parser.parse_args()
    num_blocks = -(-options.tokens // BLOCK_SIZE)
    others = decode_plan(0).scheduled
    engine = build_engine(
        EngineConfig(
            num_blocks=2 * num_blocks + sum(len(item.sequence.block_table) for item in others),
            num_swap_blocks=num_blocks,
        )
    )
    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    executor.cache.pool.zero_()
    moves = Moves(executor, options.tokens, options.dir)
    times = measure(moves, options.rounds)
    moved_mib = num_blocks * executor.cache.block_bytes / 2**20
    print(
        f"{options.tokens} tokens, {num_blocks} blocks, {moved_mib:.1f} MiB; {engine.dtype} on "
        f"{engine.device}, {kernels.num_threads()} threads; milliseconds of {options.rounds} rounds"
    )
    for name, taken in times.items():
        middle, best = statistics.median(taken.passed), min(taken.passed)
        busy = statistics.median(taken.processor)
        print(f"  {name:32s} median {middle:8.2f}  best {best:8.2f}  processor {busy:8.2f}")
    report_gain(times)
    moves.disk.close()


def report_gain(times: dict[str, Times]) -> None:
    """What the thread saves, pair by pair of neighbours in time."""
    gains = [
        before - beside
        for turn in ("", ", again")
        for before, beside in zip(
            times[f"out, then decode{turn}"].passed,
            times[f"out beside decode{turn}"].passed,
            strict=True,
        )
    ]
    low, middle, high = statistics.quantiles(gains, n=4)
    print(f"a thread saves {middle:.2f} ms (quartiles {low:.2f} and {high:.2f})")


if __name__ == "__main__":
    main()
