"""``layby serve`` as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

LAYBY = Path(sys.executable).with_name("layby")


@contextmanager
def serving(log: Path, *flags: str, **environment: str) -> Iterator[str]:
    """A server with these flags, ready to answer; gives its base URL. It must end in good order.

    Args:
        log: File for what it prints.
        flags: Besides the port.
        environment: Variables it sees besides ours.
    """
    port = _free_port()
    with log.open("w") as output:
        process = subprocess.Popen(
            [LAYBY, "serve", "--port", str(port), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
