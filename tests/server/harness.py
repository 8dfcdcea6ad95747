"""A whole engine without a model, and a live server around it, for the server's tests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from layby.engine import AsyncEngine, Engine
from layby.engine.recorder import RecordedScheduler, Recorder
from layby.engine.recording import RecordingFile
from layby.engine.toy import ByteTokenizer, ToyChatTemplate
from layby.execution import FakeExecutor, StepResult
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from layby.scheduling.request import Sequence
from layby.server import create_app
from layby.server.wire import HttpProtocol

MODEL = "toy"
BLOCK_SIZE = 16


class AlphabetExecutor(FakeExecutor):
    """The fake executor, which checks every plan: greedy samples spell the script, others letters.

    Args:
        script: Token ids of a greedy answer, repeated when it is over. The alphabet by default.
        step_s: Seconds that every step takes at least.
        broken: Called before each step; may raise.
    """

    def __init__(
        self,
        script: list[int] | None = None,
        *,
        step_s: float = 0.0,
        broken: Callable[[StepPlan], None] | None = None,
    ) -> None:
        super().__init__(block_size=BLOCK_SIZE, script=self._token)
        self._answer_ids = script or list(b"abcdefghijklmnopqrstuvwxyz")
        self._step_s = step_s
        self._broken = broken

    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``."""
        if self._broken is not None:
            self._broken(plan)
        if self._step_s:
            time.sleep(self._step_s)
        return super().execute(plan)

    def _token(self, sample: Sequence) -> int:
        params = sample.request.payload
        assert isinstance(params, SamplingParams)
        position = sample.num_output_tokens
        if params.greedy:
            return self._answer_ids[position % len(self._answer_ids)]
        key = f"{params.seed}/{sample.index}/{position}".encode()
        return ord("a") + hashlib.blake2b(key).digest()[0] % 26


def make_engine(
    executor: AlphabetExecutor | None = None,
    *,
    num_blocks: int = 512,
    num_swap_blocks: int = 512,
    max_num_seqs: int = 64,
    max_queue: int | None = None,
    max_model_len: int = 1024,
    tokenizer: ByteTokenizer | None = None,
    record: Path | None = None,
    priority_aging: float | None = None,
    **engine_options: Any,
) -> AsyncEngine:
    """An engine over bytes; not started."""
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(512, max_num_seqs),
        max_model_len=max_model_len,
        max_queue=max_queue,
        priority_aging=priority_aging,
    )
    recorder = record and Recorder(RecordingFile(record), model_name=MODEL, max_bytes=2**20)
    return AsyncEngine(
        Engine(
            RecordedScheduler(config, recorder) if recorder else Scheduler(config),
            executor or AlphabetExecutor(),
            tokenizer or ByteTokenizer(),
            ToyChatTemplate(),
            model_name=MODEL,
            max_model_len=max_model_len,
            recorder=recorder,
            **engine_options,
        )
    )


@contextlib.asynccontextmanager
async def in_process(engine: AsyncEngine, **app_options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the app without a network, and an engine that runs meanwhile."""
    transport = httpx.ASGITransport(app=create_app(engine, **app_options))
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
        yield client


@contextlib.contextmanager
def live_server(engine: AsyncEngine, **app_options: Any) -> Iterator[str]:
    """The app on a free port of the loopback, in a thread of its own; gives the base URL."""
    config = uvicorn.Config(
        create_app(engine, **app_options),
        host="127.0.0.1",
        port=0,
        http=HttpProtocol,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        async with engine:
            await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="test-server")
    thread.start()
    try:
        wait_until(lambda: server.started, "the server has started")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def wait_until(is_true: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll for at most ``timeout_s`` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s} s: {what}")


async def until(is_true: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """The same for a coroutine."""
    for _ in range(int(timeout_s / 0.005)):
        if is_true():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def is_idle(engine: AsyncEngine) -> bool:
    """Whether no request is in the engine and every block is back in its pool."""
    stats = engine.stats()
    return (
        stats.running == stats.waiting == stats.swapped == 0
        and stats.num_free_blocks == stats.num_blocks
        and stats.num_free_swap_blocks == stats.num_swap_blocks
    )


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream that must end with ``[DONE]``."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), text
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
