"""PATCH /v1/requests/{id}: a call that is being answered moves to another class."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.server.harness import (
    AlphabetExecutor,
    events,
    in_process,
    live_server,
    make_engine,
    wait_until,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODY = {"prompt": "x", "temperature": 0, "max_tokens": 30, "stream": True}


def start(client: httpx.Client, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    """Start a stream; its header comes at once."""
    request = client.build_request("POST", path, json={**BODY, **fields})
    return client.send(request, stream=True)


def test_a_call_that_waits_goes_ahead_of_one_that_came_before() -> None:
    """Its id is known although not a token of it is."""
    engine = make_engine(AlphabetExecutor(step_s=0.01), max_num_seqs=1)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        running = start(client, max_tokens=60)
        first = start(client)
        second = start(client, prompt=["a", "b"])  # both of its requests move
        answer = client.patch(
            f"/v1/requests/{second.headers['x-request-id']}", json={"priority": -1}
        )
        assert answer.status_code == 200
        assert answer.json() == {"id": second.headers["x-request-id"], "priority": -1}
        found = events(second.read().decode())
        assert {event["id"] for event in found} == {second.headers["x-request-id"]}
        assert engine.stats().requests_finished == 2
        assert {event["choices"][0]["index"] for event in found} == {0, 1}
        for stream in (running, first):
            assert len(events(stream.read().decode())) >= 30
            stream.close()
        second.close()


def test_a_chat_that_runs_gives_way_and_its_answer_is_the_same() -> None:
    engine = make_engine(AlphabetExecutor(step_s=0.005), max_num_seqs=1)
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        messages = [{"role": "user", "content": "hello"}]
        running = start(client, CHAT, prompt=None, messages=messages, max_tokens=100)
        waiting = start(client)
        name = running.headers["x-request-id"]
        assert client.patch(f"/v1/requests/{name}", json={"priority": 9}).status_code == 200
        waiting.read()
        wait_until(lambda: engine.stats().preemptions_swap == 1, "it was parked")
        text = "".join(
            event["choices"][0]["delta"].get("content", "")
            for event in events(running.read().decode())
        )
        assert text == ("abcdefghijklmnopqrstuvwxyz" * 4)[:100]
        gone = client.patch(f"/v1/requests/{name}", json={"priority": 0})
        assert gone.status_code == 404
        running.close()
        waiting.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "priority is required"),
        ({"priority": None}, "priority is required"),
        ({"priority": "high"}, 'priority must be an integer, got "high"'),
        ({"priority": 1.5}, "priority must be an integer, got 1.5"),
        ({"priority": True}, "priority must be an integer, got true"),
        ({"priority": 2**40}, "priority must be at most 2147483647"),
        ({"priority": 1, "prompt": "x"}, "unrecognized parameter: prompt"),
        ([1], "the request body must be a JSON object"),
    ],
)
def test_what_is_no_class_is_refused_by_name(body: Any, message: str) -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            answer = await client.patch("/v1/requests/cmpl-1", json=body)
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]

    asyncio.run(run())


def test_an_unknown_call_is_404_however_it_is_called() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            for name in ("cmpl-1", "%20", "x" * 5000, "☃"):
                answer = await client.patch(f"/v1/requests/{name}", json={"priority": 1})
                assert answer.status_code == 404, name
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert "is being answered" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_a_call_belongs_to_the_key_that_made_it() -> None:
    engine = make_engine(AlphabetExecutor(step_s=0.01))
    mine, other = {"Authorization": "Bearer mine"}, {"authorization": "bearer other"}
    with (
        live_server(engine, api_key=["mine", "other"]) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        request = client.build_request("POST", COMPLETIONS, json=BODY, headers=mine)
        stream = client.send(request, stream=True)
        path = f"/v1/requests/{stream.headers['x-request-id']}"
        statuses = [
            client.patch(path, json={"priority": 1}, headers=headers).status_code
            for headers in (other, {}, {"Authorization": "bearer  mine"})
        ]
        stream.close()
    assert statuses == [404, 401, 200]


def test_it_is_described() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            api = (await client.get("/openapi.json")).json()
            assert "patch" in api["paths"]["/v1/requests/{request_id}"]
            assert api["components"]["schemas"]["PriorityRequest"]["required"] == ["priority"]
            assert "/v1/requests/{request_id}" in (await client.get("/docs")).text

    asyncio.run(run())
