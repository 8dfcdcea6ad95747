"""``layby replay``: what it prints, and how it ends."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from layby.cli import main
from layby.scheduling import MoveCosts
from tests.engine.recorded import RecordedHarness, record


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    record(tmp_path / "r", seed=6)
    return tmp_path / "r"


def test_a_summary_tells_what_happened(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recording)]) == 0
    out = capsys.readouterr().out
    for words in ("toy", "swapped-first", "requests", "preempted by swap", "time parked"):
        assert words in out
    assert "Checked" not in out


def test_a_check_says_how_much_was_the_same(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--check", "--json", "-"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    steps, decisions = result["check"]["steps"], result["check"]["decisions"]
    assert steps == result["summary"]["steps"] > 50
    assert f"Checked {steps} steps with {decisions} decisions: all the same." in captured.err


def test_a_difference_ends_with_1_and_both_sides(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = recording.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if '"e":"step"' in line and '"in":' in line)
    row = json.loads(lines[place])
    row["in"] = [99]
    recording.write_text("\n".join([*lines[:place], json.dumps(row), *lines[place + 1 :]]) + "\n")
    assert main(["replay", str(recording), "--check"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out
    assert f"step {row['k']}, line {place + 1} of {recording}: admitted" in out
    assert "recorded: admitted [99]" in out
    assert "replayed: admitted [" in out


def test_a_recording_cut_off_is_told(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording.write_bytes(recording.read_bytes()[:-5])
    assert main(["replay", str(recording), "--check"]) == 0
    out = capsys.readouterr().out
    assert "The last line is incomplete and was left out." in out
    assert "The recording has no end" in out


def test_what_is_no_recording_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r").write_text("TIMESTAMP,ContextTokens\n")
    assert main(["replay", str(tmp_path / "r")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"layby: {tmp_path / 'r'}, line 1: not JSON")
    assert captured.err.count("\n") == 1


def test_help_explains_several_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--help"]) == 0
    assert "the oldest first: FILE.2 FILE.1 FILE." in " ".join(capsys.readouterr().out.split())


def test_preemptions_are_listed_with_what_either_way_would_have_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell_costs(harness: RecordedHarness, rng: random.Random) -> None:
        harness.scheduler.set_costs(MoveCosts(0.003, 0.002, rng.choice([1e-5, 0.1])))

    record(tmp_path / "r", seed=35, requests=40, meddling=tell_costs, num_swap_blocks=8)
    assert main(["replay", str(tmp_path / "r"), "--preemptions", "--json", "-"]) == 0
    captured = capsys.readouterr()
    listed = json.loads(captured.out)["preemptions"]
    first = next(each for each in listed if each["weighing"])
    swap_ms = f"swap {1e3 * first['weighing']['swap_s']:.2f} ms"
    told = [line for line in captured.err.splitlines() if " leaves by " in line]
    assert len(told) == len(listed)
    assert f"request {first['request']} leaves by {first['mode']}; {swap_ms}" in captured.err
    why_not = "the ways out were not compared: there was nothing to park, or no room for it"
    assert any(why_not in line for line in told)
