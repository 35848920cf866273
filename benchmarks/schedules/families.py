"""Families of orders side by side, each with its best clocks: rows of docs/evidence/planning.md.

    python benchmarks/schedules/families.py

GPT-3 175B as others profiled it, and jobs that they measured. Assumptions: their profiles know no
chunks, so each stage is split evenly; messages are free; and a backward in two parts is two halves,
which take 1 % more together, as was measured on H200s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.planner.workloads import Workload, workloads_here
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.orders.auto import AutoSearch
from envpipe_megatron.policies.orders.families import best_by_family
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest, make_problem

_CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Row:
    """One family of one workload.

    Args:
        own_time: the plan that takes no longer than the framework's order of as many chunks.
        bound_j: what no order of the job goes below in that time.
        same_time: the plan that takes no longer than 1F1B; None: that is the same.
        one_f_one_b: 1F1B at full clock.
    """

    workload: Workload
    order: str
    own_time: Plan
    bound_j: float | None
    same_time: Plan | None
    one_f_one_b: Plan

    @property
    def columns(self) -> dict[str, str | float | None]:
        """Return the columns of its row; a chunk is a part of a microbatch in flight."""
        plan, own = self.own_time, self.own_time.baseline.cost
        full = replace(plan, frequency_mhz=max_frequencies(plan.schedule, plan.profile))
        most = None if self.bound_j is None else 100 * (1 - self.bound_j / own.energy_j)
        same = (self.same_time or plan).cost.saving_percent(self.one_f_one_b.cost)
        peak = max(plan.schedule.microbatches_in_flight)
        slower = full.cost.slowdown_percent(self.one_f_one_b.cost)
        return {
            "workload": self.workload.key,
            "order": self.order,
            "at full clock (%)": slower,
            "saved at the framework's time (%)": plan.cost.saving_percent(own),
            "no order saves more (%)": most,
            "saved at 1F1B's time (%)": same,
            "peak in flight": peak,
        }


@click.command()
@output_option("families")
def main(output: Path) -> None:
    """Compare the families on the profiles of ../shared/data and print a table."""
    rows: list[Row] = []
    for workload in workloads_here():
        rows += compare(workload)
        click.echo(f"{workload.key}: done", err=True)
    if not rows:
        return
    columns = [row.columns for row in rows]
    leave(output, "computed", {"families": columns})
    make_console().print(make_table("Families of orders", columns))


def compare(workload: Workload) -> Iterator[Row]:
    """The rows of one workload."""
    full = make_plan(workload.profile, workload.request()).plan
    for order, request in (
        ("1F1B, optimal clocks", workload.request("1f1b", "optimal")),
        ("EnvPipe's, envelope, balanced", workload.request("envpipe", "envelope", "balanced")),
    ):
        yield Row(workload, order, make_plan(workload.profile, request).plan, None, None, full)
    for chunks in _CHUNKS[: 3 if workload.emulated else 2]:
        request = workload.request("auto", "optimal")
        request = replace(request, num_chunks=chunks, split=MEASURED_SPLIT)
        yield from _families(workload, request, full)


def _families(workload: Workload, request: PlanRequest, full: Plan) -> Iterator[Row]:
    """Rows of all families that a request leaves open."""
    problem = make_problem(workload.profile, request)
    try:
        own = AutoSearch(problem)
    except (ScheduleError, LinearProgramError):
        return  # Megatron itself cannot run so few microbatches in chunks
    same: dict[str, Plan] = {}
    if request.num_chunks > 1:
        factor = full.cost.iteration_time_s / own.planner.longest_s
        at_1f1b = AutoSearch(replace(problem, deadline_factor=factor))
        same = {o.family: at_1f1b.planner.plan(o.optimizer) for o in best_by_family(at_1f1b.judged)}
    for order in best_by_family(own.judged):
        plan = own.planner.plan(order.optimizer)
        chunks = f", V = {request.num_chunks}" if request.num_chunks > 1 else ""
        bound_j, in_1f1b = own.bound_j(plan), same.get(order.family)
        yield Row(workload, order.family + chunks, plan, bound_j, in_1f1b, full)


if __name__ == "__main__":
    main()
