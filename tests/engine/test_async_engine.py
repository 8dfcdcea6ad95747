"""The engine in its thread: streams, refusals, cancellation, faults and shutdown."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from layby.engine import AsyncEngine, RequestDelta, RequestOutput
from layby.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
)
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import StepPlan
from tests.engine.harness import Harness, collect, metric, spell


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test; one that hangs fails after 20 seconds."""
    asyncio.run(asyncio.wait_for(test, 20))


@asynccontextmanager
async def started(harness: Harness) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(harness.engine)
    async with engine:
        try:
            yield engine
        finally:
            harness.executor.gate.set()


def slowly(plan: StepPlan) -> None:
    """Leaves the event loop time to act while a request runs."""
    time.sleep(0.001)


async def read(stream: AsyncIterator[RequestDelta]) -> RequestOutput:
    """The whole answer."""
    answers: dict[str, RequestOutput] = {}
    async for delta in stream:
        collect(answers, delta)
    [answer] = answers.values()
    assert answer.finished
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in the engine's thread."""
    while not condition():  # noqa: ASYNC110  # that thread sets no asyncio events
        await asyncio.sleep(0.001)


def test_many_requests_stream_side_by_side() -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            assert engine.is_healthy
            texts = await asyncio.gather(
                *(
                    read(engine.generate("x", SamplingParams(max_tokens=count)))
                    for count in range(1, 30)
                )
            )
            assert [len(one.outputs[0].text) for one in texts] == list(range(1, 30))
            harness.check_idle()
        assert not engine.is_healthy
        assert harness.executor.closed == 1

    run(test())


def test_every_token_is_a_delta_of_its_own() -> None:
    async def test() -> None:
        async with started(Harness(script=spell("abc"))) as engine:
            stream = await engine.submit("x")
            pieces = [delta.outputs[0].text async for delta in stream]
            assert pieces == ["a", "b", "c", ""]

    run(test())


@pytest.mark.parametrize("stop", [(), ("never there",)])
def test_text_is_made_off_the_engines_thread_unless_it_decides(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...]
) -> None:
    async def test() -> None:
        harness = Harness(script=spell("abc"))
        tokenizer, threads = harness.engine.tokenizer, set()
        token_bytes = tokenizer.token_bytes

        def watched(token: int) -> bytes:
            threads.add(threading.current_thread())
            return token_bytes(token)

        monkeypatch.setattr(tokenizer, "token_bytes", watched)
        async with started(harness) as engine:
            answer = await read(engine.generate("x", SamplingParams(stop=stop)))
        assert answer.outputs[0].text == "abc"
        [thread] = threads
        assert (thread is threading.main_thread()) == (not stop)

    run(test())


def test_a_refusal_is_raised_by_submit_itself() -> None:
    """So that an HTTP server can still choose its status."""

    async def test() -> None:
        harness = Harness(num_blocks=10, max_model_len=300)
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            with pytest.raises(InvalidRequestError, match="empty"):
                await engine.submit("")
            with pytest.raises(InvalidRequestError, match="pool has 10"):
                await engine.submit("x" * 170)
            await engine.submit("x", SamplingParams(max_tokens=100), request_id="mine")
            with pytest.raises(InvalidRequestError, match="mine"):
                await engine.submit("x", request_id="mine")
            with pytest.raises(InvalidRequestError, match="empty"):
                await anext(engine.generate(""))

    run(test())


def test_a_refused_duplicate_does_not_end_the_first() -> None:
    async def test() -> None:
        harness = Harness()
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            first = await engine.submit("x", SamplingParams(max_tokens=200), request_id="mine")
            with pytest.raises(InvalidRequestError):
                await anext(engine.generate("x", request_id="mine"))
            assert len((await read(first)).outputs[0].token_ids) == 200

    run(test())


def test_case_17_beyond_the_queue_limit_everybody_is_told_at_once() -> None:
    """Two run and four wait; 44 of 50 are refused, long before any place is free again."""

    async def test() -> None:
        harness = Harness(max_num_seqs=2, max_queue=4)
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            results = await asyncio.gather(
                *(engine.submit("x", SamplingParams(max_tokens=200)) for _ in range(50)),
                return_exceptions=True,
            )
            refused = [one for one in results if isinstance(one, QueueFullError)]
            assert len(refused) == 44
            assert all(one.retry_after_s > 0 for one in refused)
            harness.executor.before_step = lambda plan: None
            accepted = [one for one in results if not isinstance(one, BaseException)]
            answers = await asyncio.gather(*map(read, accepted))
            assert [len(one.outputs[0].token_ids) for one in answers] == [200] * 6
            harness.check_idle()

    run(test())


@pytest.mark.parametrize("how", ["close", "aclosing", "async with", "cancel", "cancel generator"])
def test_case_11_a_stream_that_is_left_frees_its_blocks_at_the_next_step(how: str) -> None:
    async def leave(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=200, n=2)
        if how == "cancel generator":
            before = engine.stats().requests_accepted
            task = asyncio.create_task(read(engine.generate("x" * 20, params)))
            await until(lambda: engine.stats().requests_accepted > before)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        stream = await engine.submit("x" * 20, params)
        await anext(stream)
        if how == "close":
            stream.close()
            stream.close()
        elif how == "aclosing":
            async with aclosing(stream):
                pass
        elif how == "async with":
            async with stream:
                pass
        else:
            task = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert [delta async for delta in stream] == []

    async def test() -> None:
        harness = Harness()
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            other = await engine.submit("y", SamplingParams(max_tokens=100))
            for _ in range(5):
                await leave(engine)
            await until(lambda: engine.stats().running <= 1)
            assert (await read(other)).outputs[0].finish_reason == "length"
            assert engine.stats().requests_aborted == 5
            harness.check_idle()

    run(test())


def test_cancelling_a_submission_leaves_nothing_behind() -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            harness.executor.gate.clear()
            await engine.submit("x", SamplingParams(max_tokens=5))
            await until(lambda: bool(engine.stats().waiting or engine.stats().running))
            task = asyncio.create_task(engine.submit("y", SamplingParams(max_tokens=200)))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            harness.executor.gate.set()
            await until(lambda: not harness.engine.has_unfinished)
            assert max(len(plan.scheduled) for plan in harness.executor.plans) == 1
            harness.check_idle()

    run(test())


def test_a_reader_that_sleeps_holds_nobody_up_and_misses_nothing() -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            slow = await engine.submit("x", SamplingParams(max_tokens=100))
            quick = await read(engine.generate("y", SamplingParams(max_tokens=100)))
            assert len(quick.outputs[0].token_ids) == 100
            await until(lambda: not harness.engine.has_unfinished)
            assert len((await read(slow)).outputs[0].token_ids) == 100

    run(test())


def test_a_step_reaches_the_event_loop_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per step and at most one per submission, not one for each of a thousand tokens."""

    async def test() -> None:
        harness = Harness()
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        original = loop.call_soon_threadsafe

        def counted(*args: Any) -> asyncio.Handle:
            calls.append(args)
            return original(*args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        async with started(harness) as engine:
            params = SamplingParams(max_tokens=50)
            await asyncio.gather(*(read(engine.generate("x", params)) for _ in range(20)))
            assert engine.stats().generation_tokens == 1000
            assert len(calls) <= len(harness.executor.plans) + 20

    run(test())


def test_an_idle_engine_does_nothing() -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            await read(engine.generate("x", SamplingParams(max_tokens=3)))
            before = time.thread_time(), time.process_time()
            await asyncio.sleep(0.2)
            mine, all_threads = (
                time.thread_time() - before[0],
                time.process_time() - before[1],
            )
            assert all_threads - mine < 0.05
            assert len(harness.executor.plans) == 3

    run(test())


def test_one_failing_request_leaves_the_engine_healthy() -> None:
    async def test() -> None:
        harness = Harness()
        harness.executor.failing_requests.add("bad")
        async with started(harness) as engine:
            bad, good = await asyncio.gather(
                read(engine.generate("x", SamplingParams(max_tokens=5), request_id="bad")),
                read(engine.generate("x", SamplingParams(max_tokens=5), request_id="good")),
            )
            assert (bad.outputs[0].finish_reason, good.outputs[0].text) == ("error", "abcde")
            assert engine.is_healthy

    run(test())


def test_a_failed_step_ends_every_stream_and_the_engine_says_why() -> None:
    def broken(plan: StepPlan) -> None:
        raise RuntimeError("the device is on fire")

    async def test() -> None:
        harness = Harness(max_num_seqs=2)
        harness.executor.before_step = slowly
        async with started(harness) as engine:
            params = SamplingParams(max_tokens=200)
            streams = await asyncio.gather(*(engine.submit("x", params) for _ in range(4)))
            harness.executor.before_step = broken
            for answer in await asyncio.gather(*map(read, streams)):
                assert answer.outputs[0].finish_reason == "error"
                assert isinstance(answer.error, EngineDeadError)
                assert "on fire" in str(answer.error)
            assert not engine.is_healthy
            assert "on fire" in str(engine.error)
            with pytest.raises(EngineDeadError, match="on fire"):
                await engine.submit("x")
            assert b"vllm:num_requests_running" in engine.metrics_text()

    run(test())


def test_a_fault_of_the_loop_itself_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        harness = Harness()
        async with started(harness) as engine:
            harness.executor.gate.clear()
            stream = await engine.submit("x")
            monkeypatch.setattr(engine, "_post_all", None)
            harness.executor.gate.set()
            answer = await read(stream)
            assert answer.outputs[0].finish_reason == "error"
            await until(lambda: not engine.is_healthy)
            with pytest.raises(EngineUnavailableError):
                await engine.submit("x")

    run(test())


def test_case_18_a_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    """Running, waiting and parked work alike."""

    async def test() -> None:
        harness = Harness(num_blocks=12, enable_prefix_caching=False)
        engine = AsyncEngine(harness.engine)
        loop = asyncio.get_running_loop()
        paused = loop.create_future()

        def pause(plan: StepPlan) -> None:
            if paused.done():
                return
            queues = harness.scheduler
            if len(queues.running) + len(queues.waiting) + len(queues.swapped) < 4:
                time.sleep(0.01)  # the others are still coming
            elif queues.running and queues.waiting and queues.swapped:
                harness.executor.gate.clear()
                loop.call_soon_threadsafe(paused.set_result, None)
                harness.executor.gate.wait()

        harness.executor.before_step = pause
        await engine.start()
        params = SamplingParams(max_tokens=80)
        streams = await asyncio.gather(*(engine.submit("x" * 40, params) for _ in range(4)))
        await paused  # some run, some wait, some are parked
        shutdown = asyncio.create_task(engine.shutdown(10.0))
        await until(lambda: engine.is_draining)
        with pytest.raises(EngineDrainingError):
            await engine.submit("x")
        harness.executor.gate.set()
        for answer in await asyncio.gather(*map(read, streams)):
            assert len(answer.outputs[0].token_ids) == 80
        await shutdown
        assert harness.executor.closed == 1
        harness.check_idle()
        with pytest.raises(EngineUnavailableError, match="make a new one"):
            await engine.start()

    run(test())


def test_case_18_past_the_drain_limit_every_request_gets_an_explicit_end() -> None:
    async def test() -> None:
        harness = Harness(max_num_seqs=1)
        harness.executor.before_step = lambda plan: time.sleep(0.01)
        engine = AsyncEngine(harness.engine)
        await engine.start()
        params = SamplingParams(max_tokens=200)
        streams = await asyncio.gather(*(engine.submit("x", params) for _ in range(3)))
        await anext(streams[0])
        await engine.shutdown(0.05)
        for answer in await asyncio.gather(*map(read, streams)):
            assert answer.outputs[0].finish_reason == "abort"
            assert isinstance(answer.error, EngineDrainingError)
            assert "within 0.05 s" in str(answer.error)
        harness.check_idle()
        await engine.shutdown()

    run(test())


def test_a_shutdown_does_not_wait_for_ever_for_a_step_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("layby.engine.async_engine.FORCED_END_WAIT_S", 0.05)

    async def test() -> None:
        harness = Harness()
        engine = AsyncEngine(harness.engine)
        await engine.start()
        harness.executor.gate.clear()
        stream = await engine.submit("x", SamplingParams(n=2))
        await engine.shutdown(0.05)
        [delta] = [delta async for delta in stream]
        assert [piece.finish_reason for piece in delta.outputs] == ["abort", "abort"]
        assert isinstance(delta.error, EngineDrainingError)
        thread = engine._thread
        assert thread is not None
        harness.executor.gate.set()
        await asyncio.to_thread(thread.join)

    run(test())


def test_an_engine_that_was_not_started_says_so() -> None:
    async def test() -> None:
        engine = AsyncEngine(Harness().engine)
        assert not engine.is_healthy
        with pytest.raises(EngineUnavailableError, match="not been started"):
            await engine.submit("x")
        await engine.shutdown()

    run(test())


def test_a_long_prompt_is_tokenised_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layby.engine.async_engine.LONG_WORK", 10)

    async def test() -> None:
        async with started(Harness()) as engine:
            answer = await read(engine.generate("x" * 20, SamplingParams(max_tokens=3)))
            assert answer.outputs[0].text == "abc"

    run(test())


def test_streams_of_an_event_loop_that_has_ended_are_aborted() -> None:
    """The engine outlives the loop that asked, and serves the next."""
    harness = Harness()
    harness.executor.before_step = slowly
    engine = AsyncEngine(harness.engine)

    async def ask_and_leave() -> None:
        await engine.start()
        await engine.submit("x", SamplingParams(max_tokens=200))

    async def ask_again() -> None:
        await until(lambda: engine.stats().requests_aborted == 1)
        answer = await read(engine.generate("x", SamplingParams(max_tokens=3)))
        assert answer.outputs[0].text == "abc"
        await engine.shutdown()

    run(ask_and_leave())
    run(ask_again())
    harness.check_idle()


def test_scrapes_between_steps_agree_with_themselves() -> None:
    """waiting + running + swapped = accepted - ended, whenever the scrape comes."""

    async def test() -> None:
        harness = Harness(num_blocks=12, enable_prefix_caching=False)
        async with started(harness) as engine:
            params = SamplingParams(max_tokens=80)
            readers = [
                asyncio.create_task(read(engine.generate("x" * 40, params))) for _ in range(8)
            ]
            while not all(reader.done() for reader in readers):
                stats = engine.stats()
                ended = stats.requests_finished + stats.requests_aborted
                alive = stats.running + stats.waiting + stats.swapped
                assert alive == stats.requests_accepted - ended
                await asyncio.sleep(0)
            assert metric(engine.metrics_text(), "vllm:num_requests_running") == 0
            assert engine.stats().preemptions_swap > 0

    run(test())
