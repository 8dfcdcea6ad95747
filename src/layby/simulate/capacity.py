"""How much a server can take: the highest request rate that meets an SLO, and replicas for a rate.

    found = capacity(trace, profile, config, slo)
    print(found.rate, replicas(found, rate=100).count)

A rate is made by playing the trace faster or slower. It counts as met if three things hold:

1. The SLO is met over all requests.
2. The last quarter of them, taken alone, meet its terms on TTFT, E2E and queueing as well. In an
   overload everybody waits longer than who came before, and a mean or median over the whole would
   hide that for a while.
3. It is at most the **saturated rate**: what the server finishes per second while it never lacks
   work. A queue that grows without end can still look well in a short trace, or under an SLO that
   says nothing of waiting (ITL alone); no rate above the saturated one lasts, whatever is promised.

For the same reason a short trace is played several times on end, up to ``MIN_REQUESTS`` requests
and ``MIN_TURNS`` times what can run at once. Prompts are shared within one playing, not from one to
the next. So the answer is about traffic that goes on as in the trace; and where the trace has its
peak at its end, rule 2 takes that for the beginning of an overload.

That a higher rate is never easier is taken for granted. The search halves the logarithm between a
rate that is met and one that is not until they are within ``TOLERANCE``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from layby.errors import ConfigError
from layby.results import Distribution
from layby.scheduling import SchedulerConfig
from layby.simulate.laboratory import Misfits, leave_out_misfits
from layby.simulate.observations import RequestLog, RequestRecord, SimulationReport
from layby.simulate.profiles import Profile
from layby.simulate.settings import with_block_size
from layby.simulate.simulation import simulate
from layby.simulate.slo import Slo, SloTerm
from layby.simulate.traces import Trace

TOLERANCE: Final = 0.02
"""How far the rate that is found may be below one that is not met, as a part of it."""

MIN_REQUESTS: Final = 1000
"""Requests of a simulation, at least."""

MIN_TURNS: Final = 4
"""The same in multiples of ``max_num_seqs``: so often every place is taken anew."""

_MAX_QUEUED_TOKENS: Final = 10_000_000  # of prompts that wait at a time: 80 MB
_SLOWEST: Final = 1 / 4096  # of the saturated rate; who is served alone gains nothing beyond

Progress = Callable[[str], None]
"""Called with what is about to be simulated."""


def natural_rate(trace: Trace) -> float:
    """Requests per second of a trace, if it is played on end.

    Raises:
        ConfigError: It has none: all come at once.
    """
    return len(trace) / _period_s(trace)


def _period_s(trace: Trace) -> float:
    """From the first arrival to that of the next playing, which comes a mean gap after the last.

    A gap is between arrivals at different times: what comes in pairs goes on in pairs.
    """
    if trace.duration_s <= 0:
        raise ConfigError(
            f"{trace.name} has no request rate: its {len(trace):,} requests all come at once"
        )
    moments = len({each.arrival_s for each in trace.requests})
    return trace.duration_s * moments / (moments - 1)


def played(trace: Trace, rate: float, count: int, *, every: int = 1) -> Trace:
    """Requests of a trace that is played on end at some rate.

    A prefix is shared with requests of the same playing only.

    Args:
        trace: At least two requests, not all at once.
        rate: Requests per second, those left out included; infinite: all at once.
        count: How many requests are kept.
        every: Keep one of so many, as each of so many replicas gets them in turn.
    """
    pace = natural_rate(trace) / rate
    period_s = _period_s(trace)
    ids = 1 + max((max(each.prefix) for each in trace.requests if each.prefix), default=0)
    requests = []
    for index in range(0, count * every, every):
        playing, place = divmod(index, len(trace))
        request = trace.requests[place]
        requests.append(
            replace(
                request,
                arrival_s=(request.arrival_s + playing * period_s) * pace,
                prefix=tuple(each + playing * ids for each in request.prefix)
                if playing
                else request.prefix,
                request_id=None,  # would come again
            )
        )
    return Trace(trace.name, requests)


class _Lives(RequestLog):
    """Keeps of each request when it came, began and ended."""

    def __init__(self, slo: Slo) -> None:
        super().__init__(slo=slo.limits, max_records=0)
        self.ended: list[RequestRecord] = []

    def finish(self, record: RequestRecord, time_s: float, num_output_tokens: int) -> None:
        super().finish(record, time_s, num_output_tokens)
        record.spans.clear()  # nobody reads them, and there are many
        self.ended.append(record)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One rate that was simulated.

    Attributes:
        rate: Requests per second.
        met: Whether it is met, by the rules above.
        excess: See ``Slo.excess``.
        why: A sentence for each reason why not.
        report: The simulation.
    """

    rate: float
    met: bool
    excess: float
    why: tuple[str, ...]
    report: SimulationReport

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "rate": self.rate,
            "met": self.met,
            "excess": self.excess if math.isfinite(self.excess) else None,
            "why": list(self.why),
        }


@dataclass(frozen=True, slots=True)
class Capacity:
    """The highest rate that is met.

    Attributes:
        trace: What is played, without the requests that could never be served.
        profile, config, slo: The rest of what it is true of.
        misfits: Requests left out.
        num_requests: Length of the simulations, in requests.
        saturated_rate: Requests per second that are finished while there is never a lack of them.
        best: The simulation at the highest rate.
        attempts: All rates tried, in the order of trying.
    """

    trace: Trace
    profile: Profile
    config: SchedulerConfig
    slo: Slo
    misfits: Misfits
    num_requests: int
    saturated_rate: float
    best: Attempt
    attempts: Sequence[Attempt]

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.best.rate

    @property
    def limit(self) -> str:
        """Why not more, in a sentence without its full stop."""
        above = [each for each in self.attempts if each.rate > self.rate]
        if not above:
            return "more than that is never finished, whatever is promised"
        next_above = min(above, key=lambda each: each.rate)
        return f"at {next_above.rate:.4g} per second {'; '.join(next_above.why)}"

    def as_dict(self) -> dict[str, Any]:
        """The result schema at the highest rate, with all else under ``capacity``."""
        figures = self.best.report.as_dict()
        return figures | {
            "capacity": {
                "requests_per_s": self.rate,
                "output_tokens_per_s": self.best.report.result.output_tokens_per_s,
                "saturated_requests_per_s": self.saturated_rate,
                "limit": self.limit,
                "slo": str(self.slo),
                "requests_simulated": self.num_requests,
                "requests_left_out": self.misfits.count,
                "attempts": [attempt.as_dict() for attempt in self.attempts],
            }
        }


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many servers a rate needs, if each gets its turn.

    Attributes:
        rate: Requests per second of all together.
        count: How many servers.
        confirmed: One of them, simulated with its part of the trace.
    """

    rate: float
    count: int
    confirmed: Attempt

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "requests_per_s": self.rate,
            "count": self.count,
            "one_of_them": self.confirmed.as_dict(),
        }


def capacity(
    trace: Trace,
    profile: Profile,
    config: SchedulerConfig,
    slo: Slo,
    *,
    progress: Progress | None = None,
) -> Capacity:
    """Find the highest rate at which a server meets the SLO.

    Args:
        trace: What arrives; its own rate does not matter. Requests that could never be served are
            left out.
        profile: The machine.
        config: The scheduler's settings.
        slo: What is to be met.
        progress: See :data:`Progress`.

    Raises:
        ConfigError: All requests come at once, none can be served, or the SLO is missed even by
            requests that are served alone.
    """
    profile = with_block_size(profile, config.block_size)
    trace, misfits = leave_out_misfits(trace, config)
    natural_rate(trace)  # has one
    count = max(len(trace), MIN_REQUESTS, MIN_TURNS * config.max_num_seqs)
    tell = progress or (lambda what: None)
    tell("never a lack of requests")
    saturated = saturated_rate(trace, profile, config, count)
    attempts: list[Attempt] = []

    def attempt(rate: float) -> Attempt:
        tell(f"{rate:.4g} requests per second")
        attempts.append(try_rate(played(trace, rate, count), rate, profile, config, slo))
        return attempts[-1]

    best = attempt(saturated)
    missed = saturated
    step = 2.0
    while not best.met:
        if missed <= saturated * _SLOWEST:
            raise ConfigError(
                f"the SLO {slo} is missed at any rate: even at {missed:.3g} requests per second "
                f"{'; '.join(best.why)}"
            )
        best = attempt(missed / step)
        if not best.met:
            missed = best.rate
            step *= 2  # the further down, the longer the strides
    while best.rate < missed and best.rate * (1 + TOLERANCE) < missed:
        between = attempt(math.sqrt(best.rate * missed))
        if between.met:
            best = between
        else:
            missed = between.rate
    return Capacity(
        trace=trace,
        profile=profile,
        config=config,
        slo=slo,
        misfits=misfits,
        num_requests=count,
        saturated_rate=saturated,
        best=best,
        attempts=attempts,
    )


def replicas(found: Capacity, rate: float, *, progress: Progress | None = None) -> Replicas:
    """How many servers a rate needs.

    The load is taken to be balanced evenly, by number: server ``i`` of ``k`` gets requests ``i``,
    ``i + k``, ``i + 2 k`` and so on, and shares no prefix cache with the others. One of them is
    simulated with just its part; if that misses the SLO, there must be more.

    Args:
        found: What one server can take.
        rate: Requests per second.
        progress: See :data:`Progress`.

    Raises:
        ConfigError: The rate is no positive number, or no number of servers is enough.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"rate must be a positive finite number, got {rate!r}")
    tell = progress or (lambda what: None)
    first = max(1, math.ceil(rate / found.rate * (1 - 1e-9)))
    for count in _rising(first):
        tell(f"one of {count} replicas")
        part = played(found.trace, rate, found.num_requests, every=count)
        one = try_rate(part, rate / count, found.profile, found.config, found.slo)
        if one.met:
            return Replicas(rate, count, one)
    raise ConfigError(
        f"{count} replicas are not enough for {rate:g} requests per second: {'; '.join(one.why)}"
    )


def _rising(first: int) -> Sequence[int]:
    """Numbers of servers to try: to twice the first, in steps of a twentieth."""
    return range(first, 2 * first + 1, max(1, first // 20))


def saturated_rate(trace: Trace, profile: Profile, config: SchedulerConfig, count: int) -> float:
    """Requests per second that a server finishes while it never lacks work.

    All of them are there from the beginning. What is finished until the last one is let in counts;
    after that the server runs empty, which says nothing of a longer time.
    """
    tokens = sum(each.num_prompt_tokens for each in trace.requests) / len(trace)
    least = MIN_TURNS * config.max_num_seqs
    count = max(min(count, int(_MAX_QUEUED_TOKENS / tokens)), least)
    lives = _Lives(Slo((SloTerm("e2e_s", "max", 1.0),)))  # an SLO of any kind
    simulate(played(trace, math.inf, count), profile, replace(config, max_queue=None), log=lives)
    starts = [record.first_scheduled_s or 0.0 for record in lives.ended]
    ends = [record.finish_s or 0.0 for record in lives.ended]
    last_start = max(starts)
    before = sum(end <= last_start for end in ends)
    if before < count / 2:  # nearly all ran at once: the trace's end is all there is
        return count / max(ends)
    return before / last_start


def try_rate(
    trace: Trace, rate: float, profile: Profile, config: SchedulerConfig, slo: Slo
) -> Attempt:
    """Simulate a trace of some rate, and judge it by rules 1 and 2 of this module."""
    lives = _Lives(slo)
    report = simulate(trace, profile, config, log=lives)
    excess, why = slo.excess(report), list(slo.misses(report))
    if not why:
        last = sorted(lives.ended, key=lambda record: record.index)[-(len(lives.ended) // 4) :]
        why = _late_misses(slo, last)
    return Attempt(rate, not why, excess, tuple(why), report)


def _late_misses(slo: Slo, last: Sequence[RequestRecord]) -> list[str]:
    misses = []
    for term in slo.terms:
        if term.metric == "itl_s":  # has no queue in it
            continue
        values = [getattr(record, term.metric) for record in last]
        value = getattr(Distribution.of(v for v in values if v is not None), term.statistic)
        if value is not None and value > term.limit_s:
            misses.append(
                f"the queue grows: {term.name} of the last quarter is {value:.3g} s, "
                f"over the limit of {term.limit_s:g} s"
            )
    return misses
