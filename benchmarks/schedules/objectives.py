"""Least time, energy and energy x time of GPT-3 175B, simulated: rows of docs/evidence/planning.md.

python benchmarks/schedules/objectives.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.workloads import Workload, workloads_here
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.planner import make_plan


def columns(workload: Workload) -> dict[str, Any]:
    """Return time and joules (%) against 1F1B at full clock: without other clocks, then by goal."""
    found: dict[str, Any] = {"GPU": workload.gpu, "microbatches": workload.num_microbatches}
    only_top = tuple({k: rows[:1] for k, rows in kinds.items()} for kinds in workload.profile.rows)
    untouched = replace(workload.profile, rows=only_top)
    for goal in (None, Goal.TIME, Goal.ENERGY, Goal.EDP):
        request = replace(
            workload.request("auto", "optimal"),
            deadline_factor=None,
            objective=Objective(goal or Goal.TIME),
            split=MEASURED_SPLIT,
        )
        plan = make_plan(workload.profile if goal else untouched, request).plan
        own, cost = plan.baseline.cost, plan.cost
        name = goal.value if goal else "clocks untouched"
        found[f"{name}, time (%)"] = cost.slowdown_percent(own)
        found[f"{name}, joules (%)"] = -cost.saving_percent(own)
    return found


@click.command()
@output_option("objectives")
def main(output: Path) -> None:
    """Plan for each goal on the profiles of ../shared/data and print a table."""
    rows = [columns(workload) for workload in workloads_here() if workload.emulated]
    leave(output, "computed", {"objectives": rows})
    make_console().print(make_table("Time and joules against 1F1B", rows))


if __name__ == "__main__":
    main()
