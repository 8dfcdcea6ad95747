"""Policies side by side: the same figures however they are run, and a sentence that is fair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layby.errors import ConfigError
from layby.results import Distribution
from layby.scheduling.policy import POLICIES
from layby.simulate.compare import compare, parse_policies, sentence
from layby.simulate.observations import SimulationReport, TierMoves
from layby.simulate.profiles import load_profile
from layby.simulate.settings import scheduler_config
from layby.simulate.simulation import simulate
from layby.simulate.slo import parse_slo
from layby.simulate.traces import Trace, TraceRequest

TRACE = Trace("t", [TraceRequest(0.01 * i, 50 + i % 90, 20 + i % 60) for i in range(60)])
TIGHT = {"num_blocks": 40}


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    profile = load_profile("a100-llama3-8b")
    return compare(TRACE, profile, tuple(POLICIES), options=TIGHT, slo=parse_slo("ttft<20s"))


def test_each_report_is_that_of_its_policy_alone(reports: list[SimulationReport]) -> None:
    assert [report.title for report in reports] == list(POLICIES)
    profile = load_profile("a100-llama3-8b")
    for policy, report in zip(POLICIES, reports, strict=True):
        alone = simulate(
            TRACE, profile, scheduler_config(profile, scheduling_policy=policy, **TIGHT)
        )
        assert report.result == alone.result
    assert reports[0].result.preemptions.swap > 0
    assert reports[0].result != reports[1].result


def test_processes_of_their_own_change_nothing(reports: list[SimulationReport]) -> None:
    told: list[tuple[int, int]] = []
    apart = compare(
        TRACE,
        load_profile("a100-llama3-8b"),
        tuple(POLICIES),
        options=TIGHT,
        slo=parse_slo("ttft<20s"),
        processes=2,
        progress=lambda ended, of: told.append((ended, of)),
    )
    assert [r.as_dict() for r in apart] == [r.as_dict() for r in reports]
    assert told == sorted(told)
    assert told[-1] == (240, 240)


def test_where_there_are_no_processes_it_runs_without(
    reports: list[SimulationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no processes here")

    monkeypatch.setattr("layby.simulate.compare.ProcessPoolExecutor", refuse)
    told: list[tuple[int, int]] = []
    here = compare(
        TRACE,
        load_profile("a100-llama3-8b"),
        ("swapped-first", "reserve"),
        options=TIGHT,
        slo=parse_slo("ttft<20s"),
        processes=2,
        progress=lambda ended, of: told.append((ended, of)),
    )
    assert [r.as_dict() for r in here] == [reports[0].as_dict(), reports[3].as_dict()]
    assert told == sorted(told)
    assert told[-1] == (120, 120)


def test_a_setting_that_cannot_work_is_found_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        compare(TRACE, load_profile("a100-llama3-8b"), ("reserve",), options={"max_num_seqs": 0})


# --- the policies' names ---


def test_policies_are_read_with_blanks() -> None:
    assert parse_policies("swapped-first, reserve") == ("swapped-first", "reserve")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("swapped-first,reserv", "no policy 'reserv'; did you mean reserve"),
        ("swapped-first,xyz", "they are swapped-first, running-first"),
        ("reserve", "two or more policies, got reserve"),
        ("reserve,reserve", "must differ"),
        ("", "no policy ''"),
    ],
)
def test_policies_that_cannot_be_compared_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_policies(text)


# --- the sentence ---


def made(
    base: SimulationReport,
    title: str,
    *,
    throughput: float = 100.0,
    ttft_s: float = 1.0,
    itl_s: float = 0.05,
    worst_itl_s: float = 1.0,
    e2e_s: float = 10.0,
    recomputed: int = 0,
    moved: int = 0,
    refused: int = 0,
    known: bool = False,
) -> SimulationReport:
    """A report with these figures."""
    result = replace(
        base.result,
        output_tokens_per_s=throughput,
        ttft_s=Distribution(ttft_s, ttft_s, ttft_s, ttft_s, ttft_s),
        itl_s=Distribution(itl_s, itl_s, itl_s, itl_s, worst_itl_s),
        e2e_s=Distribution(e2e_s, e2e_s, e2e_s, e2e_s, e2e_s),
        recomputed_tokens=recomputed,
        settings={"requests_refused": refused, "answer_lengths_known": known},
    )
    moves = [TierMoves("ram", moved, 0, 0, 0)]
    return replace(base, title=title, result=result, moves=moves, goodput=None)


def test_gains_and_losses_are_both_told(reports: list[SimulationReport]) -> None:
    base = reports[0]
    text = sentence(
        [
            made(base, "swapped-first", throughput=112, itl_s=0.035, ttft_s=1.09, moved=500),
            made(base, "recompute-only", recomputed=7000),
            made(base, "running-first", throughput=111.5, itl_s=0.035, ttft_s=1.09, moved=500),
        ]
    )
    assert text == (
        "On this trace swapped-first has, against recompute-only, 12% more throughput, a 30% "
        "shorter p99 ITL and no recomputed tokens instead of 7,000, but also a 9% longer p99 TTFT "
        "and 500 moved blocks instead of none; no difference (less than 1% in every figure) from "
        "running-first."
    )


def test_what_only_loses_is_told_as_well(reports: list[SimulationReport]) -> None:
    base = reports[0]
    text = sentence(
        [
            made(base, "swapped-first", e2e_s=25.0, worst_itl_s=9, refused=3, throughput=92),
            made(base, "reserve", known=True),
        ]
    )
    assert text == (
        "On this trace swapped-first has, against reserve (which is told here how long each answer "
        "will be), nothing but losses: 8% less throughput, a worst ITL 9.0 times as long, a mean "
        "E2E 2.5 times as long and 3 refused requests instead of none."
    )


def test_no_difference_is_no_difference(reports: list[SimulationReport]) -> None:
    base = replace(
        reports[0],
        result=replace(
            reports[0].result, preemptions=replace(reports[0].result.preemptions, swap=0)
        ),
    )
    text = sentence(
        [made(base, "swapped-first"), made(base, "reserve", throughput=100.9, ttft_s=0.995)]
    )
    assert text == (
        "On this trace swapped-first makes no difference (less than 1% in every figure) from "
        "reserve; memory never ran so short that a request was preempted."
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (1.08, 1.0, "an 8% longer p99 TTFT"),
        (1.11, 1.0, "an 11% longer p99 TTFT"),
        (1.17, 1.0, "a 17% longer p99 TTFT"),
        (1.0, 1.85, "a 46% shorter p99 TTFT"),
        (12.0, 1.0, "a p99 TTFT 12 times as long"),
        (0.001, 1.0, "an over 99% shorter p99 TTFT"),
    ],
)
def test_numbers_read_well(
    reports: list[SimulationReport], mine: float, theirs: float, words: str
) -> None:
    text = sentence([made(reports[0], "a", ttft_s=mine), made(reports[0], "b", ttft_s=theirs)])
    assert words in text


def test_it_says_who_keeps_the_slo(reports: list[SimulationReport]) -> None:
    one = made(reports[0], "one", ttft_s=1.0)
    two = made(reports[0], "two", ttft_s=3.0)
    assert sentence([one, two], parse_slo("ttft<2s")).endswith(
        "; only one keeps the SLO ttft_p99<2s."
    )
    assert sentence([one, two], parse_slo("ttft<4s")).endswith(
        "; all of them keep the SLO ttft_p99<4s."
    )
    assert sentence([one, two], parse_slo("ttft<1ms")).endswith(
        "; none of them keeps the SLO ttft_p99<1ms."
    )
