"""``layby serve``: the HTTP server."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Literal

import typer

from layby.cli.flags import engine_flags, takes
from layby.cli.terminal import log_to_stderr
from layby.engine import EngineConfig
from layby.engine.config import DEFAULT_KEEP_S


@takes(engine=engine_flags(model_argument=True))
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on; 0: any free one.",
        ),
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="LAYBY_API_KEY",
            show_envvar=True,
            show_default="none, the API is open",
            help="Key that clients must bring; may be repeated.",
        ),
    ] = None,
    admin_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LAYBY_ADMIN_API_KEY",
            show_envvar=True,
            show_default="none, there are no /admin/ paths",
            help="Key that opens the paths under /admin/.",
        ),
    ] = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="How long accepted requests may go on after SIGTERM or Ctrl-C. (seconds)",
        ),
    ] = 30.0,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            show_default="none, requests end with the process",
            help="Directory in which accepted requests are written down: the next start finishes "
            "what this one does not, and clients come back for the answers by request id.",
        ),
    ] = None,
    keep_results: Annotated[
        float | None,
        typer.Option(
            min=0,
            show_default=f"{DEFAULT_KEEP_S:g}",
            help="How long answers are kept there for clients who come back. (seconds)",
        ),
    ] = None,
    isolate_prefix_cache: Annotated[
        bool, typer.Option(help="Share cached prefixes only between calls with the same API key.")
    ] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Least important messages to log."),
    ] = "info",
    engine: EngineConfig,
) -> None:
    """Serve a model over HTTP, in the manner of OpenAI's API.

    A model that is not on this machine is fetched first.
    """
    from layby.server import serve as run_server

    log_to_stderr(log_level, dated=True)
    run_server(
        engine,
        host=host,
        port=port,
        api_key=api_key or None,
        admin_api_key=admin_api_key,
        drain_timeout_s=drain_timeout,
        state_dir=state_dir,
        keep_results_s=keep_results,
        isolate_prefix_cache=isolate_prefix_cache,
    )
    # The process ends: its last collections would walk everything that torch brought, for half a
    # second after the last word.
    gc.freeze()
