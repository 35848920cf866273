"""`envpipe report`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import OUTPUT_FOLDER
from envpipe_megatron.console import say, table_of

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
    from envpipe_megatron.cli.jobs.report_facts import report_facts
    from envpipe_megatron.report.report import PAGE_FILE, SUMMARY_FILE, TRACE_FILE, write_report
    from envpipe_megatron.report.run_folder import read_run_folder

    read = read_run_folder(folder)
    written = output or folder / "report"
    result, *_ = write_report(read, report_facts(read), written)
    console = Console()
    if result.rows:
        console.print(table_of(folder.resolve().name, result.header, result.rows))
    for line in (*result.lines, *(f"Missing: {lack}" for lack in read.missing)):
        say(console, line)
    say(console, f"The report is in {written}: {SUMMARY_FILE}, {PAGE_FILE}, {TRACE_FILE}")
