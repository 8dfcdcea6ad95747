"""Recordings: what is in them and what is not, how they rotate, and that serving never notices."""

from __future__ import annotations

import base64
import errno
import json
import logging
import stat
import struct
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layby.engine import EngineConfig, recorder
from layby.engine.build import build_engine
from layby.engine.recorder import Recorder
from layby.engine.recording import (
    KEPT_FILES,
    Arrival,
    RecordingFile,
    Step,
    TimeCode,
    check_recordable,
    event_line,
    parse_event,
    unpack_hashes,
)
from layby.engine.recording import file as recording_file
from layby.errors import ConfigError
from layby.sampling_params import SamplingParams
from tests.engine.harness import Harness, spell
from tests.engine.recorded import RecordedHarness, record


def lines(path: Path) -> list[dict[str, Any]]:
    """Those that are complete: the file may be being written."""
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def of_kind(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line["e"] == kind]


def wait_for(condition: Any) -> None:
    """The file is written by a thread of its own."""
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.005)


# --- lines ---


def test_an_event_is_a_short_line_and_comes_back() -> None:
    step = Step(7, [12], num_steady=3, scheduled=[[4, 0, 16, 1]], preempted=[2], modes=["swap"])
    line = event_line(step)
    assert json.loads(line) == {
        "e": "step", "k": 7, "t": [12], "n": 3, "s": [[4, 0, 16, 1]], "out": [2], "how": ["swap"],
    }  # fmt: skip
    assert line.endswith("}\n")
    assert parse_event(json.loads(line)) == step


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"e": "nap"}, "e is 'nap'"),
        ({"e": ["step"]}, r"e is \['step'\]"),
        ({}, "e is None"),
        ({"e": "step", "k": 7}, "'step' lacks t"),
        ({"e": "step", "k": True, "t": [1]}, "k of 'step' is True"),
        ({"e": "step", "k": 7, "t": [1], "s": [[1], 2]}, r"s of 'step' is \[\[1\], 2\]"),
        ({"e": "run", "k": 7, "n": 1, "t": [1e300], "d": ""}, r"t of 'run' is \[1e\+300\]"),
        ({"e": "abort", "r": 2**70, "t": [1]}, "r of 'abort' is 1180591620717411303424"),
    ],
)
def test_what_is_no_event_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_event(row)


@given(
    start=st.floats(-1e9, 1e9),
    times=st.lists(
        st.one_of(
            st.floats(-1e12, 1e12),
            st.floats(0, 1),
            st.integers(0, 10**16).map(lambda ns: ns / 1e9),
        )
    ),
)
def test_times_come_back_bit_by_bit(start: float, times: list[float]) -> None:
    write, read = TimeCode(start), TimeCode(start)
    written = json.loads(json.dumps([write.encode(seconds) for seconds in times]))
    back = [read.decode(each) for each in written]
    assert [struct.pack("d", each) for each in back] == [
        struct.pack("d", each + 0.0) for each in times
    ]


def test_a_time_of_the_system_clock_costs_a_difference() -> None:
    code = TimeCode(86_000.0)
    assert code.encode(86_000.044912345) == 44_912_345
    assert code.encode(86_000.045) == 87_655


def test_whatever_class_a_client_chooses_can_be_written(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r")
    for priority in (10**30, -(10**30)):
        harness.engine.add_request("x", SamplingParams(max_tokens=2), priority=priority)
    harness.run()
    harness.close()
    assert harness.recorder.error is None
    assert [line["pr"] for line in of_kind(tmp_path / "r", "in")] == [2**62 - 1, 1 - 2**62]


@pytest.mark.parametrize("text", ["AAAA", "AAAAAAA!", "AAAAAAAAAA", "ü"])
def test_what_is_no_text_of_hashes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hashes"):
        unpack_hashes(text)


# --- what a recording holds ---


def test_arrivals_carry_everything_the_scheduler_knows(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r", script=spell("ab"), block_size=4)
    harness.clock.now = 3.25
    params = SamplingParams(max_tokens=9, min_tokens=2, n=2, prompt_logprobs=1)
    harness.engine.add_request("0123456789", params, request_id="Mr Smith", priority=-2)
    harness.run()
    harness.close()
    head, *_ = lines(tmp_path / "r")
    assert head["e"] == "head"
    assert head["model"] == "toy"
    assert head["scheduler"]["block_size"] == 4
    assert abs(head["wall_s"] - time.time()) < 60
    [arrival] = of_kind(tmp_path / "r", "in")
    hashes = arrival.pop("h")
    assert arrival == {
        "e": "in", "t": 3_250_000_000, "p": 10, "m": 9, "r": 1, "min": 2, "n": 2, "pr": -2,
        "cache": False,
    }  # fmt: skip
    assert len(unpack_hashes(hashes)) == 2  # full blocks of four


def test_no_text_and_no_token_is_in_a_recording(tmp_path: Path) -> None:
    """Nor anything computed from them without the key, such as the scheduler's own addresses."""
    secret, answer = "My PIN is 4711, keep it safe!", "I shall tell nobody."
    harness = RecordedHarness(tmp_path / "r", script=spell(answer), block_size=4, num_blocks=14)
    names = [
        harness.engine.add_request(secret, SamplingParams(max_tokens=17), request_id=f"id-{i}")
        for i in range(3)
    ]
    harness.engine.add_request(secret + answer, SamplingParams(max_tokens=4), cache_salt="Acme")
    addresses = [
        address
        for request in harness.scheduler.requests.values()
        for address in request.sequences[0].hash_full_blocks(7, 4)
    ]
    harness.run()
    harness.close()
    text = (tmp_path / "r").read_text()
    numbers = [number for line in lines(tmp_path / "r") for number in flat(line)]
    for words in (secret, answer):
        tokens = list(words.encode())
        for start in range(len(words) - 7):
            assert words[start : start + 8] not in text
            assert not contains(numbers, tokens[start : start + 4])
    assert all(name not in text for name in [*names, "Acme"])
    for address in addresses:
        assert isinstance(address, bytes)
        for short in (address, address[:6]):
            assert base64.b64encode(short).decode().rstrip("=") not in text
            assert short.hex() not in text


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [each for one in value.values() for each in flat(one)]
    if isinstance(value, list):
        return [each for one in value for each in flat(one)]
    return [value]


def contains(numbers: list[Any], part: list[int]) -> bool:
    return any(numbers[i : i + len(part)] == part for i in range(len(numbers)))


def test_equal_prompts_have_equal_hashes_in_one_recording_and_others_in_the_next(
    tmp_path: Path,
) -> None:
    hashes = []
    for name in ("one", "other"):
        harness = RecordedHarness(tmp_path / name, block_size=4)
        for prompt in ("so it begins", "so it begins", "so it ends here"):
            harness.engine.add_request(prompt, SamplingParams(max_tokens=1))
        harness.run()
        harness.close()
        hashes.append([unpack_hashes(line["h"]) for line in of_kind(tmp_path / name, "in")])
    one, other = hashes
    assert one[0] == one[1]
    assert one[0][0] == one[2][0]
    assert one[0][1:] != one[2][1:3]
    assert not {*one[0], *one[2]} & {*other[0], *other[2]}


def test_a_step_without_a_decision_costs_two_numbers(tmp_path: Path) -> None:
    """A day of steady decoding must not fill a disk."""
    harness = RecordedHarness(tmp_path / "r", num_blocks=400, max_model_len=2000)
    harness.executor.before_step = lambda plan: None
    for _ in range(20):
        harness.engine.add_request("x" * 16, SamplingParams(max_tokens=220))
    harness.run()
    harness.close()
    runs = of_kind(tmp_path / "r", "run")
    assert sum(len(run["t"]) // 2 for run in runs) > 200
    assert len(json.dumps(runs)) < 25 * 220


def test_what_happened_reaches_the_disk_while_the_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    harness = RecordedHarness(tmp_path / "r")
    harness.engine.add_request("x", SamplingParams(max_tokens=50))
    for _ in range(5):
        harness.engine.step()
    wait_for(lambda: any(run["k"] == 5 for run in of_kind(tmp_path / "r", "run")))
    harness.close()


def test_an_idle_engine_has_nothing_left_to_write(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r")
    harness.engine.add_request("x", SamplingParams(max_tokens=3))
    harness.run()
    wait_for(lambda: of_kind(tmp_path / "r", "done"))
    assert of_kind(tmp_path / "r", "done")[-1]["end"] == [[1, 3]]
    harness.close()


# --- files ---


def test_only_its_owner_may_read_a_recording(tmp_path: Path) -> None:
    RecordedHarness(tmp_path / "r").close()
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_a_recording_of_before_is_kept(tmp_path: Path) -> None:
    """The server is started again after a crash: what led to it must still be there."""
    for _ in range(3):
        RecordedHarness(tmp_path / "r").close()
    names = [lines(tmp_path / name)[0]["recording"] for name in ("r", "r.1", "r.2")]
    assert len(set(names)) == 3
    assert len(list(tmp_path.iterdir())) == 3


def test_a_file_gives_way_when_the_engine_is_idle(tmp_path: Path) -> None:
    harness = RecordedHarness(tmp_path / "r", max_bytes=3000)
    for number in range(60):
        harness.engine.add_request(f"{number}" * 40, SamplingParams(max_tokens=5))
        harness.run()
    harness.close()
    files = [tmp_path / "r", *(tmp_path / f"r.{i}" for i in range(1, KEPT_FILES + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    parts = [lines(file)[0]["part"] for file in files]
    assert parts == list(range(parts[0], parts[0] - 5, -1))
    assert {lines(file)[0]["recording"] for file in files} == {lines(files[0])[0]["recording"]}
    for file in files:
        assert [line["e"] for line in lines(file)[:2]] == ["head", "state"]
        assert "gap" not in {line["e"] for line in lines(file)}
    assert all(3000 <= file.stat().st_size < 7000 for file in files[1:])


def test_a_file_of_an_engine_that_is_never_idle_gives_way_at_twice_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    harness = RecordedHarness(tmp_path / "r", max_bytes=4000, num_blocks=200, block_size=4)
    for number in range(40):
        harness.engine.add_request(f"{number}", SamplingParams(max_tokens=20))
        for _ in range(10):
            harness.engine.step()
    wait_for((tmp_path / "r.2").exists)
    assert [line["e"] for line in lines(tmp_path / "r.1")[:2]] == ["head", "gap"]
    assert 8000 <= (tmp_path / "r.1").stat().st_size < 10_000
    harness.run()  # idle at last
    wait_for(lambda: of_kind(tmp_path / "r", "state"))
    harness.close()


def test_two_engines_never_record_to_one_file(tmp_path: Path) -> None:
    """Each would have moved the other's file away, and told half of what happened."""
    path = tmp_path / "r"
    harness = RecordedHarness(path, max_bytes=2000)
    message = f"cannot record to {path}: another engine is recording to it"
    for number in range(20):  # also after the file has given way to others
        with pytest.raises(ConfigError, match=message):
            RecordingFile(path)
        with pytest.raises(ConfigError, match=message):
            check_recordable(path)
        harness.engine.add_request(f"{number}" * 40, SamplingParams(max_tokens=5))
        harness.run()
    assert harness.recorder.part > 1
    harness.close()
    assert harness.recorder.error is None
    check_recordable(path)
    RecordingFile(path).close()


@pytest.mark.parametrize("taken", [1, 4])
def test_a_file_that_another_engine_records_to_takes_no_older_ones_name(
    taken: int, tmp_path: Path
) -> None:
    path, other = tmp_path / "r", tmp_path / f"r.{taken}"
    path.write_text("of before")
    first = RecordingFile(other)
    message = f"cannot record to {path}: another engine is recording to {other}, a name"
    with pytest.raises(ConfigError, match=message):
        check_recordable(path)
    with pytest.raises(ConfigError, match=message):
        RecordingFile(path)
    first.write(b"mine\n")
    first.close()
    assert other.read_bytes() == b"mine\n"
    assert path.read_text() == "of before"
    RecordingFile(path).close()


def test_a_recording_ends_when_another_engine_has_taken_the_name_of_its_older_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, other = tmp_path / "r", tmp_path / "r.1"
    harness = RecordedHarness(path, max_bytes=2000)
    second = RecordingFile(other)
    second.write(b"theirs\n")
    for number in range(20):
        harness.engine.add_request(f"{number}" * 40, SamplingParams(max_tokens=5))
        harness.run()
    harness.close()
    second.write(b"theirs too\n")
    second.close()
    assert other.read_bytes() == b"theirs\ntheirs too\n"
    assert not (tmp_path / "r.2").exists()
    assert harness.recorder.error is not None
    assert str(other) in harness.recorder.error
    assert [str(other) in each.getMessage() for each in caplog.records] == [True]
    assert harness.engine.stats().requests_finished == 20
    lines = path.read_text().splitlines()
    assert len(lines) > 5
    assert [json.loads(line)["e"] for line in lines].count("head") == 1


def test_a_recording_that_is_broken_off_holds_everything_up_to_then(tmp_path: Path) -> None:
    """From another thread, in the middle of the work; and nothing comes after it."""
    harness = RecordedHarness(tmp_path / "r")
    harness.engine.add_request("x", SamplingParams(max_tokens=50))
    for _ in range(5):
        harness.engine.step()
    breaking = threading.Thread(target=lambda: harness.recorder.break_off(5.0))
    breaking.start()
    breaking.join()
    assert of_kind(tmp_path / "r", "run")[-1]["k"] + 4 >= 5
    assert "close" not in {line["e"] for line in lines(tmp_path / "r")}


# --- serving never notices ---


class FullDisk:
    """A file on a disk with so many bytes left."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if len(data) > self.room:
            self.file.write(data[: self.room])
            self.room = 0
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def answers(harness: Harness) -> list[str]:
    for number in range(6):
        harness.engine.add_request(f"{number}" * 30, SamplingParams(max_tokens=30))
    return [output.outputs[0].text for output in harness.run().values()]


def test_a_full_disk_ends_the_recording_with_a_line_in_the_log_and_serving_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)

    def open_file(path: Path) -> Any:
        return FullDisk(path.open("wb"), room=1000)

    harness = RecordedHarness(tmp_path / "r", open_file=open_file, num_blocks=12)
    assert harness.metric("layby_recording") == 1
    with caplog.at_level(logging.INFO, logger="layby"):
        texts = answers(harness)
        wait_for(lambda: harness.recorder.error)
        texts += answers(harness)
        harness.close()
    assert texts == answers(Harness(num_blocks=12)) * 2
    assert harness.recorder.error == "No space left on device"
    assert harness.metric("layby_recording") == 0
    logged = [each for each in caplog.records if "recording" in each.getMessage()]
    assert len(logged) == 1
    assert f"recording to {tmp_path / 'r'} stopped: No space left" in logged[0].getMessage()
    assert (tmp_path / "r").stat().st_size == 1000


def test_an_engine_that_is_not_recorded_has_no_metric_of_it() -> None:
    assert b"layby_recording" not in Harness().engine.metrics_text()


def test_a_disk_that_does_not_keep_up_ends_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine neither waits for it nor fills the memory."""
    monkeypatch.setattr(recording_file, "MOST_UNWRITTEN_BYTES", 2000)
    monkeypatch.setattr(recorder, "FLUSH_S", 0.0)
    released = threading.Event()

    class Stalled(FullDisk):
        def write(self, data: bytes) -> int:
            released.wait()
            return super().write(data)

    def open_file(path: Path) -> Any:
        return Stalled(path.open("wb"), room=10**9)

    harness = RecordedHarness(tmp_path / "r", open_file=open_file)
    try:
        answers(harness)
    finally:
        released.set()
    assert harness.recorder.error == "the disk does not keep up"
    harness.close()


def test_a_fault_of_the_recorder_is_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder, *args: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Recorder, "updated", fail)
    harness = RecordedHarness(tmp_path / "r", num_blocks=12)
    assert answers(harness) == answers(Harness(num_blocks=12))
    assert harness.recorder.error == "ZeroDivisionError: oops"
    assert caplog.text.count("stopped") == 1
    harness.close()


def test_a_file_that_cannot_be_written_is_refused_before_anything_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot record to .*/nowhere/r: No such file"):
        RecordingFile(tmp_path / "nowhere" / "r")
    with pytest.raises(ConfigError, match="Is a directory"):
        RecordingFile(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path / 'nowhere'} is no directory"):
        build_engine(EngineConfig(model="no such model", record=str(tmp_path / "nowhere" / "r")))
    with pytest.raises(ConfigError, match="it is a directory"):
        check_recordable(tmp_path)
    check_recordable(tmp_path / "r")
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": ""}, "record must name a file"),
        ({"record": 5}, "record must be text"),
        ({"record_max_mib": 0}, "record_max_mib must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**options)


def test_recording_changes_no_decision(tmp_path: Path) -> None:
    """The recorder asks for hashes earlier than the scheduler would."""
    plans = []
    for harness in (
        RecordedHarness(tmp_path / "r", num_blocks=14, block_size=4),
        Harness(num_blocks=14, block_size=4),
    ):
        for number in range(5):
            harness.engine.add_request(f"{number % 2}" * 9, SamplingParams(max_tokens=14, n=2))
        harness.run()
        plans.append(
            [
                (plan.step, plan.swap_out, plan.swap_in, plan.copy, len(plan.scheduled))
                for plan in harness.executor.plans
            ]
        )
        assert harness.scheduler.metrics.preemptions
    assert plans[0] == plans[1]


def test_everything_the_scheduler_is_told_is_recorded(tmp_path: Path) -> None:
    record(tmp_path / "r", seed=35, requests=40)
    kinds = {line["e"] for line in lines(tmp_path / "r")}
    assert kinds == {"head", "in", "hash", "run", "step", "done", "cut", "abort", "close"}
    refused = {line.get("no") for line in of_kind(tmp_path / "r", "in")}
    assert "QueueFullError" in refused
    assert {line.get("why", "abort") for line in of_kind(tmp_path / "r", "abort")} == {
        "abort",
        "error",
    }
    assert isinstance(parse_event(of_kind(tmp_path / "r", "in")[0]), Arrival)


def test_a_scheduler_that_breaks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = RecordedHarness(tmp_path / "r")
    harness.engine.add_request("x", SamplingParams(max_tokens=9))
    harness.engine.step()

    def fail(*args: Any) -> None:
        raise KeyError("my secret")

    monkeypatch.setattr(harness.scheduler.memory, "settle", fail)
    harness.engine.step()
    assert harness.engine.error is not None
    harness.close()
    [broken] = of_kind(tmp_path / "r", "broken")
    assert broken == {"e": "broken", "error": "KeyError"}
