"""A queue of requests, most urgent first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import pairwise

from layby.scheduling.request import Request

Urgency = tuple[float, ...]
"""What requests are ordered by: a smaller one is more urgent."""


class RequestQueue:
    """Requests in order of urgency. Finding a place costs O(log n).

    Args:
        urgency: Gives a request's place; equal places are not allowed, so it must end in
            something unique. It may not change while the request is in the queue.
    """

    __slots__ = ("_entries", "_urgency")

    def __init__(self, urgency: Callable[[Request], Urgency]) -> None:
        self._urgency = urgency
        self._entries: list[tuple[Urgency, Request]] = []

    def add(self, request: Request) -> None:
        """Put the request in its place."""
        insort(self._entries, (self._urgency(request), request), key=_urgency_of)

    def remove(self, request: Request) -> None:
        """Take the request out.

        Raises:
            KeyError: It is not in this queue.
        """
        index = self._index(request)
        if index is None:
            raise KeyError(request.request_id)
        del self._entries[index]

    @property
    def head(self) -> Request | None:
        """The most urgent request, or None."""
        return self._entries[0][1] if self._entries else None

    @property
    def tail(self) -> Request | None:
        """The least urgent request, or None."""
        return self._entries[-1][1] if self._entries else None

    def check_integrity(self) -> None:
        """Verify that everybody stands in its place.

        Raises:
            AssertionError: Somebody's urgency changed in the queue, or two have the same.
        """
        places = [self._urgency(request) for request in self]
        assert places == [place for place, _ in self._entries], f"{self} is out of date"
        assert all(one < next_ for one, next_ in pairwise(places)), f"{self} is out of order"

    def _index(self, request: Request) -> int | None:
        index = bisect_left(self._entries, self._urgency(request), key=_urgency_of)
        if index < len(self._entries) and self._entries[index][1] is request:
            return index
        return None

    def __contains__(self, request: Request) -> bool:
        return self._index(request) is not None

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"RequestQueue([{', '.join(request.request_id for request in self)}])"


def _urgency_of(entry: tuple[Urgency, Request]) -> Urgency:
    return entry[0]
