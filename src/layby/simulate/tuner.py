"""Searches scheduler settings: one trace is simulated over and over, each time with others.

    result = tune(trace, load_profile("a100-llama3-8b"), parse_slo("ttft_p99<2s"), trials=64)
    print(result.command)

Two things are wanted at once: throughput, in output tokens per second, and little ``excess`` over
the SLO (the largest share of a limit that was taken). What is tried next is chosen by Optuna's
tree-structured Parzen estimator. What is found is then explained by further simulations: settings
that buy nothing go back to their defaults, each of the others is reset alone to see what it bought,
and each number is moved up and down to see whether it stands next to a cliff.

The same seed gives the same result, whatever the number of processes and however often a study is
interrupted: trials are chosen in batches of a fixed size, each by a sampler whose seed is made of
the study's seed and the trial's number, and their outcomes are told in order.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import layby
from layby.engine.config import DEFAULT_SWAP_GIB, GIB, EngineConfig
from layby.errors import ConfigError, InvalidRequestError, LaybyError, counted
from layby.scheduling import SchedulerConfig
from layby.scheduling.intake import Intake
from layby.scheduling.memory import KVMemory
from layby.scheduling.policy import POLICIES
from layby.simulate.observations import RequestLog
from layby.simulate.profiles import MEASURED, Profile
from layby.simulate.report import number
from layby.simulate.settings import scheduler_config, with_block_size
from layby.simulate.simulation import simulate
from layby.simulate.slo import Slo
from layby.simulate.traces import Trace

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial
    from optuna.trial import Trial as OptunaTrial

Value = int | float | str
"""Of one setting."""

Settings = Mapping[str, Value]
"""Options of ``layby serve`` by name, and what each is set to."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many simulations of it are done, and of how many."""

BATCH: Final = 8
"""Trials chosen at a time. Fixed, or the number of processes would change what is found; more than
a few are chosen blindly of one another."""

_WORST_EXCESS: Final = 1e9  # told of what misses the SLO by an infinite factor


# --- What is searched ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that is searched.

    Attributes:
        option: Its name as an option of ``layby serve``.
        rungs: The values to try, given the default, which is always among them.
        aliases: Options that set the same thing.
        field: Its name in :class:`SchedulerConfig`, if it is another.
        on_request: Only searched when asked for.
    """

    option: str
    rungs: Callable[[Value], Sequence[Value]]
    aliases: tuple[str, ...] = ()
    field: str = ""
    on_request: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """All options that set it."""
        return (self.option, *self.aliases)


def _around(low: float, high: float) -> Callable[[Value], list[Value]]:
    """Whole numbers from ``low`` to ``high`` times the default, four to an octave."""

    def rungs(default: Value) -> list[Value]:
        assert isinstance(default, int)
        first, last = max(1, default * low), default * high
        octaves = range(max(0, int(math.log2(first)) - 1), int(math.log2(last)) + 1)
        steps = {2**octave * quarter // 4 for octave in octaves for quarter in (4, 5, 6, 7)}
        return [step for step in sorted(steps) if first <= step <= last]

    return rungs


def _parts(*parts: float) -> Callable[[Value], list[Value]]:
    """So many parts of the default."""

    def rungs(default: Value) -> list[Value]:
        assert not isinstance(default, str)
        return [float(f"{default * part:.3g}") for part in parts]

    return rungs


def _among(*values: Value) -> Callable[[Value], list[Value]]:
    return lambda default: list(values)


KNOBS: Final = (
    Knob("max_num_seqs", _around(1 / 16, 8)),
    Knob("max_num_batched_tokens", _around(1 / 16, 8)),
    Knob("headroom", _among(0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)),
    Knob("preemption_mode", _among("auto", "recompute")),
    # No more than there is: RAM is not what a search can find.
    Knob("swap_gib", _parts(0, 1 / 8, 1 / 4, 1 / 2), ("num_swap_blocks",), "num_swap_blocks"),
    Knob("scheduling_policy", _among(*POLICIES), field="policy", on_request=True),
)
"""Every setting that is searched: a further one is a further line."""

HELD: Final = (
    "num_blocks", "block_size", "max_model_len", "enable_prefix_caching", "max_queue",
    "priority_aging", "demote_after_tokens", "num_disk_blocks", "urgent_window",
    "background_tokens", "preemption_threshold", "watermark",
)  # fmt: skip
"""Fields of :class:`SchedulerConfig` that are not searched: what the machine has, what is promised
to callers (which class goes first is a promise, too), and what is never better off."""


class SearchSpace:
    """Which settings are tried on a machine, and what each combination tells the scheduler.

    The queue has no limit unless one is given: who was refused would be missing in the latencies.

    Args:
        profile: The machine, and where settings begin.
        fixed: Options that the user has given; they are not searched.
        most_samples: The largest ``n`` of a request to be served.
        search_policy: Search the scheduling policy as well.

    Raises:
        ConfigError: The given options cannot work.

    Attributes:
        base: The scheduler's settings with all defaults.
        defaults: Of each searched option.
        rungs: The values of each that are tried, in order.
    """

    def __init__(
        self,
        profile: Profile,
        fixed: Mapping[str, Any] | None = None,
        *,
        most_samples: int = 1,
        search_policy: bool = False,
    ) -> None:
        self.fixed = dict(fixed or {})
        self._options = {"max_queue": None} | self.fixed
        self.base = scheduler_config(profile, **self._options)
        self.profile = with_block_size(profile, self.base.block_size)
        self.defaults: dict[str, Value] = {}
        self.rungs: dict[str, tuple[Value, ...]] = {}
        for knob in KNOBS:
            if any(name in self.fixed for name in knob.names) or (
                knob.on_request and not search_policy
            ):
                continue
            default = self._default(knob)
            rungs = self._allowed(knob.option, [*knob.rungs(default), default], most_samples)
            if len(rungs) > 1:
                self.defaults[knob.option] = default
                self.rungs[knob.option] = rungs
        if not self.rungs:
            raise ConfigError(
                "every setting that could be searched is given: "
                f"{', '.join(f'{name}={value}' for name, value in self.fixed.items())}"
            )

    def _default(self, knob: Knob) -> Value:
        value: Value = getattr(self.base, knob.field or knob.option)
        return int(value) * self.profile.block_bytes / GIB if knob.option == "swap_gib" else value

    def _allowed(self, option: str, rungs: Sequence[Value], most_samples: int) -> tuple[Value, ...]:
        """Each value once: numbers rising, within what others that are given allow."""
        if isinstance(rungs[0], str):
            return tuple(dict.fromkeys(rungs))
        low, high = 0.0, math.inf
        if option == "max_num_seqs":
            low, high = most_samples, max(self.base.num_blocks, self.base.max_num_seqs)
            if "max_num_batched_tokens" in self.fixed:
                high = min(high, self.base.max_num_batched_tokens)
        if option == "max_num_batched_tokens" and "max_num_seqs" in self.fixed:
            low = self.base.max_num_seqs
        return tuple(sorted({value for value in rungs if low <= float(value) <= high}))

    def tidy(self, settings: Settings) -> dict[str, Value]:
        """The same where that can work: a step computes a token for every sequence at least."""
        tidied = {name: settings.get(name, default) for name, default in self.defaults.items()}
        seqs = int(tidied.get("max_num_seqs", self.base.max_num_seqs))
        tokens = int(tidied.get("max_num_batched_tokens", self.base.max_num_batched_tokens))
        if tokens < seqs:
            if "max_num_batched_tokens" in tidied:
                tidied["max_num_batched_tokens"] = seqs
            else:
                tidied["max_num_seqs"] = tokens
        return tidied

    def config(self, settings: Settings) -> SchedulerConfig:
        """What the scheduler is told.

        Raises:
            ConfigError: The settings cannot work.
        """
        changed = self.changed(self.tidy(settings))
        options = self._options | changed
        if _never_parks(options):
            options = {name: value for name, value in options.items() if name != "swap_gib"}
        return scheduler_config(self.profile, **options)

    def changed(self, settings: Settings) -> dict[str, Value]:
        """Those that are not at their defaults."""
        return {name: value for name, value in settings.items() if value != self.defaults[name]}

    def neighbours(self, settings: Settings) -> list[tuple[str, dict[str, Value]]]:
        """Each number a quarter up, and a fifth down, all else as it is."""
        found = []
        for name, value in settings.items():
            if isinstance(value, str) or (name == "swap_gib" and _never_parks(settings)):
                continue
            if isinstance(value, int):
                moved: list[Value] = [max(1, min(value - 1, round(value * 0.8)))]
                moved.append(max(value + 1, round(value * 1.25)))
            else:
                moved = [value * 0.8, value * 1.25 if value else 0.25]
            for other in moved:
                tidied = self.tidy({**settings, name: other})
                if tidied != settings and tidied[name] == other:
                    found.append((name, tidied))
        return found

    def serve_flags(self, settings: Settings) -> list[tuple[str, str]]:
        """What makes ``layby serve`` do the same: all options that it would set otherwise itself.

        Returns:
            Flags and their values; a flag without a value has an empty one.
        """
        own = {option.name: option.default for option in fields(EngineConfig)}
        own["swap_gib"] = DEFAULT_SWAP_GIB
        chosen = dict(self.fixed)
        for knob in KNOBS:
            if not any(name in chosen for name in knob.names):
                chosen[knob.option] = settings.get(knob.option, self._default(knob))
        if _never_parks(chosen):  # the engine makes no swap pool then
            chosen.pop("swap_gib", None)
        flags = []
        for name, value in chosen.items():
            if written(value) == written(own[name]):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                flags.append((flag if value else f"--no-{flag[2:]}", ""))
            else:
                flags.append((flag, written(value)))
        if "swap_disk_gib" in chosen:
            flags.append(("--swap-dir", "DIR"))
        return flags


def _model_to_serve(profile: Profile) -> str:
    """The estimates name no model that could be loaded under their name."""
    if profile.kind != MEASURED:
        return "MODEL"
    return "" if profile.model == EngineConfig().model else profile.model


def written(value: object) -> str:
    """A setting as it stands on a command line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def _never_parks(options: Mapping[str, Any]) -> bool:
    return options.get("preemption_mode") == "recompute" or options.get("scheduling_policy") in (
        "recompute-only",
        "reserve",
    )


# --- Simulations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        figures: The simulation's report in the one result schema, without its timeline.
        excess: See ``Slo.excess``; up to 1 the SLO is met.
        misses: A sentence for each promise that was not kept.
    """

    figures: Mapping[str, Any]
    excess: float
    misses: tuple[str, ...]

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return float(self.figures["output_tokens_per_s"])

    @property
    def met(self) -> bool:
        """Whether the SLO is."""
        return self.excess <= 1

    @property
    def preemptions(self) -> int:
        """Of either mode."""
        return int(sum(self.figures["preemptions"].values()))

    @property
    def goodput_share(self) -> float:
        """Part of the requests that each kept every limit."""
        return float(self.figures["goodput"]["share"])

    def latency_s(self, metric: str, statistic: str) -> float | None:
        """Such as of ``ttft_s`` the ``p99``."""
        value: float | None = self.figures[metric][statistic]
        return value

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which knows no infinity."""
        return {
            "figures": dict(self.figures),
            "excess": self.excess if math.isfinite(self.excess) else None,
            "misses": list(self.misses),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """What ``as_dict`` made."""
        excess = math.inf if data["excess"] is None else data["excess"]
        return cls(data["figures"], excess, tuple(data["misses"]))


@dataclass(frozen=True, slots=True)
class Bench:
    """What all simulations have in common."""

    trace: Trace
    profile: Profile
    slo: Slo

    def try_out(self, config: SchedulerConfig) -> Outcome:
        """Simulate these settings."""
        log = RequestLog(slo=self.slo.limits, max_records=0)
        report = simulate(self.trace, self.profile, config, log=log)
        figures = replace(report, timeline=report.timeline.coarser(1)).as_dict()
        del figures["timeline"]  # the bulk of it
        return Outcome(figures, self.slo.excess(report), tuple(self.slo.misses(report)))


_bench: Bench | None = None  # of a worker process


def _start_worker(bench: Bench) -> None:
    global _bench  # noqa: PLW0603  # handed over once, not with every simulation
    _bench = bench
    # The program says what there is to say about Ctrl-C, not each of its workers.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def _work(config: SchedulerConfig) -> Outcome:
    assert _bench is not None
    return _bench.try_out(config)


class Laboratory:
    """Simulates settings, several at a time, and none twice. A context manager.

    Args:
        bench: Trace, profile and SLO.
        jobs: Processes; 1: this one.
    """

    def __init__(self, bench: Bench, jobs: int = 1) -> None:
        self.bench = bench
        self.jobs = jobs
        self._known: dict[SchedulerConfig, Outcome] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Laboratory:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def remember(self, config: SchedulerConfig, outcome: Outcome) -> None:
        """It is known from an earlier run."""
        self._known[config] = outcome

    def run(self, configs: Sequence[SchedulerConfig]) -> Iterator[Outcome]:
        """What each comes to, in order, as soon as it is known.

        Raises:
            LaybyError: A simulation failed, or a process died.
        """
        new = [config for config in dict.fromkeys(configs) if config not in self._known]
        outcomes = self._outcomes(new)
        coming = iter(new)
        for config in configs:
            while config not in self._known:
                self._known[next(coming)] = next(outcomes)
            yield self._known[config]

    def _outcomes(self, configs: Sequence[SchedulerConfig]) -> Iterator[Outcome]:
        if self.jobs == 1 or not configs:
            yield from map(self.bench.try_out, configs)
            return
        if self._pool is None:
            # Spawned: a fork would copy the locks of whatever threads there are.
            self._pool = ProcessPoolExecutor(
                self.jobs, get_context("spawn"), _start_worker, (self.bench,)
            )
        try:
            yield from self._pool.map(_work, configs)
        except BrokenProcessPool:
            raise LaybyError(
                f"one of {self.jobs} simulating processes died, perhaps for lack of memory; "
                "fewer jobs take less"
            ) from None


@dataclass(frozen=True, slots=True)
class Misfits:
    """Requests that no setting makes possible.

    Attributes:
        count: How many.
        reason: What the first would be told; empty if there are none.
    """

    count: int = 0
    reason: str = ""

    def __str__(self) -> str:
        """A sentence, or nothing."""
        if not self.count:
            return ""
        who = counted(self.count, "request")
        return f"Left out: {who} that could never be served ({self.reason})."


def leave_out_misfits(trace: Trace, config: SchedulerConfig) -> tuple[Trace, Misfits]:
    """The requests that pool and context can hold: others are refused under any setting.

    Raises:
        ConfigError: No request is left.
    """
    sizes = replace(config, max_num_seqs=2**30, max_num_batched_tokens=2**30)
    intake = Intake(
        sizes, KVMemory(sizes.num_blocks, 0, sizes.block_size, enable_prefix_caching=False)
    )
    kept, reason = [], ""
    for traced in trace.requests:
        most = traced.max_tokens or traced.num_output_tokens
        try:
            intake.check_lengths(traced.num_prompt_tokens, most, traced.n)
        except InvalidRequestError as error:
            reason = reason or str(error)
        else:
            kept.append(traced)
    if not kept:
        raise ConfigError(f"no request of {trace.name} could ever be served: {reason or 'empty'}")
    if len(kept) == len(trace):
        return trace, Misfits()
    return replace(trace, requests=kept), Misfits(len(trace) - len(kept), reason)


# --- What is found -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings that were tried, and what came of them; ``number`` counts from 0, the defaults."""

    number: int
    settings: Settings
    outcome: Outcome

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "number": self.number,
            "settings": dict(self.settings),
            **self.outcome.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class Ablation:
    """The recommended settings with one of them back at its default.

    What the setting bought is the difference between the recommended outcome and this one. These
    differences do not add up to that between recommended and default: settings help one another.

    Attributes:
        option: Which.
        value, default: What is recommended, and what it is without.
        outcome: With the default.
    """

    option: str
    value: Value
    default: Value
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The recommended settings with one number a little larger or smaller.

    Attributes:
        option: Which.
        value, moved: What is recommended, and where it was moved.
        outcome: There.
        warnings: What is much worse there; empty: no cliff.
    """

    option: str
    value: Value
    moved: Value
    outcome: Outcome
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TuneResult:
    """All that a search found.

    Attributes:
        trace, profile: In a line each.
        model: What ``layby serve`` is to be given; empty for the default model.
        slo: What was to be met.
        seed: Of the search.
        misfits: Requests left out of the trace.
        trials: All that were tried; the first has the defaults.
        front: Those of them to which none is superior in both throughput and excess, by falling
            throughput.
        chosen: The trial of the front that is recommended, before what bought nothing was reset.
        settings: What is recommended.
        outcome: What that comes to.
        flags: For ``layby serve``: name and value, which is empty for a switch.
        ablations: One for each recommended setting that is not at its default.
        neighbours: Every number moved.
        wall_s: How long it all took.
    """

    trace: str
    profile: str
    model: str
    slo: Slo
    seed: int
    misfits: Misfits
    trials: Sequence[Trial]
    front: Sequence[Trial]
    chosen: Trial
    settings: Settings
    outcome: Outcome
    flags: Sequence[tuple[str, str]]
    ablations: Sequence[Ablation]
    neighbours: Sequence[Neighbour]
    wall_s: float

    @property
    def default(self) -> Trial:
        """The profile's settings."""
        return self.trials[0]

    @property
    def cliffs(self) -> list[Neighbour]:
        """Neighbours that are much worse."""
        return [neighbour for neighbour in self.neighbours if neighbour.warnings]

    @property
    def command(self) -> str:
        """To paste."""
        return " ".join(
            [
                "layby serve",
                *([self.model] if self.model else []),
                *(f"{name} {value}".rstrip() for name, value in self.flags),
            ]
        )

    @property
    def verdict(self) -> str:
        """In a sentence or two."""
        now, before = self.outcome, self.default.outcome
        if not now.met:
            first = f"No settings met the SLO; the closest miss it: {'; '.join(now.misses)}."
        elif before.met:
            first = "The SLO is met, as it is with the defaults."
        else:
            first = f"The SLO is met; with the defaults it is not ({'; '.join(before.misses)})."
        if not self.ablations:
            return f"{first} Nothing that was tried is better than the defaults."
        return (
            f"{first} Throughput is {number(now.throughput)} tok/s instead of "
            f"{number(before.throughput)}, the largest share of a limit "
            f"{times(now.excess)} instead of {times(before.excess)}."
        )

    def as_dict(self) -> dict[str, Any]:
        """The result schema, of the recommended settings, with all else under ``tune``.

        The wall time is left out, so that the same search gives the same bytes.
        """
        return dict(self.outcome.figures) | {
            "tune": {
                "trace": self.trace,
                "slo": str(self.slo),
                "seed": self.seed,
                "requests_left_out": self.misfits.count,
                "recommended": {
                    "settings": dict(self.settings),
                    "command": self.command,
                    "excess": self.outcome.as_dict()["excess"],
                    "misses": list(self.outcome.misses),
                },
                "front": [trial.number for trial in self.front],
                "chosen": self.chosen.number,
                "ablations": [_plain(ablation) for ablation in self.ablations],
                "neighbours": [_plain(neighbour) for neighbour in self.neighbours],
                "trials": [trial.as_dict() for trial in self.trials],
            }
        }


def _plain(part: Ablation | Neighbour) -> dict[str, Any]:
    data = {f.name: getattr(part, f.name) for f in fields(part)}
    return data | {"outcome": part.outcome.as_dict()}


def times(excess: float) -> str:
    """A share of the SLO's limits, for people."""
    return "∞" if math.isinf(excess) else f"{number(excess)}×"


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Those to which no other is superior, by falling throughput; of equals the first.

    Throughputs that differ by less than 0.1% are equal.
    """
    front: list[Trial] = []
    order = sorted(trials, key=lambda t: (t.outcome.excess, -t.outcome.throughput, t.number))
    for trial in order:
        if not front or trial.outcome.throughput > front[-1].outcome.throughput * 1.001:
            front.append(trial)
    return front[::-1]


_AS_GOOD: Final = 0.01  # part of the throughput that is given for more room below the limits
_NO_LOSS: Final = 0.005  # part of it that a setting must bring to be worth naming
_NO_ROOM: Final = 0.02  # the same for the excess


def choose(front: Sequence[Trial]) -> Trial:
    """Which of a front to recommend.

    Of those that meet the SLO, or come closest to it if none does: that of the highest throughput,
    or one that takes hardly less and stays further below the limits.
    """
    meeting = [trial for trial in front if trial.outcome.met]
    if not meeting:
        return min(front, key=lambda trial: trial.outcome.excess)
    most = max(trial.outcome.throughput for trial in meeting)
    as_good = [trial for trial in meeting if trial.outcome.throughput >= most * (1 - _AS_GOOD)]
    return min(as_good, key=lambda trial: trial.outcome.excess)


def cliffs_between(here: Outcome, there: Outcome) -> tuple[str, ...]:
    """What is much worse there: throughput, the SLO, or preemptions."""
    found = []
    loss = 1 - there.throughput / here.throughput if here.throughput else 0.0
    if loss > 0.1:
        found.append(f"throughput falls by {loss:.0%}")
    if here.met and not there.met:
        found.append(f"the SLO is missed ({'; '.join(there.misses)})")
    requests = max(1, there.figures["requests_finished"])
    more = there.preemptions - here.preemptions
    if there.preemptions >= 2 * here.preemptions and more >= 0.05 * requests:
        found.append(
            f"preemptions go from {here.preemptions:,} to {there.preemptions:,}: a storm begins"
        )
    return tuple(found)


# --- The search ----------------------------------------------------------------------------------


def tune(
    trace: Trace,
    profile: Profile,
    slo: Slo,
    *,
    fixed: Mapping[str, Any] | None = None,
    trials: int = 64,
    jobs: int = 1,
    seed: int = 0,
    study: Path | None = None,
    search_policy: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Search the settings under which a trace is served best, and explain what is found.

    Args:
        trace: What arrives. Requests that could never be served are left out.
        profile: The machine.
        slo: What is to be met.
        fixed: Scheduler options that are given, and therefore not searched.
        trials: Simulations of the search; the explanation takes some more.
        jobs: Processes. They change how long it takes, nothing else.
        seed: Another one searches elsewhere.
        study: A file that keeps the trials (an Optuna journal). If it is there already, the search
            goes on where it ended.
        search_policy: Search the scheduling policy as well.
        progress: See :data:`Progress`.

    Raises:
        ConfigError: Nothing can be searched, or the file is a study of something else.
        LaybyError: A simulation failed, or the file cannot be used.
    """
    if trials < 1 or jobs < 1:
        raise ConfigError(f"trials and jobs must be at least 1, got {trials} and {jobs}")
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be from 0 to {2**32 - 1}, got {seed}")
    begun = time.perf_counter()
    most_samples = max((request.n for request in trace.requests), default=1)
    space = SearchSpace(profile, fixed, most_samples=most_samples, search_policy=search_policy)
    trace, misfits = leave_out_misfits(trace, space.base)
    bench = Bench(trace, space.profile, slo)
    tell = progress or (lambda what, done, total: None)
    with (
        _opened_study(study, _identity(bench, space, seed)) as opened,
        Laboratory(bench, jobs) as lab,
    ):
        tried = _search(opened, space, lab, trials, seed, tell)
        front = pareto_front(tried)
        chosen = choose(front)
        settings, outcome, ablations = _explain(space, lab, chosen, tell)
        neighbours = _look_around(space, lab, settings, outcome, tell)
    return TuneResult(
        trace=trace.describe(),
        profile=f"{profile.name}: {profile.model} in {profile.dtype}, {profile.kind}",
        model=_model_to_serve(profile),
        slo=slo,
        seed=seed,
        misfits=misfits,
        trials=tried,
        front=front,
        chosen=chosen,
        settings=settings,
        outcome=outcome,
        flags=space.serve_flags(settings),
        ablations=ablations,
        neighbours=neighbours,
        wall_s=time.perf_counter() - begun,
    )


def _search(
    study: Study,
    space: SearchSpace,
    lab: Laboratory,
    trials: int,
    seed: int,
    progress: Progress,
) -> list[Trial]:
    """Trials until there are so many, those of earlier runs included."""
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(
            {name: _to_optuna(space, name, value) for name, value in space.defaults.items()}
        )
    tried = [_from_study(trial) for trial in _of_state(study, "COMPLETE")]
    for trial in tried:
        lab.remember(space.config(trial.settings), trial.outcome)
    progress("trials", len(tried), trials)
    while len(tried) < trials:
        # Asked for in a run that was interrupted, and not told of.
        asked = [_ask(study, space, seed, trial) for trial in _of_state(study, "RUNNING")]
        end = min(trials, (len(tried) // BATCH + 1) * BATCH)
        asked += [_ask(study, space, seed) for _ in range(len(tried) + len(asked), end)]
        outcomes = lab.run([space.config(settings) for _, settings in asked])
        for (told, settings), outcome in zip(asked, outcomes, strict=True):
            told.set_user_attr("found", {"settings": settings, **outcome.as_dict()})
            study.tell(told, [outcome.throughput, min(outcome.excess, _WORST_EXCESS)])
            tried.append(Trial(told.number, settings, outcome))
            progress("trials", len(tried), trials)
    return tried


def _ask(
    study: Study, space: SearchSpace, seed: int, unfinished: FrozenTrial | None = None
) -> tuple[OptunaTrial, dict[str, Value]]:
    """The next trial, or one that an interrupted run has asked for."""
    import numpy as np
    import optuna

    if unfinished is None:
        known = study.get_trials(deepcopy=False)
        order = sum(trial.state is not optuna.trial.TrialState.WAITING for trial in known)
    else:
        order = unfinished.number
    trial_seed = int(np.random.SeedSequence([seed, order]).generate_state(1)[0])
    # Those that run already count as bad ones, so that a batch spreads out.
    with warnings.catch_warnings():  # older versions call these arguments experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(
            seed=trial_seed, multivariate=True, constant_liar=True
        )
    if unfinished is None:
        trial = study.ask()
    else:
        trial = optuna.trial.Trial(study, unfinished._trial_id)
    settings: dict[str, Value] = {}
    for name, rungs in space.rungs.items():
        if isinstance(rungs[0], str):
            settings[name] = str(trial.suggest_categorical(name, rungs))
        else:
            # By place: the values stand about as far apart as they matter.
            settings[name] = rungs[trial.suggest_int(name, 0, len(rungs) - 1)]
    return trial, space.tidy(settings)


def _to_optuna(space: SearchSpace, name: str, value: Value) -> Value:
    return value if isinstance(value, str) else space.rungs[name].index(value)


def _of_state(study: Study, state: str) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name == state]


def _from_study(trial: FrozenTrial) -> Trial:
    found = trial.user_attrs["found"]
    return Trial(trial.number, found["settings"], Outcome.from_dict(found))


def _explain(
    space: SearchSpace, lab: Laboratory, chosen: Trial, progress: Progress
) -> tuple[Settings, Outcome, list[Ablation]]:
    """Reset what buys nothing, then say what each of the others buys.

    "Nothing" is measured against the trial that was chosen, so that many small losses cannot add
    up to a large one.
    """
    settings, outcome = dict(chosen.settings), chosen.outcome
    while True:
        changed = space.changed(settings)
        resets = [space.tidy({**settings, name: space.defaults[name]}) for name in changed]
        # A step's tokens cannot be fewer than its sequences: then there is nothing to reset.
        pairs = [
            (name, reset) for name, reset in zip(changed, resets, strict=True) if reset != settings
        ]
        progress("ablations", 0, len(pairs))
        ablations = []
        outcomes = lab.run([space.config(reset) for _, reset in pairs])
        for (name, reset), found in zip(pairs, outcomes, strict=True):
            ablations.append(Ablation(name, settings[name], reset[name], found))
            progress("ablations", len(ablations), len(pairs))
        harmless = [
            (ablation.outcome.excess, -ablation.outcome.throughput, place)
            for place, ablation in enumerate(ablations)
            if _buys_nothing(chosen.outcome, ablation.outcome)
        ]
        if not harmless:
            return settings, outcome, ablations
        place = min(harmless)[-1]
        settings, outcome = pairs[place][1], ablations[place].outcome


def _buys_nothing(having: Outcome, lacking: Outcome) -> bool:
    return (
        lacking.throughput >= having.throughput * (1 - _NO_LOSS)
        and lacking.excess <= having.excess * (1 + _NO_ROOM)
        and (lacking.met or not having.met)
    )


def _look_around(
    space: SearchSpace,
    lab: Laboratory,
    settings: Settings,
    outcome: Outcome,
    progress: Progress,
) -> list[Neighbour]:
    moves = space.neighbours(settings)
    progress("neighbours", 0, len(moves))
    found = []
    outcomes = lab.run([space.config(moved) for _, moved in moves])
    for (name, moved), there in zip(moves, outcomes, strict=True):
        warnings = cliffs_between(outcome, there)
        found.append(Neighbour(name, settings[name], moved[name], there, warnings))
        progress("neighbours", len(found), len(moves))
    return found


# --- The study's file ----------------------------------------------------------------------------

_STUDY: Final = "layby tune"
_IDENTITY: Final = "searches"
_JOURNAL: Final = b'{"op_code":'  # how its first line begins
_DIRECTIONS: Final[tuple[Literal["maximize"], Literal["minimize"]]] = ("maximize", "minimize")


def _identity(bench: Bench, space: SearchSpace, seed: int) -> dict[str, str]:
    """What a study is of: it can go on only with all of it the same."""
    return {
        "trace": _digest([tuple(_numbers(each)) for each in bench.trace.requests]),
        "profile": _digest(bench.profile.as_dict()),
        "slo": str(bench.slo),
        "settings": _digest([asdict(space.base), space.rungs]),
        "seed": str(seed),
        "version": layby.__version__,
    }


def _numbers(request: object) -> Iterator[object]:
    for each in fields(request):  # type: ignore[arg-type]
        yield getattr(request, each.name)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@contextmanager
def _opened_study(path: Path | None, identity: Mapping[str, str]) -> Iterator[Study]:
    """A study in memory, or in a file which no other process may use meanwhile.

    Raises:
        ConfigError: The file is no study, or one of something else.
        LaybyError: It cannot be used.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if path is None:
        yield optuna.create_study(directions=_DIRECTIONS)
        return
    import fcntl

    try:
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaybyError(f"the study {path} is in use by another run") from None
            yield _load_study(path, identity)
    except OSError as error:
        raise LaybyError(f"cannot use the study {path}: {error.strerror or error}") from error


def _load_study(path: Path, identity: Mapping[str, str]) -> Study:
    import optuna
    from optuna.storages.journal import JournalFileBackend

    with path.open("rb") as file:
        first = file.readline(len(_JOURNAL))
    if first and first != _JOURNAL:  # before anything is appended
        raise ConfigError(f"{path} is not a study that layby tune has written")
    try:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name=_STUDY, directions=_DIRECTIONS, load_if_exists=True
        )
        known = study.user_attrs.get(_IDENTITY)
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(_IDENTITY, dict(identity))
            return study
        differing = [name for name in identity if (known or {}).get(name) != identity[name]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a study that layby tune has written") from None
    if differing:
        raise ConfigError(
            f"the study {path} was begun with {_and(differing)} other than now; "
            "name another file, or remove it to begin anew"
        )
    return study


def _and(words: Sequence[str]) -> str:
    said = {"slo": "an SLO", "settings": "settings"}
    named = [said.get(word, f"a {word}") for word in words]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
