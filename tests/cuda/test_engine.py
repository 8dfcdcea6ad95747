"""A whole engine on a GPU that has too little memory: no bit of an answer changes.

The model has the width of Llama 3.2 1B and four of its layers, so that its products are those of a
real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from layby.engine import Engine
from layby.engine.journal_records import RequestRecord
from layby.engine.toy import ByteTokenizer
from layby.execution.executor import StepResult
from layby.execution.torch_executor import TorchExecutor
from layby.models.config import ModelConfig
from layby.models.transformer import Transformer
from layby.sampling_params import SamplingParams
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from tests.cuda.conftest import DEVICE

ON_GPU = DEVICE != "cpu"
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=ByteTokenizer().vocab_size,
    hidden_size=2048 if ON_GPU else 64,
    intermediate_size=8192 if ON_GPU else 96,
    num_layers=4 if ON_GPU else 2,
    num_heads=32 if ON_GPU else 4,
    num_kv_heads=8 if ON_GPU else 2,
    head_dim=64 if ON_GPU else 16,
    context_length=2048,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
)
NUM_REQUESTS = 24 if ON_GPU else 16
NEED = 66
"""Blocks that the largest of the requests may need."""


def random_weights(config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(out: int, size_in: int) -> torch.Tensor:
        scale = size_in**-0.5
        numbers = torch.randn(out, size_in, generator=generator, device=DEVICE)
        return (numbers * scale).to(dtype)

    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden, device=DEVICE),
        "lm_head.weight": matrix(config.vocab_size, hidden),
    }
    for layer in range(config.num_layers):
        for name, out, size_in in (
            ("self_attn.q_proj", queries, hidden),
            ("self_attn.k_proj", keys, hidden),
            ("self_attn.v_proj", keys, hidden),
            ("self_attn.o_proj", hidden, queries),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(out, size_in)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, device=DEVICE)
    return weights


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def model(request: pytest.FixtureRequest) -> Iterator[Transformer]:
    dtype = request.param
    yield Transformer(CONFIG, random_weights(CONFIG, dtype), dtype=dtype, device=DEVICE)
    if ON_GPU:
        torch.cuda.empty_cache()


class Executor(TorchExecutor):
    """Copies ahead or not; waits for the disk a moment in every step, and counts what it met."""

    prefetches = True
    num_ahead = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if not self.prefetches:
            plan.next_in = None
        staging = self.cache._staging
        if staging is not None:
            self.num_ahead += sum(move.src in staging._places for move in plan.swap_in)
        result = super().execute(plan)
        if self._disk is not None:
            result.transfer_ends += self._disk.ends(wait_s=0.01)
        return result


@dataclass
class Outcome:
    """What a run gave.

    Attributes:
        answers: In words, log-probabilities to the last bit.
        stats: The engine's.
        num_ahead: Blocks that had been copied ahead when they were needed.
    """

    answers: list[str]
    stats: Any
    num_ahead: int


def draw_requests() -> Iterator[tuple[list[int], SamplingParams, int]]:
    """Prompts, parameters and priorities, as they come: later ones are often more urgent."""
    source = random.Random(0)
    for number in range(NUM_REQUESTS):
        n = 4 if number % 6 == 1 else 1
        prompt = [source.randrange(256) for _ in range(source.choice([40, 130, 300, 500]))]
        params = SamplingParams(
            n=n,
            max_tokens=source.choice([60, 100, 120]),
            temperature=source.choice([0.0, 0.8, 1.0]),
            top_p=source.choice([1.0, 0.9]),
            presence_penalty=source.choice([0.0, 0.7]),
            seed=number,
            ignore_eos=True,
            logprobs=source.choice([None, 0, 3]),
            prompt_logprobs=1 if number % 5 == 0 else None,
        )
        yield prompt[: 130 if n > 1 else None], params, source.choice([5, -number])


def serve(
    model: Transformer,
    *,
    num_blocks: int,
    disturb: Callable[[Engine, int], None] = lambda engine, step: None,
    swap_dir: Path | None = None,
    prefetches: bool = True,
    **options: Any,
) -> Outcome:
    config = SchedulerConfig(
        num_blocks=num_blocks, block_size=16, max_model_len=1024, max_num_batched_tokens=256,
        **options,
    )  # fmt: skip
    executor = Executor(
        model,
        block_size=16,
        num_blocks=num_blocks,
        num_swap_blocks=config.num_swap_blocks,
        num_disk_blocks=config.num_disk_blocks,
        swap_dir=None if swap_dir is None else str(swap_dir),
    )
    executor.prefetches = prefetches
    for pool in (executor.cache.pool, executor.cache.swap_pool):
        pool.fill_(float("nan"))
    now = 0.0
    engine = Engine(
        Scheduler(config, clock=lambda: now), executor, ByteTokenizer(), max_model_len=1024,
        clock=lambda: now,
    )  # fmt: skip
    records: dict[str, RequestRecord] = {}
    to_come = list(draw_requests())
    for step in range(5000):
        if to_come and step % 5 == 0:
            prompt, params, priority = to_come.pop(0)
            prepared = engine.prepare(prompt, params, priority=priority)
            records[engine.submit(prepared)] = RequestRecord.new(prompt, prepared.settled_params)
        if not engine.has_unfinished:
            break
        now += 1.0
        disturb(engine, step)
        for delta in engine.step():
            assert delta.error is None, delta.error
            records[delta.request_id].add(delta)
        engine.scheduler.check_integrity()
    assert not engine.has_unfinished
    for pool_of in (engine.scheduler.device_pool, engine.scheduler.swap_pool):
        assert pool_of.num_held == 0
    stats = engine.stats()
    engine.close()
    return Outcome([repr(record) for record in records.values()], stats, executor.num_ahead)


@pytest.fixture(scope="module")
def undisturbed(model: Transformer) -> list[str]:
    outcome = serve(model, num_blocks=3000, max_num_seqs=64)
    assert outcome.stats.preemptions_swap == outcome.stats.preemptions_recompute == 0
    return outcome.answers


def up_and_down(engine: Engine, step: int) -> None:
    """Another size of the pool every few steps."""
    if step % 7 == 3:
        engine.resize_kv_pool(random.Random(step).choice([NEED, NEED + 8, 90, 150]))


@pytest.mark.parametrize("prefetches", [True, False], ids=["copied ahead", "not copied ahead"])
def test_parking_changes_nothing(
    model: Transformer, undisturbed: list[str], prefetches: bool
) -> None:
    found = serve(
        model, num_blocks=NEED, num_swap_blocks=800, preemption_mode="swap", headroom=0,
        prefetches=prefetches,
    )  # fmt: skip
    assert found.answers == undisturbed
    assert found.stats.preemptions_swap > 3
    assert bool(found.num_ahead) == (prefetches and ON_GPU)


def test_recomputing_changes_nothing(model: Transformer, undisturbed: list[str]) -> None:
    found = serve(model, num_blocks=NEED, preemption_mode="recompute", headroom=0)
    assert found.answers == undisturbed
    assert found.stats.preemptions_recompute > 3


def test_hardly_any_swap_pool_changes_nothing(model: Transformer, undisturbed: list[str]) -> None:
    found = serve(model, num_blocks=NEED, num_swap_blocks=30, headroom=0)
    assert found.answers == undisturbed
    assert found.stats.preemptions_swap
    assert found.stats.preemptions_recompute


def test_parking_on_disk_changes_nothing(
    model: Transformer, undisturbed: list[str], tmp_path: Path
) -> None:
    found = serve(
        model, num_blocks=NEED, num_swap_blocks=NEED + 8, num_disk_blocks=800, swap_dir=tmp_path,
        preemption_mode="swap", headroom=0,
    )  # fmt: skip
    assert found.answers == undisturbed
    assert found.stats.demoted_blocks
    assert found.stats.promoted_blocks


def test_a_pool_of_another_size_in_the_middle_changes_nothing(
    model: Transformer, undisturbed: list[str]
) -> None:
    found = serve(model, num_blocks=90, num_swap_blocks=800, headroom=0, disturb=up_and_down)
    assert found.answers == undisturbed
    assert found.stats.preemptions_swap
