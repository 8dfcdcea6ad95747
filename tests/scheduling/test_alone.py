"""The scheduler needs nothing but Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

PROGRAM = """
import sys
sys.path.insert(0, {source!r})
from layby.scheduling import Request, Scheduler, SchedulerConfig, SchedulingBudget

scheduler = Scheduler(SchedulerConfig(num_blocks=12, num_swap_blocks=12, block_size=4))
for name in "abc":
    scheduler.add_request(Request(name, [1, 2, 3], max_tokens=16, n=2))
while scheduler.has_unfinished:
    plan = scheduler.schedule()
    scheduler.update(plan, [7] * plan.num_samples)
assert scheduler.metrics.preemptions_swap > 0
foreign = sorted(
    name for name, module in sys.modules.items()
    if "site-packages" in (getattr(module, "__file__", None) or "")
)
assert not foreign, foreign
print("finished", scheduler.metrics.requests_finished)
"""


def test_it_imports_and_runs_where_no_package_is_installed() -> None:
    """``-S`` and ``-I`` take site-packages and the environment away."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM.format(source=str(SOURCE))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "finished 3\n", done.stderr
