"""What a caller gets back, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from layby.errors import LaybyError
from layby.execution.executor import PositionLogprobs


@dataclass(slots=True)
class CompletionDelta:
    """What one step added to one sample.

    ``text`` holds whole characters only; it may be empty while a character or a possible stop
    string is held back, and may then cover several tokens. ``finish_reason`` is set exactly once
    per sample: ``stop``, ``length``, ``abort`` or ``error``. ``stop_reason`` is the stop string
    or stop token id that matched, None for an end-of-sequence token. ``unread`` gives the text
    if it has not been made yet; see ``RequestDelta.read``.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    unread: Callable[[], str] | None = None


@dataclass(slots=True)
class RequestDelta:
    """What one step added to one request.

    Attributes:
        request_id: Whose it is.
        num_prompt_tokens: Tokens of the prompt, for the usage report.
        outputs: One entry for every sample that got something in this step.
        finished: No more deltas follow. Set on the last one of every request, however it ends.
        prompt_logprobs: One entry per prompt token (None for the first); with the first delta
            only, if the request asked.
        error: Why the request did not end by itself, where its samples end with ``error`` (a
            RequestFailedError, or an EngineDeadError when the whole engine failed) or where a
            shutdown cut it off (an EngineDrainingError). None for an abort the caller asked for.
        time_s: When the step ended, in seconds on the engine's clock.
    """

    request_id: str
    num_prompt_tokens: int
    outputs: list[CompletionDelta]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: LaybyError | None = None
    time_s: float = 0.0

    def read(self) -> None:
        """Make the text of samples whose engine left that to the reader.

        To be called for all deltas of a request in order, by one thread at a time.
        """
        for piece in self.outputs:
            if piece.unread is not None:
                piece.text, piece.unread = piece.unread(), None


@dataclass(slots=True)
class CompletionOutput:
    """One whole sample.

    ``token_times_s`` holds, for every token, the second on the engine's clock at which it came.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_times_s: list[float] = field(default_factory=list)

    @property
    def itl_s(self) -> list[float]:
        """Seconds between each token and the one before it (inter-token latencies)."""
        times = self.token_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    def add(self, delta: CompletionDelta, time_s: float = 0.0) -> None:
        """Append what one step, ended at ``time_s``, added."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.token_times_s.extend([time_s] * len(delta.token_ids))
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A whole answer: the prompt and one output per sample, in sample order.

    ``arrival_s`` and ``finish_s`` are seconds on the engine's clock; ``error`` is that of the
    last :class:`RequestDelta`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    error: LaybyError | None = None
    arrival_s: float = 0.0
    finish_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token of any sample; None without a token."""
        firsts = [output.token_times_s[0] for output in self.outputs if output.token_times_s]
        return min(firsts) - self.arrival_s if firsts else None

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to the end; None before the end."""
        return None if self.finish_s is None else self.finish_s - self.arrival_s

    def add(self, delta: RequestDelta) -> None:
        """Append what one step added."""
        for piece in delta.outputs:
            self.outputs[piece.index].add(piece, delta.time_s)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finished:
            self.finished, self.error, self.finish_s = True, delta.error, delta.time_s
