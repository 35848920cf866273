"""Leave and show what benchmarks found: rows of evidence, and a table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.evidence import add_rows, made_by, row_of

#: Profiles and runs that others measured, beside the checkout.
PERSEUS_DATA = Path("../shared/data/perseus_sosp24")
#: Characters of a table, which a narrower terminal or a pipe would cut.
_TABLE_WIDTH = 190

Row = Mapping[str, Any]
ROWS_FILE = "rows.jsonl"


def markdown_table(
    columns: Sequence[str], rows: Iterable[Iterable[str]], texts: Collection[str] | None = None
) -> str:
    """Return a table in Markdown; numbers lie right, unless a column is one of `texts`, or all are.

    Args:
        texts: names of columns; all without.
    """
    rules = ["---" if texts is None or name in texts else "---:" for name in columns]
    return "\n".join(map(markdown_line, (columns, rules, *rows)))


def markdown_line(cells: Iterable[str]) -> str:
    """Join cells to a line of a table in Markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def output_option(folder: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--output` of a benchmark, whose folder is below runs/benchmarks."""
    return click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs/benchmarks") / folder,
        show_default=True,
        help="Folder for rows.jsonl.",
    )


def make_console() -> Console:
    """A console that is wide enough for tables."""
    return Console(width=max(Console().width, _TABLE_WIDTH))


def leave(folder: Path, basis: str, tables: Mapping[str, Iterable[Row]], gpus: str = "") -> None:
    """Write rows of evidence, by table.

    Args:
        basis: what all rows were seen on, one of `evidence.BASES`.
        tables: rows of equal keys; columns before the first number with a fraction are the setting.
        gpus: number and product, of rows that no column says it of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, made = folder / ROWS_FILE, made_by()
    path.unlink(missing_ok=True)
    for name, rows in tables.items():
        add_rows(path, (row_of(name, row, basis=basis, gpus=gpus, **made) for row in rows))


def make_table(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> Table:
    """A table of rows of equal keys: of all columns, or of some in this order."""
    table = Table(title=title, title_justify="left")
    names = columns or (tuple(rows[0]) if rows else ())
    for name in names:
        is_text = any(isinstance(row[name], str) for row in rows)
        title = name.replace("_", " ")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*(shown(row[name]) for name in names))
    return table


def shown(value: object) -> str:
    """Return a value as tables show it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        decimals = 4 if abs(value) < 10 else 1 if abs(value) >= 1000 else 2
        return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no -0.00
    return str(value)
