"""Scheduler, torch executor and a real swap file together: not one token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layby.execution.faults import Faults
from layby.execution.torch_executor import TorchExecutor
from layby.models.transformer import Transformer
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler, SchedulerConfig, TransferEnd
from layby.scheduling.metrics import SchedulerMetrics
from tests.execution.harness import TINY, random_tokens, random_weights

WAVES, PER_WAVE, PROMPT, OUTPUT = 5, 3, 18, 10


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(TINY, random_weights(TINY), dtype=torch.float32)


def run(
    model: Transformer,
    *,
    num_blocks: int,
    num_swap_blocks: int = 0,
    num_disk_blocks: int = 0,
    swap_dir: Path | None = None,
    faults: Faults | None = None,
) -> tuple[dict[str, list[list[int]]], SchedulerMetrics]:
    """Waves of requests, each more urgent than the one before, so that most are parked.

    Returns their tokens by request and sample, and what the scheduler counted.
    """
    config = SchedulerConfig(
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        num_disk_blocks=num_disk_blocks,
        block_size=4,
        headroom=0,
    )
    executor = TorchExecutor(
        model,
        block_size=4,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        num_disk_blocks=num_disk_blocks,
        swap_dir=None if swap_dir is None else str(swap_dir),
        faults=faults,
    )
    for pool in (executor.cache.pool, executor.cache.swap_pool):
        pool.fill_(float("nan"))
    scheduler = Scheduler(config)
    requests = []

    def step() -> None:
        plan = scheduler.schedule()
        result = executor.execute(plan)
        assert not result.failures
        scheduler.update(plan, result.tokens)
        scheduler.transfers_ended(result.transfer_ends)
        scheduler.check_integrity()

    for number in range(WAVES * PER_WAVE):
        request = Request(
            str(number),
            random_tokens(PROMPT, TINY.vocab_size, seed=number),
            max_tokens=OUTPUT,
            n=2 if number % PER_WAVE == 0 else 1,
            priority=WAVES - number // PER_WAVE,
            payload=SamplingParams(seed=number, temperature=0.9, n=2 if number % 3 == 0 else 1),
        )
        requests.append(request)
        scheduler.add_request(request)
        if number % PER_WAVE == PER_WAVE - 1:
            step()
            step()
            if swap_dir is not None:  # the disk of a machine is as fast as the steps of this model
                scheduler.transfers_ended(_all_ends(executor, scheduler))
    for _ in range(2000):
        if not scheduler.has_unfinished and not scheduler.tiers.num_transfers:
            break
        step()
    assert not scheduler.has_unfinished
    for pool_of in (scheduler.device_pool, scheduler.swap_pool, scheduler.disk_pool):
        assert pool_of.num_held == 0
    executor.close()
    tokens = {r.request_id: [seq.output_tokens for seq in r.sequences] for r in requests}
    return tokens, scheduler.metrics


def _all_ends(executor: TorchExecutor, scheduler: Scheduler) -> list[TransferEnd]:
    assert executor._disk is not None
    ends: list[TransferEnd] = []
    while len(ends) < scheduler.tiers.num_transfers:
        ends += executor._disk.ends(wait_s=5)
    return ends


@pytest.fixture(scope="module")
def undisturbed(model: Transformer) -> dict[str, list[list[int]]]:
    tokens, metrics = run(model, num_blocks=400)
    assert metrics.preemptions == 0
    return tokens


def test_parking_through_disk_changes_no_token_and_recomputes_none(
    model: Transformer, undisturbed: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    tokens, metrics = run(
        model, num_blocks=32, num_swap_blocks=48, num_disk_blocks=300, swap_dir=tmp_path
    )
    assert tokens == undisturbed
    assert metrics.demoted_blocks > 20
    assert metrics.promoted_blocks > 10
    assert metrics.recomputed_tokens == 0
    assert not metrics.swap_faults


@pytest.mark.parametrize(
    ("spec", "kinds"),
    [
        ("disk.read=eio:0.5,disk.write=enospc:0.3", {"eio", "enospc"}),
        ("disk.read=corrupt:0.4,disk.read=short:0.4", {"checksum", "short"}),
        ("disk.read=eio:1", {"eio"}),
        ("disk.write=eio:1", {"eio"}),
    ],
)
def test_a_disk_that_fails_costs_a_recompute_and_no_token(
    model: Transformer,
    undisturbed: dict[str, list[list[int]]],
    tmp_path: Path,
    spec: str,
    kinds: set[str],
) -> None:
    tokens, metrics = run(
        model,
        num_blocks=32,
        num_swap_blocks=48,
        num_disk_blocks=300,
        swap_dir=tmp_path,
        faults=Faults.parse(spec),
    )
    assert tokens == undisturbed
    assert metrics.swap_faults
    assert kinds.issuperset(metrics.swap_faults)  # which it hits depends on the disk's pace
