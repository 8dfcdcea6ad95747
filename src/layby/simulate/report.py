"""The report of a simulation, or of several side by side, as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from layby.results import ClassResult, Distribution, RunResult
from layby.scheduling.plan import PreemptionMode
from layby.simulate.observations import RequestRecord, SimulationReport
from layby.simulate.page import (
    CLOCK,
    STATES,
    Axis,
    Cell,
    Chart,
    Curve,
    Fact,
    Lives,
    Page,
    Row,
    Section,
    Table,
    duration,
    number,
    share,
    size,
    write_page,
)


def write_report(
    path: Path,
    reports: Sequence[SimulationReport],
    *,
    comparison_sentence: str | None = None,
    title: str | None = None,
) -> None:
    """Write the report of one simulation, or of several of the same trace side by side.

    Args:
        path: The HTML file.
        reports: At least one. With several, the first is what the others are compared with.
        comparison_sentence: What the comparison comes to.
        title: The page's; by default that of the only simulation.

    Raises:
        OSError: The file cannot be written.
    """
    page = simulation_page(reports, comparison_sentence=comparison_sentence, title=title)
    write_page(path, page)


def simulation_page(
    reports: Sequence[SimulationReport],
    *,
    comparison_sentence: str | None = None,
    title: str | None = None,
) -> Page:
    """The page that :func:`write_report` writes."""
    if not reports:
        raise ValueError("a report needs at least one simulation")
    first, several = reports[0], len(reports) > 1
    titles = [report.title for report in reports]
    what = f"{first.result.requests_finished:,} requests, {duration(first.simulated_s)} of traffic"
    wall = duration(sum(report.wall_s for report in reports))
    return Page(
        title=title or (f"{len(reports)} runs side by side" if several else first.title),
        lead=(
            f"Simulated: {what}, computed in {wall}.",
            *dict.fromkeys(report.profile for report in reports),
        ),
        verdict=comparison_sentence or "",
        facts=() if several else _facts(first),
        sections=_compared(reports) if several else _told(first),
        footer=f"Layby simulation of {', '.join(titles)}. {first.steps:,} scheduler steps"
        + (f" in {first.title}." if several else "."),
    )


def _told(report: SimulationReport) -> list[Section]:
    """One run: how it went, then what it took."""
    return [
        _latency_section([report], _latency_tables(report)),
        Section("Queues over time", _OVER_TIME, charts=[_queues(report)]),
        Section("Memory over time", charts=[_pools(report), *_memory_events([report])]),
        Section("Requests", _ZOOM, charts=[_lives([report])]),
        *_ways_out([report]),
        Section("Figures", tables=[_figures([report])]),
        Section("Settings", tables=[_settings([report])]),
    ]


def _compared(reports: Sequence[SimulationReport]) -> list[Section]:
    """Several runs: figures side by side, then what is behind them."""
    marks = f"★ marks the best of a row; percentages are against {reports[0].title}."
    folded = [table for report in reports for table in _latency_tables(report, report.title)]
    queues = [_queues(report, report.title) for report in reports]
    pools = [
        *(_pools(report, report.title) for report in reports),
        *_memory_events(reports),
    ]
    return [
        Section("Figures", marks, tables=[_figures(reports)]),
        _latency_section(reports, folded),
        Section("Queues over time", _OVER_TIME, charts=queues, columns=2),
        Section("Memory over time", charts=pools, columns=2),
        Section("Requests", _ZOOM, charts=[_lives(reports)]),
        *_ways_out(reports),
        Section("Settings", tables=[_settings(reports)]),
    ]


def _latency_section(reports: Sequence[SimulationReport], tables: Sequence[Table]) -> Section:
    note = (
        "How many took at most so long. TTFT is the time from arrival to the first token, ITL from "
        "a token to the next, E2E from arrival to the end, queueing from arrival to the first step."
    )
    return Section("Latency", note, charts=_curves(reports), columns=3, tables=tables)


_OVER_TIME: Final = (
    "The mean of each stretch of time, its peak shaded. Drag to move, Ctrl and wheel to zoom, "
    "double-click for the whole."
)
_ZOOM: Final = (
    "A bar for each request, by arrival. Wheel or + and − to zoom, drag or arrow keys to move, "
    "double-click for the whole; the plots above follow."
)
_MAX_POINTS: Final = 4000  # of the timelines of all simulations together
_MAX_RECORDS: Final = 600  # likewise
_LATENCIES: Final = (("TTFT", "ttft_s"), ("ITL", "itl_s"), ("E2E", "e2e_s"))
_PERCENTILES: Final = ("mean", "p50", "p90", "p99", "max")


def _facts(report: SimulationReport) -> list[Fact]:
    result, met = report.result, report.goodput
    facts = [
        Fact("Throughput", f"{number(result.output_tokens_per_s)} tok/s", "output tokens"),
        Fact("TTFT p50", duration(result.ttft_s.p50), f"p99 {duration(result.ttft_s.p99)}"),
        Fact("ITL p50", duration(result.itl_s.p50), f"p99 {duration(result.itl_s.p99)}"),
        Fact("E2E p50", duration(result.e2e_s.p50), f"p99 {duration(result.e2e_s.p99)}"),
    ]
    if met is not None:
        facts.append(
            Fact("Within the SLO", share(met.share), f"{number(met.requests_per_s)} req/s")
        )
    preemptions = result.preemptions
    facts.append(
        Fact(
            "Preemptions",
            f"{preemptions.swap + preemptions.recompute:,}",
            f"{preemptions.swap:,} by swap, {preemptions.recompute:,} by recompute",
        )
    )
    return facts


@dataclass(frozen=True, slots=True)
class _Figure:
    """A row of the figures: how to find it, to write it, and whether more of it is better."""

    name: str
    find: Callable[[SimulationReport], float | None]
    text: Callable[[float], str]
    more_is_better: bool | None = None


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _figures(reports: Sequence[SimulationReport]) -> Table:
    rows = [
        _figure_row(figure, reports)
        for figure in _figures_of(reports)
        if any(figure.find(report) is not None for report in reports)
    ]
    return Table("Figures of each run", ["", *(report.title for report in reports)], rows)


def _figures_of(reports: Sequence[SimulationReport]) -> list[_Figure]:
    """What is told of every run, with its classes where there are several."""
    figures = [_Figure("Requests finished", lambda r: r.result.requests_finished, _count)]
    if any(report.refusals.total for report in reports):
        figures += [
            _Figure("Requests refused", lambda r: r.refusals.total, _count, False),
            _Figure("… of them to shed load", lambda r: r.refusals.shed.total(), _count, False),
        ]
    figures += [
        _Figure("First arrival to last end", lambda r: r.result.duration_s, duration, False),
        _Figure("Output tokens per second", lambda r: r.result.output_tokens_per_s, number, True),
    ]
    if any(report.goodput for report in reports):
        figures += [
            _Figure(
                f"Goodput in requests/s ({_slo(reports)})",
                lambda r: r.goodput.requests_per_s if r.goodput else None,
                number,
                True,
            ),
            _Figure(
                "Requests within the SLO",
                lambda r: r.goodput.share if r.goodput else None,
                share,
                True,
            ),
        ]
    if len(reports) > 1:  # a single run has tables of its own for them
        figures += _latency_figures(reports)
    figures += [
        _Figure("Preemptions by swap", lambda r: r.result.preemptions.swap, _count, False),
        _Figure(
            "Preemptions by recompute", lambda r: r.result.preemptions.recompute, _count, False
        ),
        _Figure("Preemptions per request", lambda r: r.result.preemption_rate, number, False),
        _Figure("Tokens computed again", lambda r: r.result.recomputed_tokens, _count, False),
        _Figure(
            "Most requests parked at a time", lambda r: r.result.swapped_queue_size_max, _count
        ),
        _Figure("Mean time parked", lambda r: r.result.avg_swapped_duration_s, duration, False),
        _Figure("Most of the device pool in use", lambda r: r.result.kv_usage_max, share),
    ]
    for tier in dict.fromkeys(moves.tier for report in reports for moves in report.moves):
        for way in ("out", "in"):
            for unit, text in (("blocks", _count), ("bytes", size)):
                find = _finder(tier, f"{way}_{unit}")
                figures.append(_Figure(f"Moved {way}, {tier} ({unit})", find, text, False))
    return figures


def _latency_figures(reports: Sequence[SimulationReport]) -> list[_Figure]:
    figures = [
        _latency_figure(label, name, part)
        for label, name in (*_LATENCIES, ("Queueing", "queueing_s"))
        for part in ("p50", "p99", "max")
    ]
    classes = sorted({key for report in reports for key in report.result.classes}, key=int)
    if len(classes) > 1:
        figures += [
            _latency_figure(f"Class {priority}: {label}", name, "p99", priority)
            for priority in classes
            for label, name in _LATENCIES
        ]
    return figures


def _latency_figure(label: str, name: str, part: str, priority: str | None = None) -> _Figure:
    def find(report: SimulationReport) -> float | None:
        if name == "queueing_s":
            known: Distribution | None = report.queueing_s
        elif priority is None:
            known = getattr(report.result, name)
        else:
            known = getattr(report.result.classes.get(priority), name, None)
        return None if known is None else getattr(known, part)

    return _Figure(f"{label} {part}", find, duration, False)


def _finder(tier: str, name: str) -> Callable[[SimulationReport], float | None]:
    return lambda report: sum(getattr(moves, name) for moves in report.moves if moves.tier == tier)


def _figure_row(figure: _Figure, reports: Sequence[SimulationReport]) -> Row:
    values = [figure.find(report) for report in reports]
    texts = ["–" if value is None else figure.text(value) for value in values]
    known = [value for value in values if value is not None]
    best = ""
    # What reads alike is equally good, and where all is alike nothing is best.
    if figure.more_is_better is not None and len(known) > 1 and len(set(texts)) > 1:
        best = figure.text(max(known) if figure.more_is_better else min(known))
    notes = [
        "" if text == texts[0] else _change(values[0], value)
        for value, text in zip(values, texts, strict=True)
    ]
    return Row(
        figure.name,
        [Cell(text, note, text == best) for text, note in zip(texts, notes, strict=True)],
    )


def _change(base: float | None, value: float | None) -> str:
    """How a value differs from the first, in percent or, if that is much, as a factor."""
    if not base or value is None:
        return ""
    factor = value / base
    if factor >= 3:
        return f"×{factor:.0f}"
    percent = round((factor - 1) * 100)
    return f"{percent:+d}%".replace("-", "−") if percent else ""


def _slo(reports: Sequence[SimulationReport]) -> str:
    slo = next(report.goodput.slo for report in reports if report.goodput)
    names = {"queueing_s": "queueing", "ttft_s": "TTFT", "itl_s": "mean ITL", "e2e_s": "E2E"}
    return ", ".join(f"{names[name]} ≤ {duration(limit_s)}" for name, limit_s in slo.items())


def _latency_tables(report: SimulationReport, title: str = "") -> list[Table]:
    """Of all requests and, if there are several, of each class; folded if they have a title."""

    def table(whose: str, of: RunResult | ClassResult, queueing_s: Distribution) -> Table:
        parts: list[tuple[str, Distribution]] = [
            *((label, getattr(of, name)) for label, name in _LATENCIES),
            ("Queueing", queueing_s),
        ]
        rows = [
            Row.of(label, [duration(getattr(known, name)) for name in _PERCENTILES])
            for label, known in parts
        ]
        caption = f"{title}, {whose}" if title else whose.capitalize()
        return Table(caption, ["", *_PERCENTILES], rows, folded=bool(title))

    tables = [table("all requests", report.result, report.queueing_s)]
    if len(report.result.classes) > 1:
        tables += [
            table(
                f"class {priority} ({figures.requests_finished:,} requests)",
                figures,
                report.queueing_by_class[priority],
            )
            for priority, figures in report.result.classes.items()
        ]
    return tables


def _curves(reports: Sequence[SimulationReport]) -> list[Chart]:
    charts = []
    for label, name in _LATENCIES:
        curves = []
        for index, report in enumerate(reports):
            points = [(value_s, part) for value_s, part in report.cdfs.get(name, ()) if value_s > 0]
            curves.append(
                Curve(
                    report.title,
                    f"c{index % 6}",
                    [value_s for value_s, _ in points],
                    [part for _, part in points],
                    dash=index,
                )
            )
        told = "; ".join(
            f"{report.title}: half within {duration(getattr(report.result, name).p50)}, "
            f"99% within {duration(getattr(report.result, name).p99)}"
            for report in reports
        )
        charts.append(
            Chart(
                label,
                f"Cumulative distribution of {label}. {told}.",
                Axis(label, "duration", log=True),
                Axis("share", "share", max=1.0),
                curves,
            )
        )
    return charts


def _queues(report: SimulationReport, title: str = "") -> Chart:
    columns = {state.value: (state.value, state.value) for state in STATES}
    y = Axis("requests", "count", group="queues")
    return _over_time(report, title, "Requests waiting, running and swapped", columns, y)


def _pools(report: SimulationReport, title: str = "") -> Chart:
    columns = {"kv_usage": ("device pool", "running"), "swap_usage": ("swap pool", "swapped")}
    y = Axis("in use", "share", max=1.0)
    return _over_time(report, title, "Share of each pool in use", columns, y)


def _memory_events(reports: Sequence[SimulationReport]) -> list[Chart]:
    """The size of each pool that changed it, and how hard each was pressed, if it was."""
    charts = []
    for report in reports:
        title = report.title if len(reports) > 1 else ""
        sizes = report.timeline.high.get("num_blocks", ())
        if len(set(sizes)) > 1:
            what = "Blocks of the device pool"
            columns = {"num_blocks": ("size", "running")}
            y = Axis("blocks", "count", group="sizes")
            charts.append(_over_time(report, title and f"{title}: size", what, columns, y))
        if max(report.timeline.high.get("pressure", ()), default=0):
            what = "Pressure: 0 ok, 1 rising, 2 saturated"
            columns = {"pressure": ("pressure", "swapped")}
            y = Axis("state", "count", max=2.0)
            charts.append(_over_time(report, title and f"{title}: pressure", what, columns, y))
    return charts


def _ways_out(reports: Sequence[SimulationReport]) -> list[Section]:
    """How victims left where both ways were open, if any did: counted, and some one by one."""
    told, tables = [], []
    for report in reports:
        counts = report.decisions.counts
        if not counts:
            continue
        ways = ", ".join(f"{counts[mode]:,} by {mode.value}" for mode in PreemptionMode)
        told.append(f"{report.title}: {ways}" if len(reports) > 1 else ways)
        rows = [
            Row.of(
                f"{event.time_s:,.2f} s",
                [
                    event.decision.request_id,
                    event.decision.mode.value,
                    *map(duration, (event.decision.swap_s, event.decision.recompute_s)),
                    f"{event.decision.load.blocks_out:,} + {event.decision.load.blocks_in:,}",
                    f"{event.decision.load.tokens:,}",
                ],
            )
            for event in report.decisions.events
        ]
        columns = ["time", "request", "left by", "swap", "recompute", "blocks out + in", "tokens"]
        caption = f"{len(rows):,} of {counts.total():,} choices"
        if len(reports) > 1:
            caption = f"{report.title}: {caption}"
        tables.append(Table(caption, columns, rows, folded=True))
    if not tables:
        return []
    note = (
        "Where a victim could leave by either way, it took the cheaper one: "
        f"{'; '.join(told)}. Swap is what moving its blocks out and back was expected to take, "
        "recompute what computing its tokens again was."
    )
    return [Section("Ways out", note, tables=tables)]


def _over_time(
    report: SimulationReport,
    title: str,
    what: str,
    columns: Mapping[str, tuple[str, str]],
    y: Axis,
) -> Chart:
    """Columns of the timeline (name → legend and colour) as steps; small if it has a title."""
    series = report.timeline.coarser(_MAX_POINTS // (8 if title else 4))
    known = {name: what for name, what in columns.items() if name in series.mean}
    text: Callable[[float], str] = share if y.unit == "share" else number
    peaks = ", ".join(
        f"{legend} at most {text(max(series.high[name], default=0))}"
        for name, (legend, _) in known.items()
    )
    coarse = series.coarser(24)
    ends = [*coarse.start_s, coarse.end_s]
    rows = [
        Row.of(
            f"{duration(ends[i])} to {duration(ends[i + 1])}",
            [
                f"{text(coarse.mean[name][i])} (up to {text(coarse.high[name][i])})"
                for name in known
            ],
        )
        for i in range(len(coarse.start_s))
    ]
    names = [legend for legend, _ in known.values()]
    return Chart(
        title or what,
        f"{what} over time, {report.title}: {peaks}.",
        CLOCK,
        y,
        [
            Curve(
                legend,
                color,
                [*series.start_s, series.end_s],
                series.mean[name],
                kind="step",
                high=series.high[name],
            )
            for name, (legend, color) in known.items()
        ],
        table=Table("The same as a table", ["time", *names], rows, folded=True),
        height=200 if title else 250,
    )


def _lives(reports: Sequence[SimulationReport]) -> Lives:
    limit = max(60, _MAX_RECORDS // len(reports))
    groups = {
        f"{report.title} ({index + 1})"
        if report.title in {other.title for other in reports[:index]}
        else report.title: _chosen(report.records, limit)
        for index, report in enumerate(reports)
    }
    rows = []
    for title, records in groups.items():
        most = sorted(records, key=lambda r: (-r.preemptions, -(r.e2e_s or 0.0), r.index))
        for record in most[: max(3, 12 // len(groups))]:
            name = f"{record.request_id} ({title})" if len(groups) > 1 else record.request_id
            lengths = f"{record.num_prompt_tokens:,} + {record.num_output_tokens:,}"
            times = (record.queueing_s, record.ttft_s, record.e2e_s, record.swapped_s)
            moves = f"{record.preemptions_swap} + {record.preemptions_recompute}"
            rows.append(Row.of(name, [lengths, *map(duration, times), moves]))
    table = Table(
        "The requests that were preempted most, then longest, as a table",
        [
            "request",
            "prompt + output",
            "queueing",
            "TTFT",
            "E2E",
            "parked",
            "swap + recompute",
        ],
        rows,
        folded=True,
    )
    total = sum(report.result.requests_finished for report in reports)
    kept = sum(map(len, groups.values()))
    summary = f"When each of {kept:,} of {total:,} requests was waiting, running and swapped."
    title = "Waiting, running and swapped"
    return Lives(title, summary, groups, table)


def _chosen(records: Sequence[RequestRecord], limit: int) -> list[RequestRecord]:
    """Half of them those that were preempted most, the rest an even sample; by arrival."""
    if len(records) <= limit:
        return list(records)
    most = sorted(records, key=lambda r: (-r.preemptions, -(r.e2e_s or 0.0), r.index))
    chosen, others = most[: limit // 2], sorted(most[limit // 2 :], key=lambda r: r.index)
    wanted = limit - len(chosen)
    chosen += [others[i * len(others) // wanted] for i in range(wanted)]
    return sorted(chosen, key=lambda r: r.index)


def _settings(reports: Sequence[SimulationReport]) -> Table:
    def text(value: object) -> str:
        return "–" if value is None else str(value)

    rows = []
    for source in ("settings", "machine"):
        known: list[Mapping[str, Any]] = [getattr(report.result, source) for report in reports]
        for name in dict.fromkeys(key for settings in known for key in settings):
            texts = [text(settings.get(name)) for settings in known]
            differs = len(set(texts)) > 1
            rows.append(Row(name, tuple(map(Cell, texts)), differs))
    further: dict[str, Callable[[SimulationReport], str]] = {
        "profile": lambda report: report.profile,
        "simulated time": lambda report: duration(report.simulated_s),
        "computed in": lambda report: duration(report.wall_s),
        "scheduler steps": lambda report: f"{report.steps:,}",
    }
    rows += [Row.of(name, [find(report) for report in reports]) for name, find in further.items()]
    caption = "What was simulated" + (", differences shaded" if len(reports) > 1 else "")
    return Table(caption, ["", *(report.title for report in reports)], rows, words=True)
