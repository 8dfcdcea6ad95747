"""Execution: run the scheduler's step plans.

``TorchExecutor`` runs a model; ``FakeExecutor`` imitates one and checks the plans. Names are
loaded when they are first used, so the fake one needs nothing but Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layby.execution.device import resolve_device
    from layby.execution.executor import Executor, PositionLogprobs, StepResult, TokenLogprob
    from layby.execution.fake_executor import FakeExecutor
    from layby.execution.kv_cache import KVCache
    from layby.execution.torch_executor import TorchExecutor

__all__ = [
    "Executor",
    "FakeExecutor",
    "KVCache",
    "PositionLogprobs",
    "resolve_device",
    "StepResult",
    "TokenLogprob",
    "TorchExecutor",
]

_HOMES = {
    "Executor": "executor",
    "FakeExecutor": "fake_executor",
    "KVCache": "kv_cache",
    "PositionLogprobs": "executor",
    "resolve_device": "device",
    "StepResult": "executor",
    "TokenLogprob": "executor",
    "TorchExecutor": "torch_executor",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
