"""The plans of one workload side by side: rivals' and ours, all priced by one evaluator.

What a planner says of its plan is dropped: `Plan` recomputes iteration time and energy from the
order, the frequencies, the profile and the blocking power. lowtime's plans are taken at the time
that they really take with the clocks that lowtime rounded them to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.planner.lowtime_rival import LowtimeRun
from benchmarks.planner.workloads import Workload
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, waiting_floor_w
from envpipe_megatron.policies.orders.any_order import any_order
from envpipe_megatron.policies.planner import make_frontier, make_plan
from envpipe_megatron.policies.request import PlanRequest

#: Limits on extra forwards that joint plans are made for; None is no limit.
EXTRA_FORWARDS = (0, 1, 2, 4, None)
#: Deadlines of our frontiers, from the fastest iteration to the cheapest.
FRONTIER_POINTS = 100
#: Plans of lowtime that state up to this much above the all-maximum time are priced: what they
#: state and what they take differ by a tenth of this.
_STATED_MARGIN = 1.005
#: An iteration counts as no slower than another within this, which is a float's rounding.
_SAME_TIME = 1e-9


class PlanKind(StrEnum):
    """How a plan was made."""

    ALL_MAXIMUM = "all-maximum"
    UNIFORM = "uniform"
    ENVPIPE_ON_1F1B = "EnvPipe on 1F1B"
    ENVPIPE = "EnvPipe in full"
    LOWTIME = "1F1B + lowtime"
    OURS_ON_1F1B = "ours on 1F1B"
    OURS_JOINT = "ours joint"


@dataclass(frozen=True)
class Row:
    """One plan of one workload.

    Args:
        plan: priced by the workload's conditions; its bound is that of its order and time.
        planning_time_s: wall time of one planning; None for lowtime, whose run may be an old one.
        planning_cpu_s: CPU time of the same, for lowtime of its whole run: its plan comes last.
        any_order_bound_j: the energy that no order at all can go below; for joint plans.
        max_extra_forwards: limit of a joint plan, None for no limit.
        finished: whether the planner ended before its limit.
    """

    kind: PlanKind
    plan: Plan
    planning_time_s: float | None
    planning_cpu_s: float
    any_order_bound_j: float | None = None
    max_extra_forwards: int | None = None
    finished: bool = True

    @property
    def label(self) -> str:
        """For tables and pictures."""
        if self.kind is PlanKind.OURS_JOINT:
            limit = self.max_extra_forwards
            return f"{self.kind}, extra {'unlimited' if limit is None else f'<= {limit}'}"
        return str(self.kind)

    @property
    def cost(self) -> Cost:
        """Time and energy of an iteration."""
        return self.plan.cost

    @property
    def saving_percent(self) -> float:
        """Energy saved against all-maximum."""
        return self.cost.saving_percent(self.plan.baseline.cost)

    @property
    def slowdown_percent(self) -> float:
        """Time lost against all-maximum."""
        return self.cost.slowdown_percent(self.plan.baseline.cost)

    @property
    def any_order_saving_percent(self) -> float | None:
        """What no order at all can exceed."""
        if self.any_order_bound_j is None:
            return None
        return 100.0 * (1.0 - self.any_order_bound_j / self.plan.baseline.cost.energy_j)

    @property
    def peak_in_flight(self) -> int:
        """Microbatches in flight on the stage that holds most."""
        return max(self.plan.schedule.peak_in_flight)


@dataclass(frozen=True)
class Frontier:
    """Our frontier of one workload, on 1f1b or auto for the joint one.

    `num_plans` counts those of the `FRONTIER_POINTS` asked for that no other beats.
    """

    order: str
    num_plans: int
    planning_time_s: float
    planning_cpu_s: float
    widest_gap_percent: float


@dataclass(frozen=True)
class Comparison:
    """All plans of one workload, and rivals that are missing with the reason."""

    workload: Workload
    rows: tuple[Row, ...]
    frontiers: tuple[Frontier, ...]
    skipped: tuple[str, ...]

    def row(self, kind: PlanKind, max_extra_forwards: int | None = None) -> Row:
        """The row of a kind that stands once, or of a joint plan with a limit."""
        (found,) = (
            row
            for row in self.rows
            if row.kind is kind and row.max_extra_forwards == max_extra_forwards
        )
        return found


def warm_up(workload: Workload) -> None:
    """Load what the planners load on first use, so that no timed planning pays for it."""
    small = replace(workload, num_microbatches=workload.profile.num_stages)
    list(_rule_rows(small))
    make_plan(small.profile, small.request("auto", "optimal"))


def compare(workload: Workload, lowtime: Callable[..., LowtimeRun]) -> Comparison:
    """Make, time and price every plan of a workload.

    `lowtime` is `run_lowtime` with its limit and folder.
    """
    rows = list(_rule_rows(workload))
    skipped: list[str] = []
    asked = workload.profile, workload.num_microbatches, workload.blocking_power_w
    try:
        rows.append(lowtime_row(workload, lowtime(*asked)))
    except EnvPipeError as error:
        skipped.append(f"{workload.name}: lowtime: {error}")
    rows.append(_timed_row(workload, PlanKind.OURS_ON_1F1B, workload.request("1f1b", "optimal")))
    rows.extend(_joint_rows(workload))
    frontiers = tuple(_frontier(workload, order) for order in ("1f1b", "auto"))
    return Comparison(workload, tuple(rows), frontiers, tuple(skipped))


def _frontier(workload: Workload, order: str) -> Frontier:
    start, cpu_start = time.perf_counter(), time.process_time()
    plans = make_frontier(workload.profile, workload.request(order, "optimal"), FRONTIER_POINTS)
    planning_time_s = time.perf_counter() - start
    planning_cpu_s = time.process_time() - cpu_start
    gaps = [plan.gap_percent for plan in plans if plan.gap_percent is not None]
    return Frontier(order, len(plans), planning_time_s, planning_cpu_s, max(gaps))


def _rule_rows(workload: Workload) -> Iterator[Row]:
    request = workload.request
    yield _timed_row(workload, PlanKind.ALL_MAXIMUM, request())
    yield _timed_row(workload, PlanKind.UNIFORM, request("1f1b", "uniform"))
    on_1f1b = request("1f1b", "envelope", "balanced")
    yield _timed_row(workload, PlanKind.ENVPIPE_ON_1F1B, on_1f1b)
    yield _timed_row(workload, PlanKind.ENVPIPE, request("envpipe", "envelope", "balanced"))


def _joint_rows(workload: Workload) -> Iterator[Row]:
    deadline_s = make_plan(workload.profile, workload.request()).plan.cost.iteration_time_s
    job = workload.profile, workload.conditions
    floor_w = waiting_floor_w(*job)
    bound_j = any_order(*job, workload.num_microbatches, deadline_s, floor_w).energy_lower_bound_j
    for limit in EXTRA_FORWARDS:
        request = workload.request("auto", "optimal", max_extra_forwards=limit)
        yield _timed_row(workload, PlanKind.OURS_JOINT, request, bound_j)


def _timed_row(
    workload: Workload, kind: PlanKind, request: PlanRequest, any_order_bound_j: float | None = None
) -> Row:
    start, cpu_start = time.perf_counter(), time.process_time()
    plan = make_plan(workload.profile, request).plan
    return Row(
        kind,
        plan,
        time.perf_counter() - start,
        time.process_time() - cpu_start,
        any_order_bound_j,
        max_extra_forwards=request.max_extra_forwards,
    )


def lowtime_row(workload: Workload, run: LowtimeRun) -> Row:
    """lowtime's plan for the all-maximum time, as it is really worth.

    Of the plans that really keep the time the cheapest, or the fastest where none does. Its gap is
    to the lower bound of 1F1B at the time that it really takes.
    """
    schedule = builders.one_f_one_b(workload.profile.num_stages, workload.num_microbatches)
    profile, conditions = workload.profile, workload.conditions
    baseline = make_plan(profile, workload.request()).plan.cost
    longest_s = baseline.iteration_time_s * (1 + _SAME_TIME)
    near = [found for found in run.plans if found[0] <= longest_s * _STATED_MARGIN]
    plans = [
        Plan("lowtime", schedule, frequency_mhz, profile, conditions)
        for _, frequency_mhz in near or run.plans[-1:]
    ]
    in_time = [plan for plan in plans if plan.cost.iteration_time_s <= longest_s]
    if in_time:
        plan = min(in_time, key=lambda plan: plan.cost.energy_j)
    else:
        plan = min(plans, key=lambda plan: plan.cost.iteration_time_s)
    ours = Optimizer(schedule, profile, conditions).plan(plan.cost.iteration_time_s)
    plan = replace(plan, energy_lower_bound_j=ours.energy_lower_bound_j)
    return Row(PlanKind.LOWTIME, plan, None, run.seconds_total, finished=run.finished)
