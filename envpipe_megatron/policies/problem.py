"""A problem: times, conditions, limits and an objective of one iteration. A plan answers it.

`request.make_problem` turns what a user or a job asks for into one; planners, orders and the
process that plans beside training take nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.limits import NO_LIMITS, Limits, OrderLimits, order_limits
from envpipe_megatron.policies.objectives.objective import LEAST_ENERGY, Goal, Objective
from envpipe_megatron.policies.objectives.plans import ObjectivePlanner
from envpipe_megatron.policies.optimal.optimizer import all_maximum_s


class PlannerError(EnvPipeError):
    """A request whose parts contradict each other, or that names what is not known."""


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Args:
        profile: what units take, of the chunks that each stage has.
        num_microbatches: M.
        conditions: what surrounds the units; with chunks, also the groups of the framework's order.
        order: an order that is there already, or the name of one, of `schedules.SCHEDULES`.
        policy: baseline, uniform, envelope or optimal.
        reconfigure: default (none), greedy or balanced.
        extra_warmup: as `PlanRequest` takes it.
        deadline_factor: as `PlanRequest` takes it.
        own_s: the time that the deadline is a multiple of; None for that of Megatron's order at the
            highest clocks.
        min_dwell_s: the least time that each clock of a stage is kept.
        park: whether the clock may be lowered in long waits.
        runnable: whether auto has only orders that a job runs.
    """

    profile: Profile
    num_microbatches: int
    conditions: Conditions
    order: str | Schedule
    policy: str = "baseline"
    reconfigure: str = "default"
    limits: Limits = NO_LIMITS
    objective: Objective = LEAST_ENERGY
    extra_warmup: tuple[int, ...] | None = None
    deadline_factor: float | None = None
    own_s: float | None = None
    min_dwell_s: float = 0.0
    park: bool = False
    runnable: bool = False

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages, p."""
        return self.profile.num_stages

    @property
    def num_chunks(self) -> int:
        """Chunks of each stage."""
        return self.profile.sidecar.num_chunks

    @property
    def group_size(self) -> int | None:
        """Microbatches that pass a chunk before the next in the framework's order, if known."""
        return self.conditions.group_size

    @cached_property
    def own_order(self) -> Schedule:
        """Megatron's own order of the job; ScheduleError: it cannot run."""
        job = self.num_stages, self.num_microbatches, self.num_chunks
        return builders.framework_order(*job, self.group_size)

    def order_limits(self, limits: Limits | None = None) -> OrderLimits:
        """The extra forwards that limits allow; EnvPipeError if those refuse 1F1B itself."""
        given = vars(limits or self.limits)
        return order_limits(self.num_stages, self.num_microbatches, **given)

    def planner(self, order: Schedule) -> ObjectivePlanner:
        """What plans `order`, and any other of the job, within the deadline."""
        factor, own_s = self.deadline_factor, self.own_s
        if factor is None:
            factor = 1.0 if self.objective.goal == Goal.ENERGY else math.inf
        if own_s is None:
            own_s = all_maximum_s(order, self.profile, self.conditions)
        return ObjectivePlanner(self.objective, factor * own_s, self.min_dwell_s)
