"""From a request for a plan to its problem; what a request may not ask for together."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import LEAST_ENERGY
from envpipe_megatron.policies.problem import POLICIES as POLICIES
from envpipe_megatron.policies.problem import RECONFIGURE_NAMES, Problem, in_flight_by_memory
from envpipe_megatron.policies.problem import PlanRequest as PlanRequest
from envpipe_megatron.policies.schedules import SCHEDULES, that_take

#: `max_in_flight` by the memory in the profile's sidecar.
BY_MEMORY = "memory"
#: What a schedule that may not be given a field of a request has instead.
_HAS = {
    "max_extra_forwards": "has no extra forwards to limit",
    "max_in_flight": "takes no limit on microbatches in flight",
    "channel_capacity": "is not lowered to what a channel holds",
}


def make_problem(
    profile: Profile,
    request: PlanRequest,
    own_s: float | None = None,
    in_v: Schedule | None = None,
) -> Problem:
    """Make the problem of a request for a profile; `own_s` and `in_v` are as `Problem` takes them.

    EnvPipeError: parts of the request contradict each other, or the profile does not have what it
    needs.
    """
    check_request(request)
    order = request.order
    if request.split is not None:
        profile = profile.with_split_backwards(request.split)
    chunks = request.num_chunks if order is None else order.num_chunks
    profile = profile.for_chunks(chunks)
    conditions = _conditions(profile, request)
    known: dict[str, Any] = {
        "schedule": SCHEDULES[request.schedule].name,
        "num_chunks": chunks,
        "group_size": conditions.group_size,
        "conditions": conditions,
        "max_in_flight": _in_flight(profile, request, chunks),
    }
    return Problem(**{**vars(request), **known}, profile=profile, own_s=own_s, in_v=in_v)


def check_request(request: PlanRequest) -> None:
    """Refuse (EnvPipeError) unknown names and parts that contradict each other."""
    for what, name, known in (
        ("policy", request.policy, POLICIES),
        ("reconfigure policy", request.reconfigure, RECONFIGURE_NAMES),
        ("schedule", request.schedule, SCHEDULES),
    ):
        if name not in known:
            raise EnvPipeError(f"Unknown {what}", value=name, remedy=f"Known: {', '.join(known)}.")
    row, order, chunks = SCHEDULES[request.schedule], request.order, request.num_chunks
    schedule = f"Schedule {row.name}" if order is None else f"Schedule '{order.name}'"
    if chunks < 1:
        raise EnvPipeError("A stage has at least one chunk", value=chunks, remedy="Use 1, or more.")
    if order is None and row.chunks not in (None, chunks):
        count, remedy = "two chunks", "--num-chunks 2"
        if row.chunks == 1:
            count, remedy = "one chunk", "--schedule interleaved, envpipe or auto for chunks"
        raise EnvPipeError(f"{schedule} has {count} a stage", value=chunks, remedy=f"Use {remedy}.")
    if order is None and request.group_size and (chunks == 1 or "group_size" not in row.takes):
        raise EnvPipeError(
            f"{schedule} has no groups of microbatches"
            + (" where stages have one chunk" if chunks == 1 else ""),
            value=request.group_size,
            remedy=f"Leave --group-size out, or use --schedule {that_take('group_size')} with "
            "chunks.",
        )
    if request.reconfigure != "default" and request.policy != "envelope":
        raise EnvPipeError(
            f"Reconfiguring goes with the envelope policy, not with {request.policy}",
            value=request.reconfigure,
            remedy="Use --policy envelope, or --reconfigure default.",
        )
    if order is None and row.build is None and request.policy != "optimal":
        raise EnvPipeError(
            "The schedule auto is planned together with the frequencies, by the optimal policy",
            value=request.policy,
            remedy="Use --policy optimal, or another schedule.",
        )
    for what, value, default in (
        ("deadline", request.deadline_factor or 1.0, 1.0),
        ("objective", request.objective, LEAST_ENERGY),
        ("dwell time", request.min_dwell_s, 0.0),
    ):
        if request.policy != "optimal" and value != default:
            raise EnvPipeError(
                f"Policy {request.policy} takes no {what}",
                value=value,
                remedy=f"Use --policy optimal, or leave the {what} out.",
            )
    factor = request.deadline_factor
    if factor is not None and not 0 < factor < math.inf:
        raise EnvPipeError(
            "The deadline must be a multiple of the framework's own iteration time",
            value=factor,
            remedy="Give a number above 0: 1 for no slowdown, 1.02 for 2 %.",
        )
    for field, has in _HAS.items():
        value = getattr(request, field)
        if value is not None and (order is not None or field not in row.takes):
            raise EnvPipeError(
                f"{schedule} {has}",
                value=value,
                remedy=f"Use --schedule {that_take(field)}, or leave "
                f"--{field.replace('_', '-')} out.",
            )
    if (chunks > 1 or request.split is not None) and request.channel_capacity is not None:
        raise EnvPipeError(
            "Limits of channels are of whole backwards in one chunk a stage",
            value="split backwards" if request.split else f"{chunks} chunks",
            remedy="Leave out the limit, or the chunks and the split.",
        )


def read_in_flight(given: str) -> int | tuple[int, ...] | str:
    """Read what a job's `max_in_flight` is given as; a ValueError says what that must be."""
    if given == BY_MEMORY:
        return given
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError("a number of microbatches, one for each stage, or 'memory'")
    return numbers if len(numbers) > 1 else numbers[0]


def _conditions(profile: Profile, request: PlanRequest) -> Conditions:
    """Return what surrounds the units; with chunks also how the framework's order groups them."""
    conditions = request.conditions or make_conditions(
        profile, blocking_power_w=request.blocking_power_w
    )
    if request.group_size or (request.order is None and request.num_chunks > 1):
        conditions = replace(conditions, group_size=request.group_size or profile.num_stages)
    return conditions


def _in_flight(profile: Profile, request: PlanRequest, chunks: int) -> tuple[int, ...] | None:
    """Return [num_stages] the most microbatches x chunks that each stage may hold; None: any."""
    limit, stages = request.max_in_flight, profile.num_stages
    if limit is None:
        return None
    if limit == BY_MEMORY:
        return in_flight_by_memory(profile, request.num_microbatches)
    if isinstance(limit, int | float):
        limit = (limit,)
    if isinstance(limit, tuple) and len(limit) in (1, stages) and all(map(math.isfinite, limit)):
        each = (int(most * chunks * (1 + RELATIVE_TOLERANCE)) for most in limit)
        return tuple(each) * (stages // len(limit))
    raise EnvPipeError(
        "The limit on microbatches in flight must be one number, one for each stage, or "
        f"'{BY_MEMORY}'",
        value=limit,
        remedy=f"The pipeline has {stages} stages.",
    )
