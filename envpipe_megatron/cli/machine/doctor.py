"""`envpipe doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from envpipe_megatron.cli.machine.checks import Check
from envpipe_megatron.cli.machine.hardware import (
    control_checks,
    driver_cuda,
    environment_checks,
    gpu_checks,
)
from envpipe_megatron.cli.machine.software import software_checks
from envpipe_megatron.console import show_tables

FORMAT = "envpipe-doctor/1"


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the answers as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do: GPUs, rights to control clocks, environment, packages.

    Each no comes with its remedy. Everything is learned by reading: no clock is touched to find out
    whether it may be, and no package is imported. Exits 0 when it could look, whatever it saw.

    Example:

      envpipe doctor --json
    """
    checks = all_checks()
    if as_json:
        document = {"format": FORMAT, "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(document, indent=2))
        return
    show_tables(Console(), _table(checks))


def all_checks() -> list[Check]:
    """All that is looked at, each by reading alone."""
    return [
        *gpu_checks(),
        *control_checks(),
        *environment_checks(),
        *software_checks(driver_cuda()),
    ]


def _table(checks: list[Check]) -> Table:
    table = Table()
    for column in ("", "", "what was seen, and what to do"):
        table.add_column(column)
    before = checks[0].area
    asked_by: dict[str, str] = {}
    for check in checks:
        if check.area != before:
            table.add_section()
        before = check.area
        said = Text(check.evidence)
        if check.remedy:
            # One missing driver is the cause of many a no; what to do about it is said once.
            first = asked_by.setdefault(check.remedy, check.name)
            remedy = check.remedy if first == check.name else f"As for {first}"
            said.append(f"\n{remedy}", style="italic")
        answer = Text("yes", style="green") if check.ok else Text("no", style="red")
        table.add_row(check.name, answer, said)
    return table
