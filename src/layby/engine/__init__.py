"""Requests in, text out: the Python API over scheduler and executor. Needs no torch to import.

Names are loaded on first use, so that the command line can look at settings without an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layby.engine.async_engine import AsyncEngine, RequestStream
    from layby.engine.config import EngineConfig
    from layby.engine.engine import Engine
    from layby.engine.interfaces import ChatTemplate, Tokenizer
    from layby.engine.kv_pool import KVPoolSize
    from layby.engine.llm import LLM
    from layby.engine.metrics import EngineStats
    from layby.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput
    from layby.engine.preparation import PreparedRequest

_HOMES = {
    "layby.engine.async_engine": ("AsyncEngine", "RequestStream"),
    "layby.engine.config": ("EngineConfig",),
    "layby.engine.engine": ("Engine",),
    "layby.engine.preparation": ("PreparedRequest",),
    "layby.engine.interfaces": ("ChatTemplate", "Tokenizer"),
    "layby.engine.kv_pool": ("KVPoolSize",),
    "layby.engine.llm": ("LLM",),
    "layby.engine.metrics": ("EngineStats",),
    "layby.engine.outputs": (
        "CompletionDelta",
        "CompletionOutput",
        "RequestDelta",
        "RequestOutput",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncEngine",
    "ChatTemplate",
    "CompletionDelta",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "KVPoolSize",
    "LLM",
    "PreparedRequest",
    "RequestDelta",
    "RequestOutput",
    "RequestStream",
    "Tokenizer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'layby.engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
