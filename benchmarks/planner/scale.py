"""How the optimal policy grows: planning time, peak memory and gap from 4 x 16 to 64 x 1024.

Every size is planned on 1F1B and on EnvPipe's order, at the all-maximum time of 1F1B, in a fresh
process. Stages are copies of the profile's first, with its last at the end. Times are the
processor's, which a busy machine lengthens least.

    python benchmarks/planner/scale.py
    python benchmarks/planner/scale.py --size 8x96 --size 16x512
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from benchmarks import outputs
from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.processes import run_alone
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.policies.optimal import optimizer as optimal
from envpipe_megatron.policies.optimal.linear_program import DurationProgram
from envpipe_megatron.policies.planner import build_schedule
from envpipe_megatron.policies.request import PlanRequest

SIZES = ("4x16", "8x24", "8x96", "8x256", "16x256", "16x512", "32x512", "32x1024", "64x1024")
ORDERS = ("1f1b", "envpipe")
_PROFILE = outputs.PERSEUS_DATA / "emulation/stage_profile/gpt3-175b_a100_sxm.csv"
_BLOCKING_POWER_W = 83.64


@dataclass(frozen=True)
class Job:
    """What a fresh process plans."""

    num_stages: int
    num_microbatches: int
    order: str


#: What is measured of a size and order; None where the limit stopped the process. Times are s: the
#: linear program and the bound that checks it (solve), the plan in all (total).
_MEASURED = ("solve_s", "total_s", "peak_mib", "saving_percent", "gap_percent")


def _pipeline(job: Job) -> tuple[Profile, PlanRequest, Conditions]:
    profile = read_profile(_PROFILE)
    rows = (profile.rows[0],) * (job.num_stages - 1) + (profile.rows[-1],)
    request = PlanRequest(job.num_microbatches, job.order)
    conditions = Conditions((_BLOCKING_POWER_W,) * job.num_stages)
    return replace(profile, rows=rows), request, conditions


def measure_plan(job: Job) -> dict[str, float]:
    """Plan as `envpipe plan` does."""
    profile, request, conditions = _pipeline(job)
    schedule, _ = build_schedule(profile, request)
    deadline_s = optimal.all_maximum_s(schedule, profile, conditions)
    solve, solve_s = DurationProgram.solve, 0.0

    def timed(*arguments: Any, **options: Any) -> Any:
        nonlocal solve_s
        start_s = time.process_time()
        result = solve(*arguments, **options)
        solve_s += time.process_time() - start_s
        return result

    with patch.object(DurationProgram, "solve", timed):
        start_s = time.process_time()
        plan = optimal.Optimizer(schedule, profile, conditions).plan(deadline_s)
        total_s = time.process_time() - start_s
    gap = plan.gap_percent
    assert gap is not None
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    return {
        "solve_s": solve_s,
        "total_s": total_s,
        "saving_percent": plan.cost.saving_percent(plan.baseline.cost),
        "gap_percent": gap,
    }


def measure(job: Job, limit_s: float) -> dict[str, Any]:
    """One size and order, planned in a fresh process."""
    profile, request, _ = _pipeline(job)
    schedule, _ = build_schedule(profile, request)
    ran = run_alone(measure_plan, job, limit_s=limit_s)
    results = {} if ran is None else {**ran.found, "peak_mib": ran.memory_mib}
    return {
        "num_stages": job.num_stages,
        "num_microbatches": job.num_microbatches,
        "order": job.order,
        "num_units": schedule.num_units,
        "peak_in_flight": max(schedule.peak_in_flight),
        **{name: results.get(name) for name in _MEASURED},
    }


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or int(match[1]) < 2 or int(match[2]) < 1:
        raise click.BadParameter(f"{text!r} is not STAGESxMICROBATCHES, such as 16x512")
    return int(match[1]), int(match[2])


@click.command()
@click.option(
    "--size",
    "sizes",
    multiple=True,
    default=SIZES,
    show_default=True,
    metavar="PxM",
    help="Stages x microbatches; may be given again.",
)
@click.option("--plan-limit", default=300.0, show_default=True, help="Time limit of a plan, s.")
@output_option("planner_scale")
def main(sizes: tuple[str, ...], plan_limit: float, output: Path) -> None:
    """Measure how planning grows with the pipeline; prints a table and leaves rows."""
    console = make_console()
    wanted = [_parse_size(size) for size in sizes]
    rows = []
    for stages, microbatches in wanted:
        for order in ORDERS:
            job = Job(stages, microbatches, order)
            rows.append(measure(job, plan_limit))
            total_s = rows[-1]["total_s"]
            done = f"{total_s:.1f} s" if total_s is not None else f"over {plan_limit:g} s"
            console.print(f"{stages} x {microbatches} on {order}: {done}")
    console.print(make_table("Optimal plans at the all-maximum time", rows))
    leave(output, "CPU", {"scale": rows})


if __name__ == "__main__":
    main()
