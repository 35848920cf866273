"""Pictures: one iteration as a Gantt chart, and the energy valley of each stage.

Figures are built without pyplot, so no display, global state or back end choice is involved, and
drawing them from several threads is safe.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.report.drawing.gantt import draw_timeline, legend_handles
from envpipe_megatron.report.drawing.style import (
    BLUE,
    INK,
    MUTED,
    SKY,
    VERMILION,
    add_colour_bar,
    clock_map,
    dress,
    legend_below,
    new_figure,
    save_picture,
    scale_range,
    set_title,
)

#: Boxes of more units stand in an SVG as a picture, which viewers are quicker with.
_MOST_VECTOR_UNITS = 2000
_MOST_TICKS = 32
_MARKER: dict[str, Any] = {
    "markerfacecolor": "#f0c000", "markeredgecolor": INK, "markersize": 6.5,
}  # fmt: skip
_FORWARD_LINE, _BACKWARD_LINE, _SUM_LINE = BLUE, VERMILION, INK


def plot_timeline(
    plan: Plan,
    path: Path,
    *,
    title: str,
    note: str | None = None,
    x_max_s: float | None = None,
    frequency_range_mhz: tuple[float, float] | None = None,
) -> None:
    """Write one iteration of a plan as a picture; the suffix of `path` chooses the format.

    The path that sets the iteration time is dotted.

    Args:
        plan: what ran or would run.
        path: where the picture goes.
        title: the headline.
        note: a further line under the caption.
        x_max_s: end of the time axis, so that two pictures share it; what is beyond is cut.
        frequency_range_mhz: ends of the colour scale. The default, from the profile's optimal to
            its highest frequency, is the same for all plans made from one profile.
    """
    timeline = plan.timeline
    figure = order_figure(
        plan.schedule,
        plan.frequency_mhz,
        timeline.start_s,
        timeline.end_s,
        title=title,
        caption=_caption(plan),
        note=note,
        x_max_s=x_max_s,
        frequency_range_mhz=frequency_range_mhz or default_frequency_range_mhz(plan),
        critical_path=() if plan.schedule.forward_only else timeline.critical_path(),
    )
    save_picture(figure, path)


def order_figure(
    schedule: Schedule,
    frequency_mhz: NDArray[np.int64] | None,
    start_s: FloatArray,
    end_s: FloatArray,
    *,
    title: str,
    caption: str,
    frequency_range_mhz: tuple[float, float] | None,
    note: str | None = None,
    x_max_s: float | None = None,
    critical_path: Sequence[int] = (),
) -> Figure:
    """One iteration of any order; without frequencies, or a range of them, in one colour."""
    width_in = float(np.clip(0.4 * schedule.units_per_stage, 10.5, 18.0))
    height_in = float(np.clip(0.52 * schedule.num_stages, 1.4, 24.0)) + 1.75
    figure = new_figure(width_in, height_in)
    axes = figure.add_subplot()
    if schedule.num_units > _MOST_VECTOR_UNITS:
        axes.set_rasterization_zorder(4)
    scale = ScalarMappable(cmap=ListedColormap([SKY]))
    if frequency_mhz is None or frequency_range_mhz is None:
        frequency_mhz = np.zeros(start_s.shape, dtype=np.int64)
    else:
        scale = ScalarMappable(Normalize(*frequency_range_mhz), clock_map())
        add_colour_bar(figure, axes, scale, "SM clock (MHz)")
    # The layout decides how wide the axes become, and that which labels fit.
    axes.set_xlim(0, x_max_s or float(end_s.max()))
    _dress_timeline(axes, schedule, title, [caption, *([note] if note else [])])
    legend_below(figure, legend_handles(schedule, bool(critical_path)), 5, handlelength=1.8)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    draw_timeline(
        axes, schedule, frequency_mhz, start_s, end_s, scale=scale, critical_path=critical_path
    )
    return figure


def default_frequency_range_mhz(plan: Plan) -> tuple[float, float]:
    """From the profile's lowest optimal frequency, or the plan's lowest, to the highest."""
    profile = plan.profile
    top = max(kinds[kind][0].frequency_mhz for kinds in profile.rows for kind in WHOLE)
    lowest = int(plan.frequency_mhz.min())
    with contextlib.suppress(ProfileError):  # no valley: the plan's own range will do
        lowest = min(lowest, *profile.optimal_frequency_mhz)
    return scale_range(lowest, top)


def plot_energy_valley(profile: Profile, path: Path, *, title: str) -> None:
    """Write the energy of one microbatch over frequency, one panel per stage."""
    save_picture(energy_valley_figure(profile, title=title), path)


def energy_valley_figure(
    profile: Profile, *, title: str, stages: Sequence[int] | None = None
) -> Figure:
    """The figure that `plot_energy_valley` saves; by default of all stages."""
    shown = range(profile.num_stages) if stages is None else stages
    columns = min(4, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(max(3.1 * columns, 6.0) + 0.4, 2.5 * rows + 1.3)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for at, (stage, axes) in enumerate(zip(shown, panels, strict=False)):
        _draw_valley(axes, profile, stage)
        if at + columns >= len(shown):  # nothing below it
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("SM clock (MHz)", fontsize=9, color=MUTED)
    for axes in panels[len(shown) :]:
        axes.remove()
    panels[0].set_ylim(bottom=0)
    set_title(figure, title)
    figure.supylabel("energy of one microbatch (J)", fontsize=9, color=MUTED)
    handles = [
        Line2D([], [], color=_SUM_LINE, linewidth=2, label="forward + backward"),
        Line2D([], [], color=_BACKWARD_LINE, linestyle="--", label="backward"),
        Line2D([], [], color=_FORWARD_LINE, linestyle="-.", label="forward"),
        _marker("D", "optimal frequency"),
        _marker("^", "highest frequency"),
    ]
    legend_below(figure, handles, 5)
    return figure


def _marker(shape: str, label: str) -> Line2D:
    return Line2D([], [], color="none", marker=shape, label=label, **_MARKER)


def _draw_valley(axes: Axes, profile: Profile, stage: int) -> None:
    curve = {kind: profile.energy_by_clock_j(stage, kind) for kind in WHOLE}
    for kind, colour, style in (
        (Kind.BACKWARD, _BACKWARD_LINE, "--"),
        (Kind.FORWARD, _FORWARD_LINE, "-."),
    ):
        axes.plot(*zip(*sorted(curve[kind].items()), strict=True), color=colour, linestyle=style)
    both = {
        f: energy + curve[Kind.BACKWARD][f]
        for f, energy in sorted(curve[Kind.FORWARD].items())
        if f in curve[Kind.BACKWARD]
    }
    heading = f"stage {stage}"
    if both:
        axes.plot(list(both), list(both.values()), color=_SUM_LINE, linewidth=2)
        best, top = min(both, key=lambda f: (both[f], -f)), max(both)
        axes.axvline(best, color=MUTED, linewidth=0.8, linestyle=":", zorder=0)
        for frequency, shape in ((top, "^"), (best, "D")):
            axes.plot(frequency, both[frequency], shape, zorder=4, clip_on=False, **_MARKER)
        saved = 100 * (1 - both[best] / both[top])
        heading += f": optimum {best} MHz saves {saved:.0f} %"
    axes.set_title(heading, fontsize=9, loc="left", color=INK)
    dress(axes)


def _caption(plan: Plan) -> str:
    in_flight = ", ".join(f"{count:g}" for count in plan.schedule.microbatches_in_flight)
    gpus = plan.conditions.gpus_by_stage.sum()
    of_gpus = f"{gpus} GPUs" if plan.conditions.gpus_per_stage else "one GPU a stage"
    energy = f"{_figures(plan.cost.energy_j)} J ({of_gpus})"
    time = f"iteration {plan.cost.iteration_time_s:.4g} s"
    return f"{time}  ·  energy {energy}  ·  peak in flight {in_flight}"


def _figures(value: float) -> str:
    """Four figures, never in powers of ten: a caption is read by people."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _dress_timeline(axes: Axes, schedule: Schedule, title: str, lines: Sequence[str]) -> None:
    axes.set_ylim(schedule.num_stages - 0.5, -0.5)
    axes.set_yticks(range(0, schedule.num_stages, math.ceil(schedule.num_stages / _MOST_TICKS)))
    axes.set_ylabel("stage", color=MUTED)
    axes.set_xlabel("time (s)", color=MUTED)
    axes.tick_params(colors=MUTED, length=3)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.set_title(
        title, loc="left", fontweight="bold", fontsize=12, color=INK, pad=9 + 12 * len(lines)
    )
    for at, line in enumerate(reversed(lines)):
        axes.annotate(
            line, (0, 1), xycoords="axes fraction", xytext=(0, 5 + 12 * at),
            textcoords="offset points", fontsize=8.5, color=MUTED,
        )  # fmt: skip
