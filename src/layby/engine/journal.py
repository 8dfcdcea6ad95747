"""What was accepted and not yet fetched, on disk: a process that ends, however, loses none of it.

A state directory holds ``journal.sqlite3`` (with its ``-wal`` and ``-shm``), ``lock`` and, between
an orderly end and the next start, ``kv-cache``, that of what had not ended; nobody but its owner
may look into it, and one process uses it at a time.

The database is in WAL mode with ``synchronous=NORMAL``: a committed change is in the page cache of
the system, so it survives whatever happens to the process (``kill -9``). A power cut may take the
last changes back; the database as such survives that too.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from layby.engine.config import DEFAULT_KEEP_S
from layby.engine.journal_records import (
    CallRecord,
    CallStatus,
    UnreadableCallError,
    call_from_row,
    call_to_json,
    outputs_to_json,
    to_json,
    unreadable,
)
from layby.errors import ConfigError

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


_WHAT_TO_DO: Final = (
    "put back a copy of it, or name another state_dir and leave what this one holds; "
    "nothing was changed"
)


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
            ConfigError: The state is another model's, or damaged; it is left as it is.
        """
        wanted = dict(identity)
        with self._mutex, self._as_a_whole():
            if self._check_identity(wanted):
                return
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                self._database.execute("DELETE FROM identity")
                self._database.executemany("INSERT INTO identity VALUES (?, ?)", wanted.items())

    def _check_identity(self, wanted: Mapping[str, str]) -> bool:
        """Whether the identity is there already; raises if calls of another one are."""
        rows = self._database.execute("SELECT name, value FROM identity")
        found = {str(name): str(value) for name, value in rows}
        [[num_calls]] = self._database.execute("SELECT count(*) FROM calls")
        names = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
        if not num_calls or not names:
            return not names  # nothing in it is anybody's, or all of it is ours
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
                    call_to_json(call),
                    outputs_to_json(call.requests),
                    call.error,
                ),
            )
        except sqlite3.IntegrityError:
            raise KeyError(call.call_id) from None

    def save(self, call: CallRecord) -> None:
        """Write down how far a call has come; one that has ended becomes a result."""
        if call.status is CallStatus.OPEN:
            self._save_waits(call)
        ended_s = None if call.status is CallStatus.OPEN else self._now()
        self._change(
            "UPDATE calls SET status = ?, ended_s = ?, outputs = ?, error = ? "
            "WHERE owner = ? AND id = ?",
            (
                call.status.value,
                ended_s,
                outputs_to_json(call.requests),
                call.error,
                call.owner,
                call.call_id,
            ),
        )
        if self._now() - self._purged_s >= _PURGE_EVERY_S:
            self.purge()

    def _save_waits(self, call: CallRecord) -> None:
        waited_s = [request.waited_s for request in call.requests]
        self._change(
            "UPDATE calls SET call = json_patch(call, ?) WHERE owner = ? AND id = ?",
            (to_json({"waited_s": waited_s if any(waited_s) else None}), call.owner, call.call_id),
        )

    def set_priority(self, owner: str, call_id: str, priority: int) -> None:
        """The call is in another class, where it has not waited yet."""
        self._change(
            "UPDATE calls SET call = json_patch(call, ?) WHERE owner = ? AND id = ?",
            (to_json({"priority": priority, "waited_s": None}), owner, call_id),
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
        """The call as it was last written down.

        Raises:
            UnreadableCallError: What was written cannot be read.
        """
        try:
            rows = self._select("WHERE owner = ? AND id = ?", (owner, call_id))
        except sqlite3.DatabaseError as error:
            raise unreadable(call_id, error) from error
        return call_from_row(rows[0]) if rows else None

    def unfinished(self) -> list[CallRecord]:
        """Calls that have not ended, in the order in which they were accepted.

        One that cannot be read is left out, with a line in the log; it stays as it is, for a
        version that can.

        Raises:
            ConfigError: The database is damaged.
        """
        with self._as_a_whole():
            rows = self._select("WHERE status = 'open' ORDER BY rowid", ())
        calls = []
        for row in rows:
            try:
                calls.append(call_from_row(row))
            except UnreadableCallError as error:
                logger.warning("%s: it is not resumed, and stays there as it is", error)
        return calls

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

    def _select(self, condition: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._mutex:
            return self._database.execute(
                f"SELECT {_COLUMNS} FROM calls {condition}", values
            ).fetchall()

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        """What fails here concerns more than one call."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self.directory / _DATABASE} cannot be read ({error}): {_WHAT_TO_DO}"
            ) from error


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
    """Open a file, made if need be, that only its owner may read; whatever the umask.

    Raises:
        ConfigError: That cannot be.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    handle = -1
    try:
        handle = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        os.fchmod(handle, 0o600)
    except OSError as error:
        if handle >= 0:
            os.close(handle)
        raise ConfigError(
            f"{path} cannot be used ({error.strerror or error}): remove it if it is nothing of "
            "Layby's, or name another state_dir"
        ) from error
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
    # Autocommit: every statement is a transaction. Our own lock keeps the threads apart.
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # What is no text is found out where it is read, and spoils nothing else.
    database.text_factory = lambda text: text.decode(errors="surrogateescape")
    try:
        [[version]] = database.execute("PRAGMA user_version")
        if version not in (0, _VERSION):
            raise ConfigError(
                f"{path} has format {version}; this version of Layby reads {_VERSION}"
            )
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
        if version != _VERSION:
            database.execute(f"PRAGMA user_version = {_VERSION}")
    except BaseException as error:
        database.close()
        if isinstance(error, sqlite3.Error):
            raise ConfigError(f"{path} cannot be used ({error}): {_WHAT_TO_DO}") from error
        raise
    return database
