"""Charts and the timelines of units, drawn with Bokeh."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

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
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.transform import transform
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.report.charts import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PATH,
    SKY,
    VERMILION,
    Chart,
    Marks,
    is_bright,
)
from envpipe_megatron.report.units import KINDS, UnitTable
from envpipe_megatron.report.views import gpu_rows

#: Height of a plot's frame without rows, of a row, and of many rows together.
_HEIGHT_PX, _ROW_PX, _MOST_PX = 220, 40, 560
_MOST_NAMED = 32
#: Room for the y axis: x axes of charts below each other begin at one place.
_LEFT_PX = 64


def draw(chart: Chart, x_range: Range, known: Container[str] = ()) -> figure:
    """Draw a chart as wide as the page, on an x axis that others may share.

    It is moved and zoomed along x only, or both ways. It has a legend, unless all names are known.
    """
    rows = len(chart.rows)
    only_x = rows > 0 or chart.x_range is not None
    way = "x" if only_x else ""
    y_range = DataRange1d(only_visible=True, **({"start": 0} if chart.from_zero else {}))
    # With a plain wheel one scrolls down the page; a touch pad's pinching is a wheel with ctrl.
    wheel = WheelZoomTool(dimensions="width" if only_x else "both", modifiers="ctrl")
    plot = figure(
        name=chart.name,
        frame_height=min(_ROW_PX * rows, _MOST_PX) if rows else _HEIGHT_PX,
        min_border_left=_LEFT_PX,
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
    plot.toolbar.logo, plot.toolbar.autohide = None, True
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
    if not all(name in known for name in items):
        _add_legend(plot, named)
    return plot


def _add_legend(plot: figure, items: list[LegendItem]) -> None:
    look = {"border_line_color": None, "padding": 2, "margin": 0, "spacing": 12}
    legend = Legend(items=items, orientation="horizontal", location="left", **look)
    plot.add_layout(legend, "above")


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
#: As stills have it, without the darkest colours: the page's dark mode is as dark.
_PALETTE = Viridis256[40:]
#: The outlines of more units would be all that is seen.
_MOST_OUTLINED = 1_000
#: What the page's script finds the two plots by.
BEFORE, AFTER = "before", "after"


class _Colouring(NamedTuple):
    """A way to colour units, and what is written on them: by a column, through mappers."""

    title: str
    column: str
    mapper: LinearColorMapper
    inks: LinearColorMapper
    ticker: Ticker
    names: Sequence[str]


def timeline_figures(table: UnitTable, ways: list[_Colouring]) -> dict[str, figure]:
    """Draw the plots before and after, an iteration each, coloured in the first of the ways."""
    columns = dict(table.columns)
    columns["middle"] = (columns["begin"] + columns["end"]) / 2
    source, waits = ColumnDataSource(columns), ColumnDataSource(dict(table.waits))
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
        place = {"y": "row", "left": "begin", "right": "end"}
        waited = plot.hbar(
            **place, height=0.82, source=waits, view=_view(table.waits["iteration"] == shown),
            name=f"{name} waits", fill_color=GREY, fill_alpha=0.12, line_color=None,
            hatch_pattern="right_diagonal_line", hatch_color=GREY, hatch_alpha=0.35,
        )  # fmt: skip
        units = plot.hbar(
            **place, height="height", source=source, view=_view(of_iteration),
            name=f"{name} units", fill_color=transform(first.column, first.mapper),
            line_color="white" if few else None, line_width=0.6,
        )  # fmt: skip
        path = plot.hbar(
            **place, height=0.92, source=source,
            view=_view(of_iteration & (table.columns["critical"] == 1)), name=f"{name} path",
            fill_alpha=0.0, line_color=PATH, line_width=1.6,
        )  # fmt: skip
        plot.text(  # the script chooses those that fit
            "middle", "row", "label", source=source, view=_view(np.zeros(0, bool)),
            name=f"{name} labels", text_color=transform(first.column, first.inks),
            text_font_size="10.5px", text_align="center", text_baseline="middle",
        )  # fmt: skip
        legend = [
            LegendItem(label=what, renderers=[of])
            for what, of in (("GPU waits", waited), ("critical path", path))
        ]
        if name == BEFORE:
            _add_legend(plot, legend)
        bar = ColorBar(color_mapper=first.mapper, ticker=first.ticker, title=first.title, width=12)
        bar.major_label_overrides = dict(enumerate(first.names))
        # What the page's script turns the bar and the units into.
        bar.name, bar.tags = f"{name} colours", [list(way) for way in ways]
        plot.add_layout(bar, "right")
        plot.add_tools(_hover(units))
    return plots


def colourings(table: UnitTable) -> list[_Colouring]:
    """Return all ways to colour these units, the most telling first: one clock tells nothing."""
    columns = table.columns
    known = [
        _colouring(title, column, _PALETTE, _ends(columns[column][there]), BasicTicker())
        for title, column, there in (
            ("clock (MHz)", "mhz", columns["mhz"] > 0),
            ("power (W)", "watts", np.isfinite(columns["watts"])),
            ("slack (ms)", "slack_ms", np.isfinite(columns["slack_ms"])),
        )
        if there.any()
    ]
    colours, ends = [_KIND_COLOURS[kind] for kind in KINDS], (-0.5, len(KINDS) - 0.5)
    ticker = FixedTicker(ticks=list(range(len(KINDS))))
    by_kind = _colouring("kind", "kind", colours, ends, ticker, [kind.value for kind in KINDS])
    one_clock = np.ptp(columns["mhz"]) == 0
    return [by_kind, *known] if one_clock else [*known[:1], by_kind, *known[1:]]


def _ends(values: NDArray[Any]) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    return low, high if high > low else low + 1.0


def _colouring(
    title: str,
    column: str,
    colours: Sequence[str],
    ends: tuple[float, float],
    ticker: Ticker,
    names: Sequence[str] = (),
) -> _Colouring:
    inks = [INK if is_bright(colour) else "#ffffff" for colour in colours]
    scale = {"low": ends[0], "high": ends[1]}
    fill = LinearColorMapper(palette=colours, nan_color=GREY, **scale)
    return _Colouring(
        title, column, fill, LinearColorMapper(palette=inks, nan_color=INK, **scale), ticker, names
    )


def _view(there: NDArray[np.bool_]) -> CDSView:
    return CDSView(filter=IndexFilter(indices=np.flatnonzero(there).tolist()))


def _hover(units: Any) -> HoverTool:
    known = CustomJSHover(code="return isFinite(value) ? value.toPrecision(4) : 'not known'")
    return HoverTool(
        renderers=[units],
        tooltips=[
            ("unit", "@label"),
            ("time (ms)", "@begin{0.000} to @end{0.000}"),
            ("clock (MHz)", "@mhz{custom}"),
            ("energy (J)", "@joules{custom}"),
            ("power (W)", "@watts{custom}"),
            ("slack (ms)", "@slack_ms{custom}"),
            ("on the critical path", "@critical{custom}"),
        ],
        formatters={
            "@mhz": CustomJSHover(code="return value > 0 ? String(value) : 'not controlled'"),
            "@critical": CustomJSHover(code="return value ? 'yes' : 'no'"),
            **dict.fromkeys(("@joules", "@watts", "@slack_ms"), known),
        },
    )
