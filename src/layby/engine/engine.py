"""The engine: requests in, pieces of answers out, one loop over schedule → execute → update."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prometheus_client import Gauge

from layby.engine.costs import CostMeter
from layby.engine.detokenizer import Detokenizer, StopStrings
from layby.engine.elastic import ElasticPool
from layby.engine.interfaces import ChatTemplate, Tokenizer
from layby.engine.kv_pool import KVPoolSize, check_pool_size
from layby.engine.metrics import BusyLog, EngineMetrics, EngineStats
from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.engine.pressure import Load, LoadShedding, PressureGauge
from layby.engine.recorder import Recorder
from layby.errors import (
    EngineDeadError,
    EngineUnavailableError,
    InvalidRequestError,
    LaybyError,
    QueueFullError,
    RequestFailedError,
    counted,
    shown,
)
from layby.execution.executor import Executor, PositionLogprobs, StepResult
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler
from layby.scheduling.plan import StepPlan, TransferEnd
from layby.scheduling.request import FinishReason
from layby.scheduling.request import Sequence as Sample

logger = logging.getLogger("layby.engine")

STALL_STEPS = 100
"""So many steps on end that plan nothing while work is there are a fault, not patience."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check but the scheduler's.

    Attributes:
        request: For the scheduler; its payload is the SamplingParams with the seed resolved.
        prompt: The prompt's text, None if it came as token ids.
        params: As the caller gave them.
        stops: The stop strings of ``params``, ready to be searched for.
        was_accepted: An earlier process accepted it: it finds a place even in a full queue.
    """

    request: Request
    prompt: str | None
    params: SamplingParams
    stops: StopStrings
    was_accepted: bool = False

    @property
    def settled_params(self) -> SamplingParams:
        """The parameters with seed and ``max_tokens`` as they were settled: the same again give
        the same answer."""
        payload = self.request.payload
        assert isinstance(payload, SamplingParams)  # put there by Engine.prepare
        return replace(payload, max_tokens=self.request.max_tokens)


@dataclass(slots=True)
class _SampleState:
    """One sample's text so far, and when its last token came (seconds on the engine's clock)."""

    text: Detokenizer
    last_token_s: float | None = None
    ended: bool = False


@dataclass(slots=True)
class _Live:
    """A request in the engine."""

    request: Request
    params: SamplingParams
    arrival_s: float
    samples: list[_SampleState]
    prompt_logprobs: list[PositionLogprobs | None] | None
    has_answered: bool = False


class Engine:
    """Runs requests to their ends. Not thread-safe, except for ``prepare``, ``stats`` and
    ``metrics_text``; :class:`~layby.engine.async_engine.AsyncEngine` gives it a thread of its own.

    Args:
        scheduler: Decides; must use the same clock.
        executor: Computes.
        tokenizer: Text to tokens and back.
        chat_template: Messages to text; None if the model has none.
        model_name: Label of the metrics.
        vocab_size: Token ids the model knows, from 0; the tokenizer's if None.
        max_model_len: Most tokens, prompt and output, of one sequence.
        seed: Base of the seeds of requests that bring none; None takes them from the system.
        device, dtype: What the executor computes on and in, for reports; None: not known.
        identity: Everything that the tokens of a request depend on beside the request, by name.
        shed_load: Refuse new work of the lowest class while memory is saturated.
        pressure: Says when that is; one with the usual marks if None.
        most_blocks: Gives the largest size that the device pool can have at present; None: any.
        elastic: Gives it the size that memory allows; None: it keeps its size.
        clock: Seconds, monotonic.
        recorder: What the scheduler is recorded by, to be closed with the engine; None: it is not.

    Attributes:
        defers_text: Leave tokens to be made text by whoever reads the deltas (in a thread of his
            own, see ``RequestDelta.read``), unless the request has stop strings: those decide
            about the next step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        model_name: str = "layby",
        vocab_size: int | None = None,
        max_model_len: int,
        seed: int | None = None,
        device: str | None = None,
        dtype: str | None = None,
        identity: Mapping[str, str] | None = None,
        shed_load: bool = False,
        pressure: PressureGauge | None = None,
        most_blocks: Callable[[], int] | None = None,
        elastic: ElasticPool | None = None,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.max_model_len = max_model_len
        self.device = device
        self.dtype = dtype
        self.identity = dict(identity or {"model": model_name})
        self.recorder = recorder
        self.error: EngineDeadError | None = None
        self.defers_text = False
        self.pressure = pressure or PressureGauge()
        self._shedding = LoadShedding(self.pressure) if shed_load else None
        self._most_blocks = most_blocks
        self._elastic = elastic
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._id_prefix = os.urandom(4).hex()
        self._id_numbers = itertools.count()
        self._gaps: Counter[float] = Counter()  # token to token, of the step being committed
        self._empty_steps = 0
        self._closed = False
        self._prompt_tokens = self._generation_tokens = self._requests_failed = 0
        self._stats = EngineStats()
        self._metrics = EngineMetrics(model_name, self.stats, scheduler.metrics.swap_faults)
        self._busy_log = BusyLog(clock())
        self._cost_meter = CostMeter()
        scheduler.metrics.on_swapped = self._metrics.observe_swapped
        if recorder is not None:
            Gauge(
                "layby_recording",
                "1 while a recording is written, 0 once an error has ended it.",
                registry=self._metrics.registry,
            ).set_function(lambda: recorder.error is None)
        self._publish()

    # --- work in ---

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> str:
        """Check a request and queue it; return its id.

        Args:
            prompt: Text, or token ids.
            params: How to choose tokens; the defaults if None.
            request_id: Unique among live requests; made up if None.
            priority: Class; a smaller number is more urgent.
            cache_salt: Cached prefixes are shared only between requests of the same salt.

        Raises:
            InvalidRequestError: The request can never be served; names the parameter.
            RequestTooLargeError: …because it could not fit in the KV cache even alone.
            QueueFullError: Too many requests wait, or the engine is saturated.
            EngineUnavailableError: The engine is closed, or (EngineDeadError) a step failed.
        """
        return self.submit(
            self.prepare(
                prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt
            )
        )

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
        outputs: Sequence[tuple[list[int], str | None]] = (),
    ) -> PreparedRequest:
        """``prepare`` what an earlier process accepted and did not finish; safe in any thread.

        Args:
            prompt, params, priority, cache_salt: As they were, ``params`` being the
                ``settled_params`` of then.
            age_s: Seconds since it arrived.
            outputs: The samples so far, if there is anything of them: for each its output tokens
                and its finish reason.

        Raises:
            InvalidRequestError: This engine cannot serve it, or it cannot go on from there.
        """
        prepared = self.prepare(prompt, params, priority=priority, cache_salt=cache_salt)
        assert prepared.request.arrival_time is not None  # set by prepare
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
        return replace(prepared, was_accepted=True)

    def submit(self, prepared: PreparedRequest) -> str:
        """Queue a prepared request; return its id. Raises as ``add_request``."""
        self._check_alive()
        request, params = prepared.request, prepared.params
        if request.request_id in self._live:
            raise InvalidRequestError(
                f"a request with id {request.request_id!r} is in progress", param="request_id"
            )
        if params.max_tokens is None:  # the pool may have shrunk since it was prepared
            most = self.scheduler.max_output_tokens(request.num_prompt_tokens, request.n)
            if 0 < most < request.max_tokens:
                request.shorten(most)
        was_idle = not self._live
        if self._shedding is not None and not prepared.was_accepted:
            self._shed(request, self._shedding)
        self.scheduler.add_request(request, was_accepted=prepared.was_accepted)
        assert request.arrival_time is not None  # set by prepare
        live = self._live[request.request_id] = _Live(
            request,
            params,
            request.arrival_time,
            [
                _SampleState(Detokenizer(self.tokenizer, prepared.stops, params.min_tokens))
                for _ in range(params.n)
            ],
            None if params.prompt_logprobs is None else [None] * request.num_prompt_tokens,
        )
        if request.sequences[0].num_output_tokens:
            _catch_up(live)
        self._publish()
        if was_idle:
            self._busy_log.restart(self._clock(), self._stats)
        return request.request_id

    def _shed(self, request: Request, shedding: LoadShedding) -> None:
        """Refuse a newcomer of the lowest class while memory is saturated."""
        self.scheduler.check_size(request)  # who can never run is not to come again
        live = [one.request.priority for one in self._live.values()]
        backlog = len(self.scheduler.waiting) + len(self.scheduler.swapped)
        try:
            shedding.check(self._clock(), request.priority, live, backlog)
        except QueueFullError:
            self._publish()
            raise

    @property
    def max_prompt_chars(self) -> int:
        """Characters that no prompt can exceed: a context of the longest tokens."""
        return self.max_model_len * self.tokenizer.longest_token_bytes

    @property
    def max_queued_seqs(self) -> int | None:
        """Most sequences that an idle engine accepts at a time; None: no limit."""
        config = self.scheduler.config
        return None if config.max_queue is None else config.max_queue + config.max_num_seqs

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

    # --- the loop ---

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to do: requests, a pool that is to change its size, or a
        transfer of parked work to see the end of."""
        if self.error is not None:
            return bool(self._live)
        scheduler = self.scheduler
        return bool(self._live or scheduler.is_resizing or scheduler.tiers.num_transfers)

    def step(self) -> list[RequestDelta]:
        """Decide, compute, commit; return what was added to each request.

        A request that fails alone ends with ``error`` in the returned deltas. If the step as a
        whole fails, every live request does, and the engine is dead: ``error`` says why. So it is
        if a step is broken off (Ctrl-C): scheduler and executor may disagree from then on.

        Raises:
            EngineUnavailableError: As ``add_request``.
            BaseException: What broke the step off, if that was no Exception.
        """
        self._check_alive()
        self.follow_memory()
        try:
            plan = self.scheduler.schedule()
            in_transfer = self.scheduler.tiers.num_transfers
            idle = plan.is_empty and not in_transfer
            result = StepResult([]) if idle else self._execute(plan)
            # Failures go first: what they computed must not reach the prefix cache.
            deltas = [self._fail(name, why) for name, why in result.failures.items()]
            self.scheduler.update(plan, result.tokens)
            self._log_classes(plan)
            deltas += self._collect(plan, result)
            self._end_transfers(result.transfer_ends)
            self._check_progress(plan)
            self._publish()
            self._busy_log.step(self._clock(), self._stats)
        except Exception as fault:
            logger.exception("a step failed; the engine is dead")
            return self.fail_all(f"{type(fault).__name__}: {fault}")
        except BaseException as fault:
            self.fail_all(f"a step was broken off by {type(fault).__name__}")
            raise
        return [delta for delta in deltas if delta is not None]

    def _execute(self, plan: StepPlan) -> StepResult:
        """Run the plan, and let the scheduler know what moving and computing cost."""
        started = time.perf_counter()
        result = self.executor.execute(plan)
        costs = self._cost_meter.observe(plan, result, time.perf_counter() - started)
        if costs is not None:
            self.scheduler.set_costs(costs if self._elastic is None else self._elastic.price(costs))
        return result

    def follow_memory(self) -> None:
        """With ``elastic_memory``, look at the memory if it is time, and begin to resize the pool.

        Every step does so; whoever keeps an idle engine calls it every ``memory_wait_s`` seconds.
        """
        if self._elastic is not None:
            try:
                self._elastic.follow(self.scheduler)
            except Exception:
                logger.exception("could not follow the memory; trying again")

    @property
    def memory_wait_s(self) -> float | None:
        """Seconds until ``follow_memory`` has something to do; None: it never has."""
        return None if self._elastic is None else self._elastic.wait_s(self._clock())

    def abort(self, request_id: str, error: LaybyError | None = None) -> RequestDelta | None:
        """End a request now; its blocks are free at the next step.

        Args:
            request_id: Whose. One that is unknown or has ended is ignored.
            error: Why, if the caller did not ask for it.

        Returns:
            The last delta, with the text that was held back; None if there was no such request.
        """
        live = self._live.get(request_id)
        if live is None:
            return None
        self.scheduler.abort(request_id, FinishReason.ABORT)
        delta = self._end(live, FinishReason.ABORT, error)
        self._publish()
        return delta

    def resize_kv_pool(self, num_blocks: int) -> KVPoolSize:
        """Give the device pool another size, while requests run; see ``Scheduler.resize``.

        An idle engine does it at once, a busy one in its next step. What is given up goes back to
        the system. With ``elastic_memory`` it is the largest size from then on.

        Returns:
            The size it has now, and the target.

        Raises:
            InvalidRequestError: There can be no pool of this size.
            EngineUnavailableError: As ``add_request``.
        """
        self._check_alive()
        device = self.scheduler.device_pool
        grows = not isinstance(num_blocks, int) or num_blocks > device.num_blocks
        most = self._most_blocks() if self._most_blocks is not None and grows else None
        self.scheduler.resize(check_pool_size(num_blocks, most))
        if self._elastic is not None:
            self._elastic.set_most(num_blocks)
        if not self._live and self.has_unfinished:
            self.step()
            self._check_alive()
        self._publish()
        logger.info(
            "the KV pool is to have %s; it has %d",
            counted(num_blocks, "block"),
            device.num_blocks,
        )
        return self.kv_pool_size()

    def kv_pool_size(self) -> KVPoolSize:
        """Size of the device pool, as of ``stats``; safe in any thread."""
        stats = self._stats
        return KVPoolSize(stats.num_target_blocks, stats.num_blocks, stats.num_free_blocks)

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Put a live request into another class, from the next step on.

        Args:
            request_id: Whose.
            priority: Its class; a smaller number is more urgent.

        Returns:
            Whether there is such a request (it may just have ended).

        Raises:
            InvalidRequestError: ``priority`` is no integer.
        """
        check_priority(priority)
        return self.scheduler.set_priority(request_id, priority)

    def fail_all(self, why: str) -> list[RequestDelta]:
        """Declare the engine dead; return the last delta of every live request."""
        in_flight = counted(len(self._live), "request")
        self.error = EngineDeadError(f"the engine failed ({why}) with {in_flight} in flight")
        deltas = []
        for live in list(self._live.values()):
            try:
                self.scheduler.abort(live.request.request_id, FinishReason.ERROR)
            except Exception:
                # The scheduler may be what broke; every request gets its answer all the same.
                logger.exception("could not take %s out of the scheduler", live.request)
            deltas.append(self._end(live, FinishReason.ERROR, self.error))
        self._publish()
        return deltas

    def close(self) -> None:
        """Free the executor's pools. The engine cannot be used afterwards."""
        if not self._closed:
            self._closed = True
            if self.recorder is not None:
                self.recorder.close()
            self.executor.close()

    # --- reports ---

    def stats(self) -> EngineStats:
        """Counts as of the end of the last step, admission or abort; safe in any thread."""
        return self._stats

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format; safe in any thread."""
        return self._metrics.text()

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
            raise InvalidRequestError(
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
                raise InvalidRequestError(
                    f"{prompt_has} and max_tokens is {shown(params.max_tokens)}, together "
                    f"{together}; the context holds {self.max_model_len}",
                    param="max_tokens",
                )
            return params.max_tokens
        if params.min_tokens > room:
            raise InvalidRequestError(
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

    def _check_alive(self) -> None:
        if self.error is not None:
            # A fresh one: an exception gathers traceback every time it is raised.
            raise EngineDeadError(str(self.error))
        if self._closed:
            raise EngineUnavailableError("the engine is closed")

    def _check_progress(self, plan: StepPlan) -> None:
        """A scheduler that plans nothing for ever would leave its requests without an answer."""
        stalls = plan.is_empty and self._live and not self.scheduler.tiers.num_transfers
        self._empty_steps = self._empty_steps + 1 if stalls else 0
        if self._empty_steps >= STALL_STEPS:
            raise RuntimeError(f"nothing was scheduled in {STALL_STEPS} steps")

    # --- committing a step ---

    def _log_classes(self, plan: StepPlan) -> None:
        for request, before, after, cause in plan.class_changes:
            logger.debug(
                "request %s (%s): class %d → %d, %s",
                request.request_id,
                request.status.value,
                before,
                after,
                cause.value,
            )

    def _end_transfers(self, ends: Sequence[TransferEnd]) -> None:
        """Parked work has been moved between RAM and disk, or could not be."""
        for end in ends:
            lost = self.scheduler.transfers_ended([end])
            if end.fault:
                what = f"parked work could not be moved to or from disk ({end.fault})"
                name = ", ".join(request.request_id for request in lost)
                then = f"request {name} will be recomputed" if lost else "it stays in RAM"
                logger.warning("%s: %s", what, then)

    def _collect(self, plan: StepPlan, result: StepResult) -> list[RequestDelta | None]:
        """Deltas of the requests that the plan sampled, in plan order."""
        for request_id, positions in result.prompt_logprobs.items():
            live = self._live.get(request_id)
            if live is not None and live.prompt_logprobs is not None:
                for position, logprobs in positions:
                    live.prompt_logprobs[position] = logprobs
        logprobs_of = result.logprobs or [None] * len(result.tokens)
        samplers = (sample for item in plan.scheduled for sample in item.samplers)
        sampled: dict[str, list[tuple[Sample, int, PositionLogprobs | None]]] = {}
        for sample, token, logprob in zip(samplers, result.tokens, logprobs_of, strict=True):
            sampled.setdefault(sample.request.request_id, []).append((sample, token, logprob))
        now = self._clock()
        deltas: list[RequestDelta | None] = []
        for request_id, pieces in sampled.items():
            live = self._live.get(request_id)
            if live is None:
                continue  # it failed in this step
            try:
                deltas.append(self._delta(live, pieces, now))
            except Exception as fault:
                logger.exception("request %s failed", request_id)
                deltas.append(self._fail(request_id, f"{type(fault).__name__}: {fault}"))
        for gap_s, count in self._gaps.items():
            self._metrics.observe_inter_token(gap_s, count)
        self._gaps.clear()
        return deltas

    def _delta(
        self,
        live: _Live,
        pieces: list[tuple[Sample, int, PositionLogprobs | None]],
        now: float,
    ) -> RequestDelta:
        outputs = [self._piece(live, *piece) for piece in pieces]
        self._observe_tokens(live, [sample.index for sample, _, _ in pieces], now)
        finished = live.request.is_finished
        delta = self._new_delta(live, outputs, finished=finished, now=now)
        if finished:
            self._forget(live, outputs[-1].finish_reason or "stop", now)
        return delta

    def _piece(
        self, live: _Live, sample: Sample, token: int, logprob: PositionLogprobs | None
    ) -> CompletionDelta:
        """What one token adds to its sample, whose end (if it is one) is settled here."""
        state = live.samples[sample.index]
        reason = sample.finish_reason
        # A token that stops is not part of the text, as a stop string is not.
        shown = [] if reason is FinishReason.STOP else [token]
        piece = self._read(live, sample.index, shown, ends=reason is not None)
        piece.token_ids = [token]
        if live.params.logprobs is not None and logprob is not None:
            piece.logprobs = [logprob]
        if reason is not None:
            piece.finish_reason = reason.value
            if sample.stop_token in live.params.stop_token_ids:
                piece.stop_reason = sample.stop_token
        if state.text.stopped_by is not None:
            piece.finish_reason, piece.stop_reason = "stop", state.text.stopped_by
            if reason is None:
                self.scheduler.finish_sequence(sample, FinishReason.STOP)
        state.ended = piece.finish_reason is not None
        return piece

    def _read(self, live: _Live, index: int, tokens: list[int], *, ends: bool) -> CompletionDelta:
        """What these tokens show of a sample, now or when the reader asks for it."""
        text = live.samples[index].text
        piece = CompletionDelta(index, "", [])
        if self.defers_text and not live.params.stop:
            piece.unread = partial(text.read, tokens, ends=ends)
        else:
            piece.text = text.read(tokens, ends=ends)
        return piece

    def _observe_tokens(self, live: _Live, indexes: list[int], now: float) -> None:
        self._generation_tokens += len(indexes)
        if not live.has_answered:
            self._prompt_tokens += live.request.num_prompt_tokens
            self._metrics.observe_first_token(now - live.arrival_s)
        for index in indexes:
            state = live.samples[index]
            if state.last_token_s is not None:
                self._gaps[now - state.last_token_s] += 1
            state.last_token_s = now

    def _new_delta(
        self,
        live: _Live,
        outputs: list[CompletionDelta],
        *,
        finished: bool,
        now: float,
        error: LaybyError | None = None,
    ) -> RequestDelta:
        first = not live.has_answered
        live.has_answered = True
        return RequestDelta(
            live.request.request_id,
            live.request.num_prompt_tokens,
            outputs,
            finished,
            prompt_logprobs=live.prompt_logprobs if first else None,
            error=error,
            time_s=now,
        )

    # --- ends ---

    def _fail(self, request_id: str, why: str) -> RequestDelta | None:
        """End one request because of a fault of its own."""
        live = self._live.get(request_id)
        if live is None:
            return None
        self.scheduler.abort(request_id, FinishReason.ERROR)
        error = RequestFailedError(f"request {request_id} failed: {why}")
        return self._end(live, FinishReason.ERROR, error)

    def _end(self, live: _Live, reason: FinishReason, error: LaybyError | None) -> RequestDelta:
        """The last delta of a request that does not end by itself."""
        now = self._clock()
        outputs = []
        for index, state in enumerate(live.samples):
            if not state.ended:
                state.ended = True
                outputs.append(self._read(live, index, [], ends=True))
                outputs[-1].finish_reason = reason.value
        delta = self._new_delta(live, outputs, finished=True, now=now, error=error)
        self._requests_failed += reason is FinishReason.ERROR
        self._forget(live, reason.value, now)
        return delta

    def _forget(self, live: _Live, reason: str, now: float) -> None:
        del self._live[live.request.request_id]
        self._metrics.observe_end(reason, now - live.arrival_s)
        try:
            self.executor.release(live.request.request_id)
        except Exception:
            # The request has its answer; what is not released costs memory, not correctness.
            logger.exception("the executor could not release %s", live.request)

    @property
    def _target_blocks(self) -> int:
        """Size that the device pool is to have in the end."""
        goal = None if self._elastic is None else self._elastic.goal
        return self.scheduler.target_blocks if goal is None else goal

    def _publish(self) -> None:
        """Make the snapshot that other threads read."""
        scheduler, metrics = self.scheduler, self.scheduler.metrics
        device, swap, disk = scheduler.device_pool, scheduler.swap_pool, scheduler.disk_pool
        load = Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            swapped=len(scheduler.swapped),
            finished=metrics.requests_finished,
            kv_usage=device.usage,
            swap_usage=swap.usage,
        )
        self.pressure.observe(self._clock(), load)
        if self.pressure.state != self._stats.pressure:
            logger.info("pressure: %s, was %s", self.pressure.state, self._stats.pressure)
        self._stats = EngineStats(
            running=load.running,
            waiting=load.waiting,
            swapped=load.swapped,
            num_blocks=device.num_blocks,
            num_target_blocks=self._target_blocks,
            num_free_blocks=device.num_free,
            num_swap_blocks=swap.num_blocks,
            num_free_swap_blocks=swap.num_free,
            kv_usage=load.kv_usage,
            swap_usage=load.swap_usage,
            num_disk_blocks=disk.num_blocks,
            num_free_disk_blocks=disk.num_free,
            disk_usage=disk.usage,
            swapped_out_blocks=metrics.swapped_out_blocks,
            swapped_in_blocks=metrics.swapped_in_blocks,
            demoted_blocks=metrics.demoted_blocks,
            promoted_blocks=metrics.promoted_blocks,
            swap_faults=sum(metrics.swap_faults.values()),
            kv_losses=metrics.kv_losses,
            kv_usage_max=metrics.kv_usage_max,
            pool_shrinks=0 if self._elastic is None else self._elastic.shrinks,
            pool_growths=0 if self._elastic is None else self._elastic.growths,
            requests_accepted=metrics.requests_accepted,
            requests_finished=metrics.requests_finished,
            requests_aborted=metrics.requests_aborted,
            requests_failed=self._requests_failed,
            requests_shed=0 if self._shedding is None else self._shedding.num_refused,
            pressure=self.pressure.state,
            swapped_queue_growth=self.pressure.swapped_queue_growth,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions_swap=metrics.preemptions_swap,
            preemptions_recompute=metrics.preemptions_recompute,
            preemption_rate=metrics.preemption_rate,
            decisions_swap=metrics.decisions_swap,
            decisions_recompute=metrics.decisions_recompute,
            recomputed_tokens=metrics.recomputed_tokens,
            swapped_queue_size_max=metrics.swapped_queue_size_max,
            swaps_completed=metrics.swaps_completed,
            avg_swapped_duration_s=metrics.avg_swapped_duration_s,
            promotions=metrics.promotions,
            demotions=metrics.demotions,
            prefix_cache_queried_tokens=metrics.prefix_cache_queried_tokens,
            prefix_cache_hit_tokens=metrics.prefix_cache_hit_tokens,
        )


def check_priority(priority: object) -> None:
    """Raise InvalidRequestError unless it is an integer."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise InvalidRequestError(
            f"priority must be an integer, got {shown(priority)}", param="priority"
        )


def _catch_up(live: _Live) -> None:
    """Bring the texts to where the samples of a request that continues are."""
    live.has_answered = True
    for state, sample in zip(live.samples, live.request.sequences, strict=True):
        state.ended = sample.is_finished
        if not state.ended:
            state.text.push(sample.output_tokens)


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
