"""The file of a recording: private, rotated, and written by a thread of its own."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from layby.errors import ConfigError

logger = logging.getLogger("layby.engine")

KEPT_FILES = 4
"""Older files of a recording that are kept: ``FILE.1`` is the youngest of them."""

MOST_UNWRITTEN_BYTES = 64 * 2**20
"""A disk that falls this far behind ends the recording."""


def check_recordable(path: str | Path) -> None:
    """Find out early, before a model is loaded, that a file cannot be written.

    Raises:
        ConfigError: It cannot.
    """
    folder = Path(path).absolute().parent
    if Path(path).is_dir():
        raise ConfigError(f"cannot record to {path}: it is a directory")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot record to {path}: {folder} is no directory to write to")
    try:
        with _alone_in(folder):
            _check_unlocked(Path(path))
    except OSError as error:
        raise ConfigError(f"cannot record to {path}: {error.strerror or error}") from error


def _names(path: Path) -> list[Path]:
    """A recording's files, the youngest first."""
    return [path, *(Path(f"{path}.{i}") for i in range(1, KEPT_FILES + 1))]


def _open_private(path: Path) -> IO[bytes]:
    """A new file that only its owner may read, locked as long as it is open."""

    def lock(name: str, flags: int) -> int:
        handle = os.open(name, flags, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle

    return open(path, "wb", opener=lock)


def _check_unlocked(path: Path) -> None:
    """Refuse a file to which somebody records, or whose older files somebody is recording.

    Raises:
        ConfigError: Somebody does.
        OSError: It cannot be told.
    """
    taken = _locked_one(_names(path))
    if taken is not None:
        which = "it" if taken == path else f"{taken}, a name that an older file of it would get"
        raise ConfigError(
            f"cannot record to {path}: another engine is recording to {which}; "
            "give each a file of its own"
        )


def _locked_one(paths: Sequence[Path]) -> Path | None:
    """The first of these files to which somebody records."""
    for path in paths:
        if not path.is_file():  # nothing yet, or something that would wait for a writer
            continue
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return path
    return None


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Nobody else looks for recordings in the folder, moves or makes one there meanwhile."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class RecordingFile:
    """A file that a thread of its own writes, so that a slow disk stops nobody.

    It is locked: no other process records to it.

    Nothing here raises once the file is open: a disk that fails ends the recording, with one line
    in the log and ``error`` set. So does, when it is to give way to a new one, another engine that
    records to a name which an older file would get.

    Args:
        path: The file. What is there already is kept as ``path.1``.
        open_file: Makes a file to write to.

    Raises:
        ConfigError: It cannot be written, or somebody else does.
    """

    def __init__(
        self, path: str | Path, *, open_file: Callable[[Path], IO[bytes]] = _open_private
    ) -> None:
        self.path = Path(path)
        self.error: str | None = None
        self._open_file = open_file
        self._wake = threading.Condition()
        self._tasks: deque[bytes | None] = deque()  # None: go on in a new file
        self._unwritten = 0
        self._closed = False
        try:
            with _alone_in(self.path.absolute().parent):
                _check_unlocked(self.path)
                if self.path.is_file() and self.path.stat().st_size:
                    self._shift()
                self._file = open_file(self.path)
        except OSError as error:
            raise ConfigError(f"cannot record to {path}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._run, name="layby-recorder", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Have these lines written soon."""
        if self._unwritten > MOST_UNWRITTEN_BYTES:
            self.fail("the disk does not keep up")
        with self._wake:
            self._unwritten += len(data)
            self._tasks.append(data)
            self._wake.notify()

    def rotate(self) -> None:
        """Go on in a new file after what was given to ``write`` so far."""
        with self._wake:
            self._tasks.append(None)
            self._wake.notify()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is left, and close the file."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def fail(self, reason: str) -> None:
        """End the recording before its time."""
        with self._wake:
            if self.error is not None:
                return
            self.error = reason
            self._wake.notify()
        logger.error("recording to %s stopped: %s; serving goes on", self.path, reason)

    def _run(self) -> None:
        try:
            while (tasks := self._next_tasks()) is not None:
                for task in tasks:
                    if task is None:
                        if not self._give_way():
                            return
                    else:
                        self._file.write(task)
                self._file.flush()
                with self._wake:
                    self._unwritten -= sum(len(task) for task in tasks if task is not None)
        except OSError as error:
            self.fail(error.strerror or str(error))
        finally:
            with contextlib.suppress(OSError):  # it may still hold what could not be written
                self._file.close()

    def _give_way(self) -> bool:
        """Go on in a new file; False if there is no name for this one."""
        with _alone_in(self.path.absolute().parent):
            taken = _locked_one(_names(self.path)[1:])
            if taken is not None:
                self.fail(f"its older files cannot be kept, another engine records to {taken}")
                return False
            self._file.close()
            self._shift()
            self._file = self._open_file(self.path)
            return True

    def _next_tasks(self) -> list[bytes | None] | None:
        """What has come since the last time, waiting for it; None at the end."""
        with self._wake:
            while not (self._tasks or self._closed or self.error):
                self._wake.wait()
            tasks = list(self._tasks)
            self._tasks.clear()
            return None if self.error or not tasks else tasks

    def _shift(self) -> None:
        """Number the older files on, and this one 1; the oldest goes."""
        names = _names(self.path)
        for older, younger in zip(names[:0:-1], names[-2::-1], strict=True):
            if younger.exists():
                os.replace(younger, older)
