"""What operators see: queue limit, keys, health, metrics, the docs page, and a broken engine."""

from __future__ import annotations

import asyncio
import json
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from layby.errors import ConfigError
from layby.scheduling.plan import StepPlan
from layby.server import create_app
from tests.server.harness import AlphabetExecutor, in_process, is_idle, make_engine, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def test_case_17_a_full_queue_answers_429_at_once() -> None:
    """vllm#18826: the queue had no limit. Two places and a queue of four: six of fifty get in."""
    engine = make_engine(AlphabetExecutor(step_s=0.01), max_num_seqs=2, max_queue=4)
    body = {"prompt": "x", "temperature": 0, "max_tokens": 30}

    async def run() -> None:
        async with in_process(engine) as client:
            calls = [client.post(COMPLETIONS, json=body) for _ in range(50)]
            answers = await asyncio.gather(*calls)
            accepted = [answer for answer in answers if answer.status_code == 200]
            refused = [answer for answer in answers if answer.status_code == 429]
            assert (len(accepted), len(refused)) == (6, 44)
            for answer in accepted:
                assert answer.json()["usage"]["completion_tokens"] == 30
            for answer in refused:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "queue_full"
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200

    asyncio.run(run())


def test_case_17_a_list_of_prompts_gets_in_whole_or_not_at_all() -> None:
    """Every prompt counts n against the limit; of a list that does not fit, nothing runs."""
    engine = make_engine(AlphabetExecutor(step_s=0.005), max_num_seqs=2, max_queue=4)
    body = {"temperature": 0, "max_tokens": 20}

    async def run() -> None:
        async with in_process(engine) as client:
            too_many = await client.post(COMPLETIONS, json={**body, "prompt": ["x"] * 7})
            assert too_many.status_code == 429
            assert "prompt[6]" in too_many.json()["error"]["message"]
            await until(lambda: is_idle(engine), "what had got in is gone")
            fits = await client.post(COMPLETIONS, json={**body, "prompt": ["x"] * 3, "n": 2})
            assert fits.status_code == 200
            assert len(fits.json()["choices"]) == 6
            assert engine.stats().requests_finished == 3

    asyncio.run(run())


def test_keys_guard_everything_but_probes_and_documentation() -> None:
    async def run() -> None:
        async with in_process(make_engine(), api_key="sesame") as client:
            for path in ("/health", "/metrics", "/docs", "/openapi.json", "/"):
                assert (await client.get(path)).status_code in (200, 307), path
            for path in ("/v1/models", "/nothing", "/v1/models/toy", "/docs/"):
                assert (await client.get(path)).status_code == 401, path
            for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
                assert (await client.post(path, json={})).status_code == 401, path
            for header in ("Bearer wrong", "Bearer", "sesame", "Basic sesame", "Bearer sésame", ""):
                answer = await client.get(
                    "/v1/models", headers=[(b"Authorization", header.encode())]
                )
                assert answer.status_code == 401, header
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
            headers = {"Authorization": "bearer sesame"}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("key", ["", " x", "schlüssel", "a\nb", ["good", ""]])
def test_a_key_that_no_header_can_carry_is_refused(key: Any) -> None:
    with pytest.raises(ConfigError, match="API key"):
        create_app(make_engine(), api_key=key)


def test_health_says_why_the_engine_takes_no_work() -> None:
    async def run() -> None:
        engine = make_engine()
        async with in_process(engine) as client:
            assert (await client.get("/health")).json() == {"status": "ok", "pressure": "ok"}
            engine.begin_drain()
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "draining"
            refused = await client.post(COMPLETIONS, json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1

    asyncio.run(run())


def test_a_step_that_fails_ends_every_answer_and_turns_health_to_503() -> None:
    """Neither a stream nor a whole answer hangs; an event in mid-stream is the last one."""

    def broken(plan: StepPlan) -> None:
        if plan.step > 20:
            raise RuntimeError("the device is on fire")

    async def run() -> None:
        engine = make_engine(AlphabetExecutor(step_s=0.005, broken=broken))
        async with in_process(engine) as client:
            body = {"messages": HELLO, "temperature": 0, "max_tokens": 500}
            stream, whole = await asyncio.gather(
                client.post(CHAT, json={**body, "stream": True}), client.post(CHAT, json=body)
            )
            assert whole.status_code == 503
            assert whole.json()["error"]["code"] == "engine_dead"
            *pieces, last = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line]
            assert len(pieces) > 3
            assert last["error"]["code"] == "engine_dead"
            assert "on fire" in last["error"]["message"]
            health = await client.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "dead"
            assert "on fire" in health.json()["reason"]
            assert (await client.post(CHAT, json=body)).status_code == 503

    asyncio.run(run())


def test_a_request_that_fails_alone_is_a_500_and_its_neighbour_goes_on() -> None:
    """As a whole answer a status, in a stream the last event."""

    def broken(plan: StepPlan) -> None:
        if plan.step > 10:
            executor.failing_requests |= {
                item.sequence.request.request_id
                for item in plan.scheduled
                if item.sequence.tokens[0] == ord("F")
            }

    executor = AlphabetExecutor(step_s=0.002, broken=broken)

    async def run() -> None:
        async with in_process(make_engine(executor)) as client:
            body = {"prompt": "F", "temperature": 0, "max_tokens": 50}
            whole, stream, neighbour = await asyncio.gather(
                client.post(COMPLETIONS, json=body),
                client.post(COMPLETIONS, json={**body, "stream": True}),
                client.post(COMPLETIONS, json={**body, "prompt": "x"}),
            )
            assert whole.status_code == 500
            assert whole.json()["error"]["type"] == "server_error"
            last = json.loads(stream.text.rstrip().rpartition("data: ")[2])
            assert last["error"]["type"] == "server_error"
            assert neighbour.json()["usage"]["completion_tokens"] == 50
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())


def test_metrics_are_in_the_text_format() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            await client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 5})
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert 'vllm:generation_tokens_total{model_name="toy"} 5.0' in answer.text

    asyncio.run(run())


class _Links(HTMLParser):
    """Collects what a page refers to, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_docs_page_needs_nothing_from_elsewhere() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            root = await client.get("/")
            assert root.headers["location"] == "/docs"
            page = _Links()
            page.feed((await client.get("/docs")).text)
            assert page.links == ["/openapi.json", "/metrics", "/health"]
            for path in (CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/health", "/metrics"):
                assert f"http://toy{path}" in page.text
            for field in ("presence_penalty", "messages[].role", "stream_options.include_usage"):
                assert field in page.text
            assert "`" not in page.text
            assert "Successful Response" not in page.text
            evil = await client.get("/docs", headers={"Host": "<script>x"})
            assert "<script>" not in evil.text
            assert (await client.get("/docs", headers={"Host": "[::1"})).status_code == 200

    asyncio.run(run())


def _resolve(schema: Any, schemas: dict[str, Any]) -> None:
    """Every reference of an OpenAPI description leads somewhere."""
    if isinstance(schema, dict):
        reference = schema.get("$ref", "#/components/schemas/Completion")
        assert reference.rpartition("/")[2] in schemas, reference
        for part in schema.values():
            _resolve(part, schemas)
    elif isinstance(schema, list):
        for part in schema:
            _resolve(part, schemas)


def test_the_openapi_description_is_complete() -> None:
    app: FastAPI = create_app(make_engine())
    description = app.openapi()
    assert app.openapi() is description
    _resolve(description["paths"], description["components"]["schemas"])
    _resolve(description["components"], description["components"]["schemas"])
    chat = description["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"messages", "priority", "top_k", "cache_salt", "max_completion_tokens"} <= set(chat)
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            assert operation["description"], path
            assert ("400" in operation["responses"]) == (method in ("post", "patch")), path
    for name in ("ChatCompletion", "Completion", "Tokenize", "Detokenize"):
        fields = description["components"]["schemas"][f"{name}Request"]["properties"]
        assert all(field["description"] for field in fields.values()), fields


def test_a_fault_of_ours_is_a_500_that_tells_nothing_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine()

    def broken(*_args: object, **_kwargs: object) -> str:
        raise KeyError("somebody's secret")

    assert engine.chat_template is not None
    monkeypatch.setattr(type(engine.chat_template), "render", broken)

    async def run() -> None:
        transport = httpx.ASGITransport(app=create_app(engine), raise_app_exceptions=False)
        async with engine, httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            answer = await client.post(CHAT, json={"messages": HELLO})
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "secret" not in answer.text

    asyncio.run(run())
