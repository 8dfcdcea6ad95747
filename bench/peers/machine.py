"""What the comparison ran on, with the one figure that bounds decoding: memory bandwidth."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from layby.bench import describe_machine

_COPY_BYTES = 256 * 2**20
_COPIES = 5


def describe(threads: int) -> dict[str, Any]:
    """Processor, memory and versions, as plain data."""
    return {
        **describe_machine(),
        "threads": threads,
        "copy_gb_per_s": copy_gb_per_s(threads),
    }


def copy_gb_per_s(threads: int) -> float:
    """Bytes read and written per second, in units of 1e9, by this many threads that copy.

    The best of a few passes over memory far larger than any cache.
    """
    sources = [np.ones(_COPY_BYTES // 8) for _ in range(threads)]
    targets = [np.zeros(_COPY_BYTES // 8) for _ in range(threads)]
    fastest = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_COPIES):
            started = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            fastest = min(fastest, time.perf_counter() - started)
    return 2 * threads * _COPY_BYTES / fastest / 1e9
