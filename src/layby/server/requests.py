"""The paths under ``/v1/requests/``: what callers can do about the requests that they have made.

A request belongs to the API key that made it; to all others there is no such request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from layby.errors import InvalidRequestError
from layby.server.durable import DurableRequests
from layby.server.errors import shorten
from layby.server.http import IS_HEAD, json_response, read_body
from layby.server.live_calls import LiveCalls
from layby.server.owners import Owners
from layby.server.protocol import ErrorAnswer, PriorityAnswer, PriorityRequest

if TYPE_CHECKING:
    from layby.engine import AsyncEngine

_BAD_INPUT: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": ErrorAnswer, "description": "Bad input; names the parameter"}
}
_MISSING: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorAnswer, "description": "The key has made no such request"}
}
_ENDED: Final[dict[int | str, dict[str, Any]]] = {
    404: {"model": ErrorAnswer, "description": "The key has made no such request, or it has ended"}
}


def add_request_routes(
    app: FastAPI,
    engine: AsyncEngine,
    owners: Owners,
    live: LiveCalls,
    durable: DurableRequests | None,
) -> None:
    """Let callers change what they have asked for and, with a journal, come back for it."""

    @app.patch(
        "/v1/requests/{request_id}",
        summary="Change the class of a request",
        description="`request_id` is what the header `X-Request-Id` of its answer says, which a "
        "stream tells at once. Its class changes at the engine's next step, whether it waits, runs "
        "or is parked.",
        responses={
            200: {"model": PriorityAnswer, "description": "It is in that class"},
            **_BAD_INPUT,
            **_ENDED,
        },
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
    async def change_priority(request: Request, request_id: str) -> Response:
        body = await read_body(request, PriorityRequest, engine)
        owner = owners.of(request)
        if durable is not None:
            is_live = await durable.set_priority(owner, request_id, body.priority)
        else:
            is_live = await engine.set_priorities(live.find(owner, request_id), body.priority) > 0
        if not is_live:
            raise HTTPException(404, f"no request {shorten(request_id)} of yours is being answered")
        return json_response({"id": request_id, "priority": body.priority})

    if durable is not None:
        _add_durable_routes(app, owners, durable)


def _add_durable_routes(app: FastAPI, owners: Owners, durable: DurableRequests) -> None:
    @app.get(
        "/v1/requests/{request_id}",
        summary="Come back for an answer",
        description="Status, token counts and the answer so far of a request that this key has "
        "made, by the id in its `X-Request-Id`. With `stream=true` the answer comes as "
        "server-sent events, from the start or after the first `starting_after` tokens of every "
        "choice (each event's `id` says how many there are with it), and goes on live.",
        responses={200: {"description": "The request"}, **_BAD_INPUT, **_MISSING},
    )
    async def retrieve_request(
        request: Request,
        request_id: str,
        stream: bool = False,
        starting_after: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        for name in request.query_params:
            if name not in ("stream", "starting_after"):
                raise InvalidRequestError(f"unrecognized parameter: {shorten(name)}", param=name)
        if starting_after and not stream:
            raise InvalidRequestError("starting_after needs stream=true", param="starting_after")
        return await durable.retrieve(
            owners.of(request),
            request_id,
            stream=stream,
            starting_after=starting_after,
            delivers=IS_HEAD not in request.scope,
        )

    @app.delete(
        "/v1/requests/{request_id}",
        summary="Cancel a request",
        description="Ends it, wherever it is, and forgets its answer.",
        responses={200: {"description": "It is gone"}, **_MISSING},
    )
    async def delete_request(request: Request, request_id: str) -> Response:
        return await durable.cancel(owners.of(request), request_id)
