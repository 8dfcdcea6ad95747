"""Callers who hang up: their requests are gone within a step, everybody else's go on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from layby.engine import AsyncEngine
from tests.server.harness import (
    AlphabetExecutor,
    is_idle,
    live_server,
    make_engine,
    until,
    wait_until,
)

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        yield client


async def read_chunks(client: httpx.AsyncClient, body: dict[str, Any], most: int) -> str:
    """The text of the first chunks of a stream, after which the connection is closed."""
    text = ""
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200
        seen = 0
        async for line in stream.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            seen += 1
            if seen >= most:
                break
    return text


def wait_until_idle(engine: AsyncEngine) -> None:
    wait_until(lambda: is_idle(engine), "every request gone, every block free")


def test_case_11_streams_of_two_samples_closed_after_the_first_chunk() -> None:
    """vllm#14326: of a group whose caller had left, samples ran on."""
    engine = make_engine(AlphabetExecutor(step_s=0.002))
    body = {"prompt": "x" * 40, "n": 2, "temperature": 0, "max_tokens": 400}

    async def run(url: str) -> None:
        async with connect(url) as client:
            for _ in range(10):
                await asyncio.gather(*(read_chunks(client, body, 1) for _ in range(10)))

    with live_server(engine) as url:
        asyncio.run(run(url))
        wait_until_idle(engine)
        stats = engine.stats()
        assert stats.requests_accepted == 100
        assert stats.requests_aborted == 100
        # Had they run on, each would have made 800 tokens.
        assert stats.generation_tokens < 100 * 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("where", ["running", "waiting", "swapped"])
def test_case_11_callers_leave_while_running_waiting_or_swapped(where: str, stream: bool) -> None:
    """Before the first token too there is nobody to write to: the disconnect itself must count."""
    if where == "swapped":  # two of these fit at first, not to their ends
        engine = make_engine(AlphabetExecutor(step_s=0.01), num_blocks=14, num_swap_blocks=28)
    else:
        engine = make_engine(AlphabetExecutor(step_s=0.01), max_num_seqs=1)
    body = {"prompt": "x" * 31, "temperature": 0, "max_tokens": 180, "stream": stream}

    async def run(url: str) -> None:
        async with connect(url) as client:
            calls = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(3)]
            await until(lambda: engine.stats()[where] > 0, f"one is {where}")
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    with live_server(engine) as url:
        asyncio.run(run(url))
        wait_until_idle(engine)
        assert engine.stats().requests_aborted == 3


def test_a_caller_who_leaves_a_list_of_prompts_ends_them_all() -> None:
    engine = make_engine(AlphabetExecutor(step_s=0.002))
    body = {"prompt": ["a", "b", "c", "d"], "n": 2, "temperature": 0, "max_tokens": 400}

    async def run(url: str) -> None:
        async with connect(url) as client:
            await read_chunks(client, body, 3)

    with live_server(engine) as url:
        asyncio.run(run(url))
        wait_until_idle(engine)
        assert engine.stats().requests_aborted == 4


def test_200_streaming_clients_a_third_of_whom_hang_up_at_random() -> None:
    """No leaked block, no stuck request; all the rest complete, though memory runs short."""
    engine = make_engine(
        AlphabetExecutor(step_s=0.001), num_blocks=150, num_swap_blocks=150, max_num_seqs=64
    )
    dice = random.Random(7)
    leaves_after = [dice.randrange(1, 60) if i % 3 == 0 else None for i in range(200)]
    expected = ("abcdefghijklmnopqrstuvwxyz" * 3)[:64]

    async def one(client: httpx.AsyncClient, number: int) -> str:
        most = leaves_after[number]
        prompt = "x" * (10 + number % 50)
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 64}
        if most is None:
            return await read_chunks(client, body, 1000)
        await read_chunks(client, body, most)
        return ""

    async def run(url: str) -> list[str]:
        async with connect(url) as client:
            return await asyncio.gather(*(one(client, number) for number in range(200)))

    with live_server(engine) as url:
        texts = asyncio.run(run(url))
        wait_until_idle(engine)
        for most, text in zip(leaves_after, texts, strict=True):
            assert text == ("" if most is not None else expected)
        stats = engine.stats()
        assert stats.requests_accepted == 200
        assert stats.requests_finished + stats.requests_aborted == 200
        assert stats.preemptions_swap > 0
        # The server is as good as new.
        answer = httpx.post(url + COMPLETIONS, json={"prompt": "x", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == expected[:16]
