"""Classes that change: by waiting, by running long, and by hand, in every queue."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.engine import EngineConfig
from layby.errors import ConfigError, InvalidRequestError
from layby.scheduling import Request, RequestStatus, Scheduler, SchedulerConfig
from tests.scheduling.harness import Harness, expected_tokens


def tiny(**config: object) -> Harness:
    """Blocks of four tokens, no headroom; a step takes a second."""
    defaults = {"num_blocks": 40, "block_size": 4, "headroom": 0, "num_swap_blocks": 40}
    return Harness(**{**defaults, **config})


def until(harness: Harness, request: Request, status: RequestStatus) -> None:
    """Step until the request is there."""
    for _ in range(500):
        if request.status is status:
            return
        harness.step()
    raise AssertionError(f"{request} never was {status.value}")


class TestByHand:
    """``Scheduler.set_priority`` reaches a request wherever it is; the next step knows."""

    def test_of_two_that_wait_the_later_one_comes_in_first(self) -> None:
        harness = tiny(max_num_seqs=1)
        running = harness.add(p=4, o=5)
        first, second = harness.add(p=4, o=5), harness.add(p=4, o=5)
        harness.step()
        assert harness.scheduler.set_priority(second.request_id, -1)
        assert list(harness.scheduler.waiting) == [second, first]
        # More urgent than the one that runs, too: it is parked in this very step.
        assert harness.step().preempted[0][0] is running
        assert harness.run() == [second, running, first]

    def test_a_running_one_that_sinks_makes_room_for_one_that_waits(self) -> None:
        harness = tiny(max_num_seqs=1)
        running = harness.add(p=4, o=20)
        waiting = harness.add(p=4, o=5)
        harness.step()
        assert not harness.step().preempted
        assert harness.scheduler.set_priority(running.request_id, 7)
        plan = harness.step()
        assert [victim for victim, _ in plan.preempted] == [running]
        assert plan.admitted == [waiting]
        harness.run()

    def test_a_running_one_that_rises_is_not_the_next_victim(self) -> None:
        """Both are steady; of two that outgrow the pool the later one would have to go."""
        harness = tiny(num_blocks=6)
        first, second = harness.add(p=7, o=12), harness.add(p=7, o=12)
        harness.step()
        harness.step()
        assert harness.scheduler.set_priority(second.request_id, -1)
        until(harness, first, RequestStatus.SWAPPED)
        harness.run()
        assert second.num_preemptions == 0

    def test_of_two_that_are_parked_the_later_one_comes_back_first(self) -> None:
        harness = tiny(max_num_seqs=2)
        first, second = harness.add(p=4, o=8, priority=5), harness.add(p=4, o=8, priority=5)
        harness.step()
        urgent = harness.add(p=4, o=6, n=2)
        harness.step()
        assert list(harness.scheduler.swapped) == [first, second]
        assert harness.scheduler.set_priority(second.request_id, 4)
        assert list(harness.scheduler.swapped) == [second, first]
        until(harness, second, RequestStatus.RUNNING)
        assert harness.plans[-1].resumed == [second, first]
        assert urgent.is_finished
        harness.run()

    def test_a_parked_one_that_sinks_lets_one_that_waits_go_ahead(self) -> None:
        harness = tiny(num_blocks=6, max_num_seqs=2)
        first, second = harness.add(p=7, o=12), harness.add(p=7, o=12)
        until(harness, second, RequestStatus.SWAPPED)
        waiting = harness.add(p=1, o=2)
        assert not harness.step().admitted
        assert harness.scheduler.set_priority(second.request_id, 1)
        assert harness.step().admitted == [waiting]
        harness.run()
        assert first.num_preemptions == 0

    def test_between_a_step_and_its_outcome(self) -> None:
        harness = tiny(demote_after_tokens=3)
        request = harness.add(p=4, o=12)
        harness.step()
        plan = harness.scheduler.schedule()
        assert harness.scheduler.set_priority(request.request_id, 5)
        harness.scheduler.check_integrity()
        harness.scheduler.update(plan, harness.shadow.execute(plan))
        harness.scheduler.check_integrity()
        assert request.rank == 5
        harness.run()

    def test_waiting_and_running_count_anew(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=4, demote_after_tokens=8)
        running = harness.add(p=4, o=40, priority=3)
        waiting = harness.add(p=4, o=40, priority=3)
        for _ in range(7):
            harness.step()
        assert (running.claim, waiting.rank) == (3, 2)
        for request in (running, waiting):
            harness.scheduler.set_priority(request.request_id, 3)
        assert (waiting.claim, waiting.rank) == (3, 3)
        for step in range(1, 9):
            harness.step()
            assert (waiting.rank, running.claim) == (3 - step // 4, 3)
        harness.step()
        assert running.claim == 4
        harness.run()

    def test_an_id_nobody_has_and_a_class_that_is_none(self) -> None:
        harness = tiny()
        request = harness.add(p=4, o=2)
        assert not harness.scheduler.set_priority("nobody", 1)
        for priority in (True, 1.0, "1", None):
            with pytest.raises(InvalidRequestError, match=r"R1 must be an integer"):
                harness.scheduler.set_priority("R1", priority)  # type: ignore[arg-type]
        harness.run()
        assert not harness.scheduler.set_priority(request.request_id, 1)


class TestAging:
    """Who waits rises a class per ``priority_aging`` seconds."""

    def test_a_waiting_request_rises_on_time(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=5)
        harness.add(p=4, o=30)
        waiting = harness.add(p=4, o=3, priority=2)  # at 0 s
        for now in range(1, 18):
            plan = harness.step()
            assert waiting.rank == 2 - now // 5
            assert [c[:3] for c in plan.class_changes] == (
                [(waiting, waiting.rank + 1, waiting.rank)] if now % 5 == 0 else []
            )
        assert harness.scheduler.metrics.promotions == 3
        harness.run()

    def test_several_classes_at_once_if_nobody_looked_for_long(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=0.3)
        harness.add(p=4, o=5)
        waiting = harness.add(p=4, o=3, priority=2)
        harness.now = 2.9
        harness.step()  # at 3.9 s: 13 times 0.3 s
        assert waiting.rank == 2 - 13
        assert harness.scheduler.metrics.promotions == 2 * 13
        harness.run()

    @pytest.mark.parametrize("arrival_time", [-1e300, -1e17, 1e300])
    def test_an_arrival_time_of_another_clock_ends_nothing(self, arrival_time: float) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=0.001)
        harness.add(p=4, o=5)
        harness.add(p=4, o=3, arrival_time=arrival_time)
        assert len(harness.run()) == 2

    def test_running_does_not_count_and_parking_goes_on_where_waiting_ended(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=10)
        harness.add(p=4, o=6)
        patient = harness.add(p=4, o=40, priority=9)
        until(harness, patient, RequestStatus.RUNNING)
        waited_s = patient.waited_s
        assert waited_s == harness.now == 7
        for _ in range(20):
            harness.step()
        assert patient.rank == 9
        harness.add(p=4, o=30)
        until(harness, patient, RequestStatus.SWAPPED)
        parked_at = harness.now
        while patient.rank == 9:
            harness.step()
        assert harness.now == parked_at + 3  # seconds: 7 + 3 make a class
        assert patient.status is RequestStatus.SWAPPED
        harness.run()

    def test_of_an_earlier_process_only_what_it_waited_counts(self) -> None:
        """Not its age, of which most was running, or nobody's time at all."""
        harness = tiny(max_num_seqs=1, priority_aging=10)
        harness.now = 5000.0
        ran, waited = (
            harness.add(p=4, o=9, priority=5, arrival_time=1400.0 + k, waits_since=5000.0 - 25 * k)
            for k in range(2)
        )
        urgent = harness.add(p=4, o=3)
        harness.step()  # at 5001 s
        assert (ran.rank, waited.rank) == (5, 5 - 2)
        assert harness.scheduler.waited_s(waited) == 25 + 1
        assert urgent.status is RequestStatus.RUNNING
        until(harness, waited, RequestStatus.RUNNING)
        assert ran.status is RequestStatus.WAITING  # though it came first
        harness.run()

    def test_after_a_change_by_hand_waiting_counts_anew(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=10)
        harness.add(p=4, o=40)
        waiting = harness.add(p=4, o=3, priority=5, arrival_time=-90.0, waits_since=-30.0)
        harness.step()
        assert harness.scheduler.waited_s(waiting) == 31
        harness.scheduler.set_priority(waiting.request_id, 5)
        harness.step()
        assert harness.scheduler.waited_s(waiting) == 1
        assert waiting.rank == 5
        harness.run()

    def test_once_risen_it_comes_back_before_newcomers_and_stays(self) -> None:
        """Else every newcomer would park it again, however long it had waited."""
        harness = tiny(max_num_seqs=1, priority_aging=5)
        job = harness.add(p=4, o=20, priority=2)
        harness.step()
        while not job.is_finished:
            if len(harness.scheduler.waiting) < 2:
                harness.add(p=4, o=4)
            harness.step()
            assert harness.now < 80
        assert job.num_preemptions == 1
        harness.run()

    def test_those_who_wait_never_park_those_of_their_class_who_run(self) -> None:
        """With one number for order and claims, thirty jobs would take turns every 3 s."""
        harness = tiny(max_num_seqs=2, priority_aging=3, num_blocks=100)
        jobs = [harness.add(p=4, o=20, priority=5) for _ in range(30)]
        assert harness.run() == jobs
        assert harness.scheduler.metrics.preemptions == 0
        assert harness.scheduler.metrics.promotions > 100

    def test_a_recomputed_request_stands_behind_nobody_who_came_later(self) -> None:
        """They have waited all the time and risen; it has run."""
        harness = tiny(num_blocks=12, num_swap_blocks=0, max_num_seqs=2, priority_aging=3)
        first, second = (harness.add(p=8, o=30, priority=5) for _ in range(2))
        later = [harness.add(p=8, o=4, priority=5) for _ in range(5)]
        until(harness, second, RequestStatus.RUNNING)
        until(harness, second, RequestStatus.WAITING)
        assert later[0].rank < 5
        assert list(harness.scheduler.waiting) == [second, *later]
        harness.run()
        assert first.num_preemptions == 0

    def test_nothing_is_kept_of_who_has_gone(self) -> None:
        harness = tiny(max_num_seqs=1, priority_aging=1000)
        for number in range(50):
            harness.add(p=4, o=2, name=str(number))
        for number in range(10, 50):
            harness.scheduler.abort(str(number))
        harness.run()
        assert harness.scheduler._classes.next_rise == math.inf


class TestLongRuns:
    """A request sinks a class per ``demote_after_tokens`` output tokens."""

    @pytest.mark.parametrize("n", [1, 3])
    @pytest.mark.parametrize("every", [1, 3, 4, 7, 100])
    def test_it_sinks_with_the_very_token(self, every: int, n: int) -> None:
        harness = tiny(num_blocks=100, max_num_seqs=4, demote_after_tokens=every)
        request = harness.add(p=6, o=30, n=n, priority=2)
        harness.add(p=3, o=30)
        while not request.is_finished:
            tokens = request.sequences[0].num_output_tokens
            harness.now += 1
            plan = harness.scheduler.schedule()
            assert request.rank == 2 + tokens // every
            harness.scheduler.check_integrity()
            harness.scheduler.update(plan, harness.shadow.execute(plan))
            harness.scheduler.check_integrity()
        harness.run()

    @pytest.mark.parametrize("num_swap_blocks", [0, 40])
    def test_it_counts_across_preemptions(self, num_swap_blocks: int) -> None:
        harness = tiny(num_blocks=12, num_swap_blocks=num_swap_blocks, demote_after_tokens=5)
        requests = [harness.add(p=7, o=24) for _ in range(3)]
        while harness.scheduler.has_unfinished:
            tokens = [request.sequences[0].num_output_tokens for request in requests]
            alive = [not request.is_finished for request in requests]
            harness.step()
            for request, before, was_alive in zip(requests, tokens, alive, strict=True):
                if was_alive:
                    now = request.sequences[0].num_output_tokens
                    assert before // 5 <= request.rank <= now // 5
        assert harness.scheduler.metrics.preemptions > 0
        assert all(request.claim == 4 for request in requests)
        for request in requests:
            seq = request.sequences[0]
            assert seq.output_tokens == expected_tokens(seq.tokens[:7], 0, 24)

    def test_a_long_one_gives_way_to_a_short_one(self) -> None:
        harness = tiny(max_num_seqs=1, demote_after_tokens=10)
        long = harness.add(p=4, o=30)
        harness.step()
        short = harness.add(p=4, o=5)
        assert harness.run() == [short, long]
        [change] = [c for plan in harness.plans for c in plan.class_changes if c.request is long][
            :1
        ]
        assert (change.before, change.after, change.cause.value) == (0, 1, "ran long")
        assert harness.scheduler.metrics.demotions == 2

    def test_equals_go_on_side_by_side(self) -> None:
        harness = tiny(max_num_seqs=2, demote_after_tokens=2, num_blocks=60)
        for _ in range(2):
            harness.add(p=4, o=20)
        harness.run()
        assert harness.scheduler.metrics.preemptions == 0

    def test_no_quiet_step_passes_over_a_demotion(self) -> None:
        harness = tiny(demote_after_tokens=6)
        request = harness.add(p=4, o=30)
        while request.sequences[0].num_output_tokens < 3:
            harness.step()
        scheduler = harness.scheduler
        assert scheduler.quiet_steps() == 3
        scheduler.skip(3, lambda seq: 7)
        scheduler.check_integrity()
        assert (request.rank, scheduler.quiet_steps()) == (0, 0)
        plan = scheduler.schedule()
        assert request.rank == 1
        scheduler.update(plan, [7])
        assert scheduler.quiet_steps() == 5


def test_quiet_steps_end_when_somebody_rises() -> None:
    harness = tiny(max_num_seqs=1, priority_aging=100)
    harness.add(p=4, o=30)
    waiting = harness.add(p=4, o=3)
    scheduler = harness.scheduler
    for _ in range(4):
        harness.step()
    assert waiting.arrival_time is not None
    assert scheduler.quiet_steps() > 0
    assert scheduler.quiet_until() == waiting.arrival_time + 100
    harness.now = waiting.arrival_time + 100
    assert scheduler.quiet_steps() == 0
    harness.step()
    assert waiting.rank == -1
    assert scheduler.quiet_until() == waiting.arrival_time + 200
    scheduler.abort(waiting.request_id)
    harness.step()
    assert scheduler.quiet_until() == math.inf


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority_aging": 0}, "priority_aging must be a finite number of seconds from 0.001 up"),
        ({"priority_aging": float("nan")}, "priority_aging must be .* got nan"),
        ({"priority_aging": True}, "priority_aging must be"),
        ({"priority_aging": "3"}, "priority_aging must be"),
        ({"demote_after_tokens": 0}, "demote_after_tokens must be an integer of at least 1, got 0"),
        ({"demote_after_tokens": 1.5}, "demote_after_tokens must be an integer"),
    ],
)
def test_settings_that_cannot_work(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(num_blocks=4, **fields)  # type: ignore[arg-type]


OF_AN_ENGINE: dict[str, Any] = {
    option.name: option.default
    for option in fields(EngineConfig)
    if option.name
    in ("headroom", "watermark", "urgent_window", "background_tokens", "preemption_threshold")
}
"""What ``layby serve`` leaves to urgent classes by default."""


class Flood:
    """A high class that always has more work than fits: ``backlog`` of its requests wait, always.

    A step takes a second of its own clock. Waits are those of the low class: the seconds it spent
    waiting or parked without interruption.
    """

    def __init__(self, *, backlog: int, p: int, o: int, **config: object) -> None:
        self.now = 0.0
        fields: dict[str, object] = {"num_blocks": 1000, "block_size": 4, "headroom": 0, **config}
        self.config = SchedulerConfig(**fields)  # type: ignore[arg-type]
        self.scheduler = Scheduler(self.config, clock=lambda: self.now)
        self.backlog, self.p, self.o = backlog, p, o
        self.low: list[Request] = []
        self.waits: list[float] = []
        self._off_since: dict[Request, float] = {}
        self._num_added = 0

    def add(self, priority: int, p: int, o: int) -> Request:
        self._num_added += 1
        prompt = [self._num_added * 100 + i for i in range(p)]
        request = Request(str(self._num_added), prompt, max_tokens=o, priority=priority)
        self.scheduler.add_request(request)
        return request

    def add_low(self, priority: int, p: int, o: int) -> Request:
        request = self.add(priority, p, o)
        self.low.append(request)
        self._off_since[request] = self.now
        return request

    def step(self, *, is_flooded: bool = True) -> None:
        low = {request.request_id for request in self.low}
        high_waits = sum(r.request_id not in low for r in self.scheduler.waiting)
        for _ in range(high_waits, self.backlog if is_flooded else 0):
            self.add(0, self.p, self.o)
        plan = self.scheduler.schedule()
        for request in (*plan.admitted, *plan.resumed):
            if request in self._off_since:
                self.waits.append(plan.now - self._off_since.pop(request))
        for request, _ in plan.preempted:
            if request.request_id in low:
                self._off_since[request] = plan.now
        self.scheduler.update(plan, [7] * plan.num_samples)
        self.now += 1.0

    @property
    def worst_wait_s(self) -> float:
        """Of those that ended, and those that go on."""
        return max([*self.waits, *(self.now - since for since in self._off_since.values())])


class TestBoundedWait:
    """The bound of docs/parking.md: (classes to rise) x aging + what was there before."""

    AGING_S, CLASS, BACKLOG, SEATS, TOKENS = 40.0, 3, 20, 4, 10

    def flood(self, **config: object) -> Flood:
        flood = Flood(backlog=self.BACKLOG, p=4, o=self.TOKENS, max_num_seqs=self.SEATS, **config)
        for step in range(6000):
            if step % 250 == 100:
                flood.add_low(self.CLASS, 4, self.TOKENS)
            flood.step()
        return flood

    def test_low_class_under_a_flood(self) -> None:
        flood = self.flood(priority_aging=self.AGING_S)
        # Ahead of it once it has risen: the backlog of then, who runs, and one of its own class.
        rounds = -(-(self.BACKLOG + 1 + self.SEATS) // self.SEATS)
        bound_s = self.CLASS * self.AGING_S + rounds * self.TOKENS
        assert flood.worst_wait_s <= bound_s
        assert flood.worst_wait_s > bound_s / 2  # the flood is one
        assert sum(request.is_finished for request in flood.low) >= len(flood.low) - 1

    def test_without_aging_it_starves(self) -> None:
        flood = self.flood()
        assert flood.worst_wait_s == 5900
        assert not any(request.is_finished for request in flood.low)

    @pytest.mark.parametrize("num_swap_blocks", [0, 400])
    @pytest.mark.parametrize("aging_s", [AGING_S, None])
    def test_a_job_that_is_parked_by_the_flood(
        self, num_swap_blocks: int, aging_s: float | None
    ) -> None:
        """In a pool too small for everybody: each of its waits is bounded, and it ends."""
        flood = Flood(
            backlog=self.BACKLOG,
            p=20,
            o=20,
            num_blocks=26,
            num_swap_blocks=num_swap_blocks,
            max_num_seqs=4,
            priority_aging=aging_s,
        )
        job = flood.add_low(self.CLASS, 40, 40)
        for _ in range(10):
            flood.step(is_flooded=False)
        while flood.now < 3000 and not job.is_finished:
            flood.step()
        assert job.num_preemptions > 0
        if aging_s is None:
            assert not job.is_finished
            assert flood.worst_wait_s > 2900
            return
        # At least two of the high class run at a time, of 20 steps and some of prefill each.
        bound_s = self.CLASS * aging_s + (self.BACKLOG + 4) / 2 * 25
        assert job.is_finished
        assert flood.worst_wait_s <= bound_s

    @pytest.mark.parametrize("aging_s", [AGING_S, None])
    def test_a_long_one_that_sinks_under_a_flood_of_its_own_class(
        self, aging_s: float | None
    ) -> None:
        flood = Flood(
            backlog=self.BACKLOG,
            p=4,
            o=self.TOKENS,
            max_num_seqs=self.SEATS,
            num_swap_blocks=400,
            priority_aging=aging_s,
            demote_after_tokens=30,
        )
        long = flood.add_low(0, 4, 200)
        while flood.now < 3000 and not long.is_finished:
            flood.step()
        if aging_s is None:
            assert long.sequences[0].num_output_tokens == 30
            assert flood.worst_wait_s > 2900
            return
        rounds = -(-(self.BACKLOG + self.SEATS) // self.SEATS)
        assert long.is_finished
        assert long.claim == 200 // 30
        assert flood.worst_wait_s <= long.claim * aging_s + rounds * self.TOKENS

    @pytest.mark.parametrize("demote_after_tokens", [None, 12])
    @pytest.mark.parametrize(("prompt", "output"), [(4, 10), (40, 20), (200, 6)])
    def test_with_the_settings_of_an_engine(
        self, prompt: int, output: int, demote_after_tokens: int | None
    ) -> None:
        """Blocks are short, and room is kept for the high class, of which there is always some.

        Jobs of the low class have prompts that take several steps at --background-tokens.
        """
        flood = Flood(
            backlog=self.BACKLOG,
            p=20,
            o=20,
            num_blocks=70,
            num_swap_blocks=400,
            priority_aging=self.AGING_S,
            demote_after_tokens=demote_after_tokens,
            **OF_AN_ENGINE,
        )
        for step in range(3000):
            if step % 300 == 10 and step < 2400:
                flood.add_low(self.CLASS, prompt, output)
            flood.step()
        # At least five of ten blocks run at a time, for 20 steps and a few of prefill.
        rounds = -(-(self.BACKLOG + 5 + 1) // 5)
        window_s = OF_AN_ENGINE["urgent_window"]
        assert all(request.is_finished for request in flood.low)
        assert flood.worst_wait_s <= self.CLASS * self.AGING_S + window_s + rounds * 25
        assert flood.worst_wait_s >= (self.CLASS - 1) * self.AGING_S  # the flood is one

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10**9),
        wait=st.integers(0, 2),
        num_blocks=st.sampled_from([30, 50]),
        num_swap_blocks=st.sampled_from([0, 20, 400]),
        watermark=st.sampled_from([0.0, 0.4]),
        urgent_window=st.sampled_from([0.0, 30.0]),
        preemption_threshold=st.sampled_from([1.0, 0.7]),
        demote_after_tokens=st.sampled_from([None, 5]),
    )
    def test_once_it_has_risen_nobody_who_comes_later_makes_any_difference(
        self, seed: int, wait: int, **config: Any
    ) -> None:
        """What the bound rests on: then it waits for a fixed set of requests, and for no others."""
        risen_at, entered_at = mixed_flood(seed, wait, config)
        if risen_at < math.inf:
            assert mixed_flood(seed, wait, config, ends_at=risen_at) == (risen_at, entered_at)


def mixed_flood(
    seed: int, wait: int, config: dict[str, Any], *, ends_at: float = math.inf
) -> tuple[float, float]:
    """Requests of all sizes and classes, from 0 down, of which class 0 alone is more than fits;
    none come after 300 s.

    Returns:
        When a job of class 3, which comes in the middle, is of class 0 or better in its wait of
        that number, and when it comes in then; infinity if that is never.
    """
    rng = random.Random(seed)
    flood = Flood(backlog=0, p=0, o=0, max_num_seqs=8, priority_aging=15.0, **config)
    job, risen_at = None, math.inf
    while flood.scheduler.has_unfinished or flood.now <= 100:
        if flood.now < min(300, ends_at) and rng.random() < 0.4:
            priority = rng.choice([0, 0, 0, 0, 1, 3, 5])
            flood.add(priority, rng.choice([3, 20, 50]), rng.choice([2, 20, 40]))
        if flood.now == 100:
            job = flood.add_low(3, rng.choice([5, 60]), 50)
        flood.step()
        if job is not None:
            if len(flood.waits) > wait:
                return risen_at, flood.now - 1
            is_away = job.status in (RequestStatus.WAITING, RequestStatus.SWAPPED)
            if risen_at == math.inf and len(flood.waits) == wait and is_away and job.rank <= 0:
                risen_at = flood.now
    return risen_at, math.inf


class TestAParkedOneOfABetterClaim:
    """It may park less urgent work to come back, as one that waits may to come in."""

    def parked(self, **config: object) -> tuple[Harness, Request, Request]:
        """One that runs, and one of the same class that was parked; there is room for one."""
        harness = tiny(**{"num_blocks": 8, **config})
        runs, parked = harness.add(p=11, o=20, priority=5), harness.add(p=11, o=20, priority=5)
        until(harness, parked, RequestStatus.SWAPPED)
        return harness, runs, parked

    def test_it_takes_the_place_of_one_that_runs(self) -> None:
        harness, runs, parked = self.parked()
        assert not harness.step().resumed
        harness.scheduler.set_priority(parked.request_id, 4)
        plan = harness.step()
        assert plan.resumed == [parked]
        assert [victim for victim, _ in plan.preempted] == [runs]
        assert harness.run() == [parked, runs]

    def test_the_same_if_the_one_that_runs_sinks(self) -> None:
        harness, runs, parked = self.parked()
        harness.scheduler.set_priority(runs.request_id, 6)
        assert harness.step().resumed == [parked]
        assert harness.run() == [parked, runs]

    def test_it_takes_a_seat_where_blocks_are_no_matter(self) -> None:
        harness = tiny(max_num_seqs=2)
        first, second = harness.add(p=4, o=30, priority=5), harness.add(p=4, o=30, priority=5)
        harness.step()
        harness.add(p=4, o=30)
        until(harness, second, RequestStatus.SWAPPED)
        harness.scheduler.set_priority(second.request_id, 3)
        plan = harness.step()
        assert (plan.resumed, [r for r, _ in plan.preempted]) == ([second], [first])
        harness.run()

    def test_nobody_leaves_for_an_equal_however_long_that_one_was_parked(self) -> None:
        harness, runs, parked = self.parked(priority_aging=1.0)
        while not runs.is_finished:
            plan = harness.step()
            assert not plan.preempted
        assert parked.rank < 0
        harness.run()

    def test_nobody_leaves_in_vain(self) -> None:
        """What the less urgent one holds is not enough; another equal holds the rest."""
        harness = tiny(num_blocks=14)
        equal = harness.add(p=15, o=30, priority=3)
        parked = harness.add(p=15, o=30, priority=3)
        until(harness, parked, RequestStatus.SWAPPED)
        small = harness.add(p=4, o=20, priority=2)
        harness.step()
        harness.scheduler.set_priority(small.request_id, 9)
        for _ in range(5):
            assert not harness.step().preempted
        assert small.status is equal.status is RequestStatus.RUNNING
        harness.run()

    def test_with_a_full_swap_pool_its_victim_is_recomputed(self) -> None:
        """As the victim of one that waits: nobody is kept waiting for lack of swap space."""
        harness, runs, parked = self.parked(num_swap_blocks=4)
        harness.scheduler.set_priority(parked.request_id, 0)
        plan = harness.step()
        assert plan.resumed == [parked]
        assert [(victim, mode.value) for victim, mode in plan.preempted] == [(runs, "recompute")]
        assert harness.run() == [parked, runs]
        for request in (parked, runs):
            tokens = request.sequences[0].tokens
            assert tokens[11:] == expected_tokens(tokens[:11], 0, 20)

    def test_its_own_place_in_ram_is_not_given_to_its_victim(self) -> None:
        """It lies on disk as well, so RAM could be had: then it could not come back at once."""
        harness, runs, parked = self.parked(num_swap_blocks=5, num_disk_blocks=20)
        harness.step()
        harness.step()
        assert parked.sequences[0].disk_table
        harness.scheduler.set_priority(parked.request_id, 0)
        plan = harness.step()
        assert plan.resumed == [parked]
        assert [(victim, mode.value) for victim, mode in plan.preempted] == [(runs, "recompute")]
        harness.run()

    def test_while_it_is_on_disk_nobody_leaves_for_it(self) -> None:
        harness, runs, parked = self.parked(num_swap_blocks=6, num_disk_blocks=20)
        harness.step()
        urgent = harness.add(p=16, o=16)  # its victim takes the RAM
        until(harness, runs, RequestStatus.SWAPPED)
        harness.ends_transfers = False
        harness.scheduler.set_priority(parked.request_id, -1)
        for _ in range(3):
            assert not harness.step().preempted
            assert not parked.sequences[0].swap_table
        harness.ends_transfers = True
        until(harness, parked, RequestStatus.RUNNING)
        assert urgent.status is not RequestStatus.RUNNING
        harness.run()

    def test_those_who_have_just_left_do_not_come_back_in_its_shadow(self) -> None:
        """It needs less than its victim leaves; the victim's equal fits, and must wait."""
        harness = tiny(num_blocks=16)
        small = harness.add(p=3, o=30, priority=5)
        harness.step()
        requests = [harness.add(p=15, o=28, priority=5) for _ in range(3)]
        until(harness, requests[2], RequestStatus.SWAPPED)
        harness.scheduler.set_priority(requests[2].request_id, 1)
        harness.step()  # the harness asserts that nobody goes round
        assert requests[2].status is RequestStatus.RUNNING
        assert len(harness.run()) == 4
        assert small.is_finished

    def test_long_answers_take_turns_as_they_sink_and_no_more(self) -> None:
        """One leaves at most once for each class that it sinks; and the latest for lack of room."""
        harness = tiny(num_blocks=14, demote_after_tokens=8)
        requests = [harness.add(p=15, o=33) for _ in range(8)]
        harness.run()
        assert max(request.num_preemptions for request in requests) <= 33 // 8 + 2
