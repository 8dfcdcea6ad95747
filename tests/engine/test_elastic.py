"""``--elastic-memory``: a pool that follows the memory of a made-up machine, and loses nothing."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby import LLM
from layby.engine import RequestOutput, elastic
from layby.engine.elastic import PARKING_PRICE_S, ElasticPool, elastic_pool
from layby.engine.memory_signals import AdviceSettings, MemorySource
from layby.errors import ConfigError
from layby.execution.kv_cache import KVCache
from layby.sampling_params import SamplingParams
from layby.scheduling import MoveCosts
from tests.engine.harness import Harness, collect
from tests.engine.test_async_engine import read, run, slowly, started, until

MIB = 2**20
QUICK = AdviceSettings(calm_s=5.0, grow_wait_s=1.0, grow_step=0.25)
FULL, LEAST = 64, 16  # blocks at the start, and of a full context


class Box:
    """A machine of so many blocks of memory, of which others hold some, around a whole engine.

    What the engine holds is what its pools have handed out and not given back, as on a real one;
    of a GPU, all of the device pool.
    """

    def __init__(
        self,
        limit: int = 120,
        *,
        block_mib: int = 1,
        room_beside: Callable[[], int] | None = None,
        marks: AdviceSettings = QUICK,
        **options: Any,
    ) -> None:
        self.limit, self.others, self.block_bytes = limit, 0, block_mib * MIB
        self.on_gpu = room_beside is not None
        self.given_back: list[int] = []
        self.failing = False
        self.pool = ElasticPool(
            block_bytes=self.block_bytes,
            min_blocks=LEAST,
            max_blocks=FULL,
            read=self.read,
            most_blocks=lambda: 1000,
            room_beside=room_beside,
            give_back_parked=self.given_back.extend,
            settings=marks,
        )
        self.harness = Harness(
            num_blocks=FULL,
            block_size=4,
            max_model_len=64,
            enable_prefix_caching=False,
            elastic=self.pool,
            **options,
        )
        self.engine = self.harness.engine
        self.sizes: list[int] = []

    @property
    def held(self) -> int:
        """Blocks of memory that the engine takes."""
        if not hasattr(self, "harness"):
            return 0
        scheduler = self.harness.scheduler
        if self.on_gpu:
            return scheduler.device_pool.num_blocks
        return scheduler.device_pool.num_touched + scheduler.swap_pool.num_touched

    def read(self) -> Sequence[MemorySource]:
        if self.failing:
            raise OSError("no such file")
        room = self.limit - self.others - self.held
        return [MemorySource("box", self.limit * self.block_bytes, room * self.block_bytes)]

    def touch(self) -> None:
        """The whole device pool was written to once."""
        device = self.harness.scheduler.device_pool
        device.release(device.allocate(FULL))

    def tick(self) -> bool:
        """A second passes."""
        self.harness.clock.now += 1.0
        return True

    def submit(self, count: int, max_tokens: int = 40, **options: Any) -> None:
        for number in range(count):
            params = SamplingParams(max_tokens=max_tokens)
            self.engine.add_request("x" * 8, params, request_id=str(number), **options)

    def steps(self, count: int, answers: dict[str, RequestOutput] | None = None) -> None:
        """So many seconds, whether there is work or not."""
        for _ in range(count):
            self.engine.follow_memory()
            if self.engine.has_unfinished:
                for delta in self.engine.step():
                    collect(answers if answers is not None else {}, delta)
                self.harness.scheduler.check_integrity()
            else:
                self.harness.clock.now += 1.0
            self.sizes.append(self.engine.stats().num_blocks)


def letters(count: int) -> str:
    return "".join(chr(ord("a") + i % 26) for i in range(count))


def test_the_pool_shrinks_while_others_want_memory_loses_nothing_and_grows_back() -> None:
    """Five requests of twelve blocks; then others take 90 of the 120 blocks, and leave."""
    box, answers = Box(), dict[str, RequestOutput]()
    box.submit(5)
    box.steps(20, answers)
    assert box.sizes == [FULL] * 20
    box.others = 90
    box.steps(10, answers)
    assert LEAST <= box.sizes[-1] <= 25
    assert box.others + box.held <= 0.95 * box.limit
    assert box.harness.metric("layby_kv_pool_resizes_total", direction="shrink") >= 1
    box.others = 0
    box.steps(200, answers)
    assert box.sizes[-1] == FULL
    assert box.harness.metric("layby_kv_pool_resizes_total", direction="grow") >= 2
    assert [answer.outputs[0].text for answer in answers.values()] == [letters(40)] * 5
    assert box.engine.stats().requests_aborted == 0


def test_in_the_ram_that_is_short_nobody_is_parked_and_afterwards_one_is_again() -> None:
    """Parking would take the memory that shrinking returns."""
    box = Box()
    box.submit(5)
    box.steps(20)
    box.others = 90
    box.steps(3)
    assert box.engine.stats().preemptions_recompute >= 2
    assert box.engine.stats().preemptions_swap == 0
    box.others = 0
    box.steps(10)  # five seconds of calm have passed
    box.engine.resize_kv_pool(LEAST)
    box.steps(1)
    assert box.engine.stats().preemptions_swap >= 1


def test_measured_costs_return_when_memory_does() -> None:
    box = Box()
    measured, cheaper = MoveCosts(0.1, 0.1, 0.2), MoveCosts(0.05, 0.05, 0.2)
    assert box.pool.price(measured) == measured
    box.others = 118
    box.steps(1)
    assert box.harness.scheduler.costs == MoveCosts(PARKING_PRICE_S, 0.1, 0.2)
    assert box.pool.price(cheaper) == MoveCosts(PARKING_PRICE_S, 0.05, 0.2)
    box.others = 0
    box.steps(7)
    assert box.harness.scheduler.costs == cheaper


def test_who_wants_parking_gets_it_all_the_same() -> None:
    box, answers = Box(preemption_mode="swap"), dict[str, RequestOutput]()
    box.submit(5)
    box.steps(20, answers)
    box.others = 90
    box.steps(200, answers)
    assert box.engine.stats().preemptions_swap >= 2
    assert box.engine.stats().recomputed_tokens == 0
    assert [answer.outputs[0].text for answer in answers.values()] == [letters(40)] * 5


def test_swap_blocks_that_nobody_uses_give_their_memory_back_first() -> None:
    """Twenty blocks were parked and are back: they are what is missing, so the pool may stay."""
    box = Box(limit=200)
    box.touch()
    taken = box.harness.scheduler.swap_pool.allocate(30)
    box.harness.scheduler.swap_pool.release(taken[:20])
    box.others = 200 - FULL - 30 - 5
    box.steps(1)
    assert box.given_back == taken[:20]
    assert box.harness.scheduler.swap_pool.num_touched == 10
    assert box.sizes == [FULL]
    box.steps(1)
    assert box.given_back == taken[:20]  # once


def test_no_step_gives_up_more_than_a_stage_and_the_goal_shows_meanwhile() -> None:
    box = Box(limit=70, block_mib=64)
    box.touch()
    box.others = 70
    box.engine.add_request("x" * 8, SamplingParams(max_tokens=56))
    box.steps(1)
    assert box.harness.metric("layby_kv_blocks_target") == LEAST
    assert box.engine.stats().num_blocks > LEAST
    box.steps(60)
    drops = [a - b for a, b in zip([FULL, *box.sizes], box.sizes, strict=False)]
    assert box.sizes[-1] == LEAST
    assert max(drops) == 4


@pytest.mark.parametrize(
    ("mode", "room", "stage"),
    [("swap", 20, 4), ("swap", 6, 3), ("swap", 1, 1), ("swap", -9, 1), ("auto", -9, 4)],
)
def test_a_stage_needs_room_for_what_is_parked_before_its_pages_go(
    mode: str, room: int, stage: int
) -> None:
    """Blocks of 64 MiB. At most 256 MiB, else half of what is left, and always something."""
    box = Box(limit=1000, block_mib=64, preemption_mode=mode)
    box.touch()
    box.others = 1000 - FULL - room
    box.engine.follow_memory()
    if box.engine.has_unfinished:
        box.engine.step()
    assert FULL - box.engine.stats().num_blocks == stage


def test_a_request_that_needs_more_keeps_the_pool_and_then_it_goes_in_stages() -> None:
    box = Box(limit=1000, block_mib=64)
    box.touch()
    box.engine.add_request("x" * 8, SamplingParams(max_tokens=20, n=7))  # 2 + 7 * 5 blocks
    box.others = 1000 - FULL - 20
    box.steps(15)
    assert min(box.sizes) == 37
    box.steps(60)
    drops = [a - b for a, b in zip(box.sizes, box.sizes[1:], strict=False)]
    assert box.sizes[-1] == LEAST
    assert max(drops) <= 4


def test_the_memory_of_swap_blocks_that_were_used_is_room_to_grow() -> None:
    """The pool stayed small for ever beside a swap pool that nobody used any more."""
    box = Box(preemption_mode="swap")
    box.submit(6)
    box.steps(21)
    box.others = 67
    box.steps(7)
    box.others = 0
    box.steps(100)
    assert min(box.sizes) == LEAST
    assert box.sizes[-1] == FULL


def test_a_stage_is_no_larger_than_what_an_operator_wants() -> None:
    """While a request kept the pool above it, a stage down from there was its new target."""
    box = Box(limit=1000, block_mib=32)
    box.touch()
    box.engine.add_request("x" * 8, SamplingParams(max_tokens=20, n=7))
    box.engine.resize_kv_pool(20)
    box.others = 1000 - FULL
    box.steps(10)
    assert box.sizes[-1] == 37
    assert box.harness.scheduler.target_blocks <= 20


def test_a_goal_that_must_wait_is_one_change_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    box = Box(limit=1000)
    box.touch()
    box.engine.add_request("x" * 8, SamplingParams(max_tokens=20, n=7))
    box.others = 1000
    box.steps(15)
    assert box.sizes[-1] == 37
    assert box.engine.stats().pool_shrinks == 1
    assert caplog.text.count("elastic memory") == 1
    box.steps(20)
    assert box.sizes[-1] == LEAST
    assert box.engine.stats().pool_shrinks == 1


def test_an_operator_sets_the_largest_size_and_memory_goes_on_from_there() -> None:
    box = Box()
    box.engine.resize_kv_pool(40)
    box.steps(30)
    assert set(box.sizes) == {40}  # there is room for more, but nobody wants it
    box.others = 120
    box.steps(10)
    assert box.sizes[-1] == LEAST
    box.engine.resize_kv_pool(50)  # he knows better, but memory does not
    box.steps(5)
    assert box.sizes[-1] == LEAST
    box.others = 0
    box.steps(30)
    assert box.sizes[-1] == 50
    box.engine.resize_kv_pool(8)  # smaller than a full context
    box.others = 120
    box.steps(5)
    assert box.sizes[-1] == 8


def test_stalls_alone_are_a_reason_too() -> None:
    box = Box(limit=100)
    box.touch()
    stalled_us = 0

    def read() -> list[MemorySource]:
        nonlocal stalled_us
        stalled_us += 300_000
        return [MemorySource("box", 100 * MIB, 10 * MIB, stalled_us)]

    box.pool._read = read
    box.steps(4)
    assert box.sizes[-1] == 51  # nine tenths of 64 after two seconds, and of 57


def test_where_room_is_scarce_it_looks_more_often_but_stalls_take_a_second_to_judge() -> None:
    box = Box(limit=100)
    box.touch()
    looks: list[float] = []

    def read() -> list[MemorySource]:
        looks.append(box.harness.clock.now)
        room = 50 if box.harness.clock.now < 2.0 else 12
        return [MemorySource("box", 100 * MIB, room * MIB, int(len(looks) > 3) * 60_000)]

    box.pool._read = read
    while box.harness.clock.now < 3.0:
        box.engine.follow_memory()
        box.harness.clock.now += 0.125
    assert looks == [0.0, 1.0, 2.0, 2.25, 2.5, 2.75]
    assert box.pool.goal is None  # 60 ms are much of a quarter of a second, and little of one


# --- a GPU ---


def test_a_pool_that_is_copied_goes_at_once_and_only_to_what_fits_beside_it() -> None:
    """30 blocks have room beside the 64; parking costs no GPU memory, so that is the way out."""
    box, answers = Box(limit=100, room_beside=lambda: 30), dict[str, RequestOutput]()
    box.submit(5)
    box.steps(30, answers)
    box.others = 97 - box.held  # seven blocks less would do
    box.steps(1, answers)
    assert box.sizes[-1] == 30
    box.others = 0
    box.steps(200, answers)
    assert box.sizes[-1] == FULL
    assert box.engine.stats().preemptions_recompute == 0
    assert box.given_back == []
    assert [answer.outputs[0].text for answer in answers.values()] == [letters(40)] * 5


def test_without_room_for_a_copy_the_pool_stays_and_says_so_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box = Box(limit=100, room_beside=lambda: LEAST - 1)
    box.others = 100
    with caplog.at_level(logging.WARNING):
        box.steps(40)
    assert set(box.sizes) == {FULL}
    assert caplog.text.count("too little to copy the pool; the KV pool stays at 64 blocks") == 2


def test_on_a_gpu_its_own_memory_is_the_signal() -> None:
    cache = cast(KVCache, SimpleNamespace(num_blocks=FULL, block_bytes=MIB))
    memory = [50 * MIB, 100 * MIB]
    pool = elastic_pool(
        cache,
        min_blocks=LEAST,
        most_blocks=lambda: 50,
        device_memory=lambda: (memory[0], memory[1]),
        read=lambda: pytest.fail("RAM says nothing about it"),
    )
    harness = Harness(num_blocks=FULL, block_size=4, max_model_len=64, elastic=pool)
    harness.engine.follow_memory()
    assert not harness.engine.has_unfinished
    harness.clock.now, memory[0] = 1.0, 4 * MIB
    harness.engine.follow_memory()
    assert not harness.engine.has_unfinished  # four blocks beside it are no full context
    harness.clock.now, memory[1] = 2.0, 1000 * MIB
    memory[0] = 40 * MIB
    harness.engine.follow_memory()
    harness.engine.step()
    assert harness.engine.stats().num_blocks == LEAST


# --- what cannot be ---


def test_a_system_that_says_nothing_is_refused() -> None:
    cache = cast(KVCache, SimpleNamespace(num_blocks=9, block_bytes=1, give_back_parked=None))
    with pytest.raises(ConfigError, match="does not say how much memory is left"):
        elastic_pool(cache, min_blocks=3, most_blocks=lambda: 9, read=list)


def test_a_pool_of_no_more_than_a_context_stays_and_a_warning_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = cast(KVCache, SimpleNamespace(num_blocks=9, block_bytes=1, give_back_parked=None))
    pool = elastic_pool(cache, min_blocks=16, most_blocks=lambda: 9)
    assert "pool of 9 blocks is not larger than one full context (16)" in caplog.text
    assert (pool.min_blocks, pool.max_blocks) == (9, 9)


def test_signals_that_fail_for_a_while_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    box, answers = Box(), dict[str, RequestOutput]()
    box.submit(1)
    box.failing = True
    box.steps(3, answers)
    assert "could not follow the memory" in caplog.text
    box.failing, box.others = False, 120
    box.steps(60, answers)
    assert box.sizes[-1] == LEAST
    assert answers["0"].outputs[0].text == letters(40)


def test_changes_are_told_in_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The first, the last, and one in 30 seconds of those between."""
    box = Box(marks=AdviceSettings(calm_s=5.0, grow_wait_s=1.0, grow_step=0.01))
    box.others = 120
    with caplog.at_level(logging.INFO, "layby.engine"):
        box.steps(5)
        box.others = 0
        box.steps(80)
    lines = [one.getMessage() for one in caplog.records if "elastic" in one.getMessage()]
    assert lines[0] == (
        "elastic memory: box has 0 MiB of 120 MiB left; "
        "the KV pool goes from 64 to 16 blocks (16 MiB)"
    )
    assert lines[1].startswith(
        "elastic memory: there is room again; the KV pool goes from 16 to 17"
    )
    assert lines[-1].endswith("to 64 blocks (64 MiB)")
    assert 3 <= len(lines) <= 5


# --- whoever keeps the engine ---


def test_llm_follows_between_its_steps() -> None:
    box = Box()
    box.others = 120
    llm = LLM.from_engine(box.engine)
    [answer] = llm.generate("x" * 8, SamplingParams(max_tokens=40))
    assert answer.outputs[0].text == letters(40)
    assert llm.stats().num_blocks == LEAST


def test_an_idle_engine_in_its_thread_follows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "LOOK_INTERVAL_S", 0.01)

    async def test() -> None:
        box = Box()
        async with started(box.harness) as engine:
            box.others = 120
            await until(lambda: box.tick() and engine.stats().num_blocks == LEAST)
            box.others = 0
            await until(lambda: box.tick() and engine.stats().num_blocks == FULL)
            answer = await read(engine.generate("x" * 8, SamplingParams(max_tokens=40)))
            assert answer.outputs[0].text == letters(40)

    run(test())


def test_requests_operators_and_memory_at_the_same_time_lose_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread plays the neighbours and reads the metrics, tasks resize and generate."""
    monkeypatch.setattr(elastic, "LOOK_INTERVAL_S", 2.0)

    async def test() -> None:
        box, rng, ended = Box(marks=QUICK), random.Random(7), threading.Event()
        box.harness.executor.before_step = slowly

        def neighbours() -> None:
            while not ended.wait(0.002):
                box.others = rng.choice((0, 0, 60, 100, 130))
                box.engine.metrics_text()

        async with started(box.harness) as engine:
            thread = threading.Thread(target=neighbours)
            thread.start()
            try:
                calls = [
                    read(engine.generate("x" * 8, SamplingParams(max_tokens=40 + i % 9)))
                    for i in range(40)
                ]
                answers = asyncio.gather(*calls)
                while not answers.done():
                    await engine.resize_kv_pool(rng.randint(LEAST, FULL))
                    await asyncio.sleep(0.01)
            finally:
                ended.set()
                thread.join()
            texts = [answer.outputs[0].text for answer in await answers]
            assert texts == [letters(40 + i % 9) for i in range(40)]
            assert engine.stats().pool_shrinks > 0
        box.harness.scheduler.check_integrity()

    run(test())


@settings(max_examples=40, deadline=None)
@given(
    others=st.lists(st.integers(0, 130), min_size=1, max_size=12),
    mode=st.sampled_from(["auto", "swap", "recompute"]),
    beside=st.sampled_from([None, 12, 40]),
)
def test_whatever_others_do_every_request_ends_as_if_alone(
    others: list[int], mode: str, beside: int | None
) -> None:
    room = None if beside is None else lambda: beside
    box, answers = Box(preemption_mode=mode, room_beside=room), dict[str, RequestOutput]()
    box.submit(6)
    for box.others in others:
        box.steps(7, answers)
    box.others = 0
    box.steps(400, answers)
    assert [answer.outputs[0].text for answer in answers.values()] == [letters(40)] * 6
    assert min(box.sizes) >= LEAST
    assert max(box.sizes) == box.sizes[-1] == FULL
