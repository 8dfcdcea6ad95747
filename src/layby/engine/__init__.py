"""Requests in, text out: the Python API over scheduler and executor. Needs no torch to import."""

from __future__ import annotations

from layby.engine.async_engine import AsyncEngine, RequestStream
from layby.engine.config import EngineConfig
from layby.engine.engine import Engine, PreparedRequest
from layby.engine.interfaces import ChatTemplate, Tokenizer
from layby.engine.llm import LLM
from layby.engine.metrics import EngineStats
from layby.engine.outputs import CompletionDelta, CompletionOutput, RequestDelta, RequestOutput

__all__ = [
    "AsyncEngine",
    "ChatTemplate",
    "CompletionDelta",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "LLM",
    "PreparedRequest",
    "RequestDelta",
    "RequestOutput",
    "RequestStream",
    "Tokenizer",
]
