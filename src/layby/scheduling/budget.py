"""What one step may spend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulingBudget:
    """Tokens one step may compute and sequences it may hold; everything scheduled pays here.

    Attributes:
        token_budget: Most tokens the step may compute.
        max_num_seqs: Most sequences that may be on the device.
        curr_tokens: Tokens spent so far.
        curr_seqs: Sequences held so far.
    """

    token_budget: int
    max_num_seqs: int
    curr_tokens: int = 0
    curr_seqs: int = 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens that can still be spent."""
        return self.token_budget - self.curr_tokens

    @property
    def remaining_seqs(self) -> int:
        """Sequences that can still be taken in."""
        return self.max_num_seqs - self.curr_seqs

    def can_schedule(self, *, num_tokens: int, num_seqs: int) -> bool:
        """Whether both amounts are still there."""
        return num_tokens <= self.remaining_tokens and num_seqs <= self.remaining_seqs

    def add(self, *, num_tokens: int, num_seqs: int) -> None:
        """Spend both amounts.

        Raises:
            ValueError: One of them is not there; the budget is unchanged.
        """
        if not self.can_schedule(num_tokens=num_tokens, num_seqs=num_seqs):
            raise ValueError(
                f"{num_tokens} tokens and {num_seqs} sequences asked of a budget with "
                f"{self.remaining_tokens} tokens and {self.remaining_seqs} sequences left"
            )
        self.curr_tokens += num_tokens
        self.curr_seqs += num_seqs

    def give_back(self, *, num_tokens: int, num_seqs: int) -> None:
        """Undo an earlier ``add``: what a victim had been promised goes back."""
        self.curr_tokens -= num_tokens
        self.curr_seqs -= num_seqs
