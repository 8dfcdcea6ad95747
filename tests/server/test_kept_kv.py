"""The KV cache of what a shutdown cuts off comes back, or is computed again; it is never wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from layby.engine import AsyncEngine
from layby.engine.journal import Journal
from layby.engine.metrics import EngineStats
from layby.errors import ConfigError
from layby.execution.faults import Faults
from layby.server import serve_engine
from layby.server.durable import DurableRequests
from tests.server.harness import AlphabetExecutor, in_process, make_engine, until

COMPLETIONS = "/v1/completions"
BODIES: list[dict[str, Any]] = [
    {"prompt": "x" * 40, "max_tokens": 60, "seed": 1},
    {"prompt": "y" * 20, "max_tokens": 50, "seed": 2, "n": 3},
    {"prompt": ["z" * 33, "z" * 33], "max_tokens": 40, "seed": 3, "logprobs": 2},
    {"prompt": "x" * 40, "max_tokens": 60, "temperature": 0, "priority": -1},
]


def slow(**options: Any) -> AsyncEngine:
    return make_engine(AlphabetExecutor(step_s=0.01), **options)


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


async def undisturbed() -> list[list[str]]:
    async with in_process(make_engine()) as client:
        answers = [await client.post(COMPLETIONS, json=body) for body in BODIES]
        return [texts(answer.json()) for answer in answers]


async def cut_off(state_dir: Path, faults: str = "", **options: Any) -> None:
    """An orderly end while all are under way."""
    engine = slow(**options)
    journal = Journal(state_dir)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal, Faults.parse(faults))
    async with in_process(engine, durable=requests) as client:
        calls = [
            client.post(COMPLETIONS, json=body, headers={"X-Request-Id": f"job-{number}"})
            for number, body in enumerate(BODIES)
        ]
        tasks = [asyncio.create_task(call) for call in calls]
        await until(lambda: engine.stats().generation_tokens > 40, "all run")
        await engine.shutdown(0.0, save=requests.save_kv)
        answers = [await task for task in tasks]
    assert [answer.status_code for answer in answers] == [503] * len(BODIES)
    assert await requests.close() == len(BODIES)


async def go_on(
    state_dir: Path, faults: str = "", *, is_removed: bool = True, **options: Any
) -> EngineStats:
    """The next process finishes all of them, with the texts of a run that nobody disturbed."""
    engine = make_engine(**options)
    journal = Journal(state_dir)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal, Faults.parse(faults))
    async with in_process(engine, durable=requests) as client:
        assert await requests.recover() == len(BODIES)
        assert not (is_removed and journal.kv_path.exists())
        for number, wanted in enumerate(await undisturbed()):
            assert texts(await finished(client, f"job-{number}")) == wanted
    await requests.close()
    return engine.stats()


async def finished(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    stream = await client.get(f"/v1/requests/{name}?stream=true")
    assert stream.text.endswith("data: [DONE]\n\n")
    response: dict[str, Any] = (await client.get(f"/v1/requests/{name}")).json()["response"]
    return response


def resumed_line(caplog: pytest.LogCaptureFixture) -> str:
    [line] = [r.message for r in caplog.records if r.message.startswith("resumed ")]
    return line


def test_nothing_that_was_saved_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(cut_off(tmp_path))
    [saved] = re.findall(r"saved the KV cache of (\d+ requests \(\d+ blocks)", caplog.text)
    assert (tmp_path / "kv-cache").stat().st_mode & 0o777 == 0o600
    stats = asyncio.run(go_on(tmp_path))
    assert stats.recomputed_tokens == 0
    assert stats.swapped_in_blocks > 0
    assert f"; the KV cache of {saved}) came back parked" in resumed_line(caplog)


def test_a_start_without_the_saved_kv_says_that_none_came_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asyncio.run(cut_off(tmp_path))
    asyncio.run(go_on(tmp_path, "state.read=eio:1"))
    assert "; the KV cache of 0 requests (0 blocks) came back parked" in resumed_line(caplog)


def test_what_smaller_settings_cannot_serve_costs_one_line_however_much_kv_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its KV is dropped, its tokens are not: larger settings finish it as if undisturbed."""

    async def start_too_small() -> None:
        engine = make_engine(num_blocks=4)
        journal = Journal(tmp_path)
        journal.claim(engine.identity)
        requests = DurableRequests(engine, journal)
        async with in_process(engine, durable=requests):
            assert await requests.recover() == 0
        assert await requests.close() == len(BODIES)

    asyncio.run(cut_off(tmp_path))
    asyncio.run(start_too_small())
    [warning] = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert warning.startswith(f"{len(BODIES)} requests of an earlier run cannot be served")
    assert asyncio.run(go_on(tmp_path)).recomputed_tokens > 0


def test_what_has_no_room_in_ram_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The room goes to the last one, which is in a more urgent class than the four before it."""
    caplog.set_level(logging.INFO)
    asyncio.run(cut_off(tmp_path))
    stats = asyncio.run(go_on(tmp_path, num_swap_blocks=4))
    assert stats.recomputed_tokens > 0
    assert 0 < stats.swapped_in_blocks <= 4
    no_room = re.findall(r"there is no room for the saved KV cache of request (\S+)", caplog.text)
    assert no_room == ["job-0", "job-1", "job-2", "job-2"]  # the last has two prompts


@pytest.mark.parametrize(
    ("at_the_end", "at_the_start"),
    [
        ("state.write=enospc:1", ""),
        ("state.write=eio:0.5,seed=3", ""),
        ("state.write=short:0.5,seed=1", ""),
        ("", "state.read=eio:1"),
        ("", "state.read=short:0.5,seed=2"),
        ("", "state.read=corrupt:0.6,seed=4"),
    ],
)
def test_a_fault_costs_a_recompute_and_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at_the_end: str, at_the_start: str
) -> None:
    asyncio.run(cut_off(tmp_path, at_the_end))
    stats = asyncio.run(go_on(tmp_path, at_the_start))
    assert stats.recomputed_tokens > 0
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings
    assert all("will be computed again" in record.message for record in warnings)
    assert (stats.swap_faults > 0) == bool(at_the_start)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: bytes(2000) + data[2000:],
        lambda data: data[:-20] + bytes(20),
        lambda data: data + bytes(10),
    ],
)
def test_a_damaged_file_is_found_out(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    asyncio.run(cut_off(tmp_path))
    file = tmp_path / "kv-cache"
    file.write_bytes(damage(file.read_bytes()))
    stats = asyncio.run(go_on(tmp_path))
    assert stats.recomputed_tokens > 0
    assert stats.swap_faults > 0


def test_a_file_that_was_not_completed_is_not_there(tmp_path: Path) -> None:
    """The process was killed while it saved: the tokens are written down before."""
    asyncio.run(cut_off(tmp_path))
    os.replace(tmp_path / "kv-cache", tmp_path / "kv-cache.new")
    stats = asyncio.run(go_on(tmp_path))
    assert stats.recomputed_tokens > 0
    assert not (tmp_path / "kv-cache.new").exists()


def test_the_file_of_an_earlier_end_is_no_harm(tmp_path: Path) -> None:
    """It turns up again beside a later state of the journal, as after a restored backup."""
    asyncio.run(cut_off(tmp_path))
    old = (tmp_path / "kv-cache").read_bytes()
    asyncio.run(cut_off_again(tmp_path))
    (tmp_path / "kv-cache").write_bytes(old)
    stats = asyncio.run(go_on(tmp_path))
    assert stats.recomputed_tokens > 0
    assert stats.swapped_in_blocks == 0


async def cut_off_again(state_dir: Path) -> None:
    engine = slow()
    journal = Journal(state_dir)
    journal.claim(engine.identity)
    requests = DurableRequests(engine, journal)
    async with engine:
        await requests.recover()
        await until(lambda: engine.stats().generation_tokens > 16, "all got tokens")
        await engine.shutdown(0.0, save=requests.save_kv)
    await requests.close()


def test_after_two_ends_in_a_row_nothing_is_computed_again(tmp_path: Path) -> None:
    asyncio.run(cut_off(tmp_path))
    asyncio.run(cut_off_again(tmp_path))
    assert asyncio.run(go_on(tmp_path)).recomputed_tokens == 0


def test_another_models_kv_is_left_alone(tmp_path: Path) -> None:
    asyncio.run(cut_off(tmp_path))
    before = (tmp_path / "kv-cache").read_bytes()
    other = make_engine(identity={"model": "other"})
    with pytest.raises(ConfigError, match="model toy, here other"):
        serve_engine(lambda: other, host="127.0.0.1", port=0, state_dir=tmp_path)
    assert (tmp_path / "kv-cache").read_bytes() == before


def test_an_engine_that_is_asked_to_stop_at_the_start_keeps_the_file(tmp_path: Path) -> None:
    async def stop_at_once() -> None:
        engine = make_engine()
        journal = Journal(tmp_path)
        journal.claim(engine.identity)
        requests = DurableRequests(engine, journal)
        async with engine:
            engine.begin_drain()
            assert await requests.recover() == 0
            await engine.shutdown(0.0, save=requests.save_kv)
        await requests.close()

    asyncio.run(cut_off(tmp_path))
    asyncio.run(stop_at_once())
    assert asyncio.run(go_on(tmp_path)).recomputed_tokens == 0


@pytest.mark.parametrize("name", ["kv-cache", "kv-cache.new"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_in_its_place_costs_a_recompute_and_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, make: Callable[[Path], None]
) -> None:
    asyncio.run(cut_off(tmp_path))
    (tmp_path / "kv-cache").unlink()
    make(tmp_path / name)
    stats = asyncio.run(go_on(tmp_path, is_removed=False))
    assert stats.recomputed_tokens > 0
    can_be_removed = make is os.mkfifo
    assert (tmp_path / name).exists() is not can_be_removed
    if not (can_be_removed and name == "kv-cache.new"):  # that is removed without being looked at
        warnings = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert any(str(tmp_path / name) in message for message in warnings)


def test_where_nothing_can_be_saved_an_orderly_end_is_one_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.joinpath("kv-cache.new").mkdir()
    asyncio.run(cut_off(tmp_path))
    assert any("could not be saved" in record.message for record in caplog.records)
    assert asyncio.run(go_on(tmp_path, is_removed=False)).recomputed_tokens > 0


def test_a_pipe_left_where_the_file_is_written_is_no_hindrance(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kv-cache.new")
    asyncio.run(cut_off(tmp_path))
    assert asyncio.run(go_on(tmp_path)).recomputed_tokens == 0
