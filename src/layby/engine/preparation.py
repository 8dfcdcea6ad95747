"""From a call to a request: every check that needs no look at the queues."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layby.engine.detokenizer import StopStrings
from layby.engine.interfaces import ChatTemplate, Tokenizer
from layby.engine.kept_kv import key_of
from layby.errors import BeyondSettingsError, InvalidRequestError, counted, shown
from layby.execution.kv_file import KeptKV, KVFile
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler
from layby.scheduling.request import FinishReason


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check but the scheduler's.

    Attributes:
        request: For the scheduler; its payload is the SamplingParams with the seed resolved.
        prompt: The prompt's text, None if it came as token ids.
        params: As the caller gave them.
        stops: The stop strings of ``params``, ready to be searched for.
        was_accepted: An earlier process accepted it: it finds a place even in a full queue.
        kept: What that process kept of its KV.
        known_as: What its caller knows it by, for the log; empty if that is the request's id.
        begins_text: The answer is a text of its own, as in a chat, and does not go on with the
            prompt's.
    """

    request: Request
    prompt: str | None
    params: SamplingParams
    stops: StopStrings
    was_accepted: bool = False
    kept: KeptKV | None = None
    known_as: str = ""
    begins_text: bool = False

    @property
    def settled_params(self) -> SamplingParams:
        """The parameters with seed and ``max_tokens`` as they were settled: the same again give
        the same answer."""
        payload = self.request.payload
        assert isinstance(payload, SamplingParams)  # put there by Engine.prepare
        return replace(payload, max_tokens=self.request.max_tokens)


class RequestPreparer:
    """Makes requests of what callers ask. Safe in any thread.

    Args:
        scheduler: Says what fits into the KV cache.
        tokenizer: Text to tokens.
        chat_template: Messages to text; None if the model has none.
        model_name: For errors.
        vocab_size: Token ids the model knows, from 0.
        max_model_len: Most tokens, prompt and output, of one sequence.
        seed: Base of the seeds of requests that bring none; None takes them from the system.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        model_name: str,
        vocab_size: int,
        max_model_len: int,
        seed: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._clock = clock
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._id_prefix = os.urandom(4).hex()
        self._id_numbers = itertools.count()

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> PreparedRequest:
        """The checks of ``add_request`` that need no look at the queues; safe in any thread.

        Costs no more than a context's worth of prompt, however long the prompt is. A request
        arrives when it is prepared. ``max_tokens=None`` becomes what the context and
        the KV cache can hold; a ``max_tokens`` that is given must fit as it stands.

        Raises:
            InvalidRequestError: As ``add_request``.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"params must be SamplingParams, got {shown(params)}", param="params"
            )
        params.check_vocabulary(self.vocab_size)
        check_priority(priority)
        _check_text("cache_salt", cache_salt)
        if request_id is not None:
            _check_text("request_id", request_id)
            if not request_id:
                raise InvalidRequestError("request_id is empty", param="request_id")
        stop_token_ids = self._stop_token_ids(params)
        tokens = self._prompt_tokens_of(prompt)
        request = Request(
            self._new_id() if request_id is None else request_id,
            tokens,
            max_tokens=self._max_tokens(len(tokens), params),
            n=params.n,
            priority=priority,
            arrival_time=self._clock(),
            min_tokens=params.min_tokens,
            stop_token_ids=stop_token_ids,
            cache_salt=cache_salt,
            # Every prompt position must be computed to have its log-probabilities.
            use_prefix_cache=params.prompt_logprobs is None,
            payload=params if params.seed is not None else replace(params, seed=self._new_seed()),
        )
        return PreparedRequest(
            request,
            prompt if isinstance(prompt, str) else None,
            params,
            StopStrings(params.stop),
        )

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
        """``prepare`` what an earlier process accepted and did not finish; safe in any thread.

        Args:
            prompt, params, priority, cache_salt: As they were, ``params`` being the
                ``settled_params`` of then.
            age_s: Seconds since it arrived: its place among others of its class.
            waited_s: Seconds of these that it has waited: its claim to rise.
            outputs: The samples so far, if there is anything of them: for each its output tokens
                and its finish reason.
            kept: The KV that process kept, of which this request takes its own.

        Raises:
            BeyondSettingsError: It does not fit into this engine's context.
            InvalidRequestError: This engine cannot serve it, or it cannot go on from there.
        """
        prepared = self.prepare(prompt, params, priority=priority, cache_salt=cache_salt)
        assert prepared.request.arrival_time is not None  # set by prepare
        prepared.request.waits_since = prepared.request.arrival_time - waited_s
        prepared.request.arrival_time -= age_s
        if outputs:
            try:
                prepared.request.continue_from(
                    [
                        (tokens, None if reason is None else FinishReason(reason))
                        for tokens, reason in outputs
                    ]
                )
            except ValueError as error:
                raise InvalidRequestError(str(error)) from None
        own = None if kept is None else kept.take(key_of(prepared.request))
        return replace(prepared, was_accepted=True, kept=own)

    @property
    def max_prompt_chars(self) -> int:
        """Characters that no prompt can exceed: a context of the longest tokens."""
        return self.max_model_len * self.tokenizer.longest_token_bytes

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text; safe in any thread.

        Args:
            text: What to encode.
            add_special_tokens: Put the model's own BOS (EOS) around it.
            param: What the caller calls the text, for errors.

        Raises:
            InvalidRequestError: The text is not valid Unicode, or no context could hold it; the
                latter is found without encoding it.
        """
        self.check_chars(len(text), param)
        _check_text(param, text)
        return self.tokenizer.encode(text, add_special_tokens)

    def check_chars(self, num_chars: int, param: str) -> None:
        """Raise InvalidRequestError if no context could hold a text so long."""
        if num_chars > self.max_prompt_chars:
            raise InvalidRequestError(
                f"{param} has {counted(num_chars, 'character')}, more than the "
                f"{self.max_prompt_chars} that the context of {self.max_model_len} tokens could "
                f"hold even if each were the longest "
                f"({counted(self.tokenizer.longest_token_bytes, 'byte')})",
                param=param,
            )

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """A conversation in the model's chat format; safe in any thread.

        To be encoded without special tokens: the text has them already.

        Raises:
            InvalidRequestError: There are no messages, the model has no chat template, or the
                template does not take these messages.
        """
        _check_messages(messages)
        if self.chat_template is None:
            raise InvalidRequestError(
                f"model {self.model_name} has no chat template; use a plain prompt",
                param="messages",
            )
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt)

    # --- checking requests ---

    def _prompt_tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            tokens = self.encode(prompt)
        else:
            tokens = self._checked_token_ids(prompt)
        if not tokens:
            raise InvalidRequestError("prompt is empty: it has no tokens", param="prompt")
        return tokens

    def _checked_token_ids(self, prompt: Sequence[int]) -> list[int]:
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise InvalidRequestError(
                f"prompt must be a string or a list of token ids, got {type(prompt).__name__}",
                param="prompt",
            )
        self._room_after(len(prompt))
        for index, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool):
                raise InvalidRequestError(
                    f"prompt[{index}] must be a token id, got {shown(token)}", param="prompt"
                )
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt[{index}] is token id {shown(token)}, "
                    f"but the vocabulary has {counted(self.vocab_size, 'token')}",
                    param="prompt",
                )
        return list(prompt)

    def _room_after(self, num_prompt_tokens: int) -> int:
        """Tokens that the context has left for the answer, at least one."""
        room = self.max_model_len - num_prompt_tokens
        if room < 1:
            raise BeyondSettingsError(
                f"the prompt has {counted(num_prompt_tokens, 'token')}; the context holds "
                f"{self.max_model_len}, and at least one must be left for the answer",
                param="prompt",
            )
        return room

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Most tokens to generate, checked against the context and, if open, the pool."""
        room = self._room_after(num_prompt_tokens)
        prompt_has = f"the prompt has {counted(num_prompt_tokens, 'token')}"
        if params.max_tokens is not None:
            if params.max_tokens > room:
                together = shown(num_prompt_tokens + params.max_tokens)
                raise BeyondSettingsError(
                    f"{prompt_has} and max_tokens is {shown(params.max_tokens)}, together "
                    f"{together}; the context holds {self.max_model_len}",
                    param="max_tokens",
                )
            return params.max_tokens
        if params.min_tokens > room:
            raise BeyondSettingsError(
                f"{prompt_has} and min_tokens is "
                f"{shown(params.min_tokens)}; the context holds {self.max_model_len}",
                param="min_tokens",
            )
        # If not even one token fits in the pool, the scheduler refuses it with the numbers.
        return max(1, min(room, self.scheduler.max_output_tokens(num_prompt_tokens, params.n)))

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a sequence; before ``min_tokens`` something else must be possible."""
        asked = frozenset(params.stop_token_ids)
        ends = asked if params.ignore_eos else asked | self.tokenizer.eos_ids
        if params.min_tokens and sum(token < self.vocab_size for token in ends) >= self.vocab_size:
            raise InvalidRequestError(
                f"min_tokens is {params.min_tokens}, but every one of the vocabulary's "
                f"{counted(self.vocab_size, 'token')} ends the sequence",
                param="stop_token_ids",
            )
        return ends

    def _new_id(self) -> str:
        return f"{self._id_prefix}-{next(self._id_numbers)}"

    def _new_seed(self) -> int:
        return self._seeds.getrandbits(63)


def check_priority(priority: object) -> None:
    """Raise InvalidRequestError unless it is an integer."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequestError(
            f"priority must be an integer, got {shown(priority)}", param="priority"
        )


def _check_text(param: str, value: object) -> None:
    """Raise InvalidRequestError unless it is a string that has a UTF-8 form."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{param} must be a string, got {shown(value)}", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode: lone surrogate at character {error.start}",
            param=param,
        ) from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise InvalidRequestError(
            f"messages must be a list of messages, got {shown(messages)}", param="messages"
        )
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise InvalidRequestError(
                f"messages[{index}] must have role and content, got {shown(message)}",
                param="messages",
            )
