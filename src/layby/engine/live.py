"""A request in the engine: its text so far, and what every step adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from layby.engine.detokenizer import Detokenizer
from layby.engine.interfaces import Tokenizer
from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.engine.preparation import PreparedRequest
from layby.errors import LaybyError
from layby.execution.executor import PositionLogprobs
from layby.sampling_params import SamplingParams
from layby.scheduling import Request
from layby.scheduling.request import FinishReason
from layby.scheduling.request import Sequence as Sample


@dataclass(slots=True)
class SampleState:
    """One sample's text so far, and when its last token came (seconds on the engine's clock)."""

    text: Detokenizer
    last_token_s: float | None = None
    ended: bool = False


@dataclass(slots=True)
class LiveRequest:
    """A request in the engine.

    Attributes:
        request: The scheduler's.
        params: As the caller gave them.
        arrival_s: When it was accepted, in seconds on the engine's clock.
        defers_text: Leave tokens to be made text by whoever reads the deltas.
        samples: One for each that was asked for.
        prompt_logprobs: One entry per prompt token, as they become known; None if nobody asked.
        has_answered: The first delta has gone out.
    """

    request: Request
    params: SamplingParams
    arrival_s: float
    defers_text: bool
    samples: list[SampleState] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    has_answered: bool = False

    @classmethod
    def of(
        cls, prepared: PreparedRequest, tokenizer: Tokenizer, *, defers_text: bool
    ) -> LiveRequest:
        """What begins with a request that has been queued, or goes on with it."""
        request, params = prepared.request, prepared.params
        assert request.arrival_time is not None  # set by prepare
        live = cls(request, params, request.arrival_time, defers_text and not params.stop)
        live.samples = [
            SampleState(
                Detokenizer(
                    tokenizer,
                    prepared.stops,
                    params.min_tokens,
                    begins_text=prepared.begins_text,
                )
            )
            for _ in range(params.n)
        ]
        if params.prompt_logprobs is not None:
            live.prompt_logprobs = [None] * request.num_prompt_tokens
        if request.sequences[0].num_output_tokens:
            live._catch_up()
        return live

    def _catch_up(self) -> None:
        """Bring the texts to where the samples of a request that continues are."""
        self.has_answered = True
        for state, sample in zip(self.samples, self.request.sequences, strict=True):
            state.ended = sample.is_finished
            if not state.ended:
                state.text.push(sample.output_tokens)

    def piece(
        self, sample: Sample, token: int, logprob: PositionLogprobs | None
    ) -> CompletionDelta:
        """What one token adds to its sample. It may end with it although the sample has not: a
        stop string was found."""
        state = self.samples[sample.index]
        reason = sample.finish_reason
        # A token that stops is not part of the text, as a stop string is not.
        shown = [] if reason is FinishReason.STOP else [token]
        piece = self._read(sample.index, shown, ends=reason is not None)
        piece.token_ids = [token]
        if self.params.logprobs is not None and logprob is not None:
            piece.logprobs = [logprob]
        if reason is not None:
            piece.finish_reason = reason.value
            if sample.stop_token in self.params.stop_token_ids:
                piece.stop_reason = sample.stop_token
        if state.text.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", state.text.stopped_by
        state.ended = piece.finish_reason is not None
        return piece

    def last_pieces(self, reason: FinishReason) -> list[CompletionDelta]:
        """The rest of the samples that do not end by themselves."""
        pieces = []
        for index, state in enumerate(self.samples):
            if not state.ended:
                state.ended = True
                pieces.append(self._read(index, [], ends=True))
                pieces[-1].finish_reason = reason.value
        return pieces

    def delta(
        self,
        outputs: list[CompletionDelta],
        *,
        finished: bool,
        now: float,
        error: LaybyError | None = None,
    ) -> RequestDelta:
        """The pieces of a step, for the reader."""
        first = not self.has_answered
        self.has_answered = True
        return RequestDelta(
            self.request.request_id,
            self.request.num_prompt_tokens,
            outputs,
            finished,
            prompt_logprobs=self.prompt_logprobs if first else None,
            error=error,
            time_s=now,
        )

    def _read(self, index: int, tokens: list[int], *, ends: bool) -> CompletionDelta:
        """What these tokens show of a sample, now or when the reader asks for it."""
        text = self.samples[index].text
        piece = CompletionDelta(index, "", [])
        if self.defers_text:
            piece.unread = partial(text.read, tokens, ends=ends)
        else:
            piece.text = text.read(tokens, ends=ends)
        return piece
