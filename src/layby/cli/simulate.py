"""``layby simulate``: play a trace on a virtual clock."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, get_type_hints

import typer

from layby.cli.flags import FlagGroup, _flag, takes
from layby.cli.terminal import (
    STDOUT,
    HtmlTarget,
    JsonTarget,
    check_apart,
    check_stream,
    log_to_stderr,
    progress_bar,
    table_console,
    write_json,
)
from layby.engine import EngineConfig
from layby.errors import ConfigError, LaybyError, counted
from layby.simulate.profiles import BUILT_IN
from layby.simulate.settings import SCHEDULER_OPTIONS

if TYPE_CHECKING:
    from rich.console import Console

    from layby.simulate.observations import SimulationReport
    from layby.simulate.resizes import PoolResize
    from layby.simulate.traces import Trace

_SIZES_SHOWN = 6

_OF_PROFILE = {
    "block_size": "that of the profile, in which blocks cost what their tokens do",
    "num_blocks": "the profile's",
    "swap_gib": "the profile's; the RAM is not limited",
    "swap_disk_gib": "no disk",
    "max_model_len": "the profile's",
    "max_num_seqs": "the profile's",
    "max_num_batched_tokens": "the profile's",
}
"""Settings that a profile brings, and how the help says so."""


def scheduler_flags(*, without: Sequence[str] = ()) -> FlagGroup:
    """The scheduler's flags of ``layby serve``; they make the options of ``scheduler_config``.

    Args:
        without: Fields of :class:`EngineConfig` that get no flag.
    """
    hints = get_type_hints(EngineConfig)
    parameters = []
    for option in dataclasses.fields(EngineConfig):
        if option.name not in SCHEDULER_OPTIONS or option.name in without:
            continue
        choices, help_text = option.metadata["choices"], option.metadata["help"]
        annotation: Any = Literal[choices] if choices else hints[option.name]
        default = option.default
        if option.name in _OF_PROFILE:
            annotation, default = annotation | None, None
            what = help_text.partition(" Default:")[0].partition(" Never more")[0]
            help_text = f"{what} Default: {_OF_PROFILE[option.name]}."
        parameters.append(
            _flag(
                option.name,
                annotation,
                default,
                help_text=help_text,
                unit=option.metadata["unit"],
            )
        )
    return FlagGroup(parameters, dict)


def load_trace(
    trace: str | None,
    arrivals: Sequence[str] | None,
    *,
    rate_scale: float = 1.0,
    length_scale: float = 1.0,
    max_requests: int | None = None,
    seed: int = 0,
    resize: str | None = None,
) -> Trace:
    """The trace that the flags of these names describe.

    Sizes of the pool that are given take the place of a recording's, at their times as they stand.

    Raises:
        ConfigError: Trace and arrivals are both given, or neither; or as ``parse_arrivals`` and
            ``parse_resizes``.
        TraceError: As ``read_trace``.
    """
    from layby.simulate.arrivals import merge, parse_arrivals
    from layby.simulate.resizes import parse_resizes
    from layby.simulate.traces import read_trace

    resizes = None if resize is None else parse_resizes(resize)
    if trace is not None and arrivals:
        raise ConfigError("--trace and --arrivals both say what arrives; give one of them")
    if trace is not None:
        played = read_trace(trace)
    elif arrivals:
        played = merge([parse_arrivals(text, seed=seed + i) for i, text in enumerate(arrivals)])
    else:
        raise ConfigError("nothing arrives: give --trace FILE or --arrivals TEXT")
    played = played.scaled(
        rate_scale=rate_scale, length_scale=length_scale, max_requests=max_requests
    )
    if not len(played):
        raise ConfigError(f"{played.name} has no requests")
    return played if resizes is None else dataclasses.replace(played, resizes=resizes)


TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="What arrives: an Azure or BurstGPT CSV, a Mooncake JSONL, or a recording of layby "
        "serve.",
        show_default="none",
    ),
]
ArrivalTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--arrivals",
        metavar="TEXT",
        help="Instead of a trace, arrivals to make up, such as "
        "poisson:rate=5,duration=10m,prompt=200,output=50-400; docs/simulate.md tells all of it. "
        "May be repeated: they come together.",
        show_default="none",
    ),
]
ProfileName = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help=f"What steps cost: a file of layby profile, or an estimate: {', '.join(BUILT_IN)}.",
    ),
]
RateScale = Annotated[float, typer.Option(help="2: requests come twice as densely. (factor)")]
LengthScale = Annotated[float, typer.Option(help="Of all prompts and answers. (factor)")]
MaxRequests = Annotated[
    int | None,
    typer.Option(min=1, help="Only so many, the first. (requests)", show_default="all"),
]
ResizeText = Annotated[
    str | None,
    typer.Option(
        "--resize",
        metavar="TIME=BLOCKS,TIME=BLOCKS…",
        help="Give the device pool another size at these times, such as 60s=3000,2m=11000; none: "
        "never.",
        show_default="as a recording tells, else never",
    ),
]
ShedLoad = Annotated[
    bool,
    typer.Option(
        "--shed-load/--no-shed-load",
        help="Refuse new work of the lowest class while memory is saturated, as layby serve does.",
    ),
]
Seed = Annotated[int, typer.Option(help="Fixes what --arrivals draw; the next has the next seed.")]


@takes(options=scheduler_flags())
def simulate(
    *,
    profile: ProfileName,
    trace: TraceFile = None,
    arrivals: ArrivalTexts = None,
    rate_scale: RateScale = 1.0,
    length_scale: LengthScale = 1.0,
    max_requests: MaxRequests = None,
    seed: Seed = 0,
    resize: ResizeText = None,
    shed_load: ShedLoad = True,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What is promised, such as ttft_p99<2s,itl_p99<200ms: metrics ttft, itl, e2e, "
            "queueing; mean, p50, p90, p99, max. Goodput is counted against it.",
            show_default="none",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY,POLICY…",
            help="Simulate each of these policies instead of --scheduling-policy, and say what the "
            "first gains or loses against the others.",
            show_default="none",
        ),
    ] = None,
    json: JsonTarget = None,
    csv: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write a row for each request that finished; -: to standard output, and nothing "
            "else there.",
            show_default="none",
            callback=check_stream,
        ),
    ] = None,
    html: HtmlTarget = None,
    options: Mapping[str, Any],
) -> None:
    """Play a trace of requests on a virtual clock: what would this server have done?

    Scheduler, policies and block pools are those of layby serve; only the time that a step takes
    comes from a profile. A recording brings the sizes of its server's pools, unless --num-blocks or
    --kv-cache-gib is given. The same command gives the same figures, bit for bit. Exit status is 1
    if no request was served.
    """
    from layby.simulate.compare import compare as compare_policies
    from layby.simulate.compare import parse_policies, sentence
    from layby.simulate.observations import RequestLog
    from layby.simulate.profiles import load_profile
    from layby.simulate.report import write_report
    from layby.simulate.settings import scheduler_config
    from layby.simulate.simulation import simulate as play
    from layby.simulate.slo import parse_slo

    log_to_stderr()
    check_apart(json=json, csv=csv, html=html)
    promised = None if slo is None else parse_slo(slo)
    policies = () if compare is None else parse_policies(compare)
    if policies and csv is not None:
        raise ConfigError("--csv has the requests of one policy: leave out --compare")
    machine = load_profile(profile)
    scheduler_config(machine, **options)  # before a long trace is read
    played = load_trace(
        trace,
        arrivals,
        rate_scale=rate_scale,
        length_scale=length_scale,
        max_requests=max_requests,
        seed=seed,
        resize=resize,
    )
    options = _with_recorded_pools(options, played, machine.block_size)
    asked: dict[str, Any] = {
        "rate_scale": rate_scale,
        "length_scale": length_scale,
        "seed": seed,
        "slo": None if promised is None else str(promised),
    }
    console = table_console(STDOUT if csv == STDOUT else json)
    verdict: str | None = None
    if policies:
        with progress_bar("Simulating", unit="requests") as bar:
            reports = compare_policies(
                played,
                machine,
                policies,
                options={k: v for k, v in options.items() if k != "scheduling_policy"},
                slo=promised,
                shed_load=shed_load,
                settings=asked,
                progress=None if bar is None else partial(bar, "Simulating"),
            )
        verdict = sentence(reports, promised)
    else:
        with ExitStack() as stack:
            log = RequestLog(
                slo=None if promised is None else promised.limits,
                csv_file=None if csv is None else stack.enter_context(_csv_file(csv)),
            )
            bar = stack.enter_context(progress_bar("Simulating", unit="requests"))
            config = scheduler_config(machine, **options)
            progress = None if bar is None else partial(bar, "Simulating")
            reports = [
                play(
                    played,
                    machine,
                    config,
                    log=log,
                    shed_load=shed_load,
                    settings=asked,
                    progress=progress,
                )
            ]
    show_reports(reports, played, console)
    if verdict is not None:
        console.print(verdict, soft_wrap=True, markup=False)
    elif promised is not None:
        misses = promised.misses(reports[0])
        told = f"The SLO {promised} is kept." if not misses else f"SLO missed: {'; '.join(misses)}."
        console.print(told, soft_wrap=True, markup=False)
    if html is not None:
        try:
            write_report(
                Path(html),
                reports,
                comparison_sentence=verdict,
                title=f"Simulation of {played.name}",
            )
        except OSError as error:
            raise LaybyError(f"cannot write {html}: {error.strerror or error}") from error
    if json is not None:
        known = [report.as_dict() for report in reports]
        write_json(json, {"comparison": verdict, "runs": known} if policies else known[0])
    if not any(report.result.requests_finished for report in reports):
        raise LaybyError(
            f"no request was served: all {len(played):,} were refused; the first: "
            f"{reports[0].refusals.first_reason}"
        )


def _with_recorded_pools(
    options: Mapping[str, Any], trace: Trace, block_size: int
) -> Mapping[str, Any]:
    """The options, with the sizes that a recorded server's pools had where no other is given.

    They go together: beside a device pool of another size that swap pool would mean nothing.
    """
    sizes = ("num_blocks", "kv_cache_gib", "num_swap_blocks", "swap_gib", "swap_disk_gib")
    given = {name for name in sizes if options.get(name) is not None}
    if trace.pools is None or given & {"num_blocks", "kv_cache_gib"}:
        return options
    recorded = trace.pools.in_blocks_of(options.get("block_size") or block_size)
    if given:
        del recorded["num_swap_blocks"]
    return {**options, **recorded}


def show_reports(reports: Sequence[SimulationReport], trace: Trace, console: Console) -> None:
    """Print what was simulated and its figures, as in the HTML report: one run, or several."""
    from rich.table import Table
    from rich.text import Text

    from layby.simulate.report import simulation_page

    first = reports[0]
    settings = first.result.settings
    about = Table(show_header=False, title="Simulation", title_justify="left")
    about.add_column("")
    about.add_column("", justify="right", overflow="fold")
    refused = ", ".join(
        _refused(report) + (f" ({report.title})" if len(reports) > 1 else "")
        for report in reports
        if report.refusals.total
    )
    block_tokens = counted(settings["block_size"], "token")
    pool = f"{counted(settings['num_blocks'], 'block')} of {block_tokens}"
    facts = [
        ("trace", trace.describe()),
        ("profile", first.profile),
        ("policy", ", ".join(report.title for report in reports)),
        ("device pool", pool + _as_recorded(trace, settings)),
        *((("  later", _sizes(trace.resizes, settings["block_size"])),) if trace.resizes else ()),
        ("swap pool", counted(settings["num_swap_blocks"], "block")),
        ("requests refused", refused or "none"),
        *((("first of them", str(settings["first_refusal"])),) if refused else ()),
        ("simulated time", f"{first.simulated_s:,.1f} s"),
        ("wall time", f"{sum(report.wall_s for report in reports):,.2f} s"),
        ("scheduler steps", f"{sum(report.steps for report in reports):,}"),
    ]
    for label, fact in facts:
        about.add_row(label, Text(fact))
    console.print(about)

    tables = [table for section in simulation_page(reports).sections for table in section.tables]
    for figures in tables:
        if figures.folded or figures.words:
            continue
        shown = Table(title=figures.caption, title_justify="left")
        for column in figures.columns:
            shown.add_column(column, justify="right" if column else "left")
        for row in figures.rows:
            cells = (
                f"{'★ ' if cell.best else ''}{cell.text}" + (f" {cell.note}" if cell.note else "")
                for cell in row.cells
            )
            shown.add_row(row.name, *cells)
        console.print(shown)


def _as_recorded(trace: Trace, settings: Mapping[str, Any]) -> str:
    """A remark, if the pools are those of the server whose recording is played."""
    if trace.pools is None:
        return ""
    recorded = trace.pools.in_blocks_of(settings["block_size"])
    return ", as recorded" if recorded.items() <= settings.items() else ""


def _sizes(resizes: Sequence[PoolResize], block_size: int) -> str:
    """Other sizes that the device pool gets, and when; of many the first."""
    told = [
        f"{counted(each.blocks_of(block_size), 'block')} at {each.at_s:,.4g} s"
        for each in resizes[:_SIZES_SHOWN]
    ]
    if len(resizes) > _SIZES_SHOWN:
        told.append(f"and {len(resizes) - _SIZES_SHOWN:,} more")
    return ", ".join(told)


def _refused(report: SimulationReport) -> str:
    """How many requests were refused; of which class those were that were shed."""
    refusals = report.refusals
    told = f"{refusals.total:,}"
    if refusals.shed:
        classes = ", ".join(
            f"{count:,} of class {priority}" for priority, count in sorted(refusals.shed.items())
        )
        told += f", to shed load {classes}"
    return told


@contextmanager
def _csv_file(name: str) -> Iterator[TextIO]:
    if name == STDOUT:
        yield sys.stdout
        return
    try:
        file = Path(name).open("w", encoding="utf-8", newline="")  # noqa: SIM115  # closed below
    except OSError as error:
        raise LaybyError(f"cannot write {name}: {error.strerror or error}") from error
    with file:
        yield file
