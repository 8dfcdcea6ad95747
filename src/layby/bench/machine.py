"""What a benchmark ran on, so that two results can be compared, or not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import layby


def describe_machine() -> dict[str, Any]:
    """Versions, processors and memory, as plain data. Unknown values are None."""
    facts: dict[str, Any] = {
        "layby": layby.__version__,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": _usable_cpus(),
        "ram_gib": _ram_gib(),
        "threads": None,
        "gpu": None,
    }
    # A run on a stand-in for the model has not loaded torch, and is not to pay for it here.
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def _usable_cpus() -> int | None:
    """Those that this process may use, not those that the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _ram_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (OSError, ValueError):
        return None
