"""The size of the device pool of KV cache, and whether a wish for another one can be granted."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from layby.errors import InvalidRequestError, counted, shown

logger = logging.getLogger("layby.engine")


@dataclass(frozen=True, slots=True)
class KVPoolSize:
    """How large the device pool is, and how large it is to be.

    Attributes:
        target_blocks: Size that was asked for last; new requests must fit into it.
        num_blocks: Size it has.
        num_free_blocks: Blocks of those that nobody holds.
    """

    target_blocks: int
    num_blocks: int
    num_free_blocks: int

    @property
    def note(self) -> str | None:
        """What the target waits for; None if it is reached."""
        if self.num_blocks > self.target_blocks:
            return (
                f"{self.num_blocks} blocks are kept: a request that was accepted may come to "
                f"need so many; the pool shrinks on towards {self.target_blocks} as such requests "
                "end"
            )
        if self.num_blocks < self.target_blocks:
            return f"the pool grows to {self.target_blocks} blocks in the next step"
        return None


def check_pool_size(num_blocks: object, most_blocks: int | None) -> int:
    """A size that somebody asks for, if it can be had.

    Args:
        num_blocks: The size.
        most_blocks: Largest possible one; None: not known.

    Raises:
        InvalidRequestError: It cannot; names both numbers.
    """
    if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
        raise InvalidRequestError(
            f"blocks must be an integer of at least 1, got {shown(num_blocks)}", param="blocks"
        )
    if most_blocks is not None and num_blocks > most_blocks:
        raise InvalidRequestError(
            f"blocks is {shown(num_blocks)}, but the memory that is left allows a pool of "
            f"{most_blocks} at most",
            param="blocks",
        )
    return num_blocks


class ResizeLog:
    """Says in the log what became of a size that was asked for: what the step after it reached, as
    the caller is answered, and, if that was not all of it, when the target is reached."""

    def __init__(self) -> None:
        self._is_asked = self._waits = False

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to say."""
        return self._is_asked or self._waits

    def ask(self) -> None:
        """A size has been asked for, and no step has been taken since."""
        self._is_asked = True

    def look(self, size: KVPoolSize) -> None:
        """To be called after a step."""
        is_reached = size.num_blocks == size.target_blocks
        if is_reached and self.is_open:
            logger.info("the KV pool has %s now", counted(size.num_blocks, "block"))
        elif self._is_asked:
            wanted = counted(size.target_blocks, "block")
            logger.info("the KV pool is to have %s; it has %d so far", wanted, size.num_blocks)
        self._is_asked, self._waits = False, self.is_open and not is_reached
