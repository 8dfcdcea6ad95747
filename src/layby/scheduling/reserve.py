"""What more urgent classes came to need lately, so that less urgent work leaves them the room.

Work that is resumed between two bursts of urgent requests only to be parked again while the next
urgent request waits has gained nothing. So the scheduler remembers, for a while, how many blocks
the urgent classes held at most; of these, what they do not hold now is kept free of less urgent
newcomers.

Room is kept for those who could park the newcomer. So a need is noted by claim and asked for by
rank: nobody keeps room for those of its own class who have waited longer, and who has risen enough
keeps none at all.
"""

from __future__ import annotations

import math
from collections import deque


class UrgentRoom:
    """Peaks of the blocks held by each claim and those more urgent, over a sliding window.

    Costs O(1) per note, amortised, and O(classes seen lately) per question.

    Args:
        window_s: Seconds for which a peak is remembered; 0: nothing is.
    """

    __slots__ = ("_peaks", "window_s")

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        # Claim → (when it is forgotten, blocks), blocks falling: the first is the peak, and the
        # last is the youngest note.
        self._peaks: dict[int, deque[tuple[float, int]]] = {}

    def note(self, claim: int, now: float, held_blocks: int) -> None:
        """A request of this claim came or ends; so much is held by it and all more urgent ones."""
        notes = self._peaks.setdefault(claim, deque())
        while notes and notes[-1][1] <= held_blocks:
            notes.pop()
        notes.append((now + self.window_s, held_blocks))

    def seen(self, rank: int, now: float) -> bool:
        """Whether a claim more urgent than this rank came or ended within the window."""
        return any(
            own < rank and notes[-1][0] > now for own, notes in self._peaks.items()
        )  # fmt: skip

    def peak(self, rank: int, now: float) -> int:
        """Most blocks that claims more urgent than this rank held at a time, as far as is
        remembered."""
        self._forget_old(now)
        return max((notes[0][1] for own, notes in self._peaks.items() if own < rank), default=0)

    def changes_at(self, now: float) -> float:
        """When the next peak is forgotten: answers may change then by themselves; else infinity."""
        self._forget_old(now)
        return min((notes[0][0] for notes in self._peaks.values()), default=math.inf)

    def forget(self) -> None:
        """Start again."""
        self._peaks.clear()

    def _forget_old(self, now: float) -> None:
        for rank, notes in list(self._peaks.items()):
            while notes and notes[0][0] <= now:
                notes.popleft()
            if not notes:
                del self._peaks[rank]
