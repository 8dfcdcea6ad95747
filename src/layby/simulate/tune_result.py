"""What a search of the settings found: trials, their front, what each setting bought; cliffs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from layby.simulate.laboratory import Misfits, Outcome
from layby.simulate.page import number
from layby.simulate.search_space import Settings, Value
from layby.simulate.slo import Slo


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
