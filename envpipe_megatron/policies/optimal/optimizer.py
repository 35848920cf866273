"""The optimal policy: the best frequencies of an order within a deadline, with a certificate.

A linear program over the hulls gives durations and a lower bound, rounding gives frequencies that
exist, and what is left between the two is printed with every plan.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders.builders import framework_schedule
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileError
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.run_search import RunSearch
from envpipe_megatron.policies.frequencies import uniform
from envpipe_megatron.policies.optimal.linear_program import (
    DurationProgram,
    LinearProgramError,
    Relaxed,
    make_choices,
)
from envpipe_megatron.policies.optimal.rounding import hull_floor, round_durations

#: The gap that is good enough for a single plan.
GOOD_GAP = 0.002
#: No frequency of a real GPU makes a unit slower than its fastest by this factor.
_SLOWEST = 1e3
#: Waiting powers that differ by less are not worth another linear program.
_SAME_POWER = 0.02


class Optimizer:
    """Optimal plans of one order, with backwards, for any number of deadlines.

    The linear program leaves out some costs, which are planned around it:

    - Waiting power depends on the clock: the bound prices waiting at a stage's least power. Plans
      are made at the mean power at which a first plan waits, its clocks rounded up.
    - `run_search` plans changes of clock that cost energy or come late, and clocks to be kept long.

    Rounding stops improving a plan within `good_gap` of the relaxed optimum.
    """

    def __init__(
        self,
        schedule: Schedule,
        profile: Profile,
        conditions: Conditions,
        good_gap: float = GOOD_GAP,
    ) -> None:
        self.schedule, self.profile, self.conditions = schedule, profile, conditions
        self._good_gap = good_gap
        self._floor = self._priced(waiting_floor_w(profile, conditions))
        self._at_mean: DurationProgram | None = None
        self._at_worth: dict[float, DurationProgram] = {}

    @property
    def fastest_s(self) -> float:
        """Iteration time with every unit at its fastest frequency, none of them late."""
        return self._floor.fastest_iteration_s

    @property
    def no_deadline_s(self) -> float:
        """Return an iteration time that no plan exceeds, s."""
        return _SLOWEST * self.fastest_s

    def cheapest_s(self, waiting_worth_w: float | None = None) -> float:
        """Return the iteration time beyond which waiting costs more than slower units save.

        Where waiting is worth more, as `plan` takes it, the time beyond which no unit is slower.
        """
        priced = self._priced_at(waiting_worth_w)
        return priced.solve(self.no_deadline_s).end_s

    def relaxed(self, deadline_s: float) -> Relaxed:
        """Return the durations between the profiled ones that take the least energy.

        Changes of clock are free in it, and waiting takes the least power that it can.
        """
        return self._floor.solve(deadline_s)

    def plan(
        self, deadline_s: float, min_dwell_s: float = 0.0, waiting_worth_w: float | None = None
    ) -> Plan:
        """Return the cheapest plan found, never slower than the deadline, late clocks included.

        Each clock of a stage is kept for `min_dwell_s` (see `clock_runs.shortest_dwell_s`). With
        `waiting_worth_w` units are slowed down, time allowing, as long as they take less than this
        power for each second that it takes longer: power falls further than energy does.
        LinearProgramError: no frequencies meet the deadline, or none that were found do with late
        clocks and the dwell time.
        """
        if not min_dwell_s >= 0:
            raise LinearProgramError("The dwell time (s) must be zero or more", value=min_dwell_s)
        schedule, conditions = self.schedule, self.conditions
        deadline_s = self._floor.attainable(deadline_s)
        at_floor = self._floor.solve(deadline_s)
        by_energy = waiting_worth_w is None
        priced = self._priced_at(waiting_worth_w)
        if by_energy and conditions.wait_power_w is not None:
            chosen = hull_floor(priced, at_floor.duration_s)
            priced = self._at_mean_power_of(self._plan(priced, chosen))
        rounded, relaxed = self._round(priced, deadline_s)
        plan: Plan | None = rounded
        if conditions.change_time_s or conditions.change_energy_j or min_dwell_s:
            plan = RunSearch(
                rounded,
                relaxed,
                priced.choices.by_stage_w,
                deadline_s,
                min_dwell_s,
                plan_for=lambda earlier_s: self._round(priced, earlier_s)[0],
                by_energy=by_energy,
            ).search()
        if plan is None:
            raise LinearProgramError(
                f"No plan of schedule '{schedule.name}' was found that meets the deadline (s) "
                f"with changes of clock of {conditions.change_time_s:g} s and clocks that are "
                f"kept for {min_dwell_s:g} s",
                value=deadline_s,
                remedy="Allow more time, or a shorter dwell time.",
            )
        if by_energy and not min_dwell_s:
            plan = self._or_by_rule(plan, deadline_s)
        bound_j = at_floor.lower_bound_j  # of energies of nothing, 0 or below by rounding
        return replace(plan, energy_lower_bound_j=bound_j if bound_j > 0 else None)

    def _or_by_rule(self, plan: Plan, deadline_s: float) -> Plan:
        """Return the plan, or a simple rule's if it is cheaper.

        On profiles of a few odd clocks rounding can lose more than it gains on a rule.
        """
        for rule in (max_frequencies, uniform):
            with contextlib.suppress(ProfileError):  # no clock that a stage's units share
                frequency = rule(self.schedule, self.profile)
                ruled = replace(plan, frequency_mhz=frequency)
                in_time = ruled.cost.iteration_time_s <= deadline_s * (1 + RELATIVE_TOLERANCE)
                if in_time and ruled.cost.energy_j < plan.cost.energy_j:
                    plan = ruled
        return plan

    def _priced(self, waiting_power_w: FloatArray, *, time_costs: bool = True) -> DurationProgram:
        """Return the linear program for a waiting power of one GPU of each stage."""
        conditions = self.conditions
        choices = make_choices(self.profile, waiting_power_w, conditions.gpus_by_stage)
        if not time_costs:
            choices = replace(choices, waiting_power_w=0.0)
        return DurationProgram(self.schedule, choices, conditions)

    def _priced_at(self, waiting_worth_w: float | None) -> DurationProgram:
        """Return the program for a worth of waiting, where the iteration's time costs nothing.

        None: for the least power of waiting, and the iteration's time costs that.
        """
        if waiting_worth_w is None:
            return self._floor
        if waiting_worth_w not in self._at_worth:
            worth_w = np.full(self.schedule.num_stages, waiting_worth_w)
            self._at_worth[waiting_worth_w] = self._priced(worth_w, time_costs=False)
        return self._at_worth[waiting_worth_w]

    def _at_mean_power_of(self, plan: Plan) -> DurationProgram:
        """Return the program for the power that a plan waits at, or one at hand for nearly that."""
        mean_w = mean_waiting_power_w(plan)
        if self._at_mean is None or not np.allclose(
            mean_w, self._at_mean.choices.by_stage_w, rtol=_SAME_POWER, atol=0.0
        ):
            self._at_mean = self._priced(mean_w)
        return self._at_mean

    def _round(self, priced: DurationProgram, deadline_s: float) -> tuple[Plan, Relaxed]:
        """Round a linear program's solution to a plan, for which clocks are never late."""
        relaxed = priced.solve(deadline_s)
        return self._plan(priced, round_durations(priced, relaxed, self._good_gap)), relaxed

    def _plan(self, priced: DurationProgram, chosen: list[int]) -> Plan:
        clocks = [unit.frequency_mhz for unit in priced.choices.units]
        frequency = [clocks[key][index] for key, index in zip(priced.key, chosen, strict=True)]
        by_stage = np.array(frequency).reshape(self.schedule.is_backward.shape)
        return Plan("optimal", self.schedule, by_stage, self.profile, self.conditions)


def all_maximum_s(schedule: Schedule, profile: Profile, conditions: Conditions) -> float:
    """Return the iteration time of the framework's own order at the highest clocks, s."""
    own = framework_schedule(schedule, conditions.group_size)
    return order_at_maximum_s(own, profile, conditions)


def order_at_maximum_s(schedule: Schedule, profile: Profile, conditions: Conditions) -> float:
    """Return the iteration time of an order with every unit at the highest clock, s."""
    frequency = max_frequencies(schedule, profile)
    return Plan("baseline", schedule, frequency, profile, conditions).cost.iteration_time_s


def mean_waiting_power_w(plan: Plan) -> FloatArray:
    """Return [num_stages] the mean power of a waiting GPU; without a wait, the blocking power."""
    conditions, result = plan.conditions, plan.evaluation
    by_gpu_j = result.energy_by_stage_j / conditions.gpus_by_stage
    changes_j = conditions.change_energy_j * result.clock_changes
    waiting_j = by_gpu_j - result.unit_energy_j.sum(axis=1) - changes_j
    waiting_s = plan.cost.iteration_time_s - result.timeline.duration_s.sum(axis=1)
    long = waiting_s > RELATIVE_TOLERANCE * plan.cost.iteration_time_s
    return np.where(long, waiting_j / np.where(long, waiting_s, 1.0), conditions.blocking_power_w)


def waiting_floor_w(profile: Profile, conditions: Conditions) -> FloatArray:
    """Return [num_stages] the least power of a waiting GPU at the clocks that its stage has."""
    if conditions.wait_power_w is None:
        return np.array(conditions.blocking_power_w)
    least_w = []
    for stage in range(profile.num_stages):
        clocks = sorted(profile.clocks_mhz(stage))
        power_w = conditions.waiting_power_w(np.tile(clocks, (profile.num_stages, 1)))
        least_w.append(float(power_w[stage].min()))
    return np.array(least_w)
