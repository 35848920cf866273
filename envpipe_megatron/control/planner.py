"""Plans of a job, made beside training from what is known of its units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from envpipe_megatron.control.background import Background
from envpipe_megatron.control.known.knowledge import Knowledge
from envpipe_megatron.control.parking import comes_late, parked, still_parked
from envpipe_megatron.control.replicas import level_factor
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError

#: A new plan must save this share more of the energy than the one that runs.
_WORTH = 5e-4

#: Makes a plan from a profile, for an order or the best there is, to take so many times as long as
#: the framework's own order; LinearProgramError if there is none.
MakePlan: TypeAlias = Callable[[Profile, Schedule | None, float], Plan]
#: Plans by level of the frontier.
Plans: TypeAlias = dict[int, Plan]


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Args:
        max_slowdown: share by which steps may last longer than the framework's own at full clock.
        deadline_factor: what plans may take, as a multiple of that.
        min_dwell_s: least time between two changes of a GPU's clock.
    """

    max_slowdown: float
    deadline_factor: float
    min_dwell_s: float

    @property
    def allowed(self) -> float:
        """How many times as long as the framework's own order steps may last."""
        return self.deadline_factor * (1 + self.max_slowdown)


class Planner:
    """Makes plans for one job, and says what they take by what is known now.

    Args:
        knowledge: what is known of its units.
        make_plan: called where the background runs it.
        limits: of the job.
        background: runs one piece of planning at a time.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        make_plan: MakePlan,
        limits: Limits,
        background: Background[Plans],
    ) -> None:
        self._knowledge, self._make_plan = knowledge, make_plan
        self.limits, self._background = limits, background

    @property
    def busy(self) -> bool:
        """Whether plans are being made, or were made and not taken."""
        return self._background.busy

    def take(self) -> Plans | None:
        """What was made, once; None as long as there is none. Raises what planning raised."""
        return self._background.take()

    def begin(self, order: Schedule | None, faster: float) -> None:
        """Make a plan for an order, or the best there is, if possible faster by a share."""
        profile, factor = self._knowledge.profile(careful=True), self.limits.deadline_factor

        def made() -> Plans:
            for within in (factor - faster, factor):
                with suppress(LinearProgramError):
                    return {0: self._make_plan(profile, order, within)}
            return {0: self._make_plan(profile, None, factor)}

        self._background.start(made)

    def begin_levels(self, order: Schedule, levels: Sequence[int]) -> None:
        """Make plans of an order for levels of the frontier."""
        profile, factor = self._knowledge.profile(careful=True), self.limits.deadline_factor
        self._background.start(
            lambda: {
                level: self._make_plan(profile, order, factor * level_factor(level))
                for level in levels
            }
        )

    def repriced(self, plan: Plan) -> Plan:
        """The same orders and clocks, at what they take by now."""
        profile = self._knowledge.profile(careful=False)
        plain = replace(
            plan,
            profile=profile,
            conditions=known_conditions(profile),
            park_mhz=None,
            energy_lower_bound_j=None,
        )
        return still_parked(plain, plan.park_mhz)

    def ready(self, plan: Plan, *, parks: bool) -> Plan:
        """A plan as it would run: repriced, and parked if it may be and that pays."""
        plan = self.repriced(plan)
        if not parks:
            return replace(plan, park_mhz=None)
        return parked(plan, self._knowledge, self.limits.min_dwell_s, _WORTH)

    def better(self, new: Plan, running: Plan, own_s: float) -> bool:
        """Whether a ready plan saves more than one that runs, or that one is too slow or late.

        The framework's own order takes `own_s` by what is known.
        """
        today = self.repriced(running)
        if comes_late(running, today):
            return True
        if today.cost.iteration_time_s > own_s * self.limits.allowed:
            return new.cost.iteration_time_s < today.cost.iteration_time_s
        return new.cost.energy_j < today.cost.energy_j * (1 - _WORTH)
