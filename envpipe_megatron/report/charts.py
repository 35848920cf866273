"""Charts as plain data: `page` draws them with Bokeh, `stills` some with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np

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


class Choice(NamedTuple):
    """A control of the page: values with their names, and the value at first."""

    title: str
    options: Sequence[tuple[str, str]]
    chosen: str

    @classmethod
    def of(cls, title: str, names: Sequence[str]) -> Choice:
        """Return a choice of values that are their own names, the first of them at first."""
        return cls(title, [(name, name) for name in names], names[0])


class Colouring(NamedTuple):
    """A way to colour boxes: by a column, whose values lie between two ends of a scale.

    Args:
        colours: along the scale; Viridis if there are none.
        names: of the values 0, 1, 2 and so on, where they count things.
    """

    title: str
    column: str
    ends: tuple[float, float]
    colours: Sequence[str] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Marks:
    """Marks of one shape.

    Args:
        name, colour: of all marks that have none among their columns; a legend has each name once,
            except for empty ones.
        columns: by name, a value for each mark: for a line `x` and `y` (arrays of points), for a
            dot `x` and `y`, for a box `row`, `begin` and `end`, for a span `begin` and `end`.
            Where there is a `group`, only the marks of a chosen one are shown. Boxes may have a
            `height` and a `label`. Others are for tips and colours.
        tips: words, and what the page says beside them under the pointer, as Bokeh has it.
        marker: of dots, as Bokeh names it.
        size: of dots, in points.
        look: lines are `dashed` or `dotted` (in stills), and boxes `hatched` or `outlined`.
        colourings: of boxes: stills have the first, and the page has a control for them.
        tip_codes: JavaScript that returns the text of a `value`, by the columns of tips.
    """

    shape: Literal["line", "dot", "box", "span"]
    name: str
    colour: str
    columns: Mapping[str, Any]
    tips: Sequence[tuple[str, str]] = ()
    marker: str = "circle"
    size: int = 5
    look: Literal["", "dashed", "dotted", "hatched", "outlined"] = ""
    colourings: Sequence[Colouring] = ()
    tip_codes: Mapping[str, str] = field(default_factory=dict)

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
        x_bounds: how far one can move along it; by default, no further.
        from_zero: whether the y axis begins at 0.
        choice: which group is shown, if all marks have one.
    """

    name: str
    x_label: str
    y_label: str
    marks: Sequence[Marks]
    title: str = ""
    rows: Sequence[str] = ()
    x_range: tuple[float, float] | None = None
    x_bounds: tuple[float, float] | None = None
    from_zero: bool = False
    choice: Choice | None = None

    @property
    def legends(self) -> dict[str, dict[str, tuple[Marks, int]]]:
        """The first mark of each name, by group (empty where there are none).

        A group of more names than colours has none.
        """
        found: dict[str, dict[str, tuple[Marks, int]]] = {}
        for marks in self.marks:
            groups, own = marks.columns.get("group", repeat("")), marks.columns.get("name")
            if own is None:  # one name is that of all in each group
                groups, own = np.unique(marks.columns.get("group", "")), repeat(marks.name)
            for place, (group, name) in enumerate(zip(groups, own, strict=False)):
                names = found.setdefault(str(group), {})
                if name:
                    names.setdefault(name, (marks, place))
        return {key: {} if len(names) > len(SERIES) else names for key, names in found.items()}


@dataclass(frozen=True)
class View:
    """Charts that belong together, one below the other: a part of a page, or a still.

    `choices` of the page, by key, are for all of them.
    """

    key: str
    title: str
    text: str
    charts: Sequence[Chart]
    choices: Mapping[str, Choice] = field(default_factory=dict)
