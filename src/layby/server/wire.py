"""HTTP as uvicorn reads it, with a bound for what comes before a body, and errors as all others."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from layby.server.errors import error_response

MAX_HEAD_BYTES: Final = 64 * 1024
"""Most bytes of a request's line and headers, give or take a read: its parser has no limit, and
takes seconds for megabytes, in which nobody is served."""


class HttpProtocol(HttpToolsProtocol):
    """A connection. What is no HTTP, or has no end to its headers, is answered with an error, and
    the connection closed: nobody knows where the next request would begin."""

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    HTTPException(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes")
                )

    def on_message_begin(self) -> None:
        """See uvicorn: a request begins."""
        self._is_in_head, self._num_head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """See uvicorn: its headers have ended."""
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """See uvicorn: its parser has refused something."""
        self._refuse(HTTPException(400, "this is not valid HTTP"))

    def _refuse(self, error: HTTPException) -> None:
        """Tell why, unless that would be in the middle of an answer; then hang up."""
        self._is_in_head = False
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            answer = error_response(error)
            status = HTTPStatus(answer.status_code)
            lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            lines += [b"connection: close", b"", bytes(answer.body)]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()
