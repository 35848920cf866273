"""Frontiers as pictures, and that of memory as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.files import replace_files
from envpipe_megatron.policies.orders.memory_frontier import MemoryPoint
from envpipe_megatron.report.drawing.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    VERMILION,
    dress,
    new_figure,
    save_picture,
)

_PLAN, _BOUND, _BASELINE, _POWER = BLUE, GREEN, VERMILION, MUTED


def plot_frontier(plans: Sequence[Plan], path: Path, *, title: str) -> None:
    """Write energy and mean power over time of a job's plans, the fastest first.

    The suffix sets the format.
    """
    figure, axes = _canvas(title, "iteration time (s)", "energy of an iteration (J)")
    times_s = [plan.cost.iteration_time_s for plan in plans]
    axes.plot(times_s, [plan.cost.energy_j for plan in plans], ".-", color=_PLAN, label="plans",
              markersize=4, linewidth=1)  # fmt: skip
    bounds = [b for plan in plans if (b := plan.energy_lower_bound_j) is not None]
    if len(bounds) == len(plans):
        axes.plot(times_s, bounds, "--", color=_BOUND, linewidth=1, label="lower bound")
    baseline = plans[0].baseline
    axes.plot(
        baseline.cost.iteration_time_s, baseline.cost.energy_j, "^", color=_BASELINE,
        markeredgecolor=INK, markersize=8, label=f"{baseline.schedule.name} at the highest clocks",
    )  # fmt: skip
    power = axes.twinx()
    power.plot(
        times_s, [plan.cost.mean_power_w for plan in plans], ":", color=_POWER, linewidth=1.4
    )
    power.set_ylabel("mean power of all GPUs (W)", color=_POWER)
    axes.plot([], [], ":", color=_POWER, linewidth=1.4, label="mean power of the plans")
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, path)


def plot_memory_frontier(points: Sequence[MemoryPoint], path: Path, *, title: str) -> None:
    """Write the saving over the most microbatches that a stage holds, the tightest limit first."""
    figure, axes = _canvas(title, "most microbatches in flight on a stage", "energy saving (%)")
    peaks = [point.peak_in_flight for point in points]
    savings = [point.plan.cost.saving_percent(point.plan.baseline.cost) for point in points]
    axes.step(peaks, savings, "o-", where="post", color=_PLAN, markersize=5)
    for point, peak, saving in zip(points, peaks, savings, strict=True):
        axes.annotate(
            f"+{max(point.plan.schedule.extra_forwards)}", (peak, saving), xytext=(4, -11),
            textcoords="offset points", fontsize=7.5, color=MUTED,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.annotate(
        "+n: most extra forwards of a stage", (1, 0), xycoords="axes fraction",
        xytext=(-4, 5), textcoords="offset points", ha="right", fontsize=8, color=MUTED,
    )  # fmt: skip
    save_picture(figure, path)


def write_memory_frontier(points: Sequence[MemoryPoint], path: Path) -> None:
    """Write a memory frontier's CSV, a row a limit."""
    rows = [
        {
            "max_extra_forwards": point.max_extra_forwards,
            "peak_in_flight": point.peak_in_flight,
            "iteration_time_s": point.plan.cost.iteration_time_s,
            "energy_j": point.plan.cost.energy_j,
            "energy_lower_bound_j": point.plan.energy_lower_bound_j,
            "saving_percent": point.plan.cost.saving_percent(point.plan.baseline.cost),
        }
        for point in points
    ]
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_files({path: [table.getvalue()]})


def _canvas(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = new_figure(7.5, 4.4)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, x_label, y_label, grid="both")
    return figure, axes
