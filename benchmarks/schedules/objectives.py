"""Least time, energy and energy x time of GPT-3 175B, simulated: docs/evidence/planning.md has it.

python benchmarks/schedules/objectives.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.outputs import markdown_line
from benchmarks.planner.workloads import Workload, workloads_here
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.planner import make_plan


def row(workload: Workload, overhead: float) -> list[str]:
    """Time and joules against 1F1B at full clock: without other clocks, then by goal."""
    cells = [workload.gpu, str(workload.num_microbatches), f"{100 * overhead:g} %"]
    only_top = tuple({k: rows[:1] for k, rows in kinds.items()} for kinds in workload.profile.rows)
    untouched = replace(workload.profile, rows=only_top)
    for goal in (None, Goal.TIME, Goal.ENERGY, Goal.EDP):
        request = replace(
            workload.request("auto", "optimal"),
            deadline_factor=None,
            objective=Objective(goal or Goal.TIME),
            split=SplitBackward(overhead=overhead),
        )
        plan = make_plan(workload.profile if goal else untouched, request).plan
        own, cost = plan.baseline.cost, plan.cost
        cells.append(f"{cost.slowdown_percent(own):+.1f} %, {-cost.saving_percent(own):+.1f} %")
    return cells


if __name__ == "__main__":
    jobs = [workload for workload in workloads_here() if workload.emulated]
    for workload, overhead in product(jobs, (0.0, 0.01)):
        print(markdown_line(row(workload, overhead)), flush=True)
