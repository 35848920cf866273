"""Charts and the timelines of units, drawn with Bokeh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    CDSView,
    ColumnDataSource,
    CustomJSHover,
    DataRange1d,
    FixedTicker,
    HoverTool,
    IndexFilter,
    LinearColorMapper,
    Range,
    Range1d,
    Ticker,
    WheelZoomTool,
)
from bokeh.models.annotations import ColorBar, Legend, LegendItem
from bokeh.palettes import Cividis256
from bokeh.plotting import figure
from bokeh.transform import transform
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.report.charts import BLUE, ORANGE, PATH, SKY, VERMILION, Chart, Marks
from envpipe_megatron.report.units import KINDS, UnitTable
from envpipe_megatron.report.views import gpu_rows

_ROW_PX, _LEAST_ROWS, _MOST_PX, _MOST_NAMED = 22, 3, 760, 32
#: Of a plot without rows; beside rows of axes only, and of a legend.
_HEIGHT_PX, _AXIS_PX, _LEGEND_PX = 290, 90, 160


def draw(chart: Chart, x_range: Range) -> figure:
    """Draw a chart as wide as the page, on an x axis that others may share.

    It is moved and zoomed along x only, or both ways.
    """
    rows = len(chart.rows)
    only_x = rows > 0 or chart.x_range is not None
    way = "x" if only_x else ""
    beside_px = _LEGEND_PX if chart.marks else _AXIS_PX
    y_range = DataRange1d(only_visible=True, **({"start": 0} if chart.from_zero else {}))
    # With a plain wheel one scrolls down the page; a touch pad's pinching is a wheel with ctrl.
    wheel = WheelZoomTool(dimensions="width" if only_x else "both", modifiers="ctrl")
    plot = figure(
        name=chart.name,
        height=min(_ROW_PX * max(rows, _LEAST_ROWS) + beside_px, _MOST_PX) if rows else _HEIGHT_PX,
        sizing_mode="stretch_width",
        tools=f"{way}pan,{way}box_zoom,reset,save",
        toolbar_location="above",
        x_axis_label=chart.x_label,
        y_axis_label=chart.y_label,
        x_range=x_range,
        y_range=Range1d(start=rows - 0.5, end=-0.5) if rows else y_range,
    )
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    plot.toolbar.logo = None
    plot.axis.minor_tick_line_color = None
    if rows:
        plot.ygrid.visible = False
        plot.yaxis.ticker = FixedTicker(ticks=list(range(0, rows, 1 + rows // _MOST_NAMED)))
        plot.yaxis.major_label_overrides = dict(enumerate(chart.rows))
    legends = chart.legends
    first = next(iter(legends), None)
    drawn = {id(marks): _draw_marks(plot, marks, first) for marks in chart.marks}
    items = {name: found for names in reversed(legends.values()) for name, found in names.items()}
    named = [
        LegendItem(
            label=name, index=place, renderers=[drawn[id(marks)]], visible=name in legends[first]
        )
        for name, (marks, place) in items.items()
    ]
    if named:
        plot.add_layout(Legend(items=named, orientation="horizontal"), "below")
    return plot


def _draw_marks(plot: figure, marks: Marks, group: str | None) -> Any:
    table = marks.table
    places = [i for i, one in enumerate(table.get("group", ())) if one == group]
    look: dict[str, Any] = {"source": ColumnDataSource(table), "color": "colour"}
    if "group" in table:  # the page's script shows another one
        look["view"] = CDSView(filter=IndexFilter(indices=places))
    if marks.shape == "line":
        dash = marks.look or "solid"
        drawn = plot.multi_line("x", "y", line_width=1.5, line_dash=dash, **look)
    elif marks.shape == "dot":
        drawn = plot.scatter("x", "y", marker=marks.marker, size=marks.size, **look)
    elif marks.shape == "box":
        drawn = plot.hbar(y="row", left="begin", right="end", height=0.8, **look)
    else:
        drawn = plot.vstrip("begin", "end", alpha=0.2, line_alpha=0.0, level="underlay", **look)
    if marks.tips:
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=list(marks.tips)))
    return drawn


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
    """Draw the plots before and after, an iteration each, coloured in the first of the ways."""
    source = ColumnDataSource(dict(table.columns))
    end_ms, which = table.columns["end"], table.shown
    longest_ms = float(end_ms.max())
    time = Range1d(
        start=0.0,
        end=float(end_ms[np.isin(table.columns["iteration"], which)].max()),
        bounds=(-0.02 * longest_ms, 1.02 * longest_ms),
    )
    label, rows = gpu_rows(table.gpus)
    first, plots = ways[0], {}
    for name, shown in zip((BEFORE, AFTER), which, strict=True):
        plot = plots[name] = draw(
            Chart(name, "ms after the first unit", label, (), rows=rows), time
        )
        of_iteration = table.columns["iteration"] == shown
        few = np.count_nonzero(of_iteration) < _MOST_OUTLINED
        units = plot.hbar(
            y="row", left="begin", right="end", height="height", source=source,
            view=_view(of_iteration), name=f"{name} units",
            fill_color=transform(first.column, first.mapper),
            line_color="#7f7f7f" if few else None, line_alpha=0.6, line_width=0.6,
        )  # fmt: skip
        plot.hbar(
            y="row", left="begin", right="end", height=0.96, source=source,
            view=_view(of_iteration & (table.columns["critical"] == 1)), name=f"{name} path",
            fill_alpha=0.0, line_color=PATH, line_width=1.6,
        )  # fmt: skip
        bar = ColorBar(color_mapper=first.mapper, ticker=first.ticker, title=first.title, width=12)
        bar.major_label_overrides = dict(enumerate(first.names))
        # What the page's script turns the bar and the units into.
        bar.name, bar.tags = f"{name} colours", [list(vars(way).values()) for way in ways]
        plot.add_layout(bar, "right")
        plot.add_tools(_hover(units, source))
    return plots


def colourings(table: UnitTable) -> list[_Colouring]:
    """Return all ways to colour these units, the most telling first: one clock tells nothing."""
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
