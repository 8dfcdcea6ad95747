"""``layby capacity``: the highest request rate that meets an SLO, and replicas for a rate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layby.cli.flags import takes
from layby.cli.simulate import (
    ArrivalTexts,
    LengthScale,
    MaxRequests,
    ProfileName,
    Seed,
    TraceFile,
    load_trace,
    scheduler_flags,
)
from layby.cli.terminal import JsonTarget, log_to_stderr, table_console, write_json
from layby.cli.tune import SloText
from layby.errors import ConfigError, counted

if TYPE_CHECKING:
    from rich.console import Console

    from layby.simulate.capacity import Capacity, Replicas

_MAX_RATE = 1e9
"""Requests per second; more is a slip of the finger."""


@takes(options=scheduler_flags())
def capacity(
    *,
    profile: ProfileName,
    slo: SloText,
    trace: TraceFile = None,
    arrivals: ArrivalTexts = None,
    length_scale: LengthScale = 1.0,
    max_requests: MaxRequests = None,
    seed: Seed = 0,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Say how many servers this rate needs. (requests/s)", show_default="none"
        ),
    ] = None,
    json: JsonTarget = None,
    options: Mapping[str, Any],
) -> None:
    """Find the highest request rate at which a server meets the SLO, on a virtual clock.

    The traffic is played faster and slower, several times on end if it is short, until the rate is
    known to 2%. No rate counts that the server could not keep up for ever. With --rate, the load is
    taken to be balanced evenly over the servers: each gets a request in turn. No load is shed, and
    the pool keeps its size.
    """
    from layby.simulate.capacity import capacity as find
    from layby.simulate.capacity import replicas
    from layby.simulate.profiles import load_profile
    from layby.simulate.settings import scheduler_config
    from layby.simulate.slo import parse_slo

    log_to_stderr()
    promised = parse_slo(slo)
    if rate is not None and not 0 < rate <= _MAX_RATE:
        raise ConfigError(f"rate must be above 0 and at most {_MAX_RATE:g}, got {rate:g}")
    machine = load_profile(profile)
    config = scheduler_config(machine, **options)
    played = load_trace(
        trace, arrivals, length_scale=length_scale, max_requests=max_requests, seed=seed
    )
    with _status() as progress:
        found = find(played, machine, config, promised, progress=progress)
        needed = None if rate is None else replicas(found, rate, progress=progress)
    _show_capacity(found, needed, table_console(json))
    if json is not None:
        result = found.as_dict()
        result["capacity"]["replicas"] = None if needed is None else needed.as_dict()
        write_json(json, result)


def _show_capacity(found: Capacity, needed: Replicas | None, console: Console) -> None:
    from rich.table import Table

    from layby.simulate.page import duration, share
    from layby.simulate.tune_result import times

    def say(text: str) -> None:
        console.print(text, soft_wrap=True, markup=False)

    say(f"{found.trace.describe()}\n{found.best.report.profile}\nSLO {found.slo}")
    if found.misfits.count:
        say(str(found.misfits))
    table = Table(title="Rates tried", title_justify="left")
    for name in ("requests/s", "SLO", "of the limit", *(term.name for term in found.slo.terms)):
        table.add_column(name, justify="left" if name == "SLO" else "right")
    for attempt in sorted(found.attempts, key=lambda each: each.rate):
        values = (duration(term.value_s(attempt.report)) for term in found.slo.terms)
        is_best = "★ " if attempt is found.best else ""
        met = "met" if attempt.met else "missed"
        table.add_row(f"{is_best}{attempt.rate:.4g}", met, times(attempt.excess), *values)
    console.print(table)
    result = found.best.report.result
    say(
        f"One server takes {found.rate:.4g} requests per second "
        f"({result.output_tokens_per_s:,.0f} output tokens per second), "
        f"{share(found.rate / found.saturated_rate)} of what it can finish: {found.limit}."
    )
    if needed is not None:
        say(
            f"{needed.rate:g} requests per second need {counted(needed.count, 'server')}, with the "
            f"load balanced evenly: one of them, simulated with its part at "
            f"{needed.rate / needed.count:.4g} per second, takes "
            f"{times(needed.confirmed.excess)} of the limit."
        )


@contextmanager
def _status() -> Iterator[Callable[[str], None] | None]:
    """What is being simulated, on a terminal; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda what: status.update(f"Simulating {what}")
