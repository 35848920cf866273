"""Charts drawn with matplotlib, as PNG files: the page's library draws in a browser only.

Figures are built without pyplot, so no display, global state or back end choice is involved, and
drawing them from several threads is safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_hex, to_rgba_array
from matplotlib.figure import Figure

from envpipe_megatron.files import written_beside
from envpipe_megatron.report.charts import (
    GRID,
    INK,
    MUTED,
    SERIES,
    Chart,
    Colouring,
    Marks,
    is_bright,
)

DPI = 150
#: Marks each PNG that EnvPipe has written.
PICTURE_MARK = "EnvPipe for Megatron"
_MOST_PIXELS = 2000  # of a side: the pictures of large pipelines
_MOST_TICKS = 32
_PANEL_IN, _ROW_IN = 2.6, 0.4
_UNIT_IN = 0.4  # of a labelled box
_LABEL_POINTS = 7.5
_AXES_WIDTH = 0.85  # share of the figure's, beside a bar of colours
_MARKERS = {"circle": "o", "star": "*", "diamond": "D", "triangle": "^"}


def save(charts: Sequence[Chart], title: str, path: Path) -> None:
    """Write charts without groups as a PNG, which is marked as ours; the same give the same bytes.

    OSError names the file.
    """
    figure = draw(charts, title)
    dpi = min(DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    with written_beside(path) as draft:
        figure.savefig(draft, dpi=dpi, metadata={"Software": PICTURE_MARK}, format="png")


def draw(charts: Sequence[Chart], title: str) -> Figure:
    """Draw charts one below the other, under a headline; a legend has each name once."""
    heights = [
        float(np.clip(_ROW_IN * len(chart.rows), 1.4, 12.0)) if chart.rows else _PANEL_IN
        for chart in charts
    ]
    labels = [len(marks.columns.get("label", ())) for chart in charts for marks in chart.marks]
    width_in = float(np.clip(_UNIT_IN * max(labels) / max(1, len(charts[0].rows)), 10.0, 18.0))
    figure = Figure(figsize=(width_in, sum(heights) + 1.6), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(charts), squeeze=False, height_ratios=heights)[:, 0]
    for axes, chart in zip(panels, charts, strict=True):
        _dress(axes, chart)
        for marks in chart.marks:
            _draw_marks(axes, marks)
        if chart.from_zero:
            axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12, color=INK)
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if len(handles) > len(SERIES):  # more than colours
        handles = {}
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=max(1, min(5, len(handles))),
        frameon=False, fontsize=8,
    )  # fmt: skip
    return figure


def _dress(axes: Axes, chart: Chart) -> None:
    """Make axes plain: a light grid, no box, small muted numbers."""
    axes.set_xlabel(chart.x_label, color=MUTED, fontsize=9)
    axes.set_ylabel(chart.y_label, color=MUTED, fontsize=9)
    axes.set_title(chart.title, loc="left", fontsize=9, color=MUTED)
    axes.grid(axis="x" if chart.rows else "both", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelsize=8)
    if chart.x_range is not None:
        axes.set_xlim(*chart.x_range)
    if chart.rows:
        every = 1 + len(chart.rows) // _MOST_TICKS
        axes.set_yticks(range(0, len(chart.rows), every), chart.rows[::every])
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)


def _add_bar(axes: Axes, way: Colouring) -> ScalarMappable:
    """Return the colours of a column; draw a bar beside the axes that explains them."""
    # Viridis less its darkest end, where outlines would drown.
    viridis = colormaps["viridis"](np.linspace(0.16, 1))
    colours = LinearSegmentedColormap.from_list("clock", viridis)
    low, high = way.ends
    scale = ScalarMappable(Normalize(low if low < high else low - 1, high), colours)
    bar = cast(Figure, axes.figure).colorbar(scale, ax=axes, pad=0.012, aspect=18, fraction=0.05)
    bar.set_label(way.title, color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8)
    return scale


def _draw_marks(axes: Axes, marks: Marks) -> None:
    table = marks.table
    each = zip(table["name"], table["colour"], strict=True)
    if marks.shape == "line":
        for (name, colour), x, y in zip(each, table["x"], table["y"], strict=True):
            style = marks.look or "solid"
            axes.plot(x, y, color=colour, label=name, linewidth=1.4, linestyle=style, zorder=4)
    elif marks.shape == "dot":
        marker, size = _MARKERS[marks.marker], marks.size**2
        axes.scatter(
            table["x"], table["y"], size, table["colour"], marker=marker, label=marks.name,
            linewidths=0, zorder=4,
        )  # fmt: skip
    elif marks.shape == "box":
        _draw_boxes(axes, marks)
    else:
        for (name, colour), begin, end in zip(each, table["begin"], table["end"], strict=True):
            axes.axvspan(begin, end, color=colour, label=name, alpha=0.22, linewidth=0)


def _draw_boxes(axes: Axes, marks: Marks) -> None:
    table = marks.table
    row, begin, end = (np.array(table[name]) for name in ("row", "begin", "end"))
    half = np.array(table.get("height") or [0.82] * len(row)) / 2
    corners = (begin, row - half), (end, row - half), (end, row + half), (begin, row + half)
    colours = to_rgba_array(table["colour"])
    for way in marks.colourings[:1]:
        colours = _add_bar(axes, way).to_rgba(np.array(table[way.column]))
    low, high = axes.get_xlim()
    points_each = 72 * cast(Figure, axes.figure).get_figwidth() * _AXES_WIDTH / (high - low)
    narrow = points_each * float(np.median(end - begin))
    looks: dict[str, dict[str, Any]] = {
        "": {"facecolor": colours, "edgecolor": "white", "linewidth": min(0.6, 0.04 * narrow)},
        "hatched": {
            "facecolor": "#f1f1f1",
            "edgecolor": "#cfcfcf",
            "hatch": "////",
            "linewidth": 0,
        },
        "outlined": {"facecolor": "none", "edgecolor": INK, "linewidth": min(1.7, 0.12 * narrow)},
    }
    boxes = np.moveaxis(np.array(corners), 2, 0)  # [box, corner, x and y]
    axes.add_collection(PolyCollection(list(boxes), label=marks.name, **looks[marks.look]))
    if marks.look:
        return
    for box, label in enumerate(table.get("label", ())):
        wide = (end - begin)[box] * points_each >= 0.62 * _LABEL_POINTS * len(label) + 3
        if wide and end[box] <= high * (1 + 1e-6):
            ink = INK if is_bright(to_hex(colours[box])) else "white"
            axes.text(
                (begin + end)[box] / 2, row[box], label, ha="center", va="center_baseline",
                fontsize=_LABEL_POINTS, color=ink, zorder=5, clip_on=True,
            )  # fmt: skip
