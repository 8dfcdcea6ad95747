"""The command: sets peers up, runs all workloads on all engines in turn, prints the tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.peers import engines, machine
from bench.peers.engines import BY_HAND, PEERS, Engine, SetupError
from bench.peers.report import Failure, Report, show
from bench.peers.running import RunError, job_for, run
from bench.peers.workloads import WORKLOADS, Workload, quick
from layby.bench import describe_machine
from layby.models import DEFAULT_MODEL, LoadedModel, load, pull, resolve
from layby.models.hub import home

VERSIONS = ("layby", "torch")
"""What of Layby's own environment the report names."""

WIDTH = 110
"""Columns of the report where it does not go to a terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; 1 if anything that was asked for is missing from the report."""
    options = _parser().parse_args(arguments)
    # Ends the way an interrupt from the keyboard does: the engine that is running is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options.venvs.mkdir(parents=True, exist_ok=True)
    ready, missing = _set_up(options)
    if options.setup_only:
        return 1 if missing else 0
    chosen = [workload for workload in WORKLOADS if workload.name in options.workloads]
    if options.quick:
        chosen = [quick(workload) for workload in chosen]
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=machine.describe(options.threads),
        versions={engine.name: engine.versions for engine in ready},
        workloads=chosen,
        not_set_up=missing,
    )
    tokens = _prompt_tokens(load(options.model))
    for workload in chosen:
        _compare(workload, ready, tokens, report, options)
    show(report, Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH))
    return 1 if report.failures or missing else 0


def _parser() -> argparse.ArgumentParser:
    peers = [peer.name for peer in PEERS]
    workloads = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "--venvs",
        type=Path,
        default=home() / "peers",
        metavar="DIR",
        help="where the peers' environments, exported weights and logs are kept",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything here")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="repetitions (3)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="CPU threads of every engine (all that may be used)",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="known name, or path of a GGUF file")
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers, metavar="NAME")
    parser.add_argument(
        "--workloads", nargs="+", default=workloads, choices=workloads, metavar="NAME"
    )
    parser.add_argument(
        "--timeout", type=float, default=1800.0, metavar="SECONDS", help="longest run (1800)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny workloads: does it all work?")
    parser.add_argument("--setup-only", action="store_true", help="make the environments, and end")
    parser.epilog = f"peers: {', '.join(peers)}; workloads: {', '.join(workloads)}"
    return parser


def _set_up(options: argparse.Namespace) -> tuple[list[Engine], dict[str, str]]:
    """All engines that can run here, and why the others cannot."""
    pull(options.model)
    files = resolve(options.model, allow_download=False)
    facts = {name: str(value) for name, value in describe_machine().items() if name in VERSIONS}
    ready = [
        engines.layby_engine(str(files.path), facts),
        engines.layby_engine(str(files.path), facts, BY_HAND),
    ]
    missing = {}
    for peer in PEERS:
        if peer.name not in options.peers:
            continue
        _say(f"setting up {peer.name}")
        try:
            path = files.path if peer.model == "gguf" else _exported(options.model, options.venvs)
            ready.append(engines.set_up(peer, options.venvs, str(path)))
        except SetupError as error:
            missing[peer.name] = str(error)
            _say(f"{peer.name} is missing: {error}")
    return ready, missing


def _exported(model: str, venvs: Path) -> Path:
    """The model as a Hugging Face directory, written once."""
    from layby.bench.export import export_hugging_face

    directory = venvs / "models" / load(model).fingerprint
    if not (directory / "config.json").is_file():  # the file that is written last
        export_hugging_face(model, directory)
    return directory


def _prompt_tokens(model: LoadedModel) -> list[int]:
    """Token ids that stand for text."""
    tokenizer = model.tokenizer
    size = min(model.config.vocab_size, tokenizer.vocab_size)
    return [token for token in range(size) if tokenizer.token_bytes(token)]


def _compare(
    workload: Workload,
    ready: Sequence[Engine],
    tokens: list[int],
    report: Report,
    options: argparse.Namespace,
) -> None:
    """Run a workload on all engines in turn, as often as asked for."""
    prompts = workload.prompts(tokens)
    failed = set()
    for repetition in range(options.repeat):
        for engine in ready:
            if engine.name in failed or (engine.name == BY_HAND and workload.pool == "ample"):
                continue
            job = job_for(engine, workload, prompts, options.threads)
            log = options.venvs / f"{engine.name}.run.log"
            try:
                done = run(engine, workload, job, log=log, timeout_s=options.timeout)
            except RunError as error:
                failed.add(engine.name)
                report.failures.append(Failure(workload.name, engine.name, str(error)))
                _say(f"{workload.name}, {engine.name}: failed: {error}")
            else:
                report.runs.append(done)
                _say(f"{workload.name}, {engine.name}, {repetition + 1}: {done.time_s:.2f} s")
            if options.json is not None:  # after every run: an hour's work is not lost to the last
                options.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
