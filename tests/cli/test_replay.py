"""``layby replay``: what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from layby.cli import main
from layby.cli.app import app
from layby.cli.replay import replay
from tests.engine.recorded import record


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """The command is there whether or not the program lists it yet."""
    before = list(app.registered_commands)
    if all(command.callback is not replay for command in before):
        app.command()(replay)
    yield
    app.registered_commands[:] = before


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
