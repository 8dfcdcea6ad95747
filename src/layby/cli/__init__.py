"""The command line: ``layby serve``, ``generate``, ``chat``, ``bench`` and ``model``.

Nothing here loads torch or the server before a command runs that needs them.
"""

from __future__ import annotations

TYPE_CHECKING = False  # nothing is loaded here before an interrupt can be caught
if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_INTERRUPTED = 130
"""As a shell reports a process that SIGINT ended."""

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; an interrupted one says nothing.

    The commands are loaded here: that takes long enough to be interrupted.

    Args:
        arguments: Those of the process if None.
    """
    try:
        from layby.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # as while a class was made in it
            return EXIT_INTERRUPTED
        raise
