"""The wire format of the HTTP API: what a call may hold, and the shapes of the answers.

One rule per kind of field, so that no option is silently dropped:

* fields Layby honours are declared below, with OpenAI's and vLLM's names and meanings;
* fields that cannot change the answer (``user``, ``store`` …) are accepted without effect;
* fields that would change the answer in ways Layby cannot (``tools``, ``suffix`` …) are accepted
  only at the value that changes nothing, and are otherwise refused by name;
* anything else is refused by name.

``null`` means the same as leaving a field out. Types are strict: ``true`` is not 1, nor is 1.0.
Ranges are checked where the parameters live, in ``SamplingParams``.

The length of every list is checked before its items are, and the check of a list ends at its first
fault: a body costs what it could be good for, not what it weighs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NotRequired, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import TypedDict  # pydantic takes typing's own only from Python 3.12

from layby.errors import InvalidRequestError, QueueFullError, counted
from layby.sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    check_count,
)

if TYPE_CHECKING:
    from layby.engine import AsyncEngine

MAX_MESSAGES: Final = 4096
"""Most messages of a conversation, and most parts of a message."""

MAX_PROMPTS: Final = 4096
"""Most prompts of a call, whatever the queue could take."""

_MAX_PRIORITY: Final = 2**31 - 1
_MODEL: Final = "A name that `/v1/models` lists; may be left out."
_TOKEN_ID: Final = re.compile(r"-?[0-9]{1,10}", re.ASCII)

_WITHOUT_EFFECT: Final = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_NEUTRAL_VALUES: Final[Mapping[str, tuple[object, ...]]] = {
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields Layby cannot honour, and the values at which that makes no difference."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this server's engine could ever take, for the checks of a body.

    Attributes:
        context: Tokens of a sequence, of which the prompt must leave one for the answer.
        chars: Characters of one prompt.
    """

    context: int
    chars: int

    @classmethod
    def of(cls, engine: AsyncEngine) -> Limits:
        """The limits of an engine."""
        return cls(engine.max_model_len, engine.max_prompt_chars)

    def check_tokens(self, count: int, name: str) -> None:
        """Raise InvalidRequestError if a prompt has too many token ids."""
        if count >= self.context:
            raise InvalidRequestError(
                f"{name} has {counted(count, 'token')}; the context holds {self.context}, and at "
                "least one must be left for the answer",
                param="prompt",
            )


def _prompt(value: object, info: ValidationInfo) -> str | list[str] | list[int] | list[list[int]]:
    """Check the four forms of a prompt, naming the item at fault."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(
            "must be a string, a list of strings, a list of token ids or a list of such lists"
        )
    if not value:
        raise ValueError("is an empty list: give at least one prompt")
    kind = type(value[0])
    if kind not in (str, int, list):
        raise InvalidRequestError(
            "prompt[0] must be a string, a token id or a list of token ids", param="prompt"
        )
    limits = info.context
    if isinstance(limits, Limits) and kind is int:
        limits.check_tokens(len(value), "prompt")
    elif kind is not int:
        check_count("prompt", len(value), MAX_PROMPTS, "prompt")
    for index, item in enumerate(value):
        if type(item) is not kind:
            raise InvalidRequestError(
                f"prompt[{index}] is of another kind than prompt[0]: a list of prompts holds "
                "either strings, or token ids, or lists of token ids",
                param="prompt",
            )
        if isinstance(item, list):
            if isinstance(limits, Limits):
                limits.check_tokens(len(item), f"prompt[{index}]")
            _check_ids(item, f"prompt[{index}]", "prompt")
    return value


def _check_ids(ids: list[object], name: str, param: str) -> None:
    if not ids:
        raise InvalidRequestError(f"{name} is empty: give at least one token id", param=param)
    for position, token in enumerate(ids):
        if type(token) is not int:  # a bool is an int to isinstance
            raise InvalidRequestError(
                f"{name} must hold token ids, but its item {position} is not an integer",
                param=param,
            )


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise ValueError("must be a list of token ids")
    return value


def _stop_token_ids(value: object) -> list[int]:
    if isinstance(value, list):
        check_count("stop_token_ids", len(value), MAX_STOP_TOKEN_IDS, "token id")
    return _token_ids(value)


def _tokens(value: object, info: ValidationInfo) -> list[int]:
    if isinstance(value, list) and isinstance(info.context, Limits):
        check_count("tokens", len(value), info.context.chars, "token id")
    return _token_ids(value)


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        check_count("stop", len(value), MAX_STOP_STRINGS, "string")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("must be a string or a list of strings")
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float]:
    """JSON object keys are strings: turn them into token ids."""
    if not isinstance(value, dict):
        raise ValueError("must be an object that maps token ids to numbers")
    check_count("logit_bias", len(value), MAX_LOGIT_BIASES, "token id")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias must have token ids as keys, got {key[:40]!r}", param="logit_bias"
            )
        if type(bias) not in (int, float):
            raise InvalidRequestError(
                f"logit_bias must map token ids to numbers, but {key} maps to something else",
                param="logit_bias",
            )
    try:
        return {int(key): float(bias) for key, bias in value.items()}
    except OverflowError:
        raise ValueError("must hold numbers in [-100, 100]") from None


def _content(value: object) -> str:
    """A message's text: a string, or text parts, which are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    if len(value) > MAX_MESSAGES:
        raise ValueError(f"holds {len(value)} parts; at most {MAX_MESSAGES} are allowed")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or "type" not in part:
            raise ValueError(
                f'must hold parts like {{"type": "text", "text": …}}; see part {index}'
            )
        if part["type"] != "text":
            raise ValueError(
                f"may hold text only: Layby runs text models, and part {index} is of another type"
            )
        if not isinstance(part.get("text"), str) or part.keys() != {"type", "text"}:
            raise ValueError(f'part {index} must hold "type" and a string "text", nothing else')
        texts.append(part["text"])
    return "\n".join(texts)


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
StopTokenIds = Annotated[
    list[int],
    PlainValidator(_stop_token_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
TokenIds = Annotated[
    list[int],
    PlainValidator(_tokens),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Content = Annotated[
    str,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Body(BaseModel):
    """A JSON body: strict types, nulls dropped, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted without effect."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that are accepted at these values only, at which they have no effect."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_has_no_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept: dict[str, Any] = {}
        has_unknown = False
        for name, value in data.items():
            if value is None or name in cls.ignored:
                continue
            if name not in cls.model_fields and name not in cls.neutral:
                # One is enough for the refusal, which pydantic writes because it knows the place.
                if has_unknown:
                    continue
                has_unknown = True
            if name in cls.neutral and name not in cls.model_fields:
                # Compared by type as well: 1 equals True in Python, not in JSON.
                if not any(type(value) is type(ok) and value == ok for ok in cls.neutral[name]):
                    # Where every value but the empty one asks for something, the field itself
                    # is what Layby does not support.
                    which = " with this value" if any(cls.neutral[name]) else ""
                    raise InvalidRequestError(f"Layby does not support {name}{which}", param=name)
                continue
            kept[name] = value
        return kept


class StreamOptions(Body):
    """What a stream carries beside the text."""

    ignored = frozenset({"include_obfuscation"})

    include_usage: bool = Field(
        default=False, description="End with one more chunk that holds the token counts."
    )


class GenerationRequest(Body):
    """What both generating endpoints take."""

    ignored = _WITHOUT_EFFECT
    neutral = _NEUTRAL_VALUES

    model: str | None = Field(default=None, description=_MODEL)
    stream: bool = Field(
        default=False, description="Answer with server-sent events, a chunk per step."
    )
    stream_options: StreamOptions = Field(
        default_factory=StreamOptions, description="Used with `stream` only."
    )
    n: int = Field(default=1, description="Samples per prompt.")
    temperature: float = Field(
        default=1.0, description="0 takes the likeliest token; more is more random."
    )
    top_p: float = Field(
        default=1.0, description="Keep the likeliest tokens that reach this probability, in (0, 1]."
    )
    top_k: int = Field(default=0, description="Keep this many likeliest tokens; 0 keeps all.")
    min_p: float = Field(
        default=0.0, description="Drop tokens below this share of the likeliest one, in [0, 1]."
    )
    presence_penalty: float = Field(
        default=0.0, description="Lowers the logits of tokens already generated, in [-2, 2]."
    )
    frequency_penalty: float = Field(
        default=0.0, description="The same, once per occurrence, in [-2, 2]."
    )
    repetition_penalty: float = Field(
        default=1.0, description="Above 1, tokens of prompt and output become less likely."
    )
    logit_bias: LogitBias = Field(
        default_factory=dict, description="Token id → number in [-100, 100] added to its logit."
    )
    seed: int | None = Field(
        default=None, description="The same seed and prompt give the same answer."
    )
    stop: Stop = Field(
        default=(), description="Strings that end the answer and are not part of it."
    )
    stop_token_ids: StopTokenIds = Field(
        default_factory=list, description="Token ids that end the answer."
    )
    ignore_eos: bool = Field(
        default=False, description="Go on past the model's end-of-sequence tokens."
    )
    min_tokens: int = Field(default=0, description="Tokens to generate before the answer may end.")
    priority: int = Field(
        default=0,
        ge=-_MAX_PRIORITY,
        le=_MAX_PRIORITY,
        description="A smaller number is more urgent.",
    )
    cache_salt: str = Field(
        default="", description="Cached prefixes are shared only within the same salt."
    )

    def _params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        return SamplingParams(
            n=self.n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt = Field(
        description="Text, token ids, or a list of either: one answer (times `n`) for each."
    )
    max_tokens: int = Field(default=16, description="Most tokens to generate per sample.")
    logprobs: int | None = Field(
        default=None,
        description="Log-probabilities of the chosen tokens and of this many others, up to 20.",
    )
    echo: bool = Field(
        default=False, description="Put the prompt before the answer, in its log-probabilities too."
    )
    best_of: int | None = Field(default=None, description="Equal to `n`, if given.")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts of the call, one at least."""
        if self.is_list_of_prompts:
            return cast("list[str | list[int]]", self.prompt)
        return [cast("str | list[int]", self.prompt)]

    @property
    def is_list_of_prompts(self) -> bool:
        """Whether errors should say which of the prompts is at fault."""
        return isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)

    def check_queue(self, limit: int | None) -> None:
        """Refuse what would overflow even an empty queue, before anything is made of it.

        Args:
            limit: Most sequences that an idle engine accepts; None: no limit.

        Raises:
            QueueFullError: The prompts, each with ``n`` samples, are more than that.
        """
        asked = len(self.prompts) * self.n
        if limit is not None and len(self.prompts) > 1 and asked > limit:
            raise QueueFullError(
                f"prompt[{limit // self.n}]: the call's {counted(len(self.prompts), 'prompt')}, n "
                f"{self.n}, make {counted(asked, 'sequence')}; the empty queue takes {limit}"
            )

    def sampling_params(self) -> SamplingParams:
        """The call's parameters for the engine.

        Raises:
            InvalidRequestError: One is out of range.
        """
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequestError(
                f"best_of ({self.best_of}) must equal n ({self.n}): Layby returns every sample",
                param="best_of",
            )
        return self._params(
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ChatMessage(Body):
    """One message of a conversation."""

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "reasoning_content": ("",),
        "refusal": (),
        "tool_calls": ([],),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"] = Field(
        description="Who speaks; developer means the same as system."
    )
    content: Content = Field(description="Text, or a list of text parts.")
    name: str | None = Field(default=None, description="Handed to the chat template.")
    tool_call_id: str | None = Field(default=None, description="Likewise.")

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it; to them a developer is the system."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _few_enough(value: object) -> object:
    if isinstance(value, list):
        check_count("messages", len(value), MAX_MESSAGES, "message")
    return value


Messages = Annotated[list[ChatMessage], FailFast(), BeforeValidator(_few_enough)]


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1, description="The conversation so far.")
    max_tokens: int | None = Field(
        default=None,
        description="Most tokens to generate per sample; as many as fit when left out.",
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of `max_tokens`."
    )
    logprobs: bool = Field(default=False, description="Log-probabilities of the chosen tokens.")
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_LOGPROBS,
        description="With `logprobs`: this many alternatives at every position.",
    )
    add_generation_prompt: bool = Field(
        default=True, description="End the prompt where the assistant's turn begins."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More variables for the model's chat template."
    )

    def sampling_params(self) -> SamplingParams:
        """The call's parameters for the engine.

        Raises:
            InvalidRequestError: One is out of range, or two contradict each other.
        """
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise InvalidRequestError(
                f"max_tokens ({both[0]}) and max_completion_tokens ({both[1]}) are two names of "
                "one limit: give one, or the same value to both",
                param="max_completion_tokens",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true", param="top_logprobs"
            )
        return self._params(
            max_tokens=self.max_tokens if self.max_tokens is not None else both[1],
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt, or messages."""

    model: str | None = Field(default=None, description=_MODEL)
    prompt: str | None = Field(default=None, description="Text to turn into token ids.")
    messages: Messages = Field(
        default_factory=list,
        min_length=1,
        description="A conversation, put through the chat template.",
    )
    add_special_tokens: StrictBool = Field(
        default=True,
        description="With `prompt`: add the tokens that the model wants first.",
    )
    add_generation_prompt: StrictBool = Field(
        default=True, description="With `messages`: end where the assistant's turn begins."
    )


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = Field(default=None, description=_MODEL)
    tokens: TokenIds = Field(description="Token ids to turn into text.")


class PriorityRequest(Body):
    """The body of PATCH /v1/requests/{request_id}."""

    priority: int = Field(
        ge=-_MAX_PRIORITY, le=_MAX_PRIORITY, description="A smaller number is more urgent."
    )


# Answers. TypedDicts, because here a key that is absent and one that is null differ.


class Usage(TypedDict):
    """Token counts of a call: each prompt counts once, all samples count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """One entry per token in each list; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One sample, or what a step added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]


class Completion(TypedDict):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TokenLogprobs(TypedDict):
    """A token, its natural log-probability and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class PositionLogprobs(TokenLogprobs):
    """The token chosen at a position, and the best alternatives there."""

    top_logprobs: list[TokenLogprobs]


class ChatLogprobs(TypedDict):
    """One entry per generated token."""

    content: list[PositionLogprobs]
    refusal: None


class AnswerMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One sample."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class MessageDelta(TypedDict):
    """What a step added to a message; the first chunk of a choice names the role."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """What a step added to one sample."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]


class ChatCompletionChunk(TypedDict):
    """One chunk of a chat stream; the one that carries the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    """A model that can be called."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    """The answer of /detokenize."""

    prompt: str


class PriorityAnswer(TypedDict):
    """The answer of PATCH /v1/requests/{request_id}."""

    id: str
    priority: int


class Health(TypedDict):
    """The answer of /health."""

    status: Literal["ok", "draining", "dead"]
    pressure: Literal["ok", "rising", "saturated"]
    reason: NotRequired[str]


class ErrorDetails(TypedDict):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every answer that is not a 2xx."""

    error: ErrorDetails
