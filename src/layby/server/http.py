"""What every endpoint needs from HTTP: JSON bodies, API keys, HEAD, and callers who leave."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pydantic_core
from fastapi import Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from layby.errors import EngineDrainingError, InvalidRequestError
from layby.server.errors import error_response
from layby.server.owners import bearer_token
from layby.server.protocol import Body, Limits

if TYPE_CHECKING:
    from layby.engine import AsyncEngine

MAX_BODY_BYTES: Final = 16 * 1024 * 1024
"""Largest body a call may send: far above any context, far below what hurts."""

MAX_BODY_PARTS: Final = 2**20
"""Most values a body may hold, lists, objects and names counted several times.

The library that reads JSON lets no other thread run meanwhile, and what that costs goes by their
number: 16 MiB of empty lists stopped everybody for four seconds, as many of text for 25 ms.
"""

IS_HEAD: Final = "layby.is_head"
"""In the scope of a call that asked for no body: what it is not sent it has not got."""

OPEN_PATHS: Final = frozenset({"/", "/docs", "/openapi.json", "/health", "/metrics"})
"""Served without an API key: probes and scrapers have none, and nothing here holds user text."""

_DRAIN_CHECK_S: Final = 0.1
"""How often somebody who waits for a body looks whether the server is to end."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")

logger = logging.getLogger(__name__)


async def read_body(request: Request, model: type[B], engine: AsyncEngine) -> B:
    """Read and check a JSON body; a large one in a thread, so that others are served meanwhile.

    Raises:
        ClientDisconnect: The caller hung up.
        EngineDrainingError: The server is to end, and the body is not all there.
        HTTPException: 413 beyond ``MAX_BODY_BYTES`` or ``MAX_BODY_PARTS``; 415 for a content type
            that is not JSON.
        InvalidRequestError: The body is not JSON.
        pydantic.ValidationError: The JSON does not fit the model.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise HTTPException(
            415,
            "send the body as JSON, with the header 'Content-Type: application/json'",
        )
    too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    raw = bytearray()
    async for chunk in _chunks(request, engine):
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise too_large
    limits = Limits.of(engine)

    def parse() -> B:
        if len(raw) > MAX_BODY_PARTS and _count_parts(raw) > MAX_BODY_PARTS:
            raise HTTPException(
                413, f"the body holds too many values: beyond {MAX_BODY_PARTS}, send it in parts"
            )
        try:
            # Refuses NaN, lone surrogates, deep nesting and endless numbers, each with a position.
            data = pydantic_core.from_json(bytes(raw), allow_inf_nan=False)
        except ValueError as error:
            raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
        return model.model_validate(data, context=limits)

    return await engine.prepare_in_time(parse, len(raw))


def _count_parts(raw: bytes | bytearray) -> int:
    """The values in a JSON text, by the characters between them; it need not be valid.

    A list or an object costs four times as much as a number, and so does a name.
    """
    parts = _count_between(raw)
    if parts > MAX_BODY_PARTS:  # perhaps only because of what is inside of strings
        bare = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
        if bare.count(b'"') <= 2 * MAX_BODY_PARTS:
            parts = _count_between(b"".join(bare.split(b'"')[::2]))
    return parts


def _count_between(raw: bytes | bytearray) -> int:
    return raw.count(b",") + 4 * (raw.count(b"[") + raw.count(b"{") + raw.count(b":"))


async def _chunks(request: Request, engine: AsyncEngine) -> AsyncGenerator[bytes]:
    """The body as it comes, as long as the server is to go on."""
    more = True
    while more:
        waiting = asyncio.ensure_future(request.receive())
        try:
            while not (await asyncio.wait({waiting}, timeout=_DRAIN_CHECK_S))[0]:
                if engine.is_draining:
                    raise EngineDrainingError("the server is shutting down")
        finally:
            waiting.cancel()
        message = waiting.result()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)


def to_json(value: Mapping[str, Any]) -> str:
    """An answer as JSON. ASCII only: clients that split lines at U+2028 and the like are common."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def json_response(value: Mapping[str, Any], status: int = 200) -> Response:
    """A JSON answer."""
    return Response(to_json(value), status_code=status, media_type="application/json")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, but cancel it as soon as the caller hangs up; None says that this happened.

    The body must have been read: ``receive`` then waits for nothing but the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for part in (task, watcher):
            part.cancel()
        # Cancelled work closes its streams; whoever called goes on only after that.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Edge:
    """ASGI middleware for what concerns every call: HEAD, and being cut off.

    HEAD is answered as GET; the HTTP server leaves the body out. A call that the HTTP server cuts
    off while it shuts down has nobody to tell, so that is no error.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine) -> None:
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if not self._engine.is_draining:
                raise
            logger.info("a connection was cut off: its caller took too long")


class ApiKeyGuard:
    """ASGI middleware: everything but ``OPEN_PATHS`` asks for one of the keys.

    Paths under ``/admin/`` ask for the admin's key instead, where there is one.

    Plain ASGI rather than Starlette's base class, which hides disconnects from the endpoints.
    """

    def __init__(
        self, app: ASGIApp, api_keys: Sequence[str], admin_api_key: str | None = None
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._admin_keys = [] if admin_api_key is None else [admin_api_key.encode()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        is_admins = self._admin_keys and scope["path"].startswith("/admin/")
        keys = self._admin_keys if is_admins else self._keys
        if not keys or _brings_one_of(keys, scope):
            await self._app(scope, receive, send)
            return
        if is_admins and _brings_one_of(self._keys, scope):
            await error_response(HTTPException(403, "this path asks for the admin's API key"))(
                scope, receive, send
            )
            return
        refusal = HTTPException(
            401,
            "this server asks for an API key: send 'Authorization: Bearer KEY' with a valid one",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(refusal)(scope, receive, send)


def _brings_one_of(keys: Sequence[bytes], scope: Scope) -> bool:
    given = bearer_token(scope["headers"])
    # Every key is compared, in constant time each: timing tells nothing about any of them.
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)
