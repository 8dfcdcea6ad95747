"""Two classes on one engine: batch jobs fill the machine, bursts of interactive requests come.

python -m bench.two_classes [--profile a100-llama3-8b] [--jobs 300] [--seeds 5,6,7] [--json FILE]
python -m bench.two_classes --real [--profile FILE]  # on the engine, in real time, for minutes

Each variant is compared with the same bursts without any batch job, and with an engine that
recomputes its victims and knows no room for urgent work. On the engine the variants take turns, in
the opposite order with every other seed, so that a machine whose speed drifts slows all of them
down. With a profile of that machine the simulator plays the same, to be put beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.two_classes.loads import LARGE, SMALL, VARIANTS, Scale, bursts, merged
from bench.two_classes.outcomes import TARGETS, Outcome, compared, medians, pooled_p99
from bench.two_classes.simulated import simulate
from layby.bench.machine import describe_machine
from layby.simulate.profiles import Profile, load_profile
from layby.simulate.traces import Trace

Play = Callable[[str, Trace], Outcome]
"""Plays a trace with the options of a variant, or of the default if it is ``alone``."""

Runs = dict[int, dict[str, Outcome]]
"""Outcomes by seed and variant."""


def runs(
    seeds: Iterable[int], variants: Iterable[str], jobs: int, scale: Scale, play: Play
) -> Runs:
    """All variants, ``alone`` first, for all seeds."""
    made: Runs = {}
    names = ["alone", *variants]
    for turn, seed in enumerate(seeds):
        outcomes = {}
        for name in names[::-1] if turn % 2 else names:
            trace = bursts(scale, seed) if name == "alone" else merged(scale, seed, jobs)
            outcomes[name] = play(name, trace)
        made[seed] = {name: outcomes[name] for name in names}
    return made


def simulated(profile: Profile, scale: Scale) -> Play:
    """Plays on the simulator."""

    def play(name: str, trace: Trace) -> Outcome:
        return simulate(trace, profile, scale.pools | VARIANTS.get(name, {}))

    return play


def real_runs(
    seeds: list[int], variants: list[str], jobs: int, scale: Scale, progress: Progress
) -> Runs:
    """``runs`` on one engine per variant; ``alone`` is played on that of ``default``."""
    from bench.two_classes.real import Player

    players = {name: Player(scale.pools | VARIANTS[name]) for name in variants}
    for name, player in players.items():
        progress.console.print(f"Warming up: {name}")
        player.warm_up()

    def play(name: str, trace: Trace) -> Outcome:
        task = progress.add_task(name, total=len(trace))
        outcome = players["default" if name == "alone" else name].play(
            trace, lambda: progress.advance(task)
        )
        progress.console.print(
            f"{name}: TTFT p99 {outcome.ttft_s(99):.3f} s, batch done in "
            f"{outcome.batch_done_s:.1f} s, {outcome.moves_per_job:.2f} moves per job"
        )
        progress.remove_task(task)
        return outcome

    try:
        return runs(seeds, variants, jobs, scale, play)
    finally:
        for player in players.values():
            player.close()


def show(title: str, made: Runs, console: Console) -> None:
    """Every run, and what they come to together; what misses its target is marked."""
    rows = [row for seed, outcomes in made.items() for row in compared(seed, outcomes)]
    table = Table(title=title, title_justify="left")
    for head in ("seed", "variant", "TTFT p50", "p99", "/ alone", "batch done", "/ recompute"):
        table.add_column(head, justify="left" if head == "variant" else "right")
    table.add_column("moves per job", justify="right")
    table.add_column("left", justify="right")
    for row in rows:
        table.add_row(
            str(row.seed),
            row.variant,
            f"{row.ttft_p50_s:.3f}",
            f"{row.ttft_p99_s:.3f}",
            f"{row.ttft_p99_to_alone:.2f}",
            f"{row.batch_done_s:.1f}",
            f"{row.done_to_recompute:.3f}",
            f"{row.moves_per_job:.2f}",
            str(row.unfinished),
        )
    console.print(table)
    pooled = pooled_p99(list(made.values()))
    for name, figures in medians(rows).items():
        told = ", ".join(
            f"{figure} {value:.3f}{' !' if value > TARGETS[figure] else ''}"
            for figure, value in figures.items()
        )
        ratio = pooled[name] / pooled["alone"]
        console.print(f"{name}: medians {told}; p99 of all seeds' requests / alone {ratio:.2f}")


def plain(made: Runs) -> list[dict[str, Any]]:
    """For the file."""
    return [
        asdict(row) | {"ttfts_s": made[seed][row.variant].ttfts_s}
        for seed, outcomes in made.items()
        for row in compared(seed, outcomes)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--profile", help="name or file; default: a100-llama3-8b, with --real none is simulated"
    )
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--seeds", default="5,6,7")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="beside alone")
    parser.add_argument("--duration", type=int, help="seconds in which bursts come")
    parser.add_argument("--scale", choices=("large", "small"), help="default: by the device")
    parser.add_argument("--real", action="store_true", help="on the engine, not simulated only")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = options.variants.split(",")
    if not {"recompute", "default"} <= set(variants) <= set(VARIANTS):
        parser.error(f"--variants: recompute, default and any of {', '.join(VARIANTS)}")
    profile = None
    if options.profile or not options.real:
        profile = load_profile(options.profile or "a100-llama3-8b")
    is_small = options.real if profile is None else profile.device == "cpu"
    scale = LARGE if (options.scale or ("small" if is_small else "large")) == "large" else SMALL
    if options.duration is not None:
        scale = replace(scale, duration_s=options.duration)

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    tables: dict[str, Runs] = {}
    if options.real:
        with Progress(console=Console(stderr=True, highlight=False)) as progress:
            tables["real"] = real_runs(seeds, variants, options.jobs, scale, progress)
    if profile is not None:
        play = simulated(profile, scale)
        tables["simulated"] = runs(seeds, variants, options.jobs, scale, play)
    for kind, made in tables.items():
        show(f"{options.jobs} jobs, {kind}", made, console)
    if options.json:
        write(options.json, tables, jobs=options.jobs, scale=asdict(scale), profile=profile)


def write(path: Path, tables: Mapping[str, Runs], profile: Profile | None, **load: Any) -> None:
    """Everything measured, and on what."""
    text = {
        "machine": describe_machine(),
        "profile": None if profile is None else profile.name,
        **load,
        **{kind: plain(made) for kind, made in tables.items()},
    }
    path.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
