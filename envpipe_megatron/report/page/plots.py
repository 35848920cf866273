"""Charts drawn with Bokeh."""

from __future__ import annotations

from typing import Any

from bokeh.models import (
    CDSView,
    ColumnDataSource,
    DataRange1d,
    FixedTicker,
    HoverTool,
    IndexFilter,
    Range,
    Range1d,
    WheelZoomTool,
)
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from envpipe_megatron.report.charts import Chart, Marks

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
