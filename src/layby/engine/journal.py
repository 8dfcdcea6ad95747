"""What was accepted and not yet fetched, on disk: a process that ends, however, loses none of it.

A state directory holds ``journal.sqlite3`` (with its ``-wal`` and ``-shm``), ``lock`` and, between
an orderly end and the next start, ``kv-cache``, that of what had not ended; nobody but its owner
may look into it, and one process uses it at a time.

The database is in WAL mode with ``synchronous=NORMAL``: a committed change is in the page cache of
the system, so it survives whatever happens to the process (``kill -9``). A power cut may take the
last changes back; the database as such survives that too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from layby.engine.config import DEFAULT_KEEP_S
from layby.engine.outputs import CompletionDelta, RequestDelta
from layby.errors import ConfigError
from layby.execution.executor import PositionLogprobs, TokenLogprob
from layby.sampling_params import SamplingParams

logger = logging.getLogger("layby.engine")

MAX_RESULTS: Final = 10_000
"""Most results that are kept; beyond it those fetched already go first, then the oldest."""

_DATABASE: Final = "journal.sqlite3"
_LOCK: Final = "lock"
_KV: Final = "kv-cache"
_VERSION: Final = 1
_PURGE_EVERY_S: Final = 30.0
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS identity (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS calls (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    status TEXT NOT NULL,
    is_fetched INTEGER NOT NULL DEFAULT 0,
    ended_s REAL,
    call TEXT NOT NULL,
    outputs TEXT NOT NULL,
    error TEXT,
    PRIMARY KEY (owner, id)
);
CREATE INDEX IF NOT EXISTS calls_by_status ON calls (status, ended_s);
"""
_COLUMNS: Final = "owner, id, status, is_fetched, ended_s, call, outputs, error"


class CallStatus(Enum):
    """How far a call has come."""

    OPEN = "open"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class SampleRecord:
    """One sample so far.

    Attributes:
        token_ids: Output tokens, a stop token among them.
        text: What is shown of them.
        text_ends: For every token, how many characters of ``text`` were shown with it.
        logprobs: One entry per token, where asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    text_ends: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: CompletionDelta) -> None:
        """Append what one step added."""
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.text_ends += [len(self.text)] * len(piece.token_ids)
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += piece.logprobs
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


@dataclass(slots=True)
class RequestRecord:
    """One prompt of a call.

    Attributes:
        prompt: Its token ids.
        params: With seed and ``max_tokens`` settled.
        samples: ``params.n`` of them.
        prompt_logprobs: One entry per prompt token, once they are known, where asked for.
    """

    prompt: list[int]
    params: SamplingParams
    samples: list[SampleRecord]
    prompt_logprobs: list[PositionLogprobs | None] | None = None

    @classmethod
    def new(cls, prompt: list[int], params: SamplingParams) -> RequestRecord:
        """Nothing has come yet."""
        return cls(prompt, params, [SampleRecord() for _ in range(params.n)])

    @property
    def is_finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def has_started(self) -> bool:
        """Whether every sample has a token: they get their first in the same step."""
        return all(sample.token_ids for sample in self.samples)

    def add(self, delta: RequestDelta) -> None:
        """Append what one step added."""
        for piece in delta.outputs:
            self.samples[piece.index].add(piece)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


@dataclass(slots=True)
class CallRecord:
    """A call: what was asked, and what has come of it.

    Attributes:
        owner: Whose it is; nobody else learns that it exists.
        call_id: Unique for its owner.
        is_chosen: The client chose the id, so it may come back with it.
        kind: The API whose shape the answer has: ``chat`` or ``completion``.
        digest: Of everything that was asked.
        created_s: When it was accepted, in seconds since 1970.
        priority, cache_salt: As the engine has them.
        echoes: Text and, where wanted, token ids of prompts that are part of the answer.
        error: Why it failed.
    """

    owner: str
    call_id: str
    is_chosen: bool
    kind: str
    digest: str
    created_s: float
    requests: list[RequestRecord]
    priority: int = 0
    cache_salt: str = ""
    echoes: list[tuple[str, list[int]]] = field(default_factory=list)
    status: CallStatus = CallStatus.OPEN
    error: str | None = None


class Journal:
    """Calls on disk. Safe in any thread; every change is committed when its method returns.

    Args:
        directory: Made if it is missing.
        keep_s: How long results are kept.
        max_results: Most results that are kept.
        now: Seconds since 1970.

    Raises:
        ConfigError: The directory cannot be used, holds something else, or another server uses it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_s: float = DEFAULT_KEEP_S,
        max_results: int = MAX_RESULTS,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.directory = directory
        self._keep_s, self._max_results, self._now = keep_s, max_results, now
        self._purged_s = now()
        self._mutex = threading.Lock()
        try:
            _claim_directory(directory)
            self._lock_file = _lock(directory / _LOCK)
        except OSError as error:
            raise ConfigError(
                f"state_dir {directory} cannot be used: {error.strerror or error}"
            ) from error
        try:
            self._database = _open_database(directory / _DATABASE)
        except BaseException:
            os.close(self._lock_file)
            raise

    @property
    def kv_path(self) -> Path:
        """Where the KV cache of unfinished calls is kept for the next process."""
        return self.directory / _KV

    def claim(self, identity: Mapping[str, str]) -> None:
        """Say what the answers of this process depend on; must be called before all that follows.

        Raises:
            ConfigError: The state is another model's; it is left as it is.
        """
        wanted = dict(identity)
        with self._mutex:
            self._check_identity(wanted)
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute("DELETE FROM identity")
                self._database.executemany("INSERT INTO identity VALUES (?, ?)", wanted.items())

    def _check_identity(self, wanted: Mapping[str, str]) -> None:
        rows = self._database.execute("SELECT name, value FROM identity")
        found = {str(name): str(value) for name, value in rows}
        [[num_calls]] = self._database.execute("SELECT count(*) FROM calls")
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if not num_calls or not names:
            return  # nothing in it is anybody's, or all of it is ours
        differences = "; ".join(
            f"{name} {found.get(name, 'unknown')}, here {wanted.get(name, 'unknown')}"
            for name in names
        )
        raise ConfigError(
            f"state_dir {self.directory} holds {num_calls} requests of another engine "
            f"({differences}): start the one it belongs to, or name another state_dir; "
            "nothing was changed"
        )

    # --- changes ---

    def add(self, call: CallRecord) -> None:
        """Write a new call down.

        Raises:
            KeyError: Its owner has one of this id.
        """
        try:
            self._change(
                f"INSERT INTO calls ({_COLUMNS}) VALUES (?, ?, ?, 0, NULL, ?, ?, ?)",
                (
                    call.owner,
                    call.call_id,
                    call.status.value,
                    _call_to_json(call),
                    _outputs_to_json(call.requests),
                    call.error,
                ),
            )
        except sqlite3.IntegrityError:
            raise KeyError(call.call_id) from None

    def save(self, call: CallRecord) -> None:
        """Write down how far a call has come; one that has ended becomes a result."""
        ended_s = None if call.status is CallStatus.OPEN else self._now()
        self._change(
            "UPDATE calls SET status = ?, ended_s = ?, outputs = ?, error = ? "
            "WHERE owner = ? AND id = ?",
            (
                call.status.value,
                ended_s,
                _outputs_to_json(call.requests),
                call.error,
                call.owner,
                call.call_id,
            ),
        )
        if self._now() - self._purged_s >= _PURGE_EVERY_S:
            self.purge()

    def set_priority(self, owner: str, call_id: str, priority: int) -> None:
        """The call is in another class."""
        self._change(
            "UPDATE calls SET call = json_set(call, '$.priority', ?) WHERE owner = ? AND id = ?",
            (priority, owner, call_id),
        )

    def mark_fetched(self, owner: str, call_id: str) -> None:
        """The result has gone out. It is kept only if the client may come back for it."""
        is_chosen = "json_extract(call, '$.is_chosen')"
        where = "owner = ? AND id = ? AND status != 'open'"
        self._change(f"UPDATE calls SET is_fetched = 1 WHERE {where}", (owner, call_id))
        self._change(f"DELETE FROM calls WHERE {where} AND NOT {is_chosen}", (owner, call_id))

    def remove(self, owner: str, call_id: str) -> bool:
        """Forget a call; False if there is none."""
        return self._change("DELETE FROM calls WHERE owner = ? AND id = ?", (owner, call_id)) > 0

    def purge(self) -> int:
        """Forget results that are too old or too many; returns how many those were."""
        self._purged_s = self._now()
        removed = self._change(
            "DELETE FROM calls WHERE status != 'open' AND ended_s < ?",
            (self._purged_s - self._keep_s,),
        )
        return removed + self._change(
            "DELETE FROM calls WHERE rowid IN (SELECT rowid FROM calls WHERE status != 'open' "
            "ORDER BY is_fetched, ended_s DESC, rowid DESC LIMIT -1 OFFSET ?)",
            (self._max_results,),
        )

    # --- questions ---

    def find(self, owner: str, call_id: str) -> CallRecord | None:
        """The call as it was last written down."""
        found = self._select("WHERE owner = ? AND id = ?", (owner, call_id))
        return found[0] if found else None

    def unfinished(self) -> list[CallRecord]:
        """Calls that have not ended, in the order in which they were accepted."""
        return self._select("WHERE status = 'open' ORDER BY rowid", ())

    def close(self) -> None:
        """Let the next process have the directory. May be called again."""
        with self._mutex:
            if self._lock_file >= 0:
                self._database.close()
                os.close(self._lock_file)
                self._lock_file = -1

    def _change(self, statement: str, values: Iterable[object]) -> int:
        with self._mutex:
            return self._database.execute(statement, tuple(values)).rowcount

    def _select(self, condition: str, values: tuple[object, ...]) -> list[CallRecord]:
        with self._mutex:
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM calls {condition}", values
            ).fetchall()
        return [_from_row(row) for row in rows]


# --- the directory ---


def _claim_directory(directory: Path) -> None:
    """Make the directory ours alone, unless it serves something else."""
    if not directory.exists():
        directory.mkdir(parents=True)
        directory.chmod(0o700)
    others = {entry.name for entry in directory.iterdir()} - {_LOCK}
    strangers = sorted(name for name in others if not name.startswith((_DATABASE, _KV)))
    if strangers:
        raise ConfigError(
            f"state_dir {directory} holds other files ({strangers[0]}): name a new or empty one"
        )
    directory.chmod(0o700)


def _private(path: Path) -> int:
    """Open a file, made if need be, that only its owner may read; whatever the umask."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def _lock(path: Path) -> int:
    """Hold the directory until the process ends, however it does."""
    handle = _private(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 20, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"state_dir {path.parent} is in use by another server (process {owner or 'unknown'})"
        ) from None
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


def _open_database(path: Path) -> sqlite3.Connection:
    os.close(_private(path))  # SQLite gives its other files the same mode
    try:
        # Autocommit: every statement is a transaction. Our own lock keeps the threads apart.
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        [[version]] = database.execute("PRAGMA user_version")
        if version not in (0, _VERSION):
            database.close()
            raise ConfigError(
                f"{path} has format {version}; this version of Layby reads {_VERSION}"
            )
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.Error as error:
        raise ConfigError(f"{path} cannot be used: {error}") from error
    return database


# --- records to text and back ---


def _to_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _call_to_json(call: CallRecord) -> str:
    return _to_json(
        {
            "is_chosen": call.is_chosen,
            "kind": call.kind,
            "digest": call.digest,
            "created_s": call.created_s,
            "priority": call.priority,
            "cache_salt": call.cache_salt,
            "echoes": call.echoes,
            "requests": [[request.prompt, asdict(request.params)] for request in call.requests],
        }
    )


def _outputs_to_json(requests: Iterable[RequestRecord]) -> str:
    return _to_json(
        [
            [
                [
                    [
                        sample.token_ids,
                        sample.text,
                        sample.text_ends,
                        _logprobs_to_lists(sample.logprobs),
                        sample.finish_reason,
                        sample.stop_reason,
                    ]
                    for sample in request.samples
                ],
                _logprobs_to_lists(request.prompt_logprobs),
            ]
            for request in requests
        ]
    )


def _logprobs_to_lists(positions: Iterable[PositionLogprobs | None] | None) -> list[Any] | None:
    if positions is None:
        return None
    return [
        position
        and [
            [token.token_id, token.logprob, token.rank]
            for token in (position.chosen, *position.top)
        ]
        for position in positions
    ]


def _from_row(row: tuple[Any, ...]) -> CallRecord:
    owner, call_id, status, _is_fetched, _ended_s, call_text, outputs_text, error = row
    call = json.loads(call_text)
    requests = [
        RequestRecord(prompt, _params(params), [_sample(item) for item in samples], _logprobs(rows))
        for (prompt, params), (samples, rows) in zip(
            call.pop("requests"), json.loads(outputs_text), strict=True
        )
    ]
    call["echoes"] = [(text, ids) for text, ids in call["echoes"]]
    return CallRecord(
        owner=owner,
        call_id=call_id,
        status=CallStatus(status),
        error=error,
        requests=requests,
        **call,
    )


def _params(values: dict[str, Any]) -> SamplingParams:
    values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return SamplingParams(**values)


def _sample(item: list[Any]) -> SampleRecord:
    token_ids, text, text_ends, rows, finish_reason, stop_reason = item
    logprobs = None if rows is None else [_position(row) for row in rows]
    return SampleRecord(token_ids, text, text_ends, logprobs, finish_reason, stop_reason)


def _logprobs(rows: list[Any] | None) -> list[PositionLogprobs | None] | None:
    return None if rows is None else [row and _position(row) for row in rows]


def _position(row: list[list[Any]]) -> PositionLogprobs:
    chosen, *top = [TokenLogprob(*token) for token in row]
    return PositionLogprobs(chosen, tuple(top))
