"""Parallel configurations as a picture: time and energy of each, and which no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envpipe_megatron.report.drawing.style import (
    BLUE,
    GREY,
    INK,
    MUTED,
    dress,
    new_figure,
    save_picture,
)


def plot_configurations(points: Sequence[tuple[str, float, float]], path: Path) -> None:
    """Write the energy of configurations over their time.

    Args:
        points: name, iteration time in s and energy of all GPUs in J of each.
    """
    figure = new_figure(7.5, 4.8)
    axes = figure.add_subplot()
    title = "Configurations of the job, each with its best order and clocks"
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11, color=INK)
    dress(axes, "iteration time (s)", "energy of all GPUs in an iteration (J)", grid="both")
    best = frontier(points)
    axes.plot([p[1] for p in best], [p[2] for p in best], "-", color=BLUE, linewidth=1)
    for point in points:
        name, time_s, energy_j = point
        colour = BLUE if point in best else GREY
        axes.plot(time_s, energy_j, "o", color=colour, markeredgecolor=INK, markersize=6)
        axes.annotate(
            name, (time_s, energy_j), xytext=(6, 4), textcoords="offset points",
            fontsize=7.5, color=MUTED,
        )  # fmt: skip
    axes.margins(x=0.2, y=0.12)
    save_picture(figure, path)


def frontier(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Those of which no other is both faster and cheaper, the fastest first."""
    best: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda each: each[1:]):
        if not best or point[2] < best[-1][2]:
            best.append(point)
    return best
