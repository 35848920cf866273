"""The units of iterations over time: two plots, one above the other, on one axis of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    CDSView,
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    IndexFilter,
    LinearColorMapper,
    Range1d,
    Ticker,
)
from bokeh.models.annotations import ColorBar
from bokeh.palettes import Cividis256
from bokeh.plotting import figure
from bokeh.transform import transform
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.report.charts import BLUE, ORANGE, PATH, SKY, VERMILION, Chart
from envpipe_megatron.report.page.plots import draw
from envpipe_megatron.report.units import KINDS, UnitTable
from envpipe_megatron.report.views import gpu_rows

_KIND_COLOURS = {
    Kind.FORWARD: SKY,
    Kind.BACKWARD: BLUE,
    Kind.INPUT_GRADIENT: ORANGE,
    Kind.WEIGHT_GRADIENT: VERMILION,
}
#: Without its darkest quarter, which the page's dark mode has for a background.
_PALETTE = Cividis256[64:]
#: The outlines of more units would be all that is seen.
_MOST_OUTLINED = 1_000
#: What the page's script finds the two plots by.
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class _Colouring:
    """A way to colour units: by a column, through a mapper; with names of some values."""

    title: str
    column: str
    mapper: LinearColorMapper
    ticker: Ticker
    names: list[str]


def timeline_figures(table: UnitTable, ways: list[_Colouring]) -> dict[str, figure]:
    """The plots before and after; each shows an iteration, coloured in the first of the ways."""
    source = ColumnDataSource(dict(table.columns))
    end_ms, which = table.columns["end"], table.shown
    longest_ms = float(end_ms.max())
    time = Range1d(
        start=0.0,
        end=float(end_ms[np.isin(table.columns["iteration"], which)].max()),
        bounds=(-0.02 * longest_ms, 1.02 * longest_ms),
    )
    return {
        name: _figure(table, source, time, name, shown, ways)
        for name, shown in zip((BEFORE, AFTER), which, strict=True)
    }


def colourings(table: UnitTable) -> list[_Colouring]:
    """All ways to colour these units, the most telling first: one clock for all tells nothing."""
    columns = table.columns
    known = [
        _Colouring(title, column, _scale(columns[column][there]), BasicTicker(), [])
        for title, column, there in (
            ("clock (MHz)", "mhz", columns["mhz"] > 0),
            ("power (W)", "watts", np.isfinite(columns["watts"])),
            ("slack (ms)", "slack_ms", np.isfinite(columns["slack_ms"])),
        )
        if there.any()
    ]
    colours = [_KIND_COLOURS[kind] for kind in KINDS]
    steps = LinearColorMapper(palette=colours, low=-0.5, high=len(KINDS) - 0.5)
    ticker = FixedTicker(ticks=list(range(len(KINDS))))
    by_kind = _Colouring("kind", "kind", steps, ticker, [kind.value for kind in KINDS])
    one_clock = np.ptp(columns["mhz"]) == 0
    return [by_kind, *known] if one_clock else [*known[:1], by_kind, *known[1:]]


def _scale(values: NDArray[Any]) -> LinearColorMapper:
    low, high = float(values.min()), float(values.max())
    high = high if high > low else low + 1.0
    return LinearColorMapper(palette=_PALETTE, low=low, high=high, nan_color="#999999")


def _figure(
    table: UnitTable,
    source: ColumnDataSource,
    time: Range1d,
    name: str,
    shown: int,
    ways: list[_Colouring],
) -> figure:
    label, rows = gpu_rows(table.gpus)
    plot = draw(Chart(name, "ms after the first unit", label, (), rows=rows), time)
    of_iteration = table.columns["iteration"] == shown
    few = np.count_nonzero(of_iteration) < _MOST_OUTLINED
    fill = transform(ways[0].column, ways[0].mapper)
    units = plot.hbar(
        y="row", left="begin", right="end", height="height", source=source,
        view=_view(of_iteration), name=f"{name} units",
        fill_color=fill, line_color="#7f7f7f" if few else None, line_alpha=0.6, line_width=0.6,
    )  # fmt: skip
    plot.hbar(
        y="row", left="begin", right="end", height=0.96, source=source,
        view=_view(of_iteration & (table.columns["critical"] == 1)), name=f"{name} path",
        fill_alpha=0.0, line_color=PATH, line_width=1.6,
    )  # fmt: skip
    first = ways[0]
    bar = ColorBar(color_mapper=first.mapper, ticker=first.ticker, title=first.title, width=12)
    bar.major_label_overrides = dict(enumerate(first.names))
    # What the page's script turns the bar and the units into.
    bar.name, bar.tags = f"{name} colours", [list(vars(way).values()) for way in ways]
    plot.add_layout(bar, "right")
    plot.add_tools(_hover(units, source))
    return plot


def _view(there: NDArray[np.bool_]) -> CDSView:
    return CDSView(filter=IndexFilter(indices=np.flatnonzero(there).tolist()))


def _hover(units: Any, source: ColumnDataSource) -> HoverTool:
    several = bool(np.any(source.data["chunk"]))
    letters = "".join(kind.letter for kind in KINDS)
    chunk = " + '.' + source.data.chunk[i]" if several else ""
    name = (
        f"const i = special_vars.index; "
        f"return '{letters}'[value] + source.data.microbatch[i]{chunk}"
    )
    known = CustomJSHover(code="return isFinite(value) ? value.toPrecision(4) : 'not known'")
    return HoverTool(
        renderers=[units],
        tooltips=[
            ("unit", "@kind{custom}"),
            ("time (ms)", "@begin{0.000} to @end{0.000}"),
            ("clock (MHz)", "@mhz{custom}"),
            ("energy (J)", "@joules{custom}"),
            ("power (W)", "@watts{custom}"),
            ("slack (ms)", "@slack_ms{custom}"),
            ("on the critical path", "@critical{custom}"),
        ],
        formatters={
            "@kind": CustomJSHover(args={"source": source}, code=name),
            "@mhz": CustomJSHover(code="return value > 0 ? String(value) : 'not controlled'"),
            "@critical": CustomJSHover(code="return value ? 'yes' : 'no'"),
            **dict.fromkeys(("@joules", "@watts", "@slack_ms"), known),
        },
    )
