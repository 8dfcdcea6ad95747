"""The engine for asyncio: its loop runs in a thread, every request is an async iterator.

Two threads meet here. The engine's thread alone touches the engine; it takes commands (submit,
abort, end and others) between two steps and sleeps when there is nothing to do. The event loop's
thread alone touches the streams; it gets everything that a step brought in one call.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from layby.engine.config import EngineConfig
from layby.engine.engine import Engine
from layby.engine.interfaces import ChatTemplate, Tokenizer
from layby.engine.kept_kv import UnfinishedKV
from layby.engine.kv_pool import KVPoolSize
from layby.engine.metrics import EngineStats
from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.engine.preparation import PreparedRequest, check_priority
from layby.engine.workers import Workers
from layby.errors import (
    EngineDeadError,
    EngineDrainingError,
    EngineUnavailableError,
    LaybyError,
    prefixed,
)
from layby.execution.faults import Faults
from layby.execution.kv_file import KVFile
from layby.sampling_params import SamplingParams

logger = logging.getLogger("layby.engine")

LONG_WORK = 10_000
"""Calls with more characters and token ids than this are prepared in a helper thread."""

PROMPT_WORK = 100
"""What a prompt costs beside its length, in the same measure."""

NUM_WORKERS = 4
"""Most calls that are prepared at a time; each takes no longer than a context's worth of text."""

T = TypeVar("T")

FORCED_END_WAIT_S = 5.0
"""How long a shutdown that has passed its limit waits for the step in flight to end."""


class RequestStream:
    """One request's deltas, as an async iterator; the last one is ``finished``.

    It belongs to the event loop in which the request was submitted. Leave it by ``close()`` (or
    ``async with``) if you stop reading before the end: the request is then aborted at the next
    step. Cancelling a task that waits for the next delta does the same. It never raises an
    error of its own: a request that failed ends with a delta that carries the error.
    """

    __slots__ = ("_arrived", "_closed", "_deltas", "_ended", "_open_samples", "_owner", "loop",
                 "num_prompt_tokens", "request_id", "waited_s")  # fmt: skip

    def __init__(
        self, owner: AsyncEngine, prepared: PreparedRequest, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.request_id = prepared.request.request_id
        self.num_prompt_tokens = prepared.request.num_prompt_tokens
        self.loop = loop
        self._owner = owner
        self._deltas: deque[RequestDelta] = deque()
        self._arrived = asyncio.Event()
        self._open_samples = set(range(prepared.request.n))
        self._ended = False  # the last delta has come
        self._closed = False
        self.waited_s = 0.0  # until a shutdown cut it off; for the next process

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        while not self._deltas:
            if self._closed or self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            try:
                await self._arrived.wait()
            except asyncio.CancelledError:
                self.close()
                raise
        delta = self._deltas.popleft()
        delta.read()
        return delta

    def close(self) -> None:
        """Stop reading; abort the request if it has not ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._deltas.clear()
            self._arrived.set()
            if not self._ended:
                self._owner._command(_Abort(self))

    async def aclose(self) -> None:
        """The same, for ``contextlib.aclosing``."""
        self.close()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, delta: RequestDelta) -> None:
        """Take a delta; in the event loop's thread."""
        if self._ended or self._closed:
            return
        self._open_samples.difference_update(
            piece.index for piece in delta.outputs if piece.finish_reason is not None
        )
        self._ended = delta.finished
        self._deltas.append(delta)
        self._arrived.set()

    def _force_end(self, reason: str, error: LaybyError) -> None:
        """End without the engine's help; in the event loop's thread."""
        outputs = [
            CompletionDelta(index, "", [], finish_reason=reason)
            for index in sorted(self._open_samples)
        ]
        self._put(RequestDelta(self.request_id, self.num_prompt_tokens, outputs, True, error=error))


@dataclass(frozen=True, slots=True)
class _Submit:
    """Queue all of these requests or none; the future gets None or the error."""

    prepared: list[PreparedRequest]
    streams: list[RequestStream]
    names_index: bool
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Abort:
    """End a stream's request (not another one that happens to have the same id)."""

    stream: RequestStream


@dataclass(frozen=True, slots=True)
class _Call:
    """Call this between two steps; ``answer`` gets the outcome in the engine's thread."""

    call: Callable[[Engine], Any]
    answer: Callable[[Any, Exception | None], None]


_Command = _Submit | _Abort | _Call


class AsyncEngine:
    """An :class:`Engine` in a thread of its own, for any number of asyncio tasks.

    Call ``start`` before the first request and ``shutdown`` at the end; or use ``async with``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.defers_text = True  # streams read their deltas in the event loop's thread
        self._workers = Workers(NUM_WORKERS)
        self._wake = threading.Condition()  # guards the four below
        self._commands: deque[_Command] = deque()
        self._draining = False
        self._cut_off: EngineDrainingError | None = None  # end what is left, for this reason
        self._closed = False  # no command is read any more
        self._thread: threading.Thread | None = None
        # Of the engine's thread; the forced end of a shutdown reads the first when that is stuck.
        self._streams: dict[str, RequestStream] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._unfinished: UnfinishedKV | None = None  # of what was cut off
        self._num_cut_off = 0

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Load the model and build everything under it; takes seconds.

        Raises:
            ConfigError, ModelError: The settings or the model cannot work.
        """
        from layby.engine.build import build_engine

        return cls(build_engine(config))

    # --- life ---

    async def start(self) -> None:
        """Start the engine's thread. Does nothing if it runs.

        Raises:
            EngineUnavailableError: The engine was shut down.
        """
        if self._draining:
            raise EngineUnavailableError("the engine was shut down; make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="layby-engine", daemon=True)
            self._thread.start()

    async def shutdown(
        self,
        drain_timeout_s: float = 30.0,
        *,
        save: Callable[[UnfinishedKV], Awaitable[None]] | None = None,
    ) -> None:
        """Take nothing new, finish what was accepted, then free everything.

        What has not finished after ``drain_timeout_s`` seconds ends with ``abort`` and an
        EngineDrainingError in its last delta. May be called again.

        Args:
            drain_timeout_s: How long accepted work may go on.
            save: Called then, if there is such work, with where its KV lies; the memory is freed
                afterwards.
        """
        self.begin_drain()
        thread = self._thread
        if thread is not None:
            await asyncio.to_thread(thread.join, drain_timeout_s)
            if thread.is_alive():
                self._end_unfinished(drain_timeout_s)
                await asyncio.to_thread(thread.join, FORCED_END_WAIT_S)
            if thread.is_alive():
                logger.error("the step in flight does not end; leaving it behind")
                for stream in list(self._streams.values()):
                    assert self._cut_off is not None  # set by _end_unfinished
                    force_end = partial(stream._force_end, "abort", self._cut_off)
                    stream.loop.call_soon_threadsafe(force_end)
                return
        unfinished, self._unfinished = self._unfinished, None
        if save is not None and unfinished is not None and unfinished.places:
            await save(unfinished)
        self._engine.close()

    def begin_drain(self) -> None:
        """Refuse new requests from now on; what was accepted goes on. Safe in any thread."""
        with self._wake:
            self._draining = True
            self._wake.notify()

    def break_off(self, timeout_s: float = 1.0) -> None:
        """Save the recording, if there is one, before the process ends at once. For any thread."""
        if self._engine.recorder is not None:
            self._engine.recorder.break_off(timeout_s)

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown(drain_timeout_s=0.0 if error is not None else 30.0)

    # --- requests ---

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Queue a request and return its stream; every reason to refuse it is raised here.

        Arguments are those of :meth:`Engine.add_request`.

        Raises:
            InvalidRequestError, RequestTooLargeError: The request can never be served.
            QueueFullError: Too many requests wait; try again.
            EngineDrainingError, EngineDeadError, EngineUnavailableError: The engine takes none.
        """
        self._check_open()
        prepare = partial(
            self._engine.prepare,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        [stream] = await self.queue([await self.prepare_in_time(prepare, _work_of([prompt]))])
        return stream

    async def submit_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        names_index: bool = False,
        begins_text: bool = False,
    ) -> list[RequestStream]:
        """Queue a request for each prompt, or none of them if one is refused.

        Arguments and errors are those of ``submit``; with ``names_index`` the message of an error
        begins with the prompt's number; ``begins_text`` is that of PreparedRequest.
        """
        prepared = await self.prepare_all(
            prompts,
            params,
            priority=priority,
            cache_salt=cache_salt,
            names_index=names_index,
            begins_text=begins_text,
        )
        return await self.queue(prepared, names_index=names_index)

    async def prepare_all(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        names_index: bool = False,
        begins_text: bool = False,
    ) -> list[PreparedRequest]:
        """The first half of ``submit_all``: every check that needs no look at the queues."""
        self._check_open()

        def prepare() -> list[PreparedRequest]:
            prepared = []
            for index, prompt in enumerate(prompts):
                with prefixed(f"prompt[{index}]", when=names_index):
                    one = self._engine.prepare(
                        prompt, params, priority=priority, cache_salt=cache_salt
                    )
                    prepared.append(replace(one, begins_text=begins_text))
            return prepared

        return await self.prepare_in_time(prepare, _work_of(prompts))

    async def prepare_in_time(self, call: Callable[[], T], work: int) -> T:
        """Call it, in a thread if there is so much work that the event loop would notice.

        Args:
            call: Must be safe in any thread.
            work: Characters and token ids it looks at.
        """
        return await self._workers.run(call) if work > LONG_WORK else call()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestDelta]:
        """Submit and iterate in one; errors are those of ``submit``, at the first step.

        Closing the generator aborts the request at the engine's next step.
        """
        stream = await self.submit(
            prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt
        )
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    async def set_priority(self, request_id: str, priority: int) -> bool:
        """Put a live request into another class, in whichever queue it is.

        When this returns, the engine's next step knows.

        Args:
            request_id: Whose.
            priority: Its class; a smaller number is more urgent.

        Returns:
            Whether there is such a request; it may just have ended.

        Raises:
            InvalidRequestError: ``priority`` is no integer.
        """
        return await self.set_priorities([request_id], priority) > 0

    async def set_priorities(self, request_ids: Sequence[str], priority: int) -> int:
        """The same for several requests, before one and the same step; how many were live."""
        check_priority(priority)

        def change(engine: Engine) -> int:
            return sum(engine.set_priority(request_id, priority) for request_id in request_ids)

        try:
            return await self._in_between(change)
        except EngineUnavailableError:
            return 0  # with the engine its requests have ended

    async def queue(
        self, prepared: list[PreparedRequest], *, names_index: bool = False
    ) -> list[RequestStream]:
        """Queue prepared requests, or none of them if one is refused; the rest of ``submit_all``.

        They are handed over in one command: the engine obeys only between two steps.
        """
        submit = self._new_submit(prepared, names_index=names_index)
        self._command(submit)
        try:
            await submit.done
        except asyncio.CancelledError:
            for stream in submit.streams:
                stream.close()  # it may have been queued already
            raise
        return submit.streams

    async def queue_each(
        self, groups: Sequence[list[PreparedRequest]]
    ) -> list[list[RequestStream] | LaybyError]:
        """The same for several groups, in this order and before one and the same step: what became
        of each.

        Raises:
            EngineDrainingError, EngineDeadError, EngineUnavailableError: The engine takes none.
        """
        submits = [self._new_submit(prepared) for prepared in groups]
        self._command(*submits)
        outcomes: list[list[RequestStream] | LaybyError] = []
        for submit in submits:
            try:
                await submit.done
                outcomes.append(submit.streams)
            except LaybyError as error:
                outcomes.append(error)
        return outcomes

    def _new_submit(self, prepared: list[PreparedRequest], *, names_index: bool = False) -> _Submit:
        loop = asyncio.get_running_loop()
        streams = [RequestStream(self, one, loop) for one in prepared]
        return _Submit(prepared, streams, names_index, loop, loop.create_future())

    # --- from one process to the next ---

    async def open_kept(self, path: Path, faults: Faults | None = None) -> KVFile | None:
        """As :meth:`Engine.open_kept`."""
        return await self._in_between(lambda engine: engine.open_kept(path, faults))

    # --- checks, safe in any thread ---

    def prepare_again(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str,
        age_s: float,
        waited_s: float = 0.0,
        outputs: Sequence[tuple[list[int], str | None]] = (),
        kept: KVFile | None = None,
    ) -> PreparedRequest:
        """As :meth:`Engine.prepare_again`."""
        return self._engine.prepare_again(
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            age_s=age_s,
            waited_s=waited_s,
            outputs=outputs,
            kept=kept,
        )

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt"
    ) -> list[int]:
        """As :meth:`Engine.encode`."""
        return self._engine.encode(text, add_special_tokens, param=param)

    def check_chars(self, num_chars: int, param: str) -> None:
        """As :meth:`Engine.check_chars`."""
        self._engine.check_chars(num_chars, param)

    # --- the pool's size ---

    async def resize_kv_pool(self, num_blocks: int) -> KVPoolSize:
        """As :meth:`Engine.resize_kv_pool`; waits for the step that makes it so.

        Returns:
            The size after that step. It is above the target while a request that was accepted
            may come to need more; ``note`` says so.

        Raises:
            InvalidRequestError: There can be no pool of this size.
            EngineDeadError, EngineUnavailableError: There is no engine to do it.
        """
        await self._in_between(lambda engine: engine.resize_kv_pool(num_blocks))
        return await self._in_between(Engine.kv_pool_size)  # a busy engine takes a step meanwhile

    def kv_pool_size(self) -> KVPoolSize:
        """Size of the device pool as of the engine's last step."""
        return self._engine.kv_pool_size()

    # --- state ---

    @property
    def is_healthy(self) -> bool:
        """Whether the engine's thread runs and no step has failed. True while draining."""
        return self._thread is not None and self._thread.is_alive() and self.error is None

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because of a shutdown."""
        return self._draining

    @property
    def num_cut_off(self) -> int:
        """Requests that a shutdown ended; of those aborted."""
        return self._num_cut_off

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is dead; None if it is not."""
        return self._engine.error

    @property
    def model_name(self) -> str:
        """Name of the model."""
        return self._engine.model_name

    @property
    def identity(self) -> Mapping[str, str]:
        """Everything that the tokens of a request depend on beside the request, by name."""
        return self._engine.identity

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._engine.chat_template

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and output, of one sequence."""
        return self._engine.max_model_len

    @property
    def max_prompt_chars(self) -> int:
        """Characters that no prompt can exceed."""
        return self._engine.max_prompt_chars

    @property
    def max_queued_seqs(self) -> int | None:
        """Most sequences that an idle engine accepts at a time; None: no limit."""
        return self._engine.max_queued_seqs

    @property
    def vocab_size(self) -> int:
        """Token ids the model knows, from 0."""
        return self._engine.vocab_size

    def stats(self) -> EngineStats:
        """Counts as of the engine's last step."""
        return self._engine.stats()

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return self._engine.metrics_text()

    # --- towards the engine's thread ---

    def _check_open(self) -> None:
        if self._draining:
            raise EngineDrainingError("the engine is shutting down and takes no new requests")
        if self.error is not None:
            # A fresh one: an exception gathers traceback every time it is raised.
            raise EngineDeadError(str(self.error))
        if self._thread is None:
            raise EngineUnavailableError("the engine has not been started")

    async def _in_between(self, call: Callable[[Engine], T]) -> T:
        """Call something in the engine's thread, between two steps.

        Raises:
            EngineUnavailableError: There is no such thread (any more).
            Exception: Whatever the call raises.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def answer(value: Any, error: Exception | None) -> None:
            self._post(loop, partial(_resolve, done, error, value))

        if not self._command(_Call(call, answer)):
            raise EngineUnavailableError("the engine does not run")
        return await done

    def _command(self, *commands: _Command) -> bool:
        """Leave commands of one kind for the engine's thread, to be obeyed before the same step;
        False if nobody reads them any more.

        Raises:
            EngineUnavailableError: They are submissions, and the engine takes none.
        """
        with self._wake:
            if any(isinstance(command, _Submit) for command in commands):
                self._check_open()
            elif self._closed or self._thread is None:
                return False
            self._commands += commands
            self._wake.notify()
        return True

    def _end_unfinished(self, limit_s: float) -> None:
        with self._wake:
            self._cut_off = EngineDrainingError(
                f"the engine shut down; the request had not finished within {limit_s:g} s"
            )
            self._wake.notify()

    # --- in the engine's thread ---

    def _run(self) -> None:
        try:
            while self._obey_commands():
                self._engine.follow_memory()  # of an idle engine, too
                if self._engine.has_unfinished:
                    self._post_all(self._engine.step())
        except BaseException as fault:
            logger.exception("the engine's loop failed")
            if self.error is None:
                self._engine.fail_all(f"{type(fault).__name__}: {fault}")
            # _close tells the readers.
        finally:
            self._close()

    def _obey_commands(self) -> bool:
        """Do what was asked since the last step, waiting if there is nothing else to do; but not
        beyond the time at which to look at the memory.

        False when the thread is to end: a shutdown, with nothing left to finish.
        """
        with self._wake:
            while not (self._commands or self._engine.has_unfinished or self._draining):
                if not self._wake.wait(self._engine.memory_wait_s):
                    break
            commands, self._commands = self._commands, deque()
            draining, cut_off = self._draining, self._cut_off
        for command in commands:
            if isinstance(command, _Submit):
                self._submit(command)
            elif isinstance(command, _Call):
                self._call(command)
            elif self._streams.get(command.stream.request_id) is command.stream:
                self._abort(command.stream.request_id)
        if cut_off is not None:
            self._unfinished = self._engine.unfinished_kv()
            self._num_cut_off += len(self._streams)
            for request_id, stream in list(self._streams.items()):
                stream.waited_s = self._engine.waited_s(request_id)
                self._abort(request_id, cut_off)
        self._flush()  # so that refusals do not wait for the step
        # After a cut there is no other step: it might touch what is to be saved.
        return cut_off is None and (self._engine.has_unfinished or not draining)

    def _submit(self, command: _Submit) -> None:
        error: Exception | None = None
        queued = []
        try:
            for index, prepared in enumerate(command.prepared):
                with prefixed(f"prompt[{index}]", when=command.names_index):
                    queued.append(self._engine.submit(prepared))
        except Exception as refusal:
            if not isinstance(refusal, LaybyError):
                logger.exception("a request could not be queued")
            error = refusal
            for request_id in queued:
                self._engine.abort(request_id)
        else:
            self._streams.update((stream.request_id, stream) for stream in command.streams)
        self._post(command.loop, partial(_resolve, command.done, error))

    def _call(self, command: _Call) -> None:
        value, error = None, None
        try:
            value = command.call(self._engine)
        except Exception as fault:
            if not isinstance(fault, LaybyError):
                logger.exception("a call between two steps failed")
            error = fault
        command.answer(value, error)

    def _abort(self, request_id: str, error: LaybyError | None = None) -> None:
        delta = self._engine.abort(request_id, error)
        if delta is not None:
            self._post_all([delta])

    def _post_all(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None:  # its event loop is gone
                continue
            if delta.finished:
                del self._streams[delta.request_id]
            self._post(stream.loop, partial(stream._put, delta))
        self._flush()

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._outbox.setdefault(loop, []).append(call)

    def _flush(self) -> None:
        """Hand each event loop, in one call, what has gathered for it."""
        outbox, self._outbox = self._outbox, {}
        for loop, calls in outbox.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:  # the loop is closed: nobody reads these streams any more
                for stream in [s for s in self._streams.values() if s.loop is loop]:
                    del self._streams[stream.request_id]
                    self._engine.abort(stream.request_id)

    def _close(self) -> None:
        """Nobody may wait for an answer of a thread that has ended."""
        with self._wake:
            self._closed = self._draining = True
            commands, self._commands = self._commands, deque()
        error = self.error or EngineDrainingError("the engine has shut down")
        for command in commands:
            if isinstance(command, _Submit):
                self._post(command.loop, partial(_resolve, command.done, error))
            elif isinstance(command, _Call):
                command.answer(None, error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():  # none, unless the loop itself failed
            self._post(stream.loop, partial(stream._force_end, "error", error))
        self._flush()


def _work_of(prompts: Sequence[str | Sequence[int]]) -> int:
    """How much there is to look at; what is no prompt at all is refused at a glance."""
    return sum(
        PROMPT_WORK + (len(prompt) if isinstance(prompt, Sequence) else 0) for prompt in prompts
    )


def _resolve(done: asyncio.Future[Any], error: Exception | None, value: Any = None) -> None:
    if done.done():  # the submitter was cancelled meanwhile
        return
    if error is None:
        done.set_result(value)
    else:
        done.set_exception(error)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()
