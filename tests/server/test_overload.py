"""Overload over HTTP: the state is told, the lowest class is turned away, nothing else is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from layby.engine import AsyncEngine
from layby.engine.pressure import PressureGauge, PressureSettings
from tests.server.harness import AlphabetExecutor, is_idle, live_server, make_engine, until

COMPLETIONS = "/v1/completions"
LOW, HIGH = 5, 0
TOKENS = 60

_numbers: Iterator[int] = itertools.count()


def tiny_engine() -> AsyncEngine:
    """Twelve blocks, room for two or three requests; a window of half a second."""
    settings = PressureSettings(window_s=0.5, drain_window_s=2.0, deep_wait_s=0.3)
    return make_engine(
        AlphabetExecutor(step_s=0.004),
        num_blocks=12,
        num_swap_blocks=24,
        shed_load=True,
        pressure=PressureGauge(settings),
    )


async def ask(client: httpx.AsyncClient, priority: int) -> httpx.Response:
    prompt = f"{next(_numbers):040}"  # shares no block with another
    body: dict[str, Any] = {
        "prompt": prompt,
        "priority": priority,
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    return await client.post(COMPLETIONS, json=body)


async def pressure(client: httpx.AsyncClient) -> str:
    health = await client.get("/health")
    assert health.status_code == 200  # an overloaded server is a healthy one
    state: str = health.json()["pressure"]
    return state


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """``layby_pressure_state`` by state."""
    text = (await client.get("/metrics")).text
    return {
        sample.labels["state"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "layby_pressure_state"
    }


async def flood(
    client: httpx.AsyncClient,
) -> tuple[list[asyncio.Task[httpx.Response]], list[str]]:
    """Low-class requests every 15 ms until it is saturated; they, and the states passed."""
    calls: list[asyncio.Task[httpx.Response]] = []
    states = [await pressure(client)]
    while states[-1] != "saturated":
        assert len(calls) < 500, f"still {states} after {len(calls)} requests"
        calls.append(asyncio.create_task(ask(client, LOW)))
        await asyncio.sleep(0.015)
        state = await pressure(client)
        if state != states[-1]:
            states.append(state)
    return calls, states


def test_in_an_overload_the_low_class_is_told_to_come_again_and_the_high_one_is_served() -> None:
    async def run(url: str, engine: AsyncEngine) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            calls, states = await flood(client)
            assert states == ["ok", "rising", "saturated"]
            assert await gauges(client) == {"ok": 0, "rising": 0, "saturated": 1}

            refused, served = await asyncio.gather(ask(client, LOW), ask(client, HIGH))
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert "saturated" in refused.json()["error"]["message"]
            # Dozens are ahead, and some dozen finish in a second.
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert served.status_code == 200
            assert served.json()["usage"]["completion_tokens"] == TOKENS

            for answer in await asyncio.gather(*calls):
                # Those on their way when the state changed may have come too late.
                assert answer.status_code in (200, 429)
                if answer.status_code == 200:
                    assert answer.json()["usage"]["completion_tokens"] == TOKENS
            await until(lambda: is_idle(engine), "all that was accepted is done")
            stats = engine.stats()
            assert stats.preemptions_swap > 0
            assert stats.requests_finished == stats.requests_accepted
            assert stats.requests_accepted + stats.requests_shed == len(calls) + 2
            assert await pressure(client) == "ok"
            assert (await gauges(client))["ok"] == 1
            assert (await ask(client, LOW)).status_code == 200

    engine = tiny_engine()
    with live_server(engine) as url:
        asyncio.run(run(url, engine))
