"""``layby chat``: a conversation, on a terminal or from a pipe."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from layby.cli.flags import engine_flags, sampling_flags, takes
from layby.cli.terminal import log_to_stderr, show_text
from layby.engine import EngineConfig
from layby.errors import InvalidRequestError
from layby.sampling_params import SamplingParams

if TYPE_CHECKING:
    from layby.engine import LLM

_COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D leaves"


# An answer ends where the model ends it; --seed is the answers' own.
@takes(
    sampling=sampling_flags(
        without=("n", "logprobs", "prompt_logprobs"), max_tokens=None, temperature=0.7
    ),
    engine=engine_flags(model_argument=True, without=("seed",), shed_load=False),
)
def chat(
    *,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Instructions that stand before the conversation.",
            show_default="the model's own",
        ),
    ] = None,
    sampling: SamplingParams,
    engine: EngineConfig,
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D leaves. From a pipe,
    every line is one turn, and nothing but the answers is printed.
    """
    from layby.engine import LLM

    log_to_stderr()
    with LLM(**asdict(engine)) as llm:
        conversation = Conversation(llm, sampling, system)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _talk(conversation)
        else:
            _answer_lines(conversation)


@dataclass(slots=True)
class Conversation:
    """Messages so far, and who answers them."""

    llm: LLM
    sampling: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to the beginning."""
        self.messages = [] if self.system is None else [_message("system", self.system)]

    def answer(self, text: str) -> Iterator[str]:
        """Say ``text`` and yield the answer, piece by piece.

        What was said and answered is kept, an answer that is broken off as far as it came. Of a
        turn without any answer, nothing is kept.
        """
        engine, tokenizer = self.llm.engine, self.llm.tokenizer
        turn = [*self.messages, _message("user", text)]
        prompt = tokenizer.encode(engine.render_chat(turn), add_special_tokens=False)
        answer = ""
        try:
            with closing(self.llm.stream(prompt, self.sampling, begins_text=True)) as deltas:
                for delta in deltas:
                    piece = "".join(output.text for output in delta.outputs)
                    answer += piece
                    yield piece
        finally:
            if answer:
                self.messages = [*turn, _message("assistant", answer)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _talk(conversation: Conversation) -> None:
    """On a terminal: faults and Ctrl-C end a turn, not the conversation."""
    from rich.console import Console

    with suppress(ImportError):  # not on every system; it gives the prompt editing and history
        importlib.import_module("readline")
    console = Console(highlight=False)
    console.print(f"[bold]{conversation.llm.engine.model_name}[/]  [dim]{_COMMANDS}[/]")
    # readline has to be told which characters of the prompt take no room on the line.
    prompt = "\001\033[1m\002>\001\033[0m\002 " if console.color_system else "> "
    while True:
        try:
            text = input(prompt).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print(f"\n[dim]{_COMMANDS}[/]")
            continue
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
            console.print("[dim]forgotten[/]")
        elif text.startswith("/") and " " not in text:
            console.print(f"[dim]{_COMMANDS}[/]")
        elif text:
            try:
                for piece in conversation.answer(text):
                    show_text(piece)
            except KeyboardInterrupt:
                console.print(" [dim](stopped)[/]", end="")
            except InvalidRequestError as error:
                console.print(f"layby: {error}", style="red", markup=False, end="")
            show_text("\n")


def _answer_lines(conversation: Conversation) -> None:
    for line in sys.stdin:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            conversation.reset()
        elif text:
            for piece in conversation.answer(text):
                show_text(piece)
            show_text("\n")
