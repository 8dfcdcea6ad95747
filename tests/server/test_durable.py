"""Coming back for an answer: by id, with the key that asked, as often as one likes, or never."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from layby.engine import AsyncEngine
from layby.engine.journal import Journal
from layby.errors import ConfigError
from layby.server import create_app, serve_engine
from layby.server.durable import DurableRequests
from tests.server.harness import (
    AlphabetExecutor,
    events,
    in_process,
    is_idle,
    live_server,
    make_engine,
    until,
    wait_until,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 8}
MINE = {"X-Request-Id": "mine"}


@asynccontextmanager
async def durable(
    state_dir: Path, engine: AsyncEngine | None = None, **options: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    engine = engine or make_engine()
    journal = Journal(state_dir)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal)
    async with in_process(engine, durable=requests, **options) as client:
        await requests.recover()
        yield client, engine
    await requests.close()


def slow() -> AsyncEngine:
    return make_engine(AlphabetExecutor(step_s=0.02))


async def until_it_runs(client: httpx.AsyncClient, path: str, **options: Any) -> None:
    for _ in range(500):
        answer = await client.get(path, **options)
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"]:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{path} does not run")


def test_a_repeated_request_gets_the_same_answer_however_it_is_delivered(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, engine):
            first = await client.post(COMPLETIONS, json=BODY, headers=MINE)
            assert first.headers["x-request-id"] == "mine"
            again = await client.post(COMPLETIONS, json={**BODY, "n": 1}, headers=MINE)
            assert again.json() == first.json()
            stream = await client.post(COMPLETIONS, json={**BODY, "stream": True}, headers=MINE)
            pieces = [event["choices"][0]["text"] for event in events(without_ids(stream.text))]
            assert "".join(pieces) == first.json()["choices"][0]["text"]
            assert engine.stats().requests_accepted == 1

    asyncio.run(run())


def test_of_two_at_a_time_with_one_id_only_one_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path, slow()) as (client, engine):
            calls = [client.post(COMPLETIONS, json=BODY, headers=MINE) for _ in range(5)]
            answers = await asyncio.gather(*calls)
            assert len({answer.text for answer in answers}) == 1
            assert answers[0].status_code == 200
            assert engine.stats().requests_accepted == 1

    asyncio.run(run())


@pytest.mark.parametrize("other", [{"max_tokens": 9}, {"prompt": "y"}, {"seed": 1}])
def test_the_same_id_for_another_request_is_a_conflict(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            assert (await client.post(COMPLETIONS, json=BODY, headers=MINE)).status_code == 200
            answer = await client.post(COMPLETIONS, json={**BODY, **other}, headers=MINE)
            assert answer.status_code == 409
            assert "mine" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_a_refused_request_leaves_its_id_free(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            bad = {"prompt": "x" * 2000, "max_tokens": 8}
            assert (await client.post(COMPLETIONS, json=bad, headers=MINE)).status_code == 400
            assert (await client.get("/v1/requests/mine")).status_code == 404
            assert (await client.post(COMPLETIONS, json=BODY, headers=MINE)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "é", "x" * 129])
def test_an_id_that_cannot_be_one_is_refused(tmp_path: Path, name: str) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            headers = [(b"X-Request-Id", name.encode())]
            answer = await client.post(COMPLETIONS, json=BODY, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "X-Request-Id"

    asyncio.run(run())


def test_an_id_belongs_to_the_key_that_made_it(tmp_path: Path) -> None:
    ann, bob = ({"Authorization": f"Bearer {name}", **MINE} for name in ("ann", "bob"))

    async def run() -> None:
        async with durable(tmp_path, api_key=["ann", "bob"]) as (client, engine):
            first = await client.post(COMPLETIONS, json=BODY, headers=ann)
            for method in ("GET", "DELETE"):
                answer = await client.request(method, "/v1/requests/mine", headers=bob)
                assert answer.status_code == 404
                assert answer.json()["error"]["type"] == "invalid_request_error"
                assert (await client.request(method, "/v1/requests/mine")).status_code == 401
            # The id is free for another key, also with another body.
            other = await client.post(COMPLETIONS, json={**BODY, "prompt": "y"}, headers=bob)
            assert other.status_code == 200
            kept = await client.get("/v1/requests/mine", headers=ann)
            assert kept.json()["response"] == first.json()
            assert engine.stats().requests_accepted == 2

    asyncio.run(run())
    for file in tmp_path.iterdir():
        assert b"ann" not in file.read_bytes()


def test_ids_that_the_server_makes_cannot_be_guessed(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            answers = [await client.post(COMPLETIONS, json=BODY) for _ in range(3)]
            names = {answer.headers["x-request-id"] for answer in answers}
            assert len(names) == 3
            assert all(len(name) >= 32 for name in names)
            assert len({name[:4] for name in names}) == 3

    asyncio.run(run())


def test_what_has_come_so_far_can_be_seen_and_cancelled(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path, slow()) as (client, engine):
            body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
            post = asyncio.create_task(client.post(CHAT, json=body, headers=MINE))
            await until_it_runs(client, "/v1/requests/mine")
            state = (await client.get("/v1/requests/mine")).json()
            assert state["status"] == "in_progress"
            [choice] = state["response"]["choices"]
            assert choice["finish_reason"] is None
            assert choice["message"]["content"].startswith("a")
            gone = await client.delete("/v1/requests/mine")
            assert gone.json() == {"id": "mine", "object": "request.deleted", "deleted": True}
            answer = await post
            assert answer.json()["choices"][0]["finish_reason"] == "abort"
            await until(lambda: is_idle(engine), "the request is aborted")
            assert (await client.get("/v1/requests/mine")).status_code == 404
            assert (await client.delete("/v1/requests/mine")).status_code == 404

    asyncio.run(run())


def test_another_class_is_that_of_the_next_start_as_well(tmp_path: Path) -> None:
    ann, bob = ({"Authorization": f"Bearer {name}", **MINE} for name in ("ann", "bob"))
    path = "/v1/requests/mine"

    async def run() -> None:
        async with durable(tmp_path, slow(), api_key=["ann", "bob"]) as (client, _):
            post = asyncio.create_task(client.post(COMPLETIONS, json=BODY, headers=ann))
            await until_it_runs(client, path, headers=ann)
            change = {"priority": 5}
            assert (await client.patch(path, json=change, headers=bob)).status_code == 404
            answer = await client.patch(path, json=change, headers=ann)
            assert answer.json() == {"id": "mine", "priority": 5}
            await post
            assert (await client.patch(path, json=change, headers=ann)).status_code == 404

    asyncio.run(run())
    with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
        [[call]] = database.execute("SELECT call FROM calls")
    assert json.loads(call)["priority"] == 5


@pytest.mark.parametrize("after", [0, 1, 3, 8])
def test_a_stream_can_begin_after_any_token(tmp_path: Path, after: int) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            body = {**BODY, "prompt": ["x", "y"], "temperature": 0, "logprobs": 1, "echo": True}
            await client.post(COMPLETIONS, json={**body, "stream": True}, headers=MINE)
            path = f"/v1/requests/mine?stream=true&starting_after={after}"
            numbered = list(numbered_events((await client.get(path)).text))
            whole = list(numbered_events((await client.get("/v1/requests/mine?stream=true")).text))
            assert numbered == [
                (number, event) for number, event in whole if number > after or not after
            ]
            if after == 1:
                first = numbered[0][1]["choices"][0]
                # The prompt, and the first token, count although they are left out.
                assert (first["text"], first["logprobs"]["text_offset"]) == ("b", [2])

    asyncio.run(run())


def test_a_stream_cannot_begin_after_more_tokens_than_there_can_be(tmp_path: Path) -> None:
    """A mistyped number looked like an answer that had ended with nothing more to say."""

    async def run() -> None:
        async with durable(tmp_path, slow()) as (client, _):
            path = "/v1/requests/mine?stream=true&starting_after="
            post = asyncio.create_task(client.post(COMPLETIONS, json=BODY, headers=MINE))
            await until_it_runs(client, "/v1/requests/mine")
            for _ in ("live", "finished"):
                answer = await client.get(f"{path}9")
                assert answer.status_code == 400
                assert "no choice has more than 8 tokens" in answer.json()["error"]["message"]
                assert (await client.get(f"{path}8")).text == "data: [DONE]\n\n"
                await post

    asyncio.run(run())


def test_an_answer_that_somebody_only_asked_about_is_still_there(tmp_path: Path) -> None:
    """HEAD counted as fetching it, and an answer to an id of the server's is kept for one fetch."""
    made = ""

    def row(column: str) -> str:
        with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
            [[value]] = database.execute(f"SELECT {column} FROM calls")
        return str(value)

    async def leave_it() -> None:
        nonlocal made
        async with durable(tmp_path, slow()) as (client, engine):
            post = asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "stream": True}))
            await until(lambda: engine.stats().generation_tokens > 2, "it runs")
            made = row("id")
            await engine.shutdown(0.0)  # its stream breaks off: nothing was delivered
            await post

    async def finish_it() -> None:
        async with durable(tmp_path) as (_, engine):
            await until(lambda: is_idle(engine), "it has ended")

    async def ask() -> None:
        async with durable(tmp_path) as (client, _):
            path = f"/v1/requests/{made}"
            assert row("status") == "done"
            for query in ("", "?stream=true"):
                for _ in range(2):
                    assert (await client.head(path + query)).status_code == 200
            assert (await client.get(path)).json()["status"] == "completed"

    asyncio.run(leave_it())
    asyncio.run(finish_it())
    asyncio.run(ask())


def test_a_stream_joined_in_the_middle_goes_on_live(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path, slow()) as (client, engine):
            body = {**BODY, "temperature": 0, "stream": True}
            post = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=MINE))
            await until_it_runs(client, "/v1/requests/mine")
            joined = await client.get("/v1/requests/mine?stream=true&starting_after=2")
            text = [event["choices"][0]["text"] for _, event in numbered_events(joined.text)]
            assert "".join(text) == "cdefgh"
            assert (await post).text.endswith("data: [DONE]\n\n")
            assert engine.stats().requests_accepted == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("stream=maybe", "stream", "stream must be true or false"),
        ("stream=", "stream", "stream must be true or false"),
        ("stream=true&starting_after=-1", "starting_after", "must be at least 0"),
        ("stream=true&starting_after=1e3", "starting_after", "starting_after must be an integer"),
        ("stream=true&starting_after=", "starting_after", "starting_after must be an integer"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after", "must be a smaller integer"),
        ("starting_after=3", "starting_after", "needs stream=true"),
        ("stream=true&starting_afer=3", "starting_afer", "unrecognized parameter"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(
    tmp_path: Path, query: str, param: str, says: str
) -> None:
    """Whoever mistypes where to go on would read the answer twice."""

    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            answer = await client.get(f"/v1/requests/mine?{query}")
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", param)
            assert says in error["message"]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_hang_up_ends_only_what_nobody_can_come_back_for(
    tmp_path: Path, stream: bool, is_chosen: bool
) -> None:
    engine = slow()
    journal = Journal(tmp_path)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal)
    body = {**BODY, "max_tokens": 20, "stream": stream}

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            headers = MINE if is_chosen else {}
            post = asyncio.create_task(client.post(COMPLETIONS, json=body, headers=headers))
            await until(lambda: engine.stats().generation_tokens > 0, "it runs")
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    with live_server(engine, durable=requests) as url:
        asyncio.run(leave(url))
        wait_until(lambda: is_idle(engine), "it has ended, one way or the other")
        assert engine.stats().requests_finished == is_chosen
        assert engine.stats().requests_aborted == (not is_chosen)
        wait_until(lambda: not journal.unfinished(), "nothing is to be resumed")
        if is_chosen:  # its readers are told after the journal
            mine = f"{url}/v1/requests/mine"
            wait_until(
                lambda: httpx.get(mine).json()["status"] == "completed", "its answer is whole"
            )
            answer = httpx.get(mine).json()
            assert answer["usage"]["completion_tokens"] == 20
    journal.close()


def test_while_the_server_drains_nobodys_hang_up_counts(tmp_path: Path) -> None:
    """The server cuts connections itself then; who lost his comes back after the restart."""
    engine = slow()
    journal = Journal(tmp_path)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal)

    async def leave(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            post = asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "max_tokens": 20}))
            await until(lambda: engine.stats().generation_tokens > 0, "it runs")
            engine.begin_drain()
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    with live_server(engine, durable=requests) as url:
        asyncio.run(leave(url))
        wait_until(lambda: is_idle(engine), "it has ended, one way or the other")
        assert engine.stats().requests_finished == 1
        wait_until(lambda: not journal.unfinished(), "the answer is written down")
    journal.close()


def test_a_request_that_fails_is_told_as_failed_also_later(tmp_path: Path) -> None:
    async def run() -> None:
        executor = AlphabetExecutor()
        async with durable(tmp_path, make_engine(executor)) as (client, engine):
            executor.failing_requests = Everything()  # type: ignore[assignment]
            answer = await client.post(COMPLETIONS, json=BODY, headers=MINE)
            assert answer.status_code == 500
            assert answer.headers["x-request-id"] == "mine"
            state = (await client.get("/v1/requests/mine")).json()
            assert state["status"] == "failed"
            assert "told to fail" in state["error"]["message"]
            again = await client.post(COMPLETIONS, json=BODY, headers=MINE)
            assert again.status_code == 500
            assert engine.stats().requests_accepted == 1

    asyncio.run(run())


class Everything(frozenset[str]):
    """Contains every name."""

    def __contains__(self, name: object) -> bool:
        return True


def test_an_answer_that_was_given_is_kept_and_not_made_again(tmp_path: Path) -> None:
    async def run(first: httpx.Response | None) -> httpx.Response:
        async with durable(tmp_path) as (client, engine):
            answer = await client.post(COMPLETIONS, json=BODY, headers=MINE)
            if first is not None:
                assert answer.json() == first.json()
                assert engine.stats().generation_tokens == 0
            # One whose id was the server's and which was delivered is nobody's any more.
            other = await client.post(COMPLETIONS, json=BODY)
            name = other.headers["x-request-id"]
            assert (await client.get(f"/v1/requests/{name}")).status_code == 404
            return answer

    asyncio.run(run(asyncio.run(run(None))))


async def interrupt(state_dir: Path, *bodies: dict[str, Any]) -> list[httpx.Response]:
    """Calls that are all cut off by the end of their server, after some tokens."""
    engine = slow()
    journal = Journal(state_dir)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal)
    async with in_process(engine, durable=requests) as client:
        calls = [
            client.post(COMPLETIONS, json=body, headers={"X-Request-Id": f"job-{number}"})
            for number, body in enumerate(bodies)
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: engine.stats().generation_tokens > len(calls), "all run")
        await engine.shutdown(0.0)
        answers = [await task for task in tasks]
    assert await requests.close() == len(bodies)
    return answers


SMALL, LARGE = ({"prompt": "x", "max_tokens": most, "seed": 1} for most in (60, 200))
WIDE = {"prompt": ["x", "y"], "max_tokens": 200, "seed": 2, "n": 4}


def test_whoever_is_cut_off_is_told_that_his_request_is_kept_and_how_to_fetch_it(
    tmp_path: Path,
) -> None:
    for number, answer in enumerate(asyncio.run(interrupt(tmp_path, SMALL, LARGE))):
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["code"] == "draining"
        assert f"it is kept: GET /v1/requests/job-{number}" in error["message"]
        assert answer.headers["x-request-id"] == f"job-{number}"


@pytest.mark.parametrize(
    ("smaller", "reason"),
    [
        ({"num_blocks": 6}, "need 13 KV blocks of 16 tokens, but the pool has 6"),
        ({"max_model_len": 128}, "together 201; the context holds 128"),
        ({"max_num_seqs": 3, "num_blocks": 40}, "n is 4, but at most 3 sequences can run"),
    ],
)
def test_what_smaller_settings_cannot_serve_waits_untouched_for_larger_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, smaller: dict[str, Any], reason: str
) -> None:
    body = WIDE if "max_num_seqs" in smaller else LARGE
    path = "/v1/requests/job-1"

    def row() -> tuple[Any, ...]:
        with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
            [found] = database.execute("SELECT * FROM calls WHERE id = 'job-1'")
        return tuple(found)

    async def undisturbed() -> list[dict[str, Any]]:
        async with in_process(make_engine()) as client:
            answer = await client.post(COMPLETIONS, json=body)
            return list(answer.json()["choices"])

    async def start_too_small() -> None:
        async with durable(tmp_path, make_engine(**smaller)) as (client, _):
            small = await client.get("/v1/requests/job-0?stream=true")
            assert small.text.endswith("[DONE]\n\n")
            state = (await client.get(path)).json()
            assert state["status"] == "interrupted"
            assert reason in state["error"]["message"]
            assert state["usage"]["completion_tokens"] > 0
            stream = await client.get(f"{path}?stream=true")
            assert reason in stream.text
            for is_stream in (False, True):
                again = {**body, "stream": is_stream}
                answer = await client.post(
                    COMPLETIONS, json=again, headers={"X-Request-Id": "job-1"}
                )
                assert answer.status_code == (200 if is_stream else 503)
                assert reason in answer.text
                assert "kept for a start with larger settings" in answer.text
            assert (await client.patch(path, json={"priority": 1})).status_code == 404

    async def start_as_before() -> None:
        async with durable(tmp_path) as (client, _):
            assert (await client.get(f"{path}?stream=true")).text.endswith("[DONE]\n\n")
            state = (await client.get(path)).json()
            assert state["status"] == "completed"
            assert state["response"]["choices"] == await undisturbed()

    asyncio.run(interrupt(tmp_path, SMALL, body))
    before = row()
    for _ in range(2):
        caplog.clear()
        asyncio.run(start_too_small())
        assert row() == before
        [warning] = [r.message for r in caplog.records if r.levelname == "WARNING"]
        assert warning.startswith("1 request of an earlier run cannot be served")
        assert "the first, job-1: " in warning
        assert reason in warning
        assert "DELETE /v1/requests/{id} forgets one" in warning
    asyncio.run(start_as_before())


def test_what_waits_for_larger_settings_can_be_forgotten(tmp_path: Path) -> None:
    async def forget() -> None:
        async with durable(tmp_path, make_engine(num_blocks=6)) as (client, _):
            assert (await client.delete("/v1/requests/job-0")).status_code == 200
            assert (await client.get("/v1/requests/job-0")).status_code == 404

    async def start_as_before() -> None:
        async with durable(tmp_path) as (client, _):
            assert (await client.get("/v1/requests/job-0")).status_code == 404

    asyncio.run(interrupt(tmp_path, LARGE))
    asyncio.run(forget())
    asyncio.run(start_as_before())


def test_what_the_model_cannot_take_fails_at_the_next_start(tmp_path: Path) -> None:
    """Its record cannot be gone on from, with whatever settings."""

    async def start() -> None:
        async with durable(tmp_path) as (client, _):
            assert (await client.get("/v1/requests/job-0")).json()["status"] == "failed"

    asyncio.run(interrupt(tmp_path, LARGE))
    with sqlite3.connect(tmp_path / "journal.sqlite3") as database:
        database.execute("UPDATE calls SET call = json_set(call, '$.requests[0][0][0]', 99999)")
    asyncio.run(start())


def test_another_models_state_is_refused_and_left_untouched(tmp_path: Path) -> None:
    asyncio.run(interrupt(tmp_path, {**BODY, "max_tokens": 60}))
    other = make_engine(identity={"model": "other"})
    with pytest.raises(ConfigError, match="model toy, here other"):
        serve_engine(lambda: other, host="127.0.0.1", port=0, state_dir=tmp_path)

    async def go_on() -> None:
        async with durable(tmp_path) as (client, _):
            stream = await client.get("/v1/requests/job-0?stream=true")
            assert stream.text.endswith("data: [DONE]\n\n")

    asyncio.run(go_on())


def test_a_state_directory_in_use_is_said_before_the_model_loads(tmp_path: Path) -> None:
    def build() -> AsyncEngine:
        raise AssertionError("the model was loaded")

    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="in use by another server"):
        serve_engine(build, host="127.0.0.1", port=0, state_dir=tmp_path)
    journal.close()


def test_without_a_place_to_write_nothing_is_accepted(tmp_path: Path) -> None:
    async def run() -> None:
        engine = make_engine()
        journal = Journal(tmp_path)
        journal.claim(engine.identity)
        requests = DurableRequests(engine, journal)
        async with in_process(engine, durable=requests) as client:
            journal._database.execute("DROP TABLE calls")
            answer = await client.post(COMPLETIONS, json=BODY)
            assert answer.status_code == 503
            assert "journal" in answer.json()["error"]["message"]
            await until(lambda: is_idle(engine), "what was queued is gone")
        await requests.close()

    asyncio.run(run())


@pytest.mark.parametrize("isolate", [False, True])
def test_prefixes_can_be_kept_apart_by_key(isolate: bool) -> None:
    async def run() -> None:
        engine = make_engine()
        keys = ["ann", "bob"]
        body = {"prompt": "x" * 200, "max_tokens": 2}
        async with in_process(engine, api_key=keys, isolate_prefix_cache=isolate) as client:
            for name, hits in (("ann", 0), ("bob", 0 if isolate else 192), ("ann", 192)):
                before = engine.stats().prefix_cache_hit_tokens
                headers = {"Authorization": f"Bearer {name}"}
                await client.post(COMPLETIONS, json=body, headers=headers)
                assert engine.stats().prefix_cache_hit_tokens - before == hits

    asyncio.run(run())


def test_isolation_needs_keys() -> None:
    with pytest.raises(ConfigError, match="isolate_prefix_cache"):
        create_app(make_engine(), isolate_prefix_cache=True)


def test_the_documentation_page_shows_how_to_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with durable(tmp_path) as (client, _):
            page = (await client.get("/docs")).text
            assert "curl -X DELETE" in page
            assert "/v1/requests/{request_id}" in page

    asyncio.run(run())


def test_without_a_state_directory_there_are_no_such_paths() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            answer = await client.post(COMPLETIONS, json=BODY, headers=MINE)
            assert answer.status_code == 200
            for method in ("GET", "DELETE"):  # PATCH is there without it, too
                answer = await client.request(method, "/v1/requests/mine")
                assert answer.status_code == 405

    asyncio.run(run())


def without_ids(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("id: "))


def numbered_events(text: str) -> list[tuple[int, dict[str, Any]]]:
    """Event ids (0 for those without) and events of a stream that must end with ``[DONE]``."""
    found = []
    *blocks, last = [block for block in text.split("\n\n") if block]
    assert last == "data: [DONE]", last
    for block in blocks:
        name, _, data = block.rpartition("\n")
        number = int(name.removeprefix("id: ")) if name else 0
        found.append((number, json.loads(data.removeprefix("data: "))))
    return found


def change(state_dir: Path, what: str) -> None:
    """Change the journal behind its back."""
    with sqlite3.connect(state_dir / "journal.sqlite3") as database:
        database.execute(f"UPDATE calls SET {what}")
    database.close()


def test_one_call_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    async def cut_off() -> None:
        async with durable(tmp_path, slow()) as (client, engine):
            names = ("good", "mine")
            calls = [
                client.post(COMPLETIONS, json=BODY, headers={"X-Request-Id": name})
                for name in names
            ]
            tasks = [asyncio.create_task(call) for call in calls]
            await until(lambda: engine.stats().generation_tokens > 1, "they run")
            await engine.shutdown(0.0)
            await asyncio.gather(*tasks)

    async def go_on() -> None:
        async with durable(tmp_path) as (client, engine):
            assert engine.stats().requests_accepted == 1
            await until_it_runs(client, "/v1/requests/good")
            for answer in (
                await client.get("/v1/requests/mine"),
                await client.get("/v1/requests/mine?stream=true"),
                await client.post(COMPLETIONS, json=BODY, headers=MINE),
            ):
                assert answer.status_code == 409
                assert "mine" in answer.json()["error"]["message"]
            assert (await client.delete("/v1/requests/mine")).status_code == 200
            assert (await client.get("/v1/requests/mine")).status_code == 404

    asyncio.run(cut_off())
    change(tmp_path, "outputs = '[]' WHERE id = 'mine'")
    asyncio.run(go_on())


def test_a_restart_goes_on_with_what_was_waited_and_not_with_the_age(tmp_path: Path) -> None:
    """One runs, the other waits for it; then the server is down for an hour."""
    begun_s = time.monotonic()

    async def cut_off() -> tuple[float, float]:
        """Longest wait of the first, shortest wait of the second."""
        engine = make_engine(AlphabetExecutor(step_s=0.01), max_num_seqs=1, priority_aging=60)
        async with durable(tmp_path, engine) as (client, _):
            body = {**BODY, "max_tokens": 900, "priority": 5}
            post = partial(client.post, COMPLETIONS, json=body)
            first = asyncio.create_task(post(headers={"X-Request-Id": "runs"}))
            await until(lambda: engine.stats().generation_tokens > 0, "the first runs")
            longest_s = time.monotonic() - begun_s
            second = asyncio.create_task(post(headers={"X-Request-Id": "waits"}))
            await until(lambda: engine.stats().waiting == 1, "the second waits")
            waits_since = time.monotonic()
            await asyncio.sleep(0.3)
            shortest_s = time.monotonic() - waits_since
            await engine.shutdown(0.0)
            await asyncio.gather(first, second)
        return longest_s, shortest_s

    async def go_on() -> dict[int, int]:
        engine = make_engine(AlphabetExecutor(step_s=0.01), max_num_seqs=1, priority_aging=0.1)
        async with durable(tmp_path, engine):
            risen = {
                request.order: request.claim - request.rank
                for request in engine._engine.scheduler.requests.values()
            }
            await engine.shutdown(0.0)  # nobody waits for the rest
        return risen

    longest_s, shortest_s = asyncio.run(cut_off())
    journal = Journal(tmp_path)
    waited_s = {call.call_id: call.requests[0].waited_s for call in journal.unfinished()}
    journal.close()
    assert waited_s["runs"] <= longest_s
    assert shortest_s <= waited_s["waits"] <= time.monotonic() - begun_s
    change(tmp_path, "call = json_set(call, '$.created_s', json_extract(call, '$.created_s')-3600)")
    risen = asyncio.run(go_on())
    assert len(risen) == 2
    assert all(classes < 1000 for classes in risen.values())  # an hour would be 36,000
