"""The operator's paths: their key, and a pool that shrinks and grows under a live server."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from layby.errors import ConfigError
from layby.server import create_app
from tests.server.harness import AlphabetExecutor, in_process, live_server, make_engine, wait_until

POOL = "/admin/kv-pool"
ADMIN = {"Authorization": "Bearer boss"}
USER = {"Authorization": "Bearer user"}


@pytest.mark.parametrize("api_key", [None, "user"])
def test_without_an_admin_key_the_paths_do_not_exist(api_key: str | None) -> None:
    async def run() -> None:
        async with in_process(make_engine(), api_key=api_key) as client:
            for call in (client.get(POOL, headers=USER), client.patch(POOL, headers=USER)):
                assert (await call).status_code == 404
            assert "/admin" not in (await client.get("/openapi.json")).text

    asyncio.run(run())


@pytest.mark.parametrize("api_key", [None, "user"])
def test_only_the_admins_key_opens_them(api_key: str | None) -> None:
    async def run() -> None:
        engine = make_engine()
        async with in_process(engine, api_key=api_key, admin_api_key="boss") as client:
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 401),
                (USER, 403 if api_key else 401),
            ):
                for method in ("GET", "PATCH"):
                    call = client.request(method, POOL, headers=headers, json={"blocks": 1})
                    answer = await call
                    assert answer.status_code == status, (headers, method)
                    assert answer.json()["error"]["type"] == "invalid_request_error"
            assert engine.stats().num_blocks == 512
            assert (await client.get(POOL, headers=ADMIN)).json() == {
                "blocks": 512,
                "free_blocks": 512,
                "target_blocks": 512,
                "note": None,
            }
            # The admin's key opens nothing else, where there are others.
            models = await client.get("/v1/models", headers=ADMIN)
            assert models.status_code == (401 if api_key else 200)
            assert (await client.get("/admin/nothing", headers=ADMIN)).status_code == 404

    asyncio.run(run())


@pytest.mark.parametrize("key", ["", " x", "schlüssel", "user"])
def test_an_admin_key_that_cannot_be_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="API key"):
        create_app(make_engine(), api_key="user", admin_api_key=key)


@pytest.mark.parametrize(
    "body", [{}, {"blocks": 0}, {"blocks": -1}, {"blocks": True}, {"blocks": "9"}, {"blocks": 1.5},
             {"blocks": None}, {"blocks": 9, "more": 1}, [], 7]
)  # fmt: skip
def test_a_body_that_is_no_size_is_refused(body: object) -> None:
    async def run() -> None:
        engine = make_engine()
        async with in_process(engine, admin_api_key="boss") as client:
            answer = await client.patch(POOL, headers=ADMIN, json=body)
            assert answer.status_code == 400
            assert engine.stats().num_blocks == 512

    asyncio.run(run())


def test_the_documentation_shows_how_to_call() -> None:
    async def run() -> None:
        async with in_process(make_engine(), admin_api_key="boss") as client:
            page = (await client.get("/docs")).text
            assert "curl -X PATCH" in page
            assert "Blocks that the device pool of KV cache is to have." in page

    asyncio.run(run())


def test_shrinking_to_one_requests_worth_and_back_loses_nothing() -> None:
    """Eight callers over a socket; the executor checks what lies behind every row."""
    engine = make_engine(AlphabetExecutor(step_s=0.01), num_blocks=64, num_swap_blocks=64)
    count = 80
    body = {"prompt": "x" * 40, "temperature": 0, "max_tokens": count}
    wanted = "".join(chr(ord("a") + i % 26) for i in range(count))
    need = -(-(40 + count - 1) // 16)
    with (
        live_server(engine, admin_api_key="boss") as url,
        httpx.Client(base_url=url, timeout=30) as client,
        ThreadPoolExecutor(8) as callers,
    ):
        calls = [callers.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
        wait_until(lambda: engine.stats().running >= 4, "half of them run")
        sizes = []
        for blocks in (need, 64, 1, need, 200):
            answer = client.patch(POOL, headers=ADMIN, json={"blocks": blocks})
            sizes.append((answer.status_code, answer.json()["blocks"]))
        assert sizes == [(200, need), (200, 64), (202, need), (200, need), (200, 200)]
        answers = [call.result() for call in calls]
        assert [answer.status_code for answer in answers] == [200] * 8
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {wanted}
        back = client.patch(POOL, headers=ADMIN, json={"blocks": 64}).json()
        assert (back["blocks"], back["free_blocks"], back["note"]) == (64, 64, None)
    stats = engine.stats()
    assert stats.requests_finished == 8
    assert stats.preemptions_swap > 0
    assert stats.recomputed_tokens == 0
