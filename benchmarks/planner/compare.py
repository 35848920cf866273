"""Rival planners and ours side by side, on GPT-3 175B and on measured workloads.

Run from the checkout:

    python benchmarks/planner/compare.py --lowtime-limit 0

lowtime takes minutes to hours for the larger workloads, up to a limit each. Its runs are stored and
read again by later comparisons; `--lowtime-limit 0` takes what is stored and runs none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks import outputs
from benchmarks.claims import CLAIMS_FILE, write_claims
from benchmarks.outputs import make_console, make_table, output_option, write_csv
from benchmarks.planner.claims import comparison_claims
from benchmarks.planner.lowtime_rival import run_lowtime
from benchmarks.planner.plans import (
    Row,
    compare,
    warm_up,
)
from benchmarks.planner.workloads import WHAT_DIFFERS, Workload, read_workloads
from envpipe_megatron.errors import EnvPipeError

#: What a terminal shows of plans.csv.
_SHOWN = (
    "plan", "iteration_time_s", "slowdown_percent", "energy_j", "saving_percent", "gap_percent",
    "any_order_saving_percent", "planning_time_s", "planning_cpu_s", "peak_in_flight",
    "extra_forwards", "finished",
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
@click.option("--skip-lowtime", is_flag=True, help="Leave lowtime out.")
@click.option(
    "--workload",
    "names",
    multiple=True,
    help="Only workloads whose name in plans.csv contains this; may be given again.",
)
def main(
    output: Path,
    lowtime_results: Path,
    lowtime_limit: float,
    skip_lowtime: bool,
    names: tuple[str, ...],
) -> None:
    """Compare all planners on the profiles of ../shared/data."""
    console, data = make_console(), outputs.PERSEUS_DATA
    if not data.is_dir():
        console.print(f"Skipped: there are no profiles at {data}.")
        return
    lowtime = partial(run_lowtime, time_limit_s=lowtime_limit, output_dir=lowtime_results)
    load_before = os.getloadavg()[0]
    comparisons = []
    try:
        workloads = _chosen(read_workloads(data), names)
        warm_up(workloads[0])
        for workload in workloads:
            comparison = compare(workload, None if skip_lowtime else lowtime)
            rows = [_plan_row(workload, row) for row in comparison.rows]
            console.print(make_table(workload.name, rows, _SHOWN))
            comparisons.append(comparison)
    except EnvPipeError as error:
        raise click.ClickException(str(error)) from error
    output.mkdir(parents=True, exist_ok=True)
    plans = [_plan_row(c.workload, row) for c in comparisons for row in c.rows]
    write_csv(output / "plans.csv", plans)
    frontiers = [
        {"workload": comparison.workload.key, **asdict(frontier)}
        for comparison in comparisons
        for frontier in comparison.frontiers
    ]
    write_csv(output / "frontiers.csv", frontiers)
    console.print(make_table("Our frontiers", frontiers))
    console.print(WHAT_DIFFERS)
    for text in (text for comparison in comparisons for text in comparison.skipped):
        console.print(f"Left out: {text}", markup=False)
    console.print(
        "Planning times are of one planning each, after imports; of lowtime's run CPU time alone. "
        f"Load average (1 min) {load_before:.1f} at the start and {os.getloadavg()[0]:.1f} at the "
        f"end, on {os.cpu_count()} cores: where others were running, wall time exceeds CPU time."
    )
    lowtime_options = ["--skip-lowtime"] if skip_lowtime else [f"--lowtime-limit {lowtime_limit:g}"]
    options = " ".join([*lowtime_options, *(f"--workload {name}" for name in names)])
    write_claims(output / CLAIMS_FILE, comparison_claims(comparisons, options))


def _chosen(workloads: Sequence[Workload], names: Sequence[str]) -> list[Workload]:
    """The workloads that one of the names is part of; all without names."""
    chosen = [w for w in workloads if not names or any(name in w.key for name in names)]
    if not chosen:
        keys = ", ".join(workload.key for workload in workloads)
        raise EnvPipeError(
            "No workload has such a name", value=", ".join(names), remedy=f"Known: {keys}."
        )
    return chosen


def _plan_row(workload: Workload, row: Row) -> dict[str, Any]:
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
