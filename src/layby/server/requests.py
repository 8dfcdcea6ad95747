"""Calls that are being answered, by the id that their answer carries: they can be moved to another
class.

A call is known from the moment it is accepted to the end of its answer, and only to callers with
the API key that made it; to all others there is no such call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from layby.server.errors import shorten
from layby.server.http import json_response, read_body
from layby.server.protocol import ErrorAnswer, PriorityAnswer, PriorityRequest

if TYPE_CHECKING:
    from layby.engine import AsyncEngine

_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorAnswer, "description": "Bad input; names the parameter"},
    404: {"model": ErrorAnswer, "description": "No such call, or it has ended"},
}


@dataclass(frozen=True, slots=True)
class _LiveCall:
    """A call's requests in the engine, and the key that made it."""

    request_ids: Sequence[str]
    owner: str


class LiveCalls:
    """Which calls are being answered.

    Args:
        has_owners: Whether callers have shown a key, so that a call belongs to somebody.
    """

    def __init__(self, *, has_owners: bool) -> None:
        self._has_owners = has_owners
        self._calls: dict[str, _LiveCall] = {}

    @contextmanager
    def holding(self, call_id: str, request_ids: Sequence[str], request: Request) -> Iterator[None]:
        """Know a call while it is answered.

        Args:
            call_id: What its answer is called.
            request_ids: Its requests in the engine.
            request: The HTTP request that made it.
        """
        self._calls[call_id] = _LiveCall(request_ids, self._owner(request))
        try:
            yield
        finally:
            del self._calls[call_id]

    def find(self, call_id: str, request: Request) -> Sequence[str]:
        """The requests of a call, if whoever asks made it; none if there is no such call."""
        call = self._calls.get(call_id)
        return () if call is None or call.owner != self._owner(request) else call.request_ids

    def _owner(self, request: Request) -> str:
        # The key has been checked; without one there, anybody may send anything.
        header = request.headers.get("authorization", "") if self._has_owners else ""
        return header.partition(" ")[2].strip()


def live_calls(request: Request) -> LiveCalls:
    """Those of the app that serves this HTTP request."""
    calls = request.app.state.live_calls
    assert isinstance(calls, LiveCalls)  # put there by add_request_routes
    return calls


def add_request_routes(app: FastAPI, engine: AsyncEngine, *, has_keys: bool) -> None:
    """Let callers change what they have asked for."""
    app.state.live_calls = LiveCalls(has_owners=has_keys)

    @app.patch(
        "/v1/requests/{call_id}",
        summary="Change the class of a call",
        description="`call_id` is the `id` of its answer, which a stream tells at once, in the "
        "header `X-Request-Id`. Its class changes at the engine's next step, whether it "
        "waits, runs or is parked.",
        responses={200: {"model": PriorityAnswer, "description": "It is in that class"}, **_ERRORS},
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": f"#/components/schemas/{PriorityRequest.__name__}"}
                    }
                },
            }
        },
    )
    async def change_priority(call_id: str, request: Request) -> Response:
        body = await read_body(request, PriorityRequest, engine)
        request_ids = live_calls(request).find(call_id, request)
        if not request_ids or not await engine.set_priorities(request_ids, body.priority):
            raise HTTPException(404, f"no call {shorten(call_id)} is being answered")
        return json_response({"id": call_id, "priority": body.priority})
