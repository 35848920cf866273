"""Measures over the time of a job: its steps, and the power of GPUs and nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bokeh.core.properties import field
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from envpipe_megatron.formats.energy import split_phase
from envpipe_megatron.report.drawing.metered import PHASE_COLOURS, PowerSeries, StepSeries
from envpipe_megatron.report.drawing.style import GREY, SERIES, VERMILION
from envpipe_megatron.report.page.plots import add_legend, add_tips, over_time_plot, thinned
from envpipe_megatron.report.page.predictions import Prediction


def steps_figures(series: Sequence[StepSeries], predicted: Sequence[Prediction]) -> list[figure]:
    """Time and energy of each iteration, one plot each, on one axis of iterations."""
    last = max(int(run.iteration[-1]) for run in series)
    shared = Range1d(start=-0.5, end=last + 0.5, bounds=(-0.5, last + 0.5))
    figures = []
    measures = ("iteration time (s)", "time_s"), ("energy of all GPUs (J)", "energy_j")
    for label, column in measures:
        plot, items = over_time_plot("iteration", label, shared), []
        for number, run in enumerate(series):
            keep = thinned(len(run.iteration))
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
        if predicted:
            _draw_predicted(plot, predicted, column, last)
        if len(series) > 1:
            add_legend(plot, items)
        else:
            named = {}
            for phase, first, end in series[0].phases:
                name = split_phase(phase)[0]
                colour = PHASE_COLOURS.get(name, GREY)
                if name not in named:  # a box has no entry in a legend
                    named[name] = plot.scatter(
                        [first], [np.nan], marker="square", size=12, color=colour, alpha=0.3
                    )
                plot.add_layout(
                    BoxAnnotation(left=first - 0.5, right=end + 0.5, fill_color=colour,
                                  fill_alpha=0.18, line_alpha=0.0, level="underlay",
                                  propagate_hover=True)
                )  # fmt: skip
            add_legend(plot, named.items())
        figures.append(plot)
    return figures


def _draw_predicted(plot: figure, predicted: Sequence[Prediction], column: str, last: int) -> None:
    source = ColumnDataSource(
        {
            "begin": [one.begin for one in predicted],
            "end": [last + 1 if one.end is None else one.end for one in predicted],
            "value": [getattr(one, column) for one in predicted],
            "said": [one.said for one in predicted],
        }
    )
    steps = plot.segment(
        "begin", "value", "end", "value", source=source, color=VERMILION, line_dash="dashed",
        line_width=1.5, name=f"predicted {column}",
    )  # fmt: skip
    tips = ("from iteration", "@begin"), ("predicted", "@value{0.0000}"), ("", "@said")
    add_tips(plot, steps, *tips)


def _phase_at(run: StepSeries, iteration: int) -> str:
    return next((name for name, first, last in run.phases if first <= iteration <= last), "")


def power_figure(power: PowerSeries) -> figure:
    """Power of each GPU, and the sum of each node's; the page's script shows one of the two."""
    middle_s = (power.edges_s[1:] + power.edges_s[:-1]) / 2
    plot = over_time_plot("s", "W", Range1d(start=0.0, end=float(power.edges_s[-1])))
    by_node = {
        node: np.nansum(power.power_w[np.array(power.nodes) == node], axis=0)
        for node in dict.fromkeys(power.nodes)
    }
    gpus = dict(zip(power.names, power.power_w, strict=True))
    items = []
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
        if len(lines) <= len(SERIES):  # more have no colour of their own
            items.append((field("name"), drawn))
    add_legend(plot, items)
    return plot
