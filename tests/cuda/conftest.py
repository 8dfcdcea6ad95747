"""Tests that need a GPU. Without one they are skipped, and say so.

``LAYBY_TEST_DEVICE=cpu`` runs those of them that can run on a CPU there, to try them out.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("LAYBY_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cpu" or torch.cuda.is_available():
        return
    for item in items:
        if "tests/cuda/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))


@pytest.fixture
def device() -> torch.device:
    """Where to run."""
    return torch.device(DEVICE)
