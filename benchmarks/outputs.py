"""What benchmarks leave and show: rows as CSV and as a table."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

#: Profiles and runs that others measured, beside the checkout.
PERSEUS_DATA = Path("../shared/data/perseus_sosp24")
#: Characters of a table, which a narrower terminal or a pipe would cut.
_TABLE_WIDTH = 190

Row = Mapping[str, Any]


def output_option(folder: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--output` of a benchmark, whose folder is below runs/benchmarks."""
    return click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs/benchmarks") / folder,
        show_default=True,
        help="Folder for CSV files and claims.json.",
    )


def make_console() -> Console:
    """A console that is wide enough for tables."""
    return Console(width=max(Console().width, _TABLE_WIDTH))


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Write rows of equal keys; an empty file where there are none."""
    listed = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]) if listed else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)


def make_table(title: str, rows: Sequence[Row], columns: Sequence[str] = ()) -> Table:
    """A table of rows of equal keys: of all columns, or of some in this order."""
    table = Table(title=title, title_justify="left")
    names = columns or (tuple(rows[0]) if rows else ())
    for name in names:
        is_text = any(isinstance(row[name], str) for row in rows)
        title = name.replace("_", " ")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        decimals = 4 if abs(value) < 10 else 1 if abs(value) >= 1000 else 2
        return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no -0.00
    return str(value)


def span(values: Sequence[float], digits: int = 1) -> str:
    """The least and the greatest value, such as `1.8 to 9.2`; one number where both are alike."""
    low, high = (f"{round(value, digits) + 0.0:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
