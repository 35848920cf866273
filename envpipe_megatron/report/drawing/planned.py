"""Pictures of plans: frontiers of time, energy and memory, configurations, clocks."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.files import replace_files
from envpipe_megatron.policies.orders.memory_frontier import MemoryPoint
from envpipe_megatron.report.drawing.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    SERIES,
    VERMILION,
    add_colour_bar,
    clock_map,
    dress,
    legend_below,
    letters_on,
    new_figure,
    save_picture,
    scale_range,
    set_title,
)

#: Iteration time in s, energy of all GPUs in J.
Point = tuple[float, float]

_PLAN, _BOUND, _BASELINE = BLUE, GREEN, VERMILION

_GIB = 2**30


def plot_configurations(frontiers: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write energy over time of the plans of each configuration, by its name."""
    figure = new_figure(7.5, 4.8)
    axes = figure.add_subplot()
    title = "Configurations, each with its best orders and clocks"
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, "iteration time (s)", "energy of all GPUs in an iteration (J)", grid="both")
    best = _joint_frontier([point for points in frontiers.values() for point in points])
    axes.plot(*zip(*best, strict=True), color=INK, linewidth=5, alpha=0.15, label="best of all")
    for number, (name, points) in enumerate(frontiers.items()):
        colour = SERIES[number % len(SERIES)]
        axes.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1, label=name)
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, path)


def _joint_frontier(points: Sequence[Point]) -> list[Point]:
    """The points of which no other is both faster and cheaper, the fastest first."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


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


def clocks_figure(
    frequency_mhz: NDArray[np.int64], unit_time_s: NDArray[np.float64], title: str
) -> Figure:
    """How long the units run at each clock; both arrays are [num_stages, units_per_stage]."""
    stages = len(frequency_mhz)
    figure = new_figure(9.0, float(np.clip(0.3 * stages, 1.3, 12.0)) + 1.3)
    axes = figure.add_subplot()
    clocks = np.unique(frequency_mhz)
    scale = ScalarMappable(Normalize(*scale_range(clocks[0], clocks[-1])), clock_map())
    begin = np.zeros(stages)
    for clock, colour in zip(clocks[::-1], scale.to_rgba(clocks[::-1].astype(float)), strict=True):
        at_clock = np.where(frequency_mhz == clock, unit_time_s, 0.0).sum(axis=1)
        share = 100 * at_clock / unit_time_s.sum(axis=1)
        axes.barh(
            range(stages), share, 0.82, left=begin, color=colour,
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        for stage in np.flatnonzero((share >= 7) & (stages <= 32)):
            axes.text(
                begin[stage] + share[stage] / 2, float(stage), str(clock), ha="center", va="center",
                fontsize=7.5, color=letters_on(colour, "black"),
            )  # fmt: skip
        begin += share
    add_colour_bar(figure, axes, scale, "SM clock (MHz)")
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_xlim(0, 100)
    dress(axes, "share of the time in units (%)", "stage", grid="x")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=32, integer=True))
    set_title(figure, title)
    return figure


def memory_figure(stages: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Predicted and measured peak of each stage's memory."""
    figure = new_figure(float(np.clip(0.9 * len(stages) + 2.0, 6.5, 16.0)), 3.8)
    axes = figure.add_subplot()
    predicted = [(stage.get("predicted_peak_bytes") or np.nan) / _GIB for stage in stages]
    measured = [(stage.get("measured_peak_bytes") or np.nan) / _GIB for stage in stages]
    places = np.arange(len(stages))
    axes.bar(places - 0.2, predicted, 0.38, color=BLUE, label="predicted")
    axes.bar(places + 0.2, measured, 0.38, color=ORANGE, label="measured")
    dress(axes, "stage", "peak of allocated memory (GiB)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=32, integer=True))
    legend_below(figure, axes.get_legend_handles_labels()[0], 2)
    set_title(figure, title)
    return figure
