"""The command line: ``layby serve``, ``generate``, ``chat``, ``bench`` and ``model``.

Nothing here loads torch or the server before a command runs that needs them.
"""

from __future__ import annotations

from layby.cli.app import main

__all__ = ["main"]
