"""Reports as one HTML page each, which load nothing from anywhere.

A :class:`Page` is plain data: sections of charts and tables. :func:`render_page` makes HTML of any
page; :func:`write_report` composes the page of one simulation, or of several side by side.
``report.html`` beside this file has the layout, the style and the script that plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import jinja2

from layby.results import ClassResult, Distribution, RunResult
from layby.scheduling import RequestStatus
from layby.simulate.observations import RequestRecord, SimulationReport

# --- Numbers for people --------------------------------------------------------------------------
# The script formats alike; a test compares the two.


def number(value: float) -> str:
    """Three significant digits, never an exponent."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else _trimmed(f"{value:.3f}")


def duration(value_s: float | None) -> str:
    """Seconds in the unit in which a person would say it; a dash for None."""
    if value_s is None:
        return "–"
    if value_s == 0:
        return "0 s"
    if value_s < 1:
        return f"{number(value_s * 1000)} ms"
    if value_s < 120:
        return f"{number(value_s)} s"
    return f"{number(value_s / 60)} min" if value_s < 7200 else f"{number(value_s / 3600)} h"


def share(value: float) -> str:
    """A part of 1 in percent."""
    return f"{_trimmed(f'{value * 100:.1f}')}%"


def size(num_bytes: float) -> str:
    """Bytes in the binary unit that fits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{number(num_bytes) if unit != 'B' else round(num_bytes)} {unit}"
        num_bytes /= 1024
    return f"{number(num_bytes)} TiB"


def _trimmed(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- What a page is made of ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure of a table: its text, a smaller note beside it, whether it is the row's best."""

    text: str
    note: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: what stands at its left, and a cell per further column."""

    name: str
    cells: Sequence[Cell]
    differs: bool = False

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> Row:
        """A row of plain texts."""
        return cls(name, tuple(map(Cell, texts)))


@dataclass(frozen=True, slots=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        columns: Their names, that of the rows' names first.
        rows: See :class:`Row`.
        folded: Shown only when asked for, as the alternative to a plot.
        words: Holds words rather than figures: set left, and wrapped.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    folded: bool = False
    words: bool = False

    @property
    def has_notes(self) -> bool:
        """Whether there is a note anywhere, for which every figure then leaves room."""
        return any(cell.note for row in self.rows for cell in row.cells)


Unit = Literal["duration", "clock", "count", "share", "number"]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart.

    Attributes:
        label: What it measures.
        unit: How its values are written: seconds as a duration or as a moment of the simulation,
            whole things, parts of 1, or any number.
        log: Logarithmic (the horizontal axis only; values must be positive).
        max: Where the vertical axis ends; the largest value if None.
        group: Charts of one group have the same vertical axis.
    """

    label: str
    unit: Unit
    log: bool = False
    max: float | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """What a chart shows of one thing.

    Attributes:
        name: For the legend.
        color: ``waiting``, ``running``, ``swapped``, or ``c0`` to ``c5`` for anything else.
        x, y: Coordinates. For steps, ``y[i]`` holds from ``x[i]`` to ``x[i + 1]``, so ``x`` has one
            entry more.
        kind: How they are drawn.
        high: For steps: peaks within each, drawn as a shade above the curve.
        dash: Which of six patterns the line has, since colour alone is not for everybody.
        labels: For points: one name each.
    """

    name: str
    color: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["step", "line", "points"] = "line"
    high: Sequence[float] | None = None
    dash: int = 0
    labels: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chart:
    """Curves in a plane.

    Attributes:
        title: What it shows.
        summary: The same in a sentence with the figures that matter, for those who cannot see it.
        x, y: The axes. Charts over the simulation's clock (unit ``clock``) are zoomed together.
        curves: What is drawn.
        table: The figures behind it.
        height: In CSS pixels.
    """

    title: str
    summary: str
    x: Axis
    y: Axis
    curves: Sequence[Curve]
    table: Table | None = None
    height: int = 230

    def spec(self) -> dict[str, Any]:
        """What the script needs, as JSON."""
        return {
            "kind": "xy",
            "linked": self.x.unit == "clock",
            "height": self.height,
            "x": {"label": self.x.label, "unit": self.x.unit, "log": self.x.log},
            "y": {
                "label": self.y.label,
                "unit": self.y.unit,
                "max": self.y.max,
                "group": self.y.group,
            },
            "curves": [
                {
                    "name": curve.name,
                    "color": curve.color,
                    "kind": curve.kind,
                    "dash": curve.dash % 6,
                    "x": [_short(x, 7) for x in curve.x],
                    "y": [_short(y) for y in curve.y],
                    "high": None if curve.high is None else [_short(y) for y in curve.high],
                    "labels": curve.labels,
                }
                for curve in self.curves
            ],
        }


@dataclass(frozen=True, slots=True, eq=False)
class Lives:
    """A bar over time for each request: when it waited, ran and was parked.

    Attributes:
        title, summary, table, height: As in :class:`Chart`.
        groups: Named sets of requests, of which one is shown at a time.
        max_spans: In all groups together; where there are more, short ones are left out.
    """

    title: str
    summary: str
    groups: Mapping[str, Sequence[RequestRecord]]
    table: Table | None = None
    height: int = 440
    max_spans: int = 12_000

    def spec(self) -> dict[str, Any]:
        """What the script needs, as JSON."""
        lengths = [len(record.spans) for records in self.groups.values() for record in records]
        limit = max(
            (
                limit
                for limit in (10, 20, 50, 100, 200, 500, 1000)
                if sum(min(limit, length) for length in lengths) <= self.max_spans
            ),
            default=6,
        )
        return {
            "kind": "lives",
            "linked": True,
            "wheel": True,
            "height": self.height,
            "x": {"label": _CLOCK.label, "unit": _CLOCK.unit, "log": False},
            "groups": [
                {
                    "name": name,
                    "rows": [_life(record, limit) for record in records if record.spans],
                }
                for name, records in self.groups.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Fact:
    """A figure to be seen first."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Charts, then tables, under a heading.

    Attributes:
        title: The heading.
        note: A sentence under it.
        charts: Side by side in so many ``columns`` (1 to 3) where there is room.
        tables: Below them.
    """

    title: str
    note: str = ""
    charts: Sequence[Chart | Lives] = ()
    columns: int = 1
    tables: Sequence[Table] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A report.

    Attributes:
        title: Its heading.
        lead: Lines below that.
        verdict: The sentence to remember.
        facts: The figures to remember.
        sections: All the rest.
        footer: How it came about.
    """

    title: str
    lead: Sequence[str] = ()
    verdict: str = ""
    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = ()
    footer: str = ""


def render_page(page: Page) -> str:
    """The page as HTML."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(
        loader=folder,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # A number that is none would make all of the data unreadable: better fail here.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    charts = [chart for section in page.sections for chart in section.charts]
    return environment.get_template("report.html").render(
        page=page,
        ids={chart: index for index, chart in enumerate(charts)},
        data=[chart.spec() for chart in charts],
    )


def write_page(path: Path, page: Page) -> None:
    """Write the page to a file.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(render_page(page), encoding="utf-8")


# --- The report of simulations -------------------------------------------------------------------


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
        Section("Memory over time", charts=[_pools(report)]),
        Section("Requests", _ZOOM, charts=[_lives([report])]),
        Section("Figures", tables=[_figures([report])]),
        Section("Settings", tables=[_settings([report])]),
    ]


def _compared(reports: Sequence[SimulationReport]) -> list[Section]:
    """Several runs: figures side by side, then what is behind them."""
    marks = f"★ marks the best of a row; percentages are against {reports[0].title}."
    folded = [table for report in reports for table in _latency_tables(report, report.title)]
    queues = [_queues(report, report.title) for report in reports]
    pools = [_pools(report, report.title) for report in reports]
    return [
        Section("Figures", marks, tables=[_figures(reports)]),
        _latency_section(reports, folded),
        Section("Queues over time", _OVER_TIME, charts=queues, columns=2),
        Section("Memory over time", charts=pools, columns=2),
        Section("Requests", _ZOOM, charts=[_lives(reports)]),
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
_CLOCK: Final = Axis("simulated time", "clock")
_MAX_POINTS: Final = 4000  # of the timelines of all simulations together
_MAX_RECORDS: Final = 600  # likewise
_STATES: Final = {RequestStatus.WAITING: 0, RequestStatus.RUNNING: 1, RequestStatus.SWAPPED: 2}
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
    figures = [
        _Figure("Requests finished", lambda r: r.result.requests_finished, _count),
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
    columns = {state.value: (state.value, state.value) for state in _STATES}
    y = Axis("requests", "count", group="queues")
    return _over_time(report, title, "Requests waiting, running and swapped", columns, y)


def _pools(report: SimulationReport, title: str = "") -> Chart:
    columns = {"kv_usage": ("device pool", "running"), "swap_usage": ("swap pool", "swapped")}
    y = Axis("in use", "share", max=1.0)
    return _over_time(report, title, "Share of each pool in use", columns, y)


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
        _CLOCK,
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


def _life(record: RequestRecord, max_spans: int) -> dict[str, Any]:
    spans = record.spans_at_most(max_spans)
    life: list[float] = [_moment(spans[0][1])]
    for state, _, end_s in spans:
        life += [_STATES[state], _moment(end_s)]
    return {
        "id": record.request_id,
        "class": record.priority,
        "prompt": record.num_prompt_tokens,
        "output": record.num_output_tokens,
        "queueing": _short(record.queueing_s),
        "ttft": _short(record.ttft_s),
        "itl": _short(record.itl_s),
        "e2e": _short(record.e2e_s),
        "parked": _short(record.swapped_s),
        "swaps": record.preemptions_swap,
        "recomputes": record.preemptions_recompute,
        "life": life,
    }


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


def _short(value: float | None, digits: int = 5) -> float | None:
    """So many significant digits, which is less to load; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _moment(time_s: float) -> float:
    rounded = round(time_s, 4)
    return int(rounded) if rounded.is_integer() else rounded
