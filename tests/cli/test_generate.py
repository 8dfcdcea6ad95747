"""``layby generate``: texts, files of prompts, JSON, and streams on a terminal."""

from __future__ import annotations

import io
import json
import signal
import sys
from pathlib import Path

import pytest

from layby.cli import main
from tests.cli.harness import Toy, spell


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def test_one_prompt_prints_its_text_alone(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.script = spell("hello")
    assert main(["generate", "say"]) == 0
    assert capsys.readouterr() == ("hello\n", "")
    assert toy.prompts == ["say"]


def test_several_answers_have_headings(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.script = spell("yes")
    assert main(["generate", "a", "b", "--n", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "==> prompt 1, sample 1 <==",
        "yes",
        "==> prompt 1, sample 2 <==",
        "yes",
        "==> prompt 2, sample 1 <==",
        "yes",
        "==> prompt 2, sample 2 <==",
        "yes",
    ]


def test_prompts_come_from_a_file_and_from_standard_input(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.script = spell("x")
    path = tmp_path / "prompts"
    path.write_text("first\n\nsecond\n")
    assert main(["generate", "zeroth", "--file", str(path)]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("third\n"))
    assert main(["generate", "--file", "-"]) == 0
    assert toy.prompts == ["zeroth", "first", "second", "third"]


def test_flags_reach_engine_and_request(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--num-blocks", "8", "--max-tokens", "3", "--json", "-"]) == 0
    [result] = json.loads(capsys.readouterr().out)
    assert toy.options["num_blocks"] == 8
    assert toy.options["max_queue"] is None
    assert len(result["outputs"][0]["token_ids"]) == 3
    assert result["outputs"][0]["finish_reason"] == "length"


def test_json_on_standard_output_is_alone_there(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.script = spell("ok")
    on_a_terminal(monkeypatch)
    arguments = ["generate", "p", "--logprobs", "1", "--prompt-logprobs", "0", "--json", "-"]
    assert main(arguments) == 0
    [result] = json.loads(capsys.readouterr().out)
    assert result["prompt"] == "p"
    assert result["prompt_token_ids"] == [ord("p")]
    assert result["prompt_logprobs"] == [None]
    assert result["error"] is None
    assert (result["ttft_s"], result["e2e_s"]) == (0.5, 1.5)
    [output] = result["outputs"]
    assert output["text"] == "ok"
    assert output["finish_reason"] == "stop"
    assert output["logprobs"][0]["chosen"]["token_id"] == ord("o")


def test_json_in_a_file_leaves_the_text_on_standard_output(
    toy: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    toy.script = spell("ok")
    path = tmp_path / "result.json"
    assert main(["generate", "p", "--json", str(path)]) == 0
    assert capsys.readouterr().out == "ok\n"
    assert json.loads(path.read_text())[0]["outputs"][0]["text"] == "ok"


def test_on_a_terminal_the_text_comes_piece_by_piece_and_cannot_command_it(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.script = spell("a\x1b]0;title\x07\tb\n")
    on_a_terminal(monkeypatch)
    pieces: list[str] = []
    toy.before_step = lambda step: pieces.append(capsys.readouterr().out)
    assert main(["generate", "p"]) == 0
    assert "".join(pieces) + capsys.readouterr().out == "a]0;title\tb\n\n"
    assert pieces[:2] == ["", "a"]


def test_ctrl_c_ends_a_stream_between_two_steps(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine left with half a step done."""
    toy.script = spell("abcdef")
    on_a_terminal(monkeypatch)
    toy.before_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 3 else None
    assert main(["generate", "p"]) == 130
    assert capsys.readouterr() == ("abc\n", "")
    assert toy.llm is not None
    stats = toy.llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_request_that_is_refused_is_one_line(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "p", "--max-tokens", "1000"]) == 1
    error = capsys.readouterr().err
    assert "1000" in error
    assert "512" in error
    assert error.count("\n") == 1
