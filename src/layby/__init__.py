"""Layby: an LLM inference engine that parks work instead of losing it.

    from layby import LLM, SamplingParams

    llm = LLM(model="smollm2")
    [result] = llm.generate("Once upon a time", SamplingParams(max_tokens=32))
    print(result.outputs[0].text)

Names are loaded on first use, so that ``layby.scheduling`` works where nothing but Python is
installed.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own takes ten times as long to load as all of this

if TYPE_CHECKING:
    from layby.engine import (
        LLM,
        AsyncEngine,
        CompletionOutput,
        EngineConfig,
        RequestOutput,
    )
    from layby.errors import (
        ConfigError,
        EngineDeadError,
        EngineDrainingError,
        EngineUnavailableError,
        InvalidRequestError,
        LaybyError,
        ModelError,
        ModelNotFoundError,
        QueueFullError,
        RequestFailedError,
        RequestTooLargeError,
    )
    from layby.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "layby.engine": ("AsyncEngine", "CompletionOutput", "EngineConfig", "LLM", "RequestOutput"),
    "layby.errors": (
        "ConfigError",
        "EngineDeadError",
        "EngineDrainingError",
        "EngineUnavailableError",
        "InvalidRequestError",
        "LaybyError",
        "ModelError",
        "ModelNotFoundError",
        "QueueFullError",
        "RequestFailedError",
        "RequestTooLargeError",
    ),
    "layby.sampling_params": ("SamplingParams",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncEngine",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "EngineDeadError",
    "EngineDrainingError",
    "EngineUnavailableError",
    "InvalidRequestError",
    "LLM",
    "LaybyError",
    "ModelError",
    "ModelNotFoundError",
    "QueueFullError",
    "RequestFailedError",
    "RequestOutput",
    "RequestTooLargeError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'layby' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
