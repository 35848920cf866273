"""Parallel configurations as a picture: the frontier of each, and the one of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.report.drawing.style import (
    INK,
    SERIES,
    dress,
    new_figure,
    save_picture,
)

#: Iteration time in s, energy of all GPUs in J.
Point = tuple[float, float]


def plot_configurations(frontiers: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Write energy over time of the plans of each configuration, by its name."""
    figure = new_figure(7.5, 4.8)
    axes = figure.add_subplot()
    title = "Configurations, each with its best orders and clocks"
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, "iteration time (s)", "energy of all GPUs in an iteration (J)", grid="both")
    best = joint_frontier([point for points in frontiers.values() for point in points])
    axes.plot(*zip(*best, strict=True), color=INK, linewidth=5, alpha=0.15, label="best of all")
    for number, (name, points) in enumerate(frontiers.items()):
        colour = SERIES[number % len(SERIES)]
        axes.plot(*zip(*points, strict=True), ".-", color=colour, linewidth=1, label=name)
    axes.legend(frameon=False, fontsize=8)
    save_picture(figure, path)


def joint_frontier(points: Sequence[Point]) -> list[Point]:
    """The points of which no other is both faster and cheaper, the fastest first."""
    best: list[Point] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
