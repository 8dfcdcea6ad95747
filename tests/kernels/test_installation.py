"""Whether the kernels are there, and what happens where they are not."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from layby import kernels

WITHOUT_EXTENSION = """
import logging, sys
sys.modules["layby._kernels"] = None
logging.basicConfig(level=logging.WARNING, format="%(message)s")
from layby import kernels
assert not kernels.available()
assert not kernels.available()
assert kernels.features() == frozenset()
"""


@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler here"
)
def test_kernels_are_built_where_there_is_a_compiler() -> None:
    """An installation without them succeeds too, so a broken build would pass unseen."""
    assert kernels.available()


def test_an_installation_without_kernels_says_so_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTENSION], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the compiled kernels are missing") == 1
