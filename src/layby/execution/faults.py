"""Faults on purpose: what the disk might do to us, done when asked, for tests of what follows.

``LAYBY_FAULTS="disk.read=eio:0.1,disk.read=corrupt:0.01,disk.write=enospc:0.05,seed=1"`` lets one
read in ten fail, one in a hundred return other bytes than were written, and one write in twenty
find no room. ``state.read`` and ``state.write`` are the same for the KV cache that a state
directory keeps for the next process. Which, is drawn from ``seed`` (0 by default). Off by default.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

from layby.errors import ConfigError, shown

VARIABLE = "LAYBY_FAULTS"
"""The environment variable that asks for faults."""

KINDS = {
    "disk.read": ("eio", "short", "corrupt"),
    "disk.write": ("eio", "enospc", "short"),
    "state.read": ("eio", "short", "corrupt"),
    "state.write": ("eio", "enospc", "short"),
}
"""What can be made to happen to each operation."""


class Faults:
    """Draws faults.

    Args:
        rates: ``(operation, kind)`` → share of the operation's calls that it befalls, 0 to 1; those
            of one operation together are at most 1.
        seed: Of the draws.
    """

    def __init__(self, rates: Mapping[tuple[str, str], float], *, seed: int = 0) -> None:
        self._rates = dict(rates)
        self._random = random.Random(seed)

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Read what ``LAYBY_FAULTS`` may hold; empty text asks for none.

        Raises:
            ConfigError: It cannot be read; names the part at fault.
        """
        rates: dict[tuple[str, str], float] = {}
        seed = 0
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.partition("=")
            try:
                if name == "seed":
                    seed = int(value)
                    continue
                kind, _, share = value.partition(":")
                rate = float(share)
            except ValueError:
                raise ConfigError(
                    f"{VARIABLE}: {shown(part)} is not of the form disk.read=eio:0.1 or seed=1"
                ) from None
            if kind not in KINDS.get(name, ()):
                choices = ", ".join(f"{op}={kind}" for op, kinds in KINDS.items() for kind in kinds)
                raise ConfigError(f"{VARIABLE}: {shown(part)} is none of {choices}")
            if not 0 <= rate <= 1:
                raise ConfigError(f"{VARIABLE}: the share in {shown(part)} must be from 0 to 1")
            rates[name, kind] = rate
        for operation in KINDS:
            total = sum(rate for (name, _), rate in rates.items() if name == operation)
            if total > 1 + 1e-9:
                raise ConfigError(f"{VARIABLE}: the shares of {operation} add up to {total:g}")
        return cls(rates, seed=seed)

    @classmethod
    def from_environment(cls) -> Faults:
        """What ``LAYBY_FAULTS`` asks for.

        Raises:
            ConfigError: As ``parse``.
        """
        return cls.parse(os.environ.get(VARIABLE, ""))

    def draw(self, operation: str) -> str | None:
        """The kind of fault that befalls this call of an operation; None: none."""
        if not self._rates:
            return None
        place = self._random.random()
        for (name, kind), rate in self._rates.items():
            if name == operation:
                place -= rate
                if place < 0:
                    return kind
        return None

    def __bool__(self) -> bool:
        return bool(self._rates)
