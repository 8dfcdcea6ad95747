"""Worker threads: bounded, in order, and no process waits for them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from layby.engine.workers import Workers


def test_results_and_errors_come_back_and_threads_are_bounded() -> None:
    async def run() -> None:
        workers = Workers(2)
        both = threading.Barrier(2)

        def call() -> str:
            both.wait(10)
            return threading.current_thread().name

        names = await asyncio.gather(*(workers.run(call) for _ in range(20)))
        assert set(names) == {"layby-worker"}
        assert sum(thread.name == "layby-worker" for thread in threading.enumerate()) >= 2
        with pytest.raises(ZeroDivisionError):
            await workers.run(lambda: 1 // 0)

    asyncio.run(run())


def test_a_call_that_is_cancelled_before_its_turn_is_not_begun() -> None:
    async def run() -> None:
        workers = Workers(1)
        gate = threading.Event()
        begun: list[str] = []
        first = asyncio.create_task(workers.run(lambda: gate.wait(10)))
        second = asyncio.create_task(workers.run(lambda: begun.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        assert await first
        await workers.run(lambda: begun.append("third"))
        assert begun == ["third"]

    asyncio.run(run())


def test_a_process_ends_while_a_worker_is_busy() -> None:
    """asyncio's own threads are waited for: an 8 MB prompt put the exit off by half a minute."""
    code = (
        "import asyncio, time\n"
        "from layby.engine.workers import Workers\n"
        "async def run():\n"
        "    call = asyncio.ensure_future(Workers(1).run(lambda: time.sleep(60)))\n"
        "    await asyncio.sleep(0.1)\n"
        "asyncio.run(run())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=20, check=False).returncode == 0
