"""Measure the real engine over a grid of steps, and fit the cost model to what they took.

Whole steps of :class:`~layby.engine.Engine` are timed, because that is what a simulation must
predict: the decision, the forward pass, sampling, and the text that comes of it. What leads up to
a step (prompts of the sequences that decode in it) is not computed; an executor that answers at
once stands in for the real one meanwhile. The KV cache then holds zeros, which take as long to
read as anything else. Block moves are timed by themselves.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from layby.bench.machine import describe_machine
from layby.engine.config import EngineConfig
from layby.engine.engine import Engine
from layby.engine.interfaces import Tokenizer
from layby.errors import ConfigError, EngineUnavailableError
from layby.execution.executor import BlockFormat, Executor, StepResult
from layby.sampling_params import SamplingParams
from layby.scheduling import BlockMove, Scheduler, SchedulerConfig, Tier, Transfer
from layby.scheduling.plan import StepPlan
from layby.simulate.cost import CostModel, Knots, MoveCost, StepLoad
from layby.simulate.profiles import MEASURED, FitError, Profile, SchedulerDefaults

F64 = NDArray[np.float64]

TEMPERATURE = 1.0
"""Sampling is measured at it; greedy sampling is a little cheaper."""

MOST_SEQS = 256
MOST_TOKENS = 2048
"""A profile covers at least so many sequences and tokens per step, if memory and time allow: one
that ends at the engine's own settings would be no help in choosing larger ones."""

MOST_CONTEXT_TOKENS = 112 * 1024
"""Positions that are ever in use at once: bounds the memory that profiling touches."""

LEAST_STEPS = 20
"""Kinds of steps that a profile must rest on: there are a dozen coefficients and two curves."""

DECODE_STEPS = 4
"""Steps measured, after one that warms up, wherever sequences decode."""

_STEADY_S = 1e-6
"""Steps shorter than this do not weigh more: the clock is no better."""


@dataclass(frozen=True, slots=True)
class Case:
    """Steps to be measured: so many sequences decode, and prompts come in.

    Attributes:
        decodes: Sequences that decode.
        context: Their mean number of tokens; lengths lie up to a tenth below and above.
        prompts: Prompts computed together with them, in the step that is measured. 0: steps in
            which all decode are measured.
        tokens: Rows of each prompt.
        start: Position of the first of them; what lies before is in the prefix cache.
        is_cut: The prompt goes on after those rows, so that nothing is sampled.
        held_out: Not for the fit, but to tell how good it is.
    """

    decodes: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0
    start: int = 0
    is_cut: bool = False
    held_out: bool = False

    @property
    def num_seqs(self) -> int:
        """Sequences on the device."""
        return self.decodes + self.prompts

    @property
    def rows(self) -> int:
        """Rows of a measured step."""
        return self.decodes + self.prompts * self.tokens

    def lengths(self) -> list[int]:
        """Tokens of each sequence that decodes, so spread that they fill blocks in turn."""
        shares = [(2 * index + 1) / self.decodes - 1 for index in range(self.decodes)]
        return [round(self.context * (1 + 0.1 * share)) for share in shares]

    @property
    def longest(self) -> int:
        """Most tokens that one sequence comes to have."""
        prompt = self.start + self.tokens + self.is_cut + 1 if self.prompts else 0
        return max(prompt, *self.lengths(), 0) + DECODE_STEPS + 3

    def num_blocks(self, block_size: int) -> int:
        """Most blocks that it needs."""
        lengths = [length + DECODE_STEPS + 3 for length in self.lengths()]
        lengths += [self.start + self.tokens + self.is_cut + 1] * self.prompts
        return sum(-(-length // block_size) for length in lengths)


GRID = (
    *(
        Case(decodes=count, context=context)
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for context in (40, 320, 1000)
    ),
    *(
        Case(prompts=1, tokens=tokens, start=start)
        for tokens in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
        for start in (0, 512, 1536)
        if tokens >= 16 or start < 1536
    ),
    *(
        Case(prompts=1, tokens=tokens, start=start, is_cut=True)
        for tokens in (64, 256, 512, 1024, 2048)
        for start in (0, 1024)
    ),
    *(Case(prompts=count, tokens=tokens) for count, tokens in ((4, 16), (4, 100), (16, 30))),
    *(
        Case(decodes=count, context=320, prompts=1, tokens=tokens)
        for count in (4, 16, 32, 64)
        for tokens in (64, 192, 448)
    ),
    *(
        Case(decodes=count, context=context, held_out=True)
        for count, context in ((3, 700), (12, 150), (24, 500), (48, 200), (56, 600), (100, 250))
    ),
    *(
        Case(prompts=1, tokens=tokens, start=start, held_out=True)
        for tokens, start in ((24, 256), (100, 0), (200, 320), (400, 0), (700, 768))
    ),
    *(
        Case(decodes=count, context=context, prompts=prompts, tokens=tokens, held_out=True)
        for count, context, prompts, tokens in (
            (10, 400, 1, 200),
            (30, 200, 2, 100),
            (8, 600, 1, 504),
            (50, 500, 1, 462),
        )
    ),
)
"""Every case there is; those that an engine cannot hold are left out."""

ROW_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SAMPLE_KNOTS = (1, 4, 8, 16, 32, 64, 128, 256)
MOVED_BLOCKS = (1, 8, 32, 128)


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one kind of step took.

    Attributes:
        case: Which; None for a step with nothing to do.
        load: What was in it.
        seconds: Median of all that were timed.
    """

    case: Case | None
    load: StepLoad
    seconds: float

    @property
    def held_out(self) -> bool:
        """Whether the fit must not see it."""
        return self.case is not None and self.case.held_out


def profile_model(
    config: EngineConfig,
    *,
    name: str | None = None,
    limit_s: float = 120.0,
    progress: bool = False,
) -> Profile:
    """Measure the engine that ``config`` makes on this machine, and fit a cost model.

    Args:
        config: Settings as for serving. Larger batches than they allow are measured too.
        name: What the profile is called; the model's name if None.
        limit_s: Time for measuring, beside loading the model. What has not been measured once
            after half of it is left out, the largest steps first.
        progress: Show a progress bar on stderr.

    Raises:
        ConfigError: The settings do not fit the machine or the model.
        ModelError: The model cannot be found, read or run.
        EngineUnavailableError: A step failed.
    """
    from layby.engine.build import build_engine

    engine = build_engine(config)
    # Not earlier: it imports torch, and how torch's threads wait is settled by build_engine.
    from layby.execution import TorchExecutor

    executor = engine.executor
    assert isinstance(executor, TorchExecutor)
    settings = engine.scheduler.config
    pool = executor.cache.pool
    try:
        profiler = Profiler(
            executor,
            settings,
            engine.tokenizer,
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            settle=executor.cache.synchronize,
        )
        # Pages never written are all one and the same, which the processor would have at hand.
        pool[: profiler.num_blocks].zero_()
        block_bytes = pool[0].nbytes
        timings = profiler.run(limit_s=limit_s, progress=progress)
    finally:
        del pool
        engine.close()
    if sum(not step.held_out for step in timings.steps) < LEAST_STEPS:
        raise ConfigError(
            f"a pool of {settings.num_blocks} blocks and {limit_s:g} s leave only "
            f"{len(timings.steps)} kinds of steps to measure, too few for a profile"
        )
    cost = fit_cost(timings)
    dtype = engine.dtype or config.dtype
    return Profile(
        name=engine.model_name if name is None else name,
        kind=MEASURED,
        model=engine.model_name,
        dtype=dtype,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=engine.device or config.device,
        machine=describe_machine(),
        block_size=settings.block_size,
        block_bytes=block_bytes,
        scheduler=SchedulerDefaults(
            num_blocks=settings.num_blocks,
            num_swap_blocks=settings.num_swap_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
        ),
        cost=cost,
        fit=fit_error(cost, [step for step in timings.steps if not step.held_out]),
        held_out=fit_error(cost, [step for step in timings.steps if step.held_out]),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@dataclass(slots=True)
class Timings:
    """What was measured.

    Attributes:
        steps: Whole steps of the engine.
        moves: Block moves by the name that they have in ``CostModel``: pairs of blocks moved and
            median seconds. Empty where there is no pool to move to.
    """

    steps: list[Measurement]
    moves: dict[str, list[tuple[int, float]]]


# --- measuring ---


class _Probe:
    """The executor behind an engine that is being timed; notes what was in each step.

    Attributes:
        answers_at_once: Compute nothing; every token sampled is ``token``.
        load: What was in the last step.
    """

    def __init__(self, real: Executor, token: int) -> None:
        self._real = real
        self._token = token
        self.answers_at_once = False
        self.load = StepLoad()

    def execute(self, plan: StepPlan) -> StepResult:
        self.load = StepLoad.of(plan)
        if self.answers_at_once:
            return StepResult([self._token] * plan.num_samples)
        return self._real.execute(plan)

    @property
    def block_format(self) -> BlockFormat:
        return self._real.block_format

    def export_blocks(self, tier: Tier, blocks: Sequence[int]) -> memoryview:
        return self._real.export_blocks(tier, blocks)

    def import_blocks(self, tier: Tier, blocks: Sequence[int], content: memoryview) -> None:
        self._real.import_blocks(tier, blocks, content)

    def release(self, request_id: str) -> None:
        self._real.release(request_id)

    def close(self) -> None:
        """Nothing: the executor serves the next case."""


class Profiler:
    """Times steps and block moves on an executor that nobody else uses.

    Args:
        executor: What to measure.
        settings: Of the engine it was made for.
        tokenizer: For prompts, and for the text that steps bring.
        vocab_size, max_model_len: As of :class:`~layby.engine.Engine`.
        settle: Waits until block moves are done.
        clock: Seconds.

    Attributes:
        num_blocks: So many of the executor's blocks are used, from the first.
    """

    def __init__(
        self,
        executor: Executor,
        settings: SchedulerConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_model_len: int,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_blocks = min(settings.num_blocks, MOST_CONTEXT_TOKENS // settings.block_size)
        self._executor = executor
        self._settings = settings
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._settle = settle
        self._clock = clock
        size = min(vocab_size, tokenizer.vocab_size)
        self._tokens = [token for token in range(size) if tokenizer.token_bytes(token)]
        self._draw = random.Random(0)

    def run(
        self,
        grid: Sequence[Case] = GRID,
        *,
        limit_s: float = 120.0,
        rounds: int = 9,
        progress: bool = False,
    ) -> Timings:
        """Measure whatever of ``grid`` the engine can hold, again and again.

        The cases take turns, in another order each time, so that a slow moment of the machine
        meets one of many measurements of a case, and the median passes over it.

        Args:
            grid: What to measure.
            limit_s: As of ``profile_model``.
            rounds: Most times that each case is measured.
            progress: Show a progress bar on stderr.

        Raises:
            ConfigError: The engine can hold none of the cases.
            EngineUnavailableError: A step failed.
        """
        cases = sorted((c for c in grid if self._fits(c)), key=_work)
        if not cases:
            raise ConfigError(
                f"there is nothing to profile: a pool of {self._settings.num_blocks} blocks with "
                f"max_model_len {self._max_model_len} holds none of the batches to be measured"
            )
        times: defaultdict[Case | None, list[float]] = defaultdict(list)
        loads: dict[Case | None, StepLoad] = {None: StepLoad()}
        moves: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        order = random.Random(0)
        begun = self._clock()
        self._time_case(cases[0])  # warms up
        with _progress_bar(rounds * len(cases), shown=progress) as advance:
            for number in range(rounds):
                share = 0.5 if number == 0 else 1.0
                for case in order.sample(cases, len(cases)) if number else list(cases):
                    if self._clock() - begun > share * limit_s:
                        break
                    load, seconds = self._time_case(case)
                    loads.setdefault(case, load)
                    times[case] += seconds
                    advance()
                times[None].append(self._time_idle())
                for name, count in self._moves():
                    moves[name, count].append(self._time_move(name, count))
                cases = [case for case in cases if case in times]
                if self._clock() - begun > limit_s:
                    break
        by_name: dict[str, list[tuple[int, float]]] = {}
        for (name, count), seconds in moves.items():
            by_name.setdefault(name, []).append((count, statistics.median(seconds)))
        return Timings(
            [
                Measurement(case, loads[case], statistics.median(seconds))
                for case, seconds in times.items()
            ],
            by_name,
        )

    def _fits(self, case: Case) -> bool:
        settings = self._settings
        return (
            case.num_seqs <= max(settings.max_num_seqs, MOST_SEQS)
            and case.rows <= max(settings.max_num_batched_tokens, MOST_TOKENS)
            and case.longest <= self._max_model_len
            and case.num_blocks(settings.block_size) <= self.num_blocks
        )

    def _time_case(self, case: Case) -> tuple[StepLoad, list[float]]:
        """What was in the case's steps (if several: in the middle one), and how long each took."""
        probe = _Probe(self._executor, self._tokens[0])
        engine = self._engine(probe, case)
        prompts = [
            self._prompt(case.start + case.tokens + case.is_cut) for _ in range(case.prompts)
        ]
        probe.answers_at_once = True
        if case.start:
            for prompt in prompts:
                self._add(engine, prompt[: case.start], max_tokens=1)
            while engine.has_unfinished:
                self._step(engine)
        for length in case.lengths():
            self._add(engine, self._prompt(length), max_tokens=DECODE_STEPS + 3)
        if case.decodes:
            self._step(engine)
        probe.answers_at_once = False
        if case.decodes:
            self._step(engine)  # warms up
        for prompt in prompts:
            self._add(engine, prompt, max_tokens=1)
        loads, seconds = [], []
        for _ in range(1 if case.prompts else DECODE_STEPS):
            start = self._clock()
            self._step(engine)
            seconds.append(self._clock() - start)
            loads.append(probe.load)
        return loads[len(loads) // 2], seconds

    def _engine(self, executor: Executor, case: Case) -> Engine:
        """An engine on which all of the case's sequences come in at once, unless it is to cut."""
        config = replace(
            self._settings,
            num_blocks=self.num_blocks,
            num_swap_blocks=0,
            num_disk_blocks=0,
            max_num_seqs=case.num_seqs,
            max_num_batched_tokens=case.rows if case.is_cut else max(2**20, case.rows),
            max_model_len=self._max_model_len,
            policy="swapped-first",
            enable_prefix_caching=True,  # how prompts get their beginning
            headroom=0.0,
            watermark=0.0,
            max_queue=None,
            urgent_window=0.0,
            preemption_threshold=1.0,
            priority_aging=None,
            demote_after_tokens=None,
        )
        return Engine(
            Scheduler(config, clock=self._clock),
            executor,
            self._tokenizer,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            seed=0,
            clock=self._clock,
        )

    def _prompt(self, length: int) -> list[int]:
        return self._draw.choices(self._tokens, k=length)

    def _add(self, engine: Engine, prompt: list[int], *, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=TEMPERATURE, ignore_eos=True)
        engine.add_request(prompt, params)

    def _step(self, engine: Engine) -> None:
        deltas = engine.step()
        error = engine.error or next((delta.error for delta in deltas if delta.error), None)
        if error is not None:
            raise EngineUnavailableError(f"profiling failed: {error}") from error

    def _time_idle(self) -> float:
        """A step in which there is nothing to do."""
        engine = self._engine(_Probe(self._executor, 0), Case(decodes=1))
        engine.step()
        start = self._clock()
        engine.step()
        return self._clock() - start

    def _moves(self) -> Iterator[tuple[str, int]]:
        for count in MOVED_BLOCKS:
            if 2 * count <= self.num_blocks:
                yield "copy", count
                if count <= self._settings.num_swap_blocks:
                    yield "swap_out", count
                    yield "swap_in", count
                if count <= min(self._settings.num_swap_blocks, self._settings.num_disk_blocks):
                    yield "demote", count
                    yield "promote", count

    def _time_transfer(self, name: str, count: int) -> float:
        """From the swap pool to disk, or back; what is read back must have been written."""
        seconds = 0.0
        for way in ("demote", "promote")[: 1 if name == "demote" else 2]:
            plan = StepPlan(1, 0.0)
            getattr(plan, way).append(
                Transfer(1, tuple(BlockMove(block, block) for block in range(count)))
            )
            start = self._clock()
            ends = self._executor.execute(plan).transfer_ends
            while not ends:
                ends = self._executor.execute(StepPlan(1, 0.0)).transfer_ends
            seconds = self._clock() - start
            if ends[0].fault:
                raise EngineUnavailableError(f"profiling failed: the disk reports {ends[0].fault}")
        return seconds

    def _time_move(self, name: str, count: int) -> float:
        if name in ("demote", "promote"):
            return self._time_transfer(name, count)
        scattered = range(1, 2 * count, 2)
        if name == "swap_in":
            moves = [BlockMove(slot, block) for slot, block in enumerate(scattered)]
        elif name == "swap_out":
            moves = [BlockMove(block, slot) for slot, block in enumerate(scattered)]
        else:
            moves = [BlockMove(block, block - 1) for block in scattered]
        plan = StepPlan(1, 0.0)
        getattr(plan, name).extend(moves)
        start = self._clock()
        self._executor.execute(plan)
        self._settle()
        return self._clock() - start


def _work(case: Case) -> tuple[int, int]:
    """Sorts cases by how long they take, roughly."""
    return case.rows, case.decodes * case.context + case.tokens * case.start


@contextmanager
def _progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    if not shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("Measuring steps", total=total)
        yield lambda: bar.advance(task)


# --- fitting ---


def fit_cost(timings: Timings) -> CostModel:
    """The cost model with the least squares of relative errors, no coefficient negative.

    Steps that are held out have no say.

    Raises:
        ConfigError: There are no steps with rows to fit to.
    """
    steps = [step for step in timings.steps if not step.held_out]
    rows = [step.load.decode_tokens + step.load.prefill_tokens for step in steps]
    samples = [step.load.num_samples for step in steps]
    if not any(rows):
        raise ConfigError("there are no measured steps with rows to fit a cost model to")
    row_knots, sample_knots = _supported(ROW_KNOTS, rows), _supported(SAMPLE_KNOTS, samples)
    columns = [
        np.ones(len(steps)),
        *_pieces(row_knots, rows),
        *_pieces(sample_knots, samples),
        *(
            np.array([getattr(step.load, name) for step in steps], np.float64)
            for name in ("num_sequences", "prefill_context", "decode_context")
        ),
    ]
    found = _fit_relative(columns, [step.seconds for step in steps])
    fixed_s, *rest = found
    row_rises, rest = rest[: len(row_knots)], rest[len(row_knots) :]
    sample_rises, rest = rest[: len(sample_knots)], rest[len(sample_knots) :]
    moves = {name: _fit_moves(points) for name, points in timings.moves.items()}
    # Without a swap pool there was none to measure; a copy on the device is the nearest thing.
    copy = moves.get("copy", MoveCost())
    return CostModel(
        rows_s=_curve(fixed_s, row_knots, row_rises),
        samples_s=_curve(0.0, sample_knots, sample_rises),
        sequence_s=rest[0],
        prefill_context_s=rest[1],
        decode_context_s=rest[2],
        swap_out=moves.get("swap_out", copy),
        swap_in=moves.get("swap_in", copy),
        copy=copy,
        demote=moves.get("demote"),
        promote=moves.get("promote"),
    )


def fit_error(cost: CostModel, steps: Sequence[Measurement]) -> FitError | None:
    """How far the model's times are from measured ones; None if there are none.

    A step with nothing to do does not count: it is as good as given.
    """
    errors = [
        100 * abs(cost.step_s(step.load) / step.seconds - 1)
        for step in steps
        if step.case is not None
    ]
    if not errors:
        return None
    return FitError(
        points=len(errors),
        mean_pct=round(statistics.fmean(errors), 3),
        p90_pct=round(float(np.percentile(errors, 90)), 3),
        max_pct=round(max(errors), 3),
    )


def _supported(knots: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Those knots between which, and up to which, something was measured; one at least."""
    kept = []
    before = 0
    for knot in knots:
        if any(before < count <= knot for count in counts) and knot <= max(counts):
            kept.append(knot)
            before = knot
    return kept or [knots[0]]


def _pieces(knots: Sequence[int], counts: Sequence[int]) -> list[F64]:
    """How far each count is through each piece of the curve: 0 before it, 1 behind it. The last
    piece goes on."""
    points = np.array(counts, np.float64)
    columns = []
    for before, knot in zip([0, *knots], knots, strict=False):
        share = np.maximum((points - before) / (knot - before), 0.0)
        columns.append(share if knot == knots[-1] else np.minimum(share, 1.0))
    return columns


def _curve(start: float, knots: Sequence[int], rises: Sequence[float]) -> Knots:
    values = np.cumsum([start, *rises]).tolist()
    return tuple(zip([0, *knots], values, strict=True))


def _fit_moves(points: Sequence[tuple[int, float]]) -> MoveCost:
    counts = np.array([count for count, _ in points], np.float64)
    return MoveCost(*_fit_relative([np.ones(len(points)), counts], [time for _, time in points]))


def _fit_relative(columns: Sequence[F64], seconds: Sequence[float]) -> list[float]:
    weights = 1 / np.maximum(np.array(seconds, np.float64), _STEADY_S)
    matrix = np.stack(columns, axis=1) * weights[:, None]
    found: list[float] = nnls(matrix, np.array(seconds, np.float64) * weights).tolist()
    return found


def nnls(matrix: F64, target: F64) -> F64:
    """``x`` from 0 up with the least ``|matrix @ x - target|`` (Lawson & Hanson 1974, chapter 23).

    Args:
        matrix: ``[points, coefficients]``.
        target: ``[points]``.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    a = matrix / scale  # coefficients of all sizes become comparable
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)  # coefficients that are not held at 0
    for _ in range(10 * len(x)):
        gain = np.where(free | (norms == 0), -np.inf, a.T @ (target - a @ x))
        best = int(gain.argmax())
        if gain[best] <= 1e-10 * np.linalg.norm(target):
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            # As far towards the trial as the first of them lets us; that one goes back to 0.
            step = np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300))
            x += step * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = trial
    result: F64 = x / scale
    return result


__all__ = [
    "GRID",
    "Case",
    "Measurement",
    "Profiler",
    "Timings",
    "fit_cost",
    "fit_error",
    "nnls",
    "profile_model",
]
