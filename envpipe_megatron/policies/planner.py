"""From a profile and a request to a plan: the one entry of commands and of training.

Another package adds an order of units by an entry point of the group `envpipe_megatron.schedules`
(see `policies.registry`): a function of a `Profile` and a `PlanRequest` that returns a `Schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.zero_bubble import zero_bubble, zero_bubble_v
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.frequencies import POLICIES as RULES
from envpipe_megatron.policies.frontier import FRONTIER_GAP, plan_frontier
from envpipe_megatron.policies.objective import LEAST_ENERGY
from envpipe_megatron.policies.optimal.optimizer import Optimizer
from envpipe_megatron.policies.orders.auto import AutoSearch
from envpipe_megatron.policies.orders.envpipe_rule import envpipe_order
from envpipe_megatron.policies.orders.memory_frontier import MemoryPoint, memory_frontier
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Reconfigured, reconfigure
from envpipe_megatron.policies.registry import Registry
from envpipe_megatron.policies.request import (
    SCHEDULE_ALIASES,
    PlannerError,
    PlanRequest,
    request_conditions,
    request_in_flight,
    request_planner,
    request_profile,
)

#: Orders whose extra forwards can be limited.
LIMITED_SCHEDULES = ("envpipe", "auto")
#: Orders that split backwards, and how many microbatches x chunks p stages hold each at most.
_ZERO_BUBBLE: dict[str, Callable[[int], int]] = {
    "zb-h1": lambda p: p,
    "zb-h2": lambda p: 2 * p - 1,
    "zb-v": lambda p: 2 * p,
}
POLICIES = (*RULES, "optimal")
RECONFIGURE_NAMES = ("default", *RECONFIGURE_POLICIES)


def _interleaved(profile: Profile, request: PlanRequest, *, combined: bool) -> Schedule:
    stages, extra = profile.num_stages, request.extra_warmup or (0,)
    if len(extra) not in (1, stages):
        raise PlannerError(
            "The extra warm-up must be one number, or one for each stage",
            value=extra,
            remedy=f"The pipeline has {stages} stages.",
        )
    return builders.interleaved(
        stages,
        request.num_microbatches,
        request.num_chunks,
        request.group_size,
        combined=combined,
        extra_warmup=extra * (stages // len(extra)),
    )


def _zero_bubble(profile: Profile, request: PlanRequest) -> Schedule:
    """ZB-H1, ZB-H2 or ZB-V for equal units, within the request's limit of memory."""
    name, stages = request.schedule, profile.num_stages
    if Kind.INPUT_GRADIENT not in profile.kinds:
        raise PlannerError(
            f"Schedule {name} splits backwards, and {profile.source} does not say what the parts "
            "take",
            remedy="Add --split-overhead 0.05 to assume halves that take 5 % more together, or "
            "give rows of input-gradient and weight-gradient.",
        )
    most = _ZERO_BUBBLE[name](stages)
    if limits := request_in_flight(profile, request):
        most = min(most, *limits)
    build = zero_bubble_v if name == "zb-v" else zero_bubble
    return build(stages, request.num_microbatches, most)


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
        "interleaved": lambda profile, request: _interleaved(profile, request, combined=False),
        "interleaved-combined": lambda *job: _interleaved(*job, combined=True),
        "breadth-first": lambda profile, request: builders.breadth_first(
            profile.num_stages, request.num_microbatches, request.num_chunks
        ),
        **dict.fromkeys(_ZERO_BUBBLE, _zero_bubble),
    },
)
SCHEDULES = tuple(dict.fromkeys(("1f1b", "gpipe", "interleaved", *LIMITED_SCHEDULES, *BUILDERS)))
_NO_GROUPS = ("breadth-first", "zb-v")
_ONE_CHUNK = ("1f1b", "gpipe", "zb-h1", "zb-h2")


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

    EnvPipeError: PlannerError for parts of the request that contradict each other, ScheduleError
    for a job that the schedule does not fit, ProfileError for a profile that the policy cannot work
    with, LinearProgramError for a deadline that no frequencies meet.
    """
    check_request(request)
    profile = request_profile(profile, request)
    if request.order_name == "auto":
        _check_chunks(request)
        auto = AutoSearch(profile, request)
        plan = auto.plan()
        return Planned(plan, None, auto.notes(plan), auto)
    schedule, notes = build_schedule(profile, request)
    conditions = request_conditions(profile, request)
    if request.policy == "optimal":
        optimizer = Optimizer(schedule, profile, conditions, parking=request.park)
        planner = request_planner(request, schedule, profile, conditions)
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
    profile = request_profile(profile, request)
    if request.order_name == "auto":
        optimizers = AutoSearch(profile, request).competing()
    else:
        schedule, _ = build_schedule(profile, request)
        conditions = request_conditions(profile, request)
        optimizers = [
            Optimizer(schedule, profile, conditions, parking=request.park, good_gap=FRONTIER_GAP)
        ]
    return plan_frontier(optimizers, num_points, request.min_dwell_s)


def make_memory_frontier(profile: Profile, request: PlanRequest) -> list[MemoryPoint]:
    """The best plans of a request's job for rising limits of microbatches in flight."""
    check_memory_frontier(request)
    profile = request_profile(profile, request)
    return memory_frontier(AutoSearch(profile, request))


def check_request(request: PlanRequest) -> None:
    """Refuse (PlannerError) unknown names and parts that contradict each other."""
    for what, name, known in (
        ("policy", request.policy, POLICIES),
        ("reconfigure policy", request.reconfigure, RECONFIGURE_NAMES),
        ("schedule", request.schedule, (*SCHEDULES, *SCHEDULE_ALIASES)),
    ):
        if name not in known:
            raise PlannerError(f"Unknown {what}", value=name, remedy=f"Known: {', '.join(known)}.")
    if request.num_chunks < 1:
        raise PlannerError(
            "A stage has at least one chunk", value=request.num_chunks, remedy="Use 1, or more."
        )
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
    if request.extra_warmup and not request.order_name.startswith("interleaved"):
        raise PlannerError(
            f"Schedule {request.order_name} has a warm-up of its own",
            value=request.extra_warmup,
            remedy="Use --schedule interleaved, or leave the extra warm-up out.",
        )
    limits = (request.max_extra_forwards, request.max_in_flight, request.max_warmup_step)
    if request.order_name in _ZERO_BUBBLE:
        limits = (request.max_extra_forwards, None, request.max_warmup_step)
    if request.order_name not in LIMITED_SCHEDULES and limits != (None, None, None):
        raise PlannerError(
            "Limits on extra forwards and on microbatches in flight go with the schedules "
            f"{' and '.join(LIMITED_SCHEDULES)}, the latter also with {', '.join(_ZERO_BUBBLE)}",
            value=request.order_name,
            remedy="Use --schedule auto, or leave the limits out.",
        )
    more = request.num_chunks > 1 or request.split is not None
    if request.order_name in LIMITED_SCHEDULES and more and request.of_envpipe:
        raise PlannerError(
            "Limits of neighbours' extra forwards and of channels are of whole backwards in one "
            "chunk a stage",
            value="split backwards" if request.split else f"{request.num_chunks} chunks",
            remedy="Leave out the limit, or the chunks and the split.",
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
    notes: tuple[str, ...] = ()
    if name == "envpipe":
        schedule, notes = envpipe_order(profile, request)
    else:
        schedule = request.order or BUILDERS[name](profile, request)
        job = (stages, microbatches, request.chunks)
        built = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
        if built != job:
            raise PlannerError(
                f"Schedule {name} has {_counts(built)}, and the job has {_counts(job)}",
                remedy="Give an order of the job, or fix the function that builds it.",
            )
    if request.split and not schedule.split:
        raise PlannerError(
            f"Schedule {name} splits no backward, and it is said what that takes",
            remedy="Leave --split-overhead out, or use --schedule auto.",
        )
    return schedule, notes


def _check_chunks(request: PlanRequest) -> None:
    # Not in check_request: a job that is given its plan has chunks whatever order it asks for.
    name, chunks, group = request.schedule, request.num_chunks, request.group_size
    if name in _ONE_CHUNK and chunks > 1:
        raise PlannerError(
            f"Schedule {name} has one chunk a stage",
            value=chunks,
            remedy="Use --schedule interleaved, envpipe or auto for chunks.",
        )
    if name == "zb-v" and chunks != 2:
        raise PlannerError(
            f"Schedule {name} has two chunks a stage", value=chunks, remedy="Use --num-chunks 2."
        )
    if group and (chunks == 1 or name in _NO_GROUPS):
        raise PlannerError(
            f"Schedule {name} has no groups of microbatches"
            + (" where stages have one chunk" if chunks == 1 else ""),
            value=group,
            remedy="Leave --group-size out, or use --schedule interleaved, envpipe or auto with "
            "chunks.",
        )


def _counts(numbers: tuple[int, int, int]) -> str:
    """Numbers of stages, microbatches and chunks as a message shows them."""
    stages, microbatches, chunks = numbers
    return f"{stages} stages, {microbatches} microbatches and {chunks} chunks a stage"
