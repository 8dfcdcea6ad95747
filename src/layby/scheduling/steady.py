"""Sequences about which nothing needs deciding: they decode within the block they have."""

from __future__ import annotations

from layby.scheduling.plan import ScheduledSequence
from layby.scheduling.request import Request


class SteadyDecodes:
    """Requests of one sequence that decode a token per step and need no block for a while.

    How long that lasts is known beforehand, so a step costs by what changes and not by how many
    run: a request is looked at again in the step for which it was booked.

    Each is planned once. The same ``ScheduledSequence`` serves step after step, its ``start``
    moving on with every update.
    """

    __slots__ = ("_booked", "_turns", "_until")

    def __init__(self) -> None:
        self._turns: dict[Request, ScheduledSequence] = {}
        self._until: dict[Request, int] = {}
        self._booked: dict[int, list[Request]] = {}  # step → requests, of which some may have left

    def add(self, request: Request, *, until_step: int) -> None:
        """Leave the request alone until the step of that number."""
        seq = request.sequences[0]
        self._turns[request] = ScheduledSequence(seq, seq.num_computed, 1, (seq,))
        self.renew(request, until_step=until_step)

    def discard(self, request: Request) -> bool:
        """Forget the request (it ended or is preempted); False if it was not here."""
        self._until.pop(request, None)
        return self._turns.pop(request, None) is not None

    def due(self, step: int) -> list[Request]:
        """The requests that were booked for this step. They stay until they are renewed or
        discarded."""
        booked = dict.fromkeys(self._booked.pop(step, ()))  # who left and came back stands twice
        return [request for request in booked if self._until.get(request) == step]

    def renew(self, request: Request, *, until_step: int) -> None:
        """Book the request again: it goes on as before."""
        self._until[request] = until_step
        self._booked.setdefault(until_step, []).append(request)

    def steps_with(self, num_blocks: int, *, after_step: int, most: int) -> int:
        """How many steps, at most ``most``, can follow until more blocks than these are needed.

        ``most`` is no more than a block has slots, so that nobody is due twice.
        """
        for steps in range(most):
            step = after_step + 1 + steps
            num_blocks -= sum(self._until.get(r) == step for r in self._booked.get(step, ()))
            if num_blocks < 0:
                return steps
        return most

    def forget_bookings(self, steps: range) -> None:
        """Drop what was booked for steps that were not taken one by one."""
        for step in steps:
            self._booked.pop(step, None)

    def turns(self) -> list[ScheduledSequence]:
        """Everybody's share of the next step."""
        return list(self._turns.values())

    def __contains__(self, request: Request) -> bool:
        return request in self._turns

    def __len__(self) -> int:
        return len(self._turns)
