"""One of EnvPipe's figures: train what is missing, then rows, picture and findings.

python benchmarks/figures/figure.py fig9_a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.figures.experiments import (
    BALANCED,
    BASELINE,
    ENVELOPE,
    EXPERIMENTS,
    GREEDY,
    MODELS,
    UNIFORM,
    Experiment,
    Job,
)
from benchmarks.figures.findings import Finding, findings_of
from benchmarks.figures.requests import PROFILE_FILE, SIZES, Place, hardware_of, read_result, train
from benchmarks.figures.rows import EMULATED, Row, of_setting
from benchmarks.outputs import leave, make_console, make_table
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.control import CHOICES

_SHOWN = (
    "Model", "Stages", "Microbatches", "Type", "Scheduling", "Reconfig", "Throughput (sample/s)",
    "Energy (mJ)", "Saving (%)", "Predicted saving (%)", "Slowdown (%)", "Peak in flight",
)  # fmt: skip
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
#: In the output folder: what was trained, which all figures share.
_RUNS = "runs"


def figure_command(name: str) -> click.Command:
    """The command of one figure."""
    models = tuple(dict.fromkeys(job.model for job in EXPERIMENTS[name].jobs))

    @click.command(help=f"Make {name}: {EXPERIMENTS[name].title}. GPUs are emulated by default.")
    @click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs/benchmarks"),
        show_default=True,
        help=f"Folder for {name}/ and for {_RUNS}/, where figures find each other's runs.",
    )
    @click.option(
        "--size",
        type=click.Choice(SIZES),
        default="reduced",
        show_default=True,
        help="reduced: of a job of several replicas one, and 10 measured steps in place of 30.",
    )
    @click.option(
        "--model",
        "chosen",
        type=click.Choice(models),
        multiple=True,
        help="A model of the figure, in place of all; may be repeated.",
    )
    @click.option("--stages", type=click.IntRange(2), help="Stages in place of the paper's.")
    @click.option(
        "--forward-ms",
        type=click.IntRange(1),
        default=Place.forward_ms,
        show_default=True,
        help="Wall time of a pipeline's longest forward on emulated GPUs: a slow machine needs "
        "longer ones to keep up.",
    )
    @click.option(
        "--real-gpus",
        is_flag=True,
        help="Train at full size on this machine's GPUs, and set their clocks.",
    )
    @click.option(
        "--gpu-backend",
        type=click.Choice([choice for choice in CHOICES if choice != EMULATED]),
        help="The same with this control of clocks, in place of the best that is allowed.",
    )
    def command(
        output: Path,
        size: str,
        chosen: tuple[str, ...],
        stages: int | None,
        forward_ms: int,
        real_gpus: bool,
        gpu_backend: str | None,
    ) -> None:
        console = make_console()
        experiment = _narrowed(EXPERIMENTS[name], chosen, stages)
        gpus = torch.cuda.device_count() if real_gpus or gpu_backend else None
        place = Place(size, gpus, gpu_backend or Place.backend, forward_ms)
        try:
            rows = make_rows(experiment, place, output / _RUNS, console)
            leave_figure(experiment, rows, output / name, console)
        except EnvPipeError as error:
            raise click.ClickException(str(error)) from error

    return command


def _narrowed(experiment: Experiment, models: Sequence[str], stages: int | None) -> Experiment:
    """A figure of some models (of all, where none is named), with other stages where given."""
    jobs = [job for job in experiment.jobs if not models or job.model in models]
    if stages is not None:
        jobs = [replace(job, stages=stages) for job in jobs]
    return replace(experiment, jobs=tuple(dict.fromkeys(jobs)))


def make_rows(experiment: Experiment, place: Place, folder: Path, console: Console) -> list[Row]:
    """Train what a figure needs and is not there yet; its rows, in the order of its runs."""
    place.check(experiment)
    if place.emulated:
        console.print(
            "No GPU is used: reduced models train on this machine's CPU, time and energy are those "
            "of emulated GPUs. Real ones are used with --real-gpus.",
            soft_wrap=True,
        )
    train([place.request(*run) for run in experiment.runs()], folder, console)
    rows = []
    for job, setting in experiment.runs():
        request = place.request(job, setting)
        result, baseline = (
            read_result(folder, asked) for asked in (request, place.request(job, BASELINE))
        )
        assert result is not None
        assert baseline is not None
        factor = request.emulated.factor if request.emulated else 1.0
        hardware = hardware_of(request, result)
        # Without clock control there is no profile: nothing is profiled or planned.
        profiled = folder / request.profiling().key / PROFILE_FILE
        profile = profiled if request.needs_profile and profiled.is_file() else None
        measured = request.steps, request.job.replicas, result, baseline, profile
        rows.append(Row(job, setting, hardware, factor, *measured))
    return rows


def leave_figure(experiment: Experiment, rows: list[Row], folder: Path, console: Console) -> None:
    """Write a figure's files, and print what they say."""
    columns = [row.columns() for row in rows]
    findings = findings_of(experiment, rows)
    found = [finding.columns() for finding in findings]
    tables: dict[str, list[Any]] = {experiment.name: columns, f"{experiment.name} findings": found}
    leave(folder, "emulated" if rows[0].emulated else "GPUs", tables)
    _save_picture(experiment, rows, folder)
    hardware = " and ".join(dict.fromkeys(row.hardware for row in rows))
    console.print(make_table(f"{experiment.title}: {hardware}", columns, _SHOWN))
    for finding in findings:
        console.print(_sentence(finding), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Everything is in {folder}", highlight=False, markup=False, soft_wrap=True)


def _sentence(finding: Finding) -> str:
    found = finding.columns()
    return f"- {finding.seen}. Paper: {finding.paper} ({found['verdict']}). {finding.why}".rstrip()


main = click.Group(
    commands={name: figure_command(name) for name in EXPERIMENTS},
    help="Make one of EnvPipe's figures.",
)


def _save_picture(experiment: Experiment, rows: Sequence[Row], folder: Path) -> None:
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


if __name__ == "__main__":
    main()
