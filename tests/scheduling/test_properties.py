"""Random traffic against everything the design promises of the scheduler."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from layby.errors import RequestTooLargeError
from layby.scheduling import MoveCosts, Request
from tests.scheduling.harness import Harness, expected_tokens

BLOCK = 4


class RandomTraffic(RuleBasedStateMachine):
    """Arrivals, aborts, early ends and resizes between steps; the harness checks every step."""

    @initialize(
        num_blocks=st.integers(2, 24),
        num_swap_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        num_disk_blocks=st.sampled_from([0, 2, 10, 60]),
        slow_disk=st.booleans(),
        max_num_seqs=st.integers(1, 8),
        token_budget=st.integers(0, 24),
        preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(
            ["swapped-first", "swapped-first", "running-first", "recompute-only", "reserve"]
        ),
        caching=st.booleans(),
        headroom=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        watermark=st.sampled_from([0.0, 0.2, 0.5, 0.99]),
        priority_aging=st.sampled_from([None, 0.7, 3.0, 20.0]),
        demote_after_tokens=st.sampled_from([None, 1, 3, 10]),
        urgent_window=st.sampled_from([0.0, 5.0, 50.0]),
        background_tokens=st.sampled_from([0, 3]),
        preemption_threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        token_s=st.sampled_from([None, 0.0, 1.0, 3.0]),
    )
    def start(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        num_disk_blocks: int,
        slow_disk: bool,
        max_num_seqs: int,
        token_budget: int,
        preemption_mode: str,
        policy: str,
        caching: bool,
        headroom: float,
        watermark: float,
        priority_aging: float | None,
        demote_after_tokens: int | None,
        urgent_window: float,
        background_tokens: int,
        preemption_threshold: float,
        token_s: float | None,
    ) -> None:
        self.harness = Harness(
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            num_disk_blocks=num_disk_blocks if num_swap_blocks else 0,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + token_budget,
            preemption_mode=preemption_mode,
            policy=policy,
            enable_prefix_caching=caching,
            headroom=headroom,
            watermark=watermark,
            priority_aging=priority_aging,
            demote_after_tokens=demote_after_tokens,
            urgent_window=urgent_window,
            background_tokens=background_tokens,
            preemption_threshold=preemption_threshold,
        )
        self.harness.ends_transfers = not slow_disk
        if token_s is not None:
            self.harness.scheduler.set_costs(MoveCosts(3.0, 3.0, token_s))
        self.accepted: list[Request] = []
        self.cut_short: set[str] = set()
        self.ended_before = 0  # by schedulers that are gone

    @rule(
        p=st.integers(1, 40),
        o=st.integers(1, 24),
        n=st.sampled_from([1, 1, 1, 2, 3, 5]),
        priority=st.integers(0, 2),
        common=st.booleans(),
    )
    def arrive(self, p: int, o: int, n: int, priority: int, common: bool) -> None:
        """A request; ``common`` prompts are prefixes of one another, so that caches are hit."""
        scheduler = self.harness.scheduler
        n = min(n, self.harness.config.max_num_seqs)
        prompt = list(range(1, p + 1)) if common else None
        needed = scheduler.memory.worst_case(p, o, n)
        if needed > scheduler.target_blocks:
            with pytest.raises(RequestTooLargeError) as refusal:
                self.harness.add(p, o, n, priority=priority, prompt=prompt)
            assert str(needed) in str(refusal.value)
            assert str(scheduler.target_blocks) in str(refusal.value)
        else:
            self.accepted.append(self.harness.add(p, o, n, priority=priority, prompt=prompt))

    @rule(steps=st.integers(1, 4))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @rule(num_blocks=st.integers(1, 32), is_in_a_step=st.booleans())
    def resize(self, num_blocks: int, is_in_a_step: bool) -> None:
        """The pool shrinks and grows under whatever runs, never below what was accepted."""
        scheduler = self.harness.scheduler
        if is_in_a_step:
            plan = scheduler.schedule()
            scheduler.resize(num_blocks)
            tokens = self.harness.shadow.execute(plan)
            self.harness.finished += scheduler.update(plan, tokens)
        else:
            scheduler.resize(num_blocks)
        scheduler.check_integrity()
        needs = [scheduler.memory.worst_case_blocks(r) for r in scheduler.requests.values()]
        self.harness.step()
        least = max([num_blocks, *needs])
        assert num_blocks <= scheduler.device_pool.num_blocks <= least
        assert len(self.harness.shadow.device) <= least

    @precondition(lambda self: self.harness.shadow.transfers)
    @rule(data=st.data(), fault=st.sampled_from(["", "", "", "eio", "enospc", "checksum"]))
    def end_transfer(self, data: st.DataObject, fault: str) -> None:
        """The disk is done with something, in any order, well or badly."""
        number = data.draw(st.sampled_from(sorted(self.harness.shadow.transfers)))
        self.harness.end_transfer(number, fault)

    @precondition(lambda self: len(self.harness.scheduler.swapped))
    @rule(data=st.data())
    def lose_kv(self, data: st.DataObject) -> None:
        """Whatever parked work has on any tier is gone."""
        parked = [request.request_id for request in self.harness.scheduler.swapped]
        assert self.harness.scheduler.lose_kv(data.draw(st.sampled_from(parked)))
        self.harness.scheduler.check_integrity()

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))
        self.harness.scheduler.abort(name)
        self.harness.scheduler.check_integrity()
        self.cut_short.add(name)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data(), priority=st.integers(-1, 3))
    def set_priority(self, data: st.DataObject, priority: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))
        request = self.harness.scheduler.requests[name]
        assert self.harness.scheduler.set_priority(name, priority)
        assert request.priority == request.claim == request.rank == priority
        self.harness.scheduler.check_integrity()

    @precondition(lambda self: len(self.harness.scheduler.swapped))
    @rule(data=st.data())
    def urge(self, data: st.DataObject) -> None:
        """A parked request becomes the most urgent of all: whoever is in its way leaves."""
        scheduler, config = self.harness.scheduler, self.harness.config
        request = data.draw(st.sampled_from(list(scheduler.swapped)))
        best = min(min(other.rank, other.claim) for other in scheduler.requests.values())
        scheduler.set_priority(request.request_id, best - 1)
        is_free_to_come = (
            config.policy == "swapped-first"
            and config.preemption_threshold == 1  # who is parked ahead of need leaves in its stead
            and config.max_num_batched_tokens - config.max_num_seqs >= request.num_live_seqs
            and scheduler.tiers.is_in_ram(request)
            and not scheduler.is_resizing
        )
        plan = self.harness.step()
        assert request in plan.resumed or not is_free_to_come

    @rule(seconds=st.sampled_from([0.1, 5.0, 1e6]))
    def pass_time(self, seconds: float) -> None:
        self.harness.now += seconds

    @precondition(lambda self: len(self.harness.scheduler.running))
    @rule(data=st.data())
    def find_stop_string(self, data: st.DataObject) -> None:
        """The engine ends one sequence of a running request between two steps."""
        running = [r for r in self.harness.scheduler.running if r.first_token_time is not None]
        if running:
            request = data.draw(st.sampled_from(running))
            seq = data.draw(st.sampled_from(request.live_sequences))
            if self.harness.scheduler.finish_sequence(seq):
                self.harness.finished.append(request)
            self.harness.scheduler.check_integrity()
            self.cut_short.add(request.request_id)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(keeps_tokens=st.booleans(), kv=st.sampled_from(["none", "kept", "lost"]))
    def restart(self, keeps_tokens: bool, kv: str) -> None:
        """The process ends between two steps; another one goes on with what was unfinished."""
        metrics = self.harness.scheduler.metrics
        self.ended_before += metrics.requests_finished + metrics.requests_aborted
        again = self.harness.restart(
            keeps_tokens=keeps_tokens, keeps_kv=kv != "none", loses_kv=kv == "lost"
        )
        self.accepted = [again.get(r.request_id, r) for r in self.accepted]
        if not keeps_tokens:  # what ended early is generated to its end this time
            self.cut_short -= again.keys()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.ends_transfers = True
        chunks = sum(r.num_prompt_tokens + 2 * r.max_tokens for r in self.accepted)
        self.harness.run(max_steps=100 + 10 * chunks)
        for request in self.accepted:
            for seq in request.sequences:
                wanted = expected_tokens(
                    seq.tokens[: seq.num_prompt_tokens], seq.index, request.max_tokens
                )
                if request.request_id in self.cut_short:
                    wanted = wanted[: seq.num_output_tokens]
                assert seq.output_tokens == wanted
        metrics = self.harness.scheduler.metrics
        ended = metrics.requests_finished + metrics.requests_aborted
        assert self.ended_before + ended == len(self.accepted)


EXAMPLES = int(os.environ.get("LAYBY_SCHEDULER_EXAMPLES", "900"))

RandomTraffic.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(1200)
@pytest.mark.slow
class TestRandomTraffic(RandomTraffic.TestCase):  # type: ignore[misc]
    """DESIGN §3 items 1–4, 6 and 7 hold after every step."""
