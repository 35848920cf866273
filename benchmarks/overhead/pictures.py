"""The picture of the overhead: what a unit pays, how late a clock is asked for, and the ratio."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.outputs import BLUE, RED, bare
from benchmarks.overhead.measures import Measure, of_part

_PARTS = (
    ("training thread", "microseconds a unit"),
    ("controller", "microseconds from a unit's end to the driver's call"),
    ("iteration", "time over megatron-core's own 1F1B, median and 95 % interval"),
)


def overhead_figure(measures: Sequence[Measure], basis: str) -> Figure:
    """Panels of training thread, controller and iteration, with medians and 99th percentiles."""
    parts = [(name, label, found) for name, label in _PARTS if (found := of_part(measures, name))]
    bars = [len(found) for _, _, found in parts]
    figure = Figure(figsize=(9.5, 1.2 + len(bars) + 0.4 * sum(bars)), layout="constrained")
    panels = figure.subplots(len(parts), squeeze=False, height_ratios=[n + 1 for n in bars])[:, 0]
    for axes, (name, label, found) in zip(panels, parts, strict=True):
        axes.set_yticks(range(len(found)), [measure.what for measure in found], fontsize=9)
        axes.invert_yaxis()
        axes.set_title(name, fontsize=10, loc="left", fontweight="bold")
        axes.set_xlabel(label, fontsize=9)
        axes.grid(axis="x", color="0.9")
        for position, measure in enumerate(found):
            ends = [end for end in (measure.low, measure.p99, measure.high) if end is not None]
            axes.plot([measure.median, *ends], [position] * (1 + len(ends)), color="0.6", zorder=1)
            axes.plot(measure.median, position, "o", color=BLUE)
            axes.annotate(
                f"{measure.median:.3g}", (measure.median, position), (0, 6),
                textcoords="offset points", ha="center", fontsize=8,
            )  # fmt: skip
            if measure.p99 is not None:
                axes.plot(measure.p99, position, "D", color=RED)
        if name != "iteration":
            axes.set_xscale("log")
        axes.margins(0.1, 0.3)
    bare(*panels)
    title = f"What EnvPipe's machinery costs ({basis}); dots: median, diamonds: 99th percentile"
    figure.suptitle(title, fontsize=10)
    return figure
