"""The toy in place of the model, for every command that makes an LLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import layby.engine.llm
from tests.cli.harness import Toy


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy()
    monkeypatch.setattr(layby.engine.llm, "LLM", toy)
    return toy


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Commands set up logging for a process of their own."""
    logger = logging.getLogger("layby")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
