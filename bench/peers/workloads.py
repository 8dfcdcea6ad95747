"""What every engine is asked to do, and the prompts to do it with."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal

SEED = 0

SLACK = 1.5
"""An ample pool holds this many times what the workload can ever fill."""

_SMALLEST_POOL_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape, all there from the beginning.

    Attributes:
        name: For the command line and the table.
        num_prompts, input_len, output_len: Requests, and tokens of each.
        pool: KV pool that holds everything, or a quarter of the tokens that all requests have
            at their ends.
        measures: ``job``: the time of the job, on a warm engine. ``start``: from the start of
            the process to the end of the job.
    """

    name: str
    num_prompts: int
    input_len: int
    output_len: int
    pool: Literal["ample", "quarter"] = "ample"
    measures: Literal["job", "start"] = "job"

    @property
    def total_len(self) -> int:
        """Tokens of one request at its end."""
        return self.input_len + self.output_len

    @property
    def output_tokens(self) -> int:
        """Tokens that the job generates."""
        return self.num_prompts * self.output_len

    @property
    def kv_tokens(self) -> int:
        """Size of the pool."""
        demand = self.num_prompts * self.total_len
        if self.pool == "quarter":
            return max(demand // 4, self.total_len)
        return max(int(demand * SLACK), _SMALLEST_POOL_TOKENS)

    def prompts(self, tokens: list[int]) -> list[list[int]]:
        """Prompts drawn from these tokens, the same at every call."""
        drawn = random.Random(f"{SEED} {self.name}")
        return [drawn.choices(tokens, k=self.input_len) for _ in range(self.num_prompts)]


WORKLOADS = (
    Workload("decode-heavy", 64, 200, 300),
    Workload("prefill-heavy", 64, 1000, 32),
    Workload("single-stream", 1, 16, 128),
    Workload("decode-heavy-quarter", 64, 200, 300, pool="quarter"),
    Workload("prefill-heavy-quarter", 64, 1000, 32, pool="quarter"),
    Workload("start", 1, 16, 1, measures="start"),
)


def quick(workload: Workload) -> Workload:
    """The same workload for a check of the tool: seconds, and figures that mean nothing."""
    return replace(
        workload,
        num_prompts=min(workload.num_prompts, 8),
        input_len=min(workload.input_len, max(16, workload.input_len // 5)),
        output_len=min(workload.output_len, max(8, workload.output_len // 5)),
    )
