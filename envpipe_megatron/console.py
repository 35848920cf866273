"""Lines and tables for people, as the commands and the quickstart print them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table


def say(console: Console, text: str) -> None:
    """Print text that holds paths: they are neither broken over lines nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def say_working(text: str) -> None:
    """Print on standard error what takes long now: a pipe of the output does not get it."""
    say(Console(stderr=True), f"{text} ...")


def table_of(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table whose columns are aligned to the right, but for one without a heading."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    return table
