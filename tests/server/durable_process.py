"""A server process with a state directory, over the toy engine; started by the durability tests.

``python -m tests.server.durable_process STATE_DIR DRAIN_S STEP_S MODEL SWAP_BLOCKS [API_KEY …]``
"""

from __future__ import annotations

import logging
import sys

from layby.engine import AsyncEngine
from layby.server import serve_engine
from tests.server.harness import AlphabetExecutor, make_engine


def main() -> None:
    """Six places, memory for less than that: some are parked, some wait."""
    logging.basicConfig(level=logging.INFO)
    state_dir, drain_s, step_s, model, num_swap_blocks, *keys = sys.argv[1:]

    def build() -> AsyncEngine:
        return make_engine(
            AlphabetExecutor(step_s=float(step_s)),
            num_blocks=24,
            num_swap_blocks=int(num_swap_blocks),
            max_num_seqs=6,
            max_queue=100,
            identity={"model": model},
        )

    serve_engine(
        build,
        host="127.0.0.1",
        port=0,
        api_key=keys or None,
        drain_timeout_s=float(drain_s),
        state_dir=state_dir,
    )


if __name__ == "__main__":
    main()
