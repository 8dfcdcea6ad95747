"""What today's engines do when memory runs short, each as a scene in which nothing may be lost.

They recompute (one drops every block of a request that is 80% done and prefills it again), end all
conversations when the pool fills, hang when the swap space fills, or crash when a priority
preempts. The executor checks what lies behind every position it is asked to attend to.
"""

from __future__ import annotations

import pytest

from layby.sampling_params import SamplingParams
from layby.scheduling import PreemptionMode
from tests.engine.harness import Harness

PROMPT, ANSWER = "x" * 30, 50


def alphabet(count: int) -> str:
    """What every sample says."""
    return "".join(chr(ord("a") + index % 26) for index in range(count))


def test_a_request_that_is_four_fifths_done_computes_nothing_again_when_it_must_go() -> None:
    harness = Harness(num_blocks=8, num_swap_blocks=6)
    params = SamplingParams(max_tokens=ANSWER)
    harness.engine.add_request(PROMPT, params, request_id="old", priority=1)
    old = harness.scheduler.requests["old"]
    while old.sequences[0].num_output_tokens < 0.8 * ANSWER:
        harness.engine.step()
    harness.engine.add_request("y" * 70, params, request_id="urgent", priority=0)
    harness.run()
    assert old.num_preemptions == 1
    assert bytes(old.sequences[0].output_tokens).decode() == alphabet(ANSWER)
    stats = harness.engine.stats()
    assert (stats.preemptions_swap, stats.recomputed_tokens) == (1, 0)
    computed = [plan.num_tokens for plan in harness.executor.plans]
    assert sum(computed) == 30 + 70 + 2 * (ANSWER - 1)


@pytest.mark.parametrize("num_swap_blocks", [0, 3, 64])
def test_conversations_that_fill_the_pool_all_come_to_their_own_end(num_swap_blocks: int) -> None:
    """Eight that need five blocks each, all admitted while they are short, in a pool of twelve."""
    harness = Harness(num_blocks=12, num_swap_blocks=num_swap_blocks, headroom=0)
    for number in range(8):
        prompt = f"{number}" * 16  # a block each
        harness.engine.add_request(prompt, SamplingParams(max_tokens=60), request_id=prompt)
    answers = harness.run()
    stats = harness.engine.stats()
    assert stats.preemptions_swap + stats.preemptions_recompute > 0
    assert len(answers) == 8
    for answer in answers.values():
        assert answer.outputs[0].finish_reason == "length"
        assert answer.outputs[0].text == alphabet(60)
        assert answer.error is None


def test_a_full_swap_space_holds_up_nobody() -> None:
    """It has room for one of five; somebody ends at least every time that one answer takes."""
    harness = Harness(num_blocks=10, num_swap_blocks=4, headroom=0)
    for number in range(5):
        harness.engine.add_request(f"{number}" * 32, SamplingParams(max_tokens=64))
    most_used = 0.0
    quiet_steps = 0
    while harness.engine.has_unfinished:
        deltas = harness.engine.step()
        quiet_steps = 0 if any(delta.finished for delta in deltas) else quiet_steps + 1
        assert quiet_steps < 2 * 64
        most_used = max(most_used, harness.engine.stats().swap_usage)
    assert most_used == 1.0
    stats = harness.engine.stats()
    assert stats.requests_finished == 5
    assert stats.preemptions_swap > 0
    assert stats.preemptions_recompute > 0  # the other way out
    harness.check_idle()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_swap_blocks", [0, 64])
@pytest.mark.parametrize("prefilled", [0, 16, 40, 45])
def test_a_priority_that_preempts_takes_over_wherever_the_victim_is(
    n: int, num_swap_blocks: int, prefilled: int
) -> None:
    """Before its first token, in the middle of its prompt, at its end, and while it answers."""
    harness = Harness(
        num_blocks=14,
        num_swap_blocks=num_swap_blocks,
        max_num_batched_tokens=16,
        max_num_seqs=4,
    )
    params = SamplingParams(max_tokens=20, n=n)
    harness.engine.add_request("x" * 40, params, request_id="low", priority=7)
    low = harness.scheduler.requests["low"]
    while low.sequences[0].num_computed < prefilled:
        harness.engine.step()
    harness.engine.add_request("y" * 180, SamplingParams(max_tokens=9), request_id="high")
    order = []
    left: list[tuple[str, PreemptionMode]] = []
    while harness.engine.has_unfinished:
        order += [delta.request_id for delta in harness.engine.step() if delta.finished]
        plan = harness.executor.plans[-1]
        left += [(request.request_id, mode) for request, mode in plan.preempted]
        harness.scheduler.check_integrity()
    assert order == ["high", "low"]
    parked = PreemptionMode.SWAP if num_swap_blocks else PreemptionMode.RECOMPUTE
    assert left == ([("low", parked)] if prefilled else [])
    assert [seq.num_output_tokens for seq in low.sequences] == [20] * n
    assert harness.engine.error is None
    harness.check_idle()
