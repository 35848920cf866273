"""How the optimal policy grows: planning time, peak memory and gap from 4 x 16 to 64 x 1024.

Every size is planned on 1F1B and on EnvPipe's order, at the all-maximum time of 1F1B, in a fresh
process. The linear program alone is also given to HiGHS' simplex and interior point, to show what
the interior-point method of our own is for (of the extra `rivals`; without it they are left out).
Stages are copies of the profile's first, with its last at the end. Times are the processor's, which
a busy machine lengthens least.

    python benchmarks/planner/scale.py
    python benchmarks/planner/scale.py --size 8x96 --size 16x512 --highs-limit 0
"""

from __future__ import annotations

import multiprocessing
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import numpy as np
from scipy.sparse import bmat, csr_array

from benchmarks.outputs import PERSEUS_DATA, leave, make_console, make_table, output_option
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.policies.optimal import optimizer as optimal
from envpipe_megatron.policies.optimal.choices import make_choices
from envpipe_megatron.policies.optimal.linear_program import DurationProgram
from envpipe_megatron.policies.optimal.newton_step import DurationProblem
from envpipe_megatron.policies.optimal.rounding import round_durations
from envpipe_megatron.policies.planner import build_schedule
from envpipe_megatron.policies.request import PlanRequest

SIZES = ("4x16", "8x24", "8x96", "8x256", "16x256", "16x512", "32x512", "32x1024", "64x1024")
ORDERS = {"1f1b": "1F1B", "envpipe": "EnvPipe"}
_PROFILE = PERSEUS_DATA / "emulation/stage_profile/gpt3-175b_a100_sxm.csv"
_BLOCKING_POWER_W = 83.64
_PARTS = ("build", "solve", "rounding")
#: With presolve HiGHS takes more of these programs for infeasible, which none of them is.
_IPM = {"solver": "ipm", "run_crossover": "off", "presolve": "off"}


@dataclass(frozen=True)
class Job:
    """What a fresh process plans."""

    num_stages: int
    num_microbatches: int
    order: str


#: What is measured of a size and order; None where a limit stopped the process, or HiGHS'
#: interior point failed. Times are s: choices and arrays of the linear program (build), the program
#: and the bound that checks it (solve), frequencies that exist (rounding), the plan in all (total),
#: the program by HiGHS' simplex and by its interior point without crossover.
_MEASURED = (
    "build_s", "solve_s", "rounding_s", "total_s", "peak_mib", "saving_percent", "gap_percent",
    "simplex_s", "ipm_s",
)  # fmt: skip


def _pipeline(job: Job) -> tuple[Profile, PlanRequest, Conditions]:
    profile = read_profile(_PROFILE)
    rows = (profile.rows[0],) * (job.num_stages - 1) + (profile.rows[-1],)
    request = PlanRequest(job.num_microbatches, job.order)
    conditions = Conditions((_BLOCKING_POWER_W,) * job.num_stages)
    return replace(profile, rows=rows), request, conditions


def measure_plan(job: Job) -> dict[str, float]:
    """Plan as `envpipe plan` does, with a clock on each part."""
    profile, request, conditions = _pipeline(job)
    schedule, _ = build_schedule(profile, request)
    deadline_s = optimal.all_maximum_s(schedule, profile, conditions)
    spent_s = dict.fromkeys(_PARTS, 0.0)

    def timed(part: str, function: Callable[..., object]) -> Callable[..., object]:
        def measured(*arguments: object, **options: object) -> object:
            start_s = time.process_time()
            result = function(*arguments, **options)
            spent_s[part] += time.process_time() - start_s
            return result

        return measured

    with (
        patch.object(DurationProgram, "solve", timed("solve", DurationProgram.solve)),
        patch.object(optimal, "round_durations", timed("rounding", round_durations)),
    ):
        start_s = time.process_time()
        optimizer = optimal.Optimizer(schedule, profile, conditions)
        spent_s["build"] = time.process_time() - start_s
        plan: Plan = optimizer.plan(deadline_s)
        total_s = time.process_time() - start_s
    gap = plan.gap_percent
    assert gap is not None
    assert plan.cost.iteration_time_s <= deadline_s * (1 + 1e-9)
    return {
        **{f"{part}_s": seconds for part, seconds in spent_s.items()},
        "total_s": total_s,
        "peak_mib": _peak_mib(),
        "saving_percent": plan.cost.saving_percent(plan.baseline.cost),
        "gap_percent": gap,
    }


def _peak_mib() -> float:
    """The most memory that this process has held so far, MiB; it never falls."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux passes ru_maxrss on through fork and exec: it is the parent's
        peak_kib = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if peak_kib:
            return int(peak_kib[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, KiB elsewhere


def measure_highs(job: Job, solver: str) -> dict[str, float]:
    """The same linear program by HiGHS' simplex or ipm; nothing where it fails, or is not there."""
    try:
        import highspy
    except ImportError:
        return {}
    profile, request, conditions = _pipeline(job)
    schedule, _ = build_schedule(profile, request)
    deadline_s = optimal.all_maximum_s(schedule, profile, conditions)
    choices = make_choices(profile, np.array(conditions.blocking_power_w), conditions.gpus_by_stage)
    program = DurationProgram(schedule, choices, conditions.latency_s, conditions.tail_by_stage_s)
    highs = highspy.Highs()
    for option, value in {"output_flag": False, **({"simplex": {}, "ipm": _IPM}[solver])}.items():
        highs.setOptionValue(option, value)
    highs.passModel(_highs_model(program._problem, deadline_s / program._time_unit_s))
    start_s = time.process_time()
    highs.run()
    seconds = time.process_time() - start_s
    solved = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return {f"{solver}_s": seconds} if solved else {}


def _highs_model(problem: DurationProblem, deadline: float) -> Any:
    """Columns: ends of nodes, segments, the iteration. Rows: dependencies, ends of stages."""
    import highspy

    def ones(rows: Any, columns: Any, shape: tuple[int, int]) -> Any:
        return csr_array((np.ones(len(rows)), (rows, columns)), shape=shape)

    edges, nodes, segments = len(problem.target), problem.num_nodes, len(problem.width)
    edge, stage, infinity = np.arange(edges), np.arange(len(problem.tail)), highspy.kHighsInf
    into = ones(edge, problem.target, (edges, nodes))
    out_of = ones(edge[: len(problem.source)], problem.source, (edges, nodes))
    stretch = into @ ones(problem.segment_node, np.arange(segments), (nodes, segments))
    last = ones(stage, problem.last_node, (len(stage), nodes))
    iteration = ones(stage, 0 * stage, (len(stage), 1))
    matrix = bmat([[into - out_of, -stretch, None], [-last, None, iteration]], format="csr")
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = matrix.shape
    model.col_cost_ = np.concatenate([np.zeros(nodes), problem.slope, [problem.waiting_cost]])
    model.col_lower_ = np.zeros(matrix.shape[1])
    model.col_upper_ = np.concatenate([np.full(nodes, infinity), problem.width, [deadline]])
    model.row_lower_ = np.concatenate([problem.least, problem.tail])
    model.row_upper_ = np.full(matrix.shape[0], infinity)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    return model


def _send(function: Callable[[Job], dict[str, float]], job: Job, pipe: Connection) -> None:
    pipe.send(function(job))


def _in_fresh_process(
    function: Callable[[Job], dict[str, float]], job: Job, limit_s: float
) -> dict[str, float]:
    """What the function returns in a new process; nothing when that takes longer than the limit."""
    context = multiprocessing.get_context("spawn")  # a forked child starts with this one's memory
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, job, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit_s) else {}
    except EOFError:
        raise click.ClickException(f"Planning failed: {job}") from None
    finally:
        process.terminate()
        process.join()


def measure(job: Job, plan_limit_s: float, highs_limit_s: float) -> dict[str, Any]:
    """One size and order, each solver in a fresh process."""
    profile, request, _ = _pipeline(job)
    schedule, _ = build_schedule(profile, request)
    results = _in_fresh_process(measure_plan, job, plan_limit_s)
    if highs_limit_s:
        for solver in ("simplex", "ipm"):
            results |= _in_fresh_process(partial(measure_highs, solver=solver), job, highs_limit_s)
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
@click.option(
    "--highs-limit",
    default=60.0,
    show_default=True,
    help="Time limit of each of HiGHS' solvers, s; 0 leaves them out.",
)
@output_option("planner_scale")
def main(
    sizes: tuple[str, ...],
    plan_limit: float,
    highs_limit: float,
    output: Path,
) -> None:
    """Measure how planning grows with the pipeline; writes a table and a CSV."""
    console = make_console()
    wanted = [_parse_size(size) for size in sizes]
    rows = []
    for stages, microbatches in wanted:
        for order in ORDERS:
            job = Job(stages, microbatches, order)
            rows.append(measure(job, plan_limit, highs_limit))
            total_s = rows[-1]["total_s"]
            done = f"{total_s:.1f} s" if total_s is not None else f"over {plan_limit:g} s"
            console.print(f"{stages} x {microbatches} on {ORDERS[order]}: {done}")
    console.print(make_table("Optimal plans at the all-maximum time", rows))
    leave(output, {"scale": rows})


if __name__ == "__main__":
    main()
