"""Choosing one token per row of logits with torch's own operations.

For devices and installations that lack the compiled kernel (``kernels.choose_tokens``), which does
the same in a fraction of the time and is tested against this. The two can differ where a draw falls
within rounding of the border between two tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""

_CANDIDATES = 256
"""Top-k and top-p look at this many of the likeliest tokens before they sort all of them."""

_UNITS = 2.0**44
"""Probabilities are summed as whole numbers of these parts of the largest one: such a sum is the
same in whatever order a device adds it up, and for a vocabulary below 2**19 it cannot overflow."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How the token of each row is to be chosen; ``[R]`` all.

    Attributes:
        temperature: float32; greedy below ``GREEDY_BELOW``.
        top_k: int64; 0, less, or the whole vocabulary is off.
        top_p: float64; 1 is off.
        min_p: float32; 0 is off.
        numbers: float64 in [0, 1), looked up in the cumulative distribution.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]
    numbers: npt.NDArray[np.float64]

    def of(self, rows: list[int]) -> Draws:
        """Those of some rows."""
        return Draws(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.numbers[rows],
        )


@torch.inference_mode()
def choose(logits: Tensor, draws: Draws) -> tuple[list[int], list[int]]:
    """Choose one token per row of logits ``[R, vocab]``.

    Returns:
        The tokens, and the rows that have none to choose (NaN or +inf in them, or -inf alone); the
        token of these is 0.
    """
    fine = torch.isfinite(logits.amax(-1)).tolist()
    vocab = logits.shape[1]
    faulty: list[int] = []
    greedy: list[int] = []
    whole: list[int] = []
    cut: list[int] = []
    is_greedy = draws.temperature < GREEDY_BELOW
    is_cut = (draws.top_p < 1) | ((draws.top_k > 0) & (draws.top_k < vocab))
    for row, row_fine in enumerate(fine):
        if not row_fine:
            faulty.append(row)
        elif is_greedy[row]:
            greedy.append(row)
        else:
            (cut if is_cut[row] else whole).append(row)
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = select_rows(logits, greedy).argmax(-1)
    if whole:
        rows = draws.of(whole)
        weights = _weights(select_rows(logits, whole), rows)
        tokens[whole] = _draw(weights, _column(rows.numbers, weights))
    if cut:
        tokens[cut] = _draw_cut(select_rows(logits, cut), draws.of(cut))
    return [int(token) for token in tokens.tolist()], faulty


def select_rows(values: Tensor, rows: list[int]) -> Tensor:
    """Those rows of ``values [R, n]``, in rising order; itself if they are all."""
    return values if len(rows) == len(values) else values[rows]


def _weights(logits: Tensor, draws: Draws) -> Tensor:
    """Unnormalised probabilities after temperature and min-p: ``[R, vocab]`` int64, in ``_UNITS``;
    the largest is one."""
    temperature = _column(draws.temperature, logits)
    scaled = (logits - logits.amax(-1, keepdim=True)).div_(temperature).exp_()
    if (draws.min_p > 0).any():
        scaled.masked_fill_(scaled < _column(draws.min_p, logits), 0.0)
    return scaled.mul_(_UNITS).round_().long()


def _column(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device).unsqueeze(1)


def _draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Places ``[R]`` where the cumulative distribution of ``weights [R, n]`` passes
    ``numbers [R, 1]``.

    Never a place of weight zero, even if the number times the sum of all is, for rounding, the sum.
    """
    sums = weights.cumsum(-1)
    total = sums[:, -1:]
    target = (numbers * total).long().minimum(total - 1)
    return torch.searchsorted(sums, target, right=True).squeeze(1)


def _draw_cut(logits: Tensor, draws: Draws) -> Tensor:
    """Draw from what top-k and top-p leave, in order of rank: ``[R]``.

    Few tokens hold most of the mass as a rule, so only ``_CANDIDATES`` of them are ranked. A row
    whose cut lies beyond those is looked at again, 16 times as wide each time.
    """
    vocab = logits.shape[1]
    weights = _weights(logits, draws)
    total = weights.sum(-1, keepdim=True)
    number, top_p = _column(draws.numbers, logits), _column(draws.top_p, logits)
    kept = np.where((draws.top_k > 0) & (draws.top_k < vocab), draws.top_k, vocab)
    top_k = _column(kept, logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    rows = torch.arange(len(logits), device=logits.device)
    width = min(_CANDIDATES, vocab)
    while len(rows):
        _, ids = top_tokens(logits[rows], width)
        ranked = weights[rows].gather(1, ids)
        ranks = torch.arange(width, device=logits.device)
        ranked.masked_fill_(ranks >= top_k[rows], 0)
        sums = ranked.cumsum(-1)
        # After top-k, top-p counts against what top-k left.
        mass = torch.where(top_k[rows] < vocab, sums[:, -1:], total[rows])
        reached = (top_k[rows] == vocab) & (sums[:, -1:] >= top_p[rows] * mass)
        settled = (reached | (top_k[rows] <= width)).squeeze(1)
        # A token stays if those before it fall short of top_p; so the first always does.
        ranked.masked_fill_(sums - ranked >= top_p[rows] * mass, 0)
        place = _draw(ranked, number[rows])
        chosen = ids.gather(1, place.unsqueeze(1)).squeeze(1)
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
