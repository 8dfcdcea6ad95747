"""A runner over an engine that is not there: what it does is told by its arguments.

Started as a process by tests, as the comparison starts the real ones.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers" / "runners"))

from protocol import Generated, Job, serve


class FakeEngine:
    """Answers at once, a token short if told so."""

    def __init__(self, job: Job) -> None:
        print("a line that is no answer")
        if "fails" in sys.argv:
            raise ValueError("no such weights")
        if "hangs" in sys.argv:
            time.sleep(600)
        self.calls = 0

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated:
        self.calls += 1
        short = 1 if "short" in sys.argv else 0
        # How often it was called, so that a test can tell whether it was warmed up.
        return Generated([output_len - short] * len(prompts), preemptions=self.calls)


if "dies" in sys.argv:
    sys.exit("killed at birth")
serve(FakeEngine)
