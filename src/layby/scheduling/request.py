"""Requests and their sequences: what a call asked for, and how far it has come."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from enum import Enum
from typing import Protocol

from layby.errors import InvalidRequestError


class RequestStatus(Enum):
    """Where a request is. Every state lists the states that may follow it in ``_NEXT``."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


_NEXT = {
    RequestStatus.WAITING: {
        RequestStatus.RUNNING,
        RequestStatus.SWAPPED,  # only as it comes in, parked by an earlier process
        RequestStatus.FINISHED,
    },
    RequestStatus.RUNNING: {
        RequestStatus.SWAPPED,
        RequestStatus.WAITING,  # by recompute only
        RequestStatus.FINISHED,
    },
    RequestStatus.SWAPPED: {
        RequestStatus.RUNNING,
        RequestStatus.WAITING,  # only when its KV is lost
        RequestStatus.FINISHED,
    },
    RequestStatus.FINISHED: set(),
}


class FinishReason(Enum):
    """Why a sequence ended, in the words of OpenAI's API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class IllegalTransitionError(RuntimeError):
    """A request was moved between two states that do not follow each other: a bug in Layby."""


class BlockContent(Protocol):
    """Says which blocks of which requests hold the same, where token ids are not known."""

    def addresses(self, sample: int, first: int, last: int) -> Iterable[Hashable]:
        """Content addresses of a sample's full blocks ``first … last - 1``.

        Equal ones mean equal content, and equal content in all blocks before.
        """
        ...


class Sequence:
    """One sample of a request: its tokens and where their KV lies.

    Attributes:
        request: The request it belongs to.
        index: Its number among the request's samples, from 0.
        tokens: Prompt and output token ids.
        num_prompt_tokens: How many of them are prompt.
        num_computed: Positions whose KV is stored.
        is_decoding: All tokens but the last one sampled are stored.
        block_table: Device blocks that hold positions 0, 1, … ; empty off the device.
        swap_table: The same in the swap pool; empty unless the request is swapped.
        disk_table: The same on disk, below the swap pool. A swapped request may be in both.
        finish_reason: None while it is alive.
    """

    __slots__ = (
        "_num_computed",
        "block_hashes",
        "block_table",
        "disk_table",
        "finish_reason",
        "index",
        "is_decoding",
        "most_computed",
        "most_tokens",
        "num_prompt_tokens",
        "num_published",
        "request",
        "stop_token",
        "stop_token_ids",
        "swap_table",
        "tokens",
    )

    def __init__(self, request: Request, index: int, tokens: list[int]) -> None:
        self.request = request
        self.index = index
        self.tokens = tokens
        self.num_prompt_tokens = request.num_prompt_tokens
        self.most_tokens = request.num_prompt_tokens + request.max_tokens
        self.stop_token_ids = request.stop_token_ids
        self._num_computed = 0
        self.is_decoding = False
        self.most_computed = 0  # high-water mark of num_computed: below it, work is done again
        self.num_published = 0  # full blocks that others can find by their content
        self.block_table: list[int] = []
        self.swap_table: list[int] = []
        self.disk_table: list[int] = []
        self.block_hashes: list[Hashable] = []
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None

    @property
    def num_computed(self) -> int:
        # Derived while decoding, so that a step in which nothing is decided need not touch it.
        return len(self.tokens) - 1 if self.is_decoding else self._num_computed

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        self._num_computed = value
        self.is_decoding = False

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_tokens(self) -> list[int]:
        """Output token ids so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def hash_full_blocks(self, num_blocks: int, block_size: int) -> list[Hashable]:
        """Content addresses of the first ``num_blocks`` blocks, all of which must be full.

        Each address covers the block's tokens and, through the one before it, everything that
        precedes them; the first is seeded with the request's salt. Costs only what is new.
        """
        hashes = self.block_hashes
        known = len(hashes)
        if known >= num_blocks:
            return hashes
        if self.request.content is not None:
            hashes.extend(self.request.content.addresses(self.index, known, num_blocks))
            return hashes
        content = array("q", self.tokens[known * block_size : num_blocks * block_size]).tobytes()
        size = 8 * block_size
        address = hashes[-1] if hashes else self.request.salt
        assert isinstance(address, bytes)
        for start in range(0, len(content), size):
            block = content[start : start + size]
            address = hashlib.blake2b(address + block, digest_size=16).digest()
            hashes.append(address)
        return hashes

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}#{self.index}, "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, "
            f"{self.num_computed} computed)"
        )


def _check_integers(request_id: str, **counts: int) -> None:
    """``min_tokens`` may be 0, the others are at least 1."""
    for name, value in counts.items():
        low = 0 if name == "min_tokens" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InvalidRequestError(
                f"{name} of request {request_id} must be an integer of at least {low}, "
                f"got {value!r}",
                param=name,
            )


def check_priority(request_id: str, priority: object) -> None:
    """Raise InvalidRequestError unless it is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(
            f"priority of request {request_id} must be an integer, got {priority!r}",
            param="priority",
        )


class Request:
    """One call by a user; its sequences are scheduled and parked together.

    Args:
        request_id: Unique among live requests.
        prompt: Prompt token ids, at least one.
        max_tokens: Most tokens to generate per sequence, at least 1.
        n: Samples to draw.
        priority: Class; a smaller number is more urgent.
        arrival_time: Seconds on the scheduler's clock; the scheduler fills in its own time
            when None.
        waits_since: When its wait began, on the same clock, if not with its arrival: an earlier
            process had it, and it waited only part of the time since.
        min_tokens: Output tokens before a stop token counts.
        stop_token_ids: Tokens that end a sequence (end-of-sequence tokens among them, unless the
            caller ignores those).
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        use_prefix_cache: False computes the whole prompt even where its KV is cached (prompt
            log-probabilities need every row).
        content: Instead of token ids, says what the request's blocks have in common with others.
        payload: Anything the executor needs to know; never looked at here.

    Raises:
        InvalidRequestError: The prompt is empty or holds something else than token ids, or a
            number is out of range or no number at all.
    """

    __slots__ = (
        "arrival_time",
        "claim",
        "content",
        "demoted_at_tokens",
        "entered_step",
        "finish_time",
        "first_token_time",
        "max_tokens",
        "min_tokens",
        "n",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "payload",
        "prefix_owner",
        "priority",
        "rank",
        "request_id",
        "salt",
        "sequences",
        "status",
        "stop_token_ids",
        "swapped_since",
        "swapped_s",
        "use_prefix_cache",
        "waited_s",
        "waits_since",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        max_tokens: int,
        n: int = 1,
        priority: int = 0,
        arrival_time: float | None = None,
        waits_since: float | None = None,
        min_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        cache_salt: str = "",
        use_prefix_cache: bool = True,
        content: BlockContent | None = None,
        payload: object = None,
    ) -> None:
        tokens = list(prompt)
        if not tokens:
            raise InvalidRequestError(
                f"the prompt of request {request_id} is empty", param="prompt"
            )
        _check_integers(request_id, max_tokens=max_tokens, n=n, min_tokens=min_tokens)
        check_priority(request_id, priority)
        for name, time in (("arrival_time", arrival_time), ("waits_since", waits_since)):
            if time is not None and not math.isfinite(time):
                raise InvalidRequestError(f"{name} of request {request_id} is {time}", param=name)
        try:
            array("q", tokens)  # what prefixes are hashed as
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(
                f"the prompt of request {request_id} must hold 64-bit token ids: {error}",
                param="prompt",
            ) from None
        self.request_id = request_id
        self.num_prompt_tokens = len(tokens)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.n = n
        self.priority = priority
        self.claim = self.rank = priority  # how they change: scheduling/classes.py
        self.arrival_time = arrival_time
        self.stop_token_ids = frozenset(stop_token_ids)
        self.salt = hashlib.blake2b(cache_salt.encode(), digest_size=16).digest()
        self.use_prefix_cache = use_prefix_cache
        self.content = content
        self.payload = payload
        self.status = RequestStatus.WAITING
        self.order = 0  # tie-break among equal arrival times; the scheduler numbers requests
        self.sequences = [Sequence(self, 0, tokens)]
        # Set while diverged samples wait for one of them to compute their common prefix again.
        self.prefix_owner: Sequence | None = None
        self.num_preemptions = 0
        self.entered_step = 0  # in which it came to run last
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.swapped_since: float | None = None
        self.swapped_s = 0.0
        self.demoted_at_tokens = 0  # output tokens when its class was set or it last sank
        self.waited_s = 0.0  # before it came to the device last; kept where waiting counts
        # Off the device, where waiting counts: when it would have begun to wait, had it done so
        # in one go. Before it is added: as it was given.
        self.waits_since = waits_since

    @property
    def is_finished(self) -> bool:
        """Whether it has left the engine."""
        return self.status is RequestStatus.FINISHED

    @property
    def has_forked(self) -> bool:
        """Whether its samples have become sequences of their own (after the prompt)."""
        return len(self.sequences) == self.n

    @property
    def ready_sequences(self) -> list[Sequence]:
        """Sequences that can compute tokens in the next step."""
        if self.prefix_owner is not None:
            return [self.prefix_owner]
        return self.live_sequences

    @property
    def live_sequences(self) -> list[Sequence]:
        """Sequences that have not ended."""
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def num_live_seqs(self) -> int:
        """Places it takes under ``max_num_seqs``: samples not yet forked count already."""
        if self.n == 1:  # asked in every step
            return int(self.sequences[0].finish_reason is None)
        return self.n - sum(seq.finish_reason is not None for seq in self.sequences)

    def shorten(self, max_tokens: int) -> None:
        """Allow fewer output tokens per sequence than before; only before it is queued."""
        self.max_tokens = max_tokens
        self.sequences[0].most_tokens = self.num_prompt_tokens + max_tokens

    def fork(self) -> None:
        """Give every sample its own sequence, each with the tokens of the first."""
        tokens = self.sequences[0].tokens
        self.sequences += [Sequence(self, index, list(tokens)) for index in range(1, self.n)]

    def continue_from(self, outputs: SequenceOf[tuple[list[int], FinishReason | None]]) -> None:
        """Take up the samples where an earlier process left them; before the request is added.

        Their KV is computed again from their tokens, as after a preemption by recompute, unless
        it has been kept (``Scheduler.add_parked``).

        Args:
            outputs: For every sample its output tokens, at least one, and why it ended.

        Raises:
            ValueError: Not so many samples, none that is to go on, or one that has no room to.
        """
        if len(outputs) != self.n:
            raise ValueError(f"request {self.request_id} has {self.n} samples, not {len(outputs)}")
        if all(reason is not None for _, reason in outputs):
            raise ValueError(f"no sample of request {self.request_id} is to go on")
        for index, (tokens, reason) in enumerate(outputs):
            most = self.max_tokens if reason is not None else self.max_tokens - 1
            if not 1 <= len(tokens) <= most:
                raise ValueError(
                    f"sample {index} of request {self.request_id} cannot go on from "
                    f"{len(tokens)} of {self.max_tokens} tokens"
                )
        prompt = self.sequences[0].tokens
        self.sequences = [
            Sequence(self, index, prompt + tokens) for index, (tokens, _) in enumerate(outputs)
        ]
        for seq, (_, reason) in zip(self.sequences, outputs, strict=True):
            seq.finish_reason = reason
            seq.most_computed = seq.num_tokens - 1

    def unfork(self) -> None:
        """Undo a fork whose step was not taken."""
        del self.sequences[1:]

    def move_to(self, status: RequestStatus) -> None:
        """Change state; the only place where it changes.

        Raises:
            IllegalTransitionError: The new state may not follow the present one.
        """
        if status not in _NEXT[self.status]:
            raise IllegalTransitionError(
                f"request {self.request_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, class {self.rank})"
