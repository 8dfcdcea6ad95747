"""Whom to park, and how: room for urgent classes, the threshold, costs, and protection."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.errors import ConfigError
from layby.scheduling import (
    MoveCosts,
    PreemptionMode,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from layby.scheduling.costs import LeavingLoad, decide
from layby.scheduling.reserve import UrgentRoom

BLOCK = 4


class Bench:
    """A scheduler on a hand-wound clock."""

    def __init__(self, **config: object) -> None:
        self.now = 0.0
        defaults: dict[str, object] = {
            "num_blocks": 40,
            "num_swap_blocks": 400,
            "block_size": BLOCK,
            "enable_prefix_caching": False,
            "headroom": 0.0,
        }
        self.scheduler = Scheduler(
            SchedulerConfig(**(defaults | config)),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def add(self, name: str, prompt: int, output: int, priority: int = 0) -> Request:
        request = Request(name, [1] * prompt, max_tokens=output, priority=priority)
        self.scheduler.add_request(request)
        return request

    def step(self, seconds: float = 0.0) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, [1] * plan.num_samples)
        self.scheduler.check_integrity()
        self.now += seconds
        return plan

    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5), st.integers(0, 9)), max_size=30),
    st.integers(0, 4),
    st.floats(0, 8),
)
def test_the_peak_is_that_of_the_window(
    notes: list[tuple[int, float, int]], asking: int, later: float
) -> None:
    room, now, known = UrgentRoom(4.0), 0.0, []
    for own, pause, held in notes:
        now += pause
        room.note(own, now, held)
        known.append((own, now + 4.0, held))
    now += later
    alive = [(held, until) for own, until, held in known if until > now and own < asking]
    assert room.seen(asking, now) == bool(alive)
    assert room.peak(asking, now) == max((held for held, _ in alive), default=0)
    # Until it is said to change, it does not.
    until = room.changes_at(now)
    assert until > now
    if until < math.inf:
        assert room.peak(asking, math.nextafter(until, 0)) == room.peak(asking, now)


def test_room_is_kept_for_the_urgent_until_the_window_has_passed() -> None:
    bench = Bench(urgent_window=10.0)
    bench.add("first", 4 * BLOCK, 100, priority=5)
    bench.add("urgent", 20 * BLOCK, 1)  # holds 20 blocks, and is gone
    bench.step(1.0)
    assert bench.running() == ["first"]
    bench.add("second", 18 * BLOCK, 40, priority=5)  # 35 are free, 20 of them kept
    for _ in range(9):
        bench.step(1.0)
        assert bench.running() == ["first"]
    bench.step(1.0)
    assert bench.running() == ["first", "second"]


def test_half_of_the_pool_is_the_most_that_is_kept_for_the_urgent() -> None:
    """A rush of urgent work that never comes again left a server all but idle for the window."""
    bench = Bench(urgent_window=1e6)
    bench.add("urgent", 38 * BLOCK, 1)
    bench.add("later", 2, 50)
    bench.step()
    for number in range(4):
        bench.add(f"b{number}", 9 * BLOCK, 4, priority=5)
    bench.step()
    assert bench.running() == ["later", "b0", "b1"]  # 20 of 40 blocks are left


def test_nobody_is_parked_for_the_most_urgent_in_a_step_that_let_in_who_is_less_urgent() -> None:
    """One of class 1 who has risen took a seat, and one of class 0 gave up another to class -3."""
    bench = Bench(priority_aging=1.0, max_num_seqs=2)
    bench.add("stays", 1, 60)
    ends = bench.add("ends", 1, 6)
    bench.step(1.0)
    bench.add("risen", 1, 60, priority=1)
    while not ends.is_finished:
        bench.step(1.0)
    urgent = bench.add("urgent", 1, 60, priority=-3)
    plan = bench.step(1.0)
    assert [request.request_id for request in plan.admitted] == ["risen"]
    assert not plan.preempted
    plan = bench.step(1.0)
    assert [request for request, _ in plan.preempted] == [bench.scheduler.requests["stays"]]
    assert plan.admitted == [urgent]


def test_the_first_of_a_class_comes_in_anyhow() -> None:
    bench = Bench(urgent_window=1e6)
    bench.add("urgent", 38 * BLOCK, 1)
    bench.add("later", 2, 50)
    bench.step()
    bench.add("batch", 30 * BLOCK, 4, priority=5)
    bench.step()
    assert bench.running() == ["later", "batch"]


def test_room_is_not_kept_for_those_of_ones_class_who_have_waited_longer() -> None:
    """They cannot park anybody; and prompts would be computed in crumbs as long as they come."""
    bench = Bench(urgent_window=1000.0, priority_aging=10.0, background_tokens=1, max_num_seqs=2)
    bench.add("first", 4, 30, priority=5)
    bench.add("second", 4, 20, priority=5)
    bench.step(1.0)
    bench.add("patient", 4, 20, priority=5)
    for _ in range(25):
        bench.step(1.0)
    assert bench.running() == ["patient", "first"]  # it has risen by two
    bench.scheduler.abort("first")
    bench.add("newcomer", 30 * BLOCK, 4, priority=5)
    assert bench.step().num_tokens == 30 * BLOCK + 1


def test_parked_work_keeps_no_room_while_who_has_risen_waits_for_it() -> None:
    """The urgent class cannot come in before that one, nor that one before the parked one."""
    bench = Bench(urgent_window=1000.0, priority_aging=10.0)
    bench.add("long", 4, 90, priority=5)
    parked = bench.add("parked", 10 * BLOCK, 100, priority=5)
    bench.step(1.0)
    bench.add("large", 30 * BLOCK, 4, priority=5)
    for _ in range(30):
        bench.step(1.0)
    bench.add("urgent", 20 * BLOCK, 1)
    assert [request for request, _ in bench.step(1.0).preempted] == [parked]
    while parked.status is not RequestStatus.RUNNING:
        bench.step(1.0)
    assert 50 <= bench.now <= 53  # "large" is of class 0 by then; "parked" itself at 80


def test_urgent_work_finds_its_room_without_parking_anybody() -> None:
    """Bursts come for as long as the batch takes; counted are the moves for one of them."""
    moves = {}
    for window in (0.0, 100.0):
        bench = Bench(urgent_window=window)
        batch = [bench.add(f"b{number}", 6 * BLOCK, 4 * BLOCK, priority=5) for number in range(12)]
        num_bursts = 0
        while not all(request.is_finished for request in batch):
            num_bursts += 1
            bench.add(f"u{num_bursts}", 16 * BLOCK, 8)
            for _ in range(12):
                bench.step(1.0)
        moves[window] = bench.scheduler.metrics.preemptions / num_bursts
    assert moves[100.0] < 0.6 * moves[0.0]


def test_less_urgent_prompts_make_no_long_steps_once_an_urgent_one_was_seen() -> None:
    bench = Bench(urgent_window=10.0, background_tokens=8, num_blocks=400)
    bench.add("old", 1, 100, priority=5)
    bench.add("urgent", 2, 2)
    bench.step(1.0)
    bench.step(1.0)
    for number in range(3):
        bench.add(f"b{number}", 100, 4, priority=5)
    assert bench.step().num_tokens == 8 + 3 + 1
    bench.add("again", 50, 2)
    plan = bench.step()
    assert plan.num_tokens == 50 + 3  # while urgent work prefills, the others wait
    for _ in range(3):
        assert bench.step().num_tokens <= 8 + 5
    bench.now += 11.0
    assert bench.step().num_tokens > 100


def test_less_urgent_decodes_sit_out_a_step_with_an_urgent_prompt_but_never_two_on_end() -> None:
    bench = Bench(urgent_window=10.0, num_blocks=400, max_num_batched_tokens=64)
    jobs = [bench.add(f"b{number}", 4, 60, priority=5) for number in range(3)]
    equal = bench.add("equal", 4, 60)
    for _ in range(3):
        bench.step(1.0)
    bench.add("urgent", 300, 2)  # takes five steps and more
    took_part = []
    while bench.scheduler.requests["urgent"].first_token_time is None:
        plan = bench.step(1.0)
        computed = {item.sequence.request for item in plan.scheduled}
        assert equal in computed
        assert {seq.request for seq in plan.paused} == set(jobs) - computed
        took_part.append(computed >= set(jobs))
    assert len(took_part) >= 5
    assert took_part == [number % 2 == 1 for number in range(len(took_part))]
    assert not bench.step().paused
    while bench.scheduler.has_unfinished:
        bench.step()
    assert {len(job.sequences[0].tokens) for job in jobs} == {64}


def test_above_the_threshold_the_least_urgent_is_parked_ahead_of_need() -> None:
    bench = Bench(preemption_threshold=0.75)
    for number in range(4):
        bench.add(f"b{number}", 8 * BLOCK, 30, priority=5)
    for _ in range(8):
        plan = bench.step()
        assert not plan.preempted  # nobody more urgent is known
    assert bench.scheduler.device_pool.num_free < 10
    bench.add("urgent", BLOCK, 40)
    assert [request.request_id for request, _ in bench.step().preempted] == ["b3"]
    while bench.running()[0] == "urgent":
        bench.step()  # what is above the threshold at its end was free at its beginning
        assert bench.scheduler.device_pool.num_free >= 7 or len(bench.running()) <= 2
    assert bench.scheduler.metrics.preemptions <= 6


@pytest.mark.parametrize("priority", [0, 5])
def test_a_lone_request_is_never_parked_ahead(priority: int) -> None:
    bench = Bench(preemption_threshold=0.0, urgent_window=100.0)
    bench.add("seen", 1, 1, priority=-1)
    bench.add("a", 20 * BLOCK, 60, priority=priority)
    while bench.scheduler.has_unfinished:
        assert not bench.step().preempted


@pytest.mark.parametrize(("token_s", "mode"), [(0.1, "recompute"), (10.0, "swap")])
def test_the_cheaper_way_out_is_taken(token_s: float, mode: str) -> None:
    bench = Bench(num_blocks=20)
    bench.scheduler.set_costs(MoveCosts(out_s=2.0, in_s=3.0, token_s=token_s))
    bench.add("a", 9 * BLOCK, 30)
    bench.add("b", 9 * BLOCK, 30)
    while not (plan := bench.step()).preempted:
        pass
    [(request, taken)] = plan.preempted
    [decision] = plan.decisions
    assert taken is decision.mode is PreemptionMode(mode)
    computed = decision.load.tokens
    assert request.request_id == decision.request_id == "b"
    assert 9 * BLOCK <= computed <= 11 * BLOCK
    assert decision.recompute_s == pytest.approx(token_s * computed)
    assert decision.swap_s == 5.0 * decision.load.blocks_out
    metrics = bench.scheduler.metrics
    assert metrics.decisions_swap == (mode == "swap") == metrics.preemptions_swap
    assert metrics.decisions_recompute == (mode == "recompute") == metrics.preemptions_recompute


def test_what_others_hold_is_not_computed_again() -> None:
    bench = Bench(num_blocks=24, enable_prefix_caching=True)
    bench.scheduler.set_costs(MoveCosts(1.0, 1.0, 100.0))
    bench.add("a", 8 * BLOCK + 1, 40)
    bench.step()
    bench.add("b", 8 * BLOCK + 1, 40)
    while not (plan := bench.step()).preempted:
        pass
    load = plan.decisions[0].load
    assert load.blocks_out - load.blocks_in == 8
    assert load.tokens <= load.blocks_in * BLOCK


def test_equal_costs_park() -> None:
    load = LeavingLoad(blocks_out=2, blocks_in=2, tokens=8)
    assert decide("a", load, MoveCosts(1.0, 1.0, 0.5)).mode is PreemptionMode.SWAP
    assert decide("a", load, MoveCosts(1.0, 1.1, 0.5)).mode is PreemptionMode.RECOMPUTE


@pytest.mark.parametrize("costs", [(-1.0, 0.0, 0.0), (0.0, math.nan, 0.0), (0.0, 0.0, math.inf)])
def test_costs_are_seconds(costs: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="finite number"):
        MoveCosts(*costs)


def test_moves_stay_bounded_under_steady_overload() -> None:
    """With no headroom at all, the worst case, and always more work than fits."""
    bench = Bench(num_blocks=60, max_num_seqs=16)
    requests = [bench.add(str(i), 3 * BLOCK, 4 * BLOCK + i % 13) for i in range(120)]
    oldest_parked = 0
    while bench.scheduler.has_unfinished:
        head = bench.scheduler.running.head
        plan = bench.step(1.0)
        oldest_parked += any(request is head for request, _ in plan.preempted)
    moves = [request.num_preemptions for request in requests]
    assert oldest_parked == 0
    assert sum(moves) / len(moves) <= 2
    assert max(moves) <= 4


def test_an_overload_that_lasts_longer_takes_no_more_moves_per_request() -> None:
    """Twice what can be served keeps coming; whoever ends early or late was parked as often."""
    bench = Bench(num_blocks=60, max_num_seqs=16)
    requests: list[Request] = []
    for number in range(800):
        requests.append(bench.add(str(number), 3 * BLOCK, 4 * BLOCK + number % 13))
        bench.step(1.0)
    ended = [request.num_preemptions for request in requests if request.is_finished]
    assert len(ended) < 0.6 * len(requests)
    parts = [ended[len(ended) * part // 3 : len(ended) * (part + 1) // 3] for part in range(3)]
    moves = [sum(part) / len(part) for part in parts]
    assert 0.2 < moves[0] <= 2
    assert max(moves) <= 1.25 * min(moves)
    assert max(ended) <= 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"urgent_window": -1.0},
        {"urgent_window": math.inf},
        {"background_tokens": -1},
        {"preemption_threshold": 1.5},
        {"preemption_threshold": math.nan},
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    [name] = wrong
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(num_blocks=4, **wrong)  # type: ignore[arg-type]


class TestWatermark:
    """A share of the pool stays free when somebody comes in beside others of his class."""

    def test_it_stays_free_for_those_who_run_to_grow_into(self) -> None:
        bench = Bench(watermark=0.3)  # 12 of 40 blocks
        for number in range(3):
            bench.add(str(number), 10 * BLOCK, 6 * BLOCK)
        bench.step()
        assert bench.running() == ["0", "1"]
        assert bench.scheduler.device_pool.num_free == 20
        while bench.scheduler.has_unfinished:
            plan = bench.step()
            assert not plan.preempted
            assert not plan.admitted or bench.scheduler.device_pool.num_free >= 12
        assert bench.scheduler.metrics.kv_usage_max > 0.7  # they did grow into it

    @pytest.mark.parametrize(("headroom", "left"), [(0.0, 8), (3.0, 8), (5.0, 10)])
    def test_the_larger_of_headroom_and_watermark_is_kept(self, headroom: float, left: int) -> None:
        """Two run, so the headroom is two times as many blocks; the newcomer takes all the rest."""
        for fits in (True, False):
            bench = Bench(watermark=0.2, headroom=headroom)
            bench.add("a", 4, 50)
            bench.add("b", 4, 50)
            bench.step()
            room = bench.scheduler.device_pool.num_free - 2 - left  # both are about to grow
            bench.add("new", room * BLOCK if fits else room * BLOCK + 1, 2)
            assert bool(bench.step().admitted) == fits

    @pytest.mark.parametrize("watermark", [0.5, 0.9, 0.999])
    def test_a_request_larger_than_what_it_leaves_has_its_turn(self, watermark: float) -> None:
        """Before those who came later, though they would fit beside whoever runs."""
        bench = Bench(watermark=watermark)
        bench.add("first", 4, 10)
        bench.step()
        bench.add("large", 36 * BLOCK, 4 * BLOCK)
        for number in range(5):
            bench.add(str(number), 4, 4)
        entered = []
        while bench.scheduler.has_unfinished:
            entered += [request.request_id for request in bench.step().admitted]
        assert entered == ["large", "0", "1", "2", "3", "4"]

    def test_beside_a_more_urgent_class_that_never_pauses_the_first_of_a_class_has_its_turn(
        self,
    ) -> None:
        bench = Bench(watermark=0.9, max_num_batched_tokens=1024)
        job = bench.add("job", 8 * BLOCK, 10, priority=5)
        for number in range(20):
            bench.add(f"u{number}", 4, 8)
            for _ in range(4):
                bench.step()
        assert job.is_finished

    def test_nobody_is_parked_for_it(self) -> None:
        """Less urgent work gives way when blocks run out, and not before."""
        bench = Bench(watermark=0.5)
        bench.add("batch", 24 * BLOCK, 40, priority=5)
        bench.step()
        bench.add("urgent", 10 * BLOCK, 4)
        plan = bench.step()
        assert [request.request_id for request in plan.admitted] == ["urgent"]
        assert not plan.preempted

    def test_parked_work_comes_back_above_it(self) -> None:
        """Once the short one has ended, there is room for the third, but not for two to grow."""
        moves = {}
        for watermark in (0.0, 0.5):
            bench = Bench(num_blocks=20, watermark=watermark)
            bench.add("short", 2 * BLOCK, 5 * BLOCK)
            bench.add("long", 3 * BLOCK, 12 * BLOCK)
            third = bench.add("third", 3 * BLOCK, 12 * BLOCK)
            while bench.scheduler.has_unfinished:
                bench.step()
            moves[watermark] = third.num_preemptions
        assert moves == {0.0: 2, 0.5: 1}
