"""RAM whose size can change under the tensors that lie in it."""

from __future__ import annotations

import mmap
import os
import sys

import torch
from torch import Tensor

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python's mmap does not name: address space costs no memory."""


class HostMemory:
    """Address space for the largest size there will be; RAM only where something was written.

    The system hands out pages as they are first written, zeroed, and takes them back when it is
    told to. So a tensor over the beginning keeps its place while the memory grows and shrinks.

    Args:
        num_bytes: What must be there, at least 1.
        most_bytes: Address space to reserve beyond that. Where the system does not give so much
            (``ulimit -v``, strict overcommit), there is no more than ``num_bytes``.

    Raises:
        MemoryError: Not even ``num_bytes`` can be had.
    """

    def __init__(self, num_bytes: int, most_bytes: int = 0) -> None:
        installed = installed_bytes()
        if num_bytes > installed:
            raise MemoryError(f"the machine has {installed / 2**30:.2f} GiB")
        try:
            self._map = _reserve(max(num_bytes, most_bytes))
        except OSError:
            try:
                self._map = _reserve(num_bytes)
            except OSError as error:
                raise MemoryError(str(error)) from error

    @property
    def num_bytes(self) -> int:
        """Address space there is."""
        return len(self._map)

    def tensor(self) -> Tensor:
        """All of it as ``[num_bytes]`` uint8; keeps the memory alive."""
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def give_back(self, first_byte: int, end_byte: int | None = None) -> None:
        """Return what lies from ``first_byte`` to before ``end_byte`` (None: the end) to the
        system; it reads as zeros afterwards.

        Whole pages only, so that nothing around it is touched.
        """
        start = -(-first_byte // mmap.PAGESIZE) * mmap.PAGESIZE
        end = len(self._map) if end_byte is None else end_byte // mmap.PAGESIZE * mmap.PAGESIZE
        if start < end:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)


def installed_bytes() -> int:
    """RAM of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _reserve(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
