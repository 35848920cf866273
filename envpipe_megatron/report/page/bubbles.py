"""Where the time of each GPU goes between its pipeline's first unit and last."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, Range1d
from bokeh.plotting import figure

from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.drawing.style import GREY, ORANGE, SKY
from envpipe_megatron.report.page.plots import add_legend, add_tips, gpu_rows_plot


def bubbles_figure(found: Bubbles) -> figure:
    """A bar for each GPU: units on the critical path, other units, bubbles."""
    plot = gpu_rows_plot(
        "ms of an iteration",
        [each.gpu for each in found.gpus],
        160,
        x_range=Range1d(start=0.0, end=1.02e3 * found.pipeline_s),
    )
    times_ms = 1e3 * np.array(
        [(each.critical_s, each.units_s - each.critical_s, each.bubbles_s) for each in found.gpus]
    )
    source = ColumnDataSource(
        {
            "row": list(range(len(found.gpus))),
            "rank": [each.gpu.rank for each in found.gpus],
            "critical": times_ms[:, 0],
            "others": times_ms[:, 1],
            "bubbles": times_ms[:, 2],
        }
    )
    columns = {"critical": ORANGE, "others": SKY, "bubbles": GREY}
    bars = plot.hbar_stack(
        list(columns), y="row", height=0.8, color=list(columns.values()), source=source
    )
    names = ("units on the critical path", "other units", "bubbles")
    add_legend(plot, zip(names, bars, strict=True))
    tips = [(name, f"@{column}{{0.0}} ms") for name, column in zip(names, columns, strict=True)]
    for bar in bars:
        add_tips(plot, bar, ("rank", "@rank"), *tips)
    return plot
