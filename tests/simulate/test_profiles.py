"""Profiles: files come back as they were, bad ones are refused by name, estimates are plausible."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layby.errors import ConfigError, LaybyError
from layby.simulate.cost import CostModel, MoveCost, StepLoad, positions_read
from layby.simulate.profiles import (
    ANALYTIC,
    BUILT_IN,
    LLAMA3_8B,
    LLAMA3_70B,
    MEASURED,
    FitError,
    Profile,
    SchedulerDefaults,
    load_profile,
)

PROFILE = Profile(
    name="toy",
    kind=MEASURED,
    model="smollm2",
    dtype="int8",
    kv_cache_dtype="int8",
    device="cpu",
    machine={"cpu": "Größenwahn 9", "cpus": 2, "gpu": None},
    block_size=16,
    block_bytes=190_000,
    scheduler=SchedulerDefaults(100, 200, 8, 64, 512),
    cost=CostModel(
        rows_s=((0, 1e-5), (1, 0.1), (3, 1 / 3)),
        samples_s=((0, 0.0), (1, 1e-3)),
        decode_context_s=4.5e-7,
        sequence_s=1e-6,
        swap_out=MoveCost(1e-4, 1.7e-5),
    ),
    fit=FitError(70, 2.5, 4.0, 9.0),
    held_out=None,
    created="2026-11-29T20:00:00+00:00",
)

Change = Callable[[dict[str, Any]], Any]


def decode_s(profile: Profile, num_decodes: int, context: int) -> float:
    base, slope = profile.cost.decode_line(num_decodes)
    return base + slope * num_decodes * context


def prefill_s(profile: Profile, tokens: int) -> float:
    load = StepLoad(
        prefill_tokens=tokens,
        prefill_context=positions_read(0, tokens),
        num_sequences=1,
        num_samples=1,
    )
    return profile.cost.step_s(load)


@pytest.mark.parametrize("profile", [PROFILE, *(make() for make in BUILT_IN.values())])
def test_a_profile_comes_back_from_its_file_as_it_was(profile: Profile, tmp_path: Path) -> None:
    """A field that is lost or rounded would make two runs of one simulation differ."""
    path = tmp_path / "profile.json"
    profile.save(path)
    assert load_profile(path) == profile
    assert load_profile(str(path)) == profile


def delete(*place: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        *parents, last = place
        for parent in parents:
            data = data[parent]
        del data[last]

    return change


def put(value: Any, *place: str) -> Change:
    def change(data: dict[str, Any]) -> None:
        *parents, last = place
        for parent in parents:
            data = data[parent]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (delete("block_size"), "field block_size is missing"),
        (delete("cost", "swap_in"), "field cost.swap_in is missing"),
        (delete("cost", "copy", "block_s"), "field cost.copy.block_s is missing"),
        (delete("schema"), "no JSON object with a field 'schema'"),
        (put(2, "schema"), "field schema is 2; this version of Layby reads 1"),
        (put(1, "colour"), "field colour is unknown"),
        (put(1, "scheduler", "max_seqs"), "field scheduler.max_seqs is unknown"),
        (put("16", "block_size"), "field block_size must be a whole number, got '16'"),
        (put(True, "block_size"), "field block_size must be a whole number, got True"),
        (put(16.5, "block_bytes"), "field block_bytes must be a whole number, got 16.5"),
        (put(None, "model"), "field model must be text, got None"),
        (put([], "machine"), "field machine must be an object, got []"),
        (put(3, "cost"), "field cost must be an object, got 3"),
        (put("guessed", "kind"), "kind must be 'measured' or"),
        (put(0, "block_size"), "block_size must be an integer of at least 1, got 0"),
        (put(4, "scheduler", "max_num_batched_tokens"), "max_num_batched_tokens (4) must be at"),
        (put(-1.0, "cost", "sequence_s"), "in cost: sequence_s must be a finite number"),
        (put(float("nan"), "cost", "sequence_s"), "NaN is not a number"),
        (put("fast", "cost", "sequence_s"), "field cost.sequence_s must be a number, got 'fast'"),
        (put([[0, 1.0], [2, 0.5]], "cost", "rows_s"), "in cost: rows_s must not fall"),
        (put([[0, 1.0], [2]], "cost", "rows_s"), "in cost: rows_s must be pairs"),
        (put("steep", "cost", "rows_s"), "field cost.rows_s must be a list, got 'steep'"),
        (put(-1.0, "cost", "swap_out", "block_s"), "in cost.swap_out: block_s must be a finite"),
        (put({"points": 3}, "fit"), "field fit.mean_pct is missing"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_and_the_field(
    change: Change, complaint: str, tmp_path: Path
) -> None:
    """One clear line, not a traceback, and never a default in place of what was meant."""
    data = PROFILE.as_dict()
    data = json.loads(json.dumps(data))
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 10**5])
def test_what_is_no_json_object_is_no_profile(content: bytes, tmp_path: Path) -> None:
    """The wrong file."""
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.csv: not a profile"):
        load_profile(path)


def test_a_name_that_leads_nowhere_is_answered_with_those_there_are() -> None:
    """A typing error should cost one look, not a search."""
    with pytest.raises(ConfigError, match=r"did you mean a100-llama3-8b\?.*h100x4-llama3-70b"):
        load_profile("a100-lama3-8b")


def test_a_directory_is_no_profile(tmp_path: Path) -> None:
    """Nor a reason for a traceback."""
    with pytest.raises(ConfigError, match="cannot read the profile"):
        load_profile(tmp_path)
    with pytest.raises(LaybyError, match="cannot write"):
        PROFILE.save(tmp_path)


def test_a_profile_is_checked_when_it_is_made() -> None:
    """A fault should show where it arises, not when the file is read."""
    with pytest.raises(ConfigError, match="block_bytes must be at least 1, got 0"):
        replace(PROFILE, block_bytes=0)


def test_the_geometries_are_those_of_the_models() -> None:
    """Figures of the model cards: 8.03 and 70.6 billion parameters; 128 KiB of KV per token."""
    assert LLAMA3_8B.num_params == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA3_70B.num_params == pytest.approx(70.6e9, rel=0.001)
    assert 2 * LLAMA3_8B.kv_numbers == 128 * 1024
    assert 2 * LLAMA3_70B.kv_numbers == 320 * 1024


def test_estimates_are_called_estimates() -> None:
    """Nobody should take them for measurements."""
    for name in BUILT_IN:
        profile = load_profile(name)
        assert profile.name == name
        assert profile.kind == ANALYTIC
        assert profile.fit is None


@pytest.mark.parametrize(
    ("name", "decode_1_ms", "decode_256_ms", "prefill_2048_s", "pool_tokens"),
    [
        ("a100-llama3-8b", (10, 20), (25, 60), (0.1, 0.35), (350e3, 500e3)),
        ("h100-llama3-8b", (5.5, 12), (15, 40), (0.04, 0.15), (350e3, 500e3)),
        ("a100x4-llama3-70b", (20, 35), (45, 100), (0.3, 0.7), (350e3, 600e3)),
        ("h100x4-llama3-70b", (13, 25), (25, 60), (0.1, 0.3), (350e3, 600e3)),
    ],
)
def test_estimates_are_what_such_machines_are_known_to_do(
    name: str,
    decode_1_ms: tuple[float, float],
    decode_256_ms: tuple[float, float],
    prefill_2048_s: tuple[float, float],
    pool_tokens: tuple[float, float],
) -> None:
    """A factor of a thousand, or of the number of GPUs, gone astray."""
    profile = load_profile(name)

    def within(value: float, bounds: tuple[float, float]) -> None:
        assert bounds[0] <= value <= bounds[1]

    within(1e3 * decode_s(profile, 1, 500), decode_1_ms)
    within(1e3 * decode_s(profile, 256, 1000), decode_256_ms)
    within(prefill_s(profile, 2048), prefill_2048_s)
    within(profile.scheduler.num_blocks * profile.block_size, pool_tokens)
    assert profile.scheduler.num_swap_blocks * profile.block_bytes <= 64 * 2**30
    assert profile.scheduler.max_num_seqs == 256
    assert profile.scheduler.max_num_batched_tokens == 2048


def test_parking_a_sequence_costs_less_than_computing_it_again() -> None:
    """The premise of the scheduler on such machines: PCIe against a prefill."""
    for name in BUILT_IN:
        profile = load_profile(name)
        num_blocks = 2048 // profile.block_size
        idle = profile.cost.step_s(StepLoad())
        moved = profile.cost.step_s(StepLoad(blocks_out=num_blocks, blocks_in=num_blocks)) - idle
        assert moved < 0.5 * (prefill_s(profile, 2048) - idle)


def test_the_faster_gpu_is_faster_at_everything() -> None:
    """The two datasheets mixed up."""
    for size in ("llama3-8b", "x4-llama3-70b"):
        joint = "" if size.startswith("x") else "-"
        slow, fast = (load_profile(f"{gpu}{joint}{size}") for gpu in ("a100", "h100"))
        for num_decodes in (1, 16, 256):
            assert decode_s(fast, num_decodes, 500) < decode_s(slow, num_decodes, 500)
        assert prefill_s(fast, 512) < prefill_s(slow, 512)
        assert fast.cost.swap_in.seconds(100) < slow.cost.swap_in.seconds(100)


def test_a_file_from_before_disks_were_measured_is_read(tmp_path: Path) -> None:
    data = json.loads(json.dumps(PROFILE.as_dict()))
    del data["cost"]["demote"], data["cost"]["promote"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(data))
    assert load_profile(path).cost.demote is None
