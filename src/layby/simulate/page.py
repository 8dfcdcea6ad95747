"""Reports as one HTML page each, which load nothing from anywhere.

A :class:`Page` is plain data: sections of charts and tables. :func:`render_page` makes HTML of it;
``report.html`` beside this file has the layout, the style and the script that plots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import jinja2

from layby.scheduling import RequestStatus
from layby.simulate.observations import RequestRecord

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


CLOCK: Final = Axis("simulated time", "clock")
"""The axis of whatever is drawn over time."""

STATES: Final = {RequestStatus.WAITING: 0, RequestStatus.RUNNING: 1, RequestStatus.SWAPPED: 2}
"""Of a request that is drawn, and their numbers for the script."""


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
            "x": {"label": CLOCK.label, "unit": CLOCK.unit, "log": False},
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


def _life(record: RequestRecord, max_spans: int) -> dict[str, Any]:
    spans = record.spans_at_most(max_spans)
    life: list[float] = [_moment(spans[0][1])]
    for state, _, end_s in spans:
        life += [STATES[state], _moment(end_s)]
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


def _short(value: float | None, digits: int = 5) -> float | None:
    """So many significant digits, which is less to load; None for what is no number."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() else rounded


def _moment(time_s: float) -> float:
    rounded = round(time_s, 4)
    return int(rounded) if rounded.is_integer() else rounded
