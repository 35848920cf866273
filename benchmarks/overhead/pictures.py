"""The picture of the overhead: what a unit pays, how late a clock is asked for, and the ratio."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.outputs import BLUE, RED, bare
from benchmarks.overhead.measures import Measure, of_part

_MEDIAN, _P99 = BLUE, RED


def overhead_figure(measures: Sequence[Measure], basis: str) -> Figure:
    """Panels of training thread, controller and iteration."""
    parts = [
        ("training thread", "microseconds a unit (logarithmic)"),
        ("controller", "microseconds from a unit's end to the driver's call (logarithmic)"),
        ("iteration", "time over megatron-core's own 1F1B, median and 95 % interval"),
    ]
    own = [(name, label, of_part(measures, name)) for name, label in parts]
    own = [(name, label, found) for name, label, found in own if found]
    figure = Figure(figsize=(9.5, 1.2 + sum(1.0 + 0.36 * len(f) for _, _, f in own)),
                    layout="constrained")  # fmt: skip
    panels = figure.subplots(
        len(own), 1, squeeze=False, height_ratios=[len(found) + 1.0 for _, _, found in own]
    )[:, 0]
    for axes, (name, label, found) in zip(panels, own, strict=True):
        names = [measure.what for measure in found]
        axes.set_yticks(range(len(found)), names, fontsize=9)
        axes.set_ylim(len(found) - 0.4, -0.6)
        axes.set_title(name, fontsize=10, loc="left", fontweight="bold")
        axes.set_xlabel(label, fontsize=9)
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        bare(axes)
        draw = _draw_ratio if name == "iteration" else _draw_spread
        draw(axes, found)
    handles = [
        Line2D([], [], marker="o", ls="", color=_MEDIAN, label="median"),
        Line2D([], [], marker="D", ls="", color=_P99, label="99th percentile"),
    ]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False)
    figure.suptitle(f"What EnvPipe's machinery costs ({basis})", fontsize=11)
    return figure


def _draw_spread(axes: Axes, measures: Sequence[Measure]) -> None:
    """A line from the median to the 99th percentile."""
    for position, measure in enumerate(measures):
        p99 = measure.p99 if measure.p99 is not None else measure.median
        axes.plot([measure.median, p99], [position, position], color="0.6", zorder=1)
        axes.plot(measure.median, position, "o", color=_MEDIAN)
        axes.plot(p99, position, "D", color=_P99)
        for value, align, offset in ((measure.median, "right", -6), (p99, "left", 6)):
            text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            axes.annotate(
                text, (value, position), (offset, 0), textcoords="offset points",
                ha=align, va="center", fontsize=8,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.margins(x=0.15)


def _draw_ratio(axes: Axes, measures: Sequence[Measure]) -> None:
    """The median ratio and its interval; a line at 1."""
    axes.axvline(1.0, color="black", linewidth=1.0)
    for position, measure in enumerate(measures):
        assert measure.low is not None
        assert measure.high is not None
        ends = [[measure.median - measure.low], [measure.high - measure.median]]
        axes.errorbar(measure.median, position, xerr=ends, fmt="o", color=_MEDIAN, capsize=4)
        axes.annotate(
            f"{measure.median:.3f}", (measure.median, position), (0, 6),
            textcoords="offset points", ha="center", fontsize=8,
        )  # fmt: skip
    axes.margins(x=0.1)
