"""Blocks on their way to and from files: what can go wrong, in a word, and on purpose."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Final

from layby.execution.faults import Faults

_NAMES = {errno.EIO: "eio", errno.ENOSPC: "enospc", errno.EDQUOT: "enospc"}


FAULT_KINDS: Final = ("eio", "enospc", "short", "checksum", "other")
"""All faults, each in its word."""


class BlockFaultError(Exception):
    """Blocks could not be written, or read as they were written; the argument is the fault in a
    word, as in ``TransferEnd``."""


def fault_of(error: Exception) -> str:
    """The fault in a word."""
    if isinstance(error, BlockFaultError):
        return str(error)
    return _NAMES.get(error.errno or 0, "other") if isinstance(error, OSError) else "other"


def inject(faults: Faults, operation: str) -> bool:
    """Fail if a fault is due; True if the data is to be falsified instead.

    Raises:
        OSError, BlockFaultError: As when it happens by itself.
    """
    kind = faults.draw(operation)
    if kind in ("eio", "enospc"):
        raise OSError(errno.EIO if kind == "eio" else errno.ENOSPC, "injected")
    if kind == "short":
        raise BlockFaultError("short")
    return kind == "corrupt"


def expect_bytes(num_bytes: int, views: Iterable[memoryview]) -> None:
    """Raise BlockFaultError unless the system moved all that these hold."""
    if num_bytes != sum(map(len, views)):
        raise BlockFaultError("short")
