"""Parked work on disk, as the engine sees it: it waits for the disk, reports it and survives it."""

from __future__ import annotations

import logging

import pytest

from layby.sampling_params import SamplingParams
from tests.engine.harness import Harness


def crowded() -> Harness:
    """Ten requests, each more urgent than the one before: most lie on disk for a while."""
    harness = Harness(
        num_blocks=16,
        num_swap_blocks=16,
        num_disk_blocks=100,
        headroom=0,
        enable_prefix_caching=False,
    )
    for number in range(10):
        harness.engine.add_request(
            "x" * 70,
            SamplingParams(max_tokens=20, ignore_eos=True),
            request_id=str(number),
            priority=10 - number,
        )
        harness.engine.step()
        harness.engine.step()
    return harness


def test_what_moved_is_counted_and_what_lies_where_is_shown() -> None:
    harness = crowded()
    stats = harness.engine.stats()
    assert 0 < stats.num_free_disk_blocks < stats.num_disk_blocks == 100
    assert harness.metric("layby_swap_usage", tier="ram") == stats.swap_usage
    assert harness.metric("layby_swap_usage", tier="disk") == stats.disk_usage > 0
    harness.run()
    stats = harness.engine.stats()
    assert stats.disk_usage == 0
    assert stats.recomputed_tokens == stats.swap_faults == stats.kv_losses == 0
    for move, count in (
        ("out", stats.swapped_out_blocks),
        ("in", stats.swapped_in_blocks),
        ("demote", stats.demoted_blocks),
        ("promote", stats.promoted_blocks),
    ):
        assert harness.metric("layby_swap_moved_blocks_total", move=move) == count > 0


def test_a_fault_costs_a_metric_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    harness = crowded()
    tokens = {name: answer.outputs[0].token_ids for name, answer in harness.run().items()}
    failing = crowded()
    failing.executor.failing_transfers = dict.fromkeys(range(1, 1000), "eio")
    with caplog.at_level(logging.WARNING):
        answers = failing.run()
    stats = failing.engine.stats()
    assert stats.kv_losses > 0
    assert stats.recomputed_tokens > 0
    assert {name: answer.outputs[0].token_ids for name, answer in answers.items()} == tokens
    assert failing.metric("layby_swap_faults_total", kind="eio") == stats.swap_faults > 0
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == stats.swap_faults
    assert sum("will be recomputed" in line for line in lines) == stats.kv_losses
    assert all("(eio)" in line for line in lines)


def test_every_kind_of_fault_has_a_sample_before_the_first_of_them() -> None:
    """Without it, nobody sees the first one as a rise."""
    harness = crowded()
    for kind in ("eio", "enospc", "short", "checksum", "other"):
        assert harness.metric("layby_swap_faults_total", kind=kind) == 0


def test_waiting_for_a_slow_disk_is_not_taken_for_a_stall() -> None:
    """The engine gives up on a scheduler that plans nothing for a hundred steps."""
    harness = crowded()
    harness.executor._transfer_steps = 150
    harness.run(max_steps=5000)
    assert harness.engine.error is None
    assert any(plan.is_empty for plan in harness.executor.plans)


def test_an_engine_without_requests_sees_its_transfers_end() -> None:
    """Otherwise their blocks would count as held for as long as nobody comes."""
    harness = crowded()
    while not harness.scheduler.tiers.num_transfers:
        harness.engine.step()
    for name in list(harness.scheduler.requests):
        harness.engine.abort(name)
    assert harness.engine.has_unfinished
    assert harness.run() == {}
    assert harness.engine.stats().num_free_disk_blocks == 100
