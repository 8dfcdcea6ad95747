"""``layby chat``: from a pipe, and on a terminal."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterable

import pytest

from layby.cli import main
from tests.cli.harness import Toy, spell


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def type_in(monkeypatch: pytest.MonkeyPatch, lines: Iterable[str | type[BaseException]]) -> None:
    """A person at a terminal, who presses Ctrl-D after the last line."""
    left = iter(lines)

    def enter(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", enter)
    monkeypatch.setenv("TERM", "dumb")  # text without escape sequences
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)


def test_a_pipe_gets_one_answer_per_line_and_nothing_else(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.script = spell("yes")
    pipe(monkeypatch, "one\n\n  two  \n")
    assert main(["chat"]) == 0
    assert capsys.readouterr() == ("yes\nyes\n", "")
    assert toy.prompts == [
        "user: one\nassistant:",
        "user: one\nassistant: yes\nuser: two\nassistant:",
    ]


def test_reset_forgets_all_but_the_instructions_and_exit_leaves(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.script = spell("ok")
    pipe(monkeypatch, "one\n/reset\ntwo\n/exit\nthree\n")
    assert main(["chat", "--system", "be brief"]) == 0
    assert capsys.readouterr().out == "ok\nok\n"
    assert toy.prompts == [
        "system: be brief\nuser: one\nassistant:",
        "system: be brief\nuser: two\nassistant:",
    ]


def test_a_conversation_that_outgrows_the_context_ends_the_pipe_with_one_line(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, "x" * 600 + "\n")
    assert main(["chat"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "512" in captured.err


def test_on_a_terminal_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.script = spell("abcdef")
    toy.before_step = lambda step: signal.raise_signal(signal.SIGINT) if step == 2 else None
    type_in(monkeypatch, ["one", KeyboardInterrupt, "two"])
    assert main(["chat"]) == 0
    out = capsys.readouterr().out
    assert "ab (stopped)\n" in out
    assert "abcdef\n" in out
    # What was seen of the answer is part of the conversation.
    assert toy.prompts[1] == "user: one\nassistant: ab\nuser: two\nassistant:"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_on_a_terminal_a_refused_turn_is_forgotten_and_a_mistyped_command_explained(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.script = spell("ok")
    type_in(monkeypatch, ["/resett", "x" * 600, "two", "/reset", "three", "/exit", "four"])
    assert main(["chat"]) == 0
    out = capsys.readouterr().out
    assert out.count("/reset forgets") == 2
    assert "the context holds 512" in " ".join(out.split())
    assert toy.prompts == ["user: two\nassistant:", "user: three\nassistant:"]
