"""Where the time of each GPU goes between its pipeline's first unit and last."""

from __future__ import annotations

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker, Range1d
from bokeh.plotting import figure

from envpipe_megatron.report.bubbles import Bubbles
from envpipe_megatron.report.drawing.style import GREY, ORANGE, SKY
from envpipe_megatron.report.page.plots import add_legend, add_tips, new_plot

_ROW_PX, _LEAST_PX, _MOST_PX, _MOST_NAMED = 22, 230, 760, 32


def bubbles_figure(found: Bubbles) -> figure:
    """A bar for each GPU: units on the critical path, other units, bubbles."""
    rows = len(found.gpus)
    several = len({each.gpu.pipeline for each in found.gpus}) > 1
    plot = new_plot(
        "ms of an iteration",
        "pipeline · stage" if several else "stage",
        int(np.clip(_ROW_PX * rows + 150, _LEAST_PX, _MOST_PX)),
        along_x=True,
        x_range=Range1d(start=0.0, end=1.02e3 * found.pipeline_s),
        y_range=Range1d(start=rows - 0.5, end=-0.5),
    )
    plot.ygrid.visible = False
    plot.yaxis.ticker = FixedTicker(ticks=list(range(0, rows, 1 + rows // _MOST_NAMED)))
    plot.yaxis.major_label_overrides = {
        row: f"{each.gpu.pipeline} · {each.gpu.stage}" if several else str(each.gpu.stage)
        for row, each in enumerate(found.gpus)
    }
    times_ms = 1e3 * np.array(
        [(each.critical_s, each.units_s - each.critical_s, each.bubbles_s) for each in found.gpus]
    )
    source = ColumnDataSource(
        {
            "row": list(range(rows)),
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
