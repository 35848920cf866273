"""Shared by all plots of the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from bokeh.models import DataRange1d, FixedTicker, HoverTool, Range1d, WheelZoomTool
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure
from numpy.typing import NDArray

from envpipe_megatron.report.pipelines import Gpu

_ROW_PX, _LEAST_ROWS, _MOST_PX, _MOST_NAMED = 22, 3, 760, 32
_OVER_TIME_PX = 260
#: Of each line: more than a screen has pixels would not be seen.
_MOST_POINTS = 800


def new_plot(x_label: str, y_label: str, height_px: int, *, along_x: bool, **more: Any) -> figure:
    """An empty plot as wide as the page, which is moved and zoomed along x alone, or both ways."""
    way = "x" if along_x else ""
    # With a plain wheel one scrolls down the page; a touch pad's pinching is a wheel with ctrl.
    wheel = WheelZoomTool(dimensions="width" if along_x else "both", modifiers="ctrl")
    plot = figure(
        height=height_px,
        sizing_mode="stretch_width",
        tools=f"{way}pan,{way}box_zoom,reset",
        toolbar_location="above",
        x_axis_label=x_label,
        y_axis_label=y_label,
        **more,
    )
    plot.add_tools(wheel)
    plot.toolbar.active_scroll = wheel
    plot.toolbar.logo = None
    plot.axis.minor_tick_line_color = None
    return plot


def over_time_plot(x_label: str, y_label: str, x_range: Range1d) -> figure:
    """An empty plot of what is measured as the job goes on, whose y axis begins at 0."""
    y_range = DataRange1d(start=0, only_visible=True)
    return new_plot(x_label, y_label, _OVER_TIME_PX, along_x=True, x_range=x_range, y_range=y_range)


def thinned(count: int) -> NDArray[np.intp]:
    """Places of at most so many points of a line, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(np.intp))


def gpu_rows_plot(x_label: str, gpus: Sequence[Gpu], beside_px: int, **more: Any) -> figure:
    """An empty plot with a row for each GPU, and so many pixels for what stands beside the rows."""
    several = len({gpu.pipeline for gpu in gpus}) > 1
    rows = len(gpus)
    plot = new_plot(
        x_label,
        "pipeline · stage" if several else "stage",
        min(_ROW_PX * max(rows, _LEAST_ROWS) + beside_px, _MOST_PX),
        along_x=True,
        y_range=Range1d(start=rows - 0.5, end=-0.5),
        **more,
    )
    plot.ygrid.visible = False
    plot.yaxis.ticker = FixedTicker(ticks=list(range(0, rows, 1 + rows // _MOST_NAMED)))
    plot.yaxis.major_label_overrides = {
        row: f"{gpu.pipeline} · {gpu.stage}" if several else str(gpu.stage)
        for row, gpu in enumerate(gpus)
    }
    return plot


def add_tips(plot: figure, drawn: Any, *tips: tuple[str, str]) -> None:
    """Say what lies under the pointer, as Bokeh's tooltips have it."""
    plot.add_tools(HoverTool(renderers=[drawn], tooltips=list(tips)))


def add_legend(plot: figure, items: Iterable[tuple[str, Any]]) -> None:
    """Names of what was drawn, below the plot."""
    named = [LegendItem(label=name, renderers=[of], visible=of.visible) for name, of in items]
    plot.add_layout(Legend(items=named, orientation="horizontal"), "below")
