"""``layby profile``: measure the engine on this machine, for the simulator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layby.cli.flags import engine_flags, takes
from layby.cli.terminal import (
    JsonTarget,
    check_apart,
    check_target,
    log_to_stderr,
    table_console,
    write_json,
)
from layby.engine import EngineConfig
from layby.errors import counted

if TYPE_CHECKING:
    from rich.console import Console

    from layby.simulate.cost import MoveCost
    from layby.simulate.profiles import Profile


@takes(engine=engine_flags(model_argument=True, shed_load=False))
def profile(
    *,
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="Write the profile here.", callback=check_target),
    ],
    limit: Annotated[
        float,
        typer.Option(min=1, help="Time to measure, beside loading the model. (seconds)"),
    ] = 120.0,
    json: JsonTarget = None,
    engine: EngineConfig,
) -> None:
    """Measure how long steps of the engine take, and fit the simulator's cost model to them.

    Nothing else should run on the machine meanwhile. The file serves as layby simulate --profile.
    """
    from layby.simulate.profiling import profile_model

    log_to_stderr()
    check_apart(out=out, json=json)
    result = profile_model(engine, name=Path(out).stem, limit_s=limit, progress=sys.stderr.isatty())
    result.save(out)
    show_profile(result, table_console(json))
    if json is not None:
        write_json(json, result.as_dict())


def show_profile(profile: Profile, console: Console) -> None:
    """Print a profile's coefficients and how well they fit, as tables."""
    from rich.table import Table

    cost = profile.cost
    about = Table(show_header=False, title="Profile", title_justify="left")
    about.add_column("")
    about.add_column("", justify="right", overflow="fold")
    for label, fact in (
        ("model", profile.model),
        ("device", f"{profile.device}, {profile.dtype}, KV cache in {profile.kv_cache_dtype}"),
        ("machine", str(profile.machine.get("gpu") or profile.machine.get("cpu") or "unknown")),
        ("block", f"{counted(profile.block_size, 'token')}, {profile.block_bytes / 1024:.1f} KiB"),
        ("per position read, decode", f"{cost.decode_context_s * 1e9:.2f} ns"),
        ("per position read, prefill", f"{cost.prefill_context_s * 1e9:.2f} ns"),
        ("per sequence", f"{cost.sequence_s * 1e6:.2f} µs"),
        ("swap out", _move(cost.swap_out)),
        ("swap in", _move(cost.swap_in)),
        ("copy", _move(cost.copy)),
        ("RAM to disk", _move(cost.demote)),
        ("disk to RAM", _move(cost.promote)),
    ):
        about.add_row(label, fact)
    console.print(about)

    for title, knots in (
        ("Rows of a step, in milliseconds", cost.rows_s),
        ("Tokens sampled, in milliseconds", cost.samples_s),
    ):
        curve = Table(title=title, title_justify="left", show_header=False)
        curve.add_column("")
        curve.add_column("", justify="right")
        for count, seconds in knots:
            curve.add_row(f"{count}", f"{seconds * 1e3:.3f}")
        console.print(curve)

    if profile.fit is None:
        return
    errors = Table(title="Error of predicted steps, in percent", title_justify="left")
    for name in ("", "kinds of steps", "mean", "p90", "max"):
        errors.add_column(name, justify="right" if name else "left")
    for label, error in (("fitted", profile.fit), ("held out", profile.held_out)):
        if error is not None:
            figures = (error.mean_pct, error.p90_pct, error.max_pct)
            errors.add_row(label, f"{error.points}", *(f"{figure:.1f}" for figure in figures))
    console.print(errors)


def _move(cost: MoveCost | None) -> str:
    if cost is None:
        return "not measured: no --swap-dir"
    told = f"{cost.fixed_s * 1e6:.1f} µs + {cost.block_s * 1e6:.2f} µs per block"
    if cost.beside_block_s is None:
        return told
    return f"{told}, {cost.beside_block_s * 1e6:.2f} µs more beside the step"
