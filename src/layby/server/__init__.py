"""The HTTP server: OpenAI's API over an engine.

``create_app`` makes the application, ``serve`` runs it as a process with an orderly end.
"""

from __future__ import annotations

from layby.server.app import create_app
from layby.server.run import serve, serve_engine

__all__ = ["create_app", "serve", "serve_engine"]
