"""A model-less LLM on a hand-wound clock, and commands that run on it in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from layby.engine import LLM, Engine, EngineConfig
from layby.engine.toy import ByteTokenizer, ToyChatTemplate
from layby.execution import FakeExecutor
from layby.execution.executor import StepResult
from layby.scheduling import Scheduler, SchedulerConfig
from layby.scheduling.plan import StepPlan
from layby.scheduling.request import Sequence

CONTEXT_TOKENS = 512

STEP_S = 0.5
"""What every step takes, on the clock of the toy."""


def spell(text: str) -> Callable[[Sequence], int | None]:
    """A script: every answer is ``text``, and then ends where it may."""
    letters = [*text.encode(), ByteTokenizer.EOS]

    def token(sequence: Sequence) -> int:
        place = sequence.num_output_tokens
        return letters[min(place, len(letters) - 1)]

    return token


class Toy:
    """Stands in for the class LLM, and keeps what it was called with.

    Attributes:
        options: Those of the last LLM that was made.
        llm: That LLM.
        script: As of FakeExecutor; set it before a command runs.
        before_step: Called before each step with its number, from 1.
        prompts: The prompt text of every request, in order of arrival.
    """

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.llm: LLM | None = None
        self.script: Any = None
        self.before_step: Callable[[int], None] = lambda step: None
        self.prompts: list[str] = []
        self.now_s = 0.0

    def __call__(self, model: str = "smollm2", **options: Any) -> LLM:
        self.options = {"model": model, **options}
        config = EngineConfig.from_options(**self.options)
        scheduler_config = SchedulerConfig(
            num_blocks=config.num_blocks or 512,
            num_swap_blocks=512,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=CONTEXT_TOKENS,
            preemption_mode=config.preemption_mode,
            max_queue=config.max_queue,
        )
        scheduler = Scheduler(scheduler_config, clock=lambda: self.now_s)
        engine = Engine(
            scheduler,
            _Clockwork(self, config.block_size),
            ByteTokenizer(),
            ToyChatTemplate(),
            model_name="toy",
            max_model_len=CONTEXT_TOKENS,
            seed=config.seed,
            clock=lambda: self.now_s,
        )
        self.llm = LLM.from_engine(engine)
        return self.llm


class _Clockwork:
    """FakeExecutor that winds the clock on with every step."""

    def __init__(self, toy: Toy, block_size: int) -> None:
        self._toy = toy
        self._fake = FakeExecutor(block_size=block_size, script=toy.script)
        self._seen: set[str] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        self._toy.before_step(self._fake.steps + 1)
        for item in plan.scheduled:
            request = item.sequence.request
            if request.request_id not in self._seen:
                self._seen.add(request.request_id)
                tokens = item.sequence.tokens[: request.num_prompt_tokens]
                self._toy.prompts.append(bytes(tokens).decode(errors="replace"))
        result = self._fake.execute(plan)
        self._toy.now_s += STEP_S
        return result

    def release(self, request_id: str) -> None:
        self._fake.release(request_id)

    def close(self) -> None:
        self._fake.close()
