"""The server process: port, engine, HTTP server, and an orderly end.

The first SIGTERM or SIGINT stops admission (503 from then on) and lets accepted work finish within
the drain limit; then the process exits with code 0. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from layby.engine.config import DEFAULT_KEEP_S
from layby.engine.journal import Journal
from layby.errors import ConfigError, counted
from layby.execution.faults import Faults
from layby.server.app import access_of, create_app
from layby.server.docs_page import example_curl
from layby.server.durable import DurableRequests
from layby.server.wire import HttpProtocol

if TYPE_CHECKING:
    from layby.engine import AsyncEngine, EngineConfig

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LAST_WORDS_S: Final = 5
"""After the drain, connections get so long to take the rest of their answers."""
_LONGEST_S: Final = 1e9
"""Thirty years; the system's timers take no more than ten times that."""

logger = logging.getLogger(__name__)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | Sequence[str] | None = None,
    admin_api_key: str | None = None,
    drain_timeout_s: float = 30.0,
    state_dir: str | Path | None = None,
    keep_results_s: float | None = None,
    isolate_prefix_cache: bool = False,
) -> None:
    """Load the model and serve it until a signal ends the process.

    Args:
        config: What the engine is made from.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        api_key: One key or several; None leaves the API open.
        admin_api_key: Opens the paths under ``/admin/``; None: there are none.
        drain_timeout_s: How long accepted work may go on after the first signal, in seconds.
        state_dir: Where requests are written down, so that the next process finishes what this
            one does not; None forgets them.
        keep_results_s: How long it keeps answers for callers who come back, in seconds; a day if
            None.
        isolate_prefix_cache: Calls with different keys share no cached prefixes.

    Raises:
        ConfigError: The address or the state directory cannot be had, a key or a time is none
            (all known before the model is loaded), the state is another model's, or a setting
            cannot work.
        ModelError: The model cannot be had.
    """
    from layby.engine import AsyncEngine

    serve_engine(
        lambda: AsyncEngine.from_config(config),
        host=host,
        port=port,
        api_key=api_key,
        admin_api_key=admin_api_key,
        drain_timeout_s=drain_timeout_s,
        state_dir=state_dir,
        keep_results_s=keep_results_s,
        isolate_prefix_cache=isolate_prefix_cache,
    )


def serve_engine(
    build: Callable[[], AsyncEngine],
    *,
    host: str,
    port: int,
    api_key: str | Sequence[str] | None = None,
    admin_api_key: str | None = None,
    drain_timeout_s: float = 30.0,
    state_dir: str | Path | None = None,
    keep_results_s: float | None = None,
    isolate_prefix_cache: bool = False,
) -> None:
    """The same for an engine that ``build`` makes once port and state directory are ours."""
    if state_dir is None and keep_results_s is not None:
        raise ConfigError(
            f"keep_results is {keep_results_s:g} s, but without a state_dir no results are kept: "
            "name one, or leave keep_results out"
        )
    access_of(api_key, admin_api_key, isolate_prefix_cache)
    for name, seconds in (("drain_timeout", drain_timeout_s), ("keep_results", keep_results_s)):
        if seconds is not None and not 0 <= seconds <= _LONGEST_S:  # nor is NaN
            raise ConfigError(f"{name} must be from 0 to {_LONGEST_S:g} seconds, got {seconds:g}")
    sock = bind(host, port)
    journal: Journal | None = None
    durable: DurableRequests | None = None
    try:
        if state_dir is not None:
            keep_s = DEFAULT_KEEP_S if keep_results_s is None else keep_results_s
            journal = Journal(Path(state_dir), keep_s=keep_s)
        with _signals_exit():
            engine = build()
            if journal is not None:
                journal.claim(engine.identity)
                durable = DurableRequests(engine, journal, Faults.from_environment())
            app = create_app(
                engine,
                api_key=api_key,
                admin_api_key=admin_api_key,
                durable=durable,
                isolate_prefix_cache=isolate_prefix_cache,
            )
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            loop="auto",
            lifespan="off",
            log_level="error",  # what callers do wrong they are told
            access_log=False,
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )
        server = _Server(config, _welcome(engine, _base_url(sock, host), api_key is not None))
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(_run(engine, server, sock, drain_timeout_s, durable))
    finally:
        if journal is not None:
            journal.close()
        sock.close()


def bind(host: str, port: int) -> socket.socket:
    """A socket that owns the address but does not listen yet: callers wait for nothing unready.

    Raises:
        ConfigError: The address is taken, not this machine's or not allowed.
    """
    if not 0 <= port <= 65535:  # the look-up below would cut off the upper bits
        raise ConfigError(f"cannot listen on {host}:{port}: ports go from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {why}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        # A restart need not wait for the last connections of the process before it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return sock


async def _run(
    engine: AsyncEngine,
    server: _Server,
    sock: socket.socket,
    drain_timeout_s: float,
    durable: DurableRequests | None,
) -> None:
    loop = asyncio.get_running_loop()
    drains: list[asyncio.Task[None]] = []
    save = None if durable is None else durable.save_kv

    async def drain() -> None:
        try:
            await engine.shutdown(drain_timeout_s, save=save)
        finally:
            server.should_exit = True

    def on_signal(number: int) -> None:
        if drains:
            try:
                engine.break_off()
            finally:
                os._exit(128 + number)  # asked twice: no more waiting, not even for threads
        engine.begin_drain()  # now, not when the task gets its turn
        logger.info(
            "stopping: %s left, which may finish within %g s (a second signal exits at once)",
            counted(_unfinished(engine), "accepted request"),
            drain_timeout_s,
        )
        drains.append(loop.create_task(drain()))

    for number in _SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    try:
        await engine.start()
        if durable is not None:
            await durable.recover()
        await server.serve(sockets=[sock])
    finally:
        if drains:
            await drains[0]
        else:
            await engine.shutdown(0.0, save=save)
        num_kept = None if durable is None else await durable.close()
        _log_end(engine, num_kept)


def _log_end(engine: AsyncEngine, num_kept: int | None) -> None:
    """Say what has become of everything; what is kept in a journal is not lost."""
    stats = engine.stats()
    finished = counted(stats.requests_finished, "request")
    if num_kept is None:
        logger.info("stopped: %s finished, %d aborted", finished, stats.requests_aborted)
    else:
        logger.info(
            "stopped: %s finished, %d kept for the next start, %d aborted",
            finished,
            num_kept,
            stats.requests_aborted - engine.num_cut_off,
        )


def _unfinished(engine: AsyncEngine) -> int:
    stats = engine.stats()
    return stats.running + stats.waiting + stats.swapped


class _Server(uvicorn.Server):
    """uvicorn's server, with the signals left to us and a welcome once it listens."""

    def __init__(self, config: uvicorn.Config, welcome: str) -> None:
        super().__init__(config)
        self._welcome = welcome

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would drop connections before their answers are complete."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say so."""
        try:
            await super().startup(sockets)
        except OSError as error:  # another process listened there while the model loaded
            raise ConfigError(f"cannot listen: {error.strerror or error}") from error
        print(self._welcome, flush=True)


def _welcome(engine: AsyncEngine, base_url: str, needs_key: bool) -> str:
    path = "/v1/completions" if engine.chat_template is None else "/v1/chat/completions"
    curl = example_curl(base_url, path, engine.model_name, needs_key=needs_key)
    return (
        f"\nLayby serves {engine.model_name} at {base_url}/v1\n"
        f"Documentation: {base_url}/docs\n\nTry it:\n\n{curl}\n"
    )


def _base_url(sock: socket.socket, host: str) -> str:
    """How to reach the socket from this machine."""
    port = sock.getsockname()[1]
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _signals_exit() -> Iterator[None]:
    """While the model loads, a signal ends the process: nothing was accepted yet.

    Said explicitly, because the first process of a container has no default reaction to signals.
    """

    def leave(_number: int, _frame: Any) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
