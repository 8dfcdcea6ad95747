"""An SLO is read as it is meant, written as it is read, and measured honestly."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.errors import ConfigError
from layby.scheduling.metrics import SchedulerMetrics
from layby.simulate.observations import RequestLog, SimulationReport, Timeline
from layby.simulate.slo import METRICS, STATISTICS, Slo, SloTerm, parse_slo


def report(*ttfts_s: float, refused: int = 0) -> SimulationReport:
    """Of requests that came at 0 s, had their first token after so long, and ended 1 s later."""
    log = RequestLog()
    for number, ttft_s in enumerate(ttfts_s):
        record = log.start(str(number), arrival_s=0.0, num_prompt_tokens=1)
        record.first_token_s = ttft_s
        log.finish(record, ttft_s + 1, 1)
    return SimulationReport.of(
        "t",
        log,
        Timeline(["waiting"]),
        SchedulerMetrics(),
        profile="p",
        simulated_s=1,
        wall_s=1,
        steps=1,
        settings={"requests_refused": refused},
    )


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("ttft_p99<2s", [("ttft_s", "p99", 2.0)]),
        ("ttft<2s", [("ttft_s", "p99", 2.0)]),
        ("ttft_s<2s", [("ttft_s", "p99", 2.0)]),
        ("e2e_s_max<=1.5m", [("e2e_s", "max", 90.0)]),
        (
            " ITL_P50 < 200 ms , queueing_mean<30us",
            [("itl_s", "p50", 0.2), ("queueing_s", "mean", 3e-5)],
        ),
        ("itl<.5s,itl_mean<1e2ms", [("itl_s", "p99", 0.5), ("itl_s", "mean", 0.1)]),
        ("e2e<200µs", [("e2e_s", "p99", 0.0002)]),
    ],
)
def test_what_is_written_is_what_is_meant(text: str, terms: list[tuple[str, str, float]]) -> None:
    slo = parse_slo(text)
    assert [(term.metric, term.statistic, term.limit_s) for term in slo.terms] == terms
    assert parse_slo(str(slo)) == slo


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "look like ttft_p99<2s"),
        ("ttft", "look like ttft_p99<2s; got 'ttft'"),
        ("ttft<2s,", "got ''"),
        ("ttft>2s", "look like"),
        ("tfft<2s", "no metric 'tfft'; did you mean ttft"),
        ("latency<2s", "no metric 'latency'; they are ttft, itl, e2e, queueing"),
        ("ttft_p95<2s", "no statistic 'p95'; did you mean p9"),
        ("ttft<2", "must have one of the units us, ms, s, m"),
        ("ttft<2h", "not 'h'"),
        ("ttft<0s", "more than 0 s"),
        ("ttft<1e999s", "finite"),
        ("ttft<1s,ttft_p99<2s", "limits p99 TTFT twice"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


@given(
    st.lists(
        st.builds(
            SloTerm,
            st.sampled_from(METRICS),
            st.sampled_from(STATISTICS),
            st.floats(1e-9, 1e7, exclude_min=True),
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda term: (term.metric, term.statistic),
    )
)
def test_reading_what_was_written_gives_the_same_to_the_bit(terms: list[SloTerm]) -> None:
    slo = Slo(tuple(terms))
    assert parse_slo(str(slo)) == slo


def test_the_text_is_as_a_person_would_write_it() -> None:
    assert str(parse_slo("ttft<2s,itl_max<200ms,e2e<1.5m,queueing<.001s")) == (
        "ttft_p99<2s,itl_max<200ms,e2e_p99<90s,queueing_p99<1ms"
    )


def test_a_single_request_is_held_to_the_loosest_of_its_limits() -> None:
    slo = parse_slo("ttft_p50<1s,ttft_p99<3s,itl<200ms")
    assert slo.limits == {"ttft_s": 3.0, "itl_s": 0.2}
    RequestLog(slo=slo.limits)  # knows all of the names
    RequestLog(slo=parse_slo("queueing<1s,e2e<1s").limits)


def test_excess_is_the_worst_share_of_a_limit() -> None:
    slo = parse_slo("ttft_max<2s,e2e_max<10s")
    assert slo.excess(report(1.0, 1.5)) == pytest.approx(0.75)
    assert slo.misses(report(1.0, 1.5)) == []
    assert slo.excess(report(1.0, 5.0)) == pytest.approx(2.5)
    [miss] = slo.misses(report(1.0, 5.0))
    assert miss == "max TTFT is 5.00 s, 2.50 times the limit of 2.00 s"


def test_exactly_the_limit_is_kept() -> None:
    assert parse_slo("ttft_max<2s").excess(report(2.0)) == 1.0
    assert parse_slo("ttft_max<2s").misses(report(2.0)) == []


def test_who_refuses_or_finishes_nobody_keeps_nothing() -> None:
    slo = parse_slo("ttft<2s")
    assert slo.excess(report(1.0, refused=1)) == math.inf
    assert slo.misses(report(1.0, refused=1)) == ["1 request refused"]
    assert slo.excess(report()) == math.inf
    assert slo.misses(report()) == ["no request finished"]


def test_what_was_never_measured_is_not_exceeded() -> None:
    """Answers of one token have no ITL."""
    assert parse_slo("itl<1ms").excess(report(1.0)) == 0.0
    assert parse_slo("itl<1ms").misses(report(1.0)) == []


def test_terms_made_in_code_are_checked_too() -> None:
    for metric, statistic, limit_s in (
        ("ttft", "p99", 1.0),
        ("ttft_s", "p95", 1.0),
        ("ttft_s", "p99", math.nan),
    ):
        with pytest.raises(ConfigError):
            SloTerm(metric, statistic, limit_s)
    with pytest.raises(ConfigError, match="must promise something"):
        Slo(())
