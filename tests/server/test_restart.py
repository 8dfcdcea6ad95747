"""A restart loses nothing: kill -9 or SIGTERM in the middle, and every answer is as undisturbed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from layby.engine.journal import Journal
from tests.server.test_shutdown import ROOT, read_welcome

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@contextmanager
def process(
    state_dir: Path,
    *keys: str,
    drain_s: float = 30,
    step_s: float = 0.0,
    model: str = "toy",
    num_swap_blocks: int = 12,
    faults: str = "",
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server and its base URL."""
    command = [sys.executable, "-m", "tests.server.durable_process", str(state_dir)]
    command += [str(drain_s), str(step_s), model, str(num_swap_blocks), *keys]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "LAYBY_FAULTS": faults},
    ) as child:
        try:
            yield child, read_welcome(child)[0]
        finally:
            child.kill()


@asynccontextmanager
async def connect(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        yield client


def call(number: int) -> tuple[str, dict[str, Any]]:
    """One of twenty kinds of request: path and body, the seed given."""
    body: dict[str, Any] = {"seed": number, "max_tokens": 30 + number, "stream": True}
    if number % 4 == 0:
        return CHAT, {**body, "messages": [{"role": "user", "content": "x" * number}],
                      "logprobs": True, "top_logprobs": 1}  # fmt: skip
    if number % 4 == 1:
        return COMPLETIONS, {**body, "prompt": "x" * (number + 1), "n": 2, "stop": ["qj", "zz"]}
    if number % 4 == 2:
        return COMPLETIONS, {**body, "prompt": ["yy", "z" * number], "echo": True, "logprobs": 2}
    return COMPLETIONS, {**body, "prompt": [number] * 40, "temperature": 0, "priority": number % 3}


class Reader:
    """Reads one stream until it ends or breaks; what came, and the id of its last event."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.last_id: dict[int, int] = {}
        self.is_done = False
        self.error: dict[str, Any] | None = None

    async def read(self, client: httpx.AsyncClient, method: str, path: str, **options: Any) -> None:
        number = 0
        try:
            async with client.stream(method, path, **options) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        number = int(line[4:])
                    elif line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        self._take(json.loads(line[6:]), number)
        except httpx.TransportError:
            return

    def _take(self, event: dict[str, Any], number: int) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            self.text[index] = self.text.get(index, "") + text
            self.last_id[index] = number

    @property
    def num_tokens(self) -> int:
        return sum(self.last_id.values())


def texts(response: dict[str, Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in response["choices"]
    }


def without_times(response: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in response.items() if key != "created"}


async def finished(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    """The whole answer, once it is there."""
    for _ in range(2000):
        answer = await client.get(f"/v1/requests/{name}")
        assert answer.status_code == 200, answer.text
        if answer.json()["status"] not in ("queued", "in_progress"):
            assert answer.json()["status"] == "completed", answer.text
            response: dict[str, Any] = answer.json()["response"]
            return response
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} does not finish")


async def start_all(client: httpx.AsyncClient, readers: list[Reader]) -> list[asyncio.Task[None]]:
    tasks = []
    for number, reader in enumerate(readers):
        path, body = call(number)
        options = {"json": body, "headers": {"X-Request-Id": f"job-{number}"}}
        tasks.append(asyncio.create_task(reader.read(client, "POST", path, **options)))
    return tasks


async def until_under_way(readers: list[Reader]) -> None:
    for _ in range(2000):
        if sum(reader.is_done for reader in readers) >= 3:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the requests make no progress")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The twenty answers of a server that nobody stops."""

    async def run(url: str) -> list[dict[str, Any]]:
        async with connect(url) as client:
            readers = [Reader() for _ in range(20)]
            await asyncio.gather(*await start_all(client, readers))
            answers = [await finished(client, f"job-{number}") for number in range(20)]
            for reader, answer in zip(readers, answers, strict=True):
                assert reader.is_done
                assert reader.text == texts(answer)
            return answers

    with process(tmp_path_factory.mktemp("undisturbed")) as (_, url):
        return asyncio.run(run(url))


def check_answers(answers: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    for answer, other in zip(answers, wanted, strict=True):
        assert without_times(answer) == without_times(other)


async def come_back(url: str, readers: list[Reader]) -> list[dict[str, Any]]:
    """Read on where each stream broke off, then fetch everything whole."""
    async with connect(url) as client:
        for number, reader in enumerate(readers):
            if not reader.is_done and len(reader.last_id) == 1:
                rest = Reader()
                path = f"/v1/requests/job-{number}?stream=true&starting_after={reader.last_id[0]}"
                await rest.read(client, "GET", path)
                assert rest.is_done
                reader.text[0] += rest.text.get(0, "")
                reader.is_done = True
        answers = [await finished(client, f"job-{number}") for number in range(20)]
        for reader, answer in zip(readers, answers, strict=True):
            for index, text in texts(answer).items():
                seen = reader.text.get(index, "")
                assert seen == text if reader.is_done else text.startswith(seen)
        return answers


def test_after_kill_9_every_answer_is_that_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    readers = [Reader() for _ in range(20)]

    async def run(url: str, child: subprocess.Popen[str]) -> None:
        async with connect(url) as client:
            tasks = await start_all(client, readers)
            await until_under_way(readers)
            child.kill()
            await asyncio.gather(*tasks)
            assert sum(reader.is_done for reader in readers) < 20

    with process(tmp_path, step_s=0.01) as (child, url):
        asyncio.run(run(url, child))
        assert child.wait(10) == -signal.SIGKILL
    with process(tmp_path) as (_, url):
        check_answers(asyncio.run(come_back(url, readers)), undisturbed)


def test_what_is_left_at_the_drain_limit_goes_on_from_its_tokens(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Said to the clients, written down token by token, and nothing is generated twice."""
    readers = [Reader() for _ in range(20)]

    async def stop(url: str, child: subprocess.Popen[str]) -> None:
        async with connect(url) as client:
            tasks = await start_all(client, readers)
            await until_under_way(readers)
            child.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
            unfinished = [reader for reader in readers if not reader.is_done]
            assert unfinished
            assert all(r.error is not None and r.error["code"] == "draining" for r in unfinished)

    async def go_on(url: str, num_saved: int) -> list[dict[str, Any]]:
        answers = await come_back(url, readers)
        async with connect(url) as client:
            text = (await client.get("/metrics")).text
            [generated] = re.findall(
                r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE
            )
            left = [a for a, r in zip(answers, before, strict=True) if not r]
            total = sum(answer["usage"]["completion_tokens"] for answer in left)
            assert int(float(generated)) == total - num_saved
        return answers

    with process(tmp_path, step_s=0.01, drain_s=0.2) as (child, url):
        asyncio.run(stop(url, child))
        assert child.wait(10) == 0
        assert child.stderr is not None
        log = child.stderr.read()
        assert re.search(r"stopping: \d+ accepted requests left", log), log
    before = [reader.is_done for reader in readers]
    num_left = before.count(False)
    assert f"saved {num_left} unfinished requests for the next start" in log
    assert re.search(rf"stopped: \d+ requests finished, {num_left} kept .*, 0 aborted", log), log
    journal = Journal(tmp_path)
    saved = journal.unfinished()
    journal.close()
    assert len(saved) == num_left
    num_saved = sum(len(s.token_ids) for c in saved for r in c.requests for s in r.samples)
    assert num_saved >= sum(reader.num_tokens for reader in readers if not reader.is_done) > 0
    with process(tmp_path) as (_, url):
        check_answers(asyncio.run(go_on(url, num_saved)), undisturbed)


# --- the KV cache of what was cut off ---


async def cut_off(url: str, child: subprocess.Popen[str], readers: list[Reader]) -> None:
    async with connect(url) as client:
        tasks = await start_all(client, readers)
        await until_under_way(readers)
        child.send_signal(signal.SIGTERM)
        await asyncio.gather(*tasks)


def stop_in_the_middle(state_dir: Path, readers: list[Reader], faults: str = "") -> str:
    """A server is ended by SIGTERM with work left; returns its log."""
    with process(state_dir, step_s=0.01, drain_s=0.2, num_swap_blocks=200, faults=faults) as (
        child,
        url,
    ):
        asyncio.run(cut_off(url, child, readers))
        assert child.wait(10) == 0
        assert child.stderr is not None
        return child.stderr.read()


async def metric(url: str, name: str) -> int:
    async with connect(url) as client:
        text = (await client.get("/metrics")).text
        values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(int(float(value)) for value in values)


def test_what_was_cut_off_comes_back_with_its_kv(
    tmp_path: Path, undisturbed: list[dict[str, Any]]
) -> None:
    """Nothing that was saved is computed again, and the file is gone once it was used."""
    readers = [Reader() for _ in range(20)]
    log = stop_in_the_middle(tmp_path, readers)
    assert re.search(r"saved the KV cache of [1-9]\d* requests", log), log
    kv_file = tmp_path / "kv-cache"
    assert kv_file.stat().st_mode & 0o777 == 0o600
    with process(tmp_path, num_swap_blocks=200) as (_, url):
        assert not kv_file.exists()
        check_answers(asyncio.run(come_back(url, readers)), undisturbed)
        assert asyncio.run(metric(url, "layby_recomputed_tokens_total")) == 0
        assert asyncio.run(metric(url, "layby_swap_moved_blocks_total")) > 0
