"""What a runner and the comparison say to each other: one line of JSON in, one line out.

A runner is started in the environment of its engine, so it imports nothing but that engine and
this file. It loads the model, generates a few tokens to warm up, and times the job and nothing
else. What engines print on standard output goes to standard error: the answer stands alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

WARM_UP_PROMPTS, WARM_UP_INPUT, WARM_UP_OUTPUT = 4, 16, 8


@dataclass(frozen=True)
class Job:
    """What a runner is asked to do; greedy, and on past the end of the text.

    Attributes:
        model: A GGUF file or a Hugging Face directory, as the engine takes it.
        prompts: Token ids.
        output_len: Tokens to generate after each prompt.
        kv_tokens: Size of the KV pool. Engines round it up to whole blocks.
        max_num_seqs: Most sequences computed together.
        threads: CPU threads of the engine.
        warm_up: Generate a little before the clock starts.
    """

    model: str
    prompts: list[list[int]]
    output_len: int
    kv_tokens: int
    max_num_seqs: int
    threads: int
    warm_up: bool

    @property
    def max_model_len(self) -> int:
        """Longest sequence of the job, warm-up included."""
        longest = max(map(len, self.prompts)) + self.output_len
        return max(longest, WARM_UP_INPUT + WARM_UP_OUTPUT)

    def warm_up_prompts(self) -> list[list[int]]:
        """Prompts that share no beginning with one another, made of tokens of the job's."""
        tokens = [token for prompt in self.prompts for token in prompt]
        step = WARM_UP_INPUT + 1
        return [
            [tokens[(index * step + place) % len(tokens)] for place in range(WARM_UP_INPUT)]
            for index in range(min(WARM_UP_PROMPTS, self.max_num_seqs))
        ]


@dataclass(frozen=True)
class Generated:
    """What an engine made of a list of prompts. None where it does not tell.

    Attributes:
        output_lens: Tokens of each answer.
        preemptions: Requests that lost their place in the pool.
        recomputed_tokens: Positions computed again after that.
    """

    output_lens: list[int]
    preemptions: int | None = None
    recomputed_tokens: int | None = None


@dataclass(frozen=True)
class Measured:
    """A runner's answer.

    Attributes:
        load_s: Making the engine, from its import on.
        duration_s: The job.
    """

    load_s: float
    duration_s: float
    output_lens: list[int]
    preemptions: int | None
    recomputed_tokens: int | None


class Engine(Protocol):
    """A loaded model. The counts it reports are those of this call alone."""

    def generate(self, prompts: list[list[int]], output_len: int) -> Generated: ...


def measure(
    job: Job, load: Callable[[Job], Engine], clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """Load an engine, warm it up if asked to, and time the job."""
    started = clock()
    engine = load(job)
    loaded = clock()
    if job.warm_up:
        engine.generate(job.warm_up_prompts(), WARM_UP_OUTPUT)
    before = clock()
    generated = engine.generate(job.prompts, job.output_len)
    after = clock()
    return Measured(
        load_s=loaded - started,
        duration_s=after - before,
        output_lens=generated.output_lens,
        preemptions=generated.preemptions,
        recomputed_tokens=generated.recomputed_tokens,
    )


def serve(load: Callable[[Job], Engine]) -> None:
    """Take one job from standard input, answer it on standard output and end the process."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        try:
            reply = asdict(measure(job_of(sys.stdin.readline()), load))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        answer.write(json.dumps(reply) + "\n")
    sys.stderr.flush()
    # Not exit(): an engine that hangs or crashes while it is taken down has nothing left to say.
    os._exit(1 if "error" in reply else 0)


def job_of(line: str) -> Job:
    """A job from its line of JSON."""
    return Job(**json.loads(line))


def measured_of(line: str) -> Measured:
    """An answer from its line of JSON.

    Raises:
        RuntimeError: The engine failed; the message is its own.
        ValueError: The line is no answer.
    """
    reply: Any = json.loads(line)
    if isinstance(reply, dict) and "error" in reply:
        raise RuntimeError(reply["error"])
    names = {field.name for field in fields(Measured)}
    if not isinstance(reply, dict) or set(reply) != names:
        raise ValueError(f"not an answer: {line[:200]!r}")
    return Measured(**reply)
