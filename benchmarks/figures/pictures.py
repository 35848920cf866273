"""A figure in the manner of the paper's: throughput and energy of each job, baseline = 1."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.figures.experiments import (
    BALANCED,
    BASELINE,
    ENVELOPE,
    GREEDY,
    MODELS,
    UNIFORM,
    Experiment,
    Job,
)
from benchmarks.figures.rows import Row, of_setting
from benchmarks.outputs import BLUE, ORANGE, SKY, YELLOW, bare

#: Colour and words for each setting.
_BARS = {
    BASELINE: ("#999999", "baseline (1F1B, full clock)"),
    UNIFORM: (YELLOW, "uniform (1F1B)"),
    ENVELOPE: (SKY, "EnvPipe, not reconfigured"),
    GREEDY: (ORANGE, "EnvPipe, greedy"),
    BALANCED: (BLUE, "EnvPipe, balanced"),
}
_GROUP_WIDTH = 0.8


def draw(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Two panels over the same jobs; what they ran on stands in the title."""
    groups = len(rows) // len(experiment.settings)
    figure = Figure(figsize=(max(7.0, 1.5 + 1.3 * groups), 6.2), layout="constrained")
    throughput, energy = figure.subplots(2, 1, sharex=True)
    for index, setting in enumerate(experiment.settings):
        mine = of_setting(list(rows), setting)
        _bars(
            throughput,
            index,
            len(experiment.settings),
            mine,
            [1 / (1 + row.slowdown_percent / 100) for row in mine],
        )
        _bars(
            energy,
            index,
            len(experiment.settings),
            mine,
            [1 - row.saving_percent / 100 for row in mine],
        )
    bare(throughput, energy)
    for axes, label in ((throughput, "throughput"), (energy, "energy an iteration")):
        axes.axhline(1, color="black", linewidth=0.6, linestyle=":")
        axes.set_ylabel(f"{label} (baseline = 1)")
        axes.set_ylim(0, 1.12)
        axes.margins(x=0.02)
    jobs = [row.job for row in of_setting(list(rows), experiment.settings[0])]
    energy.set_xticks(
        range(groups), [_label(job, len({j.model for j in jobs}) < groups) for job in jobs]
    )
    hardware = " and ".join(dict.fromkeys(row.hardware for row in rows))
    figure.suptitle(f"{experiment.title}\n{hardware}", fontsize=11)
    figure.legend(
        *throughput.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def _bars(axes: Axes, index: int, of: int, rows: Sequence[Row], heights: Sequence[float]) -> None:
    width = _GROUP_WIDTH / of
    colour, label = _BARS[rows[0].setting]
    left = [group - _GROUP_WIDTH / 2 + index * width for group in range(len(rows))]
    axes.bar(
        left, heights, width, align="edge", color=colour, edgecolor="black", linewidth=0.4,
        label=label,
    )  # fmt: skip
    for x, height in zip(left, heights, strict=True):
        axes.annotate(
            f"{height:.3f}",
            (x + width / 2, height),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


def _label(job: Job, several: bool) -> str:
    label = f"{MODELS[job.model].label}\n{job.microbatch_size}/{job.minibatch_size}"
    if job.replicas > 1:
        return f"{label}\nDP{job.replicas} PP{job.stages}"
    return f"{label}\nM={job.num_microbatches}" if several else label
