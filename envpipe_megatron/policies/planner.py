"""From a profile and a request to a plan: the one entry of commands and of training."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import POLICIES as RULES
from envpipe_megatron.policies.frequencies import RECONFIGURE_POLICIES, Reconfigured, reconfigure
from envpipe_megatron.policies.frontier import FRONTIER_GAP, plan_frontier
from envpipe_megatron.policies.orders.auto import AutoSearch, MemoryPoint, memory_frontier
from envpipe_megatron.policies.problem import Problem
from envpipe_megatron.policies.request import PlanRequest, check_request, make_problem
from envpipe_megatron.policies.schedules import SCHEDULES, Built, build_order


@dataclass(frozen=True)
class Planned:
    """A plan, how its reconfiguring ended, and what the user should know about it.

    Of the schedule auto, `auto` is its search.
    """

    plan: Plan
    reconfigured: Reconfigured | None
    notes: tuple[str, ...]
    auto: AutoSearch | None = None


def make_plan(profile: Profile, request: PlanRequest) -> Planned:
    """Plan order and frequencies as requested.

    EnvPipeError for parts of the request that contradict each other; of its kinds, ScheduleError
    for a job that the schedule does not fit, ProfileError for a profile that the policy cannot work
    with, LinearProgramError for a deadline that no frequencies meet.
    """
    return solve(make_problem(profile, request))


def make_frontier(profile: Profile, request: PlanRequest, num_points: int) -> list[Plan]:
    """Return the time-energy frontier of a request's job, the fastest plan first.

    Its deadline matters only for the schedule auto, whose order is searched there.
    """
    check_frontier(request)
    problem = make_problem(profile, request)
    if _is_searched(problem):
        optimizers = AutoSearch(problem).competing()
    else:
        schedule, _ = build_order(problem)
        optimizers = [problem.optimizer(schedule, good_gap=FRONTIER_GAP)]
    return plan_frontier(optimizers, num_points, problem.min_dwell_s)


def make_memory_frontier(profile: Profile, request: PlanRequest) -> list[MemoryPoint]:
    """Return the best plans of a request's job for rising limits of microbatches in flight."""
    check_memory_frontier(request)
    return memory_frontier(AutoSearch(make_problem(profile, request)))


def build_schedule(profile: Profile, request: PlanRequest) -> Built:
    """Return the order of a request for a profile's pipeline, and notes on what limited it.

    Not for the schedule auto, whose order depends on the deadline.
    """
    return build_order(make_problem(profile, request))


def check_frontier(request: PlanRequest, what: str = "A frontier") -> None:
    """Refuse (EnvPipeError) a request that no frontier can be planned for."""
    check_request(request)
    if request.policy != "optimal":
        raise EnvPipeError(
            f"{what} is made of optimal plans", value=request.policy, remedy="Use --policy optimal."
        )


def check_memory_frontier(request: PlanRequest) -> None:
    """Refuse (EnvPipeError) a request without a memory frontier."""
    check_frontier(request, "A memory frontier")
    if request.order is not None or request.schedule != "auto":
        raise EnvPipeError(
            "A memory frontier compares orders",
            value=request.schedule if request.order is None else request.order.name,
            remedy="Use --schedule auto.",
        )


def solve(problem: Problem) -> Planned:
    """Return the plan of a problem; errors as of `make_plan`."""
    if _is_searched(problem):
        auto = AutoSearch(problem)
        plan = auto.plan()
        return Planned(plan, None, auto.notes(plan), auto)
    schedule, notes = build_order(problem)
    if problem.policy == "optimal":
        plan = problem.planner(schedule).plan(problem.optimizer(schedule))
        return Planned(plan, None, notes)
    profile = problem.profile
    frequency = np.asarray(RULES[problem.policy](schedule, profile))
    plan = Plan(problem.policy, schedule, frequency, profile, problem.conditions)
    if problem.reconfigure == "default":
        return Planned(plan, None, notes)
    result = reconfigure(plan, RECONFIGURE_POLICIES[problem.reconfigure])
    name = f"{problem.policy}-{problem.reconfigure}"
    return Planned(replace(plan, policy=name, frequency_mhz=result.frequency_mhz), result, notes)


def _is_searched(problem: Problem) -> bool:
    return problem.order is None and SCHEDULES[problem.schedule].build is None
