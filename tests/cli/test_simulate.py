"""``layby simulate``: good runs give every output, bad ones one clear line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from layby.cli import main
from layby.cli.simulate import scheduler_flags
from layby.simulate.settings import SCHEDULER_OPTIONS
from tests.engine.recorded import record

PROFILE = ("--profile", "a100-llama3-8b")
ARRIVALS = ("--arrivals", "poisson:rate=20,requests=40,prompt=100-400,output=20-80")
RUN = ("simulate", *PROFILE, *ARRIVALS)

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,55
"""


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON of a run, and nothing else on standard output."""
    assert main([*RUN, "--json", "-", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a run fails."""
    assert main(["simulate", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


# --- good runs ---


def test_the_json_has_the_schema_of_all_results_and_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = simulate(capsys, "--slo", "ttft<2s,itl<200ms", "--max-num-seqs", "16")
    assert list(known)[:15] == [
        *("requests_finished", "duration_s", "output_tokens", "output_tokens_per_s"),
        *("ttft_s", "itl_s", "e2e_s", "preemptions", "recomputed_tokens"),
        *("swapped_queue_size_max", "avg_swapped_duration_s", "preemption_rate"),
        *("kv_usage_max", "classes", "settings"),
    ]
    assert {"queueing_s", "goodput", "moves", "simulated_s", "steps", "timeline"} <= set(known)
    assert known["requests_finished"] == 40
    assert known["settings"]["max_num_seqs"] == 16
    assert known["settings"]["slo"] == "ttft_p99<2s,itl_p99<200ms"
    assert known["goodput"]["slo"] == {"ttft_s": 2.0, "itl_s": 0.2}
    assert known["title"] == "swapped-first"


def test_the_same_command_gives_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(capsys) == simulate(capsys)
    assert simulate(capsys)["duration_s"] != simulate(capsys, "--seed", "1")["duration_s"]


def test_the_tables_tell_what_was_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--slo", "ttft_p99<1us"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "a100-llama3-8b",
        "estimate",
        "40 requests",
        "26674 blocks of 16 tokens",
        "requests refused │ none",
        "scheduler steps",
        "Queueing",
        "Output tokens per second",
        "Preemptions by swap",
        "Requests within the SLO │ 0%",
        "SLO missed: p99 TTFT is",
    ):
        assert words in text or words.replace("│", "┃") in text, words


def test_every_request_that_finished_has_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows_file = tmp_path / "requests.csv"
    known = simulate(capsys, "--csv", str(rows_file), "--num-blocks", "60")
    rows = list(csv.DictReader(rows_file.read_text().splitlines()))
    assert len(rows) == known["requests_finished"] == 40
    assert sum(int(row["num_output_tokens"]) for row in rows) == known["output_tokens"]
    assert sum(int(row["preemptions_swap"]) for row in rows) == known["preemptions"]["swap"] > 0


def test_the_page_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    simulate(capsys, "--html", str(page))
    assert "swapped-first" in page.read_text(encoding="utf-8")


def test_a_comparison_has_a_run_for_each_policy_and_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    policies = ["recompute-only", "swapped-first"]
    known = simulate(
        capsys, "--compare", ",".join(policies), "--num-blocks", "60", "--html", str(page)
    )
    assert [each["title"] for each in known["runs"]] == policies
    assert [each["settings"]["policy"] for each in known["runs"]] == policies
    assert known["comparison"].startswith("On this trace recompute-only has, against swapped-first")
    assert known["comparison"] in page.read_text(encoding="utf-8")
    assert main([*RUN, "--compare", ",".join(policies), "--num-blocks", "60"]) == 0
    assert known["comparison"] in capsys.readouterr().out


def test_arrivals_may_be_several_with_seeds_of_their_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ("--arrivals", "poisson:rate=20,requests=40,prompt=100-400,output=20-80,priority=3")
    known = simulate(capsys, *more)
    assert list(known["classes"]) == ["0", "3"]
    # Were the seed the same, the requests of both would come in pairs of equals.
    first, second = known["classes"].values()
    assert first["output_tokens"] != second["output_tokens"]


def test_a_trace_is_played_as_the_scales_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "azure[1].csv"
    file.write_text(AZURE)
    arguments = ["simulate", *PROFILE, "--trace", str(file), "--json", "-"]
    assert main(arguments) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["output_tokens"] == 44 + 109 + 55
    assert known["settings"]["trace"] == "azure[1].csv"
    assert main([*arguments, "--max-requests", "2", "--length-scale", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["output_tokens"] == 2 * (44 + 109)
    assert main([*arguments, "--rate-scale", "1000"]) == 0
    assert json.loads(capsys.readouterr().out)["duration_s"] < 4 < known["duration_s"]
    assert main(arguments[:-2]) == 0
    assert "azure[1].csv" in capsys.readouterr().out  # not taken for markup


def test_refusals_are_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--max-queue", "0", "--max-num-seqs", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "requests refused │ none" not in text
    assert "the queue is full" in text


def test_there_is_a_flag_for_every_setting_of_the_scheduler() -> None:
    assert {flag.name for flag in scheduler_flags().parameters} == set(SCHEDULER_OPTIONS)


def test_the_help_says_where_defaults_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Most tokens one step computes. Default: the profile's. (tokens)" in text
    assert "40% of the available RAM" not in text


# --- bad ones ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--profile", "a100-llama3-8", *ARRIVALS),
            ["a100-llama3-8:", "did you mean a100-llama3-8b"],
        ),
        (PROFILE, ["--trace FILE", "--arrivals"]),
        ((*PROFILE, *ARRIVALS, "--trace", "t.csv"), ["both", "give one"]),
        ((*PROFILE, "--trace", "nowhere.csv"), ["nowhere.csv"]),
        ((*PROFILE, "--arrivals", "poison:rate=1"), ["poisson"]),
        ((*PROFILE, *ARRIVALS, "--slo", "tfft<2s"), ["did you mean ttft"]),
        ((*PROFILE, *ARRIVALS, "--slo", "ttft<2"), ["units us, ms, s, m"]),
        ((*PROFILE, *ARRIVALS, "--compare", "swapped-first,reserv"), ["did you mean reserve"]),
        ((*PROFILE, *ARRIVALS, "--compare", "reserve"), ["two or more"]),
        ((*PROFILE, *ARRIVALS, "--scheduling-policy", "fifo"), ["--scheduling-policy", "reserve"]),
        ((*PROFILE, *ARRIVALS, "--num-blocks", "9", "--kv-cache-gib", "1"), ["--num-blocks (9)"]),
        (
            (*PROFILE, *ARRIVALS, "--max-num-seqs", "0"),
            ["--max-num-seqs must be", "see: layby simulate"],
        ),
        ((*PROFILE, *ARRIVALS, "--rate-scale", "0"), ["--rate-scale must be a positive"]),
        ((*PROFILE, *ARRIVALS, "--csv", "/nowhere/x.csv"), ["/nowhere/x.csv", "does not exist"]),
        (
            (*PROFILE, *ARRIVALS, "--csv", "x.csv", "--compare", "swapped-first,reserve"),
            ["--csv", "--compare"],
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = complaint(capsys, *arguments)
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []  # nothing was begun


def test_a_row_that_does_not_parse_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE + "2023-11-16 18:15:52.0,many,55\n")
    line = complaint(capsys, *PROFILE, "--trace", str(file))
    assert f"{file}:5" in line or ("azure.csv" in line and "line 5" in line)
    assert "many" in line


# --- what happens to the pool, and under pressure ---


def test_a_resize_is_played_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    known = simulate(
        capsys, "--num-blocks", "400", "--resize", "500ms=100,2s=600", "--html", str(page)
    )
    assert known["settings"]["resize"] == "0.5s=100,2s=600"
    assert {400, 100, 600} >= set(known["timeline"]["high"]["num_blocks"])
    assert known["timeline"]["high"]["num_blocks"][-1] == 600
    assert min(known["timeline"]["mean"]["num_blocks"]) == 100
    assert known["requests_finished"] == 40
    assert "Blocks of the device pool" in page.read_text(encoding="utf-8")
    assert simulate(capsys, "--resize", "none")["settings"]["resize"] is None


def test_the_summary_tells_the_sizes_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--num-blocks", "400", "--resize", "500ms=100,2s=600"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "400 blocks of 16 tokens" in told
    assert "later │ 100 blocks at 0.5 s, 600 blocks at 2 s" in told
    many = ",".join(f"{i}s=500" for i in range(1, 12))
    assert main([*RUN, "--num-blocks", "400", "--resize", many]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "500 blocks at 6 s, and 5 more" in told


def test_a_recording_brings_the_pools_of_its_server_unless_others_are_given(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    record(tmp_path / "r", seed=3, num_blocks=80, num_swap_blocks=32, block_size=4)

    def pools(*arguments: str) -> tuple[int, int, bool]:
        command = ("simulate", *PROFILE, "--trace", str(tmp_path / "r"), "--json", "-")
        assert main([*command, *arguments]) == 0
        captured = capsys.readouterr()
        settings = json.loads(captured.out)["settings"]
        is_recorded = "as recorded" in captured.err
        return settings["num_blocks"], settings["num_swap_blocks"], is_recorded

    assert pools() == (20, 8, True)  # the profile's blocks hold 16 tokens
    assert pools("--resize", "none", "--block-size", "4") == (80, 32, True)
    blocks, swap_blocks, is_recorded = pools("--num-blocks", "50")
    assert blocks == 50
    assert swap_blocks > 1000  # the profile's
    assert not is_recorded
    assert pools("--num-swap-blocks", "5") == (20, 5, False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("60s", "resize must be TIME=BLOCKS,… such as 60s=3000,120s=11000, or none; got '60s'"),
        ("60s=many", "got '60s=many'"),
        ("soon=5", "resize must be a time in seconds"),
        ("60s=0", "from 1 to 100,000,000 blocks, got 0"),
        ("60s=999999999", "got 999999999"),
        ("60s=5,30s=6", "rising times, got 30s=6 after 60s=5"),
    ],
)
def test_a_bad_resize_is_told(capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    told = complaint(capsys, *PROFILE, *ARRIVALS, "--resize", text)
    assert said in told
    assert "--resize" in told or "pool" in told


def test_load_is_shed_as_by_the_server_unless_told_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flood = ("--arrivals", "poisson:rate=20,duration=25s,prompt=400,output=300,priority=0:1/5:4")
    run = ("simulate", *PROFILE, *flood, "--num-blocks", "700", "--json", "-")
    page = tmp_path / "report.html"
    assert main([*run, "--html", str(page)]) == 0
    captured = capsys.readouterr()
    known = json.loads(captured.out)
    assert list(known["refusals"]["shed_by_class"]) == ["5"]
    assert known["refusals"]["shed"] == known["settings"]["requests_refused"] > 0
    assert "to shed load" in captured.err
    assert max(known["timeline"]["high"]["pressure"]) == 2
    assert "Pressure: 0 ok" in page.read_text(encoding="utf-8")
    assert main([*run, "--no-shed-load"]) == 0
    kept = json.loads(capsys.readouterr().out)
    assert kept["refusals"]["shed"] == 0
    assert max(kept["timeline"]["high"]["pressure"]) == 2
    assert kept["classes"]["0"]["ttft_s"]["p99"] > 0


def test_choices_of_a_way_out_are_told_one_by_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    known = simulate(capsys, "--num-blocks", "60", "--html", str(page))
    told = known["decisions"]
    assert told["swap"] + told["recompute"] == sum(known["preemptions"].values()) > 0
    for event in told["events"]:
        cheaper = "swap" if event["swap_s"] <= event["recompute_s"] else "recompute"
        assert event["mode"] == cheaper
        assert event["blocks_out"] > 0
    assert "Ways out" in page.read_text(encoding="utf-8")


# --- where output goes, and how it ends ---


def test_rows_go_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--csv", "-"]) == 0
    captured = capsys.readouterr()
    assert len(list(csv.DictReader(captured.out.splitlines()))) == 40
    assert "scheduler steps" in captured.err


def test_two_outputs_to_one_place_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    both = (*PROFILE, *ARRIVALS, "--json", "a", "--html", str(tmp_path / "a"))
    assert "--json and --html both write to" in complaint(capsys, *both)
    streams = (*PROFILE, *ARRIVALS, "--json", "-", "--csv", "-")
    assert "--json and --csv both write to standard output" in complaint(capsys, *streams)
    assert list(tmp_path.iterdir()) == []


def test_a_page_must_be_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert "must name a file" in complaint(capsys, *PROFILE, *ARRIVALS, "--html", "-")
    assert main(["profile", "smollm2", "--out", "-"]) == 2
    assert "must name a file" in capsys.readouterr().err


def test_a_run_that_serves_nobody_fails_after_its_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*RUN, "--num-blocks", "2", "--json", "-"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["requests_finished"] == 0
    last = captured.err.splitlines()[-1]
    assert last.startswith("layby: no request was served: all 40 were refused; the first:")
