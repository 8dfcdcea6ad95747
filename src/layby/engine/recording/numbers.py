"""How a recording writes numbers: times as differences, contents as short hashes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Hashable, Iterable

from layby.errors import shown

HASH_BYTES = 6
MOST_NUMBER = 2**62 - 1


class TimeCode:
    """Times as differences: whole nanoseconds since the one before, or seconds if that would lose
    anything. Floats come back bit by bit.

    Args:
        start_s: Where the first difference starts.
    """

    __slots__ = ("_ns",)

    def __init__(self, start_s: float) -> None:
        self._ns = round(start_s * 1e9)

    def encode(self, seconds: float) -> int | float:
        """What to write for a time: an integer is a difference, a float the time itself."""
        ns = round(seconds * 1e9)
        difference, self._ns = ns - self._ns, ns
        return difference if ns / 1e9 == seconds else float(seconds)

    def decode(self, written: int | float) -> float:
        """The time that was written."""
        if isinstance(written, int):
            self._ns += written
            return self._ns / 1e9
        self._ns = round(written * 1e9)
        return written


def pack_hashes(addresses: Iterable[Hashable], key: bytes) -> str:
    """Content addresses as they are written: short, and meaningless without the key."""
    packed = bytearray()
    for address in addresses:
        content = address if isinstance(address, bytes) else repr(address).encode()
        packed += hashlib.blake2b(content, key=key, digest_size=HASH_BYTES).digest()
    return base64.b64encode(packed).decode()


def unpack_hashes(text: str) -> list[int]:
    """The hashes in a text.

    Raises:
        ValueError: It is none.
    """
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError(f"not a text of hashes: {shown(text)}") from None
    if len(packed) % HASH_BYTES:
        raise ValueError(f"not a whole number of hashes: {shown(text)}")
    return [
        int.from_bytes(packed[start : start + HASH_BYTES], "big")
        for start in range(0, len(packed), HASH_BYTES)
    ]


def bounded(number: int) -> int:
    """What a client may choose freely, as a number that fits in a line."""
    return max(-MOST_NUMBER, min(number, MOST_NUMBER))
