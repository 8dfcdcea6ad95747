"""Layby's own figures, and what moved since the stored baseline.

    python -m bench.own [--json FILE] [--store] [--quick]

Each workload runs on a fresh engine, three times. ``--store`` makes this run the baseline
(``bench/baseline.json``). Figures of another machine are shown, but not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from rich.console import Console
from rich.table import Table

from bench.scheduler import microseconds_per_sequence
from layby import LLM
from layby.bench.machine import describe_machine
from layby.bench.offline import OfflineLoad, run_offline

BASELINE = Path(__file__).with_name("baseline.json")
REPEATS = 3
SAME = 0.05
"""Figures that differ by less than this have not moved: runs of one build differ as much."""

WORKLOADS: dict[str, tuple[OfflineLoad, dict[str, Any]]] = {
    "decode-heavy": (OfflineLoad(64, 200, 300), {"num_blocks": 2304}),
    "decode-heavy, quarter pool": (OfflineLoad(64, 200, 300), {"num_blocks": 512}),
    "prefill-heavy": (OfflineLoad(64, 1000, 32), {"num_blocks": 4608}),
    "prefill-heavy, quarter pool": (OfflineLoad(64, 1000, 32), {"num_blocks": 1032}),
    "single stream": (OfflineLoad(1, 16, 128, temperature=0.0), {"num_blocks": 64}),
}


def measure(name: str, quick: bool) -> dict[str, float]:
    """Medians of a workload."""
    load, config = WORKLOADS[name]
    if quick:
        load = OfflineLoad(
            max(1, load.num_prompts // 16), load.input_len, 16, temperature=load.temperature
        )
    runs = []
    for _ in range(1 if quick else REPEATS):
        with LLM(model="smollm2", **config) as llm:
            runs.append(run_offline(llm, load, progress=False))
    return {
        "output_tokens_per_s": statistics.median(run.output_tokens_per_s for run in runs),
        "duration_s": statistics.median(run.duration_s for run in runs),
        "preemptions_swap": statistics.median(run.preemptions.swap for run in runs),
        "recomputed_tokens": statistics.median(run.recomputed_tokens for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--store", action="store_true", help="make this run the baseline")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    options = parser.parse_args()
    console = Console(stderr=True)
    figures: dict[str, dict[str, float]] = {}
    for name in WORKLOADS:
        with console.status(name):
            figures[name] = measure(name, options.quick)
    for size in (64, 256, 1024):
        micros = statistics.median(microseconds_per_sequence(size))
        figures[f"scheduler, {size} running"] = {"us_per_sequence_and_step": micros}
    result = {"machine": describe_machine(), "quick": options.quick, "figures": figures}
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else None
    console.print(report(result, baseline))
    text = json.dumps(result, indent=1)
    if options.json:
        Path(options.json).write_text(text + "\n")
    if options.store:
        BASELINE.write_text(text + "\n")


def report(result: dict[str, Any], baseline: dict[str, Any] | None) -> Table:
    """Figures beside those of the baseline, if that was taken on the same kind of machine."""
    comparable = baseline is not None and all(
        baseline["machine"][key] == result["machine"][key] for key in ("cpu", "cpus")
    )
    comparable = comparable and baseline is not None and baseline["quick"] == result["quick"]
    title = "against the baseline" if comparable else "no baseline of such a machine and run"
    table = Table("workload", "figure", "now", "baseline", "moved", title=title)
    for name, values in result["figures"].items():
        for figure, value in values.items():
            old = baseline["figures"].get(name, {}).get(figure) if comparable and baseline else None
            table.add_row(
                name, figure, f"{value:.3g}", "" if old is None else f"{old:.3g}", moved(value, old)
            )
    return table


def moved(value: float, old: float | None) -> str:
    """How a figure changed; nothing if it did not, or cannot be told."""
    if old is None or (old == 0 and value == 0):
        return ""
    if old == 0:
        return "from 0"
    change = value / old - 1
    return "" if abs(change) < SAME else f"{change:+.0%}"


if __name__ == "__main__":
    main()
