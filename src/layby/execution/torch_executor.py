"""The executor that runs a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from layby.errors import ConfigError
from layby.execution.batch import BatchBuilder, StepBatch
from layby.execution.disk_tier import DiskTier
from layby.execution.executor import BlockFormat, PositionLogprobs, StepResult
from layby.execution.faults import Faults
from layby.execution.kv_cache import KVCache
from layby.execution.sampler import Sampler, describe, log_probabilities, sampling_params
from layby.execution.stopwatch import Stopwatch
from layby.models.network import Network
from layby.scheduling.kept import Tier
from layby.scheduling.plan import StepPlan
from layby.scheduling.request import Request

_PROMPT_ROWS = 128
"""Rows of prompt log-probabilities at once: bounds the memory for ``[rows, vocab]``."""

_DISK_PATIENCE_S = 0.01
"""How long a step that computes nothing waits for the disk."""


class TorchExecutor:
    """Runs step plans on a model, on the model's device and in its number format.

    On a GPU moves between the pools overlap the forward passes: what leaves is copied to the host
    beside this step's, and what comes back next (``StepPlan.next_in``) is copied from it beside the
    passes before.

    Args:
        model: The network.
        block_size: Tokens per KV block.
        num_blocks, num_swap_blocks: Sizes of the two pools; the swap pool may be empty.
        num_disk_blocks: Blocks on disk, below the swap pool.
        swap_dir: Where the file of these is made; needed if there are any.
        faults: Faults to inject into reading and writing it.

    Raises:
        ConfigError: A pool is larger than the memory, or the disk, there is.
    """

    def __init__(
        self,
        model: Network,
        *,
        block_size: int,
        num_blocks: int,
        num_swap_blocks: int,
        num_disk_blocks: int = 0,
        swap_dir: str | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = KVCache(
            model.kv_format(block_size),
            num_blocks=num_blocks,
            num_swap_blocks=num_swap_blocks,
            device=model.device,
        )
        self._disk: DiskTier | None = None
        if num_disk_blocks:
            if swap_dir is None:
                raise ConfigError(f"num_disk_blocks is {num_disk_blocks}, but swap_dir is not set")
            self._disk = DiskTier(swap_dir, self.cache.swap_pool, num_disk_blocks, faults)
        self._batches = BatchBuilder(block_size)
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """See ``Executor``."""
        stopwatch = self._move(plan)
        if self._disk is not None and (plan.demote or plan.promote):
            self.cache.overwritten(move.dst for read in plan.promote for move in read.moves)
            self._disk.begin(plan.demote, plan.promote, self.cache.fence())
        if plan.next_in is not None and self.cache.copies_ahead:
            self.cache.prefetch(_swap_blocks(plan.next_in))
        num_samples = sum(len(item.samplers) for item in plan.scheduled)
        result = StepResult([0] * num_samples, failures=self._unreadable(plan))
        batch = self._batches.build(plan, without=frozenset(result.failures))
        if batch.items:
            hidden = self.model.forward(batch.flat, self.cache.pool)
            self._report_prompts(batch, hidden, result)
            self._sample(batch, hidden, result)
        if plan.swap_out or plan.swap_in:
            result.moved_s = stopwatch.seconds()  # on a GPU not known before
        if self._disk is not None:
            wait_s = 0.0 if plan.scheduled else _DISK_PATIENCE_S
            result.transfer_ends = self._disk.ends(wait_s=wait_s)
        return result

    @property
    def block_format(self) -> BlockFormat:
        """See ``Executor``."""
        kv_format = self.model.kv_format(self.block_size)
        name = f"{self.model.name} {kv_format.dtype} {list(kv_format.shape)}"
        return BlockFormat(name, kv_format.block_bytes)

    def export_blocks(self, tier: Tier, blocks: Sequence[int]) -> memoryview:
        """See ``Executor``."""
        if tier is Tier.DISK:
            assert self._disk is not None  # else nothing could lie there
            return self._disk.export_blocks(blocks)
        return self.cache.export_blocks(blocks, parked=tier is Tier.RAM)

    def import_blocks(self, tier: Tier, blocks: Sequence[int], content: memoryview) -> None:
        """See ``Executor``."""
        if tier is Tier.RAM:
            self.cache.import_parked(blocks, content)
        else:
            assert tier is Tier.DISK
            assert self._disk is not None
            self._disk.import_blocks(blocks, content)

    def release(self, request_id: str) -> None:
        """See ``Executor``."""
        self._sampler.release(request_id)

    def close(self) -> None:
        """See ``Executor``. The executor must not be used afterwards."""
        if self._disk is not None:
            self._disk.close()
        self.cache.synchronize()
        del self.cache

    def _move(self, plan: StepPlan) -> Stopwatch:
        """The plan's moves; the pool grows before and shrinks after them.

        Returns:
            What timed those between the pools.
        """
        cache, num_blocks = self.cache, plan.num_blocks
        stopwatch = Stopwatch(self.model.device)
        if num_blocks is not None and num_blocks > cache.num_blocks:
            cache.resize(num_blocks)
        if plan.swap_out:
            with stopwatch:
                cache.swap_out(plan.swap_out)
        cache.copy(plan.relocate)
        if plan.swap_in:
            with stopwatch:
                cache.swap_in(plan.swap_in)
        cache.copy(plan.copy)
        if num_blocks is not None and num_blocks < cache.num_blocks:
            cache.resize(num_blocks)
        return stopwatch

    def _unreadable(self, plan: StepPlan) -> dict[str, str]:
        """Requests with a token that the model does not have: they must not fail the batch.

        Who goes on decoding has a token that was sampled from the model.
        """
        vocab = self.model.config.vocab_size
        failures = {}
        for item in plan.scheduled[plan.num_steady :]:
            tokens = item.sequence.tokens[item.start : item.start + item.num_tokens]
            if min(tokens) < 0 or max(tokens) >= vocab:
                failures[item.sequence.request.request_id] = (
                    f"a token id is outside the model's vocabulary of {vocab} tokens"
                )
        return failures

    def _sample(self, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Sample every row that the plan wants sampled; fill in ``result``."""
        samplers, rows = batch.samplers, batch.sample_rows
        if not samplers:
            return
        if len(rows) == len(hidden) and (np.diff(rows) == 1).all():
            logits = self.model.logits(hidden)  # of every row, as when all decode
        else:
            # All samples of a prompt share one row: its logits are computed once.
            distinct, inverse = np.unique(rows, return_inverse=True)
            logits = self.model.logits(hidden[torch.from_numpy(distinct).to(hidden.device)])
            if len(distinct) < len(rows):
                logits = logits[torch.from_numpy(inverse).to(logits.device)]
        samples = self._sampler.sample(logits, samplers)
        result.failures |= samples.failures
        if samples.logprobs:
            result.logprobs = [None] * len(result.tokens)
        for index, place in enumerate(batch.sample_places.tolist()):
            result.tokens[place] = samples.tokens[index]
            if samples.logprobs:
                result.logprobs[place] = samples.logprobs[index]

    def _report_prompts(self, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Log-probabilities of prompt tokens, for the requests that ask.

        A prompt that is computed again after a preemption is reported again, with the same numbers.
        """
        for item, first in zip(batch.items, batch.flat.first_rows.tolist(), strict=True):
            sequence = item.sequence
            # The row at position p predicts the token at p + 1. Only the first sample reports.
            end = min(item.start + item.num_tokens, sequence.num_prompt_tokens - 1)
            if end <= item.start or sequence.index:
                continue
            count = sampling_params(sequence).prompt_logprobs
            if count is None:
                continue
            rows = hidden[first : first + end - item.start]
            chosen = sequence.tokens[item.start + 1 : end + 1]
            reports = self._prompt_logprobs(rows, chosen, count)
            result.prompt_logprobs[sequence.request.request_id] = list(
                enumerate(reports, start=item.start + 1)
            )

    def _prompt_logprobs(
        self, hidden: Tensor, chosen: list[int], count: int
    ) -> Iterator[PositionLogprobs]:
        for low in range(0, len(chosen), _PROMPT_ROWS):
            part = slice(low, low + _PROMPT_ROWS)
            logprobs = log_probabilities(self.model.logits(hidden[part]))
            tokens = chosen[part]
            yield from describe(logprobs, tokens, [count] * len(tokens))


def _swap_blocks(parked: Request) -> list[int]:
    """Where a parked request lies in the swap pool; its samples may share blocks."""
    tables = (sequence.swap_table for sequence in parked.live_sequences)
    return list(dict.fromkeys(chain.from_iterable(tables)))
