"""The command behind each figure: train what is missing, then CSV, picture and claims."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from claims import CLAIMS_FILE, Claim, write_claims
from outputs import save_picture, write_csv
from rich.console import Console
from rich.table import Table

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.control import CHOICES
from figures.experiments import BASELINE, EXPERIMENTS, MODELS, Experiment
from figures.findings import claims_of
from figures.hardware import STEPS, Place, find_place, hardware_of
from figures.pictures import draw
from figures.requests import PROFILE_FILE
from figures.rows import Row
from figures.training import read_result, train

#: In the output folder: what was trained, which all figures share.
_RUNS = "runs"
#: Characters of the table, which a narrower terminal or a pipe would cut.
_TABLE_WIDTH = 120


def figure_command(name: str) -> click.Command:
    """The command of one figure."""

    @click.command(help=f"Make {name}: {EXPERIMENTS[name].title}.")
    @click.option(
        "--output",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path("runs/benchmarks"),
        show_default=True,
        help=f"Folder for {name}/ and for {_RUNS}/, where figures find each other's runs.",
    )
    @click.option(
        "--size",
        type=click.Choice(tuple(STEPS)),
        default="reduced",
        show_default=True,
        help="paper: 30 measured steps and every replica; reduced: 10 steps of one replica.",
    )
    @click.option("--stages", type=click.IntRange(2), help="Stages in place of the paper's.")
    @click.option(
        "--gpu-backend",
        type=click.Choice(CHOICES),
        default="auto",
        show_default=True,
        help="How clocks of real GPUs are controlled.",
    )
    def command(output: Path, size: str, stages: int | None, gpu_backend: str) -> None:
        console = Console(width=max(Console().width, _TABLE_WIDTH))
        experiment = _with_stages(EXPERIMENTS[name], stages)
        try:
            rows = make_rows(experiment, find_place(size, gpu_backend), output / _RUNS, console)
        except EnvPipeError as error:
            raise click.ClickException(str(error)) from error
        again = f"python benchmarks/{name}.py"
        if size != "reduced":
            again += f" --size {size}"
        if stages:
            again += f" --stages {stages}"
        leave(experiment, rows, again, output / name, console)

    return command


def _with_stages(experiment: Experiment, stages: int | None) -> Experiment:
    if stages is None:
        return experiment
    jobs = tuple(dict.fromkeys(replace(job, stages=stages) for job in experiment.jobs))
    return replace(experiment, jobs=jobs)


def make_rows(experiment: Experiment, place: Place, folder: Path, console: Console) -> list[Row]:
    """Train what a figure needs and is not there yet; its rows, in the order of its runs.

    Raises:
        ExperimentError: too few GPUs, or a rank failed.
    """
    place.check(experiment)
    if place.emulated:
        console.print(
            "No GPU is used: reduced models train on this machine's CPU, time and energy are those "
            "of emulated GPUs.",
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
        profiled = folder / request.profiling().key / PROFILE_FILE
        profile = profiled if request.needs_profile else None
        rows.append(
            Row(job, setting, hardware, factor, request.job.replicas, result, baseline, profile)
        )
    return rows


def leave(
    experiment: Experiment, rows: list[Row], again: str, folder: Path, console: Console
) -> None:
    """Write a figure's files, and show what stands in them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / f"{experiment.name}.csv", [row.columns() for row in rows])
    save_picture(draw(experiment, rows), folder, experiment.name)
    claims = claims_of(experiment, rows, again)
    write_claims(folder / CLAIMS_FILE, claims)
    console.print(_table(experiment, rows))
    for claim in claims:
        console.print(_sentence(claim), highlight=False, markup=False, soft_wrap=True)
    doubted = [row for row in rows if not row.result.trusted]
    if doubted:
        console.print(
            f"[yellow]Warning: in {len(doubted)} of {len(rows)} runs this machine computed too "
            "slowly for the emulation; see column Trusted.[/yellow]"
        )
    console.print(f"Everything is in {folder}", highlight=False, markup=False, soft_wrap=True)


def _table(experiment: Experiment, rows: list[Row]) -> Table:
    hardware = " and ".join(dict.fromkeys(row.hardware for row in rows))
    table = Table(title=f"{experiment.title}: {hardware}")
    for heading in ("model", "DP PP M", "setting"):
        table.add_column(heading)
    for heading in ("samples/s", "J/step", "saved", "predicted", "slower", "in flight"):
        table.add_column(heading, justify="right")
    for row in rows:
        job, setting, plan = row.job, row.setting, row.result.plan
        table.add_row(
            MODELS[job.model].label,
            f"{job.replicas} {job.stages} {job.num_microbatches}",
            f"{setting.type} {setting.scheduling} {setting.reconfigure}",
            f"{row.throughput:.2f}",
            f"{row.energy_j:.0f}",
            f"{row.saving_percent:.1f} %",
            f"{plan.predicted_saving_percent:.1f} %" if plan else "",
            f"{row.slowdown_percent:+.2f} %",
            str(max(row.peak_in_flight)),
        )
    return table


def _sentence(claim: Claim) -> str:
    verdict = {True: "agrees", False: "contradicts", None: "nothing to compare"}[claim.agrees]
    why = f" {claim.why}" if claim.why else ""
    return f"- {claim.claim}. Paper: {claim.paper} ({verdict}).{why}"
