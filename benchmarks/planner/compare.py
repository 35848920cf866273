"""Rival planners and ours side by side, on GPT-3 175B and on measured workloads.

Run from the checkout:

    python benchmarks/planner/compare.py --lowtime-limit 0

lowtime takes minutes to hours for the larger workloads, up to a limit each. Its runs are stored and
read again by later comparisons; `--lowtime-limit 0` takes what is stored and runs none.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.lowtime_rival import run_lowtime
from benchmarks.planner.plans import PlanKind, Row, compare, warm_up
from benchmarks.planner.workloads import (
    PERSEUS_SAVED_PERCENT,
    WHAT_DIFFERS,
    Workload,
    workloads_here,
)
from envpipe_megatron.errors import EnvPipeError

#: What a terminal shows of the plans.
_SHOWN = (
    "plan", "iteration_time_s", "slowdown_percent", "energy_j", "saving_percent",
    "perseus_prints_percent", "gap_percent", "any_order_saving_percent", "planning_time_s",
    "planning_cpu_s", "peak_in_flight", "extra_forwards", "finished",
)  # fmt: skip


@click.command()
@output_option("planner_compare")
@click.option(
    "--lowtime-results",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/lowtime"),
    show_default=True,
    help="Folder of lowtime's stored runs.",
)
@click.option(
    "--lowtime-limit",
    type=click.FloatRange(0),
    default=1500.0,
    show_default=True,
    help="CPU time (s) for each run of lowtime that is not stored; 0 starts none.",
)
@click.option(
    "--workload",
    "names",
    multiple=True,
    default=("",),
    help="Only workloads whose name in the rows contains this; may be given again.",
)
def main(
    output: Path,
    lowtime_results: Path,
    lowtime_limit: float,
    names: tuple[str, ...],
) -> None:
    """Compare all planners on the profiles of ../shared/data."""
    console = make_console()
    lowtime = partial(run_lowtime, time_limit_s=lowtime_limit, output_dir=lowtime_results)
    load_before = os.getloadavg()[0]
    comparisons = []
    try:
        workloads = workloads_here(names)
        if not workloads:
            return
        warm_up(workloads[0])
        for workload in workloads:
            comparison = compare(workload, lowtime)
            rows = [plan_row(workload, row) for row in comparison.rows]
            console.print(make_table(workload.name, rows, _SHOWN))
            comparisons.append(comparison)
    except EnvPipeError as error:
        raise click.ClickException(str(error)) from error
    plans = [plan_row(c.workload, row) for c in comparisons for row in c.rows]
    frontiers = [
        {"workload": comparison.workload.key, **asdict(frontier)}
        for comparison in comparisons
        for frontier in comparison.frontiers
    ]
    console.print(make_table("Our frontiers", frontiers))
    console.print(WHAT_DIFFERS)
    for text in (text for comparison in comparisons for text in comparison.skipped):
        console.print(f"Left out: {text}", markup=False)
    console.print(
        "Planning times are of one planning each, after imports; of lowtime's run CPU time alone. "
        f"Load average (1 min) {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the "
        f"end, on {os.cpu_count()} cores: where others were running, wall time exceeds CPU time."
    )
    leave(output, "computed", {"plans": plans, "frontiers": frontiers})


def plan_row(workload: Workload, row: Row) -> dict[str, Any]:
    """Return the row of a plan; what Perseus' authors printed is of 1F1B's order."""
    of_1f1b = row.kind is PlanKind.OURS_ON_1F1B
    return {
        "workload": workload.key,
        "model": workload.model,
        "gpu": workload.gpu,
        "num_stages": workload.profile.num_stages,
        "num_microbatches": workload.num_microbatches,
        "plan": row.label,
        "iteration_time_s": row.cost.iteration_time_s,
        "slowdown_percent": row.slowdown_percent,
        "energy_j": row.cost.energy_j,
        "saving_percent": row.saving_percent,
        "perseus_prints_percent": PERSEUS_SAVED_PERCENT.get(workload.key) if of_1f1b else None,
        "gap_percent": row.plan.gap_percent,
        "any_order_saving_percent": row.any_order_saving_percent,
        "planning_time_s": row.planning_time_s,
        "planning_cpu_s": row.planning_cpu_s,
        "peak_in_flight": row.peak_in_flight,
        "extra_forwards": " ".join(map(str, row.plan.schedule.extra_forwards)),
        "finished": row.finished,
    }


if __name__ == "__main__":
    main()
