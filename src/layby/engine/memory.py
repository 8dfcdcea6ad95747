"""How much memory this process may still take, in bytes."""

from __future__ import annotations

import os
from pathlib import Path

_FALLBACK_BYTES = 4 * 2**30
"""Assumed where the system says nothing."""


def available_host_bytes(root: Path = Path("/")) -> int:
    """RAM that is free for this process: what the machine has, and what its cgroup still allows.

    Args:
        root: Where ``proc`` and ``sys`` are; another directory in tests.
    """
    limits = [limit for limit in (_machine_bytes(root), _cgroup_bytes(root)) if limit is not None]
    return min(limits, default=_FALLBACK_BYTES)


def _machine_bytes(root: Path) -> int | None:
    """``MemAvailable`` on Linux; elsewhere half of the physical memory."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return None


def cgroup_directories(root: Path = Path("/")) -> list[Path]:
    """This process's group of cgroup v2 and those above it, innermost first; none without v2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    group = next((line[3:].strip("/") for line in lines if line.startswith("0::")), None)
    if group is None:
        return []
    own = mount / group
    return [one for one in (own, *own.parents) if one.is_relative_to(mount)]


def _cgroup_bytes(root: Path) -> int | None:
    """The tightest cgroup v2 limit from this process's group upwards, less what is used of it."""
    left = [
        bytes_left
        for directory in cgroup_directories(root)
        if (bytes_left := _cgroup_bytes_left(directory)) is not None
    ]
    return min(left, default=None)


def _cgroup_bytes_left(directory: Path) -> int | None:
    try:
        limit = (directory / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((directory / "memory.current").read_text())
        # File pages that nobody has used lately are given up as soon as they are wanted.
        for line in (directory / "memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                used -= int(line.split()[1])
        return max(0, int(limit) - max(0, used))
    except (OSError, ValueError, IndexError):
        return None
