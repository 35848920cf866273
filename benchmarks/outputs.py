"""The files that a benchmark leaves beside its claims: rows as CSV, pictures as PNG and SVG."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

_DPI = 160


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows of equal keys; an empty file where there are none."""
    listed = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(listed[0]) if listed else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(listed)


def save_picture(figure: Figure, folder: Path, name: str) -> None:
    """Write `name`.png for a glance and `name`.svg for a paper, the same for the same figure."""
    figure.savefig(folder / f"{name}.png", dpi=_DPI)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
