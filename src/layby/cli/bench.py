"""``layby bench``: measure the engine on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layby.cli.flags import engine_flags, takes
from layby.cli.terminal import (
    JsonTarget,
    help_if_alone,
    log_to_stderr,
    table_console,
    write_json,
)
from layby.engine import EngineConfig
from layby.errors import counted
from layby.results import Distribution, RunResult

if TYPE_CHECKING:
    from rich.console import Console

bench = typer.Typer(
    help="Measure the engine on this machine.",
    callback=help_if_alone,
    invoke_without_command=True,
    rich_markup_mode=None,
)


# Here, --seed is the load's; requests given all at once are never too many for the queue.
@bench.command()
@takes(engine=engine_flags(without=("seed",), max_queue=None, shed_load=False))
def offline(
    *,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Requests, all there from the beginning. (requests)")
    ] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="Length of each prompt. (tokens)")] = 128,
    output_len: Annotated[int, typer.Option(min=1, help="Length of each answer. (tokens)")] = 128,
    n: Annotated[int, typer.Option(min=1, help="Answers to each prompt. (samples)")] = 1,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy; larger is more random.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Fixes the prompts and the answers.")] = 0,
    json: JsonTarget = None,
    engine: EngineConfig,
) -> None:
    """Run many requests at once, with random prompts and answers of one length.

    An answer goes on past the model's own end, so that the work is the same in every run.
    """
    from layby.bench import OfflineLoad, run_offline
    from layby.engine import LLM

    load = OfflineLoad(num_prompts, input_len, output_len, n, temperature, seed)
    log_to_stderr()
    with LLM(**asdict(engine)) as llm:
        result = run_offline(llm, load, settings=asdict(engine))
    console = table_console(json)
    _show_settings(result.settings, console)
    show_result(result, console)
    if json is not None:
        write_json(json, result.as_dict())


def _show_settings(settings: Mapping[str, Any], console: Console) -> None:
    """Print what the figures are of: figures without it cannot be compared."""
    from rich.table import Table

    table = Table(show_header=False, title="Run", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right", overflow="fold")
    block_tokens = counted(settings["block_size"], "token")
    samples = f", {counted(settings['n'], 'sample')} each" if settings["n"] > 1 else ""
    for label, fact in (
        ("model", settings["model"]),
        ("device", f"{settings['device']}, {settings['dtype']}"),
        ("requests", f"{settings['num_prompts']}{samples}"),
        ("prompt", counted(settings["input_len"], "token")),
        ("answer", counted(settings["output_len"], "token")),
        ("device pool", f"{counted(settings['num_blocks'], 'block')} of {block_tokens}"),
        ("swap pool", counted(settings["num_swap_blocks"], "block")),
    ):
        table.add_row(label, fact)
    console.print(table)


def show_result(result: RunResult, console: Console) -> None:
    """Print the figures of a run as two tables: latencies, and everything else."""
    from rich.table import Table

    latencies = Table(title="Latency, in seconds", title_justify="left")
    latencies.add_column("")
    names = [column.name for column in fields(Distribution)]
    for name in names:
        latencies.add_column(name, justify="right")
    for label, distribution in (
        ("time to first token", result.ttft_s),
        ("between tokens (ITL)", result.itl_s),
        ("arrival to end (E2E)", result.e2e_s),
    ):
        values = [getattr(distribution, name) for name in names]
        latencies.add_row(label, *("–" if value is None else f"{value:.3f}" for value in values))

    totals = Table(show_header=False, title="Totals", title_justify="left")
    totals.add_column("")
    totals.add_column("", justify="right")
    for label, figure in (
        ("requests finished", f"{result.requests_finished}"),
        ("duration", f"{result.duration_s:.2f} s"),
        ("output tokens", f"{result.output_tokens}"),
        ("output tokens per second", f"{result.output_tokens_per_s:.1f}"),
        ("preemptions by swap", f"{result.preemptions.swap}"),
        ("preemptions by recompute", f"{result.preemptions.recompute}"),
        ("preemptions per request", f"{result.preemption_rate:.2f}"),
        ("recomputed tokens", f"{result.recomputed_tokens}"),
        ("longest swapped queue", counted(result.swapped_queue_size_max, "request")),
        ("mean swapped duration", f"{result.avg_swapped_duration_s:.3f} s"),
        ("most KV cache in use", f"{result.kv_usage_max:.0%}"),
    ):
        totals.add_row(label, figure)
    console.print(totals)
    console.print(latencies)
