"""What a cap on the power of a pipeline costs in time, by three ways to keep it.

Run from the checkout:

    python benchmarks/planner/power_caps.py

Caps are shares of what the pipeline takes in 1F1B at full clock: of its mean power over an
iteration, or with `--window` of its largest mean over so many seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.workloads import Workload, workloads_here
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.planner import make_plan

#: The loosest first.
SHARES = (0.95, 0.9, 0.8)
WAYS = ("one clock", "clocks on 1F1B", "order and clocks")


def one_clock(baseline: Plan, objective: Objective) -> Plan:
    """The fastest plan within limits that runs all units of the pipeline at one clock.

    Where a unit was not profiled at it, between its clocks, or at its highest if that is lower.
    """
    clocks = [
        [row.frequency_mhz for row in rows]
        for kinds in baseline.profile.rows
        for rows in kinds.values()
    ]
    lowest_mhz = max(min(own) for own in clocks)
    plans = [
        replace(
            baseline,
            profile=replace(baseline.profile, interpolates=True),
            frequency_mhz=np.minimum(baseline.frequency_mhz, clock_mhz),
        )
        for clock_mhz in {mhz for own in clocks for mhz in own if mhz >= lowest_mhz}
    ]
    kept = [plan for plan in plans if objective.excess(plan) <= 1]
    if not kept:
        raise LinearProgramError("No clock that all units were profiled around keeps the cap")
    return min(kept, key=lambda plan: plan.cost.iteration_time_s)


def capped_rows(workload: Workload, window_s: float | None = None) -> Iterator[dict[str, Any]]:
    """For each share of the uncapped power the time (%) that each way loses; None if it fails."""
    baseline = make_plan(workload.profile, workload.request()).plan
    full_w = Objective(power_cap_w=1.0, power_window_s=window_s).power_w(baseline)

    def planned(schedule: str) -> Callable[[Objective], Plan]:
        request = replace(workload.request(schedule, "optimal"), deadline_factor=None)
        return lambda objective: (
            make_plan(workload.profile, replace(request, objective=objective)).plan
        )

    makers: tuple[Callable[[Objective], Plan], ...] = (
        lambda objective: one_clock(baseline, objective),
        planned("1f1b"),
        planned("auto"),
    )
    made: dict[str, Plan] = {}
    for share in SHARES:
        objective = Objective(Goal.TIME, power_cap_w=share * full_w, power_window_s=window_s)
        row: dict[str, Any] = {"workload": workload.key, "cap (%)": round(100 * share)}
        row["cap (W)"] = share * full_w
        for way, maker in zip(WAYS, makers, strict=True):
            # What is best within a looser cap is so within any that it keeps.
            try:
                if way not in made or objective.excess(made[way]) > 1:
                    made[way] = maker(objective)
                assert objective.excess(made[way]) <= 1
                row[way] = made[way].cost.slowdown_percent(baseline.cost)
            except LinearProgramError:
                row[way] = None
        yield row


@click.command()
@output_option("power_caps")
@click.option("--window", "window_s", type=float, help="Cap every window of this length, s.")
@click.option("--workload", "name", default="", help="Only those whose name contains this.")
def main(output: Path, window_s: float | None, name: str) -> None:
    """Plan within power caps, on the profiles of ../shared/data."""
    rows = [row for workload in workloads_here([name]) for row in capped_rows(workload, window_s)]
    if not rows:
        return
    make_console().print(make_table("Time lost within a cap on power (%)", rows))
    leave(output, "computed", {"power_caps": rows})


if __name__ == "__main__":
    main()
