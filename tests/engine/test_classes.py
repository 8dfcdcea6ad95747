"""Classes that change, as seen from the engine: commands, counts and the log."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from layby.engine import AsyncEngine, EngineConfig
from layby.errors import InvalidRequestError
from layby.sampling_params import SamplingParams
from tests.engine.harness import Harness


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0)


def test_settings_reach_the_scheduler() -> None:
    config = EngineConfig(num_blocks=8, priority_aging=2.5, demote_after_tokens=100)
    resolved = config.resolve(context_length=64, block_bytes=1, host_bytes=10**9)
    assert (resolved.priority_aging, resolved.demote_after_tokens) == (2.5, 100)


def test_the_engine_changes_a_class_and_says_whether_it_could() -> None:
    harness = Harness(max_num_seqs=1)
    for name in ("first", "second", "third"):
        harness.engine.add_request("x", params(5), request_id=name)
    harness.engine.step()
    assert harness.engine.set_priority("third", -1)
    assert not harness.engine.set_priority("fourth", -1)
    with pytest.raises(InvalidRequestError, match=r"priority must be an integer, got 1\.5"):
        harness.engine.set_priority("third", 1.5)  # type: ignore[arg-type]
    assert list(harness.run()) == ["third", "first", "second"]
    assert not harness.engine.set_priority("third", 1)


def test_every_change_is_counted_and_in_the_debug_log(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(max_num_seqs=1, priority_aging=4.0, demote_after_tokens=3)
    harness.engine.add_request("x", params(10), request_id="long")
    harness.engine.add_request("x", params(2), request_id="patient", priority=5)
    with caplog.at_level(logging.DEBUG, logger="layby.engine"):
        for _ in range(6):
            harness.engine.step()
        harness.engine.set_priority("long", 1)
        harness.engine.step()
    assert [record.getMessage() for record in caplog.records if "class" in record.getMessage()] == [
        "request long (running): class 0 → 1, ran long",
        "request patient (waiting): class 5 → 4, waited",
        "request long (running): class 1 → 1, asked for",
    ]
    stats = harness.engine.stats()
    assert (stats.promotions, stats.demotions) == (1, 1)
    assert harness.metric("layby_promotions_total") == 1
    assert harness.metric("layby_demotions_total") == 1


def test_a_live_request_is_moved_from_the_event_loop() -> None:
    """Waiting, running or parked."""

    async def test() -> None:
        harness = Harness(max_num_seqs=1)
        harness.executor.before_step = lambda plan: time.sleep(0.001)
        async with AsyncEngine(harness.engine) as engine:
            low = await engine.submit("x", params(200), request_id="low", priority=1)
            other = await engine.submit("x", params(200), request_id="other", priority=1)
            assert await engine.set_priority("other", 0)  # waiting
            await other.__anext__()  # it has pushed the other one out
            assert engine.stats().preemptions_swap == 1
            assert await engine.set_priority("low", -1)  # parked
            assert await engine.set_priority("other", 1)  # running
            late = await engine.submit("x", params(2), request_id="late")
            end_s = [delta.time_s async for delta in low][-1]
            start_s = [delta.time_s async for delta in late][-1]
            assert end_s < start_s  # although its class was the best of those at first
            assert not await engine.set_priority("low", 0)
            with pytest.raises(InvalidRequestError):
                await engine.set_priority("other", "high")  # type: ignore[arg-type]
            _ = [delta async for delta in other]

    asyncio.run(asyncio.wait_for(test(), 20))


def test_without_a_running_engine_there_is_no_such_request() -> None:
    async def test() -> None:
        engine = AsyncEngine(Harness().engine)
        assert not await engine.set_priority("x", 0)
        await engine.start()
        assert not await engine.set_priority("x", 0)
        await engine.shutdown()
        assert not await engine.set_priority("x", 0)

    asyncio.run(asyncio.wait_for(test(), 20))
