"""Benchmarks of an engine in this process. Imports neither torch nor a model by itself."""

from __future__ import annotations

from layby.bench.machine import describe_machine
from layby.bench.offline import OfflineLoad, run_offline

__all__ = ["OfflineLoad", "describe_machine", "run_offline"]
