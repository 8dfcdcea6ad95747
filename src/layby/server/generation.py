"""One generating call: its prompts handed to the engine, its answer whole or as a stream of events.

Whatever ends a call early — an error, a refused prompt, a caller who hangs up — every request it
has in the engine is aborted before the call is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from layby.engine.outputs import CompletionOutput, RequestDelta, RequestOutput
from layby.errors import InvalidRequestError, LaybyError
from layby.sampling_params import SamplingParams
from layby.server.answers import Answer, usage_of
from layby.server.errors import CLIENT_CLOSED_REQUEST, error_answer
from layby.server.http import json_response, to_json, unless_disconnected
from layby.server.live_calls import LiveCalls
from layby.server.protocol import Usage

if TYPE_CHECKING:
    from layby.engine import AsyncEngine
    from layby.engine.async_engine import RequestStream

logger = logging.getLogger(__name__)

REQUEST_ID: Final = "X-Request-Id"
"""The header that tells by what id a call is found; if calls are journalled, they may bring it."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call asks of the engine.

    Attributes:
        prompts: Text or token ids, each a request of its own.
        params: Shared by all of them.
        priority: Class; a smaller number is more urgent.
        cache_salt: Cached prefixes are shared within the same salt.
        prompt_param: The caller's name for what became the prompts, used in errors.
        names_index: Whether errors say which prompt is at fault.
        stream: Answer with events.
        include_usage: End the stream with the token counts.
        begins_text: The answer is a text of its own and does not go on with the prompt's.
    """

    prompts: Sequence[str | list[int]]
    params: SamplingParams
    priority: int
    cache_salt: str
    prompt_param: str
    names_index: bool
    stream: bool
    include_usage: bool
    begins_text: bool = False


class Deltas(Protocol):
    """A request's deltas, from the engine or from a record; the last one is ``finished``."""

    def __aiter__(self) -> AsyncIterator[RequestDelta]: ...

    def close(self) -> None:
        """Stop reading."""
        ...


async def respond(
    engine: AsyncEngine,
    request: Request,
    call: Call,
    answer: Answer,
    *,
    live: LiveCalls,
    owner: str,
) -> Response:
    """Run a call and answer it.

    Args:
        engine: Runs it.
        request: The HTTP request that made it.
        call: What it asks for.
        answer: Gives the shapes.
        live: Knows the call while it is answered, by the id of its answer.
        owner: Whose it is.

    Raises:
        LaybyError: The call is refused, or, unless it streams, a request of it failed.
    """

    def held(streams: Sequence[RequestStream]) -> AbstractContextManager[None]:
        return live.holding(owner, answer.id, [stream.request_id for stream in streams])

    if call.stream:
        streams = await _submit(engine, call)
        return EventStream(streams, call, answer, request_id=answer.id, held=held(streams))
    whole = await unless_disconnected(request.receive, _whole(engine, call, answer, held))
    if whole is None:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    response = json_response(whole)
    response.headers[REQUEST_ID] = answer.id
    return response


async def _submit(engine: AsyncEngine, call: Call) -> list[RequestStream]:
    """Hand in all prompts or, if one is refused, none."""
    with refusals_in_callers_words(call):
        return await engine.submit_all(
            call.prompts,
            call.params,
            priority=call.priority,
            cache_salt=call.cache_salt,
            names_index=call.names_index,
            begins_text=call.begins_text,
        )


@contextmanager
def refusals_in_callers_words(call: Call) -> Iterator[None]:
    """Let errors of a submission name what the caller wrote."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param == "prompt":
            error.param = call.prompt_param
        raise
    except LaybyError as error:
        # An engine that is dead or draining may raise one error for many calls.
        raise error.with_traceback(None) from None


def _close(streams: Iterable[Deltas]) -> None:
    for stream in streams:
        stream.close()


async def _whole(
    engine: AsyncEngine,
    call: Call,
    answer: Answer,
    held: Callable[[Sequence[RequestStream]], AbstractContextManager[None]],
) -> dict[str, Any]:
    streams = await _submit(engine, call)
    try:
        outputs = [
            RequestOutput("", None, [], [CompletionOutput(index) for index in range(call.params.n)])
            for _ in streams
        ]
        usage = _UsageCounter()
        with held(streams):
            async with aclosing(_merged(streams)) as deltas:
                async for number, delta in deltas:
                    outputs[number].add(delta)
                    usage.add(number, delta)
    finally:
        _close(streams)
    return answer.whole(outputs, usage.total())


class EventStream(Response):
    """Server-sent events, a chunk for every sample and step, ``[DONE]`` last.

    An error in the middle is an event of its own, after which the stream ends without ``[DONE]``.

    Args:
        streams: One for each prompt.
        call: What was asked.
        answer: Gives the shapes.
        request_id: For the header.
        held: Entered while the events are sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        streams: Sequence[Deltas],
        call: Call,
        answer: Answer,
        *,
        request_id: str,
        held: AbstractContextManager[None] | None = None,
    ) -> None:
        super().__init__(
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                REQUEST_ID: request_id,  # sent at once, the first event maybe much later
            }
        )
        del self.headers["content-length"]
        self._streams = streams
        self._call = call
        self._answer = answer
        self._held = held or nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the caller hangs up."""
        try:
            with self._held:
                await unless_disconnected(receive, self._send_all(send))
        finally:
            _close(self._streams)

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._events()) as events:
            async for event in events:
                await send(
                    {"type": "http.response.body", "body": event.encode(), "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[str]:
        usage = _UsageCounter()
        try:
            async with aclosing(_merged(self._streams)) as deltas:
                async for number, delta in deltas:
                    is_first = usage.add(number, delta)
                    if events := self._events_of(number, delta, is_first=is_first):
                        yield events
        except Exception as error:
            if not isinstance(error, LaybyError):
                logger.exception("unforeseen error in the middle of a stream")
            yield f"data: {to_json(error_answer(error)[1])}\n\n"
            return
        if self._call.include_usage:
            yield _data({**self._answer.chunk([]), "usage": usage.total()})
        yield "data: [DONE]\n\n"

    def _events_of(self, number: int, delta: RequestDelta, *, is_first: bool) -> str:
        """The events that tell of one delta of prompt ``number``; empty if none needs to."""
        choices = self._choices(number, delta, is_first=is_first)
        return "".join(self._event([choice]) for choice in choices)

    def _choices(
        self, number: int, delta: RequestDelta, *, is_first: bool
    ) -> list[Mapping[str, Any]]:
        """What one delta of prompt ``number`` has to say, sample by sample."""
        n = self._call.params.n
        choices: list[Mapping[str, Any]] = []
        if is_first:
            openings = (self._answer.opening(number * n + sample, delta) for sample in range(n))
            choices += [choice for choice in openings if choice is not None]
        choices += [
            self._answer.piece(number * n + piece.index, piece)
            for piece in delta.outputs
            # Text may be held back; log-probabilities never are, so they stay with their tokens.
            if piece.text or piece.logprobs or piece.finish_reason is not None
        ]
        return choices

    def _event(self, choices: Sequence[Mapping[str, Any]]) -> str:
        chunk = self._answer.chunk(choices)
        if self._call.include_usage:
            chunk["usage"] = None
        return _data(chunk)


def _data(chunk: Mapping[str, Any]) -> str:
    return f"data: {to_json(chunk)}\n\n"


class _UsageCounter:
    """Counts a call's tokens: each prompt once, every sampled token."""

    def __init__(self) -> None:
        self._prompt_tokens: dict[int, int] = {}
        self._completion_tokens = 0

    def add(self, number: int, delta: RequestDelta) -> bool:
        """Count a delta of prompt ``number``; whether it was that prompt's first."""
        is_first = number not in self._prompt_tokens
        self._prompt_tokens[number] = delta.num_prompt_tokens
        self._completion_tokens += sum(len(piece.token_ids) for piece in delta.outputs)
        return is_first

    def total(self) -> Usage:
        """The counts so far."""
        return usage_of(sum(self._prompt_tokens.values()), self._completion_tokens)


async def _merged(streams: Sequence[Deltas]) -> AsyncGenerator[tuple[int, RequestDelta]]:
    """The deltas of all streams as they come, with the number of their stream.

    Raises:
        LaybyError: A request did not end by itself.
    """
    if len(streams) == 1:
        async for delta in streams[0]:
            _check(delta)
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, RequestDelta | Exception | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for delta in streams[number]:
                await arrived.put((number, delta))
            await arrived.put((number, None))
        except Exception as error:
            await arrived.put((number, error))

    pumps = [asyncio.ensure_future(pump(number)) for number in range(len(streams))]
    try:
        open_streams = len(streams)
        while open_streams:
            number, delta_or_end = await arrived.get()
            if isinstance(delta_or_end, Exception):
                raise delta_or_end
            if delta_or_end is None:
                open_streams -= 1
                continue
            _check(delta_or_end)
            yield number, delta_or_end
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def _check(delta: RequestDelta) -> None:
    if delta.error is not None:
        # Several calls may hold the same error: without this its traceback would grow with each.
        raise delta.error.with_traceback(None)
