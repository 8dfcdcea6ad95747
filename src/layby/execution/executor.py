"""The one seam between decisions and computation: an executor runs a step plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from layby.scheduling.kept import Tier
from layby.scheduling.plan import StepPlan, TransferEnd


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its log-probability (natural logarithm) under the model.

    ``rank`` is 1 for the most likely token.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """What the model thought at one position: the chosen token and the best alternatives."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(slots=True)
class StepResult:
    """What one step produced.

    Attributes:
        tokens: One sampled token id for every sampler of the plan, in plan order
            (``for item in plan.scheduled: for seq in item.samplers``).
        logprobs: Aligned with ``tokens``; None where the request did not ask. Empty if nobody did.
        prompt_logprobs: Request id → positions computed in this step, as
            ``(position of the token, logprobs)`` pairs; position 0 has no prediction.
        failures: Request id → message, for requests that failed alone in this step. Their entries
            in ``tokens`` are placeholders.
        transfer_ends: Transfers between RAM and disk, of this step's plan or of earlier ones, whose
            end has not been reported before.
        moved_s: Seconds that the block moves between the pools took; 0 if it is not known.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    prompt_logprobs: dict[str, list[tuple[int, PositionLogprobs]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    transfer_ends: list[TransferEnd] = field(default_factory=list)
    moved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What the blocks of an executor look like outside their pools.

    Attributes:
        name: Executors of one name understand each other's blocks.
        num_bytes: Of a block.
    """

    name: str
    num_bytes: int


class Executor(Protocol):
    """Runs step plans. The torch executor runs a model; others imitate one."""

    @property
    def block_format(self) -> BlockFormat:
        """How blocks are exported."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the plan's block moves in order, then its forward pass, and sample.

        If the device pool changes its size, it grows before the moves or shrinks after them.
        Transfers between RAM and disk are begun after the moves; the step does not wait for them.
        Given a plan that computes nothing while some are under way, it may wait a moment for one.

        Raises:
            Exception: The step failed as a whole; nothing of it may be used.
        """
        ...

    def export_blocks(self, tier: Tier, blocks: Sequence[int]) -> memoryview:
        """A copy of what blocks of a pool hold, one after the other; between two steps.

        Raises:
            OSError, BlockFaultError: The disk does not give them as they were written.
        """
        ...

    def import_blocks(self, tier: Tier, blocks: Sequence[int], content: memoryview) -> None:
        """Fill blocks in RAM or on disk with what was exported; between two steps.

        Raises:
            OSError, BlockFaultError: The disk does not take them.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forget what is kept for a request that has ended. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free the pools."""
        ...
