"""What commands share: where their output goes, and how it looks there."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layby.errors import ConfigError, LaybyError

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = "-"
"""The file name that stands for standard output."""

_INVISIBLE = dict.fromkeys([*range(0x20), 0x7F, *range(0x80, 0xA0)])
for _kept in "\n\t":
    del _INVISIBLE[ord(_kept)]


def help_if_alone(context: typer.Context) -> None:
    """Callback of a group of commands: without one of them, it shows its help."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def check_stream(target: str | None) -> str | None:
    """Refuse a file that cannot be written before the work begins, not after; ``-`` is none."""
    if target is not None and target != STDOUT:
        path = Path(target)
        if path.is_dir() or not path.absolute().parent.is_dir():
            why = "is a directory" if path.is_dir() else "is in a directory that does not exist"
            raise typer.BadParameter(f"{target} {why}")
    return target


def check_target(target: str | None) -> str | None:
    """The same for what must be a file."""
    if target == STDOUT:
        raise typer.BadParameter("must name a file: this is nothing for standard output")
    return check_stream(target)


def check_apart(**targets: str | None) -> None:
    """Refuse two outputs, by the names of their flags, that would overwrite each other.

    Raises:
        ConfigError: Two of them go to one place.
    """
    taken: dict[Path, str] = {}
    for name, target in targets.items():
        if target is None:
            continue
        path = Path(target) if target == STDOUT else Path(target).resolve()
        other = taken.setdefault(path, name)
        if other != name:
            place = "standard output" if target == STDOUT else target
            raise ConfigError(f"--{other} and --{name} both write to {place}")


JsonTarget = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON to this file; -: to standard output, and nothing else "
        "there.",
        show_default="none",
        callback=check_stream,
    ),
]
"""The parameter of every command that can report in JSON."""


HtmlTarget = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="Write a report with plots, which needs nothing but a browser.",
        show_default="none",
        callback=check_target,
    ),
]
"""The parameter of every command that can write a report."""


@contextmanager
def progress_bar(
    what: str, *, unit: str = "", counts_bytes: bool = False
) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal; else None, so that nobody counts for nothing.

    What it yields takes what is being done, how much of it is, and of how much; in units of
    ``unit``, or in bytes.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True) if counts_bytes else MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell


def write_json(target: str, value: Any) -> None:
    """Write ``value`` to a file, or to standard output if ``target`` is ``-``.

    Raises:
        LaybyError: The file cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if target == STDOUT:
        if sys.stdout is None:
            raise LaybyError("standard output is closed")
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaybyError(f"cannot write {target}: {error.strerror or error}") from error


def table_console(json_target: str | None) -> Console:
    """Where tables go: standard output, unless that is to be pure JSON."""
    from rich.console import Console

    return Console(stderr=json_target == STDOUT, highlight=False)


def printable(text: str) -> str:
    """``text`` without what could command a terminal: a model may write anything."""
    return text.translate(_INVISIBLE)


def show_text(text: str) -> None:
    """Write a piece of a model's text to standard output at once."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def log_to_stderr(level: str = "warning", *, dated: bool = False) -> None:
    """Let Layby's own log lines of this level and above through.

    Args:
        level: Name of the level.
        dated: Each line tells when; for a process that goes on for days.
    """
    form = "%(asctime)s %(levelname)s %(message)s" if dated else "layby: %(message)s"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(form))
    logger = logging.getLogger("layby")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
