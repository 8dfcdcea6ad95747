"""What a flag means to a simulation is what it means to the server."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from layby.engine import EngineConfig
from layby.engine.config import GIB
from layby.errors import ConfigError
from layby.scheduling import SchedulerConfig
from layby.simulate.profiles import Profile, load_profile
from layby.simulate.settings import SCHEDULER_OPTIONS, scheduler_config, with_block_size


@pytest.fixture(scope="module")
def a100() -> Profile:
    return load_profile("a100-llama3-8b")


def test_without_options_the_profile_decides(a100: Profile) -> None:
    config = scheduler_config(a100)
    for name in (
        "num_blocks",
        "num_swap_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
    ):
        assert getattr(config, name) == getattr(a100.scheduler, name)
    assert config.block_size == a100.block_size
    # What a profile does not say is the engine's own default.
    engine = EngineConfig()
    assert config.policy == engine.scheduling_policy
    for name in ("preemption_mode", "enable_prefix_caching", "headroom", "max_queue"):
        assert getattr(config, name) == getattr(engine, name)


def test_none_is_as_good_as_not_named(a100: Profile) -> None:
    names = [name for name in SCHEDULER_OPTIONS if name != "max_queue"]
    assert scheduler_config(a100, **dict.fromkeys(names)) == scheduler_config(a100)
    assert scheduler_config(a100, max_queue=None).max_queue is None


def test_every_setting_of_the_scheduler_can_be_told(a100: Profile) -> None:
    """A setting that the scheduler gains and a simulation cannot be told."""
    renamed = {"policy": "scheduling_policy", "num_disk_blocks": "swap_disk_gib"}
    for setting in fields(SchedulerConfig):
        assert renamed.get(setting.name, setting.name) in SCHEDULER_OPTIONS
    assert set(SCHEDULER_OPTIONS) <= {option.name for option in fields(EngineConfig)}
    assert not {"model", "seed", "device", "num_threads"} & set(SCHEDULER_OPTIONS)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_cache_gib": 8}, {"num_blocks": 8 * GIB // (2 * 2**20)}),
        ({"num_blocks": 77}, {"num_blocks": 77}),
        ({"swap_gib": 1}, {"num_swap_blocks": 512}),
        ({"swap_gib": 0}, {"num_swap_blocks": 0}),
        ({"num_swap_blocks": 5}, {"num_swap_blocks": 5}),
        ({"max_num_seqs": 7, "headroom": 0.5}, {"max_num_seqs": 7, "headroom": 0.5}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
        # More than any host has: here it is only a number.
        ({"swap_gib": 1e6}, {"num_swap_blocks": 512 * 10**6}),
        # As in the engine, nothing is set apart where nothing would use it.
        ({"preemption_mode": "recompute"}, {"num_swap_blocks": 0}),
        ({"scheduling_policy": "reserve"}, {"num_swap_blocks": 0, "policy": "reserve"}),
    ],
)
def test_options_mean_what_they_mean_to_the_engine(
    a100: Profile, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    config = scheduler_config(a100, **options)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 7}, "did you mean max_num_seqs"),
        ({"model": "llama"}, "no scheduler option"),
        ({"num_blocks": 7, "kv_cache_gib": 1}, "give one"),
        ({"kv_cache_gib": 0.001}, "less than one block"),
        ({"max_model_len": 200_000}, "more than the model's context"),
        ({"max_num_seqs": 4096}, "max_num_batched_tokens .2048. must be at least"),
        ({"block_size": 0}, "block_size must be"),
        ({"block_size": "16"}, "block_size must be a whole number"),
        ({"scheduling_policy": "fifo"}, "scheduling_policy must be one of"),
        ({"headroom": float("nan")}, "headroom must be"),
    ],
)
def test_what_cannot_work_is_refused(a100: Profile, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheduler_config(a100, **options)


def test_larger_blocks_leave_pools_as_large_as_they_were(a100: Profile) -> None:
    config, larger = scheduler_config(a100), scheduler_config(a100, block_size=64)
    assert larger.block_size == 64
    assert larger.num_blocks == config.num_blocks // 4
    assert larger.num_swap_blocks == config.num_swap_blocks // 4
    profile = with_block_size(a100, 64)
    assert profile.block_bytes == 4 * a100.block_bytes
    assert profile.cost.swap_in.block_s == pytest.approx(4 * a100.cost.swap_in.block_s)
    assert profile.cost.swap_in.fixed_s == a100.cost.swap_in.fixed_s
    assert profile.cost.rows_s == a100.cost.rows_s
    assert with_block_size(profile, 64) is profile


def test_a_disk_must_be_known_to_the_profile(a100: Profile) -> None:
    config = scheduler_config(a100, swap_disk_gib=2)
    assert config.num_disk_blocks == 2 * GIB // a100.block_bytes
    unknown = replace(a100, cost=replace(a100.cost, demote=None, promote=None))
    assert scheduler_config(unknown).num_disk_blocks == 0
    with pytest.raises(ConfigError, match="does not tell how fast a disk is"):
        scheduler_config(unknown, swap_disk_gib=2)
