"""The offline benchmark: all requests at once, random prompts, answers of one fixed length."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from layby.bench.machine import describe_machine
from layby.errors import ConfigError, EngineUnavailableError
from layby.results import RequestTimes, RunResult
from layby.sampling_params import SamplingParams

if TYPE_CHECKING:
    from layby.engine import LLM, RequestOutput


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """What an offline benchmark asks of the engine.

    Attributes:
        num_prompts: Requests, all there from the beginning.
        input_len: Tokens of each prompt.
        output_len: Tokens of each sample; end-of-sequence tokens do not end it.
        n: Samples per prompt.
        temperature: 0 is greedy.
        seed: Fixes prompts and samples.

    Raises:
        ConfigError: A number is too small.
    """

    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 128
    n: int = 1
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "n"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def prompts(self, llm: LLM) -> list[list[int]]:
        """Token ids drawn from the model's vocabulary, special tokens left out."""
        drawn = random.Random(self.seed)
        size = min(llm.engine.vocab_size, llm.tokenizer.vocab_size)
        tokens = [token for token in range(size) if llm.tokenizer.token_bytes(token)]
        return [drawn.choices(tokens, k=self.input_len) for _ in range(self.num_prompts)]

    def params(self) -> list[SamplingParams]:
        """One for each prompt: equal but for their seeds."""
        return [
            SamplingParams(
                n=self.n,
                max_tokens=self.output_len,
                temperature=self.temperature,
                seed=self.seed + index,
                ignore_eos=True,
            )
            for index in range(self.num_prompts)
        ]


def run_offline(
    llm: LLM,
    load: OfflineLoad,
    *,
    settings: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> RunResult:
    """Run ``load`` on a fresh engine and sum up what happened.

    Args:
        llm: An LLM that has served nothing yet: its totals become the result's.
        load: What to run.
        settings: How the engine was made, to be told beside ``load`` in the result.
        progress: Show a progress bar on stderr. None: if that is a terminal.

    Raises:
        InvalidRequestError: The load does not fit the model's context or the KV cache.
        EngineUnavailableError: The engine failed; its error says why.
        LaybyError: A request failed by itself: its error.
    """
    outputs = llm.generate(load.prompts(llm), load.params(), progress=progress)
    stats = llm.stats()
    # What "auto" and the defaults came to on this machine.
    resolved: dict[str, Any] = {
        "num_blocks": stats.num_blocks,
        "num_swap_blocks": stats.num_swap_blocks,
        "max_model_len": llm.engine.max_model_len,
    }
    if llm.engine.device is not None and llm.engine.dtype is not None:
        resolved |= {"device": llm.engine.device, "dtype": llm.engine.dtype}
    return RunResult.of(
        [_times(output) for output in outputs],
        stats,
        settings={
            **(settings or {}),
            **asdict(load),
            **resolved,
        },
        machine=describe_machine(),
    )


def _times(output: RequestOutput) -> RequestTimes:
    if output.error is not None:
        raise output.error
    if output.finish_s is None:
        raise EngineUnavailableError(f"request {output.request_id} did not finish")
    return RequestTimes(
        output.arrival_s,
        output.finish_s,
        [sample.token_times_s for sample in output.outputs],
    )
