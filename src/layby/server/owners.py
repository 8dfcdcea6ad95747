"""Whose a call is: told from the API key that it came with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from fastapi import Request

from layby.errors import ConfigError


def bearer_token(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key that a call brings; empty without one."""
    header: bytes = dict(headers).get(b"authorization", b"")
    scheme, _, given = header.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


class Owners:
    """Tells callers apart by a hash of their key. Where none is asked for, all are one.

    Args:
        has_keys: Whether the server asks for keys.
        isolates_prefixes: Whether owners share no cached prefixes.

    Raises:
        ConfigError: Prefixes are to be kept apart, and nothing tells callers apart.
    """

    def __init__(self, *, has_keys: bool, isolates_prefixes: bool = False) -> None:
        if isolates_prefixes and not has_keys:
            raise ConfigError(
                "isolate_prefix_cache keeps the callers of different API keys apart, "
                "but the server asks for none; give it an api_key"
            )
        self._has_keys = has_keys
        self._isolates_prefixes = isolates_prefixes

    def of(self, request: Request) -> str:
        """The owner of a call that the guard let through."""
        if not self._has_keys:
            return ""
        key = bearer_token(request.scope["headers"])
        return hashlib.blake2b(key, digest_size=16, person=b"layby-owner").hexdigest()

    def cache_salt(self, owner: str, asked: str) -> str:
        """What separates the prefixes of this call from those of others."""
        # The hash has a fixed length: no salt that one owner asks for is that of another.
        return owner + asked if self._isolates_prefixes else asked
