"""Recordings replayed: every decision again, every lie found, and the same traffic as a trace."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layby.engine import recorder
from layby.engine.recording import file as recording_file
from layby.errors import LaybyError
from layby.execution.faults import Faults
from layby.sampling_params import SamplingParams
from layby.scheduling import SchedulerConfig
from layby.simulate.profiles import load_profile
from layby.simulate.recordings import Check, ReplayReport, replay_recording
from layby.simulate.resizes import PoolResize
from layby.simulate.simulation import Simulation, simulate
from layby.simulate.traces import TraceError, read_trace
from tests.engine.harness import spell
from tests.engine.recorded import RecordedHarness, record

PRESSURE = {"seed": 35, "requests": 40}
"""Traffic in which everything happens; the first test makes sure."""

Row = dict[str, Any]


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def checked(*paths: Path) -> Check:
    check = replay_recording(paths, check=True).check
    assert check is not None
    return check


def check_together_and_alone(path: Path) -> None:
    """All files of a recording, and each that begins in an idle moment by itself."""
    older = len(list(path.parent.iterdir())) - 1
    files = [*(Path(f"{path}.{i}") for i in range(older, 0, -1)), path]
    check = checked(*files)
    assert check.difference is None
    assert check.unchecked_steps == 0
    for file in files:
        if "gap" not in [row["e"] for row in rows_of(file)]:
            assert checked(file).difference is None


def refused(path: Path, line: int, *words: str) -> None:
    with pytest.raises(TraceError) as caught:
        replay_recording([path], check=True)
    assert caught.value.line == line
    for word in words:
        assert word in caught.value.reason


@pytest.fixture(scope="module")
def pressure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pressure") / "r"
    record(path, **PRESSURE)
    return path


# --- the same decisions ---


def test_a_run_under_pressure_is_decided_the_same_again(tmp_path: Path) -> None:
    harness = record(tmp_path / "r", **PRESSURE)
    report = replay_recording([tmp_path / "r"], check=True)
    assert report.check is not None
    assert report.check.difference is None
    assert report.is_closed
    assert not report.is_cut_off
    summary, metrics, stats = report.summary, harness.scheduler.metrics, harness.engine.stats()
    assert report.check.steps == summary.steps
    assert report.check.unchecked_steps == 0
    # Everything there is to replay was there …
    rows = rows_of(tmp_path / "r")
    assert min(summary.cut, summary.aborted, summary.failed, summary.quiet_steps) > 0
    assert metrics.prefix_cache_hit_tokens > 0
    assert any(row.get("stop") for row in rows)
    assert any(row["e"] == "in" and row.get("n", 1) > 1 for row in rows)
    assert {row.get("no") for row in rows if row["e"] == "in"} == {
        None, "QueueFullError", "RequestTooLargeError",
    }  # fmt: skip
    assert len({row.get("pr", 0) for row in rows if row["e"] == "in"}) == 3
    assert any(item[3] < 12 and item[2] for row in rows for item in row.get("s", []))  # chunks
    # … and was counted as the engine counted it.
    assert summary.arrived - summary.refused == stats.requests_accepted
    assert summary.finished == stats.requests_finished
    assert summary.failed == stats.requests_failed
    assert summary.aborted + summary.failed == stats.requests_aborted
    assert summary.preempted_swap == metrics.preemptions_swap > 0
    assert summary.preempted_recompute == metrics.preemptions_recompute > 0
    assert summary.swapped_out_blocks == metrics.swapped_out_blocks > 0
    assert summary.swapped_in_blocks == metrics.swapped_in_blocks
    assert summary.swapped_s == pytest.approx(metrics.swapped_s_total)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    policy=st.sampled_from(["swapped-first", "running-first", "recompute-only", "reserve"]),
    swap=st.sampled_from([0, 8, 40]),
    caching=st.booleans(),
    flush_s=st.sampled_from([0.0, 1.0]),
    headroom=st.sampled_from([0.0, 1.0]),
    max_bytes=st.sampled_from([600, 4000, 2**20]),
    odd_times=st.booleans(),
)
def test_any_traffic_is_decided_the_same_again(
    seed: int,
    policy: str,
    swap: int,
    caching: bool,
    flush_s: float,
    headroom: float,
    max_bytes: int,
    odd_times: bool,
) -> None:
    """Also in several files, with and without idle moments to begin them in."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "FLUSH_S", flush_s)
        patch.setattr(recording_file, "KEPT_FILES", 1000)
        path = Path(folder) / "r"
        record(
            path,
            seed,
            requests=10,
            odd_times=odd_times,
            policy=policy,
            num_swap_blocks=swap,
            enable_prefix_caching=caching,
            headroom=headroom,
            max_bytes=max_bytes,
        )
        check_together_and_alone(path)


def test_hits_on_what_was_generated_need_the_hashes_of_it(tmp_path: Path, pressure: Path) -> None:
    """Without them the replay goes another way: they are no ornament."""
    rows = [row for row in rows_of(pressure) if row["e"] != "hash"]
    assert checked(write(tmp_path / "r", rows)).difference is not None


def test_an_engine_that_goes_on_after_a_broken_step_is_replayed_to_it(tmp_path: Path) -> None:
    """The step that failed was decided, and has no outcome."""
    harness = RecordedHarness(tmp_path / "r", num_blocks=12)
    harness.engine.add_request("x" * 30, SamplingParams(max_tokens=50))
    harness.executor.failing_steps[9] = RuntimeError("the model is gone")
    harness.run()
    harness.close()
    assert harness.engine.error is not None
    check = checked(tmp_path / "r")
    assert check.difference is None
    assert check.steps == 9


def test_behind_an_error_of_the_scheduler_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = RecordedHarness(tmp_path / "r")
    harness.engine.add_request("x", SamplingParams(max_tokens=9))
    harness.engine.step()

    def fail() -> None:
        raise KeyError

    monkeypatch.setattr(harness.scheduler.memory, "settle", fail)
    harness.engine.step()
    harness.close()
    report = replay_recording([tmp_path / "r"], check=True)
    assert report.broken == "KeyError"
    assert report.check is not None
    assert report.check.difference is None


# --- what is done to a running engine ---


def resize(harness: RecordedHarness, rng: random.Random) -> None:
    if rng.random() < 0.05:
        harness.engine.resize_kv_pool(rng.randint(6, 40))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**9), max_bytes=st.sampled_from([600, 2**20]))
def test_a_pool_that_changes_its_size_is_replayed(seed: int, max_bytes: int) -> None:
    """A file that begins in an idle moment knows the size of then."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_file, "KEPT_FILES", 1000)
        path = Path(folder) / "r"
        record(path, seed, requests=10, meddling=resize, max_bytes=max_bytes)
        check_together_and_alone(path)


def reclass(harness: RecordedHarness, rng: random.Random) -> None:
    names = list(harness.scheduler.requests)
    if names and rng.random() < 0.1:
        harness.engine.set_priority(rng.choice(names), rng.randint(-2, 2))


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    priority_aging=st.sampled_from([None, 0.5, 5.0]),
    demote_after_tokens=st.sampled_from([None, 1, 7]),
    max_bytes=st.sampled_from([600, 2**20]),
)
def test_classes_that_change_are_replayed(
    seed: int, priority_aging: float | None, demote_after_tokens: int | None, max_bytes: int
) -> None:
    """By hand, by waiting and by running long."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_file, "KEPT_FILES", 1000)
        path = Path(folder) / "r"
        record(
            path,
            seed,
            requests=10,
            meddling=reclass,
            max_bytes=max_bytes,
            priority_aging=priority_aging,
            demote_after_tokens=demote_after_tokens,
        )
        check_together_and_alone(path)


def test_another_class_is_another_life(tmp_path: Path) -> None:
    options = {"priority_aging": 2.0, "demote_after_tokens": 5}
    harness = record(tmp_path / "r", meddling=reclass, **PRESSURE, **options)
    report = replay_recording([tmp_path / "r"], check=True)
    assert report.check is not None
    assert report.check.difference is None
    metrics = harness.scheduler.metrics
    assert min(report.summary.reclassed, metrics.promotions, metrics.demotions) > 3
    rows = rows_of(tmp_path / "r")
    changed = [row for row in rows if row["e"] == "class"]
    changed[len(changed) // 2]["pr"] = 9
    assert checked(write(tmp_path / "lie", rows)).difference is not None


def test_another_size_is_another_life(tmp_path: Path) -> None:
    record(tmp_path / "r", meddling=resize, **PRESSURE)
    report = replay_recording([tmp_path / "r"], check=True)
    assert report.check is not None
    assert report.check.difference is None
    assert report.summary.resized > 3
    rows = rows_of(tmp_path / "r")
    assert any(row.get("rl") for row in rows)
    sizes = [row for row in rows if row["e"] == "size"]
    sizes[len(sizes) // 2]["size"] += 1
    assert checked(write(tmp_path / "lie", rows)).difference is not None


ON_DISK: dict[str, Any] = {
    "num_blocks": 40, "num_swap_blocks": 28, "num_disk_blocks": 120, "max_num_seqs": 16,
    "max_num_batched_tokens": 32, "max_queue": 30, "headroom": 0.0,
}  # fmt: skip
"""So much is parked that RAM has no room for it."""


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    num_swap_blocks=st.sampled_from([14, 28]),
    num_disk_blocks=st.sampled_from([30, 120]),
    priority_aging=st.sampled_from([None, 2.0]),
    max_bytes=st.sampled_from([600, 2**20]),
)
def test_parked_work_on_disk_is_replayed(
    seed: int,
    num_swap_blocks: int,
    num_disk_blocks: int,
    priority_aging: float | None,
    max_bytes: int,
) -> None:
    """The ends of transfers come from outside; what is made of them is decided again."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording_file, "KEPT_FILES", 1000)
        path = Path(folder) / "r"
        record(
            path,
            seed,
            requests=30,
            meddling=break_the_disk,
            max_bytes=max_bytes,
            **ON_DISK | {"num_swap_blocks": num_swap_blocks, "num_disk_blocks": num_disk_blocks},
            priority_aging=priority_aging,
        )
        check_together_and_alone(path)


def break_the_disk(harness: RecordedHarness, rng: random.Random) -> None:
    """Some transfers fail, and sometimes parked work is lost without one; classes change, so that
    much is parked."""
    for _ in range(3):
        reclass(harness, rng)
    if rng.random() < 0.1:
        number = harness.scheduler.tiers.num_begun + 1
        harness.executor.failing_transfers[number] = rng.choice(["eio", "checksum"])
    parked = [request.request_id for request in harness.scheduler.swapped]
    if parked and rng.random() < 0.02:
        assert harness.scheduler.lose_kv(rng.choice(parked))


def test_another_end_of_a_transfer_is_another_life(tmp_path: Path) -> None:
    harness = record(tmp_path / "r", 7, requests=60, meddling=break_the_disk, **ON_DISK)
    report = replay_recording([tmp_path / "r"], check=True)
    assert report.check is not None
    assert report.check.difference is None
    summary, metrics = report.summary, harness.scheduler.metrics
    assert summary.lost == metrics.kv_losses > 0
    assert summary.demoted_blocks >= metrics.demoted_blocks > 0
    assert summary.promoted_blocks >= metrics.promoted_blocks > 0
    assert summary.swapped_s == pytest.approx(metrics.swapped_s_total)
    rows = rows_of(tmp_path / "r")
    failed = [row for row in rows if row["e"] == "moved" and row.get("lost")]
    del failed[0]["faults"]
    assert checked(write(tmp_path / "lie", rows)).difference is not None


def test_what_an_earlier_process_began_goes_on_in_a_replay(tmp_path: Path) -> None:
    """One of two samples has ended, and the queue, which is full, is not asked."""
    harness = RecordedHarness(tmp_path / "r", block_size=4, num_blocks=20, max_queue=0)
    for _ in range(harness.scheduler.config.max_num_seqs):
        harness.engine.add_request("x" * 9, SamplingParams(max_tokens=20))
    prepared = harness.engine.prepare_again(
        list(b"tell me more"),
        SamplingParams(n=2, max_tokens=12, seed=1),
        priority=-1,
        cache_salt="",
        age_s=3.5,
        outputs=[(list(b"abcdefg"), None), (list(b"ab"), "stop")],
    )
    harness.engine.submit(prepared)
    harness.run()
    harness.close()
    assert checked(tmp_path / "r").difference is None
    rows = rows_of(tmp_path / "r")
    [row] = [row for row in rows if row.get("again")]
    assert (row["o"], row["reasons"]) == ([7, 2], ["", "stop"])
    [traced] = [r for r in read_trace(tmp_path / "r").requests if r.priority == -1]
    assert traced.num_prompt_tokens == 12 + 4  # as many as it had on average
    row["o"] = [6, 2]
    assert checked(write(tmp_path / "lie", rows)).difference is not None


def test_what_an_earlier_process_had_waited_counts_in_a_replay_too(tmp_path: Path) -> None:
    """It is older than it has waited; both are told, and a file without the second is of before."""
    harness = RecordedHarness(
        tmp_path / "r", block_size=4, num_blocks=60, max_num_seqs=1, priority_aging=2.0
    )
    harness.engine.add_request("x" * 9, SamplingParams(max_tokens=5))
    for age_s, waited_s in ((90.0, 0.1), (60.0, 7.3), (30.0, 29.0)):
        prepared = harness.engine.prepare_again(
            list(b"once more"),
            SamplingParams(max_tokens=9, seed=1),
            priority=6,
            cache_salt="",
            age_s=age_s,
            waited_s=waited_s,
        )
        harness.engine.submit(prepared)
    harness.run()
    harness.close()
    assert checked(tmp_path / "r").difference is None
    rows = rows_of(tmp_path / "r")
    arrivals = [row for row in rows if row["e"] == "in"]
    assert ["waits_since" in row for row in arrivals] == [False, True, True, True]
    for row in arrivals[1:]:
        del row["waits_since"]
    assert checked(write(tmp_path / "lie", rows)).difference is not None


def test_what_came_back_with_its_kv_is_parked_in_a_replay_too(tmp_path: Path) -> None:
    """One of four finds its KV unreadable; a replay knows which, and where the others lie."""
    first = RecordedHarness(tmp_path / "first", block_size=4, num_blocks=60)
    asked = [(list(b"x" * (9 + k)), SamplingParams(n=1 + k % 2, max_tokens=20)) for k in range(4)]
    for prompt, params in asked:
        first.engine.add_request(prompt, params)
    for _ in range(6):
        first.engine.step()
    saved = first.engine.unfinished_kv()
    assert saved.save(tmp_path / "kv") == 4
    outputs = [
        [(list(seq.output_tokens), None) for seq in request.sequences]
        for request in first.scheduler.requests.values()
    ]
    harness = RecordedHarness(tmp_path / "r", block_size=4, num_blocks=30)
    kept = harness.engine.open_kept(tmp_path / "kv", Faults.parse("state.read=eio:0.3,seed=2"))
    assert kept is not None
    for (prompt, params), had in zip(asked, outputs, strict=True):
        prepared = harness.engine.prepare_again(
            prompt, params, priority=0, cache_salt="", age_s=1.0, outputs=had, kept=kept
        )
        harness.engine.submit(prepared)
    harness.run()
    harness.close()
    kept.close()
    assert checked(tmp_path / "r").difference is None
    rows = rows_of(tmp_path / "r")
    arrivals = [row for row in rows if row.get("again")]
    assert all(row["computed"] for row in arrivals)
    assert 0 < sum(row["e"] == "lost" for row in rows) < 4
    arrivals[-1]["computed"][0] -= 4
    arrivals[-1]["kept"][0].pop()
    assert checked(write(tmp_path / "lie", rows)).difference is not None


# --- lies ---


def _shift(name: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        row[name] = row.get(name, 0) + 1

    return change


def _shift_in(name: str, *place: int) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        values = row[name]
        for index in place[:-1]:
            values = values[index]
        values[place[-1]] += 1

    return change


def _drop(name: str) -> Callable[[Row], None]:
    return lambda row: row.pop(name)


@pytest.mark.parametrize(
    ("kind", "needs", "change"),
    [
        ("step", "in", _drop("in")),
        ("step", "out", _drop("out")),
        ("step", "how", lambda row: row.update(how=["nap"])),
        ("step", "back", _drop("back")),
        ("step", "n", _shift("n")),
        ("step", "s", _shift_in("s", 0, 3)),
        ("step", "s", _shift_in("s", -1, 2)),
        ("step", "so", _shift_in("so", 1)),
        ("step", "si", _shift_in("si", 0)),
        ("step", "cp", _shift_in("cp", -1)),
        ("step", "k", _shift("k")),
        ("step", "t", _shift_in("t", 0)),
        ("step", "d", lambda row: row.update(d="AAAAAAAA")),
        ("run", "d", lambda row: row.update(d="AAAAAAAA")),
        ("run", "t", _shift_in("t", 0)),
        ("run", "t", lambda row: row["t"].extend([1, 1])),
        ("run", "n", _shift("n")),
        ("done", "t", _shift_in("t", 0)),
        ("done", "end", _drop("end")),
        ("done", "end", _shift_in("end", 0, 1)),
        ("in", "r", _shift("t")),
        ("in", "r", _shift("r")),
        ("in", "r", lambda row: row.update(p=row["p"] + 4)),
        ("in", "r", lambda row: row.update(m=row["m"] + 1)),
        ("in", "r", lambda row: row.update(n=row.get("n", 1) + 1)),
        ("in", "no", _drop("no")),
        ("cut", "end", _drop("end")),
        ("abort", "o", _shift_in("o", 0)),
        ("abort", "r", lambda row: row.update(r=10**6)),
    ],
)  # fmt: skip
def test_a_lie_is_found(
    tmp_path: Path, pressure: Path, kind: str, needs: str, change: Callable[[Row], Any]
) -> None:
    """In the first line of its kind and in one of the middle."""
    rows = rows_of(pressure)
    # What was asked by who never got in, changed nothing; nor does when the last step ended.
    came_in = {number for row in rows if row["e"] == "step" for number in row.get("in", [])}
    places = [
        i
        for i, row in enumerate(rows[:-10])
        if row["e"] == kind and needs in row and (kind != "in" or row.get("r") in {*came_in, None})
    ]
    assert places
    for place in {places[0], places[len(places) // 2]}:
        changed = json.loads(json.dumps(rows))
        change(changed[place])
        found = checked(write(tmp_path / "r", changed)).difference
        assert found is not None, f"{rows[place]} became {changed[place]}"
        assert found.line >= place
        assert found.recorded != found.replayed


def test_an_end_of_another_kind_is_found(tmp_path: Path, pressure: Path) -> None:
    """A stop token that is not told of, unless the answer was as long as it may be anyway."""
    rows = rows_of(pressure)
    allowed = {row["r"]: row["m"] for row in rows if row["e"] == "in" and "r" in row}
    places = [
        i
        for i, row in enumerate(rows)
        if row.get("stop") and any(max(end[1:]) < allowed[end[0]] for end in row.get("end", []))
    ]
    assert places
    for place in places:
        changed = [*rows[:place], {**rows[place], "stop": []}, *rows[place + 1 :]]
        found = checked(write(tmp_path / "r", changed)).difference
        assert found is not None
        assert (found.line, found.what) == (place + 1, "who ended, and after how many tokens")


@pytest.mark.parametrize("kind", ["in", "step", "run", "done", "abort", "cut"])
def test_a_missing_line_is_found(tmp_path: Path, pressure: Path, kind: str) -> None:
    rows = rows_of(pressure)
    place = [i for i, row in enumerate(rows) if row["e"] == kind][1]
    del rows[place]
    assert checked(write(tmp_path / "r", rows)).difference is not None


def test_another_class_of_a_request_changes_whose_turn_it_is(
    tmp_path: Path, pressure: Path
) -> None:
    rows = rows_of(pressure)
    for row in rows:
        if row["e"] == "in" and row.get("pr", 0) == 1:
            row["pr"] = -5
    assert checked(write(tmp_path / "r", rows)).difference is not None


def test_another_configuration_decides_otherwise(tmp_path: Path, pressure: Path) -> None:
    for change in ({"num_blocks": 23}, {"policy": "running-first"}, {"max_num_seqs": 5}):
        rows = rows_of(pressure)
        rows[0]["scheduler"] |= change
        assert checked(write(tmp_path / "r", rows)).difference is not None


def test_a_difference_names_step_line_and_both_sides(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r", max_num_batched_tokens=64)
    for number in range(2):
        harness.engine.add_request(f"{number}" * 20, SamplingParams(max_tokens=3))
    harness.run()
    harness.close()
    rows = rows_of(tmp_path / "r")
    [place] = [i for i, row in enumerate(rows) if row["e"] == "step"]
    rows[place]["in"] = [2, 1]
    found = checked(write(tmp_path / "r", rows)).difference
    assert found is not None
    assert (found.step, found.line, found.what) == (1, place + 1, "admitted")
    assert (found.recorded, found.replayed) == ("admitted [2, 1]", "admitted [1, 2]")
    assert f"step 1, {tmp_path / 'r'} line {place + 1}: admitted differs" in str(found)


# --- files that are not whole ---


def test_a_last_line_cut_off_is_left_out_and_told(tmp_path: Path, pressure: Path) -> None:
    data = pressure.read_bytes()
    for end in (len(data) - 3, len(data) * 2 // 3, len(data) // 2):
        (tmp_path / "r").write_bytes(data[:end])
        report = replay_recording([tmp_path / "r"], check=True)
        assert report.is_cut_off == (not data[:end].endswith(b"}"))
        assert report.is_cut_off
        assert not report.is_closed
        assert report.check is not None
        assert report.check.difference is None


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(
    tmp_path: Path, pressure: Path
) -> None:
    lines = pressure.read_text().splitlines()
    for bad, word in (
        ("{", "not JSON"),
        ('{"e":"nap"}', "'nap'"),
        ("[]", "object"),
        (lines[0], "head"),
    ):
        (tmp_path / "r").write_text("\n".join([*lines[:10], bad, *lines[11:]]))
        refused(tmp_path / "r", 11, word)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 1}, ("format 1", "reads format 2")),
        ({"scheduler": {}}, ("scheduler", "num_blocks")),
        ({"scheduler": {"num_blocks": 0}}, ("num_blocks must be", "0")),
        ({"scheduler": {"num_blocks": 9, "speed": 3}}, ("speed",)),
        ({"scheduler": {"num_blocks": 10**9}}, ("num_blocks must be at most 100,000,000",)),
        ({"scheduler": {"num_blocks": 10**21}}, ("num_blocks must be at most", "got 1000")),
        ({"scheduler": {"num_blocks": 9, "num_swap_blocks": 10**21}}, ("num_swap_blocks must",)),
        (
            {"scheduler": {"num_blocks": 9, "num_swap_blocks": 1, "num_disk_blocks": 10**9}},
            ("num_disk_blocks must be at most",),
        ),
        ({"scheduler": {"num_blocks": 9, "block_size": 10**21}}, ("block_size must be at most",)),
        (
            {
                "scheduler": {
                    "num_blocks": 9,
                    "max_num_seqs": 10**21,
                    "max_num_batched_tokens": 10**21,
                }
            },
            ("max_num_seqs must be at most",),
        ),
    ],
)
def test_a_head_that_cannot_be_used_is_refused(
    tmp_path: Path, pressure: Path, change: Row, words: tuple[str, ...]
) -> None:
    rows = rows_of(pressure)
    rows[0] |= change
    refused(write(tmp_path / "r", rows), 1, *words)


def test_a_size_that_no_pool_can_have_is_refused(tmp_path: Path, pressure: Path) -> None:
    rows = rows_of(pressure)
    rows.insert(1, {"e": "size", "size": 10**9})
    refused(write(tmp_path / "r", rows), 2, "at most 100,000,000 blocks")


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r").write_text('{"timestamp": 0}\n')
    refused(tmp_path / "r", 1, "e is None")
    (tmp_path / "r").write_text('{"e":"gap"}\n')
    refused(tmp_path / "r", 1, "must be a head")
    (tmp_path / "r").write_text("")
    with pytest.raises(TraceError, match="must be a head"):
        replay_recording([tmp_path / "r"])
    with pytest.raises(TraceError, match="No such file"):
        replay_recording([tmp_path / "none"])


# --- several files ---


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Three files, oldest first: from the beginning, behind a gap, from an idle moment on."""
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    path = tmp_path / "r"
    harness = RecordedHarness(path, script=spell("abc" * 30), max_bytes=6000, block_size=4)

    def busy(steps: int, name: str) -> None:
        for number in range(steps):
            if number % 4 == 0:
                harness.engine.add_request(f"{name} {number} so", SamplingParams(max_tokens=11))
            harness.engine.step()

    while harness.recorder.part < 1:
        busy(20, "on and on")
    busy(8, "still on")
    harness.run()  # idle: the gap ends
    while harness.recorder.part < 2:
        busy(4, "on and on")
        harness.run()
    monkeypatch.setattr(recorder, "FLUSH_S", 1.0)
    for number in range(7):
        busy(1, f"{number}" * 40)
        harness.run()
    harness.close()
    assert harness.recorder.part == 2
    return [Path(f"{path}.2"), Path(f"{path}.1"), path]


def test_files_are_replayed_together_or_from_an_idle_moment_on(parts: list[Path]) -> None:
    assert [[row["e"] for row in rows_of(part)[1:2]] for part in parts] == [
        ["in"], ["gap"], ["state"],
    ]  # fmt: skip
    together = checked(*parts)
    assert together.difference is None
    assert together.unchecked_steps == 0
    alone = [checked(part) for part in parts]
    assert [check.difference for check in alone] == [None] * 3
    assert alone[0].unchecked_steps == alone[2].unchecked_steps == 0
    assert alone[1].unchecked_steps > 0
    assert alone[1].steps > 0
    assert together.steps == sum(check.steps + check.unchecked_steps for check in alone)


def test_a_lie_about_an_idle_pool_is_found(parts: list[Path], tmp_path: Path) -> None:
    """Together with what went before, and in what follows."""
    rows = rows_of(parts[2])
    rows[1]["cached"][:2] = reversed(rows[1]["cached"][:2])
    parts[2].write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = checked(*parts).difference
    assert found is not None
    assert found.what == "device of the idle engine"
    assert checked(parts[2]).difference is not None
    rows[1]["swap_free"] = rows[1]["swap_free"][1:]
    assert checked(write(parts[2], rows)).difference is not None


def test_files_in_another_order_are_refused(parts: list[Path]) -> None:
    with pytest.raises(LaybyError, match=r"is part 0 .* does not follow part 1 .* oldest first"):
        replay_recording([parts[1], parts[0]])
    with pytest.raises(LaybyError, match="does not follow"):
        replay_recording([parts[0], parts[2]])


def test_a_file_of_which_nothing_can_be_checked_says_what_is_missing(
    parts: list[Path], tmp_path: Path
) -> None:
    rows = rows_of(parts[1])
    idle = [row["e"] for row in rows].index("state")
    write(tmp_path / "busy", rows[:idle])
    with pytest.raises(LaybyError, match="give part 0 of the recording before it"):
        checked(tmp_path / "busy")
    assert replay_recording([tmp_path / "busy"]).summary.steps > 0


def test_progress_is_told_in_bytes(pressure: Path) -> None:
    told: list[int] = []
    replay_recording([pressure], progress=told.append)
    assert told == sorted(told)
    assert told[-1] == pressure.stat().st_size


# --- the same traffic as a trace ---


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    script = spell("abcdefghijklmnopqrstuvwxyz")
    harness = RecordedHarness(tmp_path / "r", script=script, block_size=4, max_queue=0)
    add = harness.engine.add_request
    harness.clock.now = 100.0
    add("the same start one", SamplingParams(max_tokens=5))
    harness.clock.now = 100.5
    add("the same start, two", SamplingParams(max_tokens=50), priority=3)
    add("cut", SamplingParams(max_tokens=50, stop=("def",)))
    victim = add("x", SamplingParams(max_tokens=20, n=2))
    never = add("y", SamplingParams(max_tokens=20))
    harness.engine.abort(never)
    for _ in range(4):
        harness.engine.step()
    harness.engine.abort(victim)
    harness.run()
    open_end = add("z", SamplingParams(max_tokens=20))
    harness.engine.step()
    harness.close()
    assert open_end
    trace = read_trace(tmp_path / "r")
    assert trace.skipped == 1  # without a token
    first, second, cut, aborted, unended = trace.requests
    lengths = [(r.num_prompt_tokens, r.num_output_tokens, r.max_tokens) for r in trace.requests]
    assert lengths == [(18, 5, None), (19, 27, 50), (3, 6, 50), (1, 4, 20), (1, 10, 20)]
    assert unended.num_output_tokens == round((5 + 27 + 6 + 4) / 4)  # as long as the others
    assert [r.arrival_s for r in trace.requests[:4]] == [0.0, 0.5, 0.5, 0.5]
    assert [r.priority for r in trace.requests] == [0, 3, 0, 0, 0]
    assert [r.n for r in trace.requests] == [1, 1, 1, 2, 1]
    assert [r.request_id for r in trace.requests] == ["1", "2", "3", "4", "6"]
    assert len(first.prefix) == len(second.prefix) == 4
    assert first.prefix_block_tokens == 4
    assert first.prefix[:3] == second.prefix[:3]
    assert first.prefix[3] != second.prefix[3]
    assert cut.prefix == aborted.prefix == ()


def test_a_trace_has_the_sizes_of_the_pool(tmp_path: Path) -> None:
    """Each from the step that made it so, also where the file begins with another than the first;
    in blocks of another size they hold as many tokens."""
    record(tmp_path / "r", meddling=resize, **PRESSURE)
    told = [row["size"] for row in rows_of(tmp_path / "r") if row["e"] == "size"]
    trace = read_trace(tmp_path / "r")
    sizes = [each.num_blocks for each in trace.resizes]
    assert len(sizes) > 3
    assert sizes == [size for size in told if size in sizes]  # but for those overtaken by the next
    times = [each.at_s for each in trace.resizes]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < trace.duration_s * 2
    config = SchedulerConfig(num_blocks=200, num_swap_blocks=50, block_size=4)
    simulation = Simulation(trace, load_profile("a100-llama3-8b"), config)
    simulation.run()
    reached = [each.num_blocks for each in trace.resizes if each.at_s < trace.duration_s]
    assert simulation.scheduler.target_blocks in reached[-1:] + sizes[len(reached) :]
    assert PoolResize(0.0, 30, block_tokens=4).blocks_of(16) == 7
    assert trace.scaled(rate_scale=2).resizes[0].at_s == times[0] / 2


def test_a_part_begins_with_the_size_of_then(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r", max_bytes=200, num_blocks=40)
    for _ in range(4):
        harness.engine.add_request("abcd", SamplingParams(max_tokens=9))
        harness.run()
        if harness.scheduler.target_blocks == 40:
            harness.engine.resize_kv_pool(25)
    harness.close()
    trace = read_trace(tmp_path / "r.1")
    assert [(each.at_s, each.num_blocks) for each in trace.resizes] == [(0.0, 25)]


def test_a_trace_has_who_was_accepted_and_answered(pressure: Path) -> None:
    trace = read_trace(pressure, format="layby")
    summary = replay_recording([pressure]).summary
    assert len(trace) + trace.skipped == summary.arrived
    assert trace.skipped >= summary.refused > 0
    report = simulate(
        trace,
        load_profile("a100-llama3-8b"),
        SchedulerConfig(num_blocks=200, num_swap_blocks=50, block_size=4),
    )
    assert report.result.requests_finished == len(trace)


def test_compressed_recordings_are_read_as_well(tmp_path: Path, pressure: Path) -> None:
    (tmp_path / "r.gz").write_bytes(gzip.compress(pressure.read_bytes()))
    assert checked(tmp_path / "r.gz").difference is None
    assert len(read_trace(tmp_path / "r.gz")) == len(read_trace(pressure))


def test_a_part_of_a_recording_is_a_trace_of_what_came_in_it(parts: list[Path]) -> None:
    counts = [len(read_trace(part)) for part in parts]
    assert all(counts)
    lost = len(parts) - 1  # gaps: who was there in both
    whole = replay_recording(parts).summary
    assert whole.arrived - 5 * lost <= sum(counts) <= whole.arrived


@pytest.mark.parametrize(
    ("change", "word"),
    [({"h": "###"}, "hashes"), ({"p": 0}, "num_prompt_tokens"), ({"m": 0}, "max_tokens")],
)
def test_an_arrival_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, pressure: Path, change: Row, word: str
) -> None:
    rows = rows_of(pressure)
    place = next(i for i, row in enumerate(rows) if row["e"] == "in" and "r" in row)
    rows[place] |= change
    with pytest.raises(TraceError, match=word):
        read_trace(write(tmp_path / "r", rows))


def test_a_report_is_plain_data(pressure: Path) -> None:
    report = replay_recording([pressure], check=True)
    assert isinstance(report, ReplayReport)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["check"]["difference"] is None
    assert data["summary"]["steps"] == report.summary.steps
