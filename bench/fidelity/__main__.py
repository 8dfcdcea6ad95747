"""How far the simulator is from the engine: the same arrivals through both, errors side by side.

    python -m bench.fidelity [--profile FILE] [--json FILE] [--only NAME …]

The engine is profiled first (two minutes; or a profile is given), then every setting runs on the
real engine, in real time, and on the simulator. A shared machine's speed drifts from minute to
minute, so there are two tables: one as it is, and one in which the profile's times are scaled by
one factor per run, so that the steps of the run take as long in sum as they did. The first tells
how far a prediction was off, the second how much of that was the machine and not the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from layby import SamplingParams
from layby.bench.machine import describe_machine
from layby.engine import Engine, EngineConfig, RequestDelta
from layby.engine.build import build_engine
from layby.execution import StepResult
from layby.results import RequestTimes, RunResult
from layby.scheduling import StepPlan
from layby.simulate.arrivals import parse_arrivals
from layby.simulate.cost import CostModel, Knots, MoveCost, StepLoad
from layby.simulate.profiles import Profile, load_profile
from layby.simulate.profiling import profile_model
from layby.simulate.simulation import simulate
from layby.simulate.traces import Trace

SWAP_BLOCKS = 4096

TARGETS = {"throughput": 5.0, "mean E2E": 10.0, "p99 TTFT": 15.0, "preemptions": 10.0}
"""Errors to stay within, in percent."""

STEADY = "poisson:rate=3,duration=40,prompt=lognormal(160,0.6),output=lognormal(160,0.5)"
CALM = "poisson:rate=2,duration=40,prompt=lognormal(160,0.6),output=lognormal(160,0.5)"
BURSTY = (
    "on-off:rate=9,idle-rate=0.5,on=5,off=15,duration=40,"
    "prompt=lognormal(160,0.6),output=lognormal(160,0.5)"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One comparison.

    Attributes:
        name: For the table.
        arrivals: As ``layby simulate --arrivals`` takes it.
        num_blocks: Device pool.
        preemption_mode: As the engine's.
    """

    name: str
    arrivals: str
    num_blocks: int
    preemption_mode: str = "auto"


SETTINGS = (
    Setting("ample pool, calm", CALM, 4096),
    Setting("ample pool, bursty", BURSTY, 4096),
    Setting("tight pool, steady, swap", STEADY, 400),
    Setting("tight pool, steady, recompute", STEADY, 400, "recompute"),
    Setting("tight pool, bursty, swap", BURSTY, 400),
    Setting("tight pool, bursty, recompute", BURSTY, 400, "recompute"),
    Setting("very tight pool, bursty, swap", BURSTY, 200),
    Setting("very tight pool, steady, recompute", STEADY, 200, "recompute"),
)


def config_of(setting: Setting) -> EngineConfig:
    """The engine's settings, for both sides."""
    return EngineConfig(
        num_blocks=setting.num_blocks,
        num_swap_blocks=0 if setting.preemption_mode == "recompute" else SWAP_BLOCKS,
        preemption_mode=setting.preemption_mode,
        max_queue=None,
        seed=0,
    )


class Stopwatch:
    """Times whole engine steps, beside what a cost model says of them.

    ``speed`` is how fast the steps were; 1 is as the cost model has it.
    """

    def __init__(self, engine: Engine, cost: CostModel) -> None:
        self._engine = engine
        self._cost = cost
        self._execute = engine.executor.execute
        self._predicted_s = self._taken_s = 0.0
        engine.executor.execute = self._watch  # type: ignore[method-assign]

    def _watch(self, plan: StepPlan) -> StepResult:
        self._predicted_s += self._cost.step_s(StepLoad.of(plan))
        return self._execute(plan)

    def step(self) -> list[RequestDelta]:
        """One step of the engine."""
        started = time.perf_counter()
        deltas = self._engine.step()
        self._taken_s += time.perf_counter() - started
        return deltas

    @property
    def speed(self) -> float:
        """Predicted over measured."""
        return self._predicted_s / self._taken_s


def run_real(engine: Engine, watch: Stopwatch, trace: Trace, advance: Any) -> RunResult:
    """Play the trace in real time; the engine takes requests between two steps, as a server's."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1000, 40000, r.num_prompt_tokens).tolist() for r in trace.requests]
    arrivals: dict[str, tuple[float, int]] = {}
    token_times: dict[str, list[float]] = defaultdict(list)
    done: list[RequestTimes] = []
    began = time.monotonic()
    waiting = 0
    while len(done) < len(trace):
        now = time.monotonic() - began
        while waiting < len(trace) and trace.requests[waiting].arrival_s <= now:
            request = trace.requests[waiting]
            params = SamplingParams(
                max_tokens=request.num_output_tokens, ignore_eos=True, temperature=1.0
            )
            name = engine.add_request(prompts[waiting], params)
            arrivals[name] = (request.arrival_s, request.priority)
            waiting += 1
        if not engine.has_unfinished:
            time.sleep(max(0.0, trace.requests[waiting].arrival_s - now))
            continue
        for delta in watch.step():
            times = token_times[delta.request_id]
            times += [delta.time_s - began for piece in delta.outputs for _ in piece.token_ids]
            if delta.finished:
                arrival_s, priority = arrivals[delta.request_id]
                done.append(RequestTimes(arrival_s, times[-1], [times], priority))
                advance()
    return RunResult.of(done, engine.stats())


def warm_up(engine: Engine) -> None:
    """Run the engine for a moment: the first steps of a process page everything in."""
    for number in range(8):
        prompt = [5000 + number] * 100
        engine.add_request(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()


def at_speed(profile: Profile, speed: float) -> Profile:
    """The profile of a machine that is so much faster."""

    def curve(knots: Knots) -> Knots:
        return tuple((count, seconds / speed) for count, seconds in knots)

    def move(cost: MoveCost) -> MoveCost:
        beside_s = None if cost.beside_block_s is None else cost.beside_block_s / speed
        return MoveCost(cost.fixed_s / speed, cost.block_s / speed, beside_s)

    cost = profile.cost
    return replace(
        profile,
        cost=CostModel(
            rows_s=curve(cost.rows_s),
            samples_s=curve(cost.samples_s),
            decode_context_s=cost.decode_context_s / speed,
            prefill_context_s=cost.prefill_context_s / speed,
            sequence_s=cost.sequence_s / speed,
            swap_out=move(cost.swap_out),
            swap_in=move(cost.swap_in),
            copy=move(cost.copy),
        ),
    )


def compare(setting: Setting, profile: Profile, progress: Progress) -> dict[str, Any]:
    """Both sides of one setting."""
    trace = parse_arrivals(setting.arrivals, seed=1)
    engine = build_engine(config_of(setting))
    task = progress.add_task(setting.name, total=len(trace))
    try:
        warm_up(engine)
        watch = Stopwatch(engine, profile.cost)
        real = run_real(engine, watch, trace, lambda: progress.advance(task))
        config = engine.scheduler.config
    finally:
        engine.close()
    return {
        "setting": setting.name,
        "speed": watch.speed,
        "real": real.as_dict(),
        "simulated": simulate(trace, profile, config).result.as_dict(),
        "at_speed": simulate(trace, at_speed(profile, watch.speed), config).result.as_dict(),
    }


def figures(run: dict[str, Any]) -> dict[str, float]:
    """What is compared."""
    return {
        "throughput": run["output_tokens_per_s"],
        "mean E2E": run["e2e_s"]["mean"],
        "p99 TTFT": run["ttft_s"]["p99"],
        "preemptions": run["preemptions"]["swap"] + run["preemptions"]["recompute"],
    }


def error_pct(real: float, simulated: float) -> float:
    """Of the simulated figure; 0 where both are 0."""
    return 100 * (simulated / real - 1) if real else (0.0 if simulated == real else float("inf"))


def show(comparisons: list[dict[str, Any]], console: Console) -> None:
    """Real, simulated and error for every figure; beyond the target it is marked."""
    for key, title in (
        ("simulated", "Simulated against real: real → simulated (error)"),
        ("at_speed", "The same, with the profile's times scaled by the speed of the run"),
    ):
        table = Table(title=title, title_justify="left")
        table.add_column("setting")
        for name, target in TARGETS.items():
            table.add_column(f"{name} (≤ {target:g}%)", justify="right")
        table.add_column("speed", justify="right")
        met: Counter[str] = Counter()
        for one in comparisons:
            real, simulated = figures(one["real"]), figures(one[key])
            cells = []
            for name, target in TARGETS.items():
                error = error_pct(real[name], simulated[name])
                met[name] += abs(error) <= target
                mark = "" if abs(error) <= target else " !"
                cells.append(f"{real[name]:.4g} → {simulated[name]:.4g} ({error:+.1f}%{mark})")
            table.add_row(one["setting"], *cells, f"{one['speed']:.2f}")
        console.print(table)
        for name, target in TARGETS.items():
            console.print(f"{name}: within {target:g}% in {met[name]} of {len(comparisons)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--profile", help="measured on this machine; made anew without it")
    parser.add_argument("--json", type=Path, help="write both sides of every setting here")
    parser.add_argument("--only", nargs="*", choices=[s.name for s in SETTINGS], metavar="NAME")
    options = parser.parse_args()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    profile = (
        load_profile(options.profile)
        if options.profile
        else profile_model(EngineConfig(), progress=sys.stderr.isatty())
    )
    with Progress(console=Console(stderr=True)) as progress:
        comparisons = [
            compare(setting, profile, progress)
            for setting in SETTINGS
            if not options.only or setting.name in options.only
        ]
    show(comparisons, console)
    if options.json:
        text = {"machine": describe_machine(), "profile": profile.as_dict(),
                "comparisons": comparisons}  # fmt: skip
        options.json.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
