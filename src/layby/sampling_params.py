"""How a request wants its tokens chosen: the parameters of a call, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layby.errors import InvalidRequestError

MAX_N = 128
"""Largest number of samples one request may ask for (the limit of OpenAI's API)."""

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
"""Largest number of alternatives per position (the limit of OpenAI's chat API)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one generation. Names and meanings are those of OpenAI's and vLLM's APIs.

    Attributes:
        n: Samples drawn for the prompt; they share its KV cache.
        max_tokens: Most tokens to generate per sample. None: as many as the context and the
            KV cache can hold.
        min_tokens: Tokens to generate before an end-of-sequence or stop token may be chosen.
        temperature: 0 is greedy; larger is more random. At most 100.
        top_p: Keep the smallest set of tokens whose probability reaches this. In (0, 1].
        top_k: Keep this many most likely tokens. 0 or -1: all.
        min_p: Drop tokens less likely than this share of the most likely one. In [0, 1].
        repetition_penalty: Divides (multiplies, where negative) the logits of tokens seen in
            prompt or output. Above 0; 1 is off.
        presence_penalty: Subtracted once from the logits of tokens already generated. [-2, 2].
        frequency_penalty: Subtracted once per occurrence in the output. [-2, 2].
        logit_bias: Added to the logits of these token ids. Values in [-100, 100].
        seed: Makes the randomness a pure function of (seed, sample index, token position).
            None: the engine picks one.
        stop: Strings that end the text; not part of it.
        stop_token_ids: Token ids that end the sequence.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        logprobs: Report the log-probability of each chosen token and of this many
            alternatives. None: none.
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        InvalidRequestError: A value is out of range; ``param`` names it.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        elif not isinstance(self.stop, tuple):
            object.__setattr__(self, "stop", tuple(self.stop or ()))
        if not isinstance(self.stop_token_ids, tuple):
            object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._check_integers()
        self._check_numbers()
        self._check_stops_and_bias()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    def _check_integers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        _integer("top_k", self.top_k, -1)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)

    def _check_numbers(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_stops_and_bias(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(
                    f"stop must hold non-empty strings, got {text!r}", param="stop"
                )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for key, bias in self.logit_bias.items():
            _integer("logit_bias", key, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError if a token id lies outside ``[0, vocab_size)``."""
        for param, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequestError(
                        f"{param} names token id {token}, "
                        f"but the vocabulary has {vocab_size} tokens",
                        param=param,
                    )


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{param} must be an integer, got {value!r}", param=param)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{param} must be {limit}, got {_short(value)}", param=param)


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    # Not a number is unequal to itself; math.isnan would fail on an integer of many digits.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        raise InvalidRequestError(f"{param} must be a number, got {value!r}", param=param)
    if value > high or value < low or (open_low and value == low):
        opening = "(" if open_low else "["
        raise InvalidRequestError(
            f"{param} must be in {opening}{low:g}, {high:g}], got {_short(value)}", param=param
        )


def _short(value: float) -> str:
    """The number, unless it would fill pages."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
