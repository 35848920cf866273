"""A problem: times, conditions, limits and an objective of one iteration. A plan answers it.

`request.make_problem` makes one of what a user or a job asks for, a `PlanRequest`; planners, orders
and the process that plans beside training take nothing else. Memory, the batch, the channel and the
user may limit the extra forwards of a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np

from envpipe_megatron.core.channel_model import CHANNEL_REMEDY, find_stall, max_falling_step
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.fields import COUNT, FACTOR, TIME, WHOLE_NUMBER, option
from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.job import HELD_TOLERANCE
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import POLICIES as RULES
from envpipe_megatron.policies.frequencies import RECONFIGURE_POLICIES
from envpipe_megatron.policies.frontier import ObjectivePlanner
from envpipe_megatron.policies.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.optimal.optimizer import GOOD_GAP, Optimizer, all_maximum_s

POLICIES = (*RULES, "optimal")
RECONFIGURE_NAMES = ("default", *RECONFIGURE_POLICIES)


@dataclass(frozen=True)
class OrderLimits:
    """The extra forwards that an order may have.

    Args:
        most: the most extra forwards on each stage.
        max_fall: how many more than its successor a stage may have; None for any number.

    Nor more than one more than its predecessor: no stage can warm up with more forwards than the
    one before has sent.
    """

    most: tuple[int, ...]
    max_fall: int | None

    def fit(self, extra_forwards: Sequence[int]) -> tuple[int, ...]:
        """Return the largest counts within the limits, none above the given."""
        fitted = [max(0, min(pair)) for pair in zip(extra_forwards, self.most, strict=True)]
        for stage in range(1, len(fitted)):
            fitted[stage] = min(fitted[stage], fitted[stage - 1] + 1)
        if self.max_fall is not None:
            for stage in range(len(fitted) - 2, -1, -1):
                fitted[stage] = min(fitted[stage], fitted[stage + 1] + self.max_fall)
        return tuple(fitted)

    def allow(self, extra_forwards: Sequence[int]) -> bool:
        """Return whether counts keep the limits as they are."""
        return min(extra_forwards) >= 0 and self.fit(extra_forwards) == tuple(extra_forwards)


def order_limits(
    own: Schedule, most_in_flight: Sequence[int] | None = None, channel_capacity: int | None = None
) -> OrderLimits:
    """Return the extra forwards that the batch and limits allow beyond 1F1B, the framework's own.

    Limits are as `Problem` has them. ScheduleError: fewer in flight than 1F1B itself holds.
    EnvPipeError: a channel on which not even 1F1B finishes.
    """
    if channel_capacity is not None and (stuck := find_stall(own, channel_capacity)):
        raise EnvPipeError(
            "Not even 1F1B finishes on a channel of this capacity: " + "; ".join(map(str, stuck)),
            value=channel_capacity,
            remedy=CHANNEL_REMEDY,
        )
    check_own_within(own, most_in_flight)
    batch = own.num_microbatches
    limits = zip(most_in_flight or [batch] * own.num_stages, own.peak_in_flight, strict=True)
    fall = max_falling_step(channel_capacity)
    # Capacity 0 gives -1; the jobs that finish there at all have no channel or no extra forwards.
    return OrderLimits(
        tuple(min(limit, batch) - peak for limit, peak in limits),
        None if fall is None else max(0, fall),
    )


def check_own_within(
    own: Schedule,
    max_in_flight: Sequence[float] | None,
    error: type[EnvPipeError] = ScheduleError,
) -> None:
    """Refuse, by an error of this type, a limit that is below what the framework's order holds."""
    most = max_in_flight or own.peak_in_flight
    if any(limit < peak for limit, peak in zip(most, own.peak_in_flight, strict=True)):
        held = own.microbatches_in_flight
        raise error(
            "The limit of microbatches in flight is below what the framework's own order "
            f"({own.name}) holds, {', '.join(f'{each:g}' for each in held)}",
            value=[limit / own.num_chunks for limit in most],
            remedy=f"Give at least {math.ceil(max(held))}, or one number for each stage.",
        )


def envpipe_counts(profile: Profile, caps: Sequence[int]) -> list[int]:
    """Return EnvPipe's extra forwards, by times of a profile and limits of each stage."""
    return builders.envpipe_extra_forwards(
        [kinds[Kind.BACKWARD][0].time_s for kinds in profile.rows],
        [
            profile.row(stage, Kind.FORWARD, frequency).time_s
            for stage, frequency in enumerate(profile.optimal_frequency_mhz)
        ],
        caps,
    )


def in_flight_by_memory(profile: Profile, num_microbatches: int) -> tuple[int, ...]:
    """Return for each stage the microbatches (x chunks) whose activations fit into its memory.

    No more than there are, but as many as all pending weight gradients take. One is there already;
    the sidecar says what is free beside it. EnvPipeError: it does not.
    """
    sidecar = profile.sidecar
    if sidecar.activation_bytes is None or sidecar.free_bytes is None:
        raise EnvPipeError(
            f"The sidecar of {profile.source} has no activation_bytes and free_bytes",
            remedy="Measure them, or give the limit as a number of microbatches.",
        )
    units, fit = num_microbatches * sidecar.num_chunks, []
    bytes_by_stage = zip(sidecar.activation_bytes, sidecar.free_bytes, strict=True)
    for share, (one, free) in zip(profile.weight_shares.flat, bytes_by_stage, strict=True):
        most = math.ceil(units * max(1.0, share))
        more = (free + RELATIVE_TOLERANCE * (free + one)) / one if one > 0 else most
        fit.append(1 + int(min(most - 1, more)))  # tiny bytes make this infinite
    return tuple(fit)


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan; fields with a help are options of `envpipe plan`.

    Args:
        num_microbatches: M.
        schedule: one of `schedules.SCHEDULES`, or an alias; auto goes with the optimal policy.
        blocking_power_w: one number, or one for each stage.
        objective: what the optimal policy plans for.
        max_extra_forwards: no stage gets more; in orders without any, no stage holds as many
            microbatches more than in the framework's own order.
        channel_capacity: as `channel_model` has it; only orders of whole backwards in one chunk are
            lowered to it. None: it never blocks.
        max_in_flight: the most microbatches in flight, one number, one for each stage, or
            `request.BY_MEMORY`. One of V chunks counts as 1/V.
        conditions: what surrounds the units, in place of only the blocking power.
        order: a schedule to use instead of building one by name.
        split: what a backward in two parts is assumed to take, where the profile does not say. With
            it, or with such rows in the profile, auto has orders that split backwards too.
    """

    num_microbatches: int
    schedule: str = "1f1b"
    policy: str = option("How units get their frequencies.", POLICIES, "baseline")
    reconfigure: str = option(
        "How the critical path is raised; with --policy envelope.", RECONFIGURE_NAMES, "default"
    )
    blocking_power_w: float | tuple[float, ...] = 0.0
    num_chunks: int = option(
        "Chunks (virtual stages) of each stage, for orders that have any; by default the "
        "profile's.",
        COUNT,
        1,
    )
    group_size: int | None = option(
        "Microbatches that pass a chunk before the next, Megatron's "
        "--microbatch-group-size-per-virtual-pipeline-stage; by default the number of stages.",
        COUNT,
    )
    _: KW_ONLY
    objective: Objective = LEAST_ENERGY
    deadline_factor: float | None = option(
        "With --policy optimal: times the iteration time of the framework's own order at the "
        "highest clocks. Default: 1 with --objective energy, and none with others.",
        FACTOR,
    )
    min_dwell_s: float = option(
        "With --policy optimal: keep each clock of a stage at least as long, s.", TIME, 0.0
    )
    max_extra_forwards: int | None = option("Limit for every stage.", WHOLE_NUMBER)
    channel_capacity: int | None = option(
        "Messages that a bounded p2p channel holds (1 with a single hardware queue).", WHOLE_NUMBER
    )
    runnable: bool = option(
        "With --schedule auto and chunks: only orders that a training job under EnvPipe runs, "
        "with chunks not in a V.",
        default=False,
    )
    max_in_flight: float | tuple[float, ...] | str | None = None
    conditions: Conditions | None = None
    order: Schedule | None = None
    split: SplitBackward | None = None


@dataclass(frozen=True)
class Problem(PlanRequest):
    """A request whose parts are known for a profile: all that a plan is made from.

    Args:
        profile: what units take, of the chunks that each stage has.
        conditions: what surrounds the units; with chunks, also the groups of the framework's order.
        max_in_flight: for each stage, the most microbatches x chunks that it holds.
        own_s: the time that the deadline is a multiple of; None for that of Megatron's order at the
            highest clocks.
        in_v: the framework's own order, where the job's chunks lie in a V.
        notes: what the user should know of it.
    """

    _: KW_ONLY
    profile: Profile
    conditions: Conditions
    max_in_flight: tuple[int, ...] | None = None
    own_s: float | None = None
    in_v: Schedule | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return self.profile.num_stages

    @cached_property
    def own_order(self) -> Schedule:
        """The framework's own order of the job; ScheduleError: it cannot run."""
        if self.in_v is not None:
            return self.in_v
        job = self.num_stages, self.num_microbatches, self.num_chunks
        return builders.framework_order(*job, self.group_size)

    @property
    def most_in_flight(self) -> list[int] | None:
        """[num_stages] the most microbatches x chunks that each stage may hold, by both limits."""
        most = list(self.max_in_flight or ())
        if self.max_extra_forwards is not None:
            more = self.num_chunks * self.max_extra_forwards
            by_peak = [peak + more for peak in self.own_order.peak_in_flight]
            most = list(map(min, by_peak, most or by_peak))
        return most or None

    def allows(self, order: Schedule) -> bool:
        """Return whether no stage holds more than both limits allow."""
        most, held = self.most_in_flight, order.peak_held(self.profile.weight_shares)
        return most is None or bool(np.all(held <= np.add(most, HELD_TOLERANCE)))

    def order_limits(self) -> OrderLimits:
        """Return the extra forwards that limits allow; EnvPipeError if those refuse 1F1B itself."""
        return order_limits(self.own_order, self.most_in_flight, self.channel_capacity)

    def optimizer(self, order: Schedule, good_gap: float = GOOD_GAP) -> Optimizer:
        """Return what finds the best clocks of an order, as near to its bound as is good enough."""
        return Optimizer(order, self.profile, self.conditions, good_gap)

    def planner(self, order: Schedule) -> ObjectivePlanner:
        """Return what plans `order`, and any other of the job, within the deadline."""
        factor, own_s = self.deadline_factor, self.own_s
        if factor is None:
            factor = 1.0 if self.objective.goal == Goal.ENERGY else math.inf
        if own_s is None:
            own_s = all_maximum_s(order, self.profile, self.conditions)
        return ObjectivePlanner(self.objective, factor * own_s, self.min_dwell_s)
