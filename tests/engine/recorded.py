"""An engine that is recorded, and traffic that leaves nothing out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from layby.engine import Engine
from layby.engine.recorder import RecordedScheduler, Recorder
from layby.engine.recording import RecordingFile
from layby.engine.toy import ByteTokenizer, ToyChatTemplate
from layby.errors import QueueFullError, RequestTooLargeError
from layby.sampling_params import SamplingParams
from layby.scheduling.request import Sequence
from tests.engine.harness import Harness, Script

STOP = ord(".")


class RecordedHarness(Harness):
    """The engine's harness with a recorder; ``close`` completes the file.

    Steps take various times: whole nanoseconds, as on a system's clock, or odd ones.
    """

    def __init__(
        self,
        path: Path,
        *,
        script: Script | None = None,
        max_bytes: int = 2**20,
        odd_times: bool = False,
        open_file: Callable[[Path], IO[bytes]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(script=script, **options)
        named = {} if open_file is None else {"open_file": open_file}
        self.recorder = Recorder(
            RecordingFile(path, **named), model_name="toy", max_bytes=max_bytes
        )
        self.scheduler = RecordedScheduler(self.scheduler.config, self.recorder, clock=self.clock)
        self.engine = Engine(
            self.scheduler,
            self.executor,
            self.tokenizer,
            ToyChatTemplate(),
            model_name="toy",
            max_model_len=self.engine.max_model_len,
            seed=0,
            clock=self.clock,
            recorder=self.recorder,
        )
        jitter = random.Random(0)

        def wait(plan: object) -> None:
            # Whole in nanoseconds and in binary.
            self.clock.now += jitter.random() / 3 if odd_times else jitter.randrange(170) / 512

        self.executor.before_step = wait

    def close(self) -> None:
        self.engine.close()


def babble(seed: int) -> Script:
    """Letters that depend on sample and place; now and then one that stops."""

    def say(sample: Sequence, index: int) -> int:
        # Those with an even prompt length say the same, as greedy answers to one prompt do.
        own = sample.request.order if sample.request.num_prompt_tokens % 2 else 0
        draw = random.Random(f"{seed} {own} {sample.index} {index}")
        return STOP if draw.random() < 0.02 else draw.choice(b"abcdefgh")

    return say


def traffic(harness: Harness, seed: int, requests: int = 25) -> Iterator[None]:
    """Conversations, classes, samples, stops, aborts, failures and refusals, step by step."""
    rng = random.Random(seed)
    tokenizer = ByteTokenizer()
    turns: dict[str, str] = {}  # requests whose answers may be gone on with
    texts: list[str] = []
    answered: dict[str, str] = {}
    for number in range(requests):
        opening = rng.choice(["You are kind. ", "Be brief! ", ""])
        prompt = opening + "".join(rng.choices("rstuvw", k=rng.randint(1, 30)))
        if texts and rng.random() < 0.4:
            prompt = rng.choice(texts) + rng.choice(["?", " go on"])
        name = f"client-{number}"
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 20, 40, 300]),
            n=rng.choice([1, 1, 1, 2, 3]),
            min_tokens=1 if rng.random() < 0.2 else 0,
            stop=rng.choice([(), (), ("ab",), ("cde", "ff")]),
            stop_token_ids=(STOP,) if rng.random() < 0.7 else (),
            prompt_logprobs=1 if rng.random() < 0.1 else None,
        )
        with suppress(QueueFullError, RequestTooLargeError, ValueError):
            harness.engine.add_request(
                tokenizer.encode(prompt)[-200:],
                params,
                request_id=name,
                priority=rng.choice([0, 0, 0, 1, -1]),
                cache_salt=rng.choice(["", "", "tenant"]),
            )
            turns[name] = prompt
            answered[name] = ""
            if rng.random() < 0.1:
                harness.executor.failing_requests.add(name)
        for _ in range(rng.choice([0, 0, 0, 0, 1, 3, 10, 60])):
            yield from step(harness, answered, turns, texts)
            if rng.random() < 0.02 and answered:
                harness.engine.abort(rng.choice(list(answered)))
    while harness.engine.has_unfinished:
        yield from step(harness, answered, turns, texts)


def step(
    harness: Harness, answered: dict[str, str], turns: dict[str, str], texts: list[str]
) -> Iterator[None]:
    """One step, if there is anything to do; what was said so far can be taken up again."""
    if not harness.engine.has_unfinished:
        return
    for delta in harness.engine.step():
        for piece in delta.outputs:
            if piece.index == 0:
                answered[delta.request_id] += piece.text
        if delta.finished:
            texts.append(turns[delta.request_id] + answered.pop(delta.request_id))
    yield


Meddling = Callable[[RecordedHarness, random.Random], None]
"""What an operator or a client does between two steps."""


def record(
    path: Path,
    seed: int,
    *,
    requests: int = 25,
    meddling: Meddling | None = None,
    **options: Any,
) -> RecordedHarness:
    """Record such traffic from beginning to end."""
    settings = {
        "num_blocks": 22,
        "num_swap_blocks": 16,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 12,
        "max_queue": 1,
        **options,
    }
    harness = RecordedHarness(path, script=babble(seed), **settings)
    rng = random.Random(f"meddling {seed}")
    for _ in traffic(harness, seed, requests):
        if meddling is not None:
            meddling(harness, rng)
        harness.scheduler.check_integrity()
    assert harness.engine.error is None
    harness.close()
    return harness
