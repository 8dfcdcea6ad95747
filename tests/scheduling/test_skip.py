"""Many steps at once come to the same as the steps one by one."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from layby.errors import RequestTooLargeError
from layby.scheduling import Request, Scheduler, SchedulerConfig

TOKEN = 7


def run(seed: int, *, skipping: bool, policy: str, mode: str, caching: bool) -> tuple[object, int]:
    """Random traffic and pool sizes, by step number; what happened when, and the calls it took."""
    rng = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=rng.choice([12, 30, 80]),
        num_swap_blocks=rng.choice([0, 20, 200]),
        block_size=4,
        max_num_seqs=rng.choice([3, 8]),
        max_num_batched_tokens=16,
        policy=policy,
        preemption_mode=mode,
        enable_prefix_caching=caching,
        headroom=rng.choice([0.0, 1.0]),
        priority_aging=rng.choice([None, None, 5.0]),
        demote_after_tokens=rng.choice([None, 4, 11]),
        urgent_window=rng.choice([0.0, 9.0, 50.0]),
        background_tokens=rng.choice([0, 4]),
        preemption_threshold=rng.choice([1.0, 1.0, 0.6]),
        watermark=rng.choice([0.0, 0.0, 0.3, 0.9]),
    )
    now = 0
    scheduler = Scheduler(config, clock=lambda: float(now))
    arrivals: dict[int, list[Request]] = {}
    step = 0
    for number in range(12):
        step += rng.choice([0, 1, 5, 40])
        prompt = [1000 * number + i for i in range(rng.randint(1, 20))]
        request = Request(
            str(number),
            prompt,
            max_tokens=rng.randint(1, 24),
            n=rng.choice([1, 1, 1, 1, 2]),
            priority=rng.choice([0, 0, 1]),
        )
        arrivals.setdefault(step, []).append(request)
    sizes = {rng.randrange(2 * step + 10): rng.randint(1, 60) for _ in range(rng.randint(0, 4))}
    events: list[object] = []
    calls = 0
    while arrivals or scheduler.has_unfinished:
        for request in arrivals.pop(now, []):
            with suppress(RequestTooLargeError):
                scheduler.add_request(request)
        if now in sizes:
            scheduler.resize(sizes.pop(now))
        if not scheduler.has_unfinished:
            now = min(arrivals, default=now)
            continue
        until_event = min([step for step in [*arrivals, *sizes] if step > now], default=10**9) - now
        steps = min(scheduler.quiet_steps(), until_event) if skipping else 0
        if steps:
            steps = min(steps, math.ceil(min(scheduler.quiet_until() - now, 10**9)))
        calls += 1
        if steps:
            scheduler.skip(steps, lambda seq: TOKEN)
            now += steps
        else:
            plan = scheduler.schedule()
            events += [(now, "out", r.request_id, mode) for r, mode in plan.preempted]
            events += [(now, "in", r.request_id) for r in plan.resumed + plan.admitted]
            events += [(now, "class", c.request.request_id, c.after) for c in plan.class_changes]
            events += [(now, len(plan.swap_out), len(plan.swap_in), len(plan.copy))]
            if plan.num_blocks is not None:
                events.append((now, "size", plan.num_blocks))
            for request in scheduler.update(plan, [TOKEN] * plan.num_samples):
                lengths = [len(seq.tokens) for seq in request.sequences]
                events.append((now, "end", request.request_id, lengths))
            now += 1
        scheduler.check_integrity()
    moves = [event for event in events if event[1:] != (0, 0, 0)]  # quiet steps leave no trace
    return (moves, asdict(scheduler.metrics), now), calls


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    policy=st.sampled_from(["swapped-first", "running-first", "recompute-only", "reserve"]),
    mode=st.sampled_from(["auto", "recompute"]),
    caching=st.booleans(),
)
def test_skipping_changes_nothing(seed: int, policy: str, mode: str, caching: bool) -> None:
    outcome, calls = run(seed, skipping=False, policy=policy, mode=mode, caching=caching)
    skipped, fewer_calls = run(seed, skipping=True, policy=policy, mode=mode, caching=caching)
    assert skipped == outcome
    assert fewer_calls <= calls


def test_a_lone_request_takes_few_calls() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=100), clock=lambda: 0.0)
    scheduler.add_request(Request("a", [1, 2, 3], max_tokens=500))
    calls = 0
    while scheduler.has_unfinished:
        calls += 1
        if steps := scheduler.quiet_steps():
            scheduler.skip(steps, lambda seq: TOKEN)
        else:
            plan = scheduler.schedule()
            scheduler.update(plan, [TOKEN] * plan.num_samples)
    assert calls < 10


def test_an_arrival_ends_the_quiet() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=100), clock=lambda: 0.0)
    scheduler.add_request(Request("a", [1, 2, 3], max_tokens=50))
    for _ in range(3):
        plan = scheduler.schedule()
        scheduler.update(plan, [TOKEN] * plan.num_samples)
    assert scheduler.quiet_steps() > 0
    scheduler.add_request(Request("b", [4], max_tokens=5))
    assert scheduler.quiet_steps() == 0
