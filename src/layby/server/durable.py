"""Calls that outlive their connection and the process: journalled, found again by id, resumed.

A call is written down before its caller learns that it was accepted. From then on a task of its
own reads the engine's deltas into a record; whoever wants the answer, now or later, whole or as a
stream, reads that record. What has not ended when the process does is taken up by the next one:
from its tokens after an orderly end, from its prompt after any other. Either way the tokens are
the same, because seed and position decide about each. What the next one's settings are too small
for stays in the journal as it is, for one with larger settings.

Who hangs up: a call whose id the client chose goes on, because the client can come back for it;
any other is aborted, as without a journal. While the server drains nobody's hang-up counts.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fastapi import BackgroundTasks, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from layby.engine.journal import Journal
from layby.engine.journal_records import (
    CallRecord,
    CallStatus,
    RequestRecord,
    SampleRecord,
    UnreadableCallError,
)
from layby.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
from layby.engine.workers import Workers
from layby.errors import (
    BeyondSettingsError,
    EngineUnavailableError,
    InvalidRequestError,
    LaybyError,
    RequestFailedError,
    RequestKeptError,
    counted,
)
from layby.execution.kv_file import KVFile, remove_kv_file
from layby.server.answers import Answer, ChatAnswer, CompletionAnswer, Echo, Head, usage_of
from layby.server.errors import CLIENT_CLOSED_REQUEST, error_answer, error_response
from layby.server.generation import REQUEST_ID, Call, EventStream, refusals_in_callers_words
from layby.server.http import json_response, unless_disconnected

if TYPE_CHECKING:
    from layby.engine import AsyncEngine, PreparedRequest, RequestStream
    from layby.engine.kept_kv import UnfinishedKV
    from layby.execution.faults import Faults

_CLOSE_WAIT_S: Final = 10.0
_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
_HOW_TO_ANSWER: Final = {"stream", "stream_options"}

T = TypeVar("T")

logger = logging.getLogger(__name__)


def digest_of(kind: str, body: BaseModel) -> str:
    """A hash of what a body asks for; not of how it wants the answer delivered."""
    asked = body.model_dump(mode="json", exclude=_HOW_TO_ANSWER, warnings=False)
    return hashlib.blake2b(
        json.dumps([kind, asked], sort_keys=True).encode(), digest_size=16
    ).hexdigest()


class LiveCall:
    """A call and whoever reads it; in the event loop's thread.

    Attributes:
        record: What has come of it.
        is_settled: Nothing more will come: it has ended, or this process ends before it.
        failure: Why there is no whole answer, if so.
    """

    def __init__(self, record: CallRecord) -> None:
        self.record = record
        self.is_settled = record.status is not CallStatus.OPEN
        self.failure: LaybyError | None = None
        if record.status is CallStatus.FAILED:
            self.failure = RequestFailedError(record.error or "the request failed")
        self.is_cancelled = False
        self.streams: Mapping[int, RequestStream] = {}
        self._waiting: set[asyncio.Event] = set()

    @property
    def key(self) -> tuple[str, str]:
        """Owner and id."""
        return self.record.owner, self.record.call_id

    def add(self, number: int, delta: RequestDelta) -> None:
        """Take what a step added to prompt ``number``."""
        self.record.requests[number].add(delta)
        self._notify()

    def settle(self, failure: LaybyError | None = None) -> None:
        """Nothing more will come."""
        if not self.is_settled:
            self.is_settled, self.failure = True, failure
            self._notify()

    def close_streams(self) -> None:
        """Abort what is still in the engine."""
        for stream in self.streams.values():
            stream.close()

    async def wait(self) -> None:
        """Until it is settled.

        Raises:
            LaybyError: There is no whole answer.
        """
        while not self.is_settled:
            await self.change()
        if self.failure is not None:
            raise self.failure.with_traceback(None)

    async def change(self) -> None:
        """Until something has come since this was called."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            await event.wait()
        finally:
            self._waiting.discard(event)

    def _notify(self) -> None:
        for event in self._waiting:
            event.set()


class RecordReader:
    """The deltas of one prompt of a call, from its first token, told from the record.

    Every token is a piece of its own, however many have come since the last delta.
    """

    def __init__(self, call: LiveCall, number: int) -> None:
        self.is_at_end = False
        self._call = call
        self._request: RequestRecord = call.record.requests[number]
        self._seen = [0] * len(self._request.samples)
        self._ended = [False] * len(self._seen)
        self._is_closed = False
        self._is_first = True

    def __aiter__(self) -> AsyncIterator[RequestDelta]:
        return self

    async def __anext__(self) -> RequestDelta:
        while not (self._is_closed or self.is_at_end):
            delta = self._next()
            if delta is not None:
                return delta
            await self._call.change()
        raise StopAsyncIteration

    def close(self) -> None:
        """Stop reading. Nobody else is concerned."""
        self._is_closed = True

    def _next(self) -> RequestDelta | None:
        """What has come since the last delta; None if nothing has."""
        outputs = [
            piece
            for index, sample in enumerate(self._request.samples)
            for piece in self._pieces(index, sample)
        ]
        # The end is told when it is on disk: whoever has read it may forget the call. A failure
        # is told by itself: what comes with it is not looked at.
        failure = self._call.failure
        self.is_at_end = self._call.is_settled and not (outputs and failure)
        if not (outputs or self.is_at_end):
            return None
        first, self._is_first = self._is_first, False
        return RequestDelta(
            "",
            len(self._request.prompt),
            outputs,
            self.is_at_end,
            prompt_logprobs=self._request.prompt_logprobs if first else None,
            error=failure if self.is_at_end else None,
        )

    def _pieces(self, index: int, sample: SampleRecord) -> list[CompletionDelta]:
        if self._ended[index]:
            return []
        shown = self._shown(index, sample)
        pieces = []
        for place in range(self._seen[index], len(sample.token_ids)):
            end = sample.text_ends[place]
            logprobs = None if sample.logprobs is None else sample.logprobs[place : place + 1]
            text = sample.text[shown:end]
            pieces.append(CompletionDelta(index, text, [sample.token_ids[place]], logprobs))
            shown = end
        self._seen[index] = len(sample.token_ids)
        if sample.finish_reason is not None:
            self._ended[index] = True
            if not pieces or shown < len(sample.text):  # it ended without a token
                pieces.append(CompletionDelta(index, sample.text[shown:], []))
            pieces[-1].finish_reason = sample.finish_reason
            pieces[-1].stop_reason = sample.stop_reason
        return pieces

    def _shown(self, index: int, sample: SampleRecord) -> int:
        seen = self._seen[index]
        return sample.text_ends[seen - 1] if seen else 0


class NumberedEvents(EventStream):
    """Server-sent events with ids: how many tokens of its choice there were with this one.

    Args:
        readers: One for each prompt.
        call: What was asked.
        answer: Gives the shapes.
        request_id: For the header.
        starting_after: Leave out the first so many tokens of every choice.
        on_leave: Called at the end, with whether everything was sent.
    """

    def __init__(
        self,
        readers: Sequence[RecordReader],
        call: Call,
        answer: Answer,
        *,
        request_id: str,
        starting_after: int = 0,
        on_leave: Callable[[bool], None],
    ) -> None:
        super().__init__(readers, call, answer, request_id=request_id)
        self._starting_after = starting_after
        self._on_leave = on_leave
        self._num_tokens = [0] * (len(readers) * call.params.n)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the caller hangs up."""
        was_sent = False

        async def send_on(message: Any) -> None:
            nonlocal was_sent
            await send(message)
            was_sent = not message.get("more_body", True)

        try:
            await super().__call__(scope, receive, send_on)
        finally:
            self._on_leave(was_sent)

    def _events_of(self, number: int, delta: RequestDelta, *, is_first: bool) -> str:
        """As ``EventStream`` does. What is left out is told to the answer all the same: it
        counts."""
        events = []
        if is_first:
            n = self._call.params.n
            openings = [self._answer.opening(number * n + index, delta) for index in range(n)]
            if not self._starting_after:
                events += [self._event([choice]) for choice in openings if choice is not None]
        for piece in delta.outputs:
            index = number * self._call.params.n + piece.index
            choice = self._answer.piece(index, piece)
            self._num_tokens[index] += len(piece.token_ids)
            was_seen = piece.token_ids and self._num_tokens[index] <= self._starting_after
            says = piece.text or piece.logprobs or piece.finish_reason is not None
            if says and not was_seen:
                events.append(f"id: {self._num_tokens[index]}\n{self._event([choice])}")
        return "".join(events)


class DurableRequests:
    """Every call of a server with a state directory.

    Args:
        engine: Runs them.
        journal: Remembers them; already claimed for this engine.
        faults: Faults to inject where KV cache is kept from one process to the next.
    """

    def __init__(self, engine: AsyncEngine, journal: Journal, faults: Faults | None = None) -> None:
        self._engine = engine
        self._journal = journal
        self._faults = faults
        self._writer = Workers(1)  # one thread: what is written keeps its order
        self._live: dict[tuple[str, str], LiveCall] = {}
        self._opening: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- the process ---

    async def recover(self) -> int:
        """Hand the engine what an earlier process left unfinished; returns how many calls."""
        start_s = time.monotonic()
        records = await self._write(self._journal.unfinished)
        calls = [LiveCall(record) for record in records]
        self._live.update((call.key, call) for call in calls)
        kept: KVFile | None = None
        try:
            kept = await self._engine.open_kept(self._journal.kv_path, self._faults)
            resumed = await self._take_up(calls, kept)
        except EngineUnavailableError:  # asked to stop already: the directory still has them
            for call in calls:
                self._live.pop(call.key, None)
            return 0
        finally:
            if kept is not None:
                kept.close()
        await asyncio.to_thread(remove_kv_file, self._journal.kv_path)
        if records:
            logger.info(
                "resumed %d of %s of an earlier run in %.0f ms; "
                "the KV cache of %s (%s) came back parked",
                resumed,
                counted(len(records), "request"),
                1000 * (time.monotonic() - start_s),
                counted(0 if kept is None else kept.requests_restored, "request"),
                counted(0 if kept is None else kept.blocks_restored, "block"),
            )
        self._warn_of_kept(calls)
        return resumed

    async def _take_up(self, calls: Sequence[LiveCall], kept: KVFile | None) -> int:
        """Queue what is left to do of calls of an earlier process; returns how many have gone in.

        The most urgent first: they get the room for their KV.
        """
        prepared = await asyncio.gather(*(self._prepare_in_time(call, kept) for call in calls))
        ready = [
            (call, group) for call, group in zip(calls, prepared, strict=True) if group is not None
        ]
        ready.sort(key=lambda pair: (pair[0].record.priority, pair[0].record.created_s))
        outcomes = await self._engine.queue_each([list(group.values()) for _, group in ready])
        resumed = 0
        for (call, group), outcome in zip(ready, outcomes, strict=True):
            if isinstance(outcome, LaybyError):
                await self._refuse(call, outcome)
            else:
                self._start(call, dict(zip(group, outcome, strict=True)))
                resumed += 1
        return resumed

    async def _prepare_in_time(
        self, call: LiveCall, kept: KVFile | None
    ) -> dict[int, PreparedRequest] | None:
        """What is left to do of a call, by the prompt's number; None if it cannot be."""
        requests = call.record.requests
        numbers = [number for number, request in enumerate(requests) if not request.is_finished]
        work = sum(len(requests[number].prompt) for number in numbers)
        prepare = partial(self._prepare_again, call.record, numbers, kept)
        try:
            return await self._engine.prepare_in_time(prepare, work)
        except LaybyError as error:
            await self._refuse(call, error)
            return None

    async def _refuse(self, call: LiveCall, error: LaybyError) -> None:
        if isinstance(error, EngineUnavailableError):  # not its fault: the journal still has it
            del self._live[call.key]
            return
        if isinstance(error, BeyondSettingsError):  # nor is that its fault
            call.settle(RequestKeptError(str(error)))
            return
        logger.warning("request %s cannot be resumed: %s", call.record.call_id, error)
        await self._end(call, error)

    def _warn_of_kept(self, calls: Sequence[LiveCall]) -> None:
        """Say once what this engine's settings are too small for."""
        kept = [
            f"{call.record.call_id}: {call.failure.reason}"
            for call in calls
            if isinstance(call.failure, RequestKeptError)
        ]
        if kept:
            logger.warning(
                "%s of an earlier run cannot be served with these settings (the first, %s) and are "
                "kept for a start with larger settings; DELETE /v1/requests/{id} forgets one",
                counted(len(kept), "request"),
                kept[0],
            )

    async def save_kv(self, unfinished: UnfinishedKV) -> None:
        """Keep the KV cache of what has not ended, once its tokens are written down."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_WAIT_S)
        await asyncio.to_thread(unfinished.save, self._journal.kv_path, self._faults)

    async def close(self) -> int:
        """Write down what has not ended, once the engine is done; returns how many calls."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_WAIT_S)
        left = sum(call.record.status is CallStatus.OPEN for call in self._live.values())
        await self._write(self._journal.close)
        if left:
            logger.info("saved %s for the next start", counted(left, "unfinished request"))
        return left

    # --- what callers may do ---

    async def respond(
        self,
        request: Request,
        call: Call,
        *,
        owner: str,
        kind: str,
        digest: str,
        echoes: Sequence[Echo] = (),
    ) -> Response:
        """Run a call, or join the one of this id, and answer it.

        Raises:
            HTTPException: The id was used for something else, or cannot be one.
            LaybyError: The call is refused.
        """
        opening = partial(
            self._open, call, owner=owner, kind=kind, digest=digest, echoes=echoes,
            chosen_id=_chosen_id(request),
        )  # fmt: skip
        if call.stream:
            live, is_new = await opening()
            return self._stream(live, call, is_original=is_new)
        live_call: LiveCall | None = None

        async def answer() -> None:
            nonlocal live_call
            live_call, is_new = await opening()
            try:
                await live_call.wait()
            finally:
                self._leave(live_call, is_new)

        try:
            # None is what answer() returns, too.
            await unless_disconnected(request.receive, answer())
        except LaybyError as error:
            if live_call is None:
                raise
            response = error_response(error)
            response.headers[REQUEST_ID] = live_call.record.call_id
            return response
        if live_call is None or not live_call.is_settled:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        response = json_response(self._whole(live_call))
        response.headers[REQUEST_ID] = live_call.record.call_id
        response.background = self._when_sent(live_call)
        return response

    async def retrieve(
        self,
        owner: str,
        request_id: str,
        *,
        stream: bool,
        starting_after: int,
        delivers: bool = True,
    ) -> Response:
        """A call's state and what has come of it, or the stream of its answer.

        Args:
            owner, request_id: Whose, and which.
            stream: Whether it is to be the stream.
            starting_after: Leave out the first so many tokens of every choice.
            delivers: The caller gets the body; else there is no need for a stream.

        Raises:
            HTTPException: The caller has no such call.
            InvalidRequestError: No choice has so many tokens.
        """
        live = await self._find(owner, request_id)
        if live is None:
            raise _unknown(request_id)
        most = _most_tokens(live)
        if starting_after > most:
            raise InvalidRequestError(
                f"starting_after is {starting_after}, but no choice has more than "
                f"{counted(most, 'token')}",
                param="starting_after",
            )
        if stream and delivers:
            call = _as_asked(live.record, stream=True)
            return self._stream(live, call, starting_after=starting_after)
        response = json_response(self._description(live))
        response.headers[REQUEST_ID] = request_id
        if delivers:
            response.background = self._when_sent(live)
        return response

    async def set_priority(self, owner: str, request_id: str, priority: int) -> bool:
        """Put a call into another class, now and after a restart; False if there is none of this
        owner and id that has not ended."""
        live = self._live.get((owner, request_id))
        if live is None or live.is_settled:
            return False
        names = [stream.request_id for stream in live.streams.values()]
        if not await self._engine.set_priorities(names, priority):
            return False
        live.record.priority = priority
        for request in live.record.requests:
            request.waited_s = 0.0
        await self._try_to_write(partial(self._journal.set_priority, owner, request_id, priority))
        return True

    async def cancel(self, owner: str, request_id: str) -> Response:
        """End a call, in whatever state it is, and forget it.

        Raises:
            HTTPException: The caller has no such call.
        """
        try:
            live = await self._find(owner, request_id)
        except UnreadableCallError:
            pass  # it can be forgotten all the same
        else:
            if live is None:
                raise _unknown(request_id)
            self._cancel(live)
        await self._write(partial(self._journal.remove, owner, request_id))
        return json_response({"id": request_id, "object": "request.deleted", "deleted": True})

    # --- a call's life ---

    async def _open(
        self,
        call: Call,
        *,
        owner: str,
        chosen_id: str | None,
        kind: str,
        digest: str,
        echoes: Sequence[Echo],
    ) -> tuple[LiveCall, bool]:
        """The call of this id, and whether this made it."""
        if chosen_id is None:
            record = _new_record(owner, secrets.token_urlsafe(24), False, kind, digest, echoes)
            return await self._accept(record, call), True
        key = owner, chosen_id
        while (other := self._opening.get(key)) is not None:
            await asyncio.wait({other})  # of two at a time the first decides
        done = self._opening[key] = asyncio.get_running_loop().create_future()
        try:
            known = await self._find(owner, chosen_id)
            if known is None:
                record = _new_record(owner, chosen_id, True, kind, digest, echoes)
                return await self._accept(record, call), True
            if known.record.digest != digest:
                raise HTTPException(
                    409, f"the request id {chosen_id} was used for another request of yours"
                )
            return known, False
        finally:
            del self._opening[key]
            done.set_result(None)

    async def _accept(self, record: CallRecord, call: Call) -> LiveCall:
        """Queue a new call and write it down; both or neither."""
        with refusals_in_callers_words(call):
            prepared = await self._engine.prepare_all(
                call.prompts,
                call.params,
                priority=call.priority,
                cache_salt=call.cache_salt,
                names_index=call.names_index,
                begins_text=call.begins_text,
            )
            record.requests = [_request_record(one) for one in prepared]
            record.priority, record.cache_salt = call.priority, call.cache_salt
            streams = await self._engine.queue(prepared, names_index=call.names_index)
        live = LiveCall(record)
        try:
            await self._write(partial(self._journal.add, record))
        except BaseException as error:
            for stream in streams:
                stream.close()
            self._soon(self._try_to_write(partial(self._journal.remove, *live.key)))
            if isinstance(error, Exception):
                logger.error("a request could not be written to the journal: %s", error)
                raise EngineUnavailableError("the server cannot write its journal") from error
            raise
        self._live[live.key] = live
        self._start(live, dict(enumerate(streams)))
        return live

    def _prepare_again(
        self, record: CallRecord, numbers: Iterable[int], kept: KVFile | None
    ) -> dict[int, PreparedRequest]:
        prepared = {}
        for number in numbers:
            request = record.requests[number]
            if not request.has_started:
                request.samples = [SampleRecord() for _ in request.samples]
            one = self._engine.prepare_again(
                request.prompt,
                request.params,
                priority=record.priority,
                cache_salt=record.cache_salt,
                age_s=max(0.0, time.time() - record.created_s),
                waited_s=request.waited_s,
                outputs=[(s.token_ids, s.finish_reason) for s in request.samples]
                if request.has_started
                else (),
                kept=kept,
            )
            prepared[number] = replace(
                one, known_as=record.call_id, begins_text=record.kind == "chat"
            )
        return prepared

    def _start(self, call: LiveCall, streams: Mapping[int, RequestStream]) -> None:
        call.streams = streams
        self._soon(self._collect(call))

    async def _collect(self, call: LiveCall) -> None:
        """Read a call's streams into its record until all have ended."""
        errors = await asyncio.gather(*(self._collect_one(call, number) for number in call.streams))
        failures = [error for error in errors if error is not None]
        if not call.is_cancelled:
            await self._end(call, failures[0] if failures else None)

    async def _collect_one(self, call: LiveCall, number: int) -> LaybyError | None:
        """Read one stream; the error it ended with, which then ends the whole call."""
        try:
            async for delta in call.streams[number]:
                if delta.error is not None:
                    # Not added: its text is flushed for somebody who gets no more. Where the
                    # process ends, the others get their own; they may have tokens to come.
                    if not isinstance(delta.error, EngineUnavailableError):
                        call.close_streams()
                    call.record.requests[number].waited_s = call.streams[number].waited_s
                    return delta.error
                call.add(number, delta)
        except Exception as fault:
            logger.exception("request %s failed", call.record.call_id)
            call.close_streams()
            return RequestFailedError(f"the request failed: {type(fault).__name__}")
        return None

    async def _end(self, call: LiveCall, error: LaybyError | None) -> None:
        """Write down how a call ended, then tell its readers."""
        record = call.record
        if not isinstance(error, EngineUnavailableError):
            record.status = CallStatus.DONE if error is None else CallStatus.FAILED
            record.error = None if error is None else str(error)
        is_written = await self._try_to_write(partial(self._journal.save, record))
        if isinstance(error, EngineUnavailableError) and is_written:
            error = type(error)(
                f"{error}; it is kept: GET /v1/requests/{record.call_id} has its answer after "
                "the restart"
            )
        call.settle(error)
        if is_written and record.status is not CallStatus.OPEN:
            self._live.pop(call.key, None)

    def _cancel(self, call: LiveCall) -> None:
        """End a call now; its readers see the samples end with ``abort``."""
        if not call.is_settled:
            call.is_cancelled = True
            call.close_streams()
            for request in call.record.requests:
                for sample in request.samples:
                    sample.finish_reason = sample.finish_reason or "abort"
            call.settle()
        self._live.pop(call.key, None)

    def _leave(self, call: LiveCall, is_original: bool) -> None:
        """A caller is gone; the first one of a call takes it along, unless it can come back."""
        stays = call.is_settled or call.record.is_chosen or self._engine.is_draining
        if is_original and not stays:
            self._cancel(call)
            self._soon(self._try_to_write(partial(self._journal.remove, *call.key)))

    async def _find(self, owner: str, call_id: str) -> LiveCall | None:
        live = self._live.get((owner, call_id))
        if live is not None:
            return live
        record = await self._write(partial(self._journal.find, owner, call_id))
        # It may have come to life meanwhile; one that is open and not alive is of no engine.
        return self._live.get((owner, call_id)) or (
            None if record is None or record.status is CallStatus.OPEN else LiveCall(record)
        )

    # --- answers ---

    def _stream(
        self, live: LiveCall, call: Call, *, starting_after: int = 0, is_original: bool = False
    ) -> NumberedEvents:
        def leave(was_sent: bool) -> None:
            self._leave(live, is_original)
            if was_sent and live.is_settled:
                self._soon(self._mark_fetched(live))

        return NumberedEvents(
            [RecordReader(live, number) for number in range(len(live.record.requests))],
            call,
            self._answer(live.record),
            request_id=live.record.call_id,
            starting_after=starting_after,
            on_leave=leave,
        )

    def _answer(self, record: CallRecord) -> Answer:
        engine, head = self._engine, Head(record.call_id, record.created_s)
        if record.kind == "chat":
            return ChatAnswer(engine.model_name, engine.tokenizer, head)
        n = record.requests[0].params.n
        echoes = [Echo(text, ids) for text, ids in record.echoes]
        return CompletionAnswer(engine.model_name, engine.tokenizer, n, echoes, head)

    def _whole(self, call: LiveCall) -> dict[str, Any]:
        """The answer so far, in the shape of the API that was called."""
        record = call.record
        outputs = [_request_output(request) for request in record.requests]
        usage = usage_of(
            sum(len(request.prompt) for request in record.requests),
            sum(len(s.token_ids) for request in record.requests for s in request.samples),
        )
        return self._answer(record).whole(outputs, usage)

    def _description(self, call: LiveCall) -> dict[str, Any]:
        record = call.record
        whole = self._whole(call)
        error = None if call.failure is None else error_answer(call.failure)[1]["error"]
        return {
            "id": record.call_id,
            "object": "request",
            "created": int(record.created_s),
            "status": _status(call),
            "usage": whole["usage"],
            "error": error,
            "response": whole,
        }

    def _when_sent(self, call: LiveCall) -> BackgroundTasks:
        tasks = BackgroundTasks()
        if call.is_settled:
            tasks.add_task(self._mark_fetched, call)
        return tasks

    # --- the journal's thread ---

    async def _mark_fetched(self, call: LiveCall) -> None:
        await self._try_to_write(partial(self._journal.mark_fetched, *call.key))

    async def _write(self, change: Callable[[], T]) -> T:
        return await self._writer.run(change)

    async def _try_to_write(self, change: Callable[[], object]) -> bool:
        """Write where a failure costs durability, but nobody his answer."""
        try:
            await self._write(change)
        except Exception as error:
            logger.error("the journal could not be written: %s", error)
            return False
        return True

    def _soon(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _chosen_id(request: Request) -> str | None:
    chosen = request.headers.get(REQUEST_ID)
    if chosen is not None and not _ID.fullmatch(chosen):
        raise InvalidRequestError(
            f"the header {REQUEST_ID} must have 1 to 128 letters, digits or any of . _ : -",
            param=REQUEST_ID,
        )
    return chosen


def _unknown(request_id: str) -> HTTPException:
    return HTTPException(404, f"you have no request {request_id[:128]!r} here")


def _new_record(
    owner: str, call_id: str, is_chosen: bool, kind: str, digest: str, echoes: Sequence[Echo]
) -> CallRecord:
    return CallRecord(
        owner=owner,
        call_id=call_id,
        is_chosen=is_chosen,
        kind=kind,
        digest=digest,
        created_s=time.time(),
        requests=[],
        echoes=[(echo.text, list(echo.token_ids)) for echo in echoes],
    )


def _request_record(prepared: PreparedRequest) -> RequestRecord:
    prompt = list(prepared.request.sequences[0].tokens)
    return RequestRecord.new(prompt, prepared.settled_params)


def _request_output(request: RequestRecord) -> RequestOutput:
    samples = [
        CompletionOutput(index, s.text, s.token_ids, s.logprobs, s.finish_reason, s.stop_reason)
        for index, s in enumerate(request.samples)
    ]
    return RequestOutput("", None, request.prompt, samples, request.prompt_logprobs)


def _as_asked(record: CallRecord, *, stream: bool) -> Call:
    """The call again, for somebody who comes back for its answer."""
    return Call(
        prompts=[request.prompt for request in record.requests],
        params=record.requests[0].params,
        priority=record.priority,
        cache_salt=record.cache_salt,
        prompt_param="prompt",
        names_index=False,
        stream=stream,
        include_usage=False,
    )


def _most_tokens(call: LiveCall) -> int:
    """Most tokens that a choice has, or may come to have."""
    requests = call.record.requests
    if call.is_settled:
        return max(len(sample.token_ids) for request in requests for sample in request.samples)
    return max(request.params.max_tokens or 0 for request in requests)


def _status(call: LiveCall) -> str:
    if not call.is_settled:
        started = any(s.token_ids for r in call.record.requests for s in r.samples)
        return "in_progress" if started else "queued"
    if call.failure is None:
        return "completed"
    return "interrupted" if isinstance(call.failure, EngineUnavailableError) else "failed"
