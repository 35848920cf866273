"""`envpipe quickstart` and `prove` train here; `report` and `energy` read what a run left."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from envpipe_megatron.cli.common import (
    EXISTING_FILE,
    INTENSITY_OPTION,
    OUTPUT_FOLDER,
    PRICE_OPTION,
    TEXT_OPTION,
)
from envpipe_megatron.cli.machine.doctor import all_checks
from envpipe_megatron.console import say, say_working, show_table
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.account import Tariff
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.bill import bill_facts, show_bill

if TYPE_CHECKING:
    from envpipe_megatron.report.run_folder import RunFolder
    from envpipe_megatron.report.summary import Section

logger = logging.getLogger(__name__)

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)

#: Torn lines that are named; the others are counted.
_NAMED_LINES = 5


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option("--output", type=OUTPUT_FOLDER, help="Folder for the report.  [default: DIR/report]")
@PRICE_OPTION
@INTENSITY_OPTION
def report(folder: Path, output: Path | None, **prices: float | None) -> None:
    """Make pictures, tables and a trace from what a run left in DIR.

    DIR is what --output of `launch` and `quickstart`, or a job's --envpipe-output, named. The
    report has index.html to look at, summary.md to paste with its pictures (PNG), and
    trace.json.gz for ui.perfetto.dev. What the folder lacks is named.

    Example:

      envpipe report runs/quickstart
    """
    from envpipe_megatron.report.page.document import PAGE_FILE, SUMMARY_FILE, TRACE_FILE
    from envpipe_megatron.report.summary import BUBBLES, LEVELS, RESULT

    written = output or folder / "report"
    read, sections = report_on(folder, written, Tariff(**prices))
    show_sections(sections, RESULT, BUBBLES, LEVELS)
    for lack in read.missing:
        say(f"Missing: {lack}")
    say(f"The report is in {written}: {SUMMARY_FILE}, {PAGE_FILE}, {TRACE_FILE}")


def show_sections(sections: Iterable[Section], *titles: str) -> None:
    """Print sections of a report."""
    from envpipe_megatron.report.summary import BUBBLES

    for section in sections:
        if section.title in titles:
            if section.rows and section.title != BUBBLES:  # these have a row for each GPU
                show_table(section.title, section.header, section.rows)
            for line in section.lines:
                say(line)


def report_on(folder: Path, output: Path, tariff: Tariff) -> tuple[RunFolder, list[Section]]:
    """Write the report of a run's folder; what was read of it, and what the summary says."""
    from envpipe_megatron.report.facts import report_facts
    from envpipe_megatron.report.page.document import write_report
    from envpipe_megatron.report.run_folder import read_run_folder

    say_working(f"Reading {folder}")
    read = read_run_folder(folder)
    say_working("Making pictures, summary, page and trace")
    return read, write_report(read, report_facts(read, tariff), output)


@click.group()
def energy() -> None:
    """Read what training has metered.

    Example:

      envpipe energy sum node0/energy.jsonl node1/energy.jsonl
    """


@energy.command(name="sum")
@click.argument("files", type=EXISTING_FILE, nargs=-1, required=True)
@PRICE_OPTION
@INTENSITY_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def sum_energy(files: tuple[Path, ...], as_json: bool, **prices: float | None) -> None:
    """Add up energy logs: per phase, GPU, stage and node, and of the whole job.

    FILES are the energy logs of each node of a job. A line that is given twice counts once; torn
    lines, which killed jobs leave, are passed over, and named as what the sum lacks. So is a node
    whose agent was lost. JSON has each GPU's phases too.

    \b
    Example:
      envpipe energy sum node0/energy.jsonl node1/energy.jsonl \\
          --price 0.2 --grid-intensity 350
    """
    bill, tariff = Bill(), Tariff(**prices)
    logs = read_energy_logs(files, bill.add)
    if logs.foreign or not bill.nodes:
        file = logs.foreign[0] if logs.foreign else files[-1]
        raise EnvPipeError(
            f"{file} holds no line of an energy log",
            remedy="Give the energy.jsonl files that training under EnvPipe leaves.",
        )
    bill.unreadable = len(logs.unreadable)
    if as_json:
        facts = bill_facts(bill, tariff) | {
            "repeated_lines": logs.repeated,
            "unreadable_lines": list(logs.unreadable),
        }
        click.echo(json.dumps(facts, indent=1))
        return
    show_bill(bill, tariff, Console())
    if logs.unreadable:
        named = ", ".join(logs.unreadable[:_NAMED_LINES])
        logger.warning("%d torn or foreign lines passed over: %s", len(logs.unreadable), named)
    if logs.repeated:
        logger.warning("%d lines were given twice and counted once", logs.repeated)


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
    from envpipe_megatron.report.page.document import PAGE_FILE
    from envpipe_megatron.report.summary import RESULT
    from envpipe_megatron.trials.machine import emulated_machine
    from envpipe_megatron.trials.run import Trial, run_trial
    from envpipe_megatron.trials.settings import Settings

    settings = Settings(str(output.resolve()), str(text.resolve()), preset)
    run_trial(Trial(settings, emulated_machine(preset, settings.num_stages, None)), Console())
    tariff = Tariff.of_environment(os.environ)
    show_sections(report_on(output, output / "report", tariff)[1], RESULT)
    command = (
        f"envpipe plan --profile {shlex.quote(str(output / 'profile.csv'))} --output plan.json"
    )
    command += f" --num-microbatches {settings.num_microbatches}"
    activate = Path(sys.executable).with_name("activate")
    if activate.exists() and shutil.which("envpipe") != str(activate.with_name("envpipe")):
        command = f"source {shlex.quote(str(activate))}\n  {command}"
    say(f"To plan from the profile:\n  {command}")
    say(f"Look at it in a browser: {output.resolve() / 'report' / PAGE_FILE}")


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
    from envpipe_megatron.trials.machine import emulated_machine, real_machine
    from envpipe_megatron.trials.run import Trial, run_trial
    from envpipe_megatron.trials.settings import Settings, gpt_for_gpus

    folder, source = str(output.resolve()), str(text.resolve())
    checks = [asdict(check) for check in all_checks()]
    if preset is not None:
        job = Settings(folder, source, preset)
        machine = emulated_machine(preset, job.num_stages, with_clocks)
    else:
        machine = real_machine(with_clocks)
        job = gpt_for_gpus(folder, source, len(machine.gpu_names))
    settings = job.as_proof(rounds, iterations, changes_clocks=not machine.missing)
    run_trial(Trial(settings, machine, checks), Console())
    say(f"The page is {output.resolve() / 'index.html'}")
