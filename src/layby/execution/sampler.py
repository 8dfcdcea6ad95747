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
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from layby.execution.executor import PositionLogprobs, TokenLogprob
from layby.execution.philox import uniforms
from layby.sampling_params import SamplingParams
from layby.scheduling.request import Sequence

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

_CANDIDATES = 256
"""Top-k and top-p look at this many of the likeliest tokens before they sort all of them."""

_SUM_BLOCK = 256
"""Probabilities are summed in blocks of this many, and the blocks' sums in order."""


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
        failures = _take_out_faulty(logits, sequences, "its scores are not finite")
        wants = [p.logprobs for p in params]
        rows = [row for row, count in enumerate(wants) if count is not None]
        raw = torch.log_softmax(logits[rows], -1) if rows else None
        self._adjust(logits, sequences, params)
        failures |= _take_out_faulty(logits, sequences, "its parameters rule out every token")
        tokens = _choose(logits, sequences, params)
        result = Samples(tokens, failures=failures)
        if raw is not None:
            result.logprobs = [None] * len(sequences)
            counts = [wants[row] or 0 for row in rows]
            reports = describe(raw, [tokens[row] for row in rows], counts)
            for row, report in zip(rows, reports, strict=True):
                result.logprobs[row] = report
        return result

    def release(self, request_id: str) -> None:
        """Forget a request's token counts."""
        self._counts.pop(request_id, None)

    def _adjust(
        self, logits: Tensor, sequences: Seq[Sequence], params: Seq[SamplingParams]
    ) -> None:
        """Apply penalties, biases and ``min_tokens`` in place."""
        seen = _Cells(logits)
        biased = _Cells(logits)
        ruled_out = _Cells(logits)
        for row, (sequence, p) in enumerate(zip(sequences, params, strict=True)):
            if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
                ids, counts = self._count(sequence)
                minus = counts * p.frequency_penalty + (counts > 0) * p.presence_penalty
                seen.add(row, ids, np.full(len(ids), p.repetition_penalty), minus)
            if p.logit_bias:
                biases = np.fromiter(p.logit_bias.values(), np.float64)
                biased.add(row, np.fromiter(p.logit_bias, np.int64), biases)
            if sequence.num_output_tokens < sequence.request.min_tokens:
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


def _take_out_faulty(logits: Tensor, sequences: Seq[Sequence], why: str) -> dict[str, str]:
    """Find the requests with a row that no token can be chosen from, and make such rows zero.

    The maximum of a row is finite unless a logit is NaN or +inf, or all are -inf.
    """
    fine = torch.isfinite(logits.amax(-1)).tolist()
    bad = [row for row, row_fine in enumerate(fine) if not row_fine]
    if bad:
        logits[bad] = 0.0
    return {sequences[row].request.request_id: f"no token could be chosen: {why}" for row in bad}


def _choose(logits: Tensor, sequences: Seq[Sequence], params: Seq[SamplingParams]) -> list[int]:
    """One token per row of adjusted logits ``[R, vocab]``."""
    vocab = logits.shape[1]
    greedy, whole, cut = [], [], []
    for row, p in enumerate(params):
        if p.temperature < GREEDY_BELOW:
            greedy.append(row)
        elif p.top_p < 1 or 0 < p.top_k < vocab:
            cut.append(row)
        else:
            whole.append(row)
    tokens = torch.zeros(len(params), dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = _rows(logits, greedy).argmax(-1)
    if whole or cut:
        numbers = uniforms(
            [p.seed or 0 for p in params],
            [sequence.index for sequence in sequences],
            [len(sequence.tokens) for sequence in sequences],
        )
        for rows, draw in ((whole, _draw), (cut, _draw_cut)):
            if rows:
                tokens[rows] = draw(
                    _rows(logits, rows), [params[row] for row in rows], numbers[rows]
                )
    return [int(token) for token in tokens.tolist()]


def _rows(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]


def _weights(logits: Tensor, params: Seq[SamplingParams]) -> Tensor:
    """Unnormalised probabilities after temperature and min-p: ``[R, vocab]``, the largest is 1.

    They are padded with zeros to whole blocks of ``_SUM_BLOCK``.
    """
    temperature = _column([p.temperature for p in params], logits)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature).exp_()
    if any(p.min_p > 0 for p in params):
        scaled.masked_fill_(scaled < _column([p.min_p for p in params], logits), 0.0)
    return F.pad(scaled, (0, -scaled.shape[1] % _SUM_BLOCK))


def _column(values: Iterable[float], like: Tensor) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float32, device=like.device).unsqueeze(1)


def _cumulative(weights: Tensor) -> Tensor:
    """Running sums of each block of weights ``[R, n]``: ``[R, blocks]`` float64.

    In two levels, because it is faster, and because torch would split the sum of one single row
    over its threads and so round it differently from the same row among others.
    """
    return weights.view(len(weights), -1, _SUM_BLOCK).sum(-1).double().cumsum(-1)


def _draw(logits: Tensor, params: Seq[SamplingParams], numbers: npt.NDArray[np.float64]) -> Tensor:
    """Invert the cumulative distribution over all tokens, in order of token id: ``[R]``."""
    weights = _weights(logits, params)
    sums = _cumulative(weights)
    target = torch.from_numpy(numbers).to(logits.device).unsqueeze(1) * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    blocks = weights.view(len(weights), -1, _SUM_BLOCK)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, _SUM_BLOCK)).squeeze(1)
    return (block * _SUM_BLOCK + _invert(inside, target - before)).squeeze(1)


def _invert(weights: Tensor, target: Tensor) -> Tensor:
    """First place where the running sum of ``weights [R, n]`` exceeds ``target [R, 1]``.

    Never a place of weight zero, even if the target, for rounding, is the sum of all.
    """
    sums = weights.double().cumsum(-1)
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.searchsorted(sums, target, right=True).minimum(last)


def _draw_cut(
    logits: Tensor, params: Seq[SamplingParams], numbers: npt.NDArray[np.float64]
) -> Tensor:
    """Draw from what top-k and top-p leave, in order of rank: ``[R]``.

    Few tokens hold most of the mass as a rule, so only ``_CANDIDATES`` of them are ranked. A row
    whose cut lies beyond those is looked at again, 16 times as wide each time.
    """
    vocab = logits.shape[1]
    weights = _weights(logits, params)
    total = _cumulative(weights)[:, -1:]
    number = torch.from_numpy(numbers).to(logits.device).unsqueeze(1)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else vocab for p in params])
    top_k = top_k.to(logits.device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64)
    top_p = top_p.to(logits.device).unsqueeze(1)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)
    width = min(_CANDIDATES, vocab)
    while len(rows):
        _, ids = top_tokens(logits[rows], width)
        ranked = weights[rows].gather(1, ids)
        ranks = torch.arange(width, device=logits.device)
        ranked.masked_fill_(ranks >= top_k[rows], 0.0)
        sums = ranked.double().cumsum(-1)
        # After top-k, top-p counts against what top-k left.
        mass = torch.where(top_k[rows] < vocab, sums[:, -1:], total[rows])
        reached = (top_k[rows] == vocab) & (sums[:, -1:] >= top_p[rows] * mass)
        settled = (reached | (top_k[rows] <= width)).squeeze(1)
        # A token stays if those before it fall short of top_p; so the first always does.
        ranked.masked_fill_(sums - ranked >= top_p[rows] * mass, 0.0)
        target = number[rows] * ranked.double().cumsum(-1)[:, -1:]
        chosen = ids.gather(1, _invert(ranked, target)).squeeze(1)
        tokens[rows[settled]] = chosen[settled]
        rows, width = rows[~settled], min(16 * width, vocab)
    return tokens


def top_tokens(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row ``[R, n]``, descending, equal ones by ascending index.

    Returns:
        Values and indices, ``[R, count]`` both.
    """
    if count >= values.shape[1]:
        best, ids = values.sort(dim=-1, descending=True, stable=True)
        return best, ids
    best, ids = values.topk(count)  # the order of equals, and which of them get in, is undefined
    ids, order = ids.sort(-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    edge = best[:, -1:]
    crowded = (values == edge).sum(-1) > (best == edge).sum(-1)
    if crowded.any():
        ids[crowded] = _lowest_ids(values[crowded], edge[crowded], count)
        best = values.gather(1, ids)
    return best, ids


def _lowest_ids(values: Tensor, edge: Tensor, count: int) -> Tensor:
    """Indices as ``top_tokens`` gives them, where more values equal the last one than get in."""
    above, level = values > edge, values == edge
    room = count - above.sum(-1, keepdim=True)
    chosen = above | (level & (level.cumsum(-1) <= room))
    ids = chosen.nonzero()[:, 1].view(len(values), count)
    order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


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
