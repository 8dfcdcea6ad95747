"""The executor: plans in, tokens out, over real pools."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from layby.execution.torch_executor import TorchExecutor
from layby.models.transformer import Transformer
from layby.sampling_params import SamplingParams
from layby.scheduling.plan import BlockMove, ScheduledSequence, StepPlan
from layby.scheduling.request import Sequence
from tests.execution.harness import (
    DEVICES,
    TINY,
    Blocks,
    make_executor,
    make_sequence,
    plan,
    random_tokens,
    random_weights,
    rest_of,
)


def generate(executor: TorchExecutor, sequence: Sequence, count: int) -> list[int]:
    """Run one sequence alone to the end; its block table must be long enough."""
    item = rest_of(sequence, sequence.num_computed)
    for _ in range(count):
        sequence.tokens += executor.execute(plan(item)).tokens
        sequence.num_computed = len(sequence.tokens) - 1
        item = rest_of(sequence, sequence.num_computed)
    return sequence.output_tokens


def test_greedy_tokens_are_those_of_transformers() -> None:
    """The whole way: batch, pools, network and sampler."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocab_size,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.intermediate_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_heads,
        num_key_value_heads=TINY.num_kv_heads,
        rms_norm_eps=TINY.rms_norm_eps,
        tie_word_embeddings=False,
    )
    oracle = transformers.LlamaForCausalLM(config).eval()
    oracle.load_state_dict(random_weights(TINY))
    prompt = random_tokens(30, TINY.vocab_size)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    executor = make_executor()
    sequence = make_sequence("a", prompt, block_table=Blocks(256).take(13))
    assert generate(executor, sequence, 20) == tokens[30:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parking_recomputing_and_batch_mates_change_no_token(
    dtype: torch.dtype, device: str
) -> None:
    """The promise of the whole design: a preempted request says what it would have said."""
    model = Transformer(TINY, random_weights(TINY), dtype=dtype, device=device)
    prompts = [random_tokens(n, TINY.vocab_size, seed=n) for n in (3, 17, 40, 64, 129)]
    params = [SamplingParams(seed=i, temperature=0.9, top_p=0.95) for i in range(len(prompts))]
    count, source = 30, random.Random(0)
    expected = []
    for i, prompt in enumerate(prompts):
        executor = make_executor(model=model)
        alone = make_sequence(str(i), prompt, params[i], block_table=Blocks(256).take(60))
        expected.append(generate(executor, alone, count))

    executor = make_executor(model=model)
    blocks, swap_blocks = Blocks(256), list(range(64))
    sequences = [
        make_sequence(str(i), prompt, params[i], block_table=blocks.take(40))
        for i, prompt in enumerate(prompts)
    ]
    parked: dict[int, list[int]] = {}
    events = {"parked": 0, "recomputed": 0, "chunks": 0}
    while any(s.num_output_tokens < count for s in sequences):
        step = StepPlan(step=1, now=0.0)
        emptied: list[int] = []  # free from the next step on: swap-out comes before swap-in
        for i, s in enumerate(sequences):
            if s.num_output_tokens >= count:
                continue
            used = -(-s.num_computed // 4)
            if i in parked:
                if source.random() < 0.5:
                    home = parked.pop(i)
                    source.shuffle(s.block_table)
                    step.swap_in += map(BlockMove, home, s.block_table)
                    emptied += home
                else:
                    continue
            elif s.num_computed and source.random() < 0.1 and used <= len(swap_blocks):
                parked[i], swap_blocks = swap_blocks[:used], swap_blocks[used:]
                step.swap_out += map(BlockMove, s.block_table[:used], parked[i])
                events["parked"] += 1
                continue
            elif s.num_computed and source.random() < 0.05:
                s.num_computed = 0
                source.shuffle(s.block_table)
                events["recomputed"] += 1
            left = len(s.tokens) - s.num_computed
            size = min(left, source.choice([1, 7, 50, 500]))
            events["chunks"] += size < left
            samplers = (s,) if size == left else ()
            step.scheduled.append(ScheduledSequence(s, s.num_computed, size, samplers))
            s.num_computed += size
        tokens = iter(executor.execute(step).tokens)
        for item in step.scheduled:
            for s in item.samplers:
                s.tokens.append(next(tokens))
        swap_blocks += emptied
    assert [s.output_tokens[:count] for s in sequences] == expected
    assert all(events.values()), f"the test must meet every kind of event: {events}"


def test_a_sequence_attends_to_blocks_that_another_writes_in_the_same_step() -> None:
    """A prefix may be shared the moment it is scheduled, before its KV exists."""
    prompt = random_tokens(22, TINY.vocab_size)
    alone = make_sequence("a", prompt, block_table=Blocks(256).take(10))
    expected = generate(make_executor(), alone, 5)

    executor = make_executor()
    blocks = Blocks(256)
    owner = make_sequence("a", prompt, block_table=blocks.take(10))
    guest = make_sequence("b", prompt)
    guest.block_table = owner.block_table[:5] + blocks.take(5)
    first = executor.execute(plan(rest_of(guest, 20), rest_of(owner)))
    assert first.tokens == [expected[0]] * 2
    guest.tokens.append(expected[0])
    guest.num_computed = 22
    assert generate(executor, guest, 4) == expected


def test_samples_of_one_prompt_share_its_row_and_draw_differently() -> None:
    """With n samples the prompt is computed once; each sample has its own random numbers."""
    executor = make_executor()
    first = make_sequence("a", [1, 2, 3], SamplingParams(n=4, seed=1), block_table=[7])
    first.request.fork()
    samples = tuple(first.request.sequences)
    other = make_sequence("b", [5, 6], block_table=[9])
    result = executor.execute(plan(ScheduledSequence(first, 0, 3, samples), rest_of(other)))
    assert len(result.tokens) == 5
    assert len(set(result.tokens[:4])) > 1
    for i, sample in enumerate(samples):
        alone = ScheduledSequence(first, 0, 3, (sample,))
        assert executor.execute(plan(alone)).tokens == [result.tokens[i]]


def test_moves_happen_in_order_before_the_forward_pass() -> None:
    """Out, then in, then copies: each may use a block that the one before has freed."""
    prompt = random_tokens(8, TINY.vocab_size)
    expected = generate(make_executor(), make_sequence("a", prompt, block_table=[0, 1, 2]), 2)
    executor = make_executor()
    sequence = make_sequence("a", prompt, block_table=[0, 1, 2])
    generate(executor, sequence, 1)
    sequence.block_table = [5, 0, 1]
    step = plan(rest_of(sequence, 8))
    step.swap_out = [BlockMove(0, 3), BlockMove(1, 4)]
    step.swap_in = [BlockMove(3, 1), BlockMove(4, 0)]
    step.copy = [BlockMove(1, 5)]
    assert executor.execute(step).tokens == expected[1:]


def test_prompt_logprobs_are_the_same_in_chunks_as_at_once() -> None:
    """Every prompt token but the first gets exactly one entry, whichever chunk holds its row."""
    prompt = random_tokens(11, TINY.vocab_size)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)

    def run(cuts: list[int]) -> dict[int, object]:
        executor = make_executor()
        sequence = make_sequence("a", prompt, params, block_table=[1, 2, 3])
        found, start = [], 0
        for count in cuts:
            samplers = (sequence,) if start + count == 11 else ()
            item = ScheduledSequence(sequence, start, count, samplers)
            found += executor.execute(plan(item)).prompt_logprobs.get("a", [])
            start += count
        assert [position for position, _ in found] == list(range(1, 11))
        assert [report.chosen.token_id for _, report in found] == prompt[1:]
        return dict(found)

    assert run([11]) == run([1, 3, 6, 1])


def test_a_request_with_a_token_outside_the_vocabulary_fails_alone() -> None:
    """It must not bring down the embedding of everyone else's tokens."""
    executor = make_executor()
    good = make_sequence("good", [1, 2, 3], block_table=[0])
    bad = make_sequence("bad", [1, TINY.vocab_size], block_table=[1])
    expected = executor.execute(plan(rest_of(good))).tokens
    result = executor.execute(plan(rest_of(bad), rest_of(good)))
    assert list(result.failures) == ["bad"]
    assert result.tokens[1:] == expected


def test_a_request_whose_logits_are_nan_fails_alone() -> None:
    """NaN in one sequence's KV stays in that sequence."""
    executor = make_executor()
    good = make_sequence("good", [1, 2, 3], block_table=[0])
    bad = make_sequence("bad", [4, 5, 6, 7, 8], block_table=[1, 2])
    expected = executor.execute(plan(rest_of(good), rest_of(bad))).tokens
    executor.cache.pool[1] = float("nan")
    result = executor.execute(plan(rest_of(good), rest_of(bad, 4)))
    assert list(result.failures) == ["bad"]
    assert result.tokens[0] == expected[0]


def test_a_step_without_rows_still_moves_blocks() -> None:
    """Everything may be parked in one step."""
    executor = make_executor()
    executor.cache.pool[3] = 1.5
    result = executor.execute(StepPlan(step=1, now=0.0, swap_out=[BlockMove(3, 0)]))
    assert result.tokens == []
    assert (executor.cache.swap_pool[0] == 1.5).all()


@pytest.mark.parametrize("block_size", [1, 3, 16, 200])
def test_any_block_size_gives_the_same_tokens(block_size: int) -> None:
    """Context is attended to in chunks of whole blocks, which need not divide the chunk."""
    prompt = random_tokens(150, TINY.vocab_size)
    expected = generate(
        make_executor(), make_sequence("a", prompt, block_table=Blocks(256).take(40)), 5
    )
    executor = make_executor(block_size=block_size)
    table = Blocks(256).take(-(-155 // block_size))
    assert generate(executor, make_sequence("a", prompt, block_table=table), 5) == expected


def test_a_short_block_table_is_an_error_with_both_numbers() -> None:
    """Reading a neighbour's block instead would go unnoticed."""
    sequence = make_sequence("a", [1, 2, 3, 4, 5], block_table=[0])
    with pytest.raises(ValueError, match="has 1 blocks, but positions up to 4 need 2"):
        make_executor().execute(plan(rest_of(sequence)))


def test_the_network_runs_with_a_head_for_every_query_and_with_one_for_all() -> None:
    """Row padding depends on how many query heads share a key head."""
    prompt = random_tokens(20, TINY.vocab_size)
    for kv_heads in (1, 6):
        config = replace(TINY, num_kv_heads=kv_heads)
        at_once = make_sequence("a", prompt, block_table=Blocks(256).take(8))
        stepwise = make_sequence("a", prompt[:1], block_table=Blocks(256).take(8))
        expected = generate(make_executor(config), at_once, 4)
        executor = make_executor(config)
        for token in prompt[1:]:
            executor.execute(plan(rest_of(stepwise, len(stepwise.tokens) - 1, sample=False)))
            stepwise.tokens.append(token)
        stepwise.num_prompt_tokens, stepwise.num_computed = 20, 19
        assert generate(executor, stepwise, 4) == expected
