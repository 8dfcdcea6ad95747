"""How a server process begins and ends: the port first, a welcome, and an orderly way out."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from layby.engine import AsyncEngine
from layby.errors import ConfigError
from layby.server import serve_engine

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x" * 31, "temperature": 0, "max_tokens": 180}
ROOT = Path(__file__).parents[2]


@contextmanager
def process(drain_s: float, step_s: float, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.server.toy_process", str(drain_s), str(step_s), *more]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def read_welcome(child: subprocess.Popen[str]) -> tuple[str, str]:
    """The base URL, and everything printed up to the end of the example."""
    output: IO[str] | None = child.stdout
    assert output is not None
    text = ""
    for _ in range(50):
        line = output.readline()
        assert line, child.communicate()[1]
        text += line
        if "  -d " in line:
            break
    url = text.partition("Documentation: ")[2].partition("/docs")[0]
    assert url.startswith("http://127.0.0.1:")
    return url, text


async def scrape(client: httpx.AsyncClient) -> dict[str, int]:
    """How many requests are in each queue, all from one scrape."""
    text = (await client.get("/metrics")).text
    found = re.findall(r"^vllm:num_requests_(\w+)\{.*\} (\S+)$", text, re.MULTILINE)
    return {name: int(float(value)) for name, value in found}


async def until_queues_hold(client: httpx.AsyncClient, **wanted: int) -> None:
    for _ in range(2000):
        seen = await scrape(client)
        if wanted.items() <= seen.items():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"wanted {wanted}, last seen {seen}")


async def until_tokens_are(client: httpx.AsyncClient, wanted: int) -> None:
    for _ in range(500):
        text = (await client.get("/metrics")).text
        found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        if found is not None and float(found[1]) >= wanted:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"fewer than {wanted} tokens")


async def until_draining(client: httpx.AsyncClient) -> None:
    for _ in range(500):
        if (await client.get("/health")).status_code == 503:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the server does not drain")


def test_case_18_sigterm_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    """vllm#24885: accepted requests were dropped. Two run, two wait, one is parked; one is new."""

    async def run(url: str, child: subprocess.Popen[str]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            calls = [
                asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "stream": i == 1}))
                for i in range(5)
            ]
            await until_queues_hold(client, running=2, waiting=2, swapped=1)
            child.send_signal(signal.SIGTERM)
            await until_draining(client)
            refused = await client.post(COMPLETIONS, json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            answers = await asyncio.gather(*calls)
            assert all(answer.status_code == 200 for answer in answers)
            assert answers[1].text.endswith("data: [DONE]\n\n")
            for answer in (answers[0], *answers[2:]):
                assert answer.json()["usage"]["completion_tokens"] == 180

    with process(30, 0.005) as child:
        url, _ = read_welcome(child)
        asyncio.run(run(url, child))
        assert child.wait(10) == 0


def test_case_18_past_the_drain_limit_every_request_gets_an_explicit_end() -> None:
    async def run(url: str, child: subprocess.Popen[str]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            calls = [
                asyncio.create_task(client.post(COMPLETIONS, json={**BODY, "stream": i % 2 == 0}))
                for i in range(5)
            ]
            await until_queues_hold(client, running=3, waiting=2)
            child.send_signal(signal.SIGTERM)
            answers = await asyncio.gather(*calls)
            for number, answer in enumerate(answers):
                if number % 2 == 0:
                    *_, last = [line for line in answer.text.split("\n\n") if line]
                    error = json.loads(last.removeprefix("data: "))["error"]
                else:
                    assert answer.status_code == 503
                    error = answer.json()["error"]
                assert error["code"] == "draining"

    with process(0.3, 0.03) as child:
        url, _ = read_welcome(child)
        asyncio.run(run(url, child))
        assert child.wait(10) == 0


def test_a_second_signal_exits_at_once_with_the_recording_complete(tmp_path: Path) -> None:
    """The last second of it was lost, which is the one that somebody will want to see."""

    async def run(url: str, child: subprocess.Popen[str]) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            call = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
            await until_queues_hold(client, running=1)
            child.send_signal(signal.SIGINT)
            await until_draining(client)
            await until_tokens_are(client, 10)
            child.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                await call

    with process(60, 0.05, str(tmp_path / "r")) as child:
        url, _ = read_welcome(child)
        asyncio.run(asyncio.wait_for(run(url, child), 20))
        assert child.wait(5) == 128 + signal.SIGTERM
    last = [json.loads(line) for line in (tmp_path / "r").read_text().splitlines()][-1]
    assert last["e"] == "run"
    # Its last step, decided or done, was among those counted a moment before.
    assert last["k"] + len(last["t"]) // 2 >= 10


def test_a_signal_while_the_model_loads_ends_the_process() -> None:
    with process(30, -1) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(5) == 0


def test_the_welcome_holds_a_command_that_works() -> None:
    with process(30, 0) as child:
        url, text = read_welcome(child)
        assert f"{url}/docs" in text
        command = shlex.split(text[text.index("curl ") :])
        assert command[0] == "curl"
        header, _, value = command[command.index("-H") + 1].partition(": ")
        content = command[command.index("-d") + 1]
        answer = httpx.post(command[1], headers={header: value}, content=content)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["message"]["content"]
        child.send_signal(signal.SIGINT)
        assert child.wait(10) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"admin_api_key": ""}, "non-empty ASCII"),
        ({"admin_api_key": "schlüssel"}, "non-empty ASCII"),
        ({"api_key": ["a", " "]}, "non-empty ASCII"),
        ({"api_key": "a", "admin_api_key": "a"}, "must differ"),
        ({"isolate_prefix_cache": True}, "key"),
        ({"drain_timeout_s": math.inf}, "drain_timeout must be from 0 to 1e[+]09 seconds, got inf"),
        ({"drain_timeout_s": math.nan}, "drain_timeout .* got nan"),
        ({"drain_timeout_s": 1e10}, "drain_timeout .* got 1e[+]10"),
        ({"drain_timeout_s": -1.0}, "drain_timeout .* got -1"),
        ({"keep_results_s": math.inf, "state_dir": "nowhere"}, "keep_results .* got inf"),
        ({"keep_results_s": 60.0}, "keep_results is 60 s, but without a state_dir"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_said_before_the_model_loads(
    options: dict[str, Any], message: str
) -> None:
    """Half a minute of loading, and then an error; an endless drain broke the end of the server."""

    def build() -> AsyncEngine:
        raise AssertionError("the model was loaded")

    with pytest.raises(ConfigError, match=message):
        serve_engine(build, host="127.0.0.1", port=0, **options)


@pytest.mark.parametrize("address", [("127.0.0.1", None), ("127.0.0.1", 70000), ("no.invalid", 0)])
def test_an_address_that_cannot_be_had_is_said_before_the_model_loads(
    address: tuple[str, int | None],
) -> None:
    def build() -> AsyncEngine:
        raise AssertionError("the model was loaded")

    host, port = address
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if port is None:
            port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen on") as caught:
            serve_engine(build, host=host, port=port)
    assert "\n" not in str(caught.value)
