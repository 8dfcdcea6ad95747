"""A load on the engine, in real time."""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from bench.two_classes.loads import BATCH, URGENT
from bench.two_classes.outcomes import Outcome
from layby import SamplingParams
from layby.engine import Engine, EngineConfig
from layby.engine.build import build_engine
from layby.simulate.traces import Trace, TraceRequest

WARM_UP = Trace(
    "warm-up",
    [
        *[TraceRequest(0.0, 200, 120, BATCH) for _ in range(40)],
        *[TraceRequest(3.0 + number / 8, 100, 40, URGENT) for number in range(24)],
    ],
)
"""Fills the device pool, parks, and resumes: the first time, all of that takes longer."""


class Player:
    """An engine that plays one trace after the other.

    Args:
        options: The engine's.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._engine = build_engine(EngineConfig(**options, max_queue=None, shed_load=False))
        self._random = random.Random(1)

    def warm_up(self) -> None:
        """To be called before the first trace that counts."""
        self.play(WARM_UP)

    def play(self, trace: Trace, advance: Callable[[], None] = lambda: None) -> Outcome:
        """Play a trace to its end.

        Requests come when the trace says, whatever the engine does; it takes them between two
        steps, as a server's does, and their TTFT counts from when they came. No two prompts have
        anything in common.

        Args:
            trace: What arrives.
            advance: Called as each request ends.
        """
        prompts = [self._prompt(request.num_prompt_tokens) for request in trace.requests]
        gc.collect()
        moves_before = self._engine.scheduler.metrics.preemptions
        ttfts_s, job_ends_s = play_on(self._engine, trace, prompts, advance)
        moves = self._engine.scheduler.metrics.preemptions - moves_before
        num_jobs = sum(request.priority == BATCH for request in trace.requests)
        return Outcome(
            tuple(ttfts_s),
            batch_done_s=max(job_ends_s, default=0.0),
            moves_per_job=moves / max(1, num_jobs),
            unfinished=num_jobs - len(job_ends_s),
        )

    def close(self) -> None:
        """Free the engine's memory."""
        self._engine.close()

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(1000, 20000) for _ in range(num_tokens)]


def play_on(
    engine: Engine,
    trace: Trace,
    prompts: list[list[int]],
    advance: Callable[[], None] = lambda: None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[float], list[float]]:
    """Play a trace with these prompts.

    Args:
        engine: Idle.
        trace: What arrives.
        prompts: For each request its tokens.
        advance: Called as each request ends.
        clock, sleep: The engine's clock, and how to wait on it.

    Returns:
        TTFTs of the urgent, in the order of their first tokens, and ends of the jobs since the
        start; all in seconds.
    """
    coming = deque(zip(trace.requests, prompts, strict=True))
    asked: dict[str, TraceRequest] = {}
    unanswered: set[str] = set()
    ttfts_s: list[float] = []
    job_ends_s: list[float] = []
    start = clock()
    while coming or engine.has_unfinished:
        now = clock() - start
        while coming and coming[0][0].arrival_s <= now:
            request, prompt = coming.popleft()
            params = SamplingParams(
                temperature=0, max_tokens=request.num_output_tokens, ignore_eos=True
            )
            name = engine.add_request(prompt, params, priority=request.priority)
            asked[name] = request
            unanswered.add(name)
        if not engine.has_unfinished:
            sleep(max(0.0, coming[0][0].arrival_s - now))
            continue
        for delta in engine.step():
            if delta.error is not None:
                raise delta.error
            request, now = asked[delta.request_id], delta.time_s - start
            if delta.request_id in unanswered:
                unanswered.remove(delta.request_id)
                if request.priority == URGENT:
                    ttfts_s.append(now - request.arrival_s)
            if delta.finished:
                advance()
                if request.priority == BATCH:
                    job_ends_s.append(now)
    return ttfts_s, job_ends_s
