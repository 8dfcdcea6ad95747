"""``bench/peers``: the arithmetic of its table, and how it talks to a runner."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest
from bench.peers.engines import BY_HAND, LAYBY, PEERS, Engine, Peer, SetupError, set_up
from bench.peers.report import Failure, Ratio, Report, ratios_of, show, summarise
from bench.peers.runners.protocol import Generated, Job, measure, measured_of
from bench.peers.running import Run, RunError, job_for, run
from bench.peers.workloads import WORKLOADS, Workload, quick
from rich.console import Console

FAKE = str(Path(__file__).with_name("fake_runner.py"))
TINY = Workload("tiny", 2, 4, 3)
START = Workload("start", 1, 4, 1, measures="start")


def engine(*behaviour: str, name: str = "fake") -> Engine:
    return Engine(name, (sys.executable, FAKE, *behaviour), "model", {}, {"fake": "1"})


def go(workload: Workload, tmp_path: Path, *behaviour: str, timeout_s: float = 60.0) -> Run:
    job = job_for(engine(), workload, workload.prompts([5, 6, 7]), threads=1)
    return run(engine(*behaviour), workload, job, log=tmp_path / "log", timeout_s=timeout_s)


def a_run(
    engine: str, time_s: float, preemptions: int | None = 0, workload: Workload = TINY
) -> Run:
    return Run(workload.name, engine, time_s, 1.0, preemptions, None)


# --- Arithmetic ----------------------------------------------------------------------------------


def test_repetitions_become_a_median_and_a_spread() -> None:
    """A mean that one disturbed repetition pulls along."""
    runs = [a_run("a", seconds, count) for seconds, count in ((2.0, 4), (9.0, 0), (3.0, 2))]
    summary = summarise(TINY, "a", [*runs, a_run("b", 100.0)])
    assert summary is not None
    assert (summary.repetitions, summary.median_s, summary.min_s, summary.max_s) == (3, 3, 2, 9)
    assert summary.spread == pytest.approx(7 / 3)
    assert summary.output_tokens_per_s == pytest.approx(2 * 3 / 3)
    assert summary.preemptions == 2


def test_what_an_engine_does_not_tell_is_not_zero() -> None:
    """A peer credited with no recomputation because it keeps silent about it."""
    summary = summarise(TINY, "a", [a_run("a", 1.0, None), a_run("a", 1.0, None)])
    assert summary is not None
    assert summary.preemptions is None
    assert summary.recomputed_tokens is None


def test_no_runs_make_no_summary() -> None:
    assert summarise(TINY, "a", [a_run("b", 1.0)]) is None


def test_a_start_has_no_throughput() -> None:
    summary = summarise(START, "a", [a_run("a", 2.0, workload=START)])
    assert summary is not None
    assert summary.output_tokens_per_s is None


def test_the_ratio_is_to_the_fastest_peer() -> None:
    """A ratio to whichever peer comes first, to Layby itself, or upside down."""
    times = {LAYBY: 2.0, BY_HAND: 1.9, "slow": 8.0, "fast": 3.0}
    summaries = [
        summary
        for name, seconds in times.items()
        if (summary := summarise(TINY, name, [a_run(name, seconds)])) is not None
    ]
    assert ratios_of(summaries) == [
        Ratio("tiny", "fast", 1.5),
        Ratio("tiny", BY_HAND, pytest.approx(0.95)),
    ]


def test_there_is_no_ratio_without_layby_or_without_a_peer() -> None:
    for name in (LAYBY, "peer"):
        summary = summarise(TINY, name, [a_run(name, 1.0)])
        assert summary is not None
        assert ratios_of([summary]) == []


def a_report() -> Report:
    return Report(
        date="2026-01-01T00:00:00+00:00",
        machine={"cpu": "C", "cpus": 2, "threads": 2, "ram_gib": 4.0, "copy_gb_per_s": 30.0},
        versions={LAYBY: {"layby": "1"}, "peer": {"peer": "2"}, "silent": {"silent": "3"}},
        workloads=[TINY],
        not_set_up={"absent": "no [compiler]"},
        runs=[a_run(LAYBY, 1.0), a_run("peer", 2.0, None)],
        failures=[Failure("tiny", "silent", "died")],
    )


def test_the_table_has_the_ratio_and_what_is_missing() -> None:
    """A peer that failed and is silently left out, or whose reason is read as markup."""
    out = io.StringIO()
    show(a_report(), Console(file=out, width=120))
    text = out.getvalue()
    assert "2.00 ×" in text
    assert "absent is missing: no [compiler]" in text
    assert "silent failed at tiny: died" in text


def test_the_json_has_runs_summaries_and_ratios() -> None:
    content = json.loads(json.dumps(a_report().as_dict(), allow_nan=False))
    assert content["ratios"] == [{"workload": "tiny", "other": "peer", "speed": 2.0}]
    assert [summary["engine"] for summary in content["summaries"]] == [LAYBY, "peer"]
    assert content["workloads"][0]["kv_tokens"] == TINY.kv_tokens
    assert len(content["runs"]) == 2


# --- Workloads -----------------------------------------------------------------------------------


def test_a_quarter_pool_holds_a_quarter_of_the_tokens() -> None:
    pools = {workload.name: workload.kv_tokens for workload in WORKLOADS}
    assert pools["decode-heavy-quarter"] == 64 * 500 // 4
    assert pools["prefill-heavy-quarter"] == 64 * 1032 // 4
    assert pools["decode-heavy"] >= 64 * 500


def test_a_quick_workload_still_has_one_request_in_its_pool() -> None:
    for workload in map(quick, WORKLOADS):
        assert workload.kv_tokens >= workload.total_len
        assert workload.num_prompts * workload.total_len < 2500


def test_prompts_are_the_same_for_every_engine() -> None:
    prompts = TINY.prompts([5, 6, 7])
    assert prompts == TINY.prompts([5, 6, 7])
    assert [len(prompt) for prompt in prompts] == [4, 4]
    assert {token for prompt in prompts for token in prompt} <= {5, 6, 7}


def test_by_hand_as_many_run_as_fit_to_their_ends() -> None:
    """A hand-picked number that preempts after all: 500 tokens are 32 blocks, 8,000 are 500."""
    workload = next(each for each in WORKLOADS if each.name == "decode-heavy-quarter")
    prompts = workload.prompts([5])
    assert job_for(engine(), workload, prompts, threads=2).max_num_seqs == 64
    assert job_for(engine(name=BY_HAND), workload, prompts, threads=2).max_num_seqs == 500 // 32


# --- Runner protocol -----------------------------------------------------------------------------


def test_a_runner_answers_a_job(tmp_path: Path) -> None:
    """Chatter of an engine on standard output that is taken for the answer."""
    done = go(TINY, tmp_path)
    assert (done.workload, done.engine) == ("tiny", "fake")
    assert done.preemptions == 2, "one call to warm up, one for the job"
    assert 0 <= done.time_s < 1
    assert "a line that is no answer" in (tmp_path / "log").read_text()


def test_a_start_is_timed_from_outside_and_has_no_warm_up(tmp_path: Path) -> None:
    done = go(START, tmp_path)
    assert done.preemptions == 1
    assert done.time_s > done.load_s


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fails", "ValueError: no such weights"),
        ("dies", "killed at birth"),
        ("short", "2 answers of 3 tokens were asked for, and 2 came, of [2] tokens"),
    ],
)
def test_a_run_that_comes_to_nothing_says_why(tmp_path: Path, behaviour: str, reason: str) -> None:
    with pytest.raises(RunError) as caught:
        go(TINY, tmp_path, behaviour)
    assert reason in str(caught.value)


def test_a_runner_that_hangs_is_ended(tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match="no answer within 1 s"):
        go(TINY, tmp_path, "hangs", timeout_s=1.0)
    assert time.monotonic() - started < 30


def test_only_the_job_is_timed() -> None:
    """Loading or warming up that counts as generating."""
    now = 0.0

    class Slow:
        def __init__(self, job: Job) -> None:
            self.wait(100)

        def wait(self, seconds: float) -> None:
            nonlocal now
            now += seconds

        def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
            self.wait(len(prompts))
            return Generated([output_len] * len(prompts))

    job = Job("model", [[1, 2]] * 6, 3, 64, max_num_seqs=6, threads=1, warm_up=True)
    measured = measure(job, Slow, clock=lambda: now)
    assert (measured.load_s, measured.duration_s) == (100, 6)


def test_warm_up_prompts_fit_the_pool_and_differ() -> None:
    """A warm-up that the prefix cache serves, or that is longer than any sequence may be."""
    job = Job("model", [list(range(64))], 1, 64, max_num_seqs=4, threads=1, warm_up=True)
    prompts = job.warm_up_prompts()
    assert len({prompt[0] for prompt in prompts}) == len(prompts) == 4
    short = Job("model", [[1, 2]], 1, 64, max_num_seqs=1, threads=1, warm_up=True)
    assert len(short.warm_up_prompts()) == 1
    assert short.max_model_len > len(short.warm_up_prompts()[0])


def test_a_line_that_is_no_answer_is_refused() -> None:
    for line in ("", "{}", "[1]", '{"load_s": 1}'):
        with pytest.raises(ValueError):
            measured_of(line)


# --- Setting up ----------------------------------------------------------------------------------


def test_a_peer_that_is_set_up_is_not_set_up_again(tmp_path: Path) -> None:
    """Twenty minutes of installing at every run."""
    peer = Peer("none", "run_none.py", "gguf", requirements=())
    python = tmp_path / "none" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "none" / ".ready").write_text(peer.recipe)
    (tmp_path / "none.log").write_text("")
    ready = set_up(peer, tmp_path, "model")
    assert ready.command[0] == str(python)
    assert ready.versions == {}


def test_a_peer_that_cannot_be_installed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.engines.sys.executable", str(tmp_path / "no-python"))
    with pytest.raises(SetupError, match="no-python"):
        set_up(PEERS[0], tmp_path, "model")
    assert not (tmp_path / PEERS[0].name / ".ready").exists()


def test_every_peer_has_a_runner_and_a_pin() -> None:
    folder = Path(FAKE).parents[2] / "bench" / "peers" / "runners"
    for peer in PEERS:
        assert (folder / peer.runner).is_file()
        for requirement in filter(None, (*peer.requirements, peer.bare)):
            assert "==" in requirement
    assert len({peer.recipe for peer in PEERS}) == len(PEERS)
