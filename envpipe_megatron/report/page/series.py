"""Measures over the time of a job: steps, power of GPUs and nodes, clocks asked for and seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import CDSView, ColumnDataSource, DataRange1d, IndexFilter, Range1d
from bokeh.models.annotations import BoxAnnotation, Span
from bokeh.plotting import figure
from numpy.typing import NDArray

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.formats.energy import split_phase
from envpipe_megatron.formats.timeline import ClockSamples
from envpipe_megatron.report.drawing.metered import PHASE_COLOURS, PowerSeries, StepSeries
from envpipe_megatron.report.drawing.style import BLUE, GREY, ORANGE, SERIES, VERMILION
from envpipe_megatron.report.page.plots import add_legend, add_tips, new_plot

_HEIGHT_PX = 260
#: Of each line: more than a screen has pixels would not be seen.
_MOST_POINTS = 800


def steps_figures(series: Sequence[StepSeries], predicted: Sequence[float] | None) -> list[figure]:
    """Time and energy of each iteration, one plot each, on one axis of iterations.

    `predicted` are those of the plan that ran last.
    """
    last = max(int(run.iteration[-1]) for run in series)
    shared = Range1d(start=-0.5, end=last + 0.5, bounds=(-0.5, last + 0.5))
    figures = []
    measures = ("iteration time (s)", "time_s"), ("energy of all GPUs (J)", "energy_j")
    for place, (label, column) in enumerate(measures):
        plot, items = _new("iteration", label, shared), []
        for number, run in enumerate(series):
            keep = _thinned(len(run.iteration))
            source = ColumnDataSource(
                {
                    "iteration": run.iteration[keep].astype(np.int32),
                    "value": np.asarray(getattr(run, column))[keep],
                    "phase": [_phase_at(run, at) for at in run.iteration[keep].tolist()],
                }
            )
            colour = SERIES[number % len(SERIES)]
            line = plot.line("iteration", "value", source=source, color=colour)
            dots = plot.scatter(
                "iteration", "value", source=source, color=colour, size=5, alpha=0.6
            )
            items.append((run.run, line))
            add_tips(
                plot,
                dots,
                ("iteration", "@iteration"),
                (label, "@value{0.0000}"),
                ("phase", "@phase"),
            )
        if predicted is not None:
            span = Span(location=predicted[place], dimension="width", line_dash="dashed")
            span.line_color = VERMILION
            plot.add_layout(span)
        if len(series) > 1:
            add_legend(plot, items)
        else:
            for phase, first, end in series[0].phases:
                colour = PHASE_COLOURS.get(split_phase(phase)[0], GREY)
                plot.add_layout(
                    BoxAnnotation(left=first - 0.5, right=end + 0.5, fill_color=colour,
                                  fill_alpha=0.18, line_alpha=0.0, level="underlay",
                                  propagate_hover=True)
                )  # fmt: skip
        figures.append(plot)
    return figures


def _phase_at(run: StepSeries, iteration: int) -> str:
    return next((name for name, first, last in run.phases if first <= iteration <= last), "")


def power_figure(power: PowerSeries) -> figure:
    """Power of each GPU, and the sum of each node's; the page's script shows one of the two."""
    middle_s = (power.edges_s[1:] + power.edges_s[:-1]) / 2
    plot = _new("s", "W", Range1d(start=0.0, end=float(power.edges_s[-1])))
    by_node = {
        node: np.nansum(power.power_w[np.array(power.nodes) == node], axis=0)
        for node in dict.fromkeys(power.nodes)
    }
    gpus = dict(zip(power.names, power.power_w, strict=True))
    for which, lines, visible in (("GPUs", gpus, True), ("nodes", by_node, False)):
        source = ColumnDataSource(
            {
                "x": [middle_s.astype(np.float32)] * len(lines),
                "y": [line.astype(np.float32) for line in lines.values()],
                "name": list(lines),
                "colour": [SERIES[number % len(SERIES)] for number in range(len(lines))],
            }
        )
        drawn = plot.multi_line(
            "x", "y", source=source, color="colour", alpha=0.8, name=f"power {which}",
            visible=visible,
        )  # fmt: skip
        add_tips(plot, drawn, ("", "@name"), ("s", "$x{0.00}"), ("W", "$y{0.0}"))
    return plot


def clocks_figure(samples: Sequence[ClockSamples], offsets_s: Mapping[Any, float]) -> figure:
    """Clocks asked for and seen, of each GPU; the page's script chooses whose are shown."""
    whose: dict[int, list[ClockSamples]] = {}
    for read in samples:
        whose.setdefault(read.labels.rank, []).append(read)
    columns: dict[str, list[Any]] = {"x": [], "y": [], "rank": [], "what": [], "colour": []}
    first_s = math.inf
    for rank, reads in sorted(whose.items()):
        time_s, requested, observed = _joined(reads, offsets_s)
        keep = _thinned(len(time_s))
        first_s = min(first_s, float(time_s[0]))
        for what, values, colour in (("seen", observed, BLUE), ("asked for", requested, ORANGE)):
            columns["x"].append(time_s[keep])
            columns["y"].append(values[keep].astype(np.float32))
            columns["rank"].append(rank)
            columns["what"].append(what)
            columns["colour"].append(colour)
    columns["x"] = [(x - first_s).astype(np.float32) for x in columns["x"]]
    last_s = max(float(x[-1]) for x in columns["x"])
    plot = _new("s after the first look", "MHz", Range1d(start=0.0, end=max(last_s, 1e-3)))
    drawn = plot.multi_line(
        "x", "y", source=ColumnDataSource(columns), color="colour", line_width=1.5,
        legend_field="what", name="clock lines",
        view=CDSView(filter=IndexFilter(indices=[0, 1])),
    )  # fmt: skip
    add_tips(plot, drawn, ("rank", "@rank"), ("", "@what"), ("s", "$x{0.00}"), ("MHz", "$y{0}"))
    return plot


def ranks_of(samples: Sequence[ClockSamples]) -> dict[int, str]:
    """Names of the ranks that clocks were seen of."""
    stages = sorted({(read.labels.rank, read.labels.stage) for read in samples})
    return {rank: f"rank {rank}, stage {stage}" for rank, stage in stages}


def _joined(
    reads: Sequence[ClockSamples], offsets_s: Mapping[Any, float]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Time, requested and observed clock of one GPU; NaN where none was requested."""
    rows = sorted(
        (at - offsets_s.get((read.labels.run, read.labels.node), 0.0), asked, seen)
        for read in reads
        for at, asked, seen in zip(
            read.time_s,
            (math.nan if mhz is None else float(mhz) for mhz in read.requested_mhz),
            read.observed_mhz,
            strict=True,
        )
    )
    time_s, requested, observed = np.array(rows, dtype=float).T
    return time_s, requested, observed


def _thinned(count: int) -> NDArray[np.intp]:
    """Places of at most so many points, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(np.intp))


def _new(x_label: str, y_label: str, x_range: Range1d) -> figure:
    y_range = DataRange1d(start=0, only_visible=True)
    return new_plot(x_label, y_label, _HEIGHT_PX, along_x=True, x_range=x_range, y_range=y_range)
