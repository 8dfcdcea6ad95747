"""HTTP as uvicorn reads it, with its own words in OpenAI's shape, too."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from layby.server.errors import error_response


class HttpProtocol(HttpToolsProtocol):
    """A connection. What is no HTTP is answered with an error as any other, and the connection
    closed: nobody knows where the next request would begin."""

    def send_400_response(self, msg: str) -> None:
        """See uvicorn, which calls this for what its parser refuses."""
        answer = error_response(HTTPException(400, "this is not valid HTTP"))
        lines = [b"HTTP/1.1 400 Bad Request"]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        lines += [b"connection: close", b"", bytes(answer.body)]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()
