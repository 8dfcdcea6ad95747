"""Choosing tokens: one pass over the logits of a whole batch.

The order of operations, per row of logits:

1. Log-probabilities, where asked for, are taken from the model's raw distribution, before anything
   below (as OpenAI and vLLM report them).
2. Repetition penalty (Keskar et al. 2019), then frequency and presence penalties, then
   ``logit_bias``; then, while a sequence has fewer than ``min_tokens`` output tokens, the tokens
   that would end it are ruled out.
3. Temperature. Below ``GREEDY_BELOW`` the most likely token is taken.
4. min-p, then top-k, then top-p on what top-k left, as vLLM has it.
5. One uniform number, a pure function of (seed, sequence index, token position), is looked up in
   the cumulative distribution.

Equal logits rank by token id, the smaller first. A row's result depends on nothing but that row:
sums have a fixed order, and which shortcut is taken is decided row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from layby import kernels
from layby.execution import reference_sampling
from layby.execution.executor import PositionLogprobs, TokenLogprob
from layby.execution.philox import uniforms
from layby.execution.reference_sampling import GREEDY_BELOW, Draws, select_rows, top_tokens
from layby.sampling_params import SamplingParams
from layby.scheduling.request import Sequence


@dataclass(slots=True)
class Samples:
    """What was chosen for the rows of a batch.

    Attributes:
        tokens: One token id per row; 0 for a row that failed.
        logprobs: One entry per row, None where not asked for; empty if nobody asked.
        failures: Request id → message.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


class Sampler:
    """Samples whole batches; remembers only token counts, for sequences with penalties."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[int, _TokenCounts]] = {}

    @torch.inference_mode()
    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> Samples:
        """Choose the next token of each sequence.

        Args:
            logits: ``[R, vocab]`` float32, one row per sequence. Overwritten.
            sequences: ``payload`` of their requests is a ``SamplingParams`` whose seed is set, or
                None for greedy. The new token's position is ``len(sequence.tokens)``.
        """
        if not sequences:
            return Samples([])
        params = [sampling_params(sequence) for sequence in sequences]
        wants = [p.logprobs for p in params]
        reported = [row for row, count in enumerate(wants) if count is not None]
        adjusted = [
            row for row, (s, p) in enumerate(zip(sequences, params, strict=True)) if _adjusts(s, p)
        ]
        # Only rows that something is done with need a look beforehand.
        looked_at = sorted({*reported, *adjusted})
        failed = dict.fromkeys(_take_out_faulty(logits, looked_at), _NOT_FINITE)
        raw = log_probabilities(select_rows(logits, reported)) if reported else None
        self._adjust(logits, adjusted, sequences, params)
        tokens, faulty = _choose(logits, _draws(sequences, params, logits.shape[1]))
        for row in faulty:
            failed[row] = _NONE_LEFT if row in looked_at else _NOT_FINITE
        for row in failed:
            tokens[row] = 0
        result = Samples(
            tokens,
            failures={
                sequences[row].request.request_id: f"no token could be chosen: {why}"
                for row, why in failed.items()
            },
        )
        if raw is not None:
            result.logprobs = [None] * len(sequences)
            counts = [wants[row] or 0 for row in reported]
            reports = describe(raw, [tokens[row] for row in reported], counts)
            for row, report in zip(reported, reports, strict=True):
                result.logprobs[row] = report
        return result

    def release(self, request_id: str) -> None:
        """Forget a request's token counts."""
        self._counts.pop(request_id, None)

    def _adjust(
        self,
        logits: Tensor,
        rows: list[int],
        sequences: Seq[Sequence],
        params: Seq[SamplingParams],
    ) -> None:
        """Apply penalties, biases and ``min_tokens`` to some rows in place."""
        seen = _Cells(logits)
        biased = _Cells(logits)
        ruled_out = _Cells(logits)
        for row in rows:
            sequence, p = sequences[row], params[row]
            if _penalises(p):
                ids, counts = self._count(sequence)
                minus = counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
                seen.add(row, ids, np.full(len(ids), p.repetition_penalty), minus)
            if p.logit_bias:
                biases = np.fromiter(p.logit_bias.values(), np.float64)
                biased.add(row, np.fromiter(p.logit_bias, np.int64), biases)
            if _rules_out(sequence):
                ruled_out.add(row, np.fromiter(sequence.request.stop_token_ids, np.int64))
        seen.update(lambda x, penalty, minus: torch.where(x > 0, x / penalty, x * penalty) - minus)
        biased.update(lambda x, bias: x + bias)
        ruled_out.update(lambda x: torch.full_like(x, -math.inf))

    def _count(self, sequence: Sequence) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        of_request = self._counts.setdefault(sequence.request.request_id, {})
        counts = of_request.get(sequence.index)
        if counts is None or counts.sequence is not sequence:
            counts = of_request[sequence.index] = _TokenCounts(sequence)
        return counts.up_to_date()


def sampling_params(sequence: Sequence) -> SamplingParams:
    """The parameters that a sequence's request carries; greedy if it carries none.

    Raises:
        TypeError: The payload is something else.
    """
    payload = sequence.request.payload
    if payload is None:
        return _GREEDY
    if not isinstance(payload, SamplingParams):
        raise TypeError(f"payload of {sequence.request!r} is {type(payload).__name__}")
    return payload


_GREEDY = SamplingParams(temperature=0.0, max_tokens=None)

_ALIGNED_LOGITS = 4
"""Rows of so many float32 begin where a GPU's widest loads do."""

_NOT_FINITE = "its scores are not finite"
_NONE_LEFT = "its parameters rule out every token"


def _penalises(p: SamplingParams) -> bool:
    return bool(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty)


def _rules_out(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.request.min_tokens


def _adjusts(sequence: Sequence, p: SamplingParams) -> bool:
    """Whether a sequence's parameters change its logits."""
    return _penalises(p) or bool(p.logit_bias) or _rules_out(sequence)


def _draws(sequences: Seq[Sequence], params: Seq[SamplingParams], vocab: int) -> Draws:
    temperature = np.array([p.temperature for p in params], np.float32)
    if (temperature < GREEDY_BELOW).all():
        numbers = np.zeros(len(params))
    else:
        numbers = uniforms(
            [p.seed or 0 for p in params],
            [sequence.index for sequence in sequences],
            [len(sequence.tokens) for sequence in sequences],
        )
    return Draws(
        temperature,
        np.array([min(p.top_k, vocab) for p in params], np.int64),
        np.array([p.top_p for p in params], np.float64),
        np.array([p.min_p for p in params], np.float32),
        numbers,
    )


class _TokenCounts:
    """Which tokens one sequence holds, and how often each was generated; grows with it.

    What counts as generated is decided by ``num_prompt_tokens``, so being recomputed after a
    preemption changes nothing.
    """

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._ids = np.unique(np.array(sequence.tokens[: sequence.num_prompt_tokens], np.int64))
        self._counts = np.zeros(len(self._ids), np.int64)
        self._place = {token: place for place, token in enumerate(self._ids.tolist())}
        self._done = sequence.num_prompt_tokens

    def up_to_date(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct token ids, and how often each is in the output; ``[distinct]`` both."""
        for token in self.sequence.tokens[self._done :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._grow()
            self._ids[place] = token
            self._counts[place] += 1
        self._done = len(self.sequence.tokens)
        used = len(self._place)
        return self._ids[:used], self._counts[:used]

    def _grow(self) -> None:
        room = np.zeros(max(16, len(self._ids)), np.int64)
        self._ids = np.concatenate([self._ids, room])
        self._counts = np.concatenate([self._counts, room])


class _Cells:
    """Single cells of the logits, collected row by row and then updated all at once."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._parts: list[tuple[npt.NDArray[np.generic], ...]] = []

    def add(self, row: int, ids: npt.NDArray[np.int64], *values: npt.NDArray[np.generic]) -> None:
        """Collect the cells ``(row, id)``, each once, with what the update needs for each."""
        # Ids beyond the vocabulary cannot be chosen anyway.
        known = (ids >= 0) & (ids < self._logits.shape[1])
        cells = row * self._logits.shape[1] + ids
        self._parts.append(tuple(column[known] for column in (cells, *values)))

    def update(self, change: Callable[..., Tensor]) -> None:
        """Set each cell to ``change(old, *values)``."""
        if not self._parts:
            return
        device = self._logits.device
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        cells = torch.from_numpy(columns[0]).to(device)
        values = [torch.from_numpy(column).to(device, torch.float32) for column in columns[1:]]
        flat = self._logits.view(-1)
        flat[cells] = change(flat[cells], *values)


def _take_out_faulty(logits: Tensor, rows: list[int]) -> list[int]:
    """Find those of the rows that no token can be chosen from, and make them zero.

    The maximum of a row is finite unless a logit is NaN or +inf, or all are -inf.
    """
    if not rows:
        return []
    fine = torch.isfinite(select_rows(logits, rows).amax(-1)).tolist()
    faulty = [row for row, row_fine in zip(rows, fine, strict=True) if not row_fine]
    if faulty:
        logits[faulty] = 0.0
    return faulty


def _choose(logits: Tensor, draws: Draws) -> tuple[list[int], list[int]]:
    """``reference_sampling.choose``, by the compiled kernel where there is one for these logits."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or not kernels.available():
        return reference_sampling.choose(logits, draws)
    tokens, faulty = np.empty(len(logits), np.int64), np.empty(len(logits), np.bool_)
    kernels.choose_tokens(
        logits.contiguous().numpy(),
        draws.temperature,
        draws.top_k,
        draws.top_p,
        draws.min_p,
        draws.numbers,
        tokens,
        faulty,
    )
    return tokens.tolist(), faulty.nonzero()[0].tolist()


def log_probabilities(logits: Tensor) -> Tensor:
    """Of each row of ``logits [R, vocab]``."""
    vocab = logits.shape[1]
    if logits.device.type == "cpu" or vocab % _ALIGNED_LOGITS == 0:
        return torch.log_softmax(logits, -1)
    # A GPU adds up a row by where it begins in memory, so let all begin alike.
    missing = -vocab % _ALIGNED_LOGITS
    return torch.log_softmax(F.pad(logits, (0, missing), value=-math.inf), -1)[:, :vocab]


@torch.inference_mode()
def describe(logprobs: Tensor, chosen: Seq[int], counts: Seq[int]) -> list[PositionLogprobs]:
    """Report on each row of log-probabilities ``[R, vocab]``.

    Args:
        logprobs: The model's own.
        chosen: The token to report on, per row.
        counts: How many of the likeliest tokens to list, per row.
    """
    vocab = logprobs.shape[1]
    token = torch.tensor(chosen, device=logprobs.device).unsqueeze(1)
    value = logprobs.gather(1, token)
    earlier = torch.arange(vocab, device=logprobs.device) < token
    rank = ((logprobs > value) | ((logprobs == value) & earlier)).sum(-1) + 1
    best, ids = top_tokens(logprobs, min(max(counts), vocab)) if max(counts) else (value, token)
    columns = (value.squeeze(1).tolist(), rank.tolist(), best.tolist(), ids.tolist())
    return [
        PositionLogprobs(
            chosen=TokenLogprob(token_id, own, own_rank),
            top=tuple(
                TokenLogprob(other, logprob, place)
                for place, (logprob, other) in enumerate(
                    zip(row_best[:count], row_ids[:count], strict=True), start=1
                )
            ),
        )
        for token_id, count, own, own_rank, row_best, row_ids in zip(
            chosen, counts, *columns, strict=True
        )
    ]
