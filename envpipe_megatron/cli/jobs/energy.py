"""`envpipe energy`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click
from rich.console import Console

from envpipe_megatron.cli.common import EXISTING_FILE, Finite
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.launch.bill.bill import bill_of
from envpipe_megatron.launch.bill.tables import Tariff, bill_facts, show_bill

logger = logging.getLogger(__name__)

#: Torn lines that are named; the others are counted.
_NAMED_LINES = 5


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
