"""KV that is kept from one process to the next: a file of whole blocks, valid once it is complete.

::

    block 0 │ block 1 │ … │ index (JSON) │ footer

The index says whose blocks these are and what their checksums must be; the footer says how long
the index is. The file is written under another name and renamed at the end, so that it is either
there as a whole or not at all.

Requests are known by a key that covers everything their KV depends on (their tokens), so that
nobody can be given what is not his: a file that is older than it should be is useless, not harmful.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from layby.execution.block_io import BlockFaultError, expect_bytes, inject
from layby.execution.executor import BlockFormat
from layby.execution.faults import Faults
from layby.scheduling.kept import KVTables

logger = logging.getLogger("layby.execution")

_FORMAT: Final = 1
_FOOTER: Final = struct.Struct("<QI4s")  # bytes of the index, its CRC-32, magic
_MAGIC: Final = b"LbKV"
_RUN_BLOCKS: Final = 64
"""Most blocks that are held in memory at a time."""
_SHARE_OF_FREE: Final = 0.9
"""Most of what the disk has free that is taken: others write to it, too."""


@dataclass(frozen=True, slots=True)
class KeptKV:
    """What is kept of one request.

    Attributes:
        file: Where.
        tables: Its blocks, by their places in the file, where they follow each other.

    Raises:
        ValueError: They do not.
    """

    file: KVFile
    tables: KVTables

    def __post_init__(self) -> None:
        blocks = self.tables.blocks
        if not blocks or blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            raise ValueError(f"blocks {blocks[:4]} … of one request do not follow each other")

    def read(self) -> Iterator[tuple[slice, memoryview]]:
        """The content of the blocks, in parts: which of ``tables.blocks``, and what they hold.

        Raises:
            OSError, BlockFaultError: They cannot be read as they were written.
        """
        blocks = self.tables.blocks
        for low in range(0, len(blocks), _RUN_BLOCKS):
            part = slice(low, min(low + _RUN_BLOCKS, len(blocks)))
            yield part, self.file.read(blocks[low], part.stop - low)


class KVFileWriter:
    """Writes such a file; nothing is there before ``commit``.

    Args:
        path: Of the file.
        block_format: What a block is.
        identity: What the content depends on beside the tokens.
        faults: Faults to inject.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(
        self,
        path: Path,
        block_format: BlockFormat,
        identity: Mapping[str, str],
        faults: Faults | None = None,
    ) -> None:
        self._path, self._format, self._identity = path, block_format, dict(identity)
        self._faults = faults or Faults({})
        self._requests: list[list[Any]] = []
        self._checksums: list[int] = []
        path.unlink(missing_ok=True)
        _unfinished(path).unlink(missing_ok=True)
        system = os.statvfs(path.parent)
        self._most_bytes = int(system.f_bavail * system.f_frsize * _SHARE_OF_FREE)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(_unfinished(path), flags, 0o600)
        os.fchmod(self._file, 0o600)

    @property
    def num_blocks(self) -> int:
        """Blocks written so far."""
        return len(self._checksums)

    def add(
        self, key: str, tables: KVTables, export: Callable[[Sequence[int]], memoryview]
    ) -> None:
        """Keep a request's KV.

        Args:
            key: What it is to be found by.
            tables: Its blocks, by any numbers.
            export: What blocks of these numbers hold, one after the other.

        Raises:
            OSError, BlockFaultError: It cannot be; then it is as if nobody had tried.
        """
        first, blocks, size = self.num_blocks, tables.blocks, self._format.num_bytes
        if (first + len(blocks)) * size > self._most_bytes:
            raise BlockFaultError("enospc")
        try:
            for low in range(0, len(blocks), _RUN_BLOCKS):
                content = export(blocks[low : low + _RUN_BLOCKS])
                inject(self._faults, "state.write")
                expect_bytes(os.pwrite(self._file, content, self.num_blocks * size), [content])
                self._checksums += _checksums(content, size)
        except BaseException:
            del self._checksums[first:]
            raise
        placed = tables.renumbered({block: first + place for place, block in enumerate(blocks)})
        self._requests.append([key, placed.computed, placed.tables])

    def commit(self) -> int:
        """Write the index and make the file valid; returns its size in bytes.

        Raises:
            OSError, BlockFaultError: It cannot be; nothing is left.
        """
        index = json.dumps(
            {
                "format": _FORMAT,
                "block": [self._format.name, self._format.num_bytes],
                "identity": self._identity,
                "checksums": self._checksums,
                "requests": self._requests,
            }
        ).encode()
        end = memoryview(index + _FOOTER.pack(len(index), zlib.crc32(index), _MAGIC))
        at = self.num_blocks * self._format.num_bytes
        try:
            inject(self._faults, "state.write")
            os.ftruncate(self._file, at)  # blocks of a request that could not be written whole
            expect_bytes(os.pwrite(self._file, end, at), [end])
            os.fsync(self._file)
            os.replace(_unfinished(self._path), self._path)
            _sync_directory(self._path.parent)
        finally:
            self.close()
        return at + len(end)

    def close(self) -> None:
        """Leave nothing but a file that was committed. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            _unfinished(self._path).unlink(missing_ok=True)


class KVFile:
    """What an earlier process kept. Safe in any thread, but for ``close``.

    Args:
        path, block_format, identity, faults: As for the writer; what was written of other blocks
            or under another identity is of no use.

    Attributes:
        requests_restored, blocks_restored: How much of it is in use again.

    Raises:
        FileNotFoundError: There is none.
        OSError, BlockFaultError: It cannot be read, or is not as it was written.
    """

    def __init__(
        self,
        path: Path,
        block_format: BlockFormat,
        identity: Mapping[str, str],
        faults: Faults | None = None,
    ) -> None:
        self.requests_restored = self.blocks_restored = 0
        self._path, self._block_bytes = path, block_format.num_bytes
        self._faults = faults or Faults({})
        self._kept: dict[str, list[KeptKV]] = {}
        # Without waiting: opening a pipe would last until somebody writes to it.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise BlockFaultError("other")
            index = self._index()
            self._checksums: list[int] = index["checksums"]
            is_ours = index["block"] == [block_format.name, block_format.num_bytes]
            if is_ours and index["identity"] == dict(identity):
                for key, computed, tables in reversed(index["requests"]):  # taken from the end
                    kept = KVTables(tuple(computed), tuple(map(tuple, tables)))
                    self._kept.setdefault(key, []).append(KeptKV(self, kept))
        except (ValueError, KeyError, TypeError) as error:
            os.close(self._file)
            raise BlockFaultError("other") from error
        except BaseException:
            os.close(self._file)
            raise

    @property
    def num_requests(self) -> int:
        """Requests of which something is kept and has not been taken."""
        return sum(map(len, self._kept.values()))

    def take(self, key: str) -> KeptKV | None:
        """What is kept of a request of this key; to nobody else is it given."""
        try:
            return self._kept[key].pop()
        except (KeyError, IndexError):
            return None

    def count_restored(self, tables: KVTables) -> None:
        """A request is parked with its blocks."""
        self.requests_restored += 1
        self.blocks_restored += len(tables.blocks)

    def read(self, first: int, count: int) -> memoryview:
        """The content of ``count`` blocks of the file from ``first`` on.

        Raises:
            OSError, BlockFaultError: They cannot be read as they were written.
        """
        size = self._block_bytes
        content = memoryview(bytearray(count * size))
        corrupt = inject(self._faults, "state.read")
        expect_bytes(os.preadv(self._file, [content], first * size), [content])
        if corrupt:
            content[-1] ^= 1
        if _checksums(content, size) != self._checksums[first : first + count]:
            raise BlockFaultError("checksum")
        return content

    def close(self) -> None:
        """Nothing can be read any more. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _index(self) -> dict[str, Any]:
        inject(self._faults, "state.read")
        size = os.fstat(self._file).st_size
        footer = os.pread(self._file, _FOOTER.size, max(0, size - _FOOTER.size))
        if len(footer) < _FOOTER.size:
            raise BlockFaultError("short")
        length, checksum, magic = _FOOTER.unpack(footer)
        if magic != _MAGIC or length > size - _FOOTER.size:
            raise BlockFaultError("short")  # cut off, or nothing of ours
        text = os.pread(self._file, length, size - _FOOTER.size - length)
        if zlib.crc32(text) != checksum:
            raise BlockFaultError("checksum")
        index = json.loads(text)
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']}")
        return dict(index)


def remove_kv_file(path: Path) -> None:
    """Remove the file, and what is left of one that was not completed.

    What cannot be removed costs a line in the log: an old file is useless, not harmful.
    """
    for each in (path, _unfinished(path)):
        try:
            each.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "%s cannot be removed (%s): no KV cache can be saved there until it is gone",
                each,
                error.strerror or error,
            )


def _checksums(content: memoryview, block_bytes: int) -> list[int]:
    return [
        zlib.crc32(content[at : at + block_bytes]) for at in range(0, len(content), block_bytes)
    ]


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
