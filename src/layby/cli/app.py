"""The program: its commands, and how it ends whatever happens."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.main import get_command

import layby
from layby.cli.bench import bench
from layby.cli.capacity import capacity
from layby.cli.chat import chat
from layby.cli.flags import in_own_words
from layby.cli.generate import generate
from layby.cli.model import model
from layby.cli.profile import profile
from layby.cli.replay import replay
from layby.cli.serve import serve
from layby.cli.simulate import simulate
from layby.cli.terminal import help_if_alone
from layby.cli.tune import tune
from layby.errors import LaybyError

EXIT_ERROR = 1
EXIT_USAGE = 2


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"layby {layby.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Serve and run language models; parks work when memory runs short instead of losing it."""
    help_if_alone(context)


app = typer.Typer(
    name="layby",
    callback=_root,
    invoke_without_command=True,
    rich_markup_mode=None,  # typer's tables leave the help texts no room
    add_completion=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (serve, generate, chat, simulate, profile, tune, capacity, replay):
    app.command()(command)
app.add_typer(bench, name="bench")
app.add_typer(model, name="model")


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. Raises KeyboardInterrupt, and nothing else.

    Args:
        arguments: Those of the process if None.
    """
    try:
        code = get_command(app).main(
            args=None if arguments is None else list(arguments),
            prog_name="layby",
            standalone_mode=False,
        )
        if sys.stdout is not None:  # as it is where a daemon has closed it
            sys.stdout.flush()  # now, while a broken pipe can still be dealt with
        return code if isinstance(code, int) else 0
    except typer.TyperException as error:
        _complain(_with_hint(error))
        return EXIT_USAGE
    except LaybyError as error:
        _complain("; ".join([str(error), *getattr(error, "__notes__", ())]))
        return EXIT_ERROR
    except typer.Abort:  # which is what typer makes of it
        raise KeyboardInterrupt from None
    except BrokenPipeError:
        # The reader has seen enough, as in "layby … | head". The interpreter flushes stdout once
        # more at its end, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except OSError as error:  # of a file nobody thought of, or a full disk
        place = "" if error.filename is None else f"{error.filename}: "
        _complain(f"{place}{error.strerror or error}")
        return EXIT_ERROR


def _complain(message: str) -> None:
    print("layby:", " ".join(message.split()), file=sys.stderr)


def _with_hint(error: typer.TyperException) -> str:
    if isinstance(error, typer.BadParameter):
        error.message = in_own_words(error)
    message = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    where = "layby" if context is None else context.command_path
    return f"{message}; see: {where} --help"
