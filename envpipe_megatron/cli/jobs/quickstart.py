"""`envpipe quickstart`."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import OUTPUT_FOLDER, TEXT_OPTION
from envpipe_megatron.cli.jobs.report import report_on
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
    from envpipe_megatron.quickstart.run import run_quickstart
    from envpipe_megatron.quickstart.settings import Settings
    from envpipe_megatron.report.report import PAGE_FILE

    console = Console()
    settings = Settings(str(output.resolve()), str(text.resolve()), preset)
    run_quickstart(settings, console)
    report_on(output, output / "report")
    command = (
        f"envpipe plan --profile {shlex.quote(str(output / 'profile.csv'))} --output plan.json"
    )
    command += f" --num-microbatches {settings.num_microbatches}"
    activate = Path(sys.executable).with_name("activate")
    if activate.exists() and shutil.which("envpipe") != str(activate.with_name("envpipe")):
        command = f"source {shlex.quote(str(activate))}\n  {command}"
    say(console, f"To plan from the profile:\n  {command}")
    say(console, f"Look at both runs in a browser: {output.resolve() / 'report' / PAGE_FILE}")
