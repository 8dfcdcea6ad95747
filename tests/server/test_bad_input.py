"""Bad input gets a 400 that names the parameter; it is never a 500, and never ends the server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from layby.server import create_app
from layby.server.http import MAX_BODY_BYTES
from tests.server.harness import in_process, is_idle, live_server, make_engine, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    engine = make_engine()
    with live_server(engine) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client
        assert is_idle(engine)


def assert_healthy(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "hi", "temperature": 0, "max_tokens": 3})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "abc"


def test_what_is_no_http_is_answered_in_the_shape_of_every_error(client: httpx.Client) -> None:
    """It was plain text, which clients that read errors choke on."""
    for nonsense in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: a\r\n\r\n",
    ):
        with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as raw:
            raw.settimeout(10)
            raw.sendall(nonsense)
            answer = b"".join(iter(lambda: raw.recv(4096), b""))  # until it is closed
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n"), nonsense
        assert b"content-type: application/json" in head
        assert f"content-length: {len(body)}".encode() in head
        error = json.loads(body)["error"]
        assert error["type"] == "invalid_request_error"
        assert "not valid HTTP" in error["message"]
    assert_healthy(client)


def test_nonsense_behind_a_call_ends_its_answer_and_is_not_told_in_the_middle_of_it(
    client: httpx.Client,
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1000, "stream": True}).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as raw:
        raw.settimeout(10)
        head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = raw.recv(4096)
        raw.sendall(b"nonsense\r\n\r\n")
        answer += b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert_healthy(client)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


WRONG_VALUES = [
    # On both endpoints: parameter, value, what the message must say.
    ("model", "gpt-4", "does not exist"),
    ("model", "\u0000", "does not exist"),
    ("model", 5, "must be a string"),
    ("n", 0, "between 1 and"),
    ("n", -1, "between 1 and"),
    ("n", 10**30, "between 1 and"),
    ("n", 65, "at most 64"),
    ("n", True, "must be an integer"),
    ("n", 1.0, "must be an integer"),
    ("n", "2", "must be an integer"),
    ("n", [], "must be an integer"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("max_tokens", 16.5, "must be an integer"),
    ("max_tokens", True, "must be an integer"),
    ("max_tokens", 10**9, "1024"),
    ("max_tokens", 10**400, "1024"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 17, "larger than max_tokens"),
    ("temperature", -0.1, "[0, 100]"),
    ("temperature", 101, "[0, 100]"),
    ("temperature", 10**400, "must be a number"),
    ("temperature", True, "must be a number"),
    ("temperature", "hot", "must be a number"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"),
    ("top_p", -1, "(0, 1]"),
    ("top_k", -2, "at least -1"),
    ("top_k", 1.5, "must be an integer"),
    ("min_p", 1.1, "[0, 1]"),
    ("repetition_penalty", 0, "[0.01, 100]"),
    ("repetition_penalty", 1e-300, "[0.01, 100]"),
    ("stop", "x" * 1025, "1025 characters"),
    ("stop", ["x"] * 100_000, "at most 16"),
    ("stop_token_ids", [1] * 1025, "at most 1024"),
    ("logit_bias", {str(token): 1 for token in range(1025)}, "at most 1024"),
    ("presence_penalty", 2.1, "[-2, 2]"),
    ("frequency_penalty", -2.1, "[-2, 2]"),
    ("seed", 2**70, "between"),
    ("seed", "abc", "must be an integer"),
    ("stop", 5, "must be a string or a list of strings"),
    ("stop", [""], "non-empty"),
    ("stop", "", "non-empty"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", ["a", 1], "must be a string or a list of strings"),
    ("stop_token_ids", 5, "must be a list of token ids"),
    ("stop_token_ids", [True], "must be a list of token ids"),
    ("stop_token_ids", [-1], "at least 0"),
    ("ignore_eos", 1, "must be true or false"),
    ("stream", "yes", "must be true or false"),
    ("stream", 1, "must be true or false"),
    ("stream_options.include_usage", 1, "must be true or false"),
    ("stream_options.surprise", 1, "unrecognized parameter"),
    ("priority", 1.5, "must be an integer"),
    ("priority", 2**40, "at most"),
    ("priority", True, "must be an integer"),
    ("cache_salt", 5, "must be a string"),
    ("logit_bias", [], "must be an object"),
    ("logit_bias", {"5": "much"}, "numbers"),
    ("logit_bias", {"5": True}, "numbers"),
    ("logit_bias", {"5": 101}, "[-100, 100]"),
    ("logit_bias", {"5": 10**400}, "[-100, 100]"),
    ("logit_bias", {"１": 1}, "token ids as keys"),
    ("tools", [{"type": "function", "function": {"name": "f"}}], "does not support tools"),
    ("tool_choice", "required", "does not support tool_choice with this value"),
    ("functions", [{"name": "f"}], "does not support functions"),
    ("response_format", {"type": "json_object"}, "does not support response_format"),
    ("suffix", "the end", "does not support suffix"),
    ("modalities", ["text", "audio"], "does not support modalities"),
    ("audio", {"voice": "alloy"}, "does not support audio"),
    ("guided_json", {}, "does not support guided_json"),
    ("no_such_option", 1, "unrecognized parameter"),
    ("", 1, "unrecognized parameter"),
    ("ünknown\u2028", 1, "unrecognized parameter"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("param", "value", "says"), WRONG_VALUES)
def test_a_wrong_value_is_a_400_that_names_the_parameter(
    client: httpx.Client, path: str, stream: bool, param: str, value: Any, says: str
) -> None:
    """Streams too are refused with a status, not with a 200 and an event."""
    body: dict[str, Any] = {"max_tokens": 16, "stream": stream}
    body |= {"prompt": "hello"} if path == COMPLETIONS else {"messages": HELLO}
    outer, _, inner = param.partition(".")
    body |= {outer: {inner: value}} if inner else {param: value}
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]
    assert outer in error["message"]


def test_what_layby_cannot_do_with_any_value_is_not_said_of_one_value(
    client: httpx.Client,
) -> None:
    """As if another list of tools would do."""
    for param, value in (("tools", [{}]), ("suffix", "x"), ("guided_json", {})):
        answer = client.post(CHAT, json={"messages": HELLO, param: value})
        assert error_of(answer)["message"] == f"Layby does not support {param}"


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "is required"),
        ({"prompt": None}, "prompt", "is required"),
        ({"prompt": 5}, "prompt", "must be a string, a list"),
        ({"prompt": {}}, "prompt", "must be a string, a list"),
        ({"prompt": [True]}, "prompt", "prompt[0]"),
        ({"prompt": [None]}, "prompt", "prompt[0]"),
        ({"prompt": [1.0]}, "prompt", "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt", "prompt[1]"),
        ({"prompt": ["a", [1]]}, "prompt", "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt", "prompt[1]"),
        ({"prompt": [[1], [True]]}, "prompt", "prompt[1]"),
        ({"prompt": [[[1]]]}, "prompt", "prompt[0]"),
        ({"prompt": "x" * 1024, "max_tokens": 1}, "prompt", "1024"),
        ({"prompt": "x" * 1000, "max_tokens": 25}, "max_tokens", "1024"),
        ({"prompt": ["a", "x" * 2000]}, "prompt", "prompt[1]"),
        ({"prompt": "a", "logprobs": -1}, "logprobs", "between 0 and 20"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "must be an integer"),
        ({"prompt": "a", "echo": "yes"}, "echo", "must be true or false"),
        ({"prompt": "a", "best_of": 3}, "best_of", "must equal n"),
        ({"prompt": "a", "messages": HELLO}, "messages", "unrecognized"),
        ({"prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens", "unrecognized"),
        ({"prompt": [300], "echo": True}, "prompt", "258"),
    ],
)
def test_completions_refuse_what_cannot_be_a_prompt(
    client: httpx.Client, body: dict[str, Any], param: str, says: str
) -> None:
    answer = client.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert says in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "is required"),
        ({"messages": "hello"}, "messages", "must be a list"),
        ({"messages": ["hello"]}, "messages[0]", "must be a JSON object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [*HELLO, {"role": "wizard", "content": "x"}]},
            "messages[1].role",
            "'assistant'",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no role 'tool'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
            "text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content",
            "part 0",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "tool_calls",
            "does not support",
        ),
        ({"messages": [{**HELLO[0], "mood": "bad"}]}, "messages[0].mood", "unrecognized"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs", "must be true or false"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (
            {"messages": HELLO, "logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "at most 20",
        ),
        (
            {"messages": HELLO, "max_completion_tokens": 0},
            "max_completion_tokens",
            "at least 1",
        ),
        (
            {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6},
            "max_completion_tokens",
            "two names",
        ),
        (
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "may not hold messages",
        ),
        ({"messages": HELLO, "echo": True}, "echo", "unrecognized"),
        ({"messages": HELLO, "prompt": "a"}, "prompt", "unrecognized"),
        (
            {"messages": HELLO, "chat_template_kwargs": {"tools": 5}},
            "chat_template_kwargs",
            "may not hold tools",
        ),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages", "1024"),
    ],
)
def test_chat_refuses_what_cannot_be_a_conversation(
    client: httpx.Client, body: dict[str, Any], param: str, says: str
) -> None:
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
    assert says in error_of(answer)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "index"), [("", None), ([""], 0), ([], None), ([[]], 0), (["a", ""], 1)]
)
def test_case_14_empty_prompts(
    client: httpx.Client, prompt: Any, index: int | None, stream: bool
) -> None:
    """vllm#7283: an empty prompt ended the engine. Here: a 400 that names the one at fault."""
    answer = client.post(COMPLETIONS, json={"prompt": prompt, "stream": stream})
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == "prompt"
    assert "empty" in error["message"]
    assert index is None or f"prompt[{index}]" in error["message"]
    assert_healthy(client)


def test_case_14_no_messages(client: httpx.Client) -> None:
    """vllm#7283, for chats."""
    answer = client.post(CHAT, json={"messages": []})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages"
    assert_healthy(client)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99999999": 5}}, "logit_bias"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"258": 1}}, "logit_bias"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"prompt": [[99999999]]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
    ],
)
def test_case_15_ids_outside_the_vocabulary(fields: dict[str, Any], param: str) -> None:
    """vllm#16529: they ended the engine. Here: a 400, and the neighbour never notices."""

    async def run() -> None:
        async with in_process(make_engine()) as client:
            healthy = {"prompt": "hi", "temperature": 0, "max_tokens": 200}
            neighbour = asyncio.create_task(client.post(COMPLETIONS, json=healthy))
            await asyncio.sleep(0)
            bad = await client.post(COMPLETIONS, json={"prompt": "hi", **fields})
            assert bad.status_code == 400, bad.text
            assert error_of(bad)["param"] == param
            answer = await neighbour
            assert answer.json()["usage"]["completion_tokens"] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b'"text"',
        b"null",
        b"5",
        b"\xff\xfe",
        b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "min_p": -1e999}',
        b'{"prompt": "a", "logit_bias": {"5": 1e999}}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "stop": "\\udfff"}',
        b'{"prompt": "a", "cache_salt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "a"}',
        b'{"prompt": ' + b"[" * 100_000 + b"}",
        b'{"prompt": "a", "metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    ],
)
def test_a_body_that_is_not_sound_json_is_a_400(client: httpx.Client, raw: bytes) -> None:
    """Lone surrogates, NaN, endless numbers and deep nesting pass many a parser and fail later."""
    headers = {"Content-Type": "application/json"}
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        answer = client.post(path, content=raw, headers=headers)
        assert answer.status_code == 400, answer.text
        error_of(answer)
    assert_healthy(client)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a\u0000b"},
        {"prompt": "\u2028 \ufeff \U0010ffff"},
        {"prompt": "a", "cache_salt": "\u0000"},
        {"prompt": "a", "stop": "\u0000"},
        {"prompt": "a", "n": 3, "stream": True},
        {"prompt": "a", "temperature": 1},
        {"prompt": "a", "stop": None, "n": None, "logit_bias": None, "stream_options": None},
        {"prompt": "a", "user": "me", "store": True, "metadata": {"a": 1}, "service_tier": "auto"},
        {"prompt": "a", "suffix": "", "best_of": 1},
        {"prompt": "a", "stream_options": {"include_obfuscation": False}},
        {"prompt": "a", "tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"prompt": "a", "parallel_tool_calls": False, "seed": -1, "top_k": -1, "priority": -3},
    ],
)
def test_odd_but_sound_input_is_served(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.post(COMPLETIONS, json={**body, "max_tokens": 2}).status_code == 200


def test_a_body_of_another_content_type_is_a_415(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, content=b'{"prompt": "a"}')
    assert answer.status_code == 415
    assert "application/json" in error_of(answer)["message"]


def test_a_body_over_the_limit_is_a_413(client: httpx.Client) -> None:
    """Declared or not: a chunked body is cut off where it exceeds the limit."""
    headers = {"Content-Type": "application/json", "Content-Length": str(MAX_BODY_BYTES + 1)}

    async def declared() -> int:
        # No server is needed to see that the body is not even read.
        transport = httpx.ASGITransport(app=create_app(make_engine()))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as client:
            return (await client.post(CHAT, content=b"{}", headers=headers)).status_code

    assert asyncio.run(declared()) == 413
    chunks = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))
    answer = client.post(CHAT, content=chunks, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    error_of(answer)
    assert_healthy(client)


def test_unknown_paths_and_methods_have_the_same_shape(client: httpx.Client) -> None:
    assert client.get("/v2/nothing").status_code == 404
    error_of(client.get("/v2/nothing"))
    assert client.get(COMPLETIONS).status_code == 405
    error_of(client.delete("/v1/models"))
    missing = client.get("/v1/models/none/such")
    assert missing.status_code == 404
    assert error_of(missing)["code"] == "model_not_found"


def test_when_one_prompt_of_a_list_is_refused_none_runs(client: httpx.Client) -> None:
    engine = make_engine()

    async def run() -> None:
        async with in_process(engine) as client:
            answer = await client.post(
                COMPLETIONS, json={"prompt": ["a", "b", "x" * 5000, "c"], "max_tokens": 800}
            )
            assert answer.status_code == 400
            assert "prompt[2]" in error_of(answer)["message"]
            await until(lambda: is_idle(engine), "what had got in is gone")
            assert engine.stats().requests_finished == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
    ],
)
def test_tokenize_and_detokenize_refuse_nonsense(
    client: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param
