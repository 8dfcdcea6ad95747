"""A server process over the toy engine.

``python -m tests.server.toy_process DRAIN_S STEP_S [RECORDING]``

Started by the shutdown tests; listens on a free port of the loopback.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from layby.engine import AsyncEngine
from layby.server import serve_engine
from tests.server.harness import AlphabetExecutor, make_engine


def build() -> AsyncEngine:
    """Three places, memory for less than two answers; a negative step time never gets ready."""
    step_s = float(sys.argv[2])
    if step_s < 0:
        print("loading", flush=True)
        time.sleep(60)
    return make_engine(
        AlphabetExecutor(step_s=step_s),
        num_blocks=20,
        num_swap_blocks=40,
        max_num_seqs=3,
        record=Path(sys.argv[3]) if len(sys.argv) > 3 else None,
    )


if __name__ == "__main__":
    serve_engine(build, host="127.0.0.1", port=0, drain_timeout_s=float(sys.argv[1]))
