"""Several policies on the same trace, side by side, and what that comes to in one sentence."""

from __future__ import annotations

import difflib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final

from layby.errors import ConfigError, shown
from layby.results import Distribution
from layby.scheduling import SchedulerConfig
from layby.scheduling.policy import POLICIES
from layby.simulate.observations import RequestLog, SimulationReport
from layby.simulate.profiles import Profile
from layby.simulate.settings import scheduler_config
from layby.simulate.simulation import simulate
from layby.simulate.slo import Slo
from layby.simulate.traces import Trace

NEGLIGIBLE: Final = 0.01
"""A figure that differs by less than this part of it does not differ."""

_WORTH_A_PROCESS: Final = 1000
"""Requests from which on a simulation takes longer than to start a process for it."""

_POLL_S: Final = 0.2

Progress = Callable[[int, int], None]
"""Called with requests ended, and requests of the trace, of all runs together."""


def parse_policies(text: str) -> tuple[str, ...]:
    """Read policies to compare, such as ``swapped-first,reserve``.

    Raises:
        ConfigError: One does not exist or is named twice, or there are fewer than two.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in POLICIES:
            near = difflib.get_close_matches(name, POLICIES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(POLICIES)}"
            raise ConfigError(f"there is no policy {shown(name)}; {hint}")
    if len(set(names)) < len(names):
        raise ConfigError(f"policies to compare must differ, got {', '.join(names)}")
    if len(names) < 2:
        raise ConfigError(f"a comparison needs two or more policies, got {names[0]}")
    return names


# --- Running them --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One simulation of a comparison, as it is sent to a process."""

    title: str
    trace: Trace
    profile: Profile
    config: SchedulerConfig
    limits: Mapping[str, float]
    settings: Mapping[str, Any]
    shed_load: bool

    def report(self, progress: Progress | None) -> SimulationReport:
        return simulate(
            self.trace,
            self.profile,
            self.config,
            title=self.title,
            log=RequestLog(slo=self.limits),
            shed_load=self.shed_load,
            settings=self.settings,
            progress=progress,
        )


def compare(
    trace: Trace,
    profile: Profile,
    policies: Sequence[str],
    *,
    options: Mapping[str, Any] | None = None,
    slo: Slo | None = None,
    shed_load: bool = False,
    settings: Mapping[str, Any] | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[SimulationReport]:
    """Simulate each policy; everything else is the same.

    The reports are the same whether or not processes are used, but for ``wall_s``.

    Args:
        trace, profile: As of ``simulate``.
        policies: Names of policies.
        options: As of ``scheduler_config``, without ``scheduling_policy``.
        slo: What goodput is counted against, if anything.
        shed_load, settings: As of ``simulate``.
        processes: Most to use at a time; if None, one for each core that this process may use,
            where the trace is long enough for it to pay.
        progress: Called now and then.

    Returns:
        One report for each policy, in their order; its title is the policy's name.

    Raises:
        ConfigError: As ``scheduler_config``.
        StalledError: As ``simulate``.
    """
    runs = [
        _Run(
            policy,
            trace,
            profile,
            scheduler_config(profile, **dict(options or {}) | {"scheduling_policy": policy}),
            dict(slo.limits) if slo is not None else {},
            dict(settings or {}),
            shed_load,
        )
        for policy in policies
    ]
    if processes is None:
        processes = _num_cores() if len(trace) >= _WORTH_A_PROCESS else 1
    if min(processes, len(runs)) > 1:
        try:
            return _run_apart(runs, min(processes, len(runs)), progress)
        except (OSError, BrokenProcessPool):
            pass  # no processes to be had, or they were killed: it only takes longer without
    return _run_here(runs, progress)


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def _run_here(runs: Sequence[_Run], progress: Progress | None) -> list[SimulationReport]:
    total = sum(len(run.trace) for run in runs)

    def told_from(before: int) -> Progress | None:
        return None if progress is None else lambda ended, _: progress(before + ended, total)

    return [
        run.report(told_from(sum(len(before.trace) for before in runs[:index])))
        for index, run in enumerate(runs)
    ]


def _run_apart(
    runs: Sequence[_Run], processes: int, progress: Progress | None
) -> list[SimulationReport]:
    # Spawned, so that no thread or lock of this process is copied half-way.
    context = multiprocessing.get_context("spawn")
    ended = context.Array("q", len(runs), lock=False)  # each run writes its own number
    total = sum(len(run.trace) for run in runs)
    with ProcessPoolExecutor(processes, context, _begin_process, (ended,)) as pool:
        futures = [pool.submit(_run_in_process, index, run) for index, run in enumerate(runs)]
        try:
            left: set[Future[SimulationReport]] = set(futures)
            while left:
                _, left = wait(left, timeout=_POLL_S)
                if progress is not None:
                    progress(sum(ended), total)
            return [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_ended: Any = None
"""In a process of the pool: how many requests of each run have ended."""


def _begin_process(ended: Any) -> None:
    global _ended  # noqa: PLW0603  # a pool has no other way to hand over shared memory
    _ended = ended
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word


def _run_in_process(index: int, run: _Run) -> SimulationReport:
    def note(ended: int, total: int) -> None:
        _ended[index] = ended

    return run.report(note)


# --- What it comes to ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure that may speak for or against a policy.

    Attributes:
        of: Its value; None if nothing was measured.
        noun: What it is called.
        more, less: Adjectives for more and less of it.
        article: Whether it is one thing ("a 9% longer TTFT") or many ("9% more tokens").
        more_is_better: Whether one wants more of it.
    """

    of: Callable[[SimulationReport], float | None]
    noun: str
    more: str = "longer"
    less: str = "shorter"
    article: bool = True
    more_is_better: bool = False

    def difference(self, own: SimulationReport, other: SimulationReport) -> tuple[str, bool] | None:
        """In words, and whether it is a gain; None if there is none worth a word."""
        mine, theirs = self.of(own), self.of(other)
        if mine is None or theirs is None or abs(mine - theirs) <= NEGLIGIBLE * max(mine, theirs):
            return None
        return self._words(mine, theirs), (mine > theirs) == self.more_is_better

    def _words(self, mine: float, theirs: float) -> str:
        if not mine or not theirs:
            if self.article:
                return f"{'no' if not mine else 'a'} {self.noun}"
            amounts = [f"{amount:,.0f}" if amount else "none" for amount in (mine, theirs)]
            return f"{amounts[0].replace('none', 'no')} {self.noun} instead of {amounts[1]}"
        change = mine / theirs - 1
        if change >= 1:
            factor = f"{mine / theirs:,.0f}" if change >= 9 else f"{mine / theirs:.1f}"
            if self.article:
                return f"a {self.noun} {factor} times as long"
            return f"{factor} times as {'many' if self.noun.endswith('s') else 'much'} {self.noun}"
        percent = abs(change) * 100
        text = "over 99%" if percent >= 99.5 else f"{percent:.0f}%"
        words = f"{text} {self.more if change > 0 else self.less} {self.noun}"
        return f"{_article(text)} {words}" if self.article else words


def _article(text: str) -> str:
    """As the number is spoken: a 7%, an 8%, an 11%, an 80%; an "over 99%"."""
    return "an" if text.startswith(("8", "11%", "18%", "o")) else "a"


def _latency(metric: str, statistic: str) -> Callable[[SimulationReport], float | None]:
    def find(report: SimulationReport) -> float | None:
        distribution: Distribution = getattr(report.result, metric)
        value: float | None = getattr(distribution, statistic)
        return value

    return find


_MANY: Final[Mapping[str, Any]] = {"more": "more", "less": "fewer", "article": False}

_FIGURES: Final = (
    _Figure(
        lambda report: report.result.output_tokens_per_s,
        "throughput",
        more="more",
        less="less",
        article=False,
        more_is_better=True,
    ),
    _Figure(_latency("ttft_s", "p99"), "p99 TTFT"),
    _Figure(_latency("itl_s", "p99"), "p99 ITL"),
    # What a parked request's reader sees; often too few to move a percentile.
    _Figure(_latency("itl_s", "max"), "worst ITL"),
    _Figure(_latency("e2e_s", "mean"), "mean E2E"),
    _Figure(lambda report: report.result.recomputed_tokens, "recomputed tokens", **_MANY),
    _Figure(
        lambda report: sum(tier.out_blocks + tier.in_blocks for tier in report.moves),
        "moved blocks",
        **_MANY,
    ),
    _Figure(
        lambda report: report.result.settings.get("requests_refused"), "refused requests", **_MANY
    ),
    _Figure(
        lambda report: report.goodput.requests_met if report.goodput else None,
        "requests within the SLO",
        more_is_better=True,
        **_MANY,
    ),
)


def sentence(reports: Sequence[SimulationReport], slo: Slo | None = None) -> str:
    """What the first policy gains and loses against each of the others, in one sentence.

    Args:
        reports: Two or more, of the same trace.
        slo: Says, too, which of them keep it.
    """
    first, *others = reports
    told, alike = [], []
    for other in others:
        found = [figure.difference(first, other) for figure in _FIGURES]
        gains = [words for words, gain in filter(None, found) if gain]
        losses = [words for words, gain in filter(None, found) if not gain]
        if not found or not (gains or losses):
            alike.append(other.title)
            continue
        name = _named(other)
        if not losses:
            told.append(f"against {name}, {_listed(gains)}")
        elif not gains:
            told.append(f"against {name}, nothing but losses: {_listed(losses)}")
        else:
            told.append(f"against {name}, {_listed(gains)}, but also {_listed(losses)}")
    if alike:
        told.append(
            f"no difference (less than {NEGLIGIBLE:.0%} in every figure) from {_listed(alike)}"
        )
    text = f"On this trace {first.title} has, {'; '.join(told)}"
    if not told[0].startswith("against"):
        text = text.replace(" has, ", " makes ", 1)
    if not any(_preemptions(report) for report in reports):
        text += "; memory never ran so short that a request was preempted"
    if slo is not None:
        text += f"; {_kept(reports, slo)}"
    return text + "."


def _named(report: SimulationReport) -> str:
    """The policy, with what it could not know on a server.

    Where a trace has answers only, and not what was allowed, ``reserve`` sets apart exactly what
    an answer will take.
    """
    is_told = report.result.settings.get("answer_lengths_known")
    if report.title == "reserve" and is_told:
        return "reserve (which is told here how long each answer will be)"
    return report.title


def _preemptions(report: SimulationReport) -> int:
    return report.result.preemptions.swap + report.result.preemptions.recompute


def _kept(reports: Sequence[SimulationReport], slo: Slo) -> str:
    kept = [report.title for report in reports if slo.excess(report) <= 1]
    if not kept:
        return f"none of them keeps the SLO {slo}"
    if len(kept) == len(reports):
        return f"all of them keep the SLO {slo}"
    return f"only {_listed(kept)} {'keeps' if len(kept) == 1 else 'keep'} the SLO {slo}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
