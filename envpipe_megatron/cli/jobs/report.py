"""`envpipe report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from envpipe_megatron.cli.common import OUTPUT_FOLDER
from envpipe_megatron.console import say, say_working, show_tables, table_of

if TYPE_CHECKING:
    from envpipe_megatron.report.run_folder import RunFolder
    from envpipe_megatron.report.summary import Section

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("folder", metavar="DIR", type=_FOLDER)
@click.option("--output", type=OUTPUT_FOLDER, help="Folder for the report.  [default: DIR/report]")
def report(folder: Path, output: Path | None) -> None:
    """Make pictures, tables and a trace from what a run left in DIR.

    DIR is what --output of `launch` and `quickstart`, or a job's --envpipe-output, named. The
    report has each picture as PNG and SVG, summary.md to paste, index.html to look at, and
    trace.json.gz for ui.perfetto.dev. What the folder lacks is named.

    Example:

      envpipe report runs/quickstart
    """
    from envpipe_megatron.report.report import PAGE_FILE, SUMMARY_FILE, TRACE_FILE
    from envpipe_megatron.report.summary import BUBBLES, LEVELS, RESULT

    written = output or folder / "report"
    read, sections = report_on(folder, written)
    console = Console()
    for section in sections:
        if section.title not in (RESULT, BUBBLES, LEVELS):
            continue
        if section.rows and section.title != BUBBLES:  # these have a row for each GPU
            show_tables(console, table_of(section.title, section.header, section.rows))
        for line in section.lines:
            say(console, line)
    for lack in read.missing:
        say(console, f"Missing: {lack}")
    say(console, f"The report is in {written}: {SUMMARY_FILE}, {PAGE_FILE}, {TRACE_FILE}")


def report_on(folder: Path, output: Path) -> tuple[RunFolder, list[Section]]:
    """Write the report of a run's folder; what was read of it, and what the summary says."""
    from envpipe_megatron.cli.jobs.report_facts import report_facts
    from envpipe_megatron.report.report import write_report
    from envpipe_megatron.report.run_folder import read_run_folder

    say_working(f"Reading {folder}")
    read = read_run_folder(folder)
    say_working("Making pictures, summary, page and trace")
    return read, write_report(read, report_facts(read), output)
