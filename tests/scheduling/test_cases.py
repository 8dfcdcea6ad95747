"""Faults that real engines had in scheduling and parking, one scenario each.

``P`` device blocks, ``S`` swap blocks of 16 tokens, ``p``/``o`` prompt/output tokens, ``n``
samples. Block tables, reference counts, moves and budgets are checked at every step.
"""

from __future__ import annotations

import contextlib

import pytest

from layby.errors import QueueFullError, RequestTooLargeError
from layby.scheduling import PreemptionMode, Request, Scheduler
from tests.scheduling.harness import Harness, expected_tokens


def assert_undisturbed(request: Request) -> None:
    """Every sample has the tokens it would have had alone."""
    assert len(request.sequences) == request.n
    for seq in request.sequences:
        prompt = seq.tokens[: seq.num_prompt_tokens]
        assert seq.output_tokens == expected_tokens(prompt, seq.index, request.max_tokens)


class TestCase01BiggerThanThePool:
    """A request too big for the pool blocked the head of the queue for ever."""

    def test_it_is_refused_at_once_with_both_numbers_and_the_next_one_finishes(self) -> None:
        harness = Harness(num_blocks=10, max_model_len=1024)
        with pytest.raises(RequestTooLargeError, match=r"need 11 KV blocks.*the pool has 10"):
            harness.add(p=170, o=4)
        follower = harness.add(p=16, o=4)
        assert harness.run() == [follower]

    @pytest.mark.parametrize(("p", "o"), [(145, 16), (150, 11), (160, 1)])
    def test_what_fills_the_pool_to_the_last_slot_runs(self, p: int, o: int) -> None:
        harness = Harness(num_blocks=10)
        request = harness.add(p, o)
        harness.run()
        assert_undisturbed(request)
        assert harness.scheduler.metrics.preemptions == 0

    def test_one_position_more_is_refused(self) -> None:
        with pytest.raises(RequestTooLargeError) as refusal:
            Harness(num_blocks=10).add(p=150, o=12)
        assert (refusal.value.needed_blocks, refusal.value.total_blocks) == (11, 10)


class TestCase02OutgrowsThePoolWhileDecoding:
    """A request that outgrew the pool evicted itself and was prefilled again without end."""

    def test_it_is_refused_at_admission_and_the_one_behind_it_finishes(self) -> None:
        harness = Harness(num_blocks=10)
        with pytest.raises(RequestTooLargeError, match="need 12 KV blocks"):
            harness.add(p=150, o=40)
        follower = harness.add(p=16, o=4)
        assert harness.run() == [follower]

    @pytest.mark.parametrize("p", [1, 15, 16, 17, 150, 159, 160])
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_the_largest_max_tokens_runs_and_one_more_is_refused(self, p: int, n: int) -> None:
        """The engine fills ``max_tokens`` in with this figure where the caller gives none."""
        harness = Harness(num_blocks=10)
        most = harness.scheduler.max_output_tokens(p, n)
        request = harness.add(p, most, n)
        with pytest.raises(RequestTooLargeError):
            harness.add(p, most + 1, n)
        harness.run()
        assert_undisturbed(request)
        assert harness.scheduler.metrics.preemptions == 0


class TestCase03AGroupThatCannotComeBack:
    """Eight samples grew past the pool, were parked, and could never be resumed."""

    @pytest.mark.parametrize("swap_blocks", [100, 0])
    def test_a_group_whose_worst_case_exceeds_the_pool_is_refused(self, swap_blocks: int) -> None:
        harness = Harness(num_blocks=20, num_swap_blocks=swap_blocks)
        with pytest.raises(RequestTooLargeError, match=r"need 33 KV blocks.*has 20"):
            harness.add(p=16, o=64, n=8)
        follower = harness.add(p=8, o=8)
        assert harness.run() == [follower]

    @pytest.mark.parametrize("swap_blocks", [100, 0])
    def test_groups_that_just_fit_take_turns_and_both_finish(self, swap_blocks: int) -> None:
        harness = Harness(num_blocks=33, num_swap_blocks=swap_blocks)
        groups = [harness.add(p=16, o=64, n=8) for _ in range(2)]
        harness.run()
        for group in groups:
            assert_undisturbed(group)
        metrics = harness.scheduler.metrics
        assert metrics.preemptions > 0
        assert (metrics.preemptions_recompute > 0) == (swap_blocks == 0)


class TestCase04SwapFull:
    """A full swap pool aborted the whole engine."""

    # A group holds 1 + 3 x 4 = 13 blocks at its longest.
    @pytest.mark.parametrize("swap_blocks", [4, 0, 13])
    def test_the_victim_takes_another_way_out(self, swap_blocks: int) -> None:
        harness = Harness(num_blocks=16, num_swap_blocks=swap_blocks)
        groups = [harness.add(p=20, o=60, n=3) for _ in range(2)]
        single = harness.add(p=16, o=8)
        harness.run()
        for request in (*groups, single):
            assert_undisturbed(request)
        assert harness.scheduler.metrics.preemptions > 0

    def test_a_swap_pool_of_exactly_the_victims_size_is_used(self) -> None:
        harness = Harness(num_blocks=6, num_swap_blocks=3, headroom=0)
        for _ in range(2):
            harness.add(p=40, o=40)
        while not harness.scheduler.swapped:
            harness.step()
        assert harness.scheduler.memory.swap.num_free == 0
        harness.run()
        assert harness.scheduler.metrics.preemptions_recompute == 0


class TestCase05NewWorkAheadOfParkedWork:
    """New requests were admitted while others were parked, until the swap space ran out."""

    @pytest.mark.parametrize("token_budget", [64, 4096])
    def test_parked_work_goes_first_and_the_order_of_finishing_stays_close(
        self, token_budget: int
    ) -> None:
        harness = Harness(
            num_blocks=32,
            num_swap_blocks=64,
            max_num_seqs=16,
            max_num_batched_tokens=token_budget,
        )
        requests = [harness.add(p=32, o=64, n=2) for _ in range(40)]
        most_running = 0
        while harness.scheduler.has_unfinished:
            harness.step()
            most_running = max(most_running, len(harness.scheduler.running))
        for request in requests:
            assert_undisturbed(request)
        metrics = harness.scheduler.metrics
        assert metrics.recomputed_tokens == 0
        assert metrics.swapped_queue_size_max <= most_running
        for place, request in enumerate(harness.finished):
            assert abs(place - requests.index(request)) <= most_running


class TestCase06ShortAnswerAfterRecompute:
    """A request preempted by recompute came back with tokens missing or doubled."""

    @pytest.mark.parametrize("number", [2, 3])
    def test_every_answer_has_all_its_tokens(self, number: int) -> None:
        harness = Harness(num_blocks=12)
        requests = [harness.add(p=40, o=80) for _ in range(number)]
        harness.run()
        for request in requests:
            assert request.sequences[0].num_output_tokens == 80
            assert_undisturbed(request)
        assert harness.scheduler.metrics.recomputed_tokens > 0

    @pytest.mark.parametrize("stored", [0, 16, 48, 64])
    def test_wherever_it_is_preempted(self, stored: int) -> None:
        """Before its first token (0, or 16 of a chunked prompt) and on block boundaries."""
        harness = Harness(num_blocks=18, max_num_batched_tokens=16, max_num_seqs=4)
        request = harness.add(p=40, o=80, priority=1)
        if stored:
            while request.sequences[0].num_computed != stored:
                harness.step()
        urgent = harness.add(p=250, o=8)
        harness.run()
        assert request.num_preemptions == (stored > 0)
        assert_undisturbed(request)
        assert_undisturbed(urgent)


class TestCase08VictimAlreadyPlanned:
    """The victim had been planned in the same step, and the engine died on its own check."""

    def test_the_victims_place_block_and_budget_are_undone(self) -> None:
        harness = Harness(num_blocks=7, num_swap_blocks=10, max_num_seqs=4, headroom=0)
        low = harness.add(p=31, o=50, priority=1, name="L")
        high = harness.add(p=63, o=50, priority=0, name="H")
        harness.run()
        assert low.num_preemptions > 0
        assert high.num_preemptions == 0
        assert_undisturbed(low)
        assert_undisturbed(high)

    def test_an_urgent_arrival_undoes_what_the_step_had_planned(self) -> None:
        """The forked samples of a group are about to make private copies when it must go."""
        harness = Harness(num_blocks=12, num_swap_blocks=20, headroom=0)
        group = harness.add(p=20, o=12, n=4, priority=5)
        harness.step()
        urgent = harness.add(p=160, o=4, priority=0)
        plan = harness.step()
        assert plan.preempted == [(group, PreemptionMode.SWAP)]
        assert plan.copy == []
        assert [item.sequence.request for item in plan.scheduled] == [urgent]
        harness.run()
        assert_undisturbed(group)
        assert_undisturbed(urgent)

    def test_a_prompt_that_would_have_ended_in_this_step_is_undone_too(self) -> None:
        harness = Harness(num_blocks=10, max_num_batched_tokens=100, max_num_seqs=8, headroom=0)
        group = harness.add(p=120, o=2, n=3, priority=5)
        harness.step()
        urgent = harness.add(p=80, o=2, priority=0)
        plan = harness.step()
        assert [request for request, _ in plan.preempted] == [group]
        assert len(group.sequences) == 1
        harness.run()
        assert_undisturbed(group)
        assert_undisturbed(urgent)


class TestCase09FirstChunkFitsTheRestDoesNot:
    """A long prompt was let in for its first chunk and thrown out again in every step."""

    def test_it_waits_until_the_whole_prompt_fits(self) -> None:
        harness = Harness(
            num_blocks=20, num_swap_blocks=0, max_num_batched_tokens=32, max_num_seqs=8
        )
        early = [harness.add(p=60, o=60) for _ in range(2)]
        while early[1].sequences[0].num_output_tokens < 5:
            harness.step()
        late = harness.add(p=200, o=8)
        while not all(request.is_finished for request in early):
            before = [r.sequences[0].num_output_tokens for r in early if not r.is_finished]
            alive = [r for r in early if not r.is_finished]
            harness.step()
            after = [r.sequences[0].num_output_tokens for r in alive]
            assert after == [count + 1 for count in before]
        harness.run()
        assert_undisturbed(late)
        assert late.num_preemptions == 0
        computed = sum(plan.num_tokens for plan in harness.plans)
        assert computed == 60 + 60 + 200 + 2 * 59 + 7


class TestCase11AbortOfAGroup:
    """After a client hung up, the other samples of its request ran on."""

    @pytest.mark.parametrize("state", ["waiting", "running", "swapped"])
    def test_nothing_of_it_is_left_in_whichever_queue_it_was(self, state: str) -> None:
        harness = Harness(num_blocks=12, num_swap_blocks=40, headroom=0)
        scheduler = harness.scheduler
        keeper = harness.add(p=100, o=60)
        group = harness.add(p=20, o=40, n=2)
        while group.status.value != state:
            harness.step()
        scheduler.abort(group.request_id)
        assert group not in (*scheduler.waiting, *scheduler.running, *scheduler.swapped)
        assert all(seq.finish_reason is not None for seq in group.sequences)
        plan = harness.step()
        assert {item.sequence.request for item in plan.scheduled} == {keeper}
        assert harness.run() == [keeper]

    def test_a_hundred_times_over(self) -> None:
        harness = Harness(num_blocks=30, num_swap_blocks=30)
        for _ in range(100):
            group = harness.add(p=20, o=400, n=1)
            harness.step()
            harness.scheduler.abort(group.request_id)
            assert harness.scheduler.memory.device.num_held == 0


class TestCase16GaugesThatLie:
    """The swapped gauge stayed at zero and preemptions were counted twice."""

    def test_with_a_swap_pool_everything_is_parked_and_nothing_recomputed(self) -> None:
        harness = Harness(num_blocks=12, num_swap_blocks=24)
        for _ in range(4):
            harness.add(p=40, o=80)
        seen = self._scrape_every_step(harness)
        assert max(seen) > 0
        metrics = harness.scheduler.metrics
        assert metrics.swapped_queue_size_max == max(seen)
        assert metrics.preemptions_recompute == metrics.recomputed_tokens == 0
        assert metrics.swaps_completed == metrics.preemptions_swap

    def test_without_one_the_gauge_stays_at_zero_and_recomputed_tokens_are_counted(self) -> None:
        harness = Harness(num_blocks=12, num_swap_blocks=0, enable_prefix_caching=False)
        for _ in range(4):
            harness.add(p=40, o=80)
        assert set(self._scrape_every_step(harness)) == {0}
        metrics = harness.scheduler.metrics
        assert metrics.preemptions_swap == 0
        computed = sum(plan.num_tokens for plan in harness.plans)
        assert metrics.recomputed_tokens == computed - 4 * (40 + 79) > 0

    def _scrape_every_step(self, harness: Harness) -> list[int]:
        seen = []
        while harness.scheduler.has_unfinished:
            before = harness.scheduler.metrics.preemptions
            plan = harness.step()
            assert harness.scheduler.metrics.preemptions - before == len(plan.preempted)
            seen.append(len(harness.scheduler.swapped))
        return seen


class TestCase17UnboundedQueue:
    """Arrivals were queued without limit."""

    def _offer(self, scheduler: Scheduler, number: int, n: int = 1) -> int:
        accepted = 0
        for index in range(number):
            with contextlib.suppress(QueueFullError):
                scheduler.add_request(Request(f"R{index}", [1] * 16, max_tokens=8, n=n))
                accepted += 1
        return accepted

    def test_places_and_queue_are_filled_and_the_rest_is_refused_at_once(self) -> None:
        harness = Harness(num_blocks=64, max_num_seqs=2, max_queue=4)
        assert self._offer(harness.scheduler, 50) == 6
        assert len(harness.run()) == 6

    def test_the_numbers_of_a_refusal_add_up(self) -> None:
        harness = Harness(num_blocks=64, max_num_seqs=3, max_queue=4)
        harness.scheduler.add_request(Request("runs", [1] * 16, max_tokens=8))
        harness.step()
        assert self._offer(harness.scheduler, 9) == 6
        with pytest.raises(QueueFullError) as refusal:
            harness.scheduler.add_request(Request("one more", [1] * 16, max_tokens=8))
        assert str(refusal.value) == (
            "the queue is full: 6 of at most 6 sequences wait (4 in the queue, 2 for free places), "
            "and 1 more cannot"
        )

    def test_samples_count_one_by_one(self) -> None:
        harness = Harness(num_blocks=64, max_num_seqs=2, max_queue=4)
        assert self._offer(harness.scheduler, 50, n=2) == 3

    def test_a_preempted_request_is_never_refused_and_takes_no_place_in_the_queue(self) -> None:
        harness = Harness(num_blocks=8, max_num_seqs=4, max_queue=0, headroom=0)
        for _ in range(2):
            harness.add(p=40, o=60)
        while not harness.scheduler.waiting.head or not harness.scheduler.running:
            harness.step()
        assert harness.scheduler.waiting.head.num_preemptions == 1
        harness.add(p=8, o=2)  # two of four places are free
        assert len(harness.run()) == 3
