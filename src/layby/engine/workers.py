"""A few threads for what would hold an event loop up, and which nobody ever has to wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    """A call, and the future that gets its outcome."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    outcome: asyncio.Future[Any]


class Workers:
    """Runs calls in a bounded number of daemon threads, in the order in which they came.

    asyncio's own threads would do but for one thing: a process does not end before they have.

    Args:
        num_threads: Most threads; they start when they are first needed.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, call: Callable[[], T]) -> T:
        """Call it in a thread. Cancelled, it is not begun; once begun, its outcome is dropped."""
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(call, loop, outcome))
        with self._lock:
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._work, name="layby-worker", daemon=True)
                self._threads.append(thread)
                thread.start()
        return await outcome

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if not job.outcome.cancelled():
                self._do(job)
            del job  # a thread that waits keeps nothing alive

    def _do(self, job: _Job) -> None:
        result, error = None, None
        try:
            result = job.call()
        except Exception as fault:
            error = fault
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            job.loop.call_soon_threadsafe(_settle, job.outcome, result, error)


def _settle(outcome: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if outcome.done():  # cancelled meanwhile
        return
    if error is None:
        outcome.set_result(result)
    else:
        outcome.set_exception(error)
