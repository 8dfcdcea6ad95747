"""The report is one file that opens anywhere, says what it should, and trusts no text."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from layby.scheduling import RequestStatus
from layby.scheduling.metrics import SchedulerMetrics
from layby.simulate.observations import RequestLog, SimulationReport, TierMoves, Timeline
from layby.simulate.page import (
    Axis,
    Chart,
    Curve,
    Fact,
    Page,
    Row,
    Section,
    Table,
    duration,
    number,
    render_page,
    share,
    size,
)
from layby.simulate.report import simulation_page, write_report

WAITING, RUNNING, SWAPPED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.SWAPPED
VOID = {"br", "hr", "img", "input", "link", "meta"}


@cache
def simulated(
    title: str = "swapped-first",
    *,
    num_requests: int = 60,
    seats: int = 8,
    most_moves: int = 3,
    seed: int = 1,
    classes: int = 1,
) -> SimulationReport:
    """The report of an imagined server with a few seats, where some requests are parked."""
    drawn = random.Random(seed)
    log = RequestLog(slo={"ttft_s": 2.0, "itl_s": 0.06})
    metrics = SchedulerMetrics(requests_accepted=num_requests, kv_usage_max=0.97)
    events: list[tuple[float, int, RequestStatus | None]] = []
    free_at, now = [0.0] * seats, 0.0
    for index in range(num_requests):
        now += drawn.expovariate(seats / 8) * (0.4 if index // 20 % 2 else 1.6)
        record = log.start(
            f"req-{index}",
            arrival_s=now,
            num_prompt_tokens=drawn.randint(20, 4000),
            priority=index % classes,
        )
        seat = min(range(seats), key=free_at.__getitem__)
        at_s = max(now, free_at[seat])
        record.enter(RUNNING, at_s)
        record.first_token_s = at_s + drawn.uniform(0.1, 0.6)
        at_s = record.first_token_s
        for _ in range(int(drawn.random() ** 4 * (most_moves + 1))):
            at_s += drawn.uniform(0.5, 3)
            record.enter(SWAPPED, at_s)
            metrics.preemptions_swap += 1
            at_s += drawn.uniform(0.3, 4)
            record.enter(RUNNING, at_s)
        at_s += drawn.lognormvariate(1.5, 0.5)
        tokens = drawn.randint(10, 400)
        log.of_class(record.priority).itl_s.add(drawn.lognormvariate(-3, 0.2), tokens)
        log.finish(record, at_s, tokens)
        free_at[seat] = at_s
        events += [(span[1], record.index, span[0]) for span in record.spans]
        events.append((at_s, record.index, None))
    states: dict[int, RequestStatus] = {}
    counts = dict.fromkeys((WAITING, RUNNING, SWAPPED), 0)
    timeline = Timeline(("waiting", "running", "swapped", "kv_usage", "swap_usage"))
    events.sort(key=lambda event: event[:2])
    for time_s, index, state in events:
        before = states.pop(index, None)
        if before is not None:
            counts[before] -= 1
        if state is not None:
            counts[state] += 1
            states[index] = state
        values = (counts[WAITING], counts[RUNNING], counts[SWAPPED])
        timeline.add(time_s, (*values, counts[RUNNING] / seats, min(1, counts[SWAPPED] / 9)))
        metrics.swapped_queue_size_max = max(metrics.swapped_queue_size_max, counts[SWAPPED])
    return SimulationReport.of(
        title,
        log,
        timeline,
        metrics,
        profile="a100-llama3-8b: an estimate from the datasheet",
        simulated_s=log.duration_s,
        wall_s=0.9,
        steps=12_345,
        moves=[TierMoves("ram", 420, 400, 420 * 2**21, 400 * 2**21)],
        settings={"scheduling_policy": title, "max_num_seqs": seats, "swap_gib": None},
        machine={"cpu": "any"},
    )


class Reader(HTMLParser):
    """Elements that are closed in order, the links among them, the texts, and the data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.plots: list[dict[str, str | None]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.loads += [known[name] or "" for name in ("src", "href", "action") if name in known]
        if "data-chart" in known:
            self.plots.append(known)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.texts.append(data)

    @property
    def data(self) -> list[dict[str, Any]]:
        known: list[dict[str, Any]] = json.loads(self.scripts[0])
        return known

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def page_of(*reports: SimulationReport, sentence: str | None = None) -> str:
    return render_page(simulation_page(reports, comparison_sentence=sentence))


class TestFile:
    def test_is_well_formed_and_loads_nothing(self) -> None:
        for reports in ([simulated()], [simulated(), simulated("reserve", seed=2, classes=2)]):
            page = page_of(*reports)
            assert Reader(page).loads == ["data:,"]
            assert not re.search(r"https?://|@import|url\(|fetch\(|import\(", page)
            assert "default-src 'none'" in page

    def test_is_written_as_utf_8(self, tmp_path: Path) -> None:
        path = tmp_path / "r.html"
        write_report(path, [simulated()], title="Größe ≤ 1", comparison_sentence="It wins.")
        text = path.read_text(encoding="utf-8")
        assert "Größe ≤ 1" in text
        assert "It wins." in Reader(text).text

    def test_text_from_outside_stays_text(self) -> None:
        evil = "</script><script>alert('x')</script><b a=\"&\">\u2028"
        report = replace(
            simulated(),
            title=evil,
            profile=evil,
            result=replace(simulated().result, settings={evil: evil}),
        )
        report.records[0].request_id, kept = evil, report.records[0].request_id
        try:
            page = page_of(report, report, sentence=evil)
        finally:
            report.records[0].request_id = kept
        reader = Reader(page)
        assert len(reader.scripts) == 2  # the data and the program
        assert "<b a" not in page
        names = [row["id"] for row in reader.data[-1]["groups"][0]["rows"]]
        assert evil in names
        assert reader.text.count("alert('x')") > 5

    def test_stays_below_a_megabyte_however_long_the_simulation(self) -> None:
        big = simulated(num_requests=1200, seats=40, most_moves=400)
        assert len(big.records) > 300
        assert max(len(record.spans) for record in big.records) > 300
        assert len(big.timeline.start_s) > 900
        reports = [replace(big, title=title) for title in ("a", "b", "c", "d")]
        for chosen in (reports[:1], reports):
            assert 50_000 < len(page_of(*chosen).encode()) < 1_000_000

    def test_a_simulation_without_requests_has_a_report_too(self) -> None:
        empty = SimulationReport.of(
            "nothing",
            RequestLog(),
            Timeline(("waiting", "running", "swapped", "kv_usage", "swap_usage")),
            SchedulerMetrics(),
            profile="",
            simulated_s=0,
            wall_s=0,
            steps=0,
        )
        assert "nothing" in Reader(page_of(empty)).text
        assert "nothing" in Reader(page_of(empty, simulated())).text

    def test_needs_a_simulation(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            simulation_page([])


class TestContents:
    def test_every_plot_has_its_data_a_summary_and_figures(self) -> None:
        report = simulated(classes=2)
        reader = Reader(page_of(report))
        kinds = [spec["kind"] for spec in reader.data]
        assert kinds == ["xy", "xy", "xy", "xy", "xy", "lives"]
        assert [plot["data-chart"] for plot in reader.plots] == [str(i) for i in range(6)]
        assert all(plot["aria-label"] and plot["role"] == "img" for plot in reader.plots)
        ttft, _, _, queues, pools, lives = reader.data
        assert ttft["x"]["log"]
        assert ttft["curves"][0]["y"][-1] == 1
        assert ttft["curves"][0]["x"][-1] == pytest.approx(report.result.ttft_s.max, rel=1e-4)
        assert [curve["name"] for curve in queues["curves"]] == ["waiting", "running", "swapped"]
        for curve in (*queues["curves"], *pools["curves"]):
            assert len(curve["x"]) == len(curve["y"]) + 1 == len(curve["high"]) + 1
        assert max(queues["curves"][2]["high"]) == report.result.swapped_queue_size_max
        (group,) = lives["groups"]
        assert len(group["rows"]) == len(report.records)
        for row, record in zip(group["rows"], report.records, strict=True):
            assert row["life"][0] == pytest.approx(record.arrival_s, abs=1e-3)
            assert row["life"][-1] == pytest.approx(record.finish_s, abs=1e-3)
            assert [("waiting", "running", "swapped")[s] for s in row["life"][1::2]] == [
                span[0].value for span in record.spans
            ]
        for words in (
            "Class 1 (30 requests)",
            "Goodput",
            "mean ITL ≤ 60.0 ms",
            "max_num_seqs",
            "swap_gib",
        ):
            assert words in reader.text
        assert duration(report.result.e2e_s.p99) in reader.text

    def test_the_best_of_each_row_is_marked_unless_all_are_alike(self) -> None:
        slow = simulated("slow", seats=5)
        page = simulation_page([simulated(), slow])
        rows = {row.name: row for row in page.sections[0].tables[0].rows}
        throughput = rows["Output tokens per second"]
        assert [cell.best for cell in throughput.cells] == [True, False]
        assert throughput.cells[1].note.startswith("−")
        ttft = rows["TTFT p99"]
        assert [cell.best for cell in ttft.cells] == [True, False]
        assert ttft.cells[1].note.startswith(("+", "×"))
        assert not any(cell.best for cell in rows["Most of the device pool in use"].cells)
        twins = simulation_page([simulated(), replace(simulated(), title="twin")])
        assert not any(c.best for row in twins.sections[0].tables[0].rows for c in row.cells)

    def test_settings_that_differ_are_marked(self) -> None:
        page = simulation_page([simulated(), simulated("slow", seats=5)])
        rows = {row.name: row for row in page.sections[-1].tables[0].rows}
        assert rows["max_num_seqs"].differs
        assert not rows["swap_gib"].differs

    def test_other_pages_are_made_of_the_same_pieces(self) -> None:
        """The tuner's, for one: points in a plane."""
        points = Curve("trials", "c0", [1.0, 2.0], [0.5, 0.7], kind="points", labels=["a", "b"])
        chart = Chart("Front", "Two trials.", Axis("x", "number"), Axis("y", "share"), [points])
        page = Page(
            "Tuned",
            facts=[Fact("Best", "1")],
            sections=[
                Section("S", charts=[chart], tables=[Table("T", ["", "v"], [Row.of("r", "1")])])
            ],
        )
        assert Reader(render_page(page)).data[0]["curves"][0]["labels"] == ["a", "b"]


VALUES = [
    0.0,
    0.00042,
    0.0042,
    0.0427,
    0.4321,
    0.9996,
    1.0,
    9.994,
    59.96,
    119.0,
    121,
    3599,
    8000,
    4e5,
]


def test_numbers_are_written_as_people_say_them() -> None:
    assert [duration(v) for v in (None, 0, 0.00042, 0.0427, 2.345, 90, 600, 9000)] == [
        *("–", "0 s", "0.42 ms", "42.7 ms", "2.35 s", "90.0 s", "10.0 min", "2.50 h"),
    ]
    assert [number(v) for v in (0, 0.05, 3.14159, 31.4159, 314159.2)] == [
        *("0", "0.05", "3.14", "31.4", "314,159"),
    ]
    assert [share(v) for v in (0, 0.5, 0.9876, 1)] == ["0%", "50%", "98.8%", "100%"]
    assert [size(v) for v in (0, 1023, 1536, 2**30 * 3.5)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.50 GiB",
    ]


needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="the script of the page is run by node, which is not here"
)


@needs_node
class TestScript:
    def run(self, folder: Path, expression: str) -> Any:
        """The value of an expression about ``L``, the script's pure functions."""
        program = folder / "program.cjs"
        program.write_text(Reader(page_of(simulated())).scripts[1], encoding="utf-8")
        code = f"const L = require({json.dumps(str(program))});"
        code += f"console.log(JSON.stringify({expression}))"
        done = subprocess.run(
            ["node", "-e", code], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_writes_numbers_as_the_tables_do(self, tmp_path: Path) -> None:
        values = json.dumps(VALUES)
        told = self.run(tmp_path, f"{values}.map((v) => [L.duration(v), L.number(v), L.share(v)])")
        assert told == [[duration(v), number(v), share(v)] for v in VALUES]

    def test_ticks_are_round_and_within_the_axis(self, tmp_path: Path) -> None:
        linear, clock, decades, few, text = self.run(
            tmp_path,
            "[L.linearTicks(0, 97, 5), L.clockTicks(100, 3500, 6), L.logTicks(0.003, 40, 9),"
            " L.logTicks(0.04, 0.09, 8), [L.clock(3725.5, 0.1), L.clock(59.999, 1),"
            " L.tickText('duration', 2), L.tickText('duration', 0.1), L.tickText('count', 1000)]]",
        )
        assert linear == [0, 20, 40, 60, 80]
        assert clock == [600, 1200, 1800, 2400, 3000]
        assert decades == [0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30]
        assert few == [0.04, 0.05, 0.06, 0.07, 0.08, 0.09]
        assert text == ["1:02:05.5", "1:00", "2 s", "100 ms", "1,000"]

    def test_zooming_keeps_what_is_under_the_pointer_and_stays_inside(self, tmp_path: Path) -> None:
        closer, out, edge, deepest = self.run(
            tmp_path,
            "[L.zoomed([0, 100], 30, 0.5, 0, 100, 1), L.zoomed([15, 65], 30, 9, 0, 100, 1),"
            " L.clamped(80, 130, 0, 100, 1), L.zoomed([40, 42], 41, 0.01, 0, 100, 1)]",
        )
        assert closer == [15, 65]
        assert out == [0, 100]
        assert edge == [50, 100]
        assert deepest == [40.5, 41.5]

    def test_steps_and_bars_are_drawn_where_they_are(self, tmp_path: Path) -> None:
        step, cut, band, bars, spans, shown = self.run(
            tmp_path,
            "(() => { const s = (v) => v * 10, x = [0, 1, 3], life = [0, 0, 1, 1, 3, 2, 4];"
            " const rows = [{ life }, { life: [8, 0, 9] }];"
            " return [L.stepPath(x, [5, 2], s, s, 0, 3), L.stepPath(x, [5, 2], s, s, 0.5, 2),"
            "  L.bandPath(x, [1, 2], [5, 4], s, s, 0, 3), L.barPaths([rows[0]], 3, s, 0, 10, 0, 4),"
            "  [0, 2.9, 3, 4].map((t) => L.spanAt(life, t)?.state ?? null),"
            "  L.livesIn(rows, 2, 7).length]; })()",
        )
        assert step == "M0 50H10V20H30"
        assert cut == "M5 50H10V20H20"
        assert band == "M0 50H10V40H30L30 20H10V10H0Z"
        assert bars == ["M0 0h10v7.8h-10z", "M10 0h20v7.8h-20z", "M30 0h10v7.8h-10z"]
        assert spans == [0, 1, 2, None]
        assert shown == 1
