"""A figure in the manner of the paper's: throughput and energy of each job, baseline = 1."""

from __future__ import annotations

from collections.abc import Sequence

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
from benchmarks.outputs import BLUE, ORANGE, SKY, YELLOW, grouped_bars

_BARS = {
    BASELINE: ("#999999", "baseline (1F1B, full clock)"),
    UNIFORM: (YELLOW, "uniform (1F1B)"),
    ENVELOPE: (SKY, "EnvPipe, not reconfigured"),
    GREEDY: (ORANGE, "EnvPipe, greedy"),
    BALANCED: (BLUE, "EnvPipe, balanced"),
}


def draw(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Two panels over the same jobs; the title says what they ran on."""
    groups = len(rows) // len(experiment.settings)
    figure = Figure(figsize=(max(7.0, 1.5 + 1.3 * groups), 6.2), layout="constrained")
    throughput, energy = figure.subplots(2, 1, sharex=True)
    jobs = [row.job for row in of_setting(list(rows), experiment.settings[0])]
    several = len({job.model for job in jobs}) < len(jobs)
    labels = [_label(job, several) for job in jobs]
    colours = [_BARS[setting][0] for setting in experiment.settings]
    for axes, label in ((throughput, "throughput"), (energy, "energy an iteration")):
        series = {}
        for setting in experiment.settings:
            own = of_setting(list(rows), setting)
            heights = [1 - row.saving_percent / 100 for row in own]
            if axes is throughput:
                heights = [1 / (1 + row.slowdown_percent / 100) for row in own]
            series[_BARS[setting][1]] = [(height, f"{height:.3f}") for height in heights]
        grouped_bars(axes, labels, series, colours)
        axes.axhline(1, color="black", linewidth=0.6, linestyle=":")
        axes.set_ylabel(f"{label} (baseline = 1)")
        axes.set_ylim(0, 1.25)
    hardware = " and ".join(dict.fromkeys(row.hardware for row in rows))
    figure.suptitle(f"{experiment.title}\n{hardware}", fontsize=11)
    figure.legend(
        *throughput.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
    )
    return figure


def _label(job: Job, several: bool) -> str:
    label = f"{MODELS[job.model].label}\n{job.microbatch_size}/{job.minibatch_size}"
    if job.replicas > 1:
        return f"{label}\nDP{job.replicas} PP{job.stages}"
    return f"{label}\nM={job.num_microbatches}" if several else label
