"""Case 16: gauges and counters against a schedule worked out by hand.

Twelve blocks of 16 tokens; four requests of 40 prompt and 80 output tokens, R1 to R4, arrive
together; a step takes a second. A request that has computed ``c`` positions holds ``ceil(c / 16)``
blocks; its ``t``-th step (the prompt in the first) computes up to position ``39 + t``. Who comes in
must leave a block free for every running sequence.

====  ========================================================================================
step  what happens
====  ========================================================================================
1     R1, R2, R3 come in with 3 blocks each; R4 would need 3 and leave 3, but 3 are free
10    R1, R2, R3 take a 4th block each: the pool is full
26    R1 needs a 5th: R3 goes out (64 positions, 4 blocks); R1 and R2 take theirs
42    R1 and R2 take a 6th: the pool is full
58    R1 needs a 7th: R2 goes out (96 positions, 6 blocks)
80    R1's 80th token ends it
81    R2 comes back (7 blocks); R3 would need 5 and leave 1, but 5 are free
103   R2 ends: it had 57 tokens and makes 23 more in steps 81 to 103
104   R3 comes back (5 blocks); then nobody is parked, so R4 comes in (3 blocks)
145   R4 needs a 6th, beside 7 of R3 (since 136) and its own 5: it goes out itself (80 positions)
158   R3 ends: 25 tokens, and 55 in steps 104 to 158
159   R4 comes back
197   R4 ends: 41 tokens, and 39 in steps 159 to 197
====  ========================================================================================
"""

from __future__ import annotations

import pytest

from layby.engine import RequestOutput
from layby.sampling_params import SamplingParams
from tests.engine.harness import Harness, collect

ENDS = {"R1": 80, "R2": 103, "R3": 158, "R4": 197}
PARKED = {"R3": (26, 104), "R2": (58, 81), "R4": (145, 159)}
"""Request → the step that preempts it, and the one that lets it back in."""

POSITIONS_LOST = {"R3": 64, "R2": 96, "R4": 80}
"""What each must compute again if its KV was dropped."""


def make_harness(num_swap_blocks: int) -> Harness:
    harness = Harness(num_blocks=12, num_swap_blocks=num_swap_blocks, enable_prefix_caching=False)
    for name in ENDS:
        params = SamplingParams(max_tokens=80, ignore_eos=True)
        harness.engine.add_request("x" * 40, params, request_id=name)
    return harness


def out_at(step: int) -> list[str]:
    """Who has been preempted and not come back, after a step."""
    return [name for name, (out, back) in PARKED.items() if out <= step < back]


def preemptions_by(step: int) -> int:
    """Preemptions up to a step."""
    return sum(out <= step for out, _ in PARKED.values())


def recomputed_by(step: int) -> int:
    """Positions computed again up to a step; each request needs one step for all of its own."""
    return sum(POSITIONS_LOST[name] for name, (_, back) in PARKED.items() if back <= step)


@pytest.mark.parametrize("num_swap_blocks", [24, 0])
def test_case_16_every_scrape_agrees_with_the_hand_worked_schedule(num_swap_blocks: int) -> None:
    """Parked with swap, waiting again without; the counters rise once per event."""
    harness = make_harness(num_swap_blocks)
    swaps = num_swap_blocks > 0
    answers: dict[str, RequestOutput] = {}
    for step in range(1, 198):
        for delta in harness.engine.step():
            collect(answers, delta)
        text = harness.engine.metrics_text()
        alive = [name for name, end in ENDS.items() if step < end]
        out = out_at(step)
        unborn = ["R4"] if step < 104 else []
        expected = {
            "vllm:num_requests_swapped": len(out) if swaps else 0,
            "layby_swapped_queue_size": len(out) if swaps else 0,
            "vllm:num_requests_waiting": len(unborn) + (0 if swaps else len(out)),
            "vllm:num_requests_running": len(alive) - len(out) - len(unborn),
            "vllm:num_preemptions_total": preemptions_by(step),
            "layby_recomputed_tokens_total": 0 if swaps else recomputed_by(step),
        }
        assert values(text, expected) == expected, f"step {step}"
        assert {name for name, one in answers.items() if one.finished} == ENDS.keys() - alive
    assert not harness.engine.has_unfinished
    harness.check_idle()
    assert all(len(one.outputs[0].token_ids) == 80 for one in answers.values())


def test_case_16_totals_of_the_run_with_swap() -> None:
    harness = make_harness(24)
    harness.run()
    parked_s = [back - out for out, back in PARKED.values()]
    stats = harness.engine.stats()
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (3, 0)
    assert stats.recomputed_tokens == 0
    assert stats.swapped_queue_size_max == 2
    assert stats.preemption_rate == 0.75
    assert stats.swaps_completed == 3
    assert stats.avg_swapped_duration_s == pytest.approx(sum(parked_s) / 3)
    assert stats.kv_usage_max == 1.0
    assert harness.metric("layby_preemption_rate") == 0.75
    assert harness.metric("layby_preemptions_total", mode="swap") == 3
    assert harness.metric("layby_preemptions_total", mode="recompute") == 0
    assert harness.metric("layby_swapped_duration_seconds_count") == 3
    assert harness.metric("layby_swapped_duration_seconds_sum") == sum(parked_s)
    assert harness.metric("vllm:prompt_tokens_total") == 160
    assert harness.metric("vllm:generation_tokens_total") == 320
    assert harness.metric("vllm:kv_cache_usage_perc") == 0


def test_case_16_totals_of_the_run_without_swap() -> None:
    harness = make_harness(0)
    harness.run()
    stats = harness.engine.stats()
    assert (stats.preemptions_swap, stats.preemptions_recompute) == (0, 3)
    assert stats.recomputed_tokens == 64 + 96 + 80
    assert stats.swapped_queue_size_max == 0
    assert stats.avg_swapped_duration_s == 0
    assert harness.metric("layby_preemptions_total", mode="recompute") == 3
    assert harness.metric("layby_swapped_duration_seconds_count") == 0
    assert harness.metric("vllm:prompt_tokens_total") == 160


def test_pool_gauges_show_what_is_held() -> None:
    """At step 60: R1 holds 7 of 12 blocks, and 10 of 24 swap blocks hold R2 and R3."""
    harness = make_harness(24)
    for _ in range(60):
        harness.engine.step()
    assert harness.metric("vllm:kv_cache_usage_perc") == pytest.approx(7 / 12)
    assert harness.metric("vllm:cpu_cache_usage_perc") == pytest.approx(10 / 24)


def values(text: bytes, names: dict[str, int]) -> dict[str, float]:
    """The samples of these names."""
    found = {}
    for line in text.decode().splitlines():
        name, _, rest = line.partition(" ")
        name = name.partition("{")[0]
        if name in names:
            found[name] = float(rest.rpartition(" ")[2] if " " in rest else rest)
    return found
