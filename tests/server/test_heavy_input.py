"""Heavy input: a body costs what it could be good for, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from typing import Any

import httpx
import pytest

from layby.engine.toy import ByteTokenizer
from layby.server.protocol import MAX_MESSAGES, MAX_PROMPTS
from tests.server.harness import in_process, live_server, make_engine
from tests.server.test_shutdown import process, read_welcome

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
AS_JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


class GatedTokenizer(ByteTokenizer):
    """Texts of more than 2,000 characters wait at a gate; longer than 4,096 must never come."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.arrived = threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) <= 4096, "a text was encoded that no context could hold"
        if len(text) > 2000:
            self.arrived.set()
            assert self.gate.wait(20)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "x" * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "x" * 5000]}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 5000, "echo": True, "logprobs": 1}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
        ("/tokenize", {"prompt": "x" * 2_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ],
)
def test_a_text_that_no_context_could_hold_is_refused_unread(
    path: str, body: dict[str, Any], param: str
) -> None:
    """1,024 tokens of at most 4 bytes: both numbers are in the message."""

    async def run() -> None:
        async with in_process(make_engine(tokenizer=GatedTokenizer())) as client:
            error = (await client.post(path, json=body)).json()["error"]
            assert error["param"] == param
            assert "4096" in error["message"]
            longest = body.get("prompt") or body["messages"][0]["content"]
            assert str(len(longest if isinstance(longest, str) else longest[1])) in error["message"]

    asyncio.run(run())


def test_short_calls_are_served_while_long_texts_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One lock around the tokenizer kept everybody waiting for the longest prompt."""
    monkeypatch.setattr("layby.engine.async_engine.LONG_WORK", 2000)
    tokenizer = GatedTokenizer()

    async def run() -> None:
        async with in_process(make_engine(tokenizer=tokenizer, max_model_len=4096)) as client:
            long = {"prompt": "x" * 3000, "max_tokens": 3, "temperature": 0}
            calls = [asyncio.create_task(client.post(COMPLETIONS, json=long)) for _ in range(8)]
            assert await asyncio.to_thread(tokenizer.arrived.wait, 10)
            for path, body in (
                (COMPLETIONS, {"prompt": "hi", "max_tokens": 2}),
                (CHAT, {"messages": HELLO, "max_tokens": 2}),
                ("/tokenize", {"prompt": "hi"}),
            ):
                answer = await asyncio.wait_for(client.post(path, json=body), 10)
                assert answer.status_code == 200
            tokenizer.gate.set()
            answers = await asyncio.gather(*calls)
            assert [answer.json()["choices"][0]["text"] for answer in answers] == ["abc"] * 8

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        (CHAT, {"messages": [1] * 500_000}, "messages", f"at most {MAX_MESSAGES}"),
        (CHAT, {"messages": [1] * MAX_MESSAGES}, "messages[0]", "JSON object"),
        ("/tokenize", {"messages": [1] * 500_000}, "messages", f"at most {MAX_MESSAGES}"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [1] * 500_000}]},
            "messages[0].content",
            "500000 parts",
        ),
        (COMPLETIONS, {"prompt": ["a"] * 400_000}, "prompt", f"at most {MAX_PROMPTS}"),
        (COMPLETIONS, {"prompt": [1] * 500_000 + ["a"]}, "prompt", "has 500001 tokens"),
        (COMPLETIONS, {"prompt": [[1], [1] * 500_000]}, "prompt", "prompt[1] has 500000"),
        ("/detokenize", {"tokens": [1] * 500_000}, "tokens", "at most 4096"),
        (
            COMPLETIONS,
            {**{f"no{i}": 1 for i in range(100_000)}, "prompt": "a"},
            "no0",
            "unrecognized",
        ),
        (CHAT, {"messages": [{f"no{i}": 1 for i in range(100_000)}]}, None, ""),
        (CHAT, {"messages": HELLO, "n": [1] * 500_000}, "n", "must be an integer, got [1, 1"),
    ],
)
def test_a_list_is_refused_by_its_length_or_at_its_first_fault(
    path: str, body: dict[str, Any], param: str | None, says: str
) -> None:
    """2 MB of faulty messages took 15 s to refuse, for each of them was reported."""

    async def run() -> None:
        async with in_process(make_engine()) as client:
            request = client.build_request("POST", path, json=body)
            begin = time.process_time()
            answer = await client.send(request)
            assert answer.status_code == 400
            assert time.process_time() - begin < 3
            error = answer.json()["error"]
            assert param is None or error["param"] == param
            assert says in error["message"]

    asyncio.run(run())


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a"', '{"a":1}', '"\\",[\\\\"', "[[[1]]]"])
def test_a_body_of_millions_of_values_is_refused_before_it_is_read(value: str) -> None:
    """Nobody else is served while it is: 16 MiB of empty lists took four seconds."""

    async def run() -> None:
        async with in_process(make_engine()) as client:
            many = "[" + ",".join([value] * (2**20 + 1)) + "]"
            begin = time.process_time()
            answer = await client.post(COMPLETIONS, content=many, headers=AS_JSON)
            assert time.process_time() - begin < 1
            assert answer.status_code == 413
            assert "too many values" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_a_text_is_no_list_of_values_whatever_is_written_in_it() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            text = ',[{:"\\' * 2**18
            answer = await client.post(COMPLETIONS, json={"prompt": ["a", text]})
            assert f"prompt has {len(text)} characters" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_names_and_messages_in_errors_are_cut() -> None:
    async def run() -> None:
        async with in_process(make_engine()) as client:
            for answer in (
                await client.post(COMPLETIONS, json={"x" * 1_000_000: 1}),
                await client.post(CHAT, json={"messages": [{"y" * 1_000_000: 1}]}),
                await client.post(COMPLETIONS, json={"prompt": "a", "model": "m" * 1_000_000}),
                await client.get("/" + "z" * 10_000),
            ):
                assert answer.status_code in (400, 404)
                assert len(answer.text) < 1000

    asyncio.run(run())


def test_a_long_list_of_prompts_costs_no_task_for_each() -> None:
    """20,000 prompts took 21 s; here 2,000 are prepared off the event loop and queued at once."""

    async def run() -> None:
        engine = make_engine()
        async with in_process(engine) as client:
            body = {"prompt": ["a"] * 2000, "max_tokens": 1, "temperature": 0}
            call = asyncio.create_task(client.post(COMPLETIONS, json=body))
            most_tasks = 0
            while engine.stats().requests_accepted < 2000:
                await asyncio.sleep(0)
                if engine.stats().requests_accepted == 0:
                    most_tasks = max(most_tasks, len(asyncio.all_tasks()))
            assert most_tasks < 20
            assert len((await call).json()["choices"]) == 2000

    asyncio.run(run())


def connected(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(20)
    return connection


@pytest.mark.parametrize("piece", [b"x", b"x-a: b\r\n"])
@pytest.mark.parametrize("begin", [b"GET /", b"GET /health HTTP/1.1\r\nHost: a\r\nX-B: "])
def test_headers_without_an_end_are_refused_before_they_hold_anybody_up(
    begin: bytes, piece: bytes
) -> None:
    """The time that 50 MB of them took grew with their square, and needed no key."""
    if begin == b"GET /" and b"\r" in piece:
        begin += b" HTTP/1.1\r\n"
    endless = piece * (65536 // len(piece))
    with live_server(make_engine()) as url, connected(url) as connection:
        connection.sendall(begin)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 50 * 2**20:
                connection.sendall(endless)
                sent += len(endless)
        assert sent < 20 * 2**20  # what the system holds, and no more
        with contextlib.suppress(ConnectionResetError):  # it may come before the answer is read
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert httpx.get(f"{url}/health").status_code == 200


def test_headers_of_a_tolerable_length_are_read_in_whatever_pieces_they_come() -> None:
    with live_server(make_engine()) as url, connected(url) as connection:
        for _ in range(3):  # on one connection
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-A: ")
            for _ in range(5):
                time.sleep(0.01)
                connection.sendall(b"x" * 10_000)
            connection.sendall(b"\r\n\r\n")
            answer = b""
            while b'"pressure"' not in answer:
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def half_a_body(url: str) -> socket.socket:
    connection = connected(url)
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: toy\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"prompt": "a'
    )
    return connection


def test_half_sent_bodies_neither_delay_the_end_nor_leave_tracebacks() -> None:
    with process(30, 0) as child:
        url, _ = read_welcome(child)
        half_a_body(url).close()
        with half_a_body(url) as connection:
            assert httpx.get(url + "/health").status_code == 200
            time.sleep(0.2)
            begin = time.monotonic()
            child.send_signal(signal.SIGTERM)
            connection.settimeout(10)
            assert b" 503 " in connection.recv(4096)
            assert child.wait(10) == 0
            assert time.monotonic() - begin < 4
        assert child.stderr is not None
        assert "Traceback" not in child.stderr.read()


def test_head_is_get_without_a_body() -> None:
    with live_server(make_engine()) as url:
        for path in ("/health", "/metrics", "/v1/models", "/docs"):
            answer = httpx.head(url + path)
            assert answer.status_code == 200
            assert answer.content == b""
        assert httpx.head(url + COMPLETIONS).status_code == 405
