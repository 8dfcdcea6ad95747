"""LLM: prompts in, answers out, for a program that wants them all at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any

from layby.engine.config import EngineConfig
from layby.engine.engine import Engine
from layby.engine.interfaces import Tokenizer
from layby.engine.metrics import EngineStats
from layby.engine.outputs import CompletionOutput, RequestDelta, RequestOutput
from layby.engine.preparation import PreparedRequest
from layby.errors import EngineDeadError, InvalidRequestError, counted, prefixed, shown
from layby.sampling_params import SamplingParams

Prompt = str | Sequence[int]
"""Text, or token ids."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with ``role`` and ``content``."""


class LLM:
    """A model with everything under it, used from one thread.

    Args:
        model: As :class:`EngineConfig`.
        options: The other fields of :class:`EngineConfig`; unlike there, the queue has no limit
            unless ``max_queue`` gives one, and nothing is shed unless ``shed_load`` says so.
            With ``elastic_memory`` the pool follows the memory while something runs.

    Raises:
        ConfigError, ModelError: The settings or the model cannot work.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        from layby.engine.build import build_engine

        config = EngineConfig.from_options(
            model=model, **{"max_queue": None, "shed_load": False, **options}
        )
        self._engine = build_engine(config)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine that is there already."""
        llm = cls.__new__(cls)
        llm._engine = engine
        return llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the answers come in the order of the prompts.

        Args:
            prompts: One prompt or several, each text or token ids.
            params: One for all prompts, or one for each; the defaults if None.
            priority: The same; a smaller number is more urgent.
            progress: Show a progress bar on stderr. None: if that is a terminal.

        Raises:
            InvalidRequestError: A prompt or parameter is at fault. The message names the prompt's
                index, and nothing has been run.
            EngineDeadError: A step failed as a whole. A request that fails alone does not raise:
                its answer ends with ``error``.
        """
        many = _as_prompts(prompts)
        return self._run([(prompt, None) for prompt in many], params, priority, progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        begins_text: bool = False,
    ) -> Generator[RequestDelta]:
        """Complete one prompt and yield what each step adds to the answer.

        Leaving the generator, by ``close`` or by an exception, ends the request. Ctrl-C takes
        effect between two steps, so that the LLM stays usable; a second one breaks the step off,
        which ends the engine.

        Args:
            prompt: Text or token ids.
            params: How to choose tokens; the defaults if None.
            priority: A smaller number is more urgent.
            begins_text: The answer is a text of its own, as in a chat, and does not go on with the
                prompt's.

        Raises:
            LaybyError: The request is refused, or failed; after the delta that carries the error.
        """
        with _interrupt_between_steps() as check:
            prepared = self._engine.prepare(prompt, params, priority=priority)
            request_id = self._engine.submit(replace(prepared, begins_text=begins_text))
            try:
                while True:
                    check()
                    for delta in self._engine.step():
                        if delta.request_id != request_id:
                            continue  # of another caller of the same engine
                        yield delta
                        if delta.error is not None:
                            raise delta.error
                        if delta.finished:
                            return
            finally:
                self._engine.abort(request_id)  # does nothing if it has ended

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, in the model's chat format; else as ``generate``."""
        is_list = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
        is_many = is_list and len(messages) > 0 and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if is_many else [messages]
        prompts: list[tuple[Prompt, str | None]] = []
        for index, conversation in enumerate(conversations):
            with prefixed(f"messages[{index}]", when=len(conversations) > 1):
                text = self._engine.render_chat(conversation)
                tokens = self._engine.encode(text, add_special_tokens=False, param="messages")
            prompts.append((tokens, text))
        return self._run(prompts, params, priority, progress)

    def stats(self) -> EngineStats:
        """Counts and totals of the engine; also readable as a mapping."""
        return self._engine.stats()

    def close(self) -> None:
        """Free the model's memory. The LLM cannot be used afterwards."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- running ---

    def _run(
        self,
        prompts: Sequence[tuple[Prompt, str | None]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        progress: bool | None,
    ) -> list[RequestOutput]:
        """Run prompts, each with the text to show for it if that is not the prompt itself."""
        params_of = _one_each("params", params, SamplingParams | None, len(prompts))
        priority_of = _one_each("priority", priority, int, len(prompts))
        outputs: dict[str, RequestOutput] = {}
        # Queueing too must not be broken off half-way.
        with _interrupt_between_steps() as check:
            try:
                prepared = []
                for index, (prompt, rendered) in enumerate(prompts):
                    check()
                    with prefixed(f"prompts[{index}]", when=len(prompts) > 1):
                        one = self._engine.prepare(
                            prompt, params_of[index], priority=priority_of[index]
                        )
                        prepared.append(replace(one, begins_text=rendered is not None))
                for index, one in enumerate(prepared):
                    with prefixed(f"prompts[{index}]", when=len(prompts) > 1):
                        request_id = self._engine.submit(one)
                    outputs[request_id] = _empty_output(one, prompts[index][1])
                self._finish(outputs, progress, check)
            finally:
                for request_id, output in outputs.items():
                    if not output.finished:
                        self._engine.abort(request_id)
        if self._engine.error is not None:
            raise EngineDeadError(str(self._engine.error))
        return list(outputs.values())

    def _finish(
        self,
        outputs: Mapping[str, RequestOutput],
        progress: bool | None,
        check: Callable[[], None],
    ) -> None:
        """Step until every one of these requests has ended."""
        shows = sys.stderr.isatty() if progress is None else progress
        unfinished = len(outputs)
        with _progress_bar(len(outputs), shows) as advance:
            while unfinished:
                check()
                tokens = ended = 0
                for delta in self._engine.step():
                    output = outputs.get(delta.request_id)
                    if output is None:
                        continue  # of another caller of the same engine
                    output.add(delta)
                    tokens += sum(len(piece.token_ids) for piece in delta.outputs)
                    ended += delta.finished
                unfinished -= ended
                advance(ended, tokens)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise InvalidRequestError(
            "prompts must be a string, a list of token ids or a list of either, "
            f"got {shown(prompts)}",
            param="prompt",
        )
    if not prompts:
        raise InvalidRequestError("prompts is empty", param="prompt")
    first = prompts[0]
    if isinstance(first, int):
        return [prompts]  # type: ignore[list-item]  # a sequence of ints: one prompt's token ids
    return prompts  # type: ignore[return-value]


def _one_each(name: str, value: Any, kind: Any, count: int) -> list[Any]:
    """One value for each prompt, of a single value or a sequence of as many."""
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidRequestError(
            f"{name} must be one for all prompts or a list of one for each, got {shown(value)}",
            param=name,
        )
    if len(value) != count:
        raise InvalidRequestError(
            f"{name} has {counted(len(value), 'entry', 'entries')} for {counted(count, 'prompt')}",
            param=name,
        )
    return list(value)


def _empty_output(prepared: PreparedRequest, shown_prompt: str | None) -> RequestOutput:
    request = prepared.request
    return RequestOutput(
        request.request_id,
        prepared.prompt if shown_prompt is None else shown_prompt,
        list(request.sequences[0].tokens),
        [
            CompletionOutput(index, logprobs=None if prepared.params.logprobs is None else [])
            for index in range(request.n)
        ],
        arrival_s=request.arrival_time or 0.0,
    )


@contextmanager
def _interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the function it yields is called.

    A step that is broken off half-way would leave scheduler and executor in disagreement. A
    second Ctrl-C is not held back. Only the main thread gets signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGINT)
    interrupted = False

    def hold_back(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    if before is not signal.default_int_handler:  # somebody else's business
        yield lambda: None
        return
    signal.signal(signal.SIGINT, hold_back)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished requests; the function it yields adds requests and output tokens."""
    if not shown:
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as bar:
        task = bar.add_task("Generating", total=total, rate="")
        all_tokens = 0

        def advance(ended: int, tokens: int) -> None:
            nonlocal all_tokens
            all_tokens += tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            rate = f"{all_tokens / elapsed:.0f} tokens/s" if elapsed else ""
            bar.update(task, advance=ended, rate=rate)

        yield advance
