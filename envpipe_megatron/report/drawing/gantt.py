"""One iteration as a Gantt chart on given axes: boxes, waits, outer envelope, critical path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, Kind
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.report.drawing.style import INK, letters_on

_PATH = "#d1116b"
_WAIT: dict[str, Any] = {"facecolor": "#f1f1f1", "edgecolor": "#cfcfcf", "hatch": "////"}
#: Of a row, by kind, which no colour vision or print can lose.
_HEIGHTS = {
    Kind.FORWARD: 0.54,
    Kind.BACKWARD: 0.82,
    Kind.INPUT_GRADIENT: 0.82,
    Kind.WEIGHT_GRADIENT: 0.3,
}
_LABEL_POINTS = 7.5
_NARROW_POINTS = 6.0  # boxes below this are outlined in runs: single outlines would fill them


def draw_timeline(
    axes: Axes,
    schedule: Schedule,
    frequency_mhz: NDArray[np.int64],
    start_s: FloatArray,
    end_s: FloatArray,
    *,
    scale: ScalarMappable,
    critical_path: Sequence[int] = (),
) -> None:
    """Draw the units of one iteration on axes whose x limits (s) are set already.

    The arrays are [num_stages, units_per_stage]. `scale` turns frequencies into colours, and the
    nodes of `critical_path`, from its end, are dotted.
    """
    points_per_s = _points_per_second(axes)
    rgba = np.asarray(scale.to_rgba(frequency_mhz.astype(np.float64)))
    boxes: dict[Kind, list[Rectangle]] = {kind: [] for kind in _HEIGHTS}
    colours: dict[Kind, list[tuple[float, ...]]] = {kind: [] for kind in _HEIGHTS}
    for node in range(schedule.num_units):
        stage, position = divmod(node, schedule.units_per_stage)
        if schedule.combined[stage, position]:
            continue  # the unit behind it is the box of both
        unit = schedule.unit_at(node)
        start, end = float(start_s[stage, position]), float(end_s[stage, position])
        colour = tuple(rgba[stage, position])
        kind, name = unit.kind, unit.label(schedule.num_chunks)
        if position and schedule.combined[stage, position - 1]:
            kind = Kind.BACKWARD
            name = schedule.unit_at(node - 1).label(schedule.num_chunks) + name
        boxes[kind].append(_box(stage, start, end, kind))
        colours[kind].append(colour)
        if _fits(name, (end - start) * points_per_s):
            _add_label(axes, (start + end) / 2, stage, name, colour)
    narrow = float(np.median((end_s - start_s)[~schedule.combined])) * points_per_s < _NARROW_POINTS
    _add(axes, _wait_boxes(start_s, end_s), **_WAIT, linewidth=0.0, zorder=1)
    edge = 0.15 if narrow else 0.6
    for kind, drawn in boxes.items():
        if drawn:
            _add(axes, drawn, facecolor=colours[kind], edgecolor="white", linewidth=edge, zorder=2)
    _add(
        axes,
        _envelope_boxes(schedule, start_s, end_s, merge=narrow),
        facecolor="none",
        edgecolor=INK,
        linewidth=1.1 if narrow else 1.7,
        zorder=3,
    )
    if critical_path:
        _draw_path(axes, schedule, start_s, end_s, critical_path)


def legend_handles(schedule: Schedule, with_path: bool) -> list[Patch | Line2D]:
    """Legend of the marks of `draw_timeline` on a schedule."""
    grey = "#9aa5b1"
    handles: list[Patch | Line2D] = [
        Line2D([], [], color=grey, linewidth=5, label="forward (low box)", solid_capstyle="butt"),
        Line2D([], [], color=grey, linewidth=9, label="backward (tall box)", solid_capstyle="butt"),
        *[
            Line2D([], [], color=grey, linewidth=3, label=f"{kind} (flat box)")
            for kind in SPLIT[2:]
            if schedule.split
        ],
        Patch(**_WAIT, label="GPU waits"),
        Patch(facecolor="none", edgecolor=INK, linewidth=1.7, label="outer envelope"),
    ]
    if with_path:
        handles.append(
            Line2D([], [], color=_PATH, linestyle=":", linewidth=1.8, label="critical path")
        )
    return handles


def _points_per_second(axes: Axes) -> float:
    low, high = axes.get_xlim()
    figure = cast(Figure, axes.get_figure())
    return float(axes.get_window_extent().width / figure.dpi * 72 / (high - low))


def _fits(name: str, width_points: float) -> bool:
    return width_points >= 0.62 * _LABEL_POINTS * len(name) + 3


def _add_label(axes: Axes, x: float, stage: int, name: str, colour: Sequence[float]) -> None:
    axes.text(
        x, stage, name, ha="center", va="center_baseline", fontsize=_LABEL_POINTS, zorder=5,
        color=letters_on(colour, INK), clip_on=True,
    )  # fmt: skip


def _box(stage: int, start: float, end: float, kind: Kind = Kind.BACKWARD) -> Rectangle:
    height = _HEIGHTS[kind]
    return Rectangle((start, stage - height / 2), end - start, height)


def _wait_boxes(start_s: FloatArray, end_s: FloatArray) -> list[Rectangle]:
    """The spans between units, and those before the first and after the last of each stage."""
    iteration_s = float(end_s.max())
    boxes = []
    for stage, (starts, ends) in enumerate(zip(start_s, end_s, strict=True)):
        idle_from = np.concatenate([[0.0], ends])
        idle_to = np.concatenate([starts, [iteration_s]])
        for begin, until in zip(idle_from, idle_to, strict=True):
            if until - begin > 1e-6 * iteration_s:
                boxes.append(_box(stage, float(begin), float(until)))
    return boxes


def _envelope_boxes(
    schedule: Schedule, start_s: FloatArray, end_s: FloatArray, *, merge: bool
) -> list[Rectangle]:
    width = schedule.units_per_stage
    starts, ends = start_s.ravel(), end_s.ravel()
    runs: list[list[int]] = []
    for node in sorted(schedule.outer_envelope):
        if merge and runs and node == runs[-1][-1] + 1 and node % width:
            runs[-1].append(node)
        else:
            runs.append([node])
    return [
        _box(
            run[0] // width,
            starts[run[0]],
            ends[run[-1]],
            max((schedule.unit_at(node).kind for node in run), key=_HEIGHTS.__getitem__),
        )
        for run in runs
    ]


def _add(axes: Axes, boxes: list[Rectangle], **style: Any) -> None:
    axes.add_collection(PatchCollection(boxes, **style), autolim=False)


def _draw_path(
    axes: Axes, schedule: Schedule, start_s: FloatArray, end_s: FloatArray, path: Sequence[int]
) -> None:
    starts, ends = start_s.ravel(), end_s.ravel()
    # Below the label in each row, so that both stay readable.
    times = [t for node in reversed(path) for t in (starts[node], ends[node])]
    rows = [schedule.stage_of(node) + 0.2 for node in reversed(path) for _ in range(2)]
    axes.plot(times, rows, color="white", linewidth=2.6, zorder=4, alpha=0.8)
    axes.plot(times, rows, color=_PATH, linewidth=1.6, linestyle=(0, (1, 1.2)), zorder=4)
