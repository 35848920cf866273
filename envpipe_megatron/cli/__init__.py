"""The `envpipe` command: each subcommand is a module of this package."""

from __future__ import annotations

import logging
import signal

import click
from rich.console import Console
from rich.logging import RichHandler

from envpipe_megatron import __version__
from envpipe_megatron.cli.common import ErrorsAsMessages
from envpipe_megatron.cli.jobs.explain import explain
from envpipe_megatron.cli.jobs.launch import launch
from envpipe_megatron.cli.jobs.patch import patch
from envpipe_megatron.cli.jobs.profile import profile
from envpipe_megatron.cli.jobs.results import energy, prove, quickstart, report
from envpipe_megatron.cli.machine.clocks import clocks
from envpipe_megatron.cli.machine.doctor import doctor
from envpipe_megatron.cli.plans.made_plans import (
    compare,
    export_freqs,
    export_schedule,
    import_freqs,
    simulate,
    straggler,
)
from envpipe_megatron.cli.plans.plan import plan
from envpipe_megatron.cli.plans.search import partition, search_command

_FIRST_STEPS = """Three things to do next:

  envpipe quickstart            train a small GPT here, without a GPU, and see what is saved
  envpipe doctor                what this machine's GPUs, drivers and rights allow
  envpipe patch apply CHECKOUT  then add --envpipe to a Megatron job; with
                                --envpipe-level observe it is only watched, and
                                envpipe report shows its bubbles

All commands: envpipe --help"""


@click.group(
    cls=ErrorsAsMessages,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="envpipe")
@click.pass_context
def main(context: click.Context) -> None:
    """Save energy in pipeline-parallel training without slowing it down."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would keep exit statuses back
    if context.invoked_subcommand is None:
        click.echo(_FIRST_STEPS)
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


for command in (
    profile,
    plan,
    simulate,
    compare,
    straggler,
    partition,
    search_command,
    import_freqs,
    export_freqs,
    export_schedule,
    quickstart,
    prove,
    explain,
    launch,
    energy,
    report,
    clocks,
    doctor,
    patch,
):
    main.add_command(command)
