"""Pictures of what was asked of GPUs: their clocks, and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from envpipe_megatron.report.drawing.style import (
    BLUE,
    ORANGE,
    add_colour_bar,
    clock_map,
    dress,
    legend_below,
    letters_on,
    new_figure,
    scale_range,
    set_title,
)

_GIB = 2**30


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
