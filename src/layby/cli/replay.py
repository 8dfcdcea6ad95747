"""``layby replay``: read a server's recording, and prove that it decides the same again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layby.cli.terminal import (
    JsonTarget,
    log_to_stderr,
    printable,
    progress_bar,
    table_console,
    write_json,
)
from layby.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

    from layby.simulate.preemptions import Preemption
    from layby.simulate.recordings import Check, ReplayReport

EXIT_DIFFERENT = 1


def replay(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Recording of layby serve --record. Of one in several files those to be read, "
            "the oldest first: FILE.2 FILE.1 FILE.",
            show_default=False,
        ),
    ],
    *,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Lead a scheduler through the recording and compare every decision; exit with "
            f"{EXIT_DIFFERENT} at the first that differs.",
        ),
    ] = False,
    preemptions: Annotated[
        bool,
        typer.Option(
            "--preemptions",
            help="List who had to leave the device, by which way, and what either way was "
            "expected to cost.",
        ),
    ] = False,
    json: JsonTarget = None,
) -> None:
    """Tell what happened in a recording, and check that the scheduler decides the same again."""
    from layby.simulate.preemptions import read_preemptions
    from layby.simulate.recordings import replay_recording

    log_to_stderr()
    total = sum(file.stat().st_size for file in files if file.is_file())
    with progress_bar("Reading", counts_bytes=True) as tell:
        advance = None if tell is None else lambda done: tell("Reading", done, total)
        report = replay_recording(files, check=check, progress=advance)
    console = table_console(json)
    show_report(report, console)
    result = report.as_dict()
    if preemptions:
        found = list(read_preemptions(files))
        result["preemptions"] = [asdict(each) for each in found]
        for each in found:
            console.print(_in_a_line(each), markup=False, soft_wrap=True)
    if json is not None:
        write_json(json, result)
    if report.check is not None and report.check.difference is not None:
        raise typer.Exit(EXIT_DIFFERENT)


def show_report(report: ReplayReport, console: Console) -> None:
    """Print what a recording told."""
    from rich.table import Table

    head, config, summary = report.head, report.config, report.summary
    table = Table(show_header=False, title="Recording", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right", overflow="fold")
    pools = f"{counted(config.num_blocks, 'block')} and {config.num_swap_blocks} to swap"
    for label, fact in (
        ("recorded by", f"Layby {printable(head.version)}, {printable(head.model)}"),
        ("policy", f"{config.policy}, preemption by {config.preemption_mode}"),
        ("pools", f"{pools}, of {counted(config.block_size, 'token')}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("requests", f"{summary.arrived}"),
        ("  refused", f"{summary.refused}"),
        ("  finished", f"{summary.finished}"),
        ("  aborted", f"{summary.aborted}"),
        ("  failed", f"{summary.failed}"),
        ("prompt tokens", f"{summary.prompt_tokens}"),
        ("output tokens", f"{summary.output_tokens}"),
        ("steps", f"{summary.steps}, {summary.quiet_steps} of them without a decision"),
        ("admitted, resumed", f"{summary.admitted}, {summary.resumed}"),
        ("preempted by swap", f"{summary.preempted_swap}"),
        ("preempted by recompute", f"{summary.preempted_recompute}"),
        ("blocks swapped out, in", f"{summary.swapped_out_blocks}, {summary.swapped_in_blocks}"),
        ("blocks to disk, back", f"{summary.demoted_blocks}, {summary.promoted_blocks}"),
        ("parked work lost", f"{summary.lost}"),
        ("time parked", f"{summary.swapped_s:.2f} s, all requests together"),
        ("put into another class", f"{summary.reclassed}"),
        ("pool resized", counted(summary.resized, "time")),
    ):
        table.add_row(label, fact)
    console.print(table)
    for remark in _remarks(report):
        console.print(remark, markup=False, soft_wrap=True)
    if report.check is not None:
        _show_check(report.check, console)


def _in_a_line(preemption: Preemption) -> str:
    who = f"request {preemption.request} leaves by {printable(preemption.mode)}"
    when = f"{preemption.time_s:.3f} s, step {preemption.step}"
    weighed = preemption.weighing
    if weighed is None:
        why = f": {preemption.why_not}" if preemption.why_not else ""
        return f"{when}: {who}; the ways out were not compared{why}"
    moves = f"{counted(weighed.blocks_out, 'block')} out, {weighed.blocks_in} back"
    return (
        f"{when}: {who}; swap {1e3 * weighed.swap_s:.2f} ms ({moves}), "
        f"recompute {1e3 * weighed.recompute_s:.2f} ms ({counted(weighed.tokens, 'token')})"
    )


def _remarks(report: ReplayReport) -> Iterator[str]:
    if report.is_cut_off:
        yield "The last line is incomplete and was left out."
    if report.broken is not None:
        yield f"The scheduler raised {printable(report.broken)}; what followed was not checked."
    elif not report.is_closed and (report.check is None or report.check.difference is None):
        yield "The recording has no end: the engine still runs, was killed, or goes on in a file."


def _show_check(check: Check, console: Console) -> None:
    steps, decisions = counted(check.steps, "step"), counted(check.decisions, "decision")
    if check.unchecked_steps:
        console.print(
            f"{counted(check.unchecked_steps, 'step')} could not be checked: they follow a gap.",
            soft_wrap=True,
        )
    found = check.difference
    if found is None:
        console.print(f"Checked {steps} with {decisions}: all the same.", soft_wrap=True)
        return
    console.print(f"Checked {steps} with {decisions}: DIFFERENT", soft_wrap=True)
    where = f"  step {found.step}, line {found.line} of {found.path}: {found.what}"
    for line in (where, f"  recorded: {found.recorded}", f"  replayed: {found.replayed}"):
        console.print(printable(line), markup=False, soft_wrap=True)
