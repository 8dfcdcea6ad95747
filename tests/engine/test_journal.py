"""The journal: what it says it has, it has after any crash; and nobody else may look."""

from __future__ import annotations

import copy
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from layby.engine.journal import Journal
from layby.engine.journal_records import (
    CallRecord,
    CallStatus,
    RequestRecord,
    SampleRecord,
    UnreadableCallError,
)
from layby.errors import ConfigError
from layby.execution.executor import PositionLogprobs, TokenLogprob
from layby.sampling_params import SamplingParams

IDENTITY = {"model": "toy", "dtype": "int8"}


def call(call_id: str = "a", owner: str = "", **fields: object) -> CallRecord:
    params = SamplingParams(seed=2**63, logit_bias={5: -1.5}, stop=("x",), logprobs=1)
    return CallRecord(
        owner, call_id, True, "chat", "digest", 12.5, [RequestRecord.new([1, 2], params)],
        **fields,
    )  # type: ignore[arg-type]  # fmt: skip


def opened(directory: Path, **options: object) -> Journal:
    journal = Journal(directory, **options)  # type: ignore[arg-type]
    journal.claim(IDENTITY)
    return journal


POSITION = PositionLogprobs(
    TokenLogprob(3, -0.1234567890123456789, 1), (TokenLogprob(7, float("-inf"), 2),)
)
TOKENS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=3)
SAMPLES = st.builds(
    lambda tokens, **rest: SampleRecord(
        token_ids=[token for token, _ in tokens], text_ends=[end for _, end in tokens], **rest
    ),
    tokens=TOKENS,
    text=st.text(max_size=4),
    logprobs=st.sampled_from([None, [], [POSITION]]),
    finish_reason=st.sampled_from([None, "stop"]),
    stop_reason=st.sampled_from([None, 7, "é"]),
)
KEYS = st.tuples(st.sampled_from(["", "ann", "bob"]), st.sampled_from(["1", "2", "3"]))


class AgainstADict(RuleBasedStateMachine):
    """Random changes; a crash takes the files as they are, without a close."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.number = 0
        self.now = 1000.0
        self.journals: list[Journal] = []
        self.calls: dict[tuple[str, str], CallRecord] = {}
        self.ended_s: dict[tuple[str, str], float] = {}
        self.open(self.directory)

    @property
    def directory(self) -> Path:
        return Path(self.temporary.name) / str(self.number)

    def open(self, directory: Path) -> None:
        self.journal = opened(directory, keep_s=50.0, now=lambda: self.now)
        self.journals.append(self.journal)

    @rule(key=KEYS, chosen=st.booleans(), samples=st.lists(SAMPLES, min_size=2, max_size=2))
    def add(self, key: tuple[str, str], chosen: bool, samples: list[SampleRecord]) -> None:
        owner, call_id = key
        new = call(call_id, owner, echoes=[("é\u2028", [1])], priority=-3, cache_salt="salt")
        new.is_chosen = chosen
        new.requests[0].params = replace(new.requests[0].params, n=2)
        new.requests[0].samples = samples
        if key in self.calls:
            with pytest.raises(KeyError):
                self.journal.add(new)
        else:
            self.journal.add(new)
            self.calls[key] = copy.deepcopy(new)

    @rule(
        key=KEYS,
        samples=st.lists(SAMPLES, min_size=2, max_size=2),
        status=st.sampled_from(list(CallStatus)),
        prompt_logprobs=st.sampled_from([None, [None, POSITION]]),
        waited_s=st.sampled_from([0.0, 0.1]),
    )
    def save(
        self,
        key: tuple[str, str],
        samples: list[SampleRecord],
        status: CallStatus,
        prompt_logprobs: list[PositionLogprobs | None] | None,
        waited_s: float,
    ) -> None:
        known = self.calls.get(key)
        if known is None or known.status is not CallStatus.OPEN:
            return
        known.requests[0].samples = copy.deepcopy(samples)
        known.requests[0].prompt_logprobs = prompt_logprobs
        known.status = status
        known.error = "why" if status is CallStatus.FAILED else None
        if status is not CallStatus.OPEN:
            self.ended_s[key] = self.now
        else:
            known.requests[0].waited_s = waited_s  # of who waits no more it is of no interest
        self.journal.save(known)

    @rule(key=KEYS, priority=st.integers(-9, 9))
    def set_priority(self, key: tuple[str, str], priority: int) -> None:
        self.journal.set_priority(*key, priority)
        if (known := self.calls.get(key)) is not None:
            known.priority, known.requests[0].waited_s = priority, 0.0

    @rule(key=KEYS)
    def fetch(self, key: tuple[str, str]) -> None:
        self.journal.mark_fetched(*key)
        known = self.calls.get(key)
        if known is not None and known.status is not CallStatus.OPEN and not known.is_chosen:
            del self.calls[key]

    @rule(key=KEYS)
    def remove(self, key: tuple[str, str]) -> None:
        assert self.journal.remove(*key) == (self.calls.pop(key, None) is not None)

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def purge(self, seconds: float) -> None:
        self.now += seconds
        old = [
            key
            for key, known in self.calls.items()
            if known.status is not CallStatus.OPEN and self.ended_s[key] < self.now - 50
        ]
        assert self.journal.purge() == len(old)
        for key in old:
            del self.calls[key]

    @rule()
    def crash(self) -> None:
        before = self.directory
        self.number += 1
        shutil.copytree(before, self.directory)
        self.open(self.directory)

    @rule()
    def close_and_open(self) -> None:
        self.journal.close()
        self.open(self.directory)

    @invariant()
    def it_has_what_it_should(self) -> None:
        for owner in ("", "ann", "bob"):
            for call_id in ("1", "2", "3"):
                assert self.journal.find(owner, call_id) == self.calls.get((owner, call_id))
        wanted = [known for known in self.calls.values() if known.status is CallStatus.OPEN]
        assert self.journal.unfinished() == wanted

    def teardown(self) -> None:
        for journal in self.journals:
            journal.close()
        self.temporary.cleanup()


AgainstADict.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestAgainstADict = AgainstADict.TestCase


def test_of_too_many_results_the_fetched_ones_go_first_then_the_oldest(tmp_path: Path) -> None:
    clock = iter(range(1000))
    journal = opened(tmp_path, max_results=2, now=lambda: float(next(clock)))
    for name in "abcde":
        record = call(name)
        journal.add(record)
        if name != "e":
            record.status = CallStatus.DONE
            journal.save(record)
    journal.mark_fetched("", "d")
    assert journal.purge() == 2
    assert [name for name in "abcde" if journal.find("", name)] == ["b", "c", "e"]
    journal.close()


@pytest.mark.parametrize("umask", [0, 0o777])
@pytest.mark.parametrize("is_new", [True, False])
def test_only_the_owner_may_read_whatever_the_umask(
    tmp_path: Path, umask: int, is_new: bool
) -> None:
    directory = tmp_path / "state"
    if not is_new:
        directory.mkdir(mode=0o755)
        (directory / "journal.sqlite3").touch(mode=0o644)
    before = os.umask(umask)
    try:
        journal = opened(directory)
        journal.add(call())
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in directory.iterdir()}
    assert len(modes) == 4  # lock, database, -wal, -shm
    assert set(modes.values()) == {0o600}
    journal.close()


def test_two_processes_cannot_share_a_directory(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by another server \\(process {os.getpid()}\\)"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


def test_the_state_of_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.add(call())
    journal.close()
    journal = Journal(tmp_path)
    with pytest.raises(ConfigError, match="dtype int8, here float32") as refusal:
        journal.claim({**IDENTITY, "dtype": "float32"})
    assert "1 requests" in str(refusal.value)
    assert "model" not in str(refusal.value).partition("(")[2].partition(")")[0]
    journal.claim(IDENTITY)
    assert journal.unfinished() == [call()]
    # With nothing in it, it is nobody's.
    journal.remove("", "a")
    journal.claim({"model": "other"})
    journal.close()


def test_a_directory_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        Journal(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


@pytest.mark.parametrize("content", [b"not a database at all" * 100, None])
def test_a_file_that_is_no_journal_of_ours_is_refused(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "journal.sqlite3"
    if content is None:
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    else:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"journal\.sqlite3"):
        Journal(tmp_path)


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        Journal(tmp_path / "file")


@pytest.mark.parametrize("name", ["journal.sqlite3", "lock"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_regular_file_in_the_place_of_one_is_refused_by_name(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=name):
        Journal(tmp_path)


BAD_ROWS = {
    "no outputs": "outputs = '[]'",
    "no samples": "outputs = '[[[],null]]'",
    "torn": "call = substr(call, 1, 50)",
    "of a newer version": "call = json_set(call, '$.newfield', 1)",
    "no object": "call = '7'",
    "no list": "outputs = '{\"a\": 1}'",
    "a class that is none": "call = json_set(call, '$.priority', 'x')",
    "a time that is none": "call = json_set(call, '$.created_s', 'x')",
    "a wait that is none": "call = json_set(call, '$.waited_s', json('[-1]'))",
    "tokens that are none": "call = json_set(call, '$.requests[0][0]', json('[\"x\"]'))",
    "parameters that are none": "call = json_set(call, '$.requests[0][1].n', 0)",
    "no text": "call = CAST(X'FF' AS TEXT)",
    "bytes": "outputs = X'FF'",
}


@pytest.mark.parametrize("change", BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_call_that_cannot_be_read_is_set_aside_and_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    journal = opened(tmp_path)
    for name in ("before", "bad", "after"):
        journal.add(call(name))
    journal.close()
    path = tmp_path / "journal.sqlite3"
    with sqlite3.connect(path) as database:
        database.execute(f"UPDATE calls SET {change} WHERE id = 'bad'")
    database.close()
    question = "SELECT status, CAST(call AS BLOB), outputs FROM calls WHERE id = 'bad'"
    with sqlite3.connect(path) as database:
        before = database.execute(question).fetchone()
    database.close()
    journal = opened(tmp_path)
    assert journal.unfinished() == [call("before"), call("after")]
    assert [record.message for record in caplog.records if "'bad'" in record.message]
    assert len(caplog.records) == 1
    with pytest.raises(UnreadableCallError, match="bad"):
        journal.find("", "bad")
    journal.close()
    with sqlite3.connect(path) as database:
        assert database.execute(question).fetchone() == before
    database.close()
    journal = opened(tmp_path)
    assert journal.remove("", "bad")
    journal.close()


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_database_that_is_damaged_is_refused_with_its_name_and_left_alone(
    tmp_path: Path, is_cut_off: bool
) -> None:
    journal = opened(tmp_path)
    for number in range(40):
        record = call(str(number))
        record.requests[0].prompt = list(range(2000))
        journal.add(record)
    journal.close()
    path = tmp_path / "journal.sqlite3"
    content = bytearray(path.read_bytes())
    if is_cut_off:
        del content[3 * 4096 :]
    for at in range(3 * 4096, len(content), 4096):
        content[at : at + 200] = bytes(range(200))
    path.write_bytes(content)

    def start() -> None:
        journal = Journal(tmp_path)
        try:
            journal.claim(IDENTITY)
            journal.unfinished()
        finally:
            journal.close()

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"journal\.sqlite3.*name another state_dir"):
            start()
    assert path.read_bytes() == content
