"""Settings: what is refused, and how the sizes left open are settled."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from layby.engine import EngineConfig
from layby.engine.config import GIB
from layby.engine.memory import available_host_bytes
from layby.errors import ConfigError
from layby.scheduling import SchedulerConfig

MIB = 2**20


def resolve(config: EngineConfig, **changes: Any) -> SchedulerConfig:
    """On a machine with 8 GiB, for a model of 1,024 tokens whose blocks take 1 MiB."""
    machine = {
        "context_length": 1024,
        "block_bytes": MIB,
        "host_bytes": 8 * GIB,
    }
    return config.resolve(**(machine | changes))


def test_the_default_pool_is_bounded_by_what_could_be_used() -> None:
    """64 sequences of 1,024 tokens fill 4,096 blocks, more than 40% of 8 GiB; 8 sequences 512."""
    assert resolve(EngineConfig()).num_blocks == int(8 * GIB * 0.4) // MIB
    assert resolve(EngineConfig(max_num_seqs=8)).num_blocks == 512


def test_the_pool_is_as_large_as_it_is_asked_to_be() -> None:
    assert resolve(EngineConfig(num_blocks=12)).num_blocks == 12
    assert resolve(EngineConfig(kv_cache_gib=0.5)).num_blocks == 512


def test_the_swap_pool_follows_its_size_and_its_count_overrides() -> None:
    assert resolve(EngineConfig(num_blocks=12, swap_gib=1.5)).num_swap_blocks == 1536
    assert resolve(EngineConfig(num_blocks=12, num_swap_blocks=7)).num_swap_blocks == 7
    assert resolve(EngineConfig(num_blocks=12, swap_gib=0)).num_swap_blocks == 0


def test_a_swap_pool_beyond_half_of_what_is_left_is_reduced_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert resolve(EngineConfig(kv_cache_gib=6)).num_swap_blocks == 1024
        assert caplog.text == ""  # nobody asked for more
        assert resolve(EngineConfig(kv_cache_gib=6, swap_gib=3)).num_swap_blocks == 1024
    assert "swap_gib=3 reduced to 1.00 GiB: 2.00 GiB of RAM are left" in caplog.text


def test_the_disk_is_sized_in_gib_and_used_only_where_there_is_ram_to_reach_it() -> None:
    assert resolve(EngineConfig()).num_disk_blocks == 0
    assert resolve(EngineConfig(swap_dir="/d")).num_disk_blocks == 16 * 1024
    assert resolve(EngineConfig(swap_dir="/d", swap_disk_gib=1.5)).num_disk_blocks == 1536
    recompute = EngineConfig(swap_dir="/d", preemption_mode="recompute")
    assert resolve(recompute).num_disk_blocks == 0
    with pytest.raises(ConfigError, match=r"swap_disk_gib=0\.0001 holds less than one block"):
        resolve(EngineConfig(swap_dir="/d", swap_disk_gib=0.0001))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_disk_gib": 2}, "swap_disk_gib is 2, but swap_dir does not say where"),
        ({"swap_dir": "/d", "swap_disk_gib": 0}, "swap_disk_gib must be above 0, got 0"),
        ({"swap_dir": "/d", "swap_gib": 0}, "reaches the disk through RAM"),
        ({"swap_dir": "/d", "num_swap_blocks": 0}, "reaches the disk through RAM"),
    ],
    ids=str,
)
def test_a_disk_that_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize("policy", ["recompute-only", "reserve"])
def test_no_swap_pool_is_made_for_a_policy_that_never_parks(policy: str) -> None:
    assert resolve(EngineConfig(scheduling_policy=policy)).num_swap_blocks == 0
    assert resolve(EngineConfig(preemption_mode="recompute")).num_swap_blocks == 0


@pytest.mark.parametrize("nothing", [{"swap_gib": 0.0}, {"swap_gib": 1e-9}, {"num_swap_blocks": 0}])
def test_swapping_without_a_swap_pool_is_warned_of(
    nothing: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It was silent, and everybody recomputed."""
    assert resolve(EngineConfig(preemption_mode="swap", **nothing)).num_swap_blocks == 0
    assert "preemption_mode is swap, but the swap pool has no block" in caplog.text
    caplog.clear()
    resolve(EngineConfig(preemption_mode="auto", **nothing))
    resolve(EngineConfig(preemption_mode="swap"))
    assert not caplog.text


def test_on_a_gpu_the_pool_comes_out_of_its_memory_and_swap_out_of_ram() -> None:
    resolved = resolve(EngineConfig(max_num_seqs=512), cuda_bytes=2 * GIB)
    assert resolved.num_blocks == int(2 * GIB * 0.8) // MIB
    assert resolved.num_swap_blocks == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 9000}, r"num_blocks=9000 takes 8\.79 GiB .* 8\.00 GiB are available"),
        ({"kv_cache_gib": 0.0001}, r"kv_cache_gib=0\.0001 holds less than one block .*1\.00 MiB"),
        ({"num_blocks": 4096, "num_swap_blocks": 5000}, r"takes 4\.88 GiB; 4\.00 GiB of RAM"),
        ({"max_model_len": 2048}, r"max_model_len \(2048\) is more than .* \(1024 tokens\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": 8, "kv_cache_gib": 1.0}, "num_blocks .* and kv_cache_gib .* give one"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda; got 'tpu'"),
        ({"scheduling_policy": "fifo"}, "scheduling_policy must be one of swapped-first"),
        ({"num_blocks": 0}, r"num_blocks must be .*at least 1"),
        ({"swap_gib": -1}, "swap_gib must be at least 0"),
        ({"swap_gib": float("nan")}, "swap_gib must be a finite number"),
        ({"kv_cache_gib": float("inf")}, "kv_cache_gib must be a finite number"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"max_num_seqs": 100, "max_num_batched_tokens": 50}, "max_num_batched_tokens"),
    ],
)
def test_values_that_cannot_work_are_refused_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("num_block", "did you mean num_blocks"),
        ("gpu_memory_utilization", "options are model, dtype"),
        ("max_seqs", "did you mean max_num_seqs"),
    ],
)
def test_an_unknown_option_is_refused_naming_those_most_like_it(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'; {hint}"):
        EngineConfig.from_options(**{name: 1})


def test_every_setting_has_help_and_every_size_its_unit() -> None:
    """The command line is made of these."""
    for option in fields(EngineConfig):
        assert option.metadata["help"].endswith("."), option.name
        assert set(option.metadata) == {"help", "unit", "choices"}
    units = {option.name: option.metadata["unit"] for option in fields(EngineConfig)}
    assert units["num_blocks"] == "blocks"
    assert units["swap_gib"] == "GiB"


def make_system(root: Path, *, available_kib: int, group: dict[str, str] | None = None) -> Path:
    """A ``/proc`` and ``/sys`` that say so."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n"
    )
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    directory = root / "sys/fs/cgroup/a/b"
    directory.mkdir(parents=True)
    for name, text in (group or {}).items():
        (directory.parent / name).write_text(text)  # the limit is set on the parent group
        (directory / name).write_text("max\n" if name == "memory.max" else text)
    return root


def test_available_memory_is_what_the_machine_has(tmp_path: Path) -> None:
    assert available_host_bytes(make_system(tmp_path, available_kib=1000)) == 1000 * 1024


def test_available_memory_is_no_more_than_a_cgroup_above_leaves(tmp_path: Path) -> None:
    """Unused file pages are given up on demand, so they count as available."""
    group = {
        "memory.max": "500000\n",
        "memory.current": "300000\n",
        "memory.stat": "anon 200000\ninactive_file 100000\n",
    }
    assert available_host_bytes(make_system(tmp_path, available_kib=1000, group=group)) == 300000


def test_available_memory_of_a_system_that_says_nothing_is_still_a_number(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_cache_gib", float("nan")),
        ("kv_cache_gib", float("inf")),
        ("kv_cache_gib", "3"),
        ("kv_cache_gib", 10**400),
        ("swap_gib", float("nan")),
        ("swap_gib", float("inf")),
        ("swap_gib", True),
        ("headroom", float("nan")),
        ("headroom", float("-inf")),
        ("headroom", None),
        ("num_blocks", 2.5),
        ("max_num_seqs", "3"),
        ("block_size", True),
        ("block_size", None),
        ("max_queue", 1.0),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", "no"),
        ("dtype", []),
        ("model", 5),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be"):
        EngineConfig(**{name: value})
