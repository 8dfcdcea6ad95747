"""One run: a job given to a runner in a fresh process, and its answer checked."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from bench.peers.engines import BY_HAND, Engine
from bench.peers.runners.protocol import Job, Measured, measured_of
from bench.peers.workloads import Workload

_LOG_LINES = 8
_END_TIMEOUT_S = 30.0
_BLOCK_TOKENS = 16


class RunError(Exception):
    """A run came to nothing; the message says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one repetition of a workload on one engine came to.

    Attributes:
        time_s: What the workload measures.
        load_s: Making the engine inside its process.
        preemptions, recomputed_tokens: None where the engine does not tell.
    """

    workload: str
    engine: str
    time_s: float
    load_s: float
    preemptions: int | None
    recomputed_tokens: int | None


def job_for(engine: Engine, workload: Workload, prompts: list[list[int]], threads: int) -> Job:
    """The job that asks this engine to do this workload."""
    max_num_seqs = workload.num_prompts
    if engine.name == BY_HAND:
        blocks_each = -(-workload.total_len // _BLOCK_TOKENS)
        max_num_seqs = max(1, workload.kv_tokens // _BLOCK_TOKENS // blocks_each)
    return Job(
        model=engine.model,
        prompts=prompts,
        output_len=workload.output_len,
        kv_tokens=workload.kv_tokens,
        max_num_seqs=max_num_seqs,
        threads=threads,
        warm_up=workload.measures == "job",
    )


def run(engine: Engine, workload: Workload, job: Job, *, log: Path, timeout_s: float) -> Run:
    """Do one job in a process of its own.

    Args:
        engine: Who does it.
        workload: What the job was made of.
        job: What to do.
        log: Gets what the engine says on its standard error, in place of what was there.
        timeout_s: Most seconds, from start to answer.

    Raises:
        RunError: The engine failed, took too long, or did not generate what was asked for.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **engine.env}
    with log.open("wb") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            engine.command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        try:
            line = _exchange(process, json.dumps(asdict(job)), timeout_s)
            answered = time.perf_counter()
        finally:
            _end(process)
    if not line.strip():
        raise RunError(f"no answer; its last words:\n{_tail(log)}")
    try:
        measured = measured_of(line.decode())
    except RuntimeError as error:
        raise RunError(str(error)) from error
    except ValueError as error:
        raise RunError(f"{error}; its last words:\n{_tail(log)}") from error
    _check(job, measured)
    return Run(
        workload.name,
        engine.name,
        measured.duration_s if workload.measures == "job" else answered - started,
        measured.load_s,
        measured.preemptions,
        measured.recomputed_tokens,
    )


def _exchange(process: subprocess.Popen[bytes], question: str, timeout_s: float) -> bytes:
    """Write one line, and wait for one; empty if the process ended without it."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    try:
        stdin.write(question.encode() + b"\n")
        stdin.close()
    except BrokenPipeError:  # it is gone already, and its log says why
        return b""
    if not _readable(stdout, timeout_s):
        raise RunError(f"no answer within {timeout_s:.0f} s")
    return stdout.readline()


def _readable(stream: IO[bytes], timeout_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the runner and all that it started, which has its session to itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    # Those that the runner left behind, too: the next engine is to have the machine to itself.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _check(job: Job, measured: Measured) -> None:
    wanted = [job.output_len] * len(job.prompts)
    if measured.output_lens != wanted:
        raise RunError(
            f"{len(wanted)} answers of {job.output_len} tokens were asked for, and "
            f"{len(measured.output_lens)} came, of {sorted(set(measured.output_lens))} tokens"
        )


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-_LOG_LINES:])
