"""What to plan, and what of a profile it means."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from envpipe_megatron.core.conditions import Conditions, make_conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frontier import ObjectivePlanner
from envpipe_megatron.policies.limits import OrderLimits, in_flight_by_memory, order_limits
from envpipe_megatron.policies.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.optimal.optimizer import all_maximum_s

#: `max_in_flight` by the memory in the profile's sidecar.
BY_MEMORY = "memory"
#: EnvPipe's own name for its order.
SCHEDULE_ALIASES = {"ours": "envpipe"}


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
        num_chunks: chunks of each stage, for orders that have any.
        group_size: microbatches that pass a chunk before the next, as `builders.interleaved` takes
            it.
        extra_warmup: forwards of a chunk that stages warm up with beyond Megatron's interleaved
            order, one number, or one for each stage.
        max_extra_forwards: no stage gets more; in orders without any, no stage holds as many
            microbatches more than in the framework's own order.
        max_in_flight: the most microbatches in flight, one number, one for each stage, or
            `BY_MEMORY`. One of V chunks counts as 1/V.
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
        split: what a backward in two parts is assumed to take, where the profile does not say. With
            it, or with such rows in the profile, auto has orders that split backwards too.
        runnable: auto has only orders that a training job runs: of whole backwards, of chunks that
            are not laid in a V, and whose messages are taken as they are sent.
    """

    num_microbatches: int
    schedule: str = "1f1b"
    policy: str = "baseline"
    reconfigure: str = "default"
    blocking_power_w: float | tuple[float, ...] = 0.0
    num_chunks: int = 1
    group_size: int | None = None
    extra_warmup: tuple[int, ...] | None = None
    max_extra_forwards: int | None = None
    max_in_flight: float | tuple[float, ...] | str | None = None
    max_warmup_step: int | None = None
    channel_capacity: int | None = None
    deadline_factor: float | None = None
    conditions: Conditions | None = None
    min_dwell_s: float = 0.0
    park: bool = False
    order: Schedule | None = None
    objective: Objective = LEAST_ENERGY
    split: SplitBackward | None = None
    runnable: bool = False

    @property
    def order_name(self) -> str:
        """What the order is called: in quotes if it is there already, `auto` if it is planned."""
        if self.order is not None:
            return f"'{self.order.name}'"
        return SCHEDULE_ALIASES.get(self.schedule, self.schedule)

    @property
    def of_envpipe(self) -> bool:
        """Whether there are limits that orders of whole backwards in one chunk alone have."""
        return self.max_warmup_step is not None or self.channel_capacity is not None

    @property
    def chunks(self) -> int:
        """Chunks of each stage."""
        return self.num_chunks if self.order is None else self.order.num_chunks


def request_profile(profile: Profile, request: PlanRequest) -> Profile:
    """The profile of a request's chunks, with what it assumes of split backwards."""
    if request.split is not None:
        profile = profile.with_split_backwards(request.split)
    return profile.for_chunks(request.chunks)


def request_conditions(profile: Profile, request: PlanRequest) -> Conditions:
    """What surrounds the units; PlannerError for parking without waiting power by clock.

    With chunks also how the framework's own order groups microbatches, if that is known.
    """
    conditions = request.conditions or make_conditions(
        profile, blocking_power_w=request.blocking_power_w
    )
    if request.group_size or (request.order is None and request.num_chunks > 1):
        conditions = replace(conditions, group_size=request.group_size or profile.num_stages)
    if request.park and conditions.wait_power_w is None:
        raise PlannerError(
            "Parking needs to know what waiting takes at each clock",
            remedy="Measure wait_power_w into the profile's sidecar and add --use wait-power.",
        )
    return conditions


def framework_order(num_stages: int, request: PlanRequest) -> Schedule:
    """The framework's own order of a request; ScheduleError: it cannot run."""
    if request.num_chunks == 1:
        return builders.one_f_one_b(num_stages, request.num_microbatches)
    job = num_stages, request.num_microbatches, request.num_chunks
    return builders.interleaved(*job, request.group_size)


def request_limits(profile: Profile, request: PlanRequest) -> OrderLimits:
    """The extra forwards that a request allows; EnvPipeError if those refuse 1F1B itself."""
    return order_limits(
        profile.num_stages,
        request.num_microbatches,
        max_extra_forwards=request.max_extra_forwards,
        max_in_flight=request_in_flight(profile, request),
        max_warmup_step=request.max_warmup_step,
        channel_capacity=request.channel_capacity,
    )


def request_in_flight(profile: Profile, request: PlanRequest) -> tuple[int, ...] | None:
    """[num_stages] the most microbatches x chunks that each stage may hold; None for any number."""
    limit, stages = request.max_in_flight, profile.num_stages
    if limit is None:
        return None
    if limit == BY_MEMORY:
        return in_flight_by_memory(profile, request.num_microbatches)
    if isinstance(limit, int | float):
        limit = (limit,)
    if isinstance(limit, tuple) and len(limit) in (1, stages):
        each = (int(most * request.num_chunks * (1 + RELATIVE_TOLERANCE)) for most in limit)
        return tuple(each) * (stages // len(limit))
    raise PlannerError(
        "The limit on microbatches in flight must be one number, one for each stage, or "
        f"'{BY_MEMORY}'",
        value=limit,
        remedy=f"The pipeline has {stages} stages.",
    )


def request_planner(
    request: PlanRequest, own: Schedule, profile: Profile, conditions: Conditions
) -> ObjectivePlanner:
    """What plans any order of a job, within the time of the framework's `own` order."""
    factor = request.deadline_factor
    if factor is None:
        factor = 1.0 if request.objective.goal == Goal.ENERGY else math.inf
    longest_s = factor * all_maximum_s(own, profile, conditions)
    return ObjectivePlanner(request.objective, longest_s, request.min_dwell_s)
