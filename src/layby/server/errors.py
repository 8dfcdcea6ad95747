"""From exceptions to HTTP answers: the one place that decides status, type, param and code.

| exception                                | status | type                  | code            |
|------------------------------------------|--------|-----------------------|-----------------|
| InvalidRequestError, body does not fit   | 400    | invalid_request_error | null            |
| UnknownModelError                        | 400    | invalid_request_error | model_not_found |
| no or wrong API key                      | 401    | invalid_request_error | invalid_api_key |
| no such path or model page / method      | 404/405| invalid_request_error | null            |
| UnreadableCallError                      | 409    | invalid_request_error | null            |
| body too large or too much / not JSON    | 413/415| invalid_request_error | null            |
| the caller hung up while sending         | 499    | nobody reads it       |                 |
| QueueFullError                           | 429    | rate_limit_error      | queue_full      |
| RequestFailedError, anything unforeseen  | 500    | server_error          | null            |
| EngineDrainingError                      | 503    | server_error          | draining        |
| RequestKeptError                         | 503    | server_error          | kept            |
| EngineDeadError, EngineUnavailableError  | 503    | server_error          | engine_dead     |

Messages and parameter names are cut to a readable length. What is not even HTTP never gets to the
app: ``wire.py`` answers it in the same shape, and headers without an end with 431.

429 and 503-while-draining carry ``Retry-After`` in whole seconds, at least 1.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from pydantic_core import ErrorDetails as PydanticError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from layby.engine.journal_records import UnreadableCallError
from layby.errors import (
    EngineDrainingError,
    EngineUnavailableError,
    InvalidRequestError,
    LaybyError,
    QueueFullError,
    RequestKeptError,
)
from layby.server.protocol import ErrorAnswer

_DRAINING_RETRY_AFTER_S: Final = 5
_SHOWN_CHARS: Final = 60
_MAX_MESSAGE_CHARS: Final = 500
_MAX_PARAM_CHARS: Final = 100

CLIENT_CLOSED_REQUEST: Final = 499
"""The customary status for the log when nobody is left to answer."""


class UnknownModelError(InvalidRequestError):
    """A call asks for a model that this server does not serve."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(
            f"the model {shorten(asked)} does not exist here: this server serves {served!r}",
            param="model",
        )


def error_answer(error: Exception) -> tuple[int, ErrorAnswer, dict[str, str]]:
    """Status, body and extra headers for any exception."""
    status, kind, code = 500, "server_error", None
    param: str | None = None
    message = str(error)
    headers: dict[str, str] = {}
    if isinstance(error, ValidationError):
        error = invalid_request(error)
        message = str(error)
    if isinstance(error, InvalidRequestError):
        status, kind, param = 400, "invalid_request_error", error.param
        code = "model_not_found" if isinstance(error, UnknownModelError) else None
    elif isinstance(error, UnreadableCallError):
        status, kind = 409, "invalid_request_error"
    elif isinstance(error, QueueFullError):
        status, kind, code = 429, "rate_limit_error", "queue_full"
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif isinstance(error, EngineDrainingError):
        status, code = 503, "draining"
        headers["Retry-After"] = str(_DRAINING_RETRY_AFTER_S)
    elif isinstance(error, EngineUnavailableError):
        status = 503
        code = "kept" if isinstance(error, RequestKeptError) else "engine_dead"
    elif isinstance(error, HTTPException):
        status, kind, message = error.status_code, "invalid_request_error", str(error.detail)
        code = "invalid_api_key" if status == 401 else None
        headers.update(error.headers or {})
    elif not isinstance(error, LaybyError):
        # The cause may hold what other users sent: it belongs in the log.
        message = "internal error; the server's log has the cause"
    message = _cut(message, _MAX_MESSAGE_CHARS)
    param = None if param is None else _cut(param, _MAX_PARAM_CHARS)
    return (
        status,
        {"error": {"message": message, "type": kind, "param": param, "code": code}},
        headers,
    )


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_response(error: Exception) -> Response:
    """The whole HTTP answer for any exception."""
    status, body, headers = error_answer(error)
    # json's ASCII output holds even where the message quotes text that is not valid Unicode.
    return Response(
        json.dumps(body), status_code=status, headers=headers, media_type="application/json"
    )


def invalid_request(error: ValidationError) -> InvalidRequestError:
    """The first fault that pydantic found, in words for the caller."""
    # The models stop at the first fault of a list, so there are no more of them than fields.
    first: PydanticError = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequestError):
        return cause
    path = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidRequestError(f"unrecognized parameter: {path[:_SHOWN_CHARS]}", param=path)
    return InvalidRequestError(f"{path or 'the request body'} {_fault(first)}", param=path or None)


def _invalid_query(error: RequestValidationError) -> InvalidRequestError:
    """The same for what is not in a body: FastAPI says first where it is."""
    first: PydanticError = error.errors()[0]
    name = _path(first["loc"][1:])
    return InvalidRequestError(f"{name} {_fault(first)}", param=name)


def _fault(error: PydanticError) -> str:
    context: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return "is required"
        case "value_error":
            return str(context["error"])
        case "too_short":
            return "must not be empty"
        case "literal_error":
            fault = f"must be {context['expected']}"
        case "greater_than_equal":
            fault = f"must be at least {context['ge']}"
        case "less_than_equal":
            fault = f"must be at most {context['le']}"
        case kind:
            fault = _EXPECTED.get(kind) or error["msg"].replace("Input should be", "must be")
    return f"{fault}, got {shorten(error['input'])}"


_EXPECTED: Final = {
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "bool_parsing": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be a JSON object",
}


def _path(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` → ``messages[0].role``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def shorten(value: object) -> str:
    """A value as JSON, cut to what a person reads in an error message."""
    if isinstance(value, str):
        value = value[:_SHOWN_CHARS]
    text = ""
    try:
        for part in json.JSONEncoder().iterencode(value):  # bit by bit: the value may be large
            text += part[:_SHOWN_CHARS]
            if len(text) > _SHOWN_CHARS:
                break
    except (TypeError, ValueError):
        text = type(value).__name__
    return _cut(text, _SHOWN_CHARS)


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's shape."""

    # Coroutines: Starlette hands plain functions to threads.
    async def answer(_request: Request, error: Exception) -> Response:
        return error_response(error)

    async def answer_nobody(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def answer_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code in (404, 405) and error.detail in ("Not Found", "Method Not Allowed"):
            call = f"{request.method} {_cut(request.scope['path'], _MAX_PARAM_CHARS)}"
            detail = f"there is no {call} here; /docs lists what there is"
            error = HTTPException(error.status_code, detail, error.headers)
        return error_response(error)

    async def answer_validation(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_invalid_query(error))

    app.add_exception_handler(LaybyError, answer)
    app.add_exception_handler(ValidationError, answer)
    app.add_exception_handler(ClientDisconnect, answer_nobody)
    app.add_exception_handler(HTTPException, answer_http)
    app.add_exception_handler(RequestValidationError, answer_validation)
    app.add_exception_handler(Exception, answer)
