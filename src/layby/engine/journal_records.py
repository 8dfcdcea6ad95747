"""What the journal keeps of a call, as text and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.errors import LaybyError, shown
from layby.execution.executor import PositionLogprobs, TokenLogprob
from layby.sampling_params import SamplingParams


class UnreadableCallError(LaybyError):
    """The journal holds a call that this version of Layby cannot make sense of."""


class CallStatus(Enum):
    """How far a call has come."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class SampleRecord:
    """One sample so far.

    Attributes:
        token_ids: Output tokens, a stop token among them.
        text: What is shown of them.
        text_ends: For every token, how many characters of ``text`` were shown with it.
        logprobs: One entry per token, where asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: CompletionDelta) -> None:
        """Append what one step added."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.text_ends += [len(self.text)] * len(piece.token_ids)
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


@dataclass(slots=True)
class RequestRecord:
    """One prompt of a call.

    Attributes:
        prompt: Its token ids.
        params: With seed and ``max_tokens`` settled.
        samples: ``params.n`` of them.
        prompt_logprobs: One entry per prompt token, once they are known, where asked for.
        waited_s: Seconds that it had waited in its class when an orderly end cut it off; 0 if
            that is not known.
    """

    prompt: list[int]
    params: SamplingParams
    samples: list[SampleRecord]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    waited_s: float = 0.0

    @classmethod
    def new(cls, prompt: list[int], params: SamplingParams) -> RequestRecord:
        """Nothing has come yet."""
        return cls(prompt, params, [SampleRecord() for _ in range(params.n)])

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def has_started(self) -> bool:
        """Whether every sample has a token: they get their first in the same step."""
        return all(sample.token_ids for sample in self.samples)

    def add(self, delta: RequestDelta) -> None:
        """Append what one step added."""
        for piece in delta.outputs:
            self.samples[piece.index].add(piece)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


@dataclass(slots=True)
class CallRecord:
    """A call: what was asked, and what has come of it.

    Attributes:
        owner: Whose it is; nobody else learns that it exists.
        call_id: Unique for its owner.
        is_chosen: The client chose the id, so it may come back with it.
        kind: The API whose shape the answer has: ``chat`` or ``completion``.
        digest: Of everything that was asked.
        created_s: When it was accepted, in seconds since 1970.
        priority, cache_salt: As the engine has them.
        echoes: Text and, where wanted, token ids of prompts that are part of the answer.
        error: Why it failed.
    """

    owner: str
    call_id: str
    is_chosen: bool
    kind: str
    digest: str
    created_s: float
    requests: list[RequestRecord]
    priority: int = 0
    cache_salt: str = ""
    echoes: list[tuple[str, list[int]]] = field(default_factory=list)
    status: CallStatus = CallStatus.OPEN
    error: str | None = None


# --- to text and back ---


def to_json(value: object) -> str:
    """As short as can be."""
    return json.dumps(value, separators=(",", ":"))


def call_to_json(call: CallRecord) -> str:
    """What was asked."""
    return to_json(
        {
            "is_chosen": call.is_chosen,
            "kind": call.kind,
            "digest": call.digest,
            "created_s": call.created_s,
            "priority": call.priority,
            "cache_salt": call.cache_salt,
            "echoes": call.echoes,
            "requests": [[request.prompt, asdict(request.params)] for request in call.requests],
        }
    )


def outputs_to_json(requests: Iterable[RequestRecord]) -> str:
    """What has come of it."""
    return to_json(
        [
            [
                [
                    [
                        sample.token_ids,
                        sample.text,
                        sample.text_ends,
                        _logprobs_to_lists(sample.logprobs),
                        sample.finish_reason,
                        sample.stop_reason,
                    ]
                    for sample in request.samples
                ],
                _logprobs_to_lists(request.prompt_logprobs),
            ]
            for request in requests
        ]
    )


def _logprobs_to_lists(positions: Iterable[PositionLogprobs | None] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        position
        and [
            [token.token_id, token.logprob, token.rank]
            for token in (position.chosen, *position.top)
        ]
        for position in positions
    ]


def call_from_row(row: tuple[Any, ...]) -> CallRecord:
    """The call of a row: owner, id, status, two of no concern here, the two texts, error.

    Raises:
        UnreadableCallError: It is not whole, or of no known shape.
    """
    try:
        call = _decoded(row)
        _check(call)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise unreadable(row[1], error) from error
    return call


def unreadable(call_id: object, error: Exception) -> UnreadableCallError:
    """The error for a call whose row could not be read because of another one."""
    return UnreadableCallError(
        f"the journal's entry of request {shown(call_id)} cannot be read "
        f"({type(error).__name__}: {str(error)[:200]})"
    )


def _decoded(row: tuple[Any, ...]) -> CallRecord:
    owner, call_id, status, _is_fetched, _ended_s, call_text, outputs_text, error = row
    for text in (owner, call_id, call_text, outputs_text, error or ""):
        text.encode()  # fails if it was no UTF-8
    call = json.loads(call_text)
    waited_s = call.pop("waited_s", None) or [0.0] * len(call["requests"])
    requests = [
        RequestRecord(
            prompt, _params(params), [_sample(item) for item in samples], _logprobs(rows), waited
        )
        for (prompt, params), (samples, rows), waited in zip(
            call.pop("requests"), json.loads(outputs_text), waited_s, strict=True
        )
    ]
    call["echoes"] = [(text, ids) for text, ids in call["echoes"]]
    return CallRecord(
        owner=owner,
        call_id=call_id,
        status=CallStatus(status),
        error=error,
        requests=requests,
        **call,
    )


def _params(values: dict[str, Any]) -> SamplingParams:
    values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return SamplingParams(**values)


def _sample(item: list[Any]) -> SampleRecord:
    token_ids, text, text_ends, rows, finish_reason, stop_reason = item
    logprobs = None if rows is None else [_position(row) for row in rows]
    return SampleRecord(token_ids, text, text_ends, logprobs, finish_reason, stop_reason)


def _logprobs(rows: list[Any] | None) -> list[PositionLogprobs | None] | None:
    return None if rows is None else [row and _position(row) for row in rows]


def _position(row: list[list[Any]]) -> PositionLogprobs:
    chosen, *top = [TokenLogprob(*token) for token in row]
    return PositionLogprobs(chosen, tuple(top))


def _check(call: CallRecord) -> None:
    """Raise ValueError for what no version of Layby writes, though it can be decoded."""
    _expect(call.kind in ("chat", "completion"), "kind", call.kind)
    _expect(type(call.is_chosen) is bool, "is_chosen", call.is_chosen)
    for name in ("digest", "cache_salt"):
        _expect(isinstance(getattr(call, name), str), name, getattr(call, name))
    _expect(type(call.priority) is int, "priority", call.priority)
    _expect(_is_time(call.created_s), "created_s", call.created_s)
    for text, ids in call.echoes:
        _expect(isinstance(text, str) and _are_integers(ids), "echo", text)
    _expect(bool(call.requests), "requests", call.requests)
    for request in call.requests:
        _expect(_are_integers(request.prompt), "prompt", request.prompt)
        _expect(_is_time(request.waited_s) and request.waited_s >= 0, "waited_s", request.waited_s)
        _expect(len(request.samples) == request.params.n, "samples", request.samples)
        for sample in request.samples:
            _expect(_are_integers(sample.token_ids), "token_ids", sample.token_ids)
            _expect(isinstance(sample.text, str), "text", sample.text)
            is_whole = _are_integers(sample.text_ends) and len(sample.text_ends) == len(
                sample.token_ids
            )
            _expect(is_whole, "text_ends", sample.text_ends)
            reason = sample.finish_reason
            _expect(reason is None or isinstance(reason, str), "finish_reason", reason)


def _expect(is_so: bool, name: str, value: object) -> None:
    if not is_so:
        raise ValueError(f"{name} is {shown(value)}")


def _are_integers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
