"""A figure in the manner of the paper's: throughput and energy of each job, baseline = 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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

_DPI = 160
#: Of a group of bars, where groups are 1 apart.
_GROUP_WIDTH = 0.84
#: Of Okabe and Ito: readers with any colour vision can tell them apart.
_BARS = {
    BASELINE: ("#999999", "baseline (1F1B, full clock)"),
    UNIFORM: ("#F0E442", "uniform (1F1B)"),
    ENVELOPE: ("#56B4E9", "EnvPipe, not reconfigured"),
    GREEDY: ("#E69F00", "EnvPipe, greedy"),
    BALANCED: ("#0072B2", "EnvPipe, balanced"),
}


def save_picture(experiment: Experiment, rows: Sequence[Row], folder: Path) -> None:
    """Draw a figure as PNG for a glance and as SVG for a paper, by its name."""
    figure = _draw(experiment, rows)
    figure.savefig(folder / f"{experiment.name}.png", dpi=_DPI)
    figure.savefig(folder / f"{experiment.name}.svg", metadata={"Date": None})


def _draw(experiment: Experiment, rows: Sequence[Row]) -> Figure:
    """Draw two panels over the same jobs; the title says what they ran on."""
    jobs = [row.job for row in of_setting(list(rows), experiment.settings[0])]
    figure = Figure(figsize=(max(7.0, 1.5 + 1.3 * len(jobs)), 6.2), layout="constrained")
    throughput, energy = figure.subplots(2, 1, sharex=True)
    several = len({job.model for job in jobs}) < len(jobs)
    width = _GROUP_WIDTH / len(experiment.settings)
    for axes, label in ((throughput, "throughput"), (energy, "energy an iteration")):
        for index, setting in enumerate(experiment.settings):
            own = of_setting(list(rows), setting)
            heights = [1 - row.saving_percent / 100 for row in own]
            if axes is throughput:
                heights = [1 / (1 + row.slowdown_percent / 100) for row in own]
            left = [group - _GROUP_WIDTH / 2 + index * width for group in range(len(own))]
            colour, words = _BARS[setting]
            bars = axes.bar(
                left, heights, width, align="edge", label=words, color=colour, edgecolor="black",
                linewidth=0.4,
            )  # fmt: skip
            axes.bar_label(bars, fmt="%.3f", padding=3, fontsize=7, rotation=90)
        axes.set_xticks(range(len(jobs)), [_label(job, several) for job in jobs], fontsize="small")
        axes.margins(x=0.02)
        axes.spines[["top", "right"]].set_visible(False)
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
