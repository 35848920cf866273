"""Charts as plain data: `page` draws them with Bokeh, `stills` some with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

INK, MUTED, GRID = "#1a1a1a", "#5f6368", "#e6e6e6"
#: Okabe and Ito's, less black, which no colour vision confuses; https://jfly.uni-koeln.de/color/
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE, GREY = "#0072b2", "#d55e00", "#cc79a7", "#999999"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY, GREY, YELLOW)
#: A critical path.
PATH = "#d1116b"


def is_bright(colour: str) -> bool:
    """Say whether dark letters are easier to read on a colour, `#rrggbb`, than white ones."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 127.5  # as the eye has it


def series_colours(count: int) -> list[str]:
    """Return a colour for each of a number of series; those beyond the palette repeat it."""
    return [SERIES[number % len(SERIES)] for number in range(count)]


def columns_of(names: str, rows: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    """Return the columns of rows, by their names, with spaces between these."""
    return {name: [row[place] for row in rows] for place, name in enumerate(names.split())}


@dataclass(frozen=True)
class Marks:
    """Marks of one shape.

    Args:
        name, colour: of all marks that have none among their columns; a legend has each name once,
            but for empty ones.
        columns: by name, a value for each mark: for a line `x` and `y` (arrays of points), for a
            dot `x` and `y`, for a box `row`, `begin` and `end`, for a span `begin` and `end`.
            Where there is a `group`, only the marks of a chosen one are shown. Stills have boxes of
            a `height`, a `label`, and a colour by `mhz`. Others are for tips.
        tips: words, and what the page says beside them under the pointer, as Bokeh has it.
        marker: of dots, as Bokeh names it.
        size: of dots, in points.
        look: lines are `dashed` or `dotted` (in stills), and boxes there `hatched` or `outlined`.
    """

    shape: Literal["line", "dot", "box", "span"]
    name: str
    colour: str
    columns: Mapping[str, Any]
    tips: Sequence[tuple[str, str]] = ()
    marker: str = "circle"
    size: int = 5
    look: Literal["", "dashed", "dotted", "hatched", "outlined"] = ""

    @property
    def table(self) -> dict[str, Any]:
        """All columns, `name` and `colour` among them."""
        count = len(next(iter(self.columns.values())))
        return {"name": [self.name] * count, "colour": [self.colour] * count, **self.columns}


@dataclass(frozen=True)
class Chart:
    """Marks on two axes.

    Args:
        name: of the chart on its page, of letters and dashes.
        rows: names of the rows of boxes, the first on top; without them, y is a number.
        x_range: ends of the x axis, which the charts of a view share; by default, as the marks are.
        from_zero: whether the y axis begins at 0.
        choice: what the groups are, if all marks have one; the first is shown at first.
        scale_mhz: ends of the scale of colours by clock.
    """

    name: str
    x_label: str
    y_label: str
    marks: Sequence[Marks]
    title: str = ""
    rows: Sequence[str] = ()
    x_range: tuple[float, float] | None = None
    from_zero: bool = False
    choice: str = ""
    scale_mhz: tuple[float, float] | None = None

    @property
    def legends(self) -> dict[str | None, dict[str, tuple[Marks, int]]]:
        """The first mark of each name, by group (None where there are none).

        A group of more names than colours has none.
        """
        found: dict[str | None, dict[str, tuple[Marks, int]]] = {}
        for marks in self.marks:
            table = marks.table
            groups = table.get("group") or [None] * len(table["name"])
            for place, (group, name) in enumerate(zip(groups, table["name"], strict=True)):
                names = found.setdefault(group, {})
                if name:
                    names.setdefault(name, (marks, place))
        return {key: {} if len(names) > len(SERIES) else names for key, names in found.items()}


@dataclass(frozen=True)
class View:
    """Charts that belong together, one below the other: a part of a page, or a still."""

    key: str
    title: str
    text: str
    charts: Sequence[Chart]
