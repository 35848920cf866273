"""Charts as plots of the page, drawn with Bokeh; enter at `draw_view`."""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    WheelZoomTool,
)
from bokeh.models.annotations import ColorBar, Legend, LegendItem
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from bokeh.transform import transform

from envpipe_megatron.report.charts import GREY, INK, Chart, Colouring, Marks, View, is_bright

#: Height of a plot's frame without rows, of a row, and of many rows together.
_HEIGHT_PX, _ROW_PX, _MOST_PX = 220, 40, 560
_MOST_NAMED = 32
#: Room for the y axis: x axes of charts below each other begin at one place.
_LEFT_PX = 64
#: As stills have it, without the darkest colours: the page's dark mode is as dark.
_PALETTE = Viridis256[40:]
#: The outlines of more boxes would be all that is seen.
_MOST_OUTLINED = 1_000


def draw_view(view: View) -> dict[str, figure]:
    """Draw the charts of a view, by their names, as wide as the page; they share one x axis."""
    chart = view.charts[0]
    bounds = chart.x_bounds or chart.x_range
    shared = DataRange1d() if chart.x_range is None else Range1d(*chart.x_range, bounds=bounds)
    sources: dict[int, ColumnDataSource] = {}
    plots: dict[str, figure] = {}
    known: set[str] = set()
    for chart in view.charts:
        for marks in chart.marks:  # charts may have some in common
            sources.setdefault(id(marks), ColumnDataSource(dict(marks.columns)))
        plots[chart.name] = _draw(chart, shared, sources, known)
        known |= {name for names in chart.legends.values() for name in names}
    return plots


def _draw(
    chart: Chart, x_range: Range, sources: dict[int, ColumnDataSource], known: Container[str]
) -> figure:
    """Draw a chart, which is moved and zoomed along x only, or both ways.

    It has a legend, unless all names are known.
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
    shown = chart.choice.chosen if chart.choice else ""
    drawn = {
        id(marks): _draw_marks(plot, marks, sources[id(marks)], shown) for marks in chart.marks
    }
    legends = chart.legends
    first = legends.get(shown, {})
    items = {name: mark for names in (*legends.values(), first) for name, mark in names.items()}
    named = [
        LegendItem(
            label=name,
            index=place if "name" in marks.columns else None,
            renderers=[drawn[id(marks)]],
            visible=name in first,
        )
        for name, (marks, place) in items.items()
    ]
    if not all(name in known for name in items):
        look = {"border_line_color": None, "padding": 2, "margin": 0, "spacing": 12}
        legend = Legend(items=named, orientation="horizontal", location="left", **look)
        plot.add_layout(legend, "above")
    return plot


def _draw_marks(plot: figure, marks: Marks, source: ColumnDataSource, shown: str) -> Any:
    """Draw marks, of those with groups the ones of the group that is shown at first."""
    groups = marks.columns.get("group")
    look: dict[str, Any] = {"source": source, "name": f"{plot.name} {marks.name or 'units'}"}
    if groups is not None:  # the page's script shows another one
        places = np.flatnonzero(np.array(groups).astype(str) == shown)
        look["view"] = CDSView(filter=IndexFilter(indices=places.tolist()))
    colour = {"color": "colour" if "colour" in marks.columns else marks.colour}
    if marks.shape == "line":
        dash = marks.look or "solid"
        drawn = plot.multi_line("x", "y", line_width=1.5, line_dash=dash, **colour, **look)
    elif marks.shape == "dot":
        drawn = plot.scatter("x", "y", marker=marks.marker, size=marks.size, **colour, **look)
    elif marks.shape == "span":
        dim = {"alpha": 0.2, "line_alpha": 0.0, "level": "underlay"}
        drawn = plot.vstrip("begin", "end", **dim, **colour, **look)
    else:
        style: dict[str, Any] = {"height": 0.8, **colour}
        if marks.look == "hatched":
            style = {
                "height": 0.82, "fill_color": marks.colour, "fill_alpha": 0.12, "line_color": None,
                "hatch_pattern": "right_diagonal_line", "hatch_color": marks.colour,
                "hatch_alpha": 0.35,
            }  # fmt: skip
        elif marks.look == "outlined":
            style = {
                "height": 0.92, "fill_alpha": 0.0, "line_color": marks.colour, "line_width": 1.6
            }  # fmt: skip
        elif marks.colourings:
            few = len(look["view"].filter.indices) < _MOST_OUTLINED
            style = {"height": "height", "line_color": "white" if few else None, "line_width": 0.6}
        drawn = plot.hbar(y="row", left="begin", right="end", **style, **look)
        if marks.colourings:
            drawn.glyph.fill_color = _add_colourings(plot, marks.colourings, source)
    if marks.tips:
        codes = {f"@{name}": CustomJSHover(code=code) for name, code in marks.tip_codes.items()}
        plot.add_tools(HoverTool(renderers=[drawn], tooltips=list(marks.tips), formatters=codes))
    return drawn


def _add_colourings(plot: figure, ways: Sequence[Colouring], source: ColumnDataSource) -> Any:
    """Add a bar of colours and the labels of boxes; return the first way to fill these.

    The page's script chooses another way by what the bar has in `tags`, and labels that fit.
    """
    tags = []
    for way in ways:
        colours = way.colours or _PALETTE
        inks = [INK if is_bright(colour) else "#ffffff" for colour in colours]
        fill, ink = (
            LinearColorMapper(palette=palette, nan_color=unknown, low=way.ends[0], high=way.ends[1])
            for palette, unknown in ((colours, GREY), (inks, INK))
        )
        ticker = FixedTicker(ticks=list(range(len(way.names)))) if way.names else BasicTicker()
        tags.append([way.title, way.column, fill, ink, ticker, way.names])
    title, column, fill, ink, ticker, names = tags[0]
    bar = ColorBar(color_mapper=fill, ticker=ticker, title=title, width=12, tags=tags)
    bar.name, bar.major_label_overrides = f"{plot.name} colours", dict(enumerate(names))
    plot.add_layout(bar, "right")
    plot.text(
        "middle", "row", "label", source=source, view=CDSView(filter=IndexFilter(indices=[])),
        name=f"{plot.name} labels", text_color=transform(column, ink), text_font_size="10.5px",
        text_align="center", text_baseline="middle",
    )  # fmt: skip
    return transform(column, fill)
