"""The pool's size as the engine offers it: at once when idle, in a step when busy."""

from __future__ import annotations

import asyncio
import logging

import pytest

from layby.engine import RequestOutput
from layby.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    RequestTooLargeError,
)
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import StepPlan
from tests.engine.harness import Harness, collect
from tests.engine.test_async_engine import read, run, slowly, started, until


def letters(count: int) -> str:
    return "".join(chr(ord("a") + i % 26) for i in range(count))


def test_an_idle_engine_changes_its_pool_at_once() -> None:
    harness = Harness()
    size = harness.engine.resize_kv_pool(10)
    assert (size.target_blocks, size.num_blocks, size.num_free_blocks) == (10, 10, 10)
    assert size.note is None
    assert harness.executor.plans[-1].num_blocks == 10
    assert not harness.engine.has_unfinished
    assert harness.engine.stats().num_blocks == 10
    assert harness.metric("layby_kv_blocks_total") == 10


def test_a_busy_engine_changes_it_in_the_next_step_and_loses_nothing() -> None:
    harness = Harness(num_blocks=64, block_size=4)
    for number in range(5):
        harness.engine.add_request("x" * 8, SamplingParams(max_tokens=12), request_id=str(number))
    texts: dict[str, RequestOutput] = {}
    for _ in range(3):
        for delta in harness.engine.step():
            collect(texts, delta)
    harness.engine.resize_kv_pool(5)
    assert harness.engine.stats().num_blocks > 5
    for delta in harness.engine.step():
        collect(texts, delta)
    assert harness.engine.stats().num_blocks == 5
    assert harness.engine.stats().swapped == 4
    harness.engine.resize_kv_pool(100)
    while harness.engine.has_unfinished:
        for delta in harness.engine.step():
            collect(texts, delta)
    assert [text.outputs[0].text for text in texts.values()] == [letters(12)] * 5
    assert harness.engine.stats().recomputed_tokens == 0
    assert harness.engine.stats().num_blocks == 100


def test_a_target_that_must_wait_says_so_and_is_reached_after_the_last_request() -> None:
    """The engine is not idle before the memory is given back."""
    harness = Harness(num_blocks=64, block_size=4)
    harness.engine.add_request("x" * 8, SamplingParams(max_tokens=12))
    harness.engine.step()
    harness.engine.resize_kv_pool(2)
    harness.engine.step()
    size = harness.engine.kv_pool_size()
    assert (size.target_blocks, size.num_blocks) == (2, 5)
    assert size.note is not None
    assert "5 blocks are kept" in size.note
    with pytest.raises(RequestTooLargeError, match="the pool has 2"):
        harness.engine.add_request("x" * 8, SamplingParams(max_tokens=12))
    harness.run()
    assert harness.engine.kv_pool_size().num_blocks == 2
    assert harness.executor.plans[-1].num_blocks == 2


def test_the_log_says_what_the_next_step_reached_and_when_the_rest_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As the caller is answered; before the step, the size was that of before."""
    harness = Harness(num_blocks=64, block_size=4)
    with caplog.at_level(logging.INFO, logger="layby.engine"):
        harness.engine.resize_kv_pool(60)  # idle
        harness.engine.add_request("x" * 8, SamplingParams(max_tokens=12))
        harness.engine.step()
        for size in (20, 2):
            harness.engine.resize_kv_pool(size)
            harness.engine.step()
        harness.run()
        harness.engine.resize_kv_pool(2)
    told = [each.getMessage() for each in caplog.records if "KV pool" in each.getMessage()]
    assert told == [
        "the KV pool has 60 blocks now",
        "the KV pool has 20 blocks now",
        "the KV pool is to have 2 blocks; it has 5 so far",
        "the KV pool has 2 blocks now",
        "the KV pool has 2 blocks now",
    ]


@pytest.mark.parametrize("size", [0, -3, True, 2.0, "7", None, 10**400])
def test_a_size_that_cannot_be_is_refused(size: object) -> None:
    harness = Harness()
    harness.engine._most_blocks = lambda: 1000
    with pytest.raises(InvalidRequestError) as refusal:
        harness.engine.resize_kv_pool(size)  # type: ignore[arg-type]
    assert refusal.value.param == "blocks"
    assert harness.engine.stats().num_blocks == 64


def test_more_than_the_memory_holds_is_refused_with_both_numbers() -> None:
    harness = Harness()
    harness.engine._most_blocks = lambda: 1000
    with pytest.raises(InvalidRequestError, match=r"blocks is 1001, .* a pool of 1000 at most"):
        harness.engine.resize_kv_pool(1001)
    assert harness.engine.resize_kv_pool(1000).num_blocks == 1000
    harness.engine._most_blocks = lambda: 3  # short of memory: shrinking is always possible
    assert harness.engine.resize_kv_pool(4).num_blocks == 4


def test_an_answer_of_open_length_fits_the_pool_that_is_there_when_it_is_queued() -> None:
    """It was prepared for the larger pool; a refusal would name a number nobody asked for."""
    harness = Harness(num_blocks=64, block_size=4)
    prepared = harness.engine.prepare("x" * 8, SamplingParams(max_tokens=None))
    harness.engine.resize_kv_pool(6)
    harness.engine.submit(prepared)
    [answer] = harness.run().values()
    assert len(answer.outputs[0].token_ids) == 6 * 4 - 8 + 1


def test_an_executor_that_cannot_ends_the_engine_and_says_so() -> None:
    harness = Harness()

    def fail(plan: StepPlan) -> None:
        raise MemoryError("nothing left")

    harness.executor.before_step = fail
    with pytest.raises(EngineDeadError, match="nothing left"):
        harness.engine.resize_kv_pool(100)
    assert not harness.engine.has_unfinished
    with pytest.raises(EngineDeadError):
        harness.engine.resize_kv_pool(10)


# --- in its thread ---


def test_the_async_engine_answers_with_what_was_reached() -> None:
    async def test() -> None:
        harness = Harness(num_blocks=64, block_size=4)
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            assert (await engine.resize_kv_pool(40)).num_blocks == 40  # idle
            calls = [
                asyncio.create_task(read(engine.generate("x" * 8, SamplingParams(max_tokens=60))))
                for _ in range(4)
            ]
            await until(lambda: engine.stats().generation_tokens > 60)
            small = await engine.resize_kv_pool(17)
            assert (small.target_blocks, small.num_blocks, small.note) == (17, 17, None)
            assert engine.stats().swapped > 0
            smaller = await engine.resize_kv_pool(5)
            assert (smaller.target_blocks, smaller.num_blocks) == (5, 17)
            assert smaller.note is not None
            texts = [answer.outputs[0].text for answer in await asyncio.gather(*calls)]
            assert texts == [letters(60)] * 4
            await until(lambda: engine.kv_pool_size().num_blocks == 5)
            with pytest.raises(InvalidRequestError):
                await engine.resize_kv_pool(0)

    run(test())


def test_an_engine_that_does_not_run_says_so() -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            pass
        with pytest.raises(EngineUnavailableError):
            await engine.resize_kv_pool(9)

    run(test())
