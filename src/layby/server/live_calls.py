"""Calls that are being answered, by the id that their answer carries.

A call is known from the moment it is accepted to the end of its answer, and only to its owner; to
all others there is no such call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class LiveCalls:
    """Which calls are being answered, whose they are, and their requests in the engine."""

    def __init__(self) -> None:
        self._request_ids: dict[tuple[str, str], Sequence[str]] = {}

    @contextmanager
    def holding(self, owner: str, call_id: str, request_ids: Sequence[str]) -> Iterator[None]:
        """Know a call while it is answered.

        Args:
            owner: Whose it is.
            call_id: What its answer is called.
            request_ids: Its requests in the engine.
        """
        self._request_ids[owner, call_id] = request_ids
        try:
            yield
        finally:
            del self._request_ids[owner, call_id]

    def find(self, owner: str, call_id: str) -> Sequence[str]:
        """The requests of a call; none if this owner has no such call."""
        return self._request_ids.get((owner, call_id), ())
