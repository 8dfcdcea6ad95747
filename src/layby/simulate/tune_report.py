"""What a search found, as tables and a plot: on a page, and the tables on a terminal as well."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from layby.errors import counted
from layby.simulate.laboratory import Outcome
from layby.simulate.page import (
    Axis,
    Cell,
    Chart,
    Curve,
    Fact,
    Page,
    Row,
    Section,
    Table,
    duration,
    number,
    share,
    write_page,
)
from layby.simulate.search_space import written
from layby.simulate.tune_result import Trial, TuneResult, times

_MOST_ROWS: Final = 8  # of the front


def write_tune_report(path: Path, result: TuneResult) -> None:
    """Write the page.

    Raises:
        OSError: The file cannot be written.
    """
    write_page(path, tune_page(result))


def tune_page(result: TuneResult) -> Page:
    """What a search found, as a page."""
    now, before = result.outcome, result.default.outcome
    return Page(
        title=f"Settings for {result.slo}",
        lead=(result.trace, result.profile, *filter(None, [str(result.misfits)]), result.command),
        verdict=result.verdict,
        facts=(
            Fact(
                "Throughput",
                f"{number(now.throughput)} tok/s",
                f"defaults: {number(before.throughput)}",
            ),
            Fact(
                "Largest share of a limit", times(now.excess), f"defaults: {times(before.excess)}"
            ),
            Fact(
                "Within the SLO",
                share(now.goodput_share),
                f"defaults: {share(before.goodput_share)}",
            ),
            Fact("Preemptions", f"{now.preemptions:,}", f"defaults: {before.preemptions:,}"),
        ),
        sections=(
            Section("Recommended settings", tables=[settings_table(result)]),
            Section("What each setting buys", _ABLATION, tables=[ablation_table(result)]),
            Section("Cliffs", _CLIFFS, tables=[cliff_table(result), neighbour_table(result)]),
            Section(
                "Trials",
                "Higher is more throughput, further left is more room: up to 1× the SLO is met.",
                charts=_charts(result.trials, result.front, result.chosen),
                tables=[
                    front_table(result),
                    front_settings_table(result),
                    _trial_table(result.trials),
                ],
            ),
        ),
        footer=f"Layby tune: {counted(len(result.trials), 'trial')}, seed {result.seed}, "
        f"{duration(result.wall_s)}.",
    )


_ABLATION: Final = (
    "The recommended settings with one of them back at its default: what is lost is what it buys. "
    "Settings help one another, so that their parts do not add up to the whole; and a step's "
    "tokens are never fewer than its sequences, whichever of them is reset."
)
_CLIFFS: Final = (
    "Each number a fifth down and a quarter up. A cliff is where throughput falls by more than "
    "10%, the SLO is missed, or preemptions double and touch 5% of the requests more."
)


def settings_table(result: TuneResult) -> Table:
    """Recommended and default, with those shaded that differ."""
    rows = []
    for name, value in result.settings.items():
        default = result.default.settings[name]
        cells = (Cell(written(value)), Cell(written(default)))
        rows.append(Row(_flag(name), cells, differs=value != default))
    return Table("What was searched, changes shaded", ["", "recommended", "default"], rows)


def front_settings_table(result: TuneResult) -> Table:
    """What the trials of :func:`front_table` were."""
    defaults = result.default.settings
    rows = []
    for trial in _shown_front(result):
        changed = [
            f"{_flag(name)} {written(value)}"
            for name, value in trial.settings.items()
            if value != defaults[name]
        ]
        rows.append(Row.of(f"{trial.number}", [", ".join(changed) or "defaults"]))
    return Table(
        "Settings of the front, where they are not defaults", ["trial", ""], rows, words=True
    )


def front_table(result: TuneResult) -> Table:
    """The best that was found for every share of the limits."""
    terms = result.slo.terms
    columns = ["trial", "tok/s", "of the limit", *(term.name for term in terms)]
    columns += ["within SLO", "preemptions"]
    rows = []
    for trial in _shown_front(result):
        outcome = trial.outcome
        texts = [number(outcome.throughput), times(outcome.excess)]
        texts += [duration(outcome.latency_s(term.metric, term.statistic)) for term in terms]
        texts += [share(outcome.goodput_share), f"{outcome.preemptions:,}"]
        cells = [Cell(text, best=trial is result.chosen and not i) for i, text in enumerate(texts)]
        rows.append(Row(f"{trial.number}", cells))
    caption = "Pareto front: more throughput, or less of the limits; ★ chosen"
    return Table(caption, columns, rows)


def _shown_front(result: TuneResult) -> list[Trial]:
    """An even choice of the front, with both ends and the chosen one."""
    last = len(result.front) - 1
    places = {round(i * last / (_MOST_ROWS - 1)) for i in range(_MOST_ROWS)}
    return [
        trial
        for place, trial in enumerate(result.front)
        if place in places or trial is result.chosen
    ]


def ablation_table(result: TuneResult) -> Table:
    """What each changed setting bought."""
    rows = [
        Row.of(
            f"{_flag(each.option)} {written(each.value)}",
            [written(each.default), *_differences(result.outcome, each.outcome)],
        )
        for each in result.ablations
    ]
    columns = ["without", "back at", "throughput", "of the limit", "preemptions"]
    return Table(
        "What is lost without it" if rows else "Nothing is better than the defaults", columns, rows
    )


def cliff_table(result: TuneResult) -> Table:
    """The warnings."""
    rows = [
        Row.of(
            f"{_flag(each.option)} {written(each.value)}",
            [f"at {written(each.moved)} {'; '.join(each.warnings)}"],
        )
        for each in result.cliffs
    ]
    caption = "The recommended settings stand next to" if rows else "No cliff is near"
    return Table(caption, ["setting", "cliff"], rows, words=True)


def neighbour_table(result: TuneResult) -> Table:
    """Every number moved."""
    rows = [
        Row.of(
            f"{_flag(each.option)} {written(each.value)}",
            [written(each.moved), *_differences(result.outcome, each.outcome)],
        )
        for each in result.neighbours
    ]
    columns = ["setting", "moved to", "throughput", "of the limit", "preemptions"]
    return Table("Each number moved", columns, rows, folded=True)


def _trial_table(trials: Sequence[Trial]) -> Table:
    names = list(trials[0].settings)
    rows = [
        Row.of(
            f"{trial.number}",
            [
                number(trial.outcome.throughput),
                times(trial.outcome.excess),
                *(written(trial.settings[name]) for name in names),
            ],
        )
        for trial in trials
    ]
    columns = ["trial", "tok/s", "of the limit", *map(_flag, names)]
    return Table("All trials as a table", columns, rows, folded=True)


def _charts(trials: Sequence[Trial], front: Sequence[Trial], chosen: Trial) -> list[Chart]:
    """Throughput over the share of the limits; nothing if no trial has a finite one."""
    shown = [trial for trial in trials if 0 < trial.outcome.excess < float("inf")]
    if not shown:
        return []
    on_front = [trial for trial in shown if trial in front]
    marked = [trial for trial in on_front if trial is not chosen]
    others = [trial for trial in shown if trial not in front and trial.number]
    first = [trial for trial in shown if not trial.number]
    curves = [
        _points("trials", "c5", others),
        _points("Pareto front", "c0", marked),
        _points("defaults", "c1", first),
        _points("chosen", "c2", [trial for trial in on_front if trial is chosen]),
    ]
    line = sorted(on_front, key=lambda trial: trial.outcome.excess)
    if len(line) > 1:
        curves.append(
            Curve(
                "front",
                "c0",
                [trial.outcome.excess for trial in line],
                [trial.outcome.throughput for trial in line],
            )
        )
    return [
        Chart(
            "Throughput against the SLO",
            f"{len(shown)} trials; {len(on_front)} on the Pareto front, from "
            f"{number(line[0].outcome.throughput)} tok/s at {times(line[0].outcome.excess)} of the "
            f"limit to {number(line[-1].outcome.throughput)} at {times(line[-1].outcome.excess)}."
            if line
            else f"{len(shown)} trials.",
            Axis("largest share of a limit", "number", log=True),
            Axis("output tokens per second", "number"),
            [curve for curve in curves if curve.x],
            height=340,
        )
    ]


def _points(name: str, color: str, trials: Sequence[Trial]) -> Curve:
    return Curve(
        name,
        color,
        [trial.outcome.excess for trial in trials],
        [trial.outcome.throughput for trial in trials],
        kind="points",
        labels=[
            f"trial {trial.number}: "
            + ", ".join(f"{_flag(key)} {written(value)}" for key, value in trial.settings.items())
            for trial in trials
        ],
    )


def _differences(here: Outcome, there: Outcome) -> list[str]:
    """Throughput, excess and preemptions there, the first as a difference too."""
    change = there.throughput / here.throughput - 1 if here.throughput else 0.0
    signed = f"{change:+.1%}".replace("-", "−")
    return [
        f"{number(there.throughput)} ({signed})",
        f"{times(here.excess)} → {times(there.excess)}",
        f"{here.preemptions:,} → {there.preemptions:,}",
    ]


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
