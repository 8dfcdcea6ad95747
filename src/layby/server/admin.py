"""What an operator does with a running server: paths under ``/admin/``, with a key of their own.

Without such a key the paths do not exist.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from typing_extensions import TypedDict

from layby.server.http import json_response, read_body
from layby.server.protocol import Body, ErrorAnswer

if TYPE_CHECKING:
    from layby.engine import AsyncEngine
    from layby.engine.kv_pool import KVPoolSize

_KV_POOL_REQUEST: Final = "#/components/schemas/KVPoolRequest"
_REFUSALS: Final[dict[int | str, dict[str, Any]]] = {
    401: {"model": ErrorAnswer, "description": "No key, or one that is not known"},
    403: {"model": ErrorAnswer, "description": "A key, but not the admin's"},
}


class KVPoolRequest(Body):
    """Another size for the device pool."""

    blocks: Annotated[
        int, Field(ge=1, description="Blocks that the device pool of KV cache is to have.")
    ]


class KVPoolAnswer(TypedDict):
    """The device pool of KV cache."""

    blocks: Annotated[int, Field(description="Blocks it has.")]
    free_blocks: Annotated[int, Field(description="Blocks of those that nobody holds.")]
    target_blocks: Annotated[int, Field(description="Blocks that were asked for last.")]
    note: Annotated[str | None, Field(description="What the target waits for; null: reached.")]


ADMIN_BODIES: Final = (KVPoolRequest,)
"""To be described beside the other bodies."""


def add_admin_routes(app: FastAPI, engine: AsyncEngine) -> None:
    """Add the operator's paths; a guard in front of them asks for the key."""

    @app.get(
        "/admin/kv-pool",
        summary="The size of the KV pool",
        description="Blocks it has, and blocks it is to have. Asks for the admin's key.",
        responses={200: {"model": KVPoolAnswer, "description": "The sizes"}, **_REFUSALS},
    )
    async def kv_pool() -> Response:
        return json_response(_answer(engine.kv_pool_size()))

    @app.patch(
        "/admin/kv-pool",
        summary="Shrink or grow the KV pool",
        description="Takes effect in the next step: work that no longer fits is parked, and the "
        "memory goes back to the system. While a request that was accepted may come to need more "
        "blocks, so many are kept; new requests must fit into the new size at once. With "
        "`--elastic-memory` it is the largest size from then on. Asks for the admin's key.",
        responses={
            200: {"model": KVPoolAnswer, "description": "Done"},
            202: {"model": KVPoolAnswer, "description": "As far as possible; `note` says why"},
            400: {"model": ErrorAnswer, "description": "There can be no pool of this size"},
            503: {"model": ErrorAnswer, "description": "The engine takes no work"},
            **_REFUSALS,
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": {"$ref": _KV_POOL_REQUEST}}},
            }
        },
    )
    async def resize_kv_pool(request: Request) -> Response:
        body = await read_body(request, KVPoolRequest, engine)
        size = await engine.resize_kv_pool(body.blocks)
        return json_response(_answer(size), 200 if size.note is None else 202)


def _answer(size: KVPoolSize) -> KVPoolAnswer:
    return {
        "blocks": size.num_blocks,
        "free_blocks": size.num_free_blocks,
        "target_blocks": size.target_blocks,
        "note": size.note,
    }
