"""How a request wants its tokens chosen: the parameters of a call, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layby.errors import InvalidRequestError, counted, shown

MAX_N = 128
"""Largest number of samples one request may ask for (the limit of OpenAI's API)."""

MAX_STOP_STRINGS = 16

MAX_STOP_CHARS = 1024
"""Longest stop string."""

MAX_STOP_TOKEN_IDS = 1024

MAX_LOGIT_BIASES = 1024
"""Most tokens whose logits one request may bias."""

MIN_REPETITION_PENALTY = 0.01
"""Much less and float32 has no finite logits left."""

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
            prompt or output. [0.01, 100]; 1 is off.
        presence_penalty: Subtracted once from the logits of tokens already generated. [-2, 2].
        frequency_penalty: Subtracted once per occurrence in the output. [-2, 2].
        logit_bias: Added to the logits of these token ids, at most 1,024. Values in [-100, 100].
        seed: Makes the randomness a pure function of (seed, sample index, token position).
            None: the engine picks one.
        stop: Strings that end the text; not part of it. At most 16, of at most 1,024 characters.
        stop_token_ids: Token ids that end the sequence, at most 1,024.
        ignore_eos: Go on past the model's end-of-sequence tokens.
        logprobs: Report the log-probability of each chosen token and of this many
            alternatives. None: none.
        prompt_logprobs: The same for the prompt's tokens.

    Raises:
        InvalidRequestError: A value is out of range or of a wrong type; ``param`` names it.
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
        stop: object = self.stop
        object.__setattr__(self, "stop", _tuple("stop", (stop,) if isinstance(stop, str) else stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        self._check_integers()
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError(
                f"ignore_eos must be True or False, got {shown(self.ignore_eos)}",
                param="ignore_eos",
            )

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
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)

    def _check_stops(self) -> None:
        check_count("stop", len(self.stop), MAX_STOP_STRINGS, "string")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(
                    f"stop must hold non-empty strings, got {shown(text)}", param="stop"
                )
            if len(text) > MAX_STOP_CHARS:
                raise InvalidRequestError(
                    f"stop holds a string of {len(text)} characters; "
                    f"at most {MAX_STOP_CHARS} are allowed",
                    param="stop",
                )
        check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "token id")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, got {shown(self.logit_bias)}",
                param="logit_bias",
            )
        check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "token id")
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
                        f"{param} names token id {shown(token)}, "
                        f"but the vocabulary has {counted(vocab_size, 'token')}",
                        param=param,
                    )


def check_count(param: str, count: int, limit: int, noun: str) -> None:
    """Raise InvalidRequestError if a list is too long; before its items are looked at."""
    if count > limit:
        raise InvalidRequestError(
            f"{param} holds {counted(count, noun)}; at most {limit} are allowed", param=param
        )


def _tuple(param: str, value: object) -> tuple[object, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequestError(f"{param} must be a list, got {shown(value)}", param=param)
    return tuple(value)


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidRequestError(f"{param} must be an integer, got {shown(value)}", param=param)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{param} must be {limit}, got {shown(value)}", param=param)


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    # Not a number is unequal to itself; math.isnan would fail on an integer of many digits.
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value:
        raise InvalidRequestError(f"{param} must be a number, got {shown(value)}", param=param)
    if value > high or value < low or (open_low and value == low):
        opening = "(" if open_low else "["
        raise InvalidRequestError(
            f"{param} must be in {opening}{low:g}, {high:g}], got {shown(value)}", param=param
        )
