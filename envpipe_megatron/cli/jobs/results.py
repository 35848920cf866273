"""`envpipe report` and `envpipe energy`: what a run left."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from envpipe_megatron.cli.common import EXISTING_FILE, OUTPUT_FOLDER, Finite
from envpipe_megatron.console import say, say_working, show_table
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.bill.bill import bill_of
from envpipe_megatron.launch.bill.report import Tariff, bill_facts, show_bill

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
def report(folder: Path, output: Path | None) -> None:
    """Make pictures, tables and a trace from what a run left in DIR.

    DIR is what --output of `launch` and `quickstart`, or a job's --envpipe-output, named. The
    report has index.html to look at, summary.md to paste with its pictures (PNG), and
    trace.json.gz for ui.perfetto.dev. What the folder lacks is named.

    Example:

      envpipe report runs/quickstart
    """
    from envpipe_megatron.report.report import PAGE_FILE, SUMMARY_FILE, TRACE_FILE
    from envpipe_megatron.report.summary import BUBBLES, LEVELS, RESULT

    written = output or folder / "report"
    read, sections = report_on(folder, written)
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


def report_on(folder: Path, output: Path) -> tuple[RunFolder, list[Section]]:
    """Write the report of a run's folder; what was read of it, and what the summary says."""
    from envpipe_megatron.cli.jobs.report_facts import report_facts
    from envpipe_megatron.report.report import write_report
    from envpipe_megatron.report.run_folder import read_run_folder

    say_working(f"Reading {folder}")
    read = read_run_folder(folder)
    say_working("Making pictures, summary, page and trace")
    return read, write_report(read, report_facts(read), output)


@click.group()
def energy() -> None:
    """Read what training has metered.

    Example:

      envpipe energy sum node0/energy.jsonl node1/energy.jsonl
    """


@energy.command(name="sum")
@click.argument("files", type=EXISTING_FILE, nargs=-1, required=True)
@click.option("--price", type=Finite(min=0), help="Price of a kWh, for a line of cost.")
@click.option("--grid-intensity", type=Finite(min=0), help="g of CO2 a kWh, for a line of CO2.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def sum_energy(
    files: tuple[Path, ...], price: float | None, grid_intensity: float | None, as_json: bool
) -> None:
    """Add up energy logs: per phase, GPU, stage and node, and of the whole job.

    FILES are the energy logs of each node of a job. A line that is given twice counts once; torn
    lines, which killed jobs leave, are passed over, and named as what the sum lacks. So is a node
    whose agent was lost. JSON has each GPU's phases too.

    Example:

      envpipe energy sum node0/energy.jsonl node1/energy.jsonl --price 0.2 --grid-intensity 350
    """
    logs = read_energy_logs(files)
    bill, tariff = bill_of(logs.lines), Tariff(price, grid_intensity)
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
