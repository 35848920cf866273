"""Charts drawn with matplotlib, as files.

Figures are built without pyplot, so no display, global state or back end choice is involved, and
drawing them from several threads is safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize, to_rgba_array
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from envpipe_megatron.files import written_beside
from envpipe_megatron.report.charts import GRID, INK, MUTED, Chart, Marks

DPI = 150
#: Stands in every PNG of ours.
PICTURE_MARK = "EnvPipe for Megatron"
_MOST_PIXELS = 2000  # of a side: the pictures of large pipelines
_MOST_TICKS = 32
_PANEL_IN, _ROW_IN = 2.6, 0.4
_UNIT_IN = 0.4  # of a labelled box
_LABEL_POINTS = 7.5
_AXES_WIDTH = 0.85  # share of the figure's, beside a bar of colours
_MOST_VECTOR_BOXES = 2000
_HATCHED: dict[str, Any] = {
    "facecolor": "#f1f1f1", "edgecolor": "#cfcfcf", "hatch": "////", "linewidth": 0.0,
}  # fmt: skip
_MARKERS = {"circle": "o", "square": "s", "star": "*", "diamond": "D", "triangle": "^"}


def draw(charts: Sequence[Chart], title: str) -> Figure:
    """Draw charts one below the other, under a headline.

    Of a chart's groups the first one is shown whose marks can be told apart.
    """
    heights = [
        float(np.clip(_ROW_IN * len(chart.rows), 1.4, 12.0)) if chart.rows else _PANEL_IN
        for chart in charts
    ]
    labels = [len(marks.columns.get("label", ())) for chart in charts for marks in chart.marks]
    each_row = max(labels) / max(1, len(charts[0].rows))
    width_in = float(np.clip(_UNIT_IN * each_row, 10.0, 18.0))
    size = width_in, sum(heights) + 1.6
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    handles: dict[str, Any] = {}
    for axes, chart in zip(panels, charts, strict=True):
        legends = chart.legends
        group = next((one for one, names in legends.items() if names), list(legends)[-1])
        scale = None if chart.scale_mhz is None else _clock_scale(figure, axes, *chart.scale_mhz)
        _dress(axes, chart, group)
        for marks in chart.marks:
            _draw_marks(axes, marks, group, scale)
        if chart.from_zero:
            axes.set_ylim(0, 1.03 * axes.get_ylim()[1])
        for name, (marks, place) in legends[group].items():
            handles.setdefault(name, _handle(marks, name, marks.table["colour"][place]))
    panels[-1].set_xlabel(charts[-1].x_label, color=MUTED, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=12, color=INK)
    figure.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=max(1, min(5, len(handles))),
        frameon=False,
        fontsize=8,
    )
    return figure


def _clock_scale(figure: Figure, axes: Axes, low_mhz: float, high_mhz: float) -> ScalarMappable:
    """The colours of clocks, which a bar beside the axes explains."""
    # Viridis less its darkest end, where outlines would drown.
    viridis = colormaps["viridis"](np.linspace(0.16, 1))
    colours = LinearSegmentedColormap.from_list("clock", viridis)
    if low_mhz == high_mhz:  # a scale needs some length
        low_mhz -= 1
    scale = ScalarMappable(Normalize(low_mhz, high_mhz), colours)
    bar = figure.colorbar(scale, ax=axes, pad=0.012, aspect=18, fraction=0.05)
    bar.set_label("SM clock (MHz)", color=MUTED, fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=MUTED, labelsize=8)
    return scale


def _draw_marks(axes: Axes, marks: Marks, group: str | None, scale: ScalarMappable | None) -> None:
    table = marks.table
    shown = [i for i in range(len(table["name"])) if group is None or table["group"][i] == group]
    of = {key: [values[i] for i in shown] for key, values in table.items()}
    if marks.shape == "line":
        for x, y, colour in zip(of["x"], of["y"], of["colour"], strict=True):
            axes.plot(x, y, color=colour, linewidth=1.4, linestyle=marks.look or "solid", zorder=4)
    elif marks.shape == "dot":
        marker, size = _MARKERS[marks.marker], marks.size**2
        axes.scatter(of["x"], of["y"], size, of["colour"], marker=marker, linewidths=0, zorder=4)
    elif marks.shape == "box":
        _draw_boxes(axes, marks, of, scale)
    else:
        for begin, end, colour in zip(of["begin"], of["end"], of["colour"], strict=True):
            axes.axvspan(begin, end, color=colour, alpha=0.22, linewidth=0)


def _draw_boxes(
    axes: Axes, marks: Marks, of: Mapping[str, list[Any]], scale: ScalarMappable | None
) -> None:
    heights = of.get("height") or [0.82] * len(of["row"])
    ends = list(zip(of["row"], of["begin"], of["end"], heights, strict=True))
    boxes = [
        Rectangle((begin, row - height / 2), end - begin, height)
        for row, begin, end, height in ends
    ]
    colours = (
        scale.to_rgba(np.array(of["mhz"])) if scale and "mhz" in of else to_rgba_array(of["colour"])
    )
    low, high = axes.get_xlim()
    points_each = 72 * cast(Figure, axes.figure).get_figwidth() * _AXES_WIDTH / (high - low)
    narrow = points_each * float(np.median([box.get_width() for box in boxes]))
    look: dict[str, Any] = {
        "": {"facecolor": colours, "edgecolor": "white", "linewidth": min(0.6, 0.04 * narrow)},
        "hatched": _HATCHED,
        "outlined": {"facecolor": "none", "edgecolor": INK, "linewidth": min(1.7, 0.12 * narrow)},
    }[marks.look]
    # Very many boxes are a picture in an SVG, which viewers are quicker with.
    drawn = PatchCollection(boxes, **look, rasterized=len(boxes) > _MOST_VECTOR_BOXES)
    axes.add_collection(drawn)
    axes.autoscale_view(scaley=False)
    for (row, begin, end, _), label, rgba in zip(ends, of.get("label", ()), colours, strict=False):
        wide = (end - begin) * points_each >= 0.62 * _LABEL_POINTS * len(label) + 3
        if wide and end <= high * (1 + 1e-6) and not marks.look:
            bright = np.dot(rgba[:3], (0.299, 0.587, 0.114)) > 0.5  # as the eye has it
            axes.text(
                (begin + end) / 2, row, label, ha="center", va="center_baseline", clip_on=True,
                fontsize=_LABEL_POINTS, color=INK if bright else "white", zorder=5,
            )  # fmt: skip


def _dress(axes: Axes, chart: Chart, group: str | None) -> None:
    """Plain axes: a light grid, no box, small muted numbers."""
    axes.set_ylabel(chart.y_label, color=MUTED, fontsize=9)
    heading = " · ".join(filter(None, (chart.title, f"{chart.choice} {group}" if group else "")))
    axes.set_title(heading, loc="left", fontsize=9, color=MUTED)
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


def _handle(marks: Marks, name: str, colour: str) -> Patch | Line2D:
    if marks.look == "hatched":
        return Patch(**_HATCHED, label=name)
    if marks.look == "outlined":
        return Patch(facecolor="none", edgecolor=colour, linewidth=1.7, label=name)
    if marks.shape in ("box", "span"):
        return Patch(color=colour, alpha=0.4 if marks.shape == "span" else 1.0, label=name)
    if marks.shape == "line":
        return Line2D([], [], color=colour, linestyle=marks.look or "solid", label=name)
    marker, size = _MARKERS[marks.marker], marks.size
    return Line2D([], [], color=colour, marker=marker, markersize=size, ls="", label=name)


def save(charts: Sequence[Chart], title: str, *paths: Path) -> None:
    """Write charts as a picture, in the format of each file's name.

    The same charts give the same bytes; a PNG is marked as ours.
    """
    figure = draw(charts, title)
    dpi = min(DPI, _MOST_PIXELS / max(figure.get_size_inches()))
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # laid out once, and not again for each file
    for path in paths:
        mark = {"Software": PICTURE_MARK} if path.suffix == ".png" else {"Date": None}
        names = {"svg.fonttype": "none", "svg.hashsalt": path.stem}
        with written_beside(path) as draft, matplotlib.rc_context(names):
            figure.savefig(draft, dpi=dpi, metadata=mark, format=path.suffix[1:])
