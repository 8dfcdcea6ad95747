"""The rules of a step, one by one, on tiny pools."""

from __future__ import annotations

import pytest

from layby.errors import ConfigError, InvalidRequestError
from layby.scheduling import (
    IllegalTransitionError,
    PreemptionMode,
    Request,
    RequestQueue,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulingBudget,
)
from tests.scheduling.harness import Harness, expected_tokens


def tiny(**config: object) -> Harness:
    """Blocks of four tokens, a handful of them, no headroom."""
    return Harness(**{"block_size": 4, "headroom": 0, "num_swap_blocks": 20, **config})


def park(harness: Harness, request: Request) -> None:
    """Step until the request is parked."""
    for _ in range(100):
        if request.status is RequestStatus.SWAPPED:
            return
        harness.step()
    raise AssertionError(f"{request} was never parked")


class TestStandFast:
    """Running sequences keep place, token and blocks before anybody else is looked at."""

    def test_a_resume_never_takes_the_block_that_running_work_needs_in_this_step(self) -> None:
        """Else the resumed request pushes the running one out, or is pushed out itself."""
        harness = tiny(num_blocks=6)
        first = harness.add(p=7, o=17)
        second = harness.add(p=7, o=8)
        park(harness, second)
        while not first.is_finished:
            plan = harness.step()
            assert not (plan.resumed and plan.preempted)
        assert first.num_preemptions == 0
        assert second.num_preemptions == 1
        harness.run()

    def test_prefill_chunks_leave_a_token_for_every_running_sequence(self) -> None:
        harness = tiny(num_blocks=40, max_num_batched_tokens=6, max_num_seqs=4)
        decoding = [harness.add(p=1, o=30) for _ in range(3)]
        harness.step()
        long = harness.add(p=60, o=2)
        while not long.sequences[0].num_output_tokens:
            plan = harness.step()
            tokens = {item.sequence.request: item.num_tokens for item in plan.scheduled}
            assert [tokens[request] for request in decoding] == [1, 1, 1]
            assert tokens[long] == 3


class TestSwappedFirst:
    """Parked work comes back before new work, in order, and only with room to run."""

    def test_nobody_overtakes_a_parked_head_that_does_not_fit(self) -> None:
        harness = tiny(num_blocks=10)
        running = harness.add(p=12, o=28)
        big = harness.add(p=20, o=12)
        small = harness.add(p=3, o=4)
        park(harness, big)
        assert small.is_finished or small.status is RequestStatus.SWAPPED
        late = harness.add(p=1, o=1)
        while not running.is_finished:
            plan = harness.step()
            assert late not in plan.admitted
        harness.run()
        assert late in harness.finished

    def test_the_headroom_asks_for_a_free_block_per_running_sequence(self) -> None:
        def steps_until_resumed(headroom: float) -> int:
            harness = tiny(num_blocks=8, headroom=headroom)
            harness.add(p=4, o=8)
            harness.add(p=4, o=24)
            parked = harness.add(p=4, o=20)
            park(harness, parked)
            harness.run()
            return next(plan.step for plan in harness.plans if parked in plan.resumed)

        assert steps_until_resumed(0) < steps_until_resumed(3)

    def test_blocks_leaving_the_swap_pool_stay_taken_until_the_step_is_done(self) -> None:
        """Swap-outs run before swap-ins: parked content would be overwritten before it is read."""
        harness = tiny(num_blocks=6)
        harness.add(p=7, o=12)
        parked = harness.add(p=7, o=12)
        park(harness, parked)
        scheduler = harness.scheduler
        while True:
            harness.now += 1
            plan = scheduler.schedule()
            if plan.resumed:
                break
            scheduler.update(plan, harness.shadow.execute(plan))
        slots = {move.src for move in plan.swap_in}
        assert scheduler.swap_pool.num_held >= len(slots)
        scheduler.update(plan, harness.shadow.execute(plan))
        assert scheduler.swap_pool.num_held == 0


class TestPriorities:
    """A smaller number is more urgent."""

    def test_an_urgent_arrival_parks_less_urgent_running_work(self) -> None:
        harness = tiny(num_blocks=6)
        batch = harness.add(p=16, o=8, priority=5)
        harness.step()
        urgent = harness.add(p=16, o=4, priority=0)
        plan = harness.step()
        assert plan.preempted == [(batch, PreemptionMode.SWAP)]
        assert plan.admitted == [urgent]
        harness.run()
        assert harness.finished == [urgent, batch]

    def test_it_parks_nobody_if_even_that_would_not_let_it_in(self) -> None:
        harness = tiny(num_blocks=8)
        same_class = harness.add(p=12, o=12, priority=0)
        batch = harness.add(p=4, o=12, priority=5)
        harness.step()
        urgent = harness.add(p=24, o=4, priority=0)
        plan = harness.step()
        assert plan.preempted == []
        assert urgent.status is RequestStatus.WAITING
        harness.run()
        assert harness.finished.index(same_class) < harness.finished.index(urgent)
        assert batch in harness.finished

    def test_equal_urgency_never_parks_anybody(self) -> None:
        harness = tiny(num_blocks=6)
        harness.add(p=16, o=4)
        harness.step()
        harness.add(p=16, o=4)
        assert harness.step().preempted == []

    def test_nobody_is_parked_for_a_tokens_share_of_one_step(self) -> None:
        """With memory to spare, a long prefill of a low class was thrown out again and again."""
        harness = Harness(num_blocks=2000, max_num_batched_tokens=512, enable_prefix_caching=False)
        low = harness.add(p=10_000, o=4, priority=1)
        while not low.is_finished:
            if harness.scheduler.metrics.requests_accepted < 1 + len(harness.plans) // 3:
                harness.add(p=8, o=2, priority=0)
            harness.step()
        assert low.num_preemptions == 0
        assert low.finish_time is not None
        assert low.finish_time < 50

    def test_nobody_is_parked_for_a_newcomer_that_reuses_the_victims_blocks(self) -> None:
        """They were counted twice, as free of charge and as freed; the newcomer stayed out."""
        harness = Harness(num_blocks=18, num_swap_blocks=40, headroom=0, max_num_seqs=8)
        harness.add(p=100, o=30, priority=0)
        shared = list(range(160))
        low = harness.add(p=160, o=30, priority=1, prompt=shared)
        for _ in range(3):
            harness.step()
        newcomer = harness.add(p=192, o=1, priority=0, prompt=shared + [7] * 32)
        plan = harness.step()
        assert not plan.preempted or newcomer in plan.admitted
        harness.run()
        assert low.is_finished

    def test_a_more_urgent_waiting_request_goes_ahead_of_parked_ones(self) -> None:
        harness = tiny(num_blocks=6)
        harness.add(p=7, o=12, priority=1)
        parked = harness.add(p=7, o=12, priority=1)
        park(harness, parked)
        urgent = harness.add(p=4, o=2, priority=0)
        assert urgent in harness.step().admitted
        harness.run()


class TestWaitingLast:
    """New work comes in whole or not at all, when nobody has a better claim."""

    def test_nothing_is_admitted_in_a_step_that_preempted(self) -> None:
        harness = tiny(num_blocks=6, preemption_mode="recompute")
        harness.add(p=7, o=16)
        harness.add(p=7, o=16)
        while not (plan := harness.step()).preempted:
            pass
        harness.add(p=1, o=1)
        assert plan.admitted == []

    def test_a_long_prompt_leaves_half_of_a_step_to_those_who_wait(self) -> None:
        """A short request came behind all the steps of a long prefill of its own class."""
        harness = Harness(num_blocks=2000, max_num_batched_tokens=512)
        long = harness.add(p=10_000, o=2)
        harness.step()
        short = harness.add(p=100, o=2)
        plan = harness.step()
        assert plan.admitted == [short]
        tokens = {item.sequence.request: item.num_tokens for item in plan.scheduled}
        assert tokens == {long: 412, short: 100}  # and gets back what the short one did not need
        harness.run()

    def test_decode_and_prefill_share_a_step(self) -> None:
        harness = tiny(num_blocks=20)
        harness.add(p=4, o=8)
        harness.step()
        harness.add(p=9, o=2)
        assert [item.num_tokens for item in harness.step().scheduled] == [1, 9]

    def test_a_waiting_head_that_does_not_fit_is_not_overtaken(self) -> None:
        harness = tiny(num_blocks=6)
        harness.add(p=16, o=4)
        harness.step()
        big, small = harness.add(p=20, o=2), harness.add(p=1, o=1)
        harness.step()
        assert {big, small} == set(harness.scheduler.waiting)
        harness.run()


class TestSharedPrefixes:
    """Full blocks are found by content, and freed ones until they are overwritten."""

    def test_a_repeated_prompt_computes_only_what_follows_its_full_blocks(self) -> None:
        harness = tiny(num_blocks=20)
        prompt = list(range(10))
        for start in (0, 8, 8):
            harness.add(10, 1, prompt=prompt)
            [item] = harness.step().scheduled
            assert item.start == start

    @pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9])
    def test_at_least_one_prompt_token_is_computed(self, length: int) -> None:
        harness = tiny(num_blocks=20)
        for start in (0, (length - 1) // 4 * 4):
            harness.add(length, 1, prompt=list(range(length)))
            [item] = harness.step().scheduled
            assert item.start == start

    def test_another_salt_sees_nothing(self) -> None:
        harness = tiny(num_blocks=20)
        for salt, start in (("a", 0), ("b", 0), ("a", 8)):
            harness.add(10, 1, prompt=list(range(10)), cache_salt=salt)
            assert harness.step().scheduled[0].start == start

    def test_the_least_recently_used_prefix_is_overwritten_first(self) -> None:
        harness = tiny(num_blocks=6)
        old, new = [1] * 8 + [9], [2] * 8 + [9]
        for prompt in (old, new, old):
            harness.add(9, 1, prompt=prompt)
            harness.step()
        harness.add(12, 1)
        harness.step()
        harness.add(9, 1, prompt=old)
        assert harness.step().scheduled[0].start == 8
        harness.add(9, 1, prompt=new)
        assert harness.step().scheduled[0].start < 8

    def test_content_still_on_the_device_is_not_copied_back(self) -> None:
        harness = tiny(num_blocks=6)
        first = harness.add(p=7, o=12)
        parked = harness.add(p=7, o=12)
        park(harness, parked)
        harness.scheduler.abort(first.request_id)
        plan = harness.step()
        assert plan.resumed == [parked]
        assert len(plan.swap_in) < harness.scheduler.metrics.swapped_out_blocks
        assert harness.scheduler.metrics.swap_in_reused_blocks > 0
        harness.run()

    def test_off_means_off(self) -> None:
        harness = tiny(num_blocks=20, enable_prefix_caching=False)
        for _ in range(2):
            harness.add(10, 1, prompt=list(range(10)))
            assert harness.step().scheduled[0].start == 0


class TestSamples:
    """Samples share the prompt's blocks and copy the partly filled one on the first write."""

    def test_the_prompt_is_computed_once_and_its_tail_copied_for_all_but_one(self) -> None:
        harness = tiny(num_blocks=20)
        request = harness.add(p=6, o=3, n=3)
        first, second = harness.step(), harness.step()
        assert (first.num_tokens, first.num_samples) == (6, 3)
        assert len(second.copy) == 2
        assert len({move.src for move in second.copy}) == 1
        assert harness.scheduler.memory.held_blocks(request) == 1 + 3
        harness.run()
        assert len({tuple(seq.output_tokens) for seq in request.sequences}) == 3

    def test_samples_end_one_by_one_and_their_blocks_go_with_them(self) -> None:
        harness = tiny(num_blocks=20)
        request = harness.add(p=6, o=9, n=3)
        harness.step()
        harness.step()
        assert not harness.scheduler.finish_sequence(request.sequences[1])
        assert harness.scheduler.memory.held_blocks(request) == 1 + 2
        assert harness.run() == [request]

    def test_parked_samples_still_share(self) -> None:
        harness = tiny(num_blocks=8)
        harness.add(p=7, o=14)
        group = harness.add(p=6, o=10, n=2)
        park(harness, group)
        assert harness.scheduler.swap_pool.num_held < sum(
            len(seq.swap_table) for seq in group.sequences
        )
        harness.run()


class TestPolicies:
    """What the policies for comparison do differently."""

    def _busy(self, policy: str) -> Harness:
        harness = Harness(num_blocks=12, num_swap_blocks=40, policy=policy)
        requests = [harness.add(p=40, o=80) for _ in range(5)]
        harness.run()
        for request in requests:
            prompt = request.sequences[0].tokens[:40]
            assert request.sequences[0].output_tokens == expected_tokens(prompt, 0, 80)
        return harness

    def test_running_first_resumes_only_when_nothing_was_preempted(self) -> None:
        harness = self._busy("running-first")
        assert harness.scheduler.metrics.preemptions_swap > 0
        for plan in harness.plans:
            assert not (plan.resumed and plan.preempted)
            scheduled = {item.sequence.request for item in plan.scheduled}
            assert scheduled.issuperset(plan.resumed)

    def test_running_first_does_not_wait_for_an_urgent_request_it_will_not_admit(self) -> None:
        """Each would wait for the other for ever."""
        harness = tiny(num_blocks=6, policy="running-first")
        harness.add(p=7, o=12, priority=1)
        parked = harness.add(p=7, o=12, priority=1)
        park(harness, parked)
        harness.add(p=4, o=2, priority=0)
        assert len(harness.run()) == 3

    def test_recompute_only_never_swaps(self) -> None:
        metrics = self._busy("recompute-only").scheduler.metrics
        assert metrics.preemptions_swap == 0
        assert metrics.preemptions_recompute > 0

    def test_reserve_never_preempts(self) -> None:
        assert self._busy("reserve").scheduler.metrics.preemptions == 0


class TestCounts:
    """Metrics against a schedule worked out by hand."""

    def test_two_requests_that_outgrow_the_pool_once(self) -> None:
        """Six blocks of 4. Both hold 2 blocks for 7 prompt tokens; the steps are seconds.

        step 1  both prompts; each samples token 1           stored 7 and 7, blocks 2 + 2
        step 2  position 7 of both                           stored 8 and 8
        step 3  position 8 starts a third block for each     blocks 3 + 3, pool full
        step 7  position 12 starts a fourth: the first gets it by parking the second (3 blocks,
                12 stored); the first ends at token 8, which step 8 samples (1 + 7 decodes)
        step 8  the first ends; 9 the second comes back: 2 seconds parked
        """
        harness = tiny(num_blocks=6, enable_prefix_caching=False)
        first, second = harness.add(p=7, o=8), harness.add(p=7, o=8)
        durations: list[float] = []
        harness.scheduler.metrics.on_swapped = durations.append
        for _ in range(6):
            harness.step()
        assert harness.scheduler.metrics.preemptions == 0
        seventh = harness.step()
        assert seventh.preempted == [(second, PreemptionMode.SWAP)]
        assert len(seventh.swap_out) == 3
        assert len(harness.scheduler.swapped) == 1
        harness.step()
        assert harness.finished == [first]
        ninth = harness.step()
        assert ninth.resumed == [second]
        assert len(ninth.swap_in) == 3
        harness.run()
        metrics = harness.scheduler.metrics
        assert durations == [2.0]
        assert metrics.avg_swapped_duration_s == 2.0
        assert metrics.preemption_rate == 0.5
        assert (metrics.preemptions_swap, metrics.preemptions_recompute) == (1, 0)
        assert (metrics.swapped_out_blocks, metrics.swapped_in_blocks) == (3, 3)
        assert metrics.swapped_queue_size_max == 1
        assert metrics.kv_usage_max == 1.0
        assert metrics.recomputed_tokens == 0
        assert metrics.requests_finished == 2

    def test_the_same_without_a_swap_pool(self) -> None:
        """The second drops its 12 stored positions and computes them again."""
        harness = tiny(num_blocks=6, num_swap_blocks=0, enable_prefix_caching=False)
        harness.add(p=7, o=8)
        harness.add(p=7, o=8)
        harness.run()
        metrics = harness.scheduler.metrics
        assert (metrics.preemptions_swap, metrics.preemptions_recompute) == (0, 1)
        assert metrics.recomputed_tokens == 12
        assert metrics.swapped_queue_size_max == 0


class TestEnding:
    """How sequences end, and what update insists on."""

    def test_a_stop_token_counts_only_after_min_tokens(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4))
        request = Request("a", [1], max_tokens=9, min_tokens=2, stop_token_ids=[7])
        scheduler.add_request(request)
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            scheduler.update(plan, [7])
        assert request.sequences[0].output_tokens == [7, 7, 7]
        assert request.sequences[0].stop_token == 7

    def test_update_wants_a_token_for_every_sampler(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4))
        scheduler.add_request(Request("a", [1], max_tokens=9))
        plan = scheduler.schedule()
        with pytest.raises(ValueError, match="samples 1 tokens, got 2"):
            scheduler.update(plan, [1, 2])

    def test_a_plan_is_taken_once_and_in_turn(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4))
        scheduler.add_request(Request("a", [1], max_tokens=9))
        plan = scheduler.schedule()
        with pytest.raises(RuntimeError, match="step 1 was scheduled and not updated"):
            scheduler.schedule()
        scheduler.update(plan, [1])
        with pytest.raises(ValueError, match="step 1 is not the one"):
            scheduler.update(plan, [1])

    def test_a_sample_without_output_cannot_be_ended(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4))
        request = Request("a", [1], max_tokens=2, n=2)
        scheduler.add_request(request)
        with pytest.raises(ValueError, match="has no output"):
            scheduler.finish_sequence(request.sequences[0])

    def test_a_step_that_breaks_off_leaves_no_false_content_behind(self) -> None:
        """Blocks being swapped in were findable before the copy was made."""
        harness = tiny(num_blocks=6)
        first = harness.add(p=7, o=12)
        parked = harness.add(p=7, o=12)
        park(harness, parked)
        scheduler = harness.scheduler
        scheduler.abort(first.request_id)
        plan = scheduler.schedule()
        assert plan.swap_in
        for move in plan.swap_in:
            assert move.dst not in scheduler.device_pool._content

    def test_a_clock_that_goes_back_gives_no_negative_durations(self) -> None:
        harness = tiny(num_blocks=6)
        harness.add(p=7, o=12)
        park(harness, harness.add(p=7, o=12))
        harness.now -= 1000
        harness.run()
        assert harness.scheduler.metrics.swapped_s_total >= 0

    def test_a_request_aborted_between_plan_and_update_stays_aborted(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4))
        scheduler.add_request(Request("a", [1], max_tokens=9))
        plan = scheduler.schedule()
        scheduler.abort("a")
        assert scheduler.update(plan, [1]) == []
        scheduler.check_integrity()
        assert scheduler.device_pool.num_held == 0

    def test_illegal_moves_name_the_request_and_both_states(self) -> None:
        request = Request("a", [1], max_tokens=1)
        request.move_to(RequestStatus.FINISHED)
        with pytest.raises(IllegalTransitionError, match="a cannot go from finished to swapped"):
            request.move_to(RequestStatus.SWAPPED)


class TestRefusals:
    """What can never work is said at once, with the numbers."""

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
            ({"num_blocks": 4, "headroom": -1.0}, "headroom must be a finite number"),
            ({"num_blocks": 4, "headroom": float("nan")}, "headroom must be a finite number"),
            ({"num_blocks": 4, "watermark": 1.0}, r"watermark must be a share .* got 1\.0"),
            ({"num_blocks": 4, "watermark": -0.1}, "watermark must be a share"),
            ({"num_blocks": 4, "watermark": float("nan")}, "watermark must be a share"),
            ({"num_blocks": 2.5}, "num_blocks must be an integer of at least 1, got 2.5"),
            ({"num_blocks": 4, "max_num_seqs": True}, "max_num_seqs must be an integer"),
            ({"num_blocks": 4, "policy": "fifo"}, "policy must be one of swapped-first"),
            ({"num_blocks": 4, "preemption_mode": "no"}, "preemption_mode must be one of auto"),
            (
                {"num_blocks": 4, "max_num_seqs": 64, "max_num_batched_tokens": 32},
                r"max_num_batched_tokens \(32\) must be at least max_num_seqs \(64\)",
            ),
        ],
    )
    def test_settings(self, fields: dict[str, object], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            SchedulerConfig(**fields)  # type: ignore[arg-type]

    def test_requests(self) -> None:
        scheduler = Scheduler(SchedulerConfig(num_blocks=4, max_num_seqs=2, max_model_len=32))
        for fields, param in (
            ({"n": 3, "max_tokens": 1}, "n"),
            ({"max_tokens": 32}, "max_tokens"),
        ):
            with pytest.raises(InvalidRequestError) as refusal:
                scheduler.add_request(Request("a", [1], **fields))  # type: ignore[arg-type]
            assert refusal.value.param == param
        for fields, param in (
            ({"prompt": []}, "prompt"),
            ({"prompt": [2**70]}, "prompt"),
            ({"prompt": ["a"]}, "prompt"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"n": 2.5}, "n"),
            ({"priority": "a"}, "priority"),
            ({"priority": float("nan")}, "priority"),
            ({"arrival_time": float("nan")}, "arrival_time"),
        ):
            with pytest.raises(InvalidRequestError) as refusal:
                Request("a", **({"prompt": [1], "max_tokens": 1} | fields))  # type: ignore[arg-type]
            assert refusal.value.param == param
        ended = Request("b", [1], max_tokens=1)
        scheduler.add_request(ended)
        scheduler.abort("b")
        with pytest.raises(InvalidRequestError, match="was added before and is finished"):
            scheduler.add_request(ended)
        scheduler.add_request(Request("a", [1], max_tokens=1))
        with pytest.raises(InvalidRequestError, match="'a' is already being served"):
            scheduler.add_request(Request("a", [1], max_tokens=1))

    def test_a_budget_cannot_be_overdrawn(self) -> None:
        budget = SchedulingBudget(token_budget=4, max_num_seqs=2, curr_tokens=3)
        with pytest.raises(ValueError, match="2 tokens and 1 sequences asked"):
            budget.add(num_tokens=2, num_seqs=1)
        assert (budget.curr_tokens, budget.curr_seqs) == (3, 0)


class TestQueue:
    """Order is by class, then arrival."""

    def test_requests_stand_in_order_and_can_be_taken_out_anywhere(self) -> None:
        queue = RequestQueue(lambda request: (request.priority, request.order))
        requests = []
        for order, priority in enumerate([1, 0, 2, 0, 1]):
            request = Request(str(order), [1], max_tokens=1, priority=priority)
            request.order = order
            requests.append(request)
            queue.add(request)
        assert [request.request_id for request in queue] == ["1", "3", "0", "4", "2"]
        queue.remove(requests[0])
        assert requests[0] not in queue
        assert [request.request_id for request in queue] == ["1", "3", "4", "2"]
        with pytest.raises(KeyError):
            queue.remove(requests[0])


def test_a_sample_that_ends_while_it_computes_the_common_prefix_hands_it_over() -> None:
    """Diverged samples wait for one of them to compute their prompt again; a stop string may be
    found in just that one."""
    harness = Harness(
        num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=4, headroom=0.0
    )
    group = harness.add(13, 3, n=2, priority=1)
    while group.first_token_time is None:
        harness.step()
    urgent = harness.add(17, 1)
    while not urgent.is_finished:
        harness.step()
    harness.step()
    owner = group.prefix_owner
    assert owner is not None
    assert group.status is RequestStatus.RUNNING
    assert not harness.scheduler.finish_sequence(owner)
    assert group.prefix_owner is not owner
    harness.run()
    assert [seq.num_output_tokens for seq in group.sequences if seq is not owner] == [3]


def test_a_prefill_leaves_a_more_urgent_class_all_the_tokens_it_can_use() -> None:
    harness = Harness(num_blocks=100, max_num_batched_tokens=64)
    harness.add(200, 4, priority=1)
    harness.step()
    urgent = harness.add(48, 4)
    plan = harness.step()
    [batch_item, urgent_item] = plan.scheduled
    assert plan.admitted == [urgent]
    assert (urgent_item.num_tokens, batch_item.num_tokens) == (48, 64 - 48)
    assert urgent_item.samplers
