"""What a decision costs: schedule and update, per running sequence, while all decode.

python -m bench.scheduler [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from layby.scheduling import Request, Scheduler, SchedulerConfig

SIZES = (64, 256, 1024)
STEPS = 64
REPEATS = 9


def microseconds_per_sequence(num_seqs: int) -> list[float]:
    """One figure per repeat, over so many steps each; every block boundary is met four times."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_seqs * 64,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs + 8192,
        )
    )
    for number in range(num_seqs):  # prompts of many lengths, so that boundaries spread out
        prompt = [number] * (40 + number % 16)
        scheduler.add_request(Request(str(number), prompt, max_tokens=900))
    while scheduler.waiting:
        plan = scheduler.schedule()
        scheduler.update(plan, [7] * plan.num_samples)
    tokens = [7] * num_seqs
    figures = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(STEPS):
            scheduler.update(scheduler.schedule(), tokens)
        figures.append((time.perf_counter() - start) / STEPS / num_seqs * 1e6)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", help="write the figures to this file; - is stdout")
    options = parser.parse_args()
    results = {size: microseconds_per_sequence(size) for size in SIZES}
    shown = sys.stderr if options.json == "-" else sys.stdout
    print("running sequences   µs per sequence and step: median (min - max)", file=shown)
    for size, figures in results.items():
        print(
            f"{size:17d}   {statistics.median(figures):.2f} "
            f"({min(figures):.2f} - {max(figures):.2f})",
            file=shown,
        )
    if options.json:
        text = json.dumps({str(size): figures for size, figures in results.items()})
        if options.json == "-":
            print(text)
        else:
            with open(options.json, "w") as file:
                file.write(text)


if __name__ == "__main__":
    main()
