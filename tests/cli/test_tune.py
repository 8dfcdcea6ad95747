"""``layby tune`` and ``layby capacity``: what they print can be pasted, and bad input is told."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from layby.cli.app import app
from layby.errors import LaybyError
from layby.simulate.cost import CostModel, MoveCost
from layby.simulate.profiles import MEASURED, Profile, SchedulerDefaults

ARRIVALS = "gamma:rate=20,cv=0,requests=12,prompt=20,output=30"
SLO = "e2e_p99<20s"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A small pool, and moves that take long: many sequences at a time are a bad idea."""
    path = tmp_path / "toy.json"
    move = MoveCost(0.0, 0.02)
    Profile(
        name="toy",
        kind=MEASURED,
        model="toy",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        machine={"cpu": "clockwork"},
        block_size=4,
        block_bytes=2**20,
        scheduler=SchedulerDefaults(40, 40, 16, 64, 128),
        cost=CostModel(rows_s=((0, 0.01), (64, 0.02)), swap_out=move, swap_in=move),
        fit=None,
        held_out=None,
        created="2026-01-01",
    ).save(path)
    return str(path)


@pytest.fixture(autouse=True)
def _short_simulations_and_no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr("layby.simulate.capacity.MIN_REQUESTS", 160)


def call(*arguments: str) -> None:
    """Run a command in this process; errors come out as they are."""
    get_command(app).main(args=list(arguments), standalone_mode=False)


def tune_toy(profile: str, *arguments: str) -> None:
    call(
        *("tune", "--profile", profile, "--slo", SLO, "--arrivals", ARRIVALS),
        *("--trials", "10", "--jobs", "1", *arguments),
    )


def test_tune_prints_a_command_that_serve_takes(
    profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_toy(profile, "--num-blocks", "36")
    *printed, pasted = capsys.readouterr().out.strip().splitlines()
    assert pasted.startswith("layby serve ")
    assert "--num-blocks 36" in pasted
    assert any("Pareto front" in line for line in printed)
    assert any(line.startswith("The SLO is met") for line in printed)
    served: list[Any] = []
    monkeypatch.setattr("layby.server.serve", lambda engine, **_: served.append(engine))
    call(*shlex.split(pasted)[1:])
    assert served[0].num_blocks == 36


def test_tune_writes_json_page_and_study(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, study = tmp_path / "tune.html", tmp_path / "study"
    tune_toy(profile, "--json", "-", "--html", str(html), "--study", str(study))
    first = json.loads(capsys.readouterr().out)
    assert first["requests_finished"] == 12
    assert len(first["tune"]["trials"]) == 10
    assert first["tune"]["recommended"]["command"] in html.read_text()
    tune_toy(profile, "--json", "-", "--study", str(study))
    assert json.loads(capsys.readouterr().out) == first


def test_a_setting_that_is_given_is_not_searched(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tune_toy(profile, "--json", "-", "--max-num-seqs", "3", "--search-policy")
    found = json.loads(capsys.readouterr().out)["tune"]
    assert "max_num_seqs" not in found["trials"][0]["settings"]
    assert "scheduling_policy" in found["trials"][0]["settings"]
    assert "--max-num-seqs 3" in found["recommended"]["command"]


def test_another_seed_or_trace_for_a_study_is_refused(profile: str, tmp_path: Path) -> None:
    study = ("--study", str(tmp_path / "study"), "--trials", "1")
    tune_toy(profile, *study)
    with pytest.raises(LaybyError, match="was begun with a trace other than now"):
        tune_toy(profile, *study, "--max-requests", "5")


def test_capacity_says_rate_and_servers(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("capacity", "--profile", profile, "--arrivals", ARRIVALS, "--max-num-seqs", "2")
    call(*asked, "--slo", "e2e_p99<3s", "--rate", "30")
    printed = capsys.readouterr().out
    assert "One server takes" in printed
    assert "30 requests per second need" in printed
    call(*asked, "--slo", "e2e_p99<3s", "--rate", "30", "--json", "-")
    figures = json.loads(capsys.readouterr().out)
    found = figures["capacity"]
    assert figures["e2e_s"]["p99"] <= 3
    # A step takes 0.01 s and a little; of 30 steps each, two sequences at a time take turns.
    assert 4 < found["requests_per_s"] < 6.7
    servers = found["replicas"]["count"]
    assert servers >= 30 / found["requests_per_s"]
    assert (servers - 1) * found["requests_per_s"] < 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "--slo", "ttft<1s", "--arrivals", ARRIVALS, "--profile", "a200"), "no profile"),
        (("tune", "--slo", "speed<1s", "--arrivals", ARRIVALS), "no metric 'speed'"),
        (("tune", "--slo", "ttft<1s"), "nothing arrives"),
        (("tune", "--slo", "ttft<1s", "--arrivals", ARRIVALS, "--num-blocks", "2"), "KV blocks"),
        (("capacity", "--slo", "ttft<1s", "--arrivals", ARRIVALS, "--rate", "nan"), "rate must be"),
        (("capacity", "--slo", "ttft<1us", "--arrivals", ARRIVALS), "missed at any rate"),
        (
            ("capacity", "--slo", "ttft<1s", "--arrivals", ARRIVALS, "--headroom", "-1"),
            "headroom",
        ),
    ],
)
def test_bad_input_is_told_in_a_line(
    arguments: tuple[str, ...], message: str, profile: str
) -> None:
    own = () if "--profile" in arguments else ("--profile", profile)
    with pytest.raises(LaybyError, match=message) as caught:
        call(*arguments, *own)
    assert "\n" not in str(caught.value)


def test_the_slo_is_required(profile: str) -> None:
    with pytest.raises(typer.TyperException, match="slo"):
        call("tune", "--arrivals", ARRIVALS, "--profile", profile)


def test_an_slo_that_nothing_meets_is_an_error_after_the_report(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaybyError, match=r"e2e_p99<1us was met by none of 2 trials: p99 E2E"):
        call(
            *("tune", "--profile", profile, "--slo", "e2e_p99<1us", "--arrivals", ARRIVALS),
            *("--trials", "2", "--jobs", "1"),
        )
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("layby serve")


def test_a_rate_of_three_hundred_digits_is_refused(profile: str) -> None:
    with pytest.raises(LaybyError, match=r"rate must be above 0 and at most 1e\+09, got 1e\+300"):
        call(
            *("capacity", "--profile", profile, "--slo", SLO, "--arrivals", ARRIVALS),
            *("--rate", "1e300"),
        )


def test_a_study_must_be_a_file_of_its_own(profile: str, tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    with pytest.raises(LaybyError, match=r"--json and --study both write to"):
        tune_toy(profile, "--json", path, "--study", path)
