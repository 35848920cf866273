"""Measures over the time of a job: steps beside predictions, and the power of GPUs and nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from bokeh.core.properties import field
from bokeh.models import ColumnDataSource, Range1d
from bokeh.models.annotations import BoxAnnotation
from bokeh.plotting import figure

from envpipe_megatron.formats.energy import Phase, split_phase
from envpipe_megatron.report.drawing.metered import PHASE_COLOURS, PowerSeries, StepSeries
from envpipe_megatron.report.drawing.style import GREY, SERIES, VERMILION
from envpipe_megatron.report.facts import ReportFacts
from envpipe_megatron.report.page.plots import add_legend, add_tips, over_time_plot, thinned
from envpipe_megatron.report.run_folder import RunFolder


class Prediction(NamedTuple):
    """Cost of an iteration on all GPUs, from `begin` up to `end`, not included, if it ended.

    `said` is what the job said when it began.
    """

    begin: int
    end: int | None
    time_s: float
    energy_j: float
    said: str


def predictions_of(folder: RunFolder, facts: ReportFacts) -> list[Prediction]:
    """Predictions for batches of full size, in order; by the last plan without a closed loop.

    While the loop is back in the framework's order nothing is predicted.
    """
    steps, plan = facts.steady or facts.baseline, folder.plan
    if steps is None or not folder.num_stages:
        return []
    pipelines = steps.num_gpus / folder.num_stages
    told = _of_latest_starts([entry for entry in folder.loop if not entry.get("batch")])
    if told:
        return list(_predictions(told, pipelines))
    if plan is None:
        return []
    joules = pipelines * plan.cost.energy_j
    return [Prediction(0, None, plan.cost.iteration_time_s, joules, "the plan of the job")]


def _of_latest_starts(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of iterations: a start that begins at an earlier one replaces what came before.

    The runs of starts end with their instants, so that they sort.
    """
    kept: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda one: (str(one.get("run", "")), one["iteration"])):
        while kept and kept[-1]["iteration"] > entry["iteration"]:
            kept.pop()
        kept.append(entry)
    return kept


def _predictions(told: list[dict[str, Any]], pipelines: float) -> Iterator[Prediction]:
    cost: tuple[float, float] | None = None
    for now, after in pairwise([*told, None]):
        assert now is not None
        if now["time_s"] is not None:
            cost = now["time_s"], pipelines * now["energy_j"]
        end = None if after is None else after["iteration"]
        if cost is not None and now["phase"] != Phase.BASELINE:
            yield Prediction(now["iteration"], end, *cost, now["note"])
        if after is not None and after.get("run") != now.get("run"):
            cost = None


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
