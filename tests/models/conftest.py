"""Shared by the tests of models: the default model's files."""

from __future__ import annotations

import pytest

from layby.errors import ModelError
from layby.models import ModelFiles, resolve
from layby.models.gguf_file import GgufFile


@pytest.fixture(scope="session")
def smollm2_files() -> ModelFiles:
    """The default model, fetched if need be; skips only where it cannot be had."""
    try:
        return resolve("smollm2", allow_download=True)
    except ModelError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_gguf(smollm2_files: ModelFiles) -> GgufFile:
    return GgufFile(smollm2_files.path)
