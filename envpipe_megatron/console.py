"""Lines and tables for people, as the commands and the quickstart print them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from typing import IO, Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def drop_output(stream: IO[Any]) -> None:
    """Send what else is printed nowhere, since the stream's file cannot be written."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: str, console: Console | None = None) -> None:
    """Print text that holds paths: they are neither broken over lines nor read as markup or emojis.

    On standard output, unless a console is given.
    """
    (console or Console()).print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def show_table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    left: Collection[str] = (),
    caption: str | None = None,
    console: Console | None = None,
) -> None:
    """Print a table, its columns aligned to the right except for those of `left` or no heading.

    It cuts no word, such as a GPU's UUID: lines may be wider than a terminal. Texts hold names that
    others chose, and are read neither as markup nor as emojis.
    """
    columns, console = list(columns), console or Console()
    named = Text(title, "table.title") if title else None
    table = Table(title=named, caption=caption, show_header=any(columns))
    for column in columns:
        table.add_column(Text(column), justify="right" if column and column not in left else "left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    wide = console.options.update(max_width=10_000)
    for made in table.columns:
        cells = (made.header, *made.cells)
        made.min_width = max(console.measure(cell, options=wide).minimum for cell in cells)
    console.print(table, crop=False)


def say_as_launcher(text: str) -> None:
    """Print a line of `envpipe launch` on standard error, if that can still be written."""
    with contextlib.suppress(OSError):
        click.echo(f"[envpipe] {text}", err=True)


def say_working(text: str) -> None:
    """Print on standard error what takes long now: a pipe of the output does not get it."""
    say(f"{text} ...", Console(stderr=True))
