"""`envpipe quickstart` and `envpipe prove`: train a small model on this machine."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import OUTPUT_FOLDER, TEXT_OPTION
from envpipe_megatron.cli.jobs.results import report_on, show_sections
from envpipe_megatron.cli.machine.doctor import all_checks
from envpipe_megatron.console import say


@click.command()
@TEXT_OPTION
@click.option("--output", type=OUTPUT_FOLDER, default=Path("runs/quickstart"), show_default=True)
@click.option("--gpu", "preset", default="a100-sxm", show_default=True, help="Emulated GPU.")
def quickstart(text: Path, output: Path, preset: str) -> None:
    """Train a small GPT on this machine, with and without EnvPipe.

    Four pipeline ranks on the CPU, each with an emulated GPU; about three minutes.

    Example:

      envpipe quickstart --text my_book.txt
    """
    from envpipe_megatron.report.report import PAGE_FILE
    from envpipe_megatron.report.summary import RESULT
    from envpipe_megatron.trials.quickstart import Quickstart
    from envpipe_megatron.trials.run import run_trial
    from envpipe_megatron.trials.settings import Settings

    settings = Settings(str(output.resolve()), str(text.resolve()), preset)
    run_trial(Quickstart(settings), Console())
    show_sections(report_on(output, output / "report")[1], RESULT)
    command = (
        f"envpipe plan --profile {shlex.quote(str(output / 'profile.csv'))} --output plan.json"
    )
    command += f" --num-microbatches {settings.num_microbatches}"
    activate = Path(sys.executable).with_name("activate")
    if activate.exists() and shutil.which("envpipe") != str(activate.with_name("envpipe")):
        command = f"source {shlex.quote(str(activate))}\n  {command}"
    say(f"To plan from the profile:\n  {command}")
    say(f"Look at both runs in a browser: {output.resolve() / 'report' / PAGE_FILE}")


@click.command()
@TEXT_OPTION
@click.option("--output", type=OUTPUT_FOLDER, default=Path("runs/prove"), show_default=True)
@click.option("--gpu", "preset", metavar="PRESET", help="Emulated GPUs, on this machine's CPU.")
@click.option(
    "--with-clocks/--without-clocks",
    default=None,
    help="Change clocks, or prove the order only. Default: by the rights of this process.",
)
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(1))
@click.option(
    "--iterations",
    type=click.IntRange(3),
    help="Measured ones of each turn. Default: as many as last 10 s.",
)
def prove(
    text: Path,
    output: Path,
    preset: str | None,
    with_clocks: bool | None,
    rounds: int,
    iterations: int | None,
) -> None:
    """Show what EnvPipe saves on the GPUs of this machine, which must be free of other work.

    Trains a GPT over the GPUs that CUDA shows, in turns. Leaves a page and claims with intervals.

    Where this process may set clocks, it CHANGES THE CLOCKS of these GPUs, and resets them however
    it ends; about 20 minutes. Turns train as the framework does, with clocks locked at every unit,
    at one lower clock, and in two ways of EnvPipe's.

    Without such a right no clock is changed, and the order only is proven, by time and energy
    counters; about 9 minutes on two GPUs. Turns train by the framework's own function, in the same
    order by EnvPipe's interpreter, and in the shortest order, with whole and with split backwards.

    Example:

      envpipe prove --gpu a100-sxm --rounds 2 --iterations 3 --without-clocks
    """
    from envpipe_megatron.trials.machine import emulated_machine, gpt_for_gpus, real_machine
    from envpipe_megatron.trials.proof import Proof
    from envpipe_megatron.trials.run import run_trial
    from envpipe_megatron.trials.settings import Settings

    folder, source = str(output.resolve()), str(text.resolve())
    checks = [asdict(check) for check in all_checks()]
    if preset is not None:
        job = Settings(folder, source, preset)
        machine = emulated_machine(preset, job.num_stages, with_clocks)
    else:
        machine = real_machine(with_clocks)
        job = gpt_for_gpus(folder, source, len(machine.gpu_names))
    settings = job.as_proof(rounds, iterations, changes_clocks=not machine.missing)
    run_trial(Proof(settings, machine, checks), Console())
