"""The default model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from layby import LLM, ModelNotFoundError
from layby.models import LoadedModel, load


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """Weights in float32, fetched if need be; skipped only where they cannot be had."""
    try:
        return load("smollm2", allow_download=True)
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def roomy_llm(smollm2: LoadedModel) -> Iterator[LLM]:
    """The default model in float32 with all the KV cache it could want."""
    with LLM(model="smollm2", dtype="float32", num_blocks=4096, swap_gib=0) as llm:
        yield llm
