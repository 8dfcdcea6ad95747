"""What the engine says about a call, put into the shapes of OpenAI's two generating endpoints.

One object serves one call, streamed or not. Choices are numbered prompt by prompt: sample ``j`` of
prompt ``i`` is choice ``i * n + j``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from layby.engine.interfaces import Tokenizer
from layby.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from layby.execution.executor import PositionLogprobs as Position
from layby.server.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    MessageDelta,
    PositionLogprobs,
    TokenLogprobs,
    Usage,
)

LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say; the number OpenAI uses."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is to be part of the answer. ``token_ids`` are needed for log-probabilities."""

    text: str
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """What the answer to a call is called, and when the call came (seconds since 1970)."""

    call_id: str
    created_s: float

    @classmethod
    def new(cls) -> Head:
        """Of a call that comes now."""
        return cls(uuid.uuid4().hex, time.time())

    def fields(self, prefix: str) -> dict[str, Any]:
        """The same as fields of an answer."""
        return {"id": f"{prefix}-{self.call_id}", "created": int(self.created_s)}


class Answer(Protocol):
    """One endpoint's way to say things."""

    @property
    def id(self) -> str:
        """What the answer is called."""
        ...

    def opening(self, index: int, first: RequestDelta) -> Mapping[str, Any] | None:
        """What choice ``index`` begins with before any token, if anything."""
        ...

    def piece(self, index: int, delta: CompletionDelta) -> Mapping[str, Any]:
        """What one step added to choice ``index``."""
        ...

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One event of the stream, without its usage."""
        ...

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The answer to a call that does not stream; ``outputs`` has one item per prompt."""
        ...


class ChatAnswer:
    """The shapes of /v1/chat/completions.

    Args:
        model: Name of the served model.
        tokenizer: Names the tokens.
        head: Id and time of the call, if they are known from before.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, head: Head | None = None) -> None:
        self._tokenizer = tokenizer
        self._head = (head or Head.new()).fields("chatcmpl")
        self.id = str(self._head["id"])
        self._model = model

    def opening(self, index: int, first: RequestDelta) -> ChatChunkChoice:
        """The role, which is always the assistant's."""
        return {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }

    def piece(self, index: int, delta: CompletionDelta) -> ChatChunkChoice:
        """The text that a step added."""
        added: MessageDelta = {"content": delta.text} if delta.text else {}
        choice: ChatChunkChoice = {
            "index": index,
            "delta": added,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One event of the stream, without its usage."""
        return self._envelope("chat.completion.chunk", choices)

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._whole_choice(index, sample) for index, sample in enumerate(_samples(outputs))
        ]
        return {**self._envelope("chat.completion", choices), "usage": usage}

    def _whole_choice(self, index: int, sample: CompletionOutput) -> ChatChoice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": self._logprobs(sample.logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def _envelope(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "model": self._model, "choices": choices}

    def _logprobs(self, positions: Sequence[Position] | None) -> ChatLogprobs | None:
        if positions is None:
            return None
        content: list[PositionLogprobs] = [
            {
                **self._token(position.chosen.token_id, position.chosen.logprob),
                "top_logprobs": [self._token(top.token_id, top.logprob) for top in position.top],
            }
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> TokenLogprobs:
        return {
            "token": self._tokenizer.token_text(token_id),
            "logprob": finite(logprob),
            # Special tokens have no bytes of text.
            "bytes": list(self._tokenizer.token_bytes(token_id)) or None,
        }


class CompletionAnswer:
    """The shapes of /v1/completions.

    Args:
        model: Name of the served model.
        tokenizer: Names the tokens.
        n: Samples per prompt.
        echoes: One per prompt if the prompts are to be part of the answer.
        head: Id and time of the call, if they are known from before.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        n: int,
        echoes: Sequence[Echo] = (),
        head: Head | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._head = (head or Head.new()).fields("cmpl")
        self.id = str(self._head["id"])
        self._model = model
        self._n = n
        self._echoes = echoes
        self._num_chars: dict[int, int] = {}

    def opening(self, index: int, first: RequestDelta) -> CompletionChoice | None:
        """The echoed prompt, if one is wanted."""
        if not self._echoes:
            return None
        echo = self._echoes[index // self._n]
        return {
            "index": index,
            "text": echo.text,
            "logprobs": self._logprobs(index, (), echo, first.prompt_logprobs),
            "finish_reason": None,
        }

    def piece(self, index: int, delta: CompletionDelta) -> CompletionChoice:
        """The text that a step added."""
        choice: CompletionChoice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice

    def chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One event of the stream, without its usage."""
        return {
            **self._head,
            "object": "text_completion",
            "model": self._model,
            "choices": choices,
        }

    def whole(self, outputs: Sequence[RequestOutput], usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            self._whole_choice(index, sample, outputs[index // self._n])
            for index, sample in enumerate(_samples(outputs))
        ]
        return {**self.chunk(choices), "usage": usage}

    def _whole_choice(
        self, index: int, sample: CompletionOutput, output: RequestOutput
    ) -> CompletionChoice:
        echo = self._echoes[index // self._n] if self._echoes else None
        return {
            "index": index,
            "text": (echo.text if echo else "") + sample.text,
            "logprobs": self._logprobs(index, sample.logprobs, echo, output.prompt_logprobs),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }

    def _logprobs(
        self,
        index: int,
        positions: Sequence[Position] | None,
        echo: Echo | None = None,
        echoed: Sequence[Position | None] | None = None,
    ) -> CompletionLogprobs | None:
        """Lists for the echoed prompt's tokens, where wanted, and then the given positions."""
        if positions is None or (echo is not None and echoed is None):
            return None
        lists: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if echo is not None and echoed is not None:
            for token, position in zip(echo.token_ids, echoed, strict=True):
                self._add(lists, index, token, position)
        for position in positions:
            self._add(lists, index, position.chosen.token_id, position)
        return lists

    def _add(
        self, lists: CompletionLogprobs, index: int, token: int, position: Position | None
    ) -> None:
        lists["tokens"].append(self._name(token))
        if position is None:
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
        else:
            lists["token_logprobs"].append(finite(position.chosen.logprob))
            lists["top_logprobs"].append(
                {self._name(top.token_id): finite(top.logprob) for top in position.top}
            )
        # Counted in bytes that begin a character, so that a token inside one points at its start.
        raw = self._tokenizer.token_bytes(token)
        before = self._num_chars.get(index, 0)
        is_inside = before > 0 and bool(raw) and _continues(raw[0])
        lists["text_offset"].append(before - is_inside)
        self._num_chars[index] = before + sum(not _continues(byte) for byte in raw)

    def _name(self, token: int) -> str:
        """A token as a key: as text, or byte by byte where it holds no whole characters.

        Two tokens must not share a key only because neither is a character by itself.
        """
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode() if raw else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def usage_of(num_prompt_tokens: int, num_completion_tokens: int) -> Usage:
    """Token counts of a call."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def finite(logprob: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(LOWEST_LOGPROB, logprob)


def _samples(outputs: Sequence[RequestOutput]) -> list[CompletionOutput]:
    return [sample for output in outputs for sample in output.outputs]


def _continues(byte: int) -> bool:
    """Whether a byte lies inside a UTF-8 character rather than beginning one."""
    return byte & 0xC0 == 0x80
