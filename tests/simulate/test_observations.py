"""What a simulation collects is bounded, and still right."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.errors import ConfigError
from layby.results import Distribution
from layby.scheduling import RequestStatus
from layby.simulate.observations import (
    Durations,
    RequestLog,
    RequestRecord,
    SimulationReport,
    TierMoves,
    Timeline,
)

WAITING, RUNNING, SWAPPED = RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.SWAPPED

durations = st.one_of(st.just(0.0), st.floats(1e-6, 1e5))
weighted = st.lists(st.tuples(durations, st.integers(1, 50)), min_size=1, max_size=60)


@dataclass
class Counts:
    """Totals of a scheduler that did little."""

    preemptions_swap: int = 3
    preemptions_recompute: int = 1
    recomputed_tokens: int = 70
    swapped_queue_size_max: int = 2
    avg_swapped_duration_s: float = 1.5
    preemption_rate: float = 0.1
    kv_usage_max: float = 0.9


def collected(values: list[tuple[float, int]]) -> Durations:
    known = Durations()
    for value, weight in values:
        known.add(value, weight)
    return known


class TestDurations:
    @given(weighted)
    def test_agrees_with_the_percentiles_of_the_values_themselves(
        self, values: list[tuple[float, int]]
    ) -> None:
        everything = np.repeat([v for v, _ in values], [w for _, w in values])
        known = collected(values)
        told = known.distribution()
        assert known.count == len(everything)
        assert told.mean == pytest.approx(everything.mean(), rel=1e-12)
        assert told.max == everything.max()
        for name, percent in (("p50", 50), ("p90", 90), ("p99", 99)):
            expected = np.percentile(everything, percent)
            assert getattr(told, name) == pytest.approx(expected, rel=0.0025), name

    @given(st.lists(weighted, max_size=4))
    def test_merging_parts_is_adding_all(self, parts: list[list[tuple[float, int]]]) -> None:
        merged = Durations.merged(map(collected, parts))
        whole = collected(list(itertools.chain(*parts)))
        assert merged.count == whole.count
        # The means are sums in another order.
        assert merged.mean_s == pytest.approx(whole.mean_s)
        assert merged.distribution().p99 == whole.distribution().p99
        assert merged.distribution().max == whole.distribution().max

    def test_nothing_measured_is_told_as_none(self) -> None:
        assert Durations().distribution() == Distribution()
        assert Durations().cdf() == []

    def test_one_value_is_told_exactly(self) -> None:
        assert collected([(0.37, 5)]).distribution() == Distribution(
            pytest.approx(0.37), 0.37, 0.37, 0.37, 0.37
        )

    @pytest.mark.parametrize("value", [-1.0, math.nan])
    def test_what_is_no_duration_is_refused(self, value: float) -> None:
        with pytest.raises(ValueError, match="duration"):
            Durations().add(value)

    def test_memory_depends_on_the_range_not_on_the_number(self) -> None:
        drawn, known = random.Random(1), Durations()
        for _ in range(20_000):
            known.add(drawn.lognormvariate(0, 0.2))
        assert len(known._bins) < 600
        assert len(known._new) < 5000

    @given(weighted)
    def test_the_curve_never_falls_and_passes_where_the_values_are(
        self, values: list[tuple[float, int]]
    ) -> None:
        known = collected(values)
        points = known.cdf(50)
        assert len(points) <= 55
        assert points == sorted(points)
        assert [share for _, share in points] == sorted(share for _, share in points)
        assert points[-1] == (known.distribution().max, 1.0)
        everything = np.repeat([v for v, _ in values], [w for _, w in values])
        for value_s, share in points:
            # A point at the end of a bin may count neighbours of the bin's width.
            assert np.mean(everything <= value_s * 1.004) >= share - 1e-9
            if value_s > points[0][0]:
                assert np.mean(everything < value_s * 0.996) <= share + 1e-9


shares = st.integers(0, 1000).map(lambda count: count / 1000)  # of blocks, so none is minute
steps = st.lists(st.tuples(st.floats(0, 100), st.integers(0, 40), shares), min_size=2, max_size=200)


class TestTimeline:
    @given(steps, st.integers(1, 5), st.sampled_from([2, 10, 64]))
    def test_areas_and_peaks_survive_however_often_neighbours_are_merged(
        self, steps: list[tuple[float, int, float]], rows: int, max_points: int
    ) -> None:
        timeline = Timeline(("waiting", "kv_usage"), max_points=max_points)
        timeline._flush_at = 24 * rows  # so that a few rows go the way of thousands
        time_s, area, high = 0.0, np.zeros(2), np.zeros(2)
        for lasts_s, waiting, usage in steps:
            timeline.add(time_s, (waiting, usage))
            area += np.array([waiting, usage]) * lasts_s
            # What lasts less than the clock can tell has no area and no peak.
            if time_s + lasts_s > time_s:
                high = np.maximum(high, [waiting, usage])
            time_s += lasts_s
        for series in (timeline.series(end_s=time_s), timeline.series().coarser(7)):
            assert len(series.start_s) <= max_points
            if time_s == 0:
                assert series.start_s == []
                continue
            assert series.end_s == pytest.approx(time_s)
            lengths = np.diff([*series.start_s, series.end_s])
            assert np.all(lengths > 0)
            for index, name in enumerate(timeline.columns):
                assert lengths @ series.mean[name] == pytest.approx(area[index], rel=1e-6, abs=1e-9)
                assert max(series.high[name]) == high[index]

    def test_points_are_bounded_and_peaks_stay_where_they_were(self) -> None:
        timeline = Timeline(("waiting",))
        for second in range(50_000):
            timeline.add(second, (900 if second == 31_234 else second % 7,))
        series = timeline.series(end_s=50_000)
        assert 900 < len(series.start_s) <= 2000
        at = series.high["waiting"].index(900)
        assert series.start_s[at] <= 31_234 < series.start_s[at + 1]
        assert len(series.coarser(100).start_s) <= 100
        assert max(series.coarser(100).high["waiting"]) == 900

    def test_what_never_changes_is_one_stretch(self) -> None:
        timeline = Timeline(("running",))
        for second in range(10_000):
            timeline.add(second / 7, (0.1,))
        series = timeline.series(end_s=3000)
        assert len(series.start_s) == 1
        assert series.mean["running"] == [pytest.approx(0.1)]

    def test_of_several_values_at_one_time_the_last_holds(self) -> None:
        timeline = Timeline(("swapped",))
        for value in (5, 9, 2):
            timeline.add(1.0, (value,))
        series = timeline.series(end_s=4.0)
        assert (series.start_s, series.end_s) == ([1.0], pytest.approx(4.0))
        assert series.high["swapped"] == [2]

    def test_without_time_there_is_nothing_to_tell(self) -> None:
        timeline = Timeline(("swapped",))
        assert timeline.series(end_s=3.0).start_s == []
        timeline.add(1.0, (5,))
        assert timeline.series().start_s == []

    def test_wrong_use_is_told(self) -> None:
        timeline = Timeline(("waiting", "running"))
        with pytest.raises(ValueError, match="waiting, running"):
            timeline.add(0, (1,))
        timeline.add(5.0, (1, 1))
        timeline.add(4.0, (1, 1))
        with pytest.raises(ValueError, match=r"5\.0 s to 4\.0 s"):
            timeline.series()
        with pytest.raises(ValueError, match="even"):
            Timeline(("waiting",), max_points=7)


def lived(log: RequestLog, index: int, *, preemptions: int = 0, seconds: float = 4.0) -> None:
    """A request that waits a second, runs, and is parked for half a second so many times."""
    start_s = 10.0 * index
    record = log.start(f"r{index}", arrival_s=start_s, num_prompt_tokens=20, priority=index % 2)
    record.enter(RUNNING, start_s + 1)
    record.first_token_s = start_s + 1.5
    for turn in range(preemptions):
        record.enter(SWAPPED, start_s + 2 + turn)
        record.enter(RUNNING, start_s + 2.5 + turn)
    log.finish(record, start_s + seconds + preemptions, num_output_tokens=6)


class TestRequestLog:
    def test_a_record_tells_states_preemptions_and_durations(self) -> None:
        log = RequestLog()
        record = log.start("a", arrival_s=1.0, num_prompt_tokens=8)
        record.enter(RUNNING, 3.0)
        record.first_token_s = 3.5
        record.enter(SWAPPED, 4.0)
        record.enter(RUNNING, 6.0)
        record.enter(WAITING, 7.0)
        record.enter(RUNNING, 7.0)
        log.finish(record, 9.5, num_output_tokens=4)
        assert record.spans == [
            (WAITING, 1.0, 3.0),
            (RUNNING, 3.0, 4.0),
            (SWAPPED, 4.0, 6.0),
            (RUNNING, 6.0, 7.0),
            (RUNNING, 7.0, 9.5),
        ]
        assert (record.preemptions_swap, record.preemptions_recompute) == (1, 1)
        assert (record.queueing_s, record.ttft_s, record.e2e_s) == (2.0, 2.5, 8.5)
        assert record.itl_s == 2.0  # three gaps in six seconds
        assert record.swapped_s == 2.0

    def test_a_request_without_a_token_counts_but_has_no_ttft(self) -> None:
        log = RequestLog(slo={"ttft_s": 10})
        log.finish(log.start("a", arrival_s=0.0, num_prompt_tokens=8), 1.0, 0)
        overall = log.overall()
        assert overall.requests_finished == 1
        assert overall.ttft_s.count == overall.queueing_s.count == 0
        assert log.goodput(overall).requests_met == 0  # type: ignore[union-attr]

    def test_goodput_counts_requests_that_keep_every_limit(self) -> None:
        log = RequestLog(slo={"ttft_s": 2.0, "itl_s": 0.6})
        lived(log, 0, seconds=4.0)  # 5 gaps in 2.5 s
        lived(log, 1, seconds=5.0)  # 5 gaps in 3.5 s: too slow
        lived(log, 2, seconds=4.5)
        good = log.goodput(log.overall())
        assert good is not None
        assert (good.requests_met, good.share) == (2, pytest.approx(2 / 3))
        assert good.requests_per_s == pytest.approx(2 / 24.5)
        assert log.goodput(log.classes[1]).share == 0  # type: ignore[union-attr]
        assert RequestLog().goodput(log.overall()) is None

    @pytest.mark.parametrize("slo", [{"ttft": 2.0}, {"ttft_s": 0}, {"itl_s": math.nan}])
    def test_an_slo_that_says_nothing_is_refused(self, slo: dict[str, float]) -> None:
        with pytest.raises(ConfigError, match="SLO"):
            RequestLog(slo=slo)

    def test_keeps_the_most_preempted_the_longest_and_an_even_sample(self) -> None:
        log = RequestLog(max_records=40)
        for index in range(2000):
            lived(
                log,
                index,
                preemptions=9 if index == 777 else 0,
                seconds=100 if index == 1234 else 4,
            )
        records = log.records()
        indices = [record.index for record in records]
        assert len(records) <= 40
        assert indices == sorted(indices)
        assert {777, 1234} <= set(indices)
        assert len([i for i in indices if i >= 1000]) > 5
        assert log.overall().e2e_s.count == 2000

    def test_rows_are_written_as_requests_finish(self) -> None:
        file = io.StringIO()
        log = RequestLog(csv_file=file)
        lived(log, 0, preemptions=2)
        log.finish(log.start('say "hi", you', arrival_s=5.0, num_prompt_tokens=8), 6.0, 0)
        rows = list(csv.DictReader(io.StringIO(file.getvalue())))
        assert [row["request_id"] for row in rows] == ["r0", 'say "hi", you']
        assert rows[0]["preemptions_swap"] == "2"
        assert float(rows[0]["swapped_s"]) == 1.0
        assert float(rows[0]["e2e_s"]) == 6.0
        assert rows[1]["first_token_s"] == ""

    @given(st.lists(st.floats(0.001, 50), min_size=1, max_size=40), st.integers(1, 12))
    def test_few_spans_still_cover_all_the_time(self, lengths: list[float], limit: int) -> None:
        record = RequestRecord(0, "a", 0, 0.0, 8)
        time_s, states = 0.0, itertools.cycle([RUNNING, SWAPPED])
        for length in lengths:
            time_s += length
            record.enter(next(states), time_s)
        spans = record.spans_at_most(limit)
        assert len(spans) == min(limit, len(lengths))
        assert (spans[0][1], spans[-1][2]) == (0.0, time_s)
        assert all(one[2] == two[1] for one, two in itertools.pairwise(spans))
        assert all(span[0] in (WAITING, RUNNING, SWAPPED) for span in spans)


def report_of(log: RequestLog, *, wall_s: float = 0.1) -> SimulationReport:
    timeline = Timeline(("waiting", "running"))
    for second in range(3000):
        timeline.add(second, (second % 13, second % 5))
    return SimulationReport.of(
        "swapped-first",
        log,
        timeline,
        Counts(),
        profile="test machine",
        simulated_s=3000,
        wall_s=wall_s,
        steps=12,
        moves=[TierMoves("ram", 4, 3, 4096, 3072)],
        settings={"num_blocks": 64},
    )


class TestSimulationReport:
    def test_is_the_result_schema_with_more_keys(self) -> None:
        log = RequestLog(slo={"ttft_s": 2.0})
        for index in range(4):
            lived(log, index)
            log.of_class(index % 2).itl_s.add(0.1, 5)
        report = report_of(log)
        known = report.as_dict()
        assert list(known)[: len(report.result.as_dict())] == list(report.result.as_dict())
        assert known["requests_finished"] == 4
        assert known["duration_s"] == 34.0
        assert known["output_tokens_per_s"] == pytest.approx(24 / 34)
        assert known["ttft_s"]["p50"] == pytest.approx(1.5)
        assert known["queueing_s"]["max"] == 1.0
        assert known["preemptions"] == {"swap": 3, "recompute": 1}
        assert known["classes"]["1"]["queueing_s"]["p90"] == pytest.approx(1.0)
        assert known["classes"]["0"]["goodput"]["share"] == 1.0
        assert known["moves"][0]["out_bytes"] == 4096
        assert report.cdfs["itl_s"] == [(0.1, 1.0)]
        json.dumps(known, allow_nan=False)

    def test_the_same_run_gives_the_same_bytes_however_long_it_took(self) -> None:
        log = RequestLog()
        lived(log, 0)
        one, two = report_of(log, wall_s=0.1), report_of(log, wall_s=0.9)
        assert json.dumps(one.as_dict()) == json.dumps(two.as_dict())

    def test_without_requests_it_is_empty_but_whole(self) -> None:
        known = report_of(RequestLog()).as_dict()
        assert known["requests_finished"] == known["duration_s"] == 0
        assert known["classes"] == {}
        assert known["e2e_s"]["p99"] is None
