"""``layby tune``: search the scheduler's settings on a virtual clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from layby.cli.flags import takes
from layby.cli.simulate import (
    ArrivalTexts,
    LengthScale,
    MaxRequests,
    ProfileName,
    RateScale,
    ResizeText,
    TraceFile,
    load_trace,
    scheduler_flags,
)
from layby.cli.terminal import (
    HtmlTarget,
    JsonTarget,
    check_apart,
    check_target,
    log_to_stderr,
    progress_bar,
    table_console,
    write_json,
)
from layby.errors import LaybyError, counted

if TYPE_CHECKING:
    from rich.console import Console

    from layby.simulate.page import Table
    from layby.simulate.tune_result import TuneResult

SloText = Annotated[
    str,
    typer.Option(
        metavar="TEXT",
        help="What is to be met, such as ttft_p99<2s,itl_p99<200ms: metrics ttft, itl, e2e, "
        "queueing; mean, p50, p90, p99, max.",
    ),
]

_FLAGS = scheduler_flags(without=("max_queue",))


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler options that have a value other than their flags' defaults."""
    defaults = {flag.name: flag.default for flag in _FLAGS.parameters}
    return {name: value for name, value in options.items() if value != defaults[name]}


@takes(options=_FLAGS)
def tune(
    *,
    profile: ProfileName,
    slo: SloText,
    trace: TraceFile = None,
    arrivals: ArrivalTexts = None,
    rate_scale: RateScale = 1.0,
    length_scale: LengthScale = 1.0,
    max_requests: MaxRequests = None,
    resize: ResizeText = None,
    trials: Annotated[
        int, typer.Option(min=1, help="Settings to try; explaining takes some more. (simulations)")
    ] = 64,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Simulate so many at a time; it changes nothing but the time it takes.",
            show_default="all cores",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Fixes the search, and what --arrivals draw.")
    ] = 0,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Keep the trials here (an Optuna journal), and go on with those that are there.",
            show_default="none",
            callback=check_target,
        ),
    ] = None,
    search_policy: Annotated[
        bool, typer.Option("--search-policy", help="Search --scheduling-policy as well.")
    ] = False,
    json: JsonTarget = None,
    html: HtmlTarget = None,
    options: Mapping[str, Any],
) -> None:
    """Search the settings under which a server answers this traffic best, on a virtual clock.

    Searched are --max-num-seqs, --max-num-batched-tokens, --headroom, --preemption-mode
    and --swap-gib, and with several classes of requests --urgent-window,
    --background-tokens, --preemption-threshold, --priority-aging and --demote-after-tokens, for
    throughput and for the SLO; each of them that is set to other than its default is held there.
    The queue has no limit, and no load is shed. The same seed gives the same result. Exit status is
    1 if nothing that was tried meets the SLO.
    """
    from layby.simulate.profiles import load_profile
    from layby.simulate.slo import parse_slo
    from layby.simulate.tune_report import write_tune_report
    from layby.simulate.tuner import tune as search

    log_to_stderr()
    check_apart(json=json, html=html, study=study)
    promised = parse_slo(slo)
    machine = load_profile(profile)
    played = load_trace(
        trace,
        arrivals,
        rate_scale=rate_scale,
        length_scale=length_scale,
        max_requests=max_requests,
        seed=seed,
        resize=resize,
    )
    with progress_bar("trials") as progress:
        result = search(
            played,
            machine,
            promised,
            fixed=given(options),
            trials=trials,
            jobs=jobs or len(os.sched_getaffinity(0)),
            seed=seed,
            study=None if study is None else Path(study),
            search_policy=search_policy,
            progress=progress,
        )
    show_tuning(result, table_console(json))
    if html is not None:
        try:
            write_tune_report(Path(html), result)
        except OSError as error:
            raise LaybyError(f"cannot write {html}: {error.strerror or error}") from error
    if json is not None:
        write_json(json, result.as_dict())
    if not result.outcome.met:
        raise LaybyError(
            f"the SLO {promised} was met by none of {counted(len(result.trials), 'trial')}: "
            f"{'; '.join(result.outcome.misses)}"
        )


def show_tuning(result: TuneResult, console: Console) -> None:
    """Print what a search found, the command to paste last."""
    from layby.simulate.tune_report import (
        ablation_table,
        cliff_table,
        front_settings_table,
        front_table,
        settings_table,
    )

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    say(
        f"{result.trace}\n{result.profile}\n{counted(len(result.trials), 'trial')} for {result.slo}"
    )
    if result.misfits.count:
        say(str(result.misfits))
    for table in (
        front_table,
        front_settings_table,
        settings_table,
        ablation_table,
        cliff_table,
    ):
        show_table(table(result), console)
    say(f"{result.verdict}\nWhat layby serve sets so by itself needs no flag:\n")
    say(result.command)


def show_table(table: Table, console: Console) -> None:
    """Print a table of a report."""
    from rich.table import Table as RichTable
    from rich.text import Text

    if not table.rows:
        console.print(f"{table.caption}.", markup=False)
        return
    printed = RichTable(title=Text(table.caption), title_justify="left")
    justify: Literal["left", "right"]
    for place, column in enumerate(table.columns):
        justify = "left" if table.words or not place else "right"
        printed.add_column(Text(column), justify=justify, overflow="fold")
    for row in table.rows:
        cells = (
            f"{'★ ' if cell.best else ''}{cell.text} {cell.note}".rstrip() for cell in row.cells
        )
        printed.add_row(Text(row.name), *map(Text, cells))
    console.print(printed)
