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
    """Arrivals, aborts and early ends between steps; every step is checked by the harness."""

    @initialize(
        num_blocks=st.integers(2, 24),
        num_swap_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        max_num_seqs=st.integers(1, 8),
        token_budget=st.integers(0, 24),
        preemption_mode=st.sampled_from(["auto", "swap", "recompute"]),
        policy=st.sampled_from(
            ["swapped-first", "swapped-first", "running-first", "recompute-only", "reserve"]
        ),
        caching=st.booleans(),
        watermark=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        urgent_window=st.sampled_from([0.0, 5.0, 50.0]),
        background_tokens=st.sampled_from([0, 3]),
        preemption_threshold=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        token_s=st.sampled_from([None, 0.0, 1.0, 3.0]),
    )
    def start(
        self,
        num_blocks: int,
        num_swap_blocks: int,
        max_num_seqs: int,
        token_budget: int,
        preemption_mode: str,
        policy: str,
        caching: bool,
        watermark: float,
        urgent_window: float,
        background_tokens: int,
        preemption_threshold: float,
        token_s: float | None,
    ) -> None:
        self.harness = Harness(
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + token_budget,
            preemption_mode=preemption_mode,
            policy=policy,
            enable_prefix_caching=caching,
            watermark=watermark,
            urgent_window=urgent_window,
            background_tokens=background_tokens,
            preemption_threshold=preemption_threshold,
        )
        if token_s is not None:
            self.harness.scheduler.set_costs(MoveCosts(3.0, 3.0, token_s))
        self.accepted: list[Request] = []
        self.cut_short: set[str] = set()

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
        if needed > self.harness.config.num_blocks:
            with pytest.raises(RequestTooLargeError) as refusal:
                self.harness.add(p, o, n, priority=priority, prompt=prompt)
            assert str(needed) in str(refusal.value)
            assert str(self.harness.config.num_blocks) in str(refusal.value)
        else:
            self.accepted.append(self.harness.add(p, o, n, priority=priority, prompt=prompt))

    @rule(steps=st.integers(1, 4))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.harness.step()

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.harness.scheduler.requests)))
        self.harness.scheduler.abort(name)
        self.harness.scheduler.check_integrity()
        self.cut_short.add(name)

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

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
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
        assert metrics.requests_finished + metrics.requests_aborted == len(self.accepted)


EXAMPLES = int(os.environ.get("LAYBY_SCHEDULER_EXAMPLES", "2000"))

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
