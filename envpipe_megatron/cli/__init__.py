"""The `envpipe` command: each subcommand is a module of this package."""

from __future__ import annotations

import logging

import click
from rich.console import Console
from rich.logging import RichHandler

from envpipe_megatron import __version__
from envpipe_megatron.cli.clocks import clocks
from envpipe_megatron.cli.common import ErrorsAsMessages
from envpipe_megatron.cli.doctor import doctor
from envpipe_megatron.cli.energy import energy
from envpipe_megatron.cli.interchange import export_freqs, import_freqs
from envpipe_megatron.cli.launch import launch
from envpipe_megatron.cli.partition import partition
from envpipe_megatron.cli.patch import patch
from envpipe_megatron.cli.plan import plan
from envpipe_megatron.cli.profile import profile
from envpipe_megatron.cli.quickstart import quickstart
from envpipe_megatron.cli.report import report
from envpipe_megatron.cli.simulate import simulate
from envpipe_megatron.cli.straggler import straggler


@click.group(cls=ErrorsAsMessages, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="envpipe")
def main() -> None:
    """Save energy in pipeline-parallel training without slowing it down."""
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])


for command in (
    profile,
    plan,
    simulate,
    straggler,
    partition,
    import_freqs,
    export_freqs,
    quickstart,
    launch,
    energy,
    report,
    clocks,
    doctor,
    patch,
):
    main.add_command(command)
