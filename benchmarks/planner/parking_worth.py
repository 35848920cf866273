"""What parking the clock in bubbles is worth, by how long a change of clock takes.

GPT-3 175B on A100 SXM: the profile's authors published one blocking power and no waiting power by
clock, so the curve is an assumption, printed and drawn with the figures: an H200 was measured to
wait at 124 W with its highest clock set and to idle at 78 W at its lowest, 345 of 1980 MHz; the
same ratio of powers at the same ratio of clocks is taken for the A100, and a line between.

Times are in the profile's own scale, a tenth of the model's layers: whole units last ten times as
long, and a change of clock is as long against them as a tenth of it is here.

Run from the checkout:

    python benchmarks/planner/parking_worth.py --output runs/parking
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.planner.planning_workloads import Workload, read_workloads
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.policies.clock_changes.parking import ParkingWorth, parking_worth
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.planner import build_schedule, make_plan

DEFAULT_DATA = Path("../shared/data/perseus_sosp24")
KEYS = ("gpt3-175b_a100_sxm_mb24", "gpt3-175b_a100_sxm_mb96")
CHANGE_TIMES_S = (0.0, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05)
#: Measured on an H200: W waiting at the highest clock, W idle at the lowest; MHz of both.
WAITING_W, IDLE_W = 124.0, 78.0
HIGHEST_MHZ, LOWEST_MHZ = 1980, 345
#: Characters of the table, which a narrower terminal or a pipe would cut.
TABLE_WIDTH = 120
#: Label, colour (of Okabe and Ito, told apart with any colour vision) and marker.
LINES = (
    ("all-maximum 1F1B", "#000000", "o"),
    ("EnvPipe", "#E69F00", "s"),
    ("optimal on 1F1B", "#0072B2", "^"),
    ("optimal on EnvPipe's order", "#D55E00", "D"),
)


@dataclass(frozen=True)
class Row:
    """What parking is worth to one plan at one time of a change."""

    workload: Workload
    label: str
    plan: Plan
    worth: ParkingWorth


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DATA,
    show_default=True,
    help="Folder with the profiles.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder for parking_worth.csv and parking_worth.png.",
)
def main(data: Path, output: Path) -> None:
    """Print, write and draw what parking saves for changes of 0 to 50 ms."""
    console = Console(width=max(Console().width, TABLE_WIDTH))
    if not data.is_dir():
        console.print(f"Skipped: there are no profiles at {data}.")
        return
    workloads = [workload for workload in read_workloads(data) if workload.key in KEYS]
    rows = [row for workload in workloads for row in _rows(workload)]
    output.mkdir(parents=True, exist_ok=True)
    _write_csv(output / "parking_worth.csv", rows)
    _figure(workloads, rows).savefig(output / "parking_worth.png", dpi=160)
    console.print(_assumption(workloads[0]))
    for workload in workloads:
        console.print(_table(workload, rows))


def conditions_with_curve(workload: Workload) -> Conditions:
    """Those of the workload, and the assumed waiting power by clock."""
    highest_mhz = max(row.frequency_mhz for row in workload.profile.rows[0][Kind.FORWARD])
    full_w = workload.blocking_power_w
    curve = {
        round(highest_mhz * LOWEST_MHZ / HIGHEST_MHZ): full_w * IDLE_W / WAITING_W,
        highest_mhz: full_w,
    }
    return replace(workload.conditions, wait_power_w=(curve,) * workload.profile.num_stages)


def _assumption(workload: Workload) -> str:
    curves = conditions_with_curve(workload).wait_power_w
    assert curves is not None
    (low_mhz, low_w), (high_mhz, high_w) = curves[0].items()
    return (
        f"Assumed, not measured on this GPU: waiting takes {low_w:.1f} W at {low_mhz} MHz, "
        f"{high_w:.1f} W at {high_mhz} MHz, on a line between."
    )


def _rows(workload: Workload) -> Iterator[Row]:
    """Fixed plans priced for each change time, optimal ones made for each."""
    profile, conditions = workload.profile, conditions_with_curve(workload)
    fixed = (
        make_plan(profile, workload.request()).plan,
        make_plan(profile, workload.request("envpipe", "envelope", "balanced")).plan,
    )
    for (label, *_), plan in zip(LINES, fixed, strict=False):
        plan = replace(plan, conditions=conditions)
        for worth in parking_worth(plan, CHANGE_TIMES_S):
            changed = replace(conditions, change_time_s=worth.change_time_s)
            yield Row(workload, label, replace(plan, conditions=changed), worth)
    for (label, *_), name in zip(LINES[len(fixed) :], ("1f1b", "envpipe"), strict=True):
        schedule, _ = build_schedule(profile, workload.request(name))
        for change_time_s in CHANGE_TIMES_S:
            changed = replace(conditions, change_time_s=change_time_s)
            deadline_s = all_maximum_s(schedule, profile, changed)
            plan = Optimizer(schedule, profile, changed).plan(deadline_s)
            (worth,) = parking_worth(plan, [change_time_s])
            yield Row(workload, label, plan, worth)


def _figure(workloads: list[Workload], rows: list[Row]) -> Figure:
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        for label, colour, marker in LINES:
            own = [row.worth for row in rows if row.workload == workload and row.label == label]
            axes.plot(
                [1e3 * worth.change_time_s for worth in own],
                [worth.saved_percent for worth in own],
                color=colour,
                marker=marker,
                ms=4.5,
                label=label,
            )
        axes.set_title(workload.name)
        axes.set_xlabel("time of a clock change (ms; units last 50-140 ms)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("energy that parking saves (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(_assumption(workloads[0]), fontsize=9)
    return figure


def _table(workload: Workload, rows: list[Row]) -> Table:
    table = Table(
        "plan",
        "change (ms)",
        "iteration (s)",
        "energy (J)",
        "parked (J)",
        "saved (%)",
        "parked waits",
        title=workload.name,
    )
    for label, *_ in LINES:
        for row in rows:
            if row.workload == workload and row.label == label:
                table.add_row(*_cells(row).values())
        table.add_section()
    return table


def _cells(row: Row) -> dict[str, str]:
    worth = row.worth
    return {
        "plan": row.label,
        "change_time_ms": f"{1e3 * worth.change_time_s:g}",
        "iteration_time_s": f"{row.plan.cost.iteration_time_s:.4f}",
        "energy_j": f"{worth.energy_j + worth.saved_j:.1f}",
        "parked_energy_j": f"{worth.energy_j:.1f}",
        "saved_percent": f"{worth.saved_percent:.3f}",
        "parked_waits": str(worth.parked_waits),
    }


def _write_csv(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["workload", *_cells(rows[0])])
        writer.writerows([row.workload.key, *_cells(row).values()] for row in rows)


if __name__ == "__main__":
    main()
