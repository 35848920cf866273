"""Frontiers as pictures, and that of memory as a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

_PLAN, _BOUND, _BASELINE = BLUE, GREEN, VERMILION


def plot_frontier(plans: Sequence[Plan], path: Path, *, title: str) -> None:
    """Write energy and mean power over time of a job's plans, the fastest first.

    The suffix sets the format.
    """
    figure = new_figure(7.5, 6.4)
    axes, power = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, "", "energy of an iteration (J)", grid="both")
    dress(power, "iteration time (s)", "mean power of all GPUs (W)", grid="both")
    times_s = [plan.cost.iteration_time_s for plan in plans]
    powers_w = [plan.cost.mean_power_w for plan in plans]
    how: dict[str, Any] = {"color": _PLAN, "label": "plans", "markersize": 4, "linewidth": 1}
    axes.plot(times_s, [plan.cost.energy_j for plan in plans], ".-", **how)
    power.plot(times_s, powers_w, ".-", **how)
    bounds = [b for plan in plans if (b := plan.energy_lower_bound_j) is not None]
    if len(bounds) == len(plans):
        axes.plot(times_s, bounds, "--", color=_BOUND, linewidth=1, label="lower bound")
    own, cost = plans[0].baseline.schedule.name, plans[0].baseline.cost
    for panel, value in ((axes, cost.energy_j), (power, cost.mean_power_w)):
        panel.plot(
            cost.iteration_time_s, value, "^", color=_BASELINE, markeredgecolor=INK, markersize=8,
            label=f"{own} at the highest clocks",
        )  # fmt: skip
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, path)


def plot_memory_frontier(points: Sequence[MemoryPoint], path: Path, *, title: str) -> None:
    """Write the saving over the most microbatches that a stage holds, the tightest limit first."""
    figure = new_figure(7.5, 4.4)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, "most microbatches in flight on a stage", "energy saving (%)", grid="both")
    peaks = [point.peak_in_flight for point in points]
    savings = [point.plan.cost.saving_percent(point.plan.baseline.cost) for point in points]
    axes.step(peaks, savings, "o-", where="post", color=_PLAN, markersize=5)
    for point, peak, saving in zip(points, peaks, savings, strict=True):
        axes.annotate(
            point.plan.schedule.name, (peak, saving), xytext=(4, -11),
            textcoords="offset points", fontsize=7.5, color=MUTED,
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    save_picture(figure, path)


def write_memory_frontier(points: Sequence[MemoryPoint], path: Path) -> None:
    """Write a memory frontier's CSV, a row a limit."""
    rows = [
        {
            "max_extra_forwards": point.max_extra_forwards,
            "peak_in_flight": f"{point.peak_in_flight:g}",
            "order": point.plan.schedule.name,
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
