"""Two classes on one engine: batch jobs fill the machine, bursts of interactive requests come.

python -m bench.two_classes [--profile a100-llama3-8b] [--jobs 300] [--seeds 5,6,7] [--json FILE]
python -m bench.two_classes --real  # on the engine, in real time

Each variant is compared with the same bursts without any batch job, and with an engine that
recomputes its victims and knows no room for urgent work.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layby.engine import EngineConfig
from layby.engine.build import build_engine
from layby.sampling_params import SamplingParams
from layby.simulate.arrivals import merge, parse_arrivals
from layby.simulate.profiles import Profile, load_profile
from layby.simulate.settings import scheduler_config
from layby.simulate.simulation import Simulation
from layby.simulate.traces import Trace, TraceRequest

URGENT, BATCH = 0, 5

PLAIN: dict[str, Any] = {"urgent_window": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "recompute": PLAIN | {"preemption_mode": "recompute"},
    "plain": PLAIN,
    "default": {},
}
"""What each sets, beside the machine's sizes; ``default`` is what ``layby serve`` does."""


@dataclass(frozen=True)
class Scale:
    """A load that fits a machine: tokens are means, pools as the engine's options."""

    rate: float
    burst_prompt: int
    burst_output: int
    duration_s: int
    batch_prompt: int
    batch_output: int
    pools: dict[str, Any]


LARGE = Scale(12, 600, 150, 180, 2000, 1000, {"kv_cache_gib": 16.0, "swap_gib": 200.0})
SMALL = Scale(4, 100, 60, 90, 200, 300, {"num_blocks": 512, "num_swap_blocks": 8192})


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        ttft_p50_s, ttft_p99_s: Of the interactive requests.
        batch_done_s: When the last batch job was done; 0 without any.
        moves_per_job: Preemptions per batch job.
        unfinished: Batch jobs that came to no end.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    batch_done_s: float
    moves_per_job: float
    unfinished: int


def bursts(scale: Scale, seed: int) -> Trace:
    """Interactive requests: 10 s on, 20 s off."""
    return parse_arrivals(
        f"on-off:rate={scale.rate},idle-rate=0.01,on=10,off=20,duration={scale.duration_s},"
        f"prompt=lognormal({scale.burst_prompt},0.5),output=lognormal({scale.burst_output},0.5),"
        f"priority={URGENT}",
        seed=seed,
    )


def batch(scale: Scale, num_jobs: int) -> Trace:
    """Jobs that are all there at the start."""
    draw = random.Random(3).randint

    def around(mean: int) -> int:
        return draw(mean // 2, mean * 3 // 2)

    return Trace(
        "batch",
        [
            TraceRequest(0.0, around(scale.batch_prompt), around(scale.batch_output), BATCH)
            for _ in range(num_jobs)
        ],
    )


def simulate(trace: Trace, profile: Profile, options: dict[str, Any]) -> Outcome:
    """Play a trace in the simulator."""
    config = scheduler_config(profile, max_queue=None, **options)
    simulation = Simulation(trace, profile, config)
    simulation.run()
    classes = simulation.report("", wall_s=0.0).result.classes
    urgent, jobs = classes[str(URGENT)], classes.get(str(BATCH))
    num_jobs = sum(request.priority == BATCH for request in trace.requests)
    return Outcome(
        ttft_p50_s=urgent.ttft_s.p50 or 0.0,
        ttft_p99_s=urgent.ttft_s.p99 or 0.0,
        batch_done_s=(jobs.e2e_s.max or 0.0) if jobs else 0.0,
        moves_per_job=simulation.scheduler.metrics.preemptions / max(1, num_jobs),
        unfinished=num_jobs - (jobs.requests_finished if jobs else 0),
    )


def serve(trace: Trace, options: dict[str, Any]) -> Outcome:
    """Play a trace on the engine, in real time."""
    engine = build_engine(EngineConfig(**options, max_queue=None))
    rng = random.Random(1)
    coming = list(trace.requests)[::-1]
    asked: dict[str, tuple[TraceRequest, float]] = {}
    ttfts: list[float] = []
    done: list[float] = []
    start = time.monotonic()
    while coming or engine.has_unfinished:
        now = time.monotonic() - start
        while coming and coming[-1].arrival_s <= now:
            traced = coming.pop()
            prompt = [rng.randrange(1000, 20000) for _ in range(traced.num_prompt_tokens)]
            params = SamplingParams(
                temperature=0, max_tokens=traced.num_output_tokens, ignore_eos=True
            )
            name = engine.add_request(prompt, params, priority=traced.priority)
            asked[name] = (traced, traced.arrival_s)
        if not engine.has_unfinished:
            time.sleep(max(0.0, coming[-1].arrival_s - now))
            continue
        for delta in engine.step():
            traced, since = asked[delta.request_id]
            now = time.monotonic() - start
            if traced.priority == URGENT and since >= 0:
                ttfts.append(now - since)
                asked[delta.request_id] = (traced, -1.0)
            if delta.finished and traced.priority == BATCH:
                done.append(now)
    moves = engine.scheduler.metrics.preemptions
    engine.close()
    num_jobs = sum(request.priority == BATCH for request in trace.requests)
    return Outcome(
        quantile(ttfts, 0.5),
        quantile(ttfts, 0.99),
        max(done, default=0.0),
        moves / max(1, num_jobs),
        num_jobs - len(done),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which so large a share lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def rows(seeds: Iterable[int], jobs: int, scale: Scale, run: Any) -> list[dict[str, Any]]:
    """Outcomes of all variants for all seeds; ``run(trace, options)`` makes one."""
    made = []
    for seed in seeds:
        interactive = bursts(scale, seed)
        both = merge([interactive, batch(scale, jobs)])
        alone: Outcome = run(interactive, scale.pools)
        outcomes: dict[str, Outcome] = {
            name: run(both, scale.pools | options) for name, options in VARIANTS.items()
        }
        for name, outcome in {"alone": alone, **outcomes}.items():
            made.append(
                {
                    "seed": seed,
                    "jobs": jobs,
                    "variant": name,
                    **asdict(outcome),
                    "ttft_p99_to_alone": outcome.ttft_p99_s / alone.ttft_p99_s,
                    "done_to_recompute": outcome.batch_done_s / outcomes["recompute"].batch_done_s,
                }
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", default="a100-llama3-8b", help="name or file")
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--seeds", default="5,6,7")
    parser.add_argument("--scale", choices=("large", "small"), help="default: by the device")
    parser.add_argument("--real", action="store_true", help="on the engine, not simulated")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.real:
        scale = LARGE if options.scale == "large" else SMALL
        made = rows(seeds, options.jobs, scale, serve)
    else:
        profile = load_profile(options.profile)
        is_small = (options.scale or ("small" if profile.device == "cpu" else "large")) == "small"
        scale = SMALL if is_small else LARGE
        made = rows(seeds, options.jobs, scale, lambda trace, o: simulate(trace, profile, o))
    print(f"{'seed':>4} {'variant':10} {'TTFT p50':>9} {'p99':>7} {'/alone':>7}", end=" ")
    print(f"{'batch done':>10} {'/recompute':>10} {'moves/job':>9} {'left':>4}")
    for row in made:
        print(
            f"{row['seed']:4} {row['variant']:10} {row['ttft_p50_s']:9.3f} "
            f"{row['ttft_p99_s']:7.3f} {row['ttft_p99_to_alone']:7.2f} {row['batch_done_s']:10.1f} "
            f"{row['done_to_recompute']:10.3f} {row['moves_per_job']:9.2f} {row['unfinished']:4}"
        )
    if options.json:
        options.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
