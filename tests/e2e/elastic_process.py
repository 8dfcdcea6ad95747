"""A process whose pool follows the memory of its cgroup, beside a hog; started by test_elastic.

``python -m tests.e2e.elastic_process ROOT GROUP`` sets the limit of GROUP, a directory of cgroup
v2, serves the same requests undisturbed and beside the hog, and prints what happened as JSON. Where
ROOT is not ``/``, GROUP lies in a tree that stands in for it: the process then keeps its
``memory.current`` itself, as the resident memory of both.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from layby.engine import AsyncEngine, Engine, elastic
from layby.engine.elastic import ElasticPool
from layby.engine.memory_signals import AdviceSettings, MemorySource, read_signals
from layby.engine.toy import ByteTokenizer
from layby.execution.torch_executor import TorchExecutor
from layby.models.config import ModelConfig
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig
from tests.execution.harness import NETWORKS, make_network, random_tokens, random_weights

MIB = 2**20
NUM_BLOCKS, NUM_SWAP_BLOCKS = 800, 300  # of 256 KiB
ROOM_MIB = 340  # what the process may take beyond what it has before the first request
HOG_MIB = 240

FAT_CACHE = ModelConfig(
    architecture="llama",
    vocab_size=200,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    context_length=640,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)

HOG = """
import sys
taken = []
for line in sys.stdin:
    del taken[int(line):]
    while len(taken) < int(line):
        taken.append(bytearray(b"x") * 2**20)
    print("done", flush=True)
"""


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


class Hog:
    """A neighbour that takes memory and gives it back."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", HOG]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def have(self, mib: int) -> None:
        """Returns when it has so many MiB."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        if self.process.stdout.readline() != "done\n":
            raise RuntimeError("the hog was killed")


class World:
    """The limit, who reads it, and the engine within."""

    def __init__(self, root: Path, group: Path) -> None:
        self.root, self.group, self.hog = root, group, Hog()
        executor = TorchExecutor(
            make_network(FAT_CACHE, random_weights(FAT_CACHE), NETWORKS[-1]),
            block_size=16,
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=NUM_SWAP_BLOCKS,
        )
        self.limit = self.least_room = self.current() + ROOM_MIB * MIB
        (group / "memory.max").write_text(f"{self.limit}\n")
        self.looks = 0
        self.pool = ElasticPool(
            block_bytes=executor.cache.block_bytes,
            min_blocks=FAT_CACHE.context_length // 16,
            max_blocks=NUM_BLOCKS,
            read=self.read,
            most_blocks=lambda: NUM_BLOCKS,
            give_back_parked=executor.cache.give_back_parked,
            settings=AdviceSettings(calm_s=0.5, grow_wait_s=0.05, grow_step=0.2),
        )
        config = SchedulerConfig(
            num_blocks=NUM_BLOCKS,
            num_swap_blocks=NUM_SWAP_BLOCKS,
            max_model_len=FAT_CACHE.context_length,
            max_num_seqs=24,
        )
        self.engine = AsyncEngine(
            Engine(
                Scheduler(config),
                executor,
                ByteTokenizer(),
                vocab_size=FAT_CACHE.vocab_size,
                max_model_len=FAT_CACHE.context_length,
                elastic=self.pool,
            )
        )

    def current(self) -> int:
        """What the group holds."""
        if self.root != Path("/"):
            held = resident_bytes() + resident_bytes(self.hog.process.pid)
            (self.group / "memory.current").write_text(f"{held}\n")
        return int((self.group / "memory.current").read_text())

    def read(self) -> Sequence[MemorySource]:
        self.looks += 1
        self.least_room = min(self.least_room, self.limit - self.current())
        return [one for one in read_signals(self.root) if one.name != "machine"]

    async def answers(self) -> list[list[int]]:
        """What 24 requests of some 350 prompt and 40 output tokens come to."""

        async def answer(number: int) -> list[int]:
            prompt = random_tokens(330 + number, FAT_CACHE.vocab_size, seed=number)
            params = SamplingParams(max_tokens=40, temperature=1.0, seed=number, ignore_eos=True)
            deltas = [delta async for delta in self.engine.generate(prompt, params)]
            return [token for delta in deltas for token in delta.outputs[0].token_ids]

        return await asyncio.gather(*(answer(number) for number in range(24)))

    async def until(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not is_true():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within 60 s: {what}; {dict(self.engine.stats())}")
            await asyncio.sleep(0.01)

    async def let_hog_grow(self) -> None:
        """It takes 8 MiB as often as the pool has followed: it is no faster than that."""
        for mib in range(8, HOG_MIB + 1, 8):
            await asyncio.to_thread(self.hog.have, mib)
            looks = self.looks
            await self.until(
                lambda: self.looks > looks + 1 and self.pool.goal is None,  # noqa: B023
                "the pool has followed",
            )

    async def play(self) -> dict[str, object]:
        """Undisturbed, beside the hog, and until the pool is back."""
        stats, size = self.engine.stats, self.engine.kv_pool_size
        async with self.engine:
            wanted = await self.answers()
            full, undisturbed = resident_bytes(), stats()
            hog = asyncio.create_task(self.let_hog_grow())
            found = [await self.answers()]
            while not hog.done():
                found.append(await self.answers())
            await hog
            await self.until(lambda: self.limit - self.current() > 0.05 * self.limit, "room")
            small, small_blocks = resident_bytes(), size().num_blocks
            await asyncio.to_thread(self.hog.have, 0)
            await self.until(lambda: size().num_blocks == NUM_BLOCKS, "the pool is back")
        self.hog.process.kill()
        return {
            "same": all(one == wanted for one in found),
            "undisturbed": {"blocks": undisturbed.num_blocks, "shrinks": undisturbed.pool_shrinks},
            "full_mib": full // MIB,
            "small_mib": small // MIB,
            "small_blocks": small_blocks,
            "least_room_mib": self.least_room // MIB,
            "preempted": stats().preemptions_recompute + stats().preemptions_swap,
            "aborted": stats().requests_aborted,
        }


if __name__ == "__main__":
    elastic.LOOK_INTERVAL_S = elastic.CLOSE_LOOK_INTERVAL_S = (
        0.02  # a hog that takes 300 MiB within a second is met in time
    )
    world = World(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(asyncio.run(world.play())))
