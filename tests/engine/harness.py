"""A whole engine with neither model nor clock: what it samples and when is the test's to say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from layby.engine import Engine, RequestDelta, RequestOutput
from layby.engine.elastic import ElasticPool
from layby.engine.outputs import CompletionOutput
from layby.engine.toy import ByteTokenizer, ToyChatTemplate
from layby.execution import FakeExecutor, StepResult
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from layby.scheduling.request import Sequence as Sample

Script = Callable[[Sample, int], int]
"""Sample and number of the output token, from 0 → token id."""


class Clock:
    """Stands still unless told; an executor tells it a second per step."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TickingExecutor(FakeExecutor):
    """The fake executor, which checks every plan; a step takes a second.

    Attributes:
        before_step: Called with each plan first; may raise, to break the step.
        gate: Cleared, it stops the executor in the middle of a step, until it is set.
        plans: What was executed.
        released: Request ids that were released.
        closed: How often it was closed.
    """

    def __init__(self, clock: Clock, config: SchedulerConfig, script: Script | None) -> None:
        say = script or (lambda sample, index: ord("a") + index % 26)
        super().__init__(
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_swap_blocks=config.num_swap_blocks,
            num_disk_blocks=config.num_disk_blocks,
            script=lambda sample: say(sample, sample.num_output_tokens),
        )
        self._clock = clock
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.gate = threading.Event()
        self.gate.set()
        self.plans: list[StepPlan] = []
        self.released: list[str] = []
        self.closed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.gate.wait()
        self.before_step(plan)
        self.plans.append(plan)
        self._clock.now += 1.0
        return super().execute(plan)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        super().release(request_id)

    def close(self) -> None:
        self.closed += 1
        super().close()


class Harness:
    """An engine over a scripted executor, a byte tokenizer and a clock of a second per step."""

    def __init__(
        self,
        *,
        script: Script | None = None,
        pieces: Sequence[bytes] = (),
        num_blocks: int = 64,
        num_swap_blocks: int = 64,
        max_model_len: int = 256,
        seed: int | None = None,
        shed_load: bool = False,
        elastic: ElasticPool | None = None,
        **scheduler: Any,
    ) -> None:
        self.clock = Clock()
        self.tokenizer = ByteTokenizer(pieces=pieces)
        config = SchedulerConfig(
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            max_model_len=max_model_len,
            **scheduler,
        )
        self.executor = TickingExecutor(self.clock, config, script)
        self.scheduler = Scheduler(config, clock=self.clock)
        self.engine = Engine(
            self.scheduler,
            self.executor,
            self.tokenizer,
            ToyChatTemplate(),
            model_name="toy",
            max_model_len=max_model_len,
            seed=seed,
            shed_load=shed_load,
            elastic=elastic,
            clock=self.clock,
        )

    def run(self, max_steps: int = 2000) -> dict[str, RequestOutput]:
        """Step until nothing is left; the answers by request id."""
        answers: dict[str, RequestOutput] = {}
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                self.check_idle()
                return answers
            for delta in self.engine.step():
                collect(answers, delta)
            if self.engine.error is None:
                self.scheduler.check_integrity()
        raise AssertionError(f"not finished after {max_steps} steps")

    def check_idle(self) -> None:
        """Nothing is held or queued."""
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.swapped) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_swap_blocks == stats.num_swap_blocks

    def metric(self, name: str, **labels: str) -> float:
        """One sample of the metrics text; ``labels`` other than ``model_name`` must match."""
        return metric(self.engine.metrics_text(), name, **labels)


def metric(text: bytes, name: str, **labels: str) -> float:
    """The same of a text."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name == name
        and {k: v for k, v in sample.labels.items() if k != "model_name"} == labels
    ]
    assert len(found) == 1, f"{name}{labels} occurs {len(found)} times"
    return found[0]


def collect(answers: dict[str, RequestOutput], delta: RequestDelta) -> RequestOutput:
    """Add a delta to the answer it belongs to; nothing may follow an end."""
    answer = answers.setdefault(delta.request_id, RequestOutput(delta.request_id, None, [], []))
    assert not answer.finished, f"{delta.request_id} goes on after its end"
    for piece in delta.outputs:
        while len(answer.outputs) <= piece.index:
            answer.outputs.append(CompletionOutput(len(answer.outputs)))
        assert answer.outputs[piece.index].finish_reason is None, "a sample goes on after its end"
    answer.add(delta)
    if delta.finished:
        assert all(output.finish_reason is not None for output in answer.outputs)
    return answer


def spell(text: str | bytes) -> Script:
    """A script that says ``text`` byte by byte, then EOS."""
    data = text.encode() if isinstance(text, str) else text
    return lambda sample, index: data[index] if index < len(data) else ByteTokenizer.EOS
