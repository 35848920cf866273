"""From a profile and a request to a plan: the one entry of commands and of training.

Another package adds an order of units by an entry point of the group `envpipe_megatron.schedules`
(see `policies.registry`): a function of a `Profile` and a `PlanRequest` that returns a `Schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from envpipe_megatron.core import builders
from envpipe_megatron.core.channel_model import CHANNEL_REMEDY
from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import POLICIES as RULES
from envpipe_megatron.policies.frontier import FRONTIER_GAP, competing_orders, plan_frontier
from envpipe_megatron.policies.limits import (
    OrderLimits,
    envpipe_counts,
    in_flight_by_memory,
    order_limits,
)
from envpipe_megatron.policies.memory_frontier import MemoryPoint, memory_frontier
from envpipe_megatron.policies.objectives.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.objectives.plans import ObjectivePlanner
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.order_search import OrderSearch
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Reconfigured, reconfigure
from envpipe_megatron.policies.registry import Registry

#: Orders whose extra forwards can be limited.
LIMITED_SCHEDULES = ("envpipe", "auto")
POLICIES = (*RULES, "optimal")
#: `max_in_flight` by the memory in the profile's sidecar.
BY_MEMORY = "memory"
#: EnvPipe's own name for its order.
SCHEDULE_ALIASES = {"ours": "envpipe"}
RECONFIGURE_NAMES = ("default", *RECONFIGURE_POLICIES)


class PlannerError(EnvPipeError):
    """A request whose parts contradict each other, or that names what is not known."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Args:
        num_microbatches: M.
        schedule: one of `SCHEDULES`, or an alias; auto goes with the optimal policy.
        policy: baseline, uniform, envelope or optimal.
        reconfigure: default (none), greedy or balanced; the latter two go with envelope.
        blocking_power_w: one number, or one for each stage.
        num_chunks: chunks of each stage, for the interleaved schedule.
        group_size: microbatches that pass a chunk before the next, as `builders.interleaved` takes
            it.
        max_extra_forwards: no stage gets more.
        max_in_flight: the most microbatches in flight, one number, one for each stage, or
            `BY_MEMORY`.
        max_warmup_step: how far neighbouring stages' extra forwards may differ.
        channel_capacity: messages a bounded p2p channel holds; None for one that never blocks.
        deadline_factor: the optimal policy may take this many times as long as the framework's own
            order at the highest clocks; by default 1 for the least energy, and any time for other
            objectives.
        conditions: what surrounds the units, in place of the blocking power alone.
        min_dwell_s: the optimal policy keeps each clock of a stage at least as long.
        park: the optimal policy may lower the clock in long waits; needs the waiting power by clock
            among the conditions.
        order: an order that is there already, in place of one that `schedule` names.
        objective: what the optimal policy plans for.
    """

    num_microbatches: int
    schedule: str = "1f1b"
    policy: str = "baseline"
    reconfigure: str = "default"
    blocking_power_w: float | tuple[float, ...] = 0.0
    num_chunks: int = 1
    group_size: int | None = None
    max_extra_forwards: int | None = None
    max_in_flight: int | tuple[int, ...] | str | None = None
    max_warmup_step: int | None = None
    channel_capacity: int | None = None
    deadline_factor: float | None = None
    conditions: Conditions | None = None
    min_dwell_s: float = 0.0
    park: bool = False
    order: Schedule | None = None
    objective: Objective = LEAST_ENERGY

    @property
    def order_name(self) -> str:
        """What the order is called: in quotes if it is there already, `auto` if it is planned."""
        if self.order is not None:
            return f"'{self.order.name}'"
        return SCHEDULE_ALIASES.get(self.schedule, self.schedule)

    @property
    def chunks(self) -> int:
        """Chunks of each stage."""
        return self.num_chunks if self.order is None else self.order.num_chunks


#: Orders that a function of the job returns; EnvPipe's comes with notes, and auto with its clocks.
BUILDERS: Registry[Callable[[Profile, PlanRequest], Schedule]] = Registry(
    "envpipe_megatron.schedules",
    {
        "1f1b": lambda profile, request: builders.one_f_one_b(
            profile.num_stages, request.num_microbatches
        ),
        "gpipe": lambda profile, request: builders.gpipe(
            profile.num_stages, request.num_microbatches
        ),
        "interleaved": lambda profile, request: builders.interleaved(
            profile.num_stages, request.num_microbatches, request.num_chunks, request.group_size
        ),
        "interleaved-combined": lambda profile, request: builders.interleaved(
            profile.num_stages,
            request.num_microbatches,
            request.num_chunks,
            request.group_size,
            combined=True,
        ),
    },
)
SCHEDULES = tuple(dict.fromkeys(("1f1b", "gpipe", "interleaved", *LIMITED_SCHEDULES, *BUILDERS)))
#: Searches for an order at ever better times, which end sooner at times as close as this fraction.
_MOST_SEARCHES = 4
_SAME_TIME = 1e-3
_ONE_CHUNK = ("1f1b", "gpipe", *LIMITED_SCHEDULES, *SCHEDULE_ALIASES)


@dataclass(frozen=True)
class Planned:
    """A plan, how its reconfiguring ended, and what the user should know about it."""

    plan: Plan
    reconfigured: Reconfigured | None
    notes: tuple[str, ...]


def make_plan(profile: Profile, request: PlanRequest) -> Planned:
    """Plan order and frequencies as requested.

    EnvPipeError: PlannerError for parts of the request that contradict each other, ScheduleError
    for a job that the schedule does not fit, ProfileError for a profile that the policy cannot work
    with, LinearProgramError for a deadline that no frequencies meet.
    """
    check_request(request)
    profile = profile.for_chunks(request.chunks)
    if request.order_name == "auto":
        return _plan_order_too(profile, request)
    schedule, notes = build_schedule(profile, request)
    conditions = request_conditions(profile, request)
    if request.policy == "optimal":
        optimizer = Optimizer(schedule, profile, conditions, parking=request.park)
        planner = _planner(request, schedule, profile, conditions)
        return Planned(planner.plan(optimizer), None, notes)
    frequency = np.asarray(RULES[request.policy](schedule, profile))
    plan = Plan(request.policy, schedule, frequency, profile, conditions)
    if request.reconfigure == "default":
        return Planned(plan, None, notes)
    result = reconfigure(plan, RECONFIGURE_POLICIES[request.reconfigure])
    name = f"{request.policy}-{request.reconfigure}"
    return Planned(replace(plan, policy=name, frequency_mhz=result.frequency_mhz), result, notes)


def make_frontier(profile: Profile, request: PlanRequest, num_points: int) -> list[Plan]:
    """The time-energy frontier of a request's job, the fastest plan first.

    Its deadline matters for the schedule auto alone, whose order is searched there.
    """
    check_frontier(request)
    profile = profile.for_chunks(request.chunks)
    if request.order_name == "auto":
        search, _ = _order_search(profile, request)
        optimizers = competing_orders(profile, search, request_limits(profile, request))
    else:
        schedule, _ = build_schedule(profile, request)
        conditions = request_conditions(profile, request)
        optimizers = [
            Optimizer(schedule, profile, conditions, parking=request.park, good_gap=FRONTIER_GAP)
        ]
    return plan_frontier(optimizers, num_points, request.min_dwell_s)


def make_memory_frontier(profile: Profile, request: PlanRequest) -> list[MemoryPoint]:
    """The best plans of a request's job for rising limits of extra forwards."""
    check_memory_frontier(request)
    profile = profile.for_chunks(request.chunks)
    search, planner = _order_search(profile, request)
    return memory_frontier(search, request_limits(profile, request), planner)


def request_conditions(profile: Profile, request: PlanRequest) -> Conditions:
    """What surrounds the units; PlannerError for parking without waiting power by clock."""
    conditions = request.conditions or make_conditions(
        profile, blocking_power_w=request.blocking_power_w
    )
    if request.park and conditions.wait_power_w is None:
        raise PlannerError(
            "Parking needs to know what waiting takes at each clock",
            remedy="Measure wait_power_w into the profile's sidecar and add --use wait-power.",
        )
    return conditions


def _plan_order_too(profile: Profile, request: PlanRequest) -> Planned:
    search, planner = _order_search(profile, request)
    plan = search.plan(search.search(request_limits(profile, request)), planner)
    bound_j = search.any_order_bound_j(plan.cost.iteration_time_s)
    most = 100 * (1 - bound_j / plan.baseline.cost.energy_j)
    note = (
        f"{search.orders_tried} orders were compared. No order at all can save more than "
        f"{most:.2f} % at this deadline."
    )
    return Planned(plan, None, (note,))


def _planner(
    request: PlanRequest, schedule: Schedule, profile: Profile, conditions: Conditions
) -> ObjectivePlanner:
    """What plans any order of a job, within the time of the framework's own order."""
    factor = request.deadline_factor
    if factor is None:
        factor = 1.0 if request.objective.goal == Goal.ENERGY else math.inf
    longest_s = factor * all_maximum_s(schedule, profile, conditions)
    return ObjectivePlanner(request.objective, longest_s, request.min_dwell_s)


def _order_search(profile: Profile, request: PlanRequest) -> tuple[OrderSearch, ObjectivePlanner]:
    """The search for an order, at the time that is best for the objective.

    That time depends on the order: the first search is at the best time of 1F1B, the next at that
    of the order that it found.
    """
    _check_chunks(request)
    conditions = request_conditions(profile, request)
    own = builders.one_f_one_b(profile.num_stages, request.num_microbatches)
    planner = _planner(request, own, profile, conditions)

    def search_at(time_s: float) -> OrderSearch:
        return OrderSearch(
            profile, request.num_microbatches, conditions, time_s, parking=request.park
        )

    if request.objective.goal == Goal.ENERGY:
        return search_at(planner.longest_s), planner
    limits = request_limits(profile, request)
    better_s = planner.best_time_s(Optimizer(own, profile, conditions, parking=request.park))
    for _ in range(_MOST_SEARCHES):
        time_s, search = better_s, search_at(better_s)
        best = search.search(limits)[0]
        better_s = planner.best_time_s(search.optimizer(best.extra_forwards))
        if abs(better_s - time_s) <= _SAME_TIME * time_s:
            break
    return search, planner


def request_limits(profile: Profile, request: PlanRequest) -> OrderLimits:
    """The extra forwards that a request allows; EnvPipeError if those refuse 1F1B itself."""
    return order_limits(
        profile.num_stages,
        request.num_microbatches,
        max_extra_forwards=request.max_extra_forwards,
        max_in_flight=_in_flight(profile, request),
        max_warmup_step=request.max_warmup_step,
        channel_capacity=request.channel_capacity,
    )


def check_request(request: PlanRequest) -> None:
    """Refuse (PlannerError) unknown names and parts that contradict each other."""
    for what, name, known in (
        ("policy", request.policy, POLICIES),
        ("reconfigure policy", request.reconfigure, RECONFIGURE_NAMES),
        ("schedule", request.schedule, (*SCHEDULES, *SCHEDULE_ALIASES)),
    ):
        if name not in known:
            raise PlannerError(f"Unknown {what}", value=name, remedy=f"Known: {', '.join(known)}.")
    if request.reconfigure != "default" and request.policy != "envelope":
        raise PlannerError(
            f"Reconfiguring goes with the envelope policy, not with {request.policy}",
            value=request.reconfigure,
            remedy="Use --policy envelope, or --reconfigure default.",
        )
    if request.order_name == "auto" and request.policy != "optimal":
        raise PlannerError(
            "The schedule auto is planned together with the frequencies, by the optimal policy",
            value=request.policy,
            remedy="Use --policy optimal, or another schedule.",
        )
    for what, value, default in (
        ("deadline", request.deadline_factor or 1.0, 1.0),
        ("objective", request.objective, LEAST_ENERGY),
        ("dwell time", request.min_dwell_s, 0.0),
        ("parking", request.park, False),
    ):
        if request.policy != "optimal" and value != default:
            raise PlannerError(
                f"Policy {request.policy} knows no {what}",
                value=value,
                remedy=f"Use --policy optimal, or leave the {what} out.",
            )
    factor = request.deadline_factor
    if factor is not None and not 0 < factor < math.inf:
        raise PlannerError(
            "The deadline must be a multiple of the framework's own iteration time",
            value=factor,
            remedy="Give a number above 0: 1 for no slowdown, 1.02 for 2 %.",
        )
    limits = (request.max_extra_forwards, request.max_in_flight, request.max_warmup_step)
    if request.order_name not in LIMITED_SCHEDULES and limits != (None, None, None):
        raise PlannerError(
            "Limits on extra forwards and on microbatches in flight go with the schedules "
            f"{' and '.join(LIMITED_SCHEDULES)}",
            value=request.order_name,
            remedy=f"Use --schedule {LIMITED_SCHEDULES[0]}, or leave the limits out.",
        )


def check_frontier(request: PlanRequest, what: str = "A frontier") -> None:
    """Refuse (PlannerError) a request that no frontier can be planned for."""
    check_request(request)
    if request.policy != "optimal":
        raise PlannerError(
            f"{what} is made of optimal plans", value=request.policy, remedy="Use --policy optimal."
        )


def check_memory_frontier(request: PlanRequest) -> None:
    """Refuse (PlannerError) a request without a memory frontier."""
    check_frontier(request, "A memory frontier")
    if request.order_name != "auto":
        raise PlannerError(
            "A memory frontier compares orders",
            value=request.order_name,
            remedy="Use --schedule auto.",
        )


def build_schedule(profile: Profile, request: PlanRequest) -> tuple[Schedule, tuple[str, ...]]:
    """The order of a checked request for a profile's pipeline, and notes on what limited it.

    Not for the schedule auto, whose order depends on the deadline.
    """
    name, stages, microbatches = request.order_name, profile.num_stages, request.num_microbatches
    if request.order is None:
        _check_chunks(request)
    if name != "envpipe":
        schedule = request.order or BUILDERS[name](profile, request)
        job = (stages, microbatches, request.chunks)
        built = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
        if built != job:
            raise PlannerError(
                f"Schedule {name} has {_counts(built)}, and the job has {_counts(job)}",
                remedy="Give an order of the job, or fix the function that builds it.",
            )
        return schedule, ()
    limits = request_limits(profile, request)
    unbounded = request_limits(profile, replace(request, channel_capacity=None))
    wanted = unbounded.fit(envpipe_counts(profile, microbatches, limits.most))
    extra = limits.fit(wanted)
    lowered = ", ".join(
        f"stage {stage} from {before} to {after}"
        for stage, (before, after) in enumerate(zip(wanted, extra, strict=True))
        if after < before
    )
    note = (
        f"Extra forwards lowered on {lowered}: on a channel of capacity {request.channel_capacity} "
        f"they may fall by at most {limits.max_fall} from a stage to the next. {CHANNEL_REMEDY}"
    )
    return builders.envpipe(stages, microbatches, extra), (note,) if lowered else ()


def _check_chunks(request: PlanRequest) -> None:
    # Not in check_request: a job that is given its plan has chunks whatever order it asks for.
    if request.schedule in _ONE_CHUNK and (request.num_chunks > 1 or request.group_size):
        raise PlannerError(
            f"Schedule {request.schedule} has one chunk a stage, and no groups of microbatches",
            value=request.num_chunks if request.num_chunks > 1 else request.group_size,
            remedy="Use --schedule interleaved for chunks.",
        )


def _in_flight(profile: Profile, request: PlanRequest) -> tuple[int, ...] | None:
    limit, stages = request.max_in_flight, profile.num_stages
    if limit is None:
        return None
    if limit == BY_MEMORY:
        return in_flight_by_memory(profile, request.num_microbatches)
    if isinstance(limit, int):
        return (limit,) * stages
    if isinstance(limit, tuple) and len(limit) in (1, stages):
        return limit if len(limit) == stages else limit * stages
    raise PlannerError(
        "The limit on microbatches in flight must be one number, one for each stage, or "
        f"'{BY_MEMORY}'",
        value=limit,
        remedy=f"The pipeline has {stages} stages.",
    )


def _counts(numbers: tuple[int, int, int]) -> str:
    """Numbers of stages, microbatches and chunks as a message shows them."""
    stages, microbatches, chunks = numbers
    return f"{stages} stages, {microbatches} microbatches and {chunks} chunks a stage"
