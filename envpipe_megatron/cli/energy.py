"""`envpipe energy`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from envpipe_megatron.cli.common import EXISTING_FILE
from envpipe_megatron.energy_file import (
    SHARES,
    EnergyLogs,
    EnergyTotal,
    EnergyWindow,
    read_energy_logs,
)

logger = logging.getLogger(__name__)

#: Torn lines that are named; the others are counted.
_NAMED_LINES = 5
_LONGEST_NAME = 16


@click.group()
def energy() -> None:
    """Read what training has metered.

    Example:

      envpipe energy sum node0/energy.jsonl node1/energy.jsonl
    """


@energy.command(name="sum")
@click.argument("files", type=EXISTING_FILE, nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def sum_energy(files: tuple[Path, ...], as_json: bool) -> None:
    """Add up energy logs: per phase, GPU and node, and of the whole job.

    FILES are the energy.jsonl of each node of a job. A line that is given twice counts once; torn
    lines, which killed jobs leave, are passed over and counted. JSON has each GPU's phases too.

    Example:

      envpipe energy sum node0/energy.jsonl node1/energy.jsonl
    """
    logs = read_energy_logs(files)
    if as_json:
        click.echo(json.dumps(energy_facts(logs), indent=1))
        return
    console = Console()
    groups: list[tuple[tuple[str, ...], dict[Any, EnergyTotal]]] = [
        (("run", "phase"), logs.total_by(_run_and_phase)),
        (("node", "GPU"), logs.total_by(lambda w: w.gpu_key)),
        (("node",), logs.total_by(lambda w: (w.node,))),
        (("job",), {("all",): logs.total()}),
    ]
    if not any(window.run for window in logs.windows):
        groups[0] = ("phase",), logs.total_by(lambda w: (w.phase,))
    for names, totals in groups:
        console.print(_table(names, totals))
    if logs.unreadable:
        named = ", ".join(logs.unreadable[:_NAMED_LINES])
        logger.warning("%d torn or foreign lines passed over: %s", len(logs.unreadable), named)
    if logs.repeated:
        logger.warning("%d lines were given twice and counted once", logs.repeated)


def energy_facts(logs: EnergyLogs) -> dict[str, Any]:
    """What `energy sum` says, for machines."""

    def entries(names: tuple[str, ...], key: Callable[[EnergyWindow], Any]) -> list[dict[str, Any]]:
        return [
            {**dict(zip(names, values, strict=True)), **_total_facts(total)}
            for values, total in logs.total_by(key).items()
        ]

    gpus = []
    for window_key, total in logs.total_by(lambda w: w.gpu_key).items():
        own = [window for window in logs.windows if window.gpu_key == window_key]
        mine = EnergyLogs(tuple(own), 0, ())
        gpus.append(
            {
                "node": own[0].node,
                "gpu_uid": own[0].gpu_uid,
                "gpu": own[0].gpu,
                "rank": own[0].rank,
                "stage": own[0].stage,
                **_total_facts(total),
                "phases": {
                    phase: _total_facts(part)
                    for phase, part in mine.total_by(lambda w: w.phase).items()
                },
            }
        )
    return {
        "job": _total_facts(logs.total()),
        "nodes": entries(("node",), lambda w: (w.node,)),
        "gpus": gpus,
        "phases": entries(("run", "phase"), _run_and_phase),
        "repeated_lines": logs.repeated,
        "unreadable_lines": list(logs.unreadable),
    }


def _run_and_phase(window: EnergyWindow) -> tuple[str, str]:
    return window.run, window.phase


def _total_facts(total: EnergyTotal) -> dict[str, Any]:
    shares = total.shares_s
    return {
        "energy_j": total.energy_j,
        "energy_uncertainty_j": total.energy_uncertainty_j,
        "gpu_seconds": total.duration_s,
        "average_power_w": total.average_power_w,
        "num_gpus": total.num_gpus,
        "windows": total.windows,
        **(dict(zip(SHARES, shares, strict=True)) if shares else dict.fromkeys(SHARES)),
    }


def _table(names: tuple[str, ...], totals: Mapping[Any, EnergyTotal]) -> Table:
    table = Table(title=f"By {' and '.join(names)}" if names != ("job",) else "The job")
    for name in names:
        table.add_column(name, overflow="fold")
    figures = ("energy (J)", "+- (J)", "GPU time (s)", "power (W)")
    for name in (*figures, "units/receives/ rest (%)"):
        table.add_column(name, justify="right")
    for values, total in totals.items():
        known = total.energy_uncertainty_j
        shares = [
            f"{100 * share_s / total.duration_s:.0f}"
            for share_s in total.shares_s or ()
            if total.duration_s
        ]
        table.add_row(
            *(_short(value) for value in values),
            f"{total.energy_j:.1f}",
            "" if known is None else f"{known:.1f}",
            f"{total.duration_s:.1f}",
            f"{total.average_power_w:.1f}",
            "/".join(shares),
        )
    return table


def _short(name: str) -> str:
    """A UUID or folder that leaves room for figures; the JSON has the whole."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:9]}…{name[-6:]}"
