"""The engine: requests in, pieces of answers out, one loop over schedule → execute → update."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import Gauge

from layby.engine.costs import CostMeter
from layby.engine.elastic import ElasticPool
from layby.engine.interfaces import ChatTemplate, Tokenizer
from layby.engine.kept_kv import UnfinishedKV, bring_back, key_of, open_kept
from layby.engine.kv_pool import KVPoolSize, ResizeLog, check_pool_size
from layby.engine.live import LiveRequest
from layby.engine.metrics import BusyLog, EngineMetrics, EngineStats
from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.engine.preparation import PreparedRequest, RequestPreparer, check_priority
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
)
from layby.execution.executor import Executor, PositionLogprobs, StepResult
from layby.execution.faults import Faults
from layby.execution.kv_file import KVFile
from layby.sampling_params import SamplingParams
from layby.scheduling import Request, Scheduler
from layby.scheduling.plan import StepPlan, TransferEnd
from layby.scheduling.request import FinishReason
from layby.scheduling.request import Sequence as Sample

logger = logging.getLogger("layby.engine")

STALL_STEPS = 100
"""So many steps on end that plan nothing while work is there are a fault, not patience."""


class Engine(RequestPreparer):
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
        super().__init__(
            scheduler,
            tokenizer,
            chat_template,
            model_name=model_name,
            vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
            max_model_len=max_model_len,
            seed=seed,
            clock=clock,
        )
        self.executor = executor
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
        self._live: dict[str, LiveRequest] = {}
        self._gaps: Counter[float] = Counter()  # token to token, of the step being committed
        self._empty_steps = 0
        self._closed = False
        self._prompt_tokens = self._generation_tokens = self._requests_failed = 0
        self._stats = EngineStats()
        self._metrics = EngineMetrics(model_name, self.stats, scheduler.metrics.swap_faults)
        self._busy_log = BusyLog(clock())
        self._resize_log = ResizeLog()
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
        name = prepared.known_as or request.request_id
        if prepared.kept is None or not bring_back(
            request, name, prepared.kept, self.scheduler, self.executor
        ):
            self.scheduler.add_request(request, was_accepted=prepared.was_accepted)
        self._live[request.request_id] = LiveRequest.of(
            prepared, self.tokenizer, defers_text=self.defers_text
        )
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
    def max_queued_seqs(self) -> int | None:
        """Most sequences that an idle engine accepts at a time; None: no limit."""
        config = self.scheduler.config
        return None if config.max_queue is None else config.max_queue + config.max_num_seqs

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
            if self._resize_log.is_open:
                self._resize_log.look(self.kv_pool_size())
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
        self._resize_log.ask()
        if not self._live and self.has_unfinished:
            self.step()
            self._check_alive()
        self._publish()
        if not self._live:
            self._resize_log.look(self.kv_pool_size())
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

    # --- from one process to the next ---

    def waited_s(self, request_id: str) -> float:
        """Seconds that a live request has waited, as far as they count for its class."""
        return self.scheduler.waited_s(self._live[request_id].request)

    def unfinished_kv(self) -> UnfinishedKV:
        """Where the KV of live requests lies, for saving it; between two steps."""
        places = []
        for request in sorted(self.scheduler.requests.values(), key=self.scheduler.policy.urgency):
            live = self._live[request.request_id]
            if live.prompt_logprobs is not None and not live.has_answered:
                continue  # the next process will want them all, and has to compute them for it
            if (place := self.scheduler.locate_kv(request)) is not None:
                places.append((key_of(request), place))
        return UnfinishedKV(self.executor, self.identity, places)

    def open_kept(self, path: Path, faults: Faults | None = None) -> KVFile | None:
        """What an earlier process has saved of KV; None if there is nothing, or nothing of use.

        Its reader closes it when its requests have been submitted.
        """
        return open_kept(path, self.executor, self.identity, self.scheduler, faults)

    # --- reports ---

    def stats(self) -> EngineStats:
        """Counts as of the end of the last step, admission or abort; safe in any thread."""
        return self._stats

    def metrics_text(self) -> bytes:
        """The metrics in Prometheus' text format; safe in any thread."""
        return self._metrics.text()

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
        live: LiveRequest,
        pieces: list[tuple[Sample, int, PositionLogprobs | None]],
        now: float,
    ) -> RequestDelta:
        outputs = [self._piece(live, *piece) for piece in pieces]
        self._observe_tokens(live, [sample.index for sample, _, _ in pieces], now)
        finished = live.request.is_finished
        delta = live.delta(outputs, finished=finished, now=now)
        if finished:
            self._forget(live, outputs[-1].finish_reason or "stop", now)
        return delta

    def _piece(
        self, live: LiveRequest, sample: Sample, token: int, logprob: PositionLogprobs | None
    ) -> CompletionDelta:
        """What one token adds to its sample, whose end (if it is one) is settled here."""
        piece = live.piece(sample, token, logprob)
        if piece.finish_reason is not None and not sample.is_finished:
            self.scheduler.finish_sequence(sample, FinishReason.STOP)
        return piece

    def _observe_tokens(self, live: LiveRequest, indexes: list[int], now: float) -> None:
        self._generation_tokens += len(indexes)
        if not live.has_answered:
            self._prompt_tokens += live.request.num_prompt_tokens
            self._metrics.observe_first_token(now - live.arrival_s)
        for index in indexes:
            state = live.samples[index]
            if state.last_token_s is not None:
                self._gaps[now - state.last_token_s] += 1
            state.last_token_s = now

    # --- ends ---

    def _fail(self, request_id: str, why: str) -> RequestDelta | None:
        """End one request because of a fault of its own."""
        live = self._live.get(request_id)
        if live is None:
            return None
        self.scheduler.abort(request_id, FinishReason.ERROR)
        error = RequestFailedError(f"request {request_id} failed: {why}")
        return self._end(live, FinishReason.ERROR, error)

    def _end(
        self, live: LiveRequest, reason: FinishReason, error: LaybyError | None
    ) -> RequestDelta:
        """The last delta of a request that does not end by itself."""
        now = self._clock()
        outputs = live.last_pieces(reason)
        delta = live.delta(outputs, finished=True, now=now, error=error)
        self._requests_failed += reason is FinishReason.ERROR
        self._forget(live, reason.value, now)
        return delta

    def _forget(self, live: LiveRequest, reason: str, now: float) -> None:
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
