"""``layby bench offline``: figures that can be worked out by hand, and the schema of the JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layby.cli import main
from layby.results import Distribution, RequestTimes, RunResult
from layby.scheduling.metrics import SchedulerMetrics
from tests.cli.harness import STEP_S, Toy

LATENCY = {"mean", "p50", "p90", "p99", "max"}
LOAD = ("--num-prompts", "2", "--input-len", "4", "--output-len", "3")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["bench", "offline", "--json", "-", *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def all_the_same(value: float) -> dict[str, float]:
    return dict.fromkeys(LATENCY, value)


def test_the_schema_is_complete(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that lacks what others are written to read."""
    result = bench(capsys, *LOAD)
    assert list(result) == [
        *("requests_finished", "duration_s", "output_tokens", "output_tokens_per_s"),
        *("ttft_s", "itl_s", "e2e_s", "preemptions", "recomputed_tokens"),
        *("swapped_queue_size_max", "avg_swapped_duration_s", "preemption_rate"),
        *("kv_usage_max", "classes", "settings", "machine"),
    ]
    for holder in (result, result["classes"]["0"]):
        for latency in ("ttft_s", "itl_s", "e2e_s"):
            assert set(holder[latency]) == LATENCY
    assert set(result["preemptions"]) == {"swap", "recompute"}
    assert result["settings"]["input_len"] == 4
    assert result["settings"]["block_size"] == 16
    assert result["settings"]["num_blocks"] > 0
    assert {"layby", "python", "torch", "cpus", "cpu"} <= set(result["machine"])


def test_without_pressure_the_figures_are_those_of_the_schedule(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both prompts are computed in the first step; every step brings each a token."""
    result = bench(capsys, *LOAD)
    assert result["requests_finished"] == 2
    assert result["output_tokens"] == 6
    assert result["duration_s"] == 3 * STEP_S
    assert result["output_tokens_per_s"] == 6 / (3 * STEP_S)
    assert result["ttft_s"] == all_the_same(STEP_S)
    assert result["itl_s"] == all_the_same(STEP_S)
    assert result["e2e_s"] == all_the_same(3 * STEP_S)
    assert result["preemptions"] == {"swap": 0, "recompute": 0}
    assert result["classes"]["0"] == {
        name: result[name]
        for name in ("requests_finished", "output_tokens", "ttft_s", "itl_s", "e2e_s")
    }


def test_one_after_the_other_the_second_waits_for_the_first(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(capsys, *LOAD, "--max-num-seqs", "1")
    assert result["duration_s"] == 6 * STEP_S
    assert result["ttft_s"]["max"] == 4 * STEP_S
    assert result["ttft_s"]["mean"] == result["ttft_s"]["p50"] == 2.5 * STEP_S
    assert result["ttft_s"]["p90"] == pytest.approx(3.7 * STEP_S)
    assert result["e2e_s"]["max"] == 6 * STEP_S
    assert result["itl_s"] == all_the_same(STEP_S)


def test_under_pressure_swaps_are_told_and_nothing_is_recomputed(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--num-prompts", "6", "--input-len", "8", "--output-len", "24")
    result = bench(capsys, *arguments, "--block-size", "4", "--num-blocks", "16")
    assert result["output_tokens"] == 6 * 24
    assert result["preemptions"]["swap"] > 0
    assert result["preemptions"]["recompute"] == 0
    assert result["recomputed_tokens"] == 0
    assert result["swapped_queue_size_max"] > 0
    assert result["avg_swapped_duration_s"] > 0
    assert result["preemption_rate"] == result["preemptions"]["swap"] / 6
    assert 0.5 < result["kv_usage_max"] <= 1

    recomputed = bench(
        capsys,
        *(*arguments, "--block-size", "4", "--num-blocks", "16"),
        *("--preemption-mode", "recompute"),
    )
    assert recomputed["preemptions"]["swap"] == 0
    assert recomputed["preemptions"]["recompute"] > 0
    assert recomputed["recomputed_tokens"] > 0


def test_prompts_have_the_exact_length_and_depend_on_the_seed_alone(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--num-prompts", "3", "--input-len", "9", "--output-len", "1")
    for seed in ("1", "1", "2"):
        bench(capsys, *arguments, "--seed", seed)
    first, again, other = toy.prompts[:3], toy.prompts[3:6], toy.prompts[6:]
    assert len(set(first)) == 3
    assert first == again
    assert not set(first) & set(other)
    assert toy.llm is not None
    assert toy.llm.stats().prompt_tokens == 3 * 9


def test_samples_of_one_prompt_all_count(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(capsys, *LOAD, "--n", "2")
    assert result["requests_finished"] == 2
    assert result["output_tokens"] == 12


def test_a_single_token_leaves_nothing_between_tokens_to_measure(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(capsys, "--num-prompts", "1", "--input-len", "4", "--output-len", "1")
    assert set(result["itl_s"].values()) == {None}
    assert main(["bench", "offline", "--num-prompts", "1", "--output-len", "1"]) == 0
    assert "–" in capsys.readouterr().out


def test_the_table_is_for_people_and_the_file_for_programs(
    toy: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "offline", *LOAD, "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(path.read_text())["output_tokens"] == 6
    for fact in ("smollm2", "auto, auto", "4 tokens", "3 tokens", "512 blocks of 16 tokens"):
        assert fact in captured.out
    for figure in ("output tokens per second", "preemptions by swap", "p99", "1.500", "4.0"):
        assert figure in captured.out
    assert captured.err == ""


def test_a_load_that_does_not_fit_is_refused_with_the_numbers(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "offline", "--input-len", "400", "--output-len", "200"]) == 1
    error = capsys.readouterr().err
    assert "600" in error
    assert "512" in error


def test_percentiles_interpolate_between_ranks() -> None:
    assert Distribution.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Distribution(
        mean=3.0, p50=3.0, p90=pytest.approx(4.6), p99=pytest.approx(4.96), max=5.0
    )
    assert Distribution.of([7.0]) == Distribution(7.0, 7.0, 7.0, 7.0, 7.0)
    assert Distribution.of([]) == Distribution()


def test_classes_are_told_apart_the_most_urgent_first() -> None:
    requests = [
        RequestTimes(0.0, 4.0, [[3.0, 4.0]], priority=10),
        RequestTimes(1.0, 3.0, [[2.0, 3.0], [2.0]], priority=-1),
    ]
    result = RunResult.of(requests, SchedulerMetrics())
    assert list(result.classes) == ["-1", "10"]
    assert result.classes["-1"].ttft_s.max == 1.0
    assert result.classes["-1"].output_tokens == 3
    assert result.classes["10"].e2e_s.mean == 4.0
    assert result.requests_finished == 2
    assert result.duration_s == 4.0
    assert result.output_tokens_per_s == 5 / 4
    assert result.ttft_s.mean == 2.0
