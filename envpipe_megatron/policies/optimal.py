"""The optimal policy: the best frequencies for an order and a deadline, with a certificate.

A linear program over the hulls gives durations and a lower bound, rounding gives frequencies that
exist, and what is left between the two is printed with every plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.conditions import Conditions
from envpipe_megatron.plan import Plan, framework_schedule, max_frequencies
from envpipe_megatron.policies.certificate import energy_lower_bound_j
from envpipe_megatron.policies.choices import make_choices
from envpipe_megatron.policies.knots import choose_knots
from envpipe_megatron.policies.linear_program import DurationProgram, LinearProgramError, node_keys
from envpipe_megatron.policies.rounding import Rounding, hull_floor
from envpipe_megatron.profile import Profile
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.timeline import RELATIVE_TOLERANCE, Timeline

FloatArray = NDArray[np.float64]

#: Rounding stops to improve at this gap to the relaxed optimum.
_GOOD_GAP = 0.001
#: No frequency of a real GPU makes a unit slower than its fastest by this factor.
_NO_DEADLINE = 1e3


class Optimizer:
    """Optimal plans of one order for any number of deadlines.

    Args:
        schedule: the order of units, with backwards.
        profile: for the schedule's number of chunks.
        conditions: what surrounds the units. Clock changes are not in the linear program: they are
            the evaluator's affair.
    """

    def __init__(self, schedule: Schedule, profile: Profile, conditions: Conditions) -> None:
        self.schedule, self.profile, self.conditions = schedule, profile, conditions
        self._tail_s = conditions.tail_by_stage_s
        powers = np.array(conditions.blocking_power_w)
        self._choices = make_choices(profile, powers, conditions.gpus_by_stage)
        self._program = DurationProgram(
            schedule, self._choices, conditions.latency_s, self._tail_s, choose_knots(schedule)
        )

    @property
    def fastest_s(self) -> float:
        """Iteration time with every unit at its fastest frequency."""
        fastest_s = np.array([unit.time_s[0] for unit in self._choices.units])
        return self._iteration_time_s(fastest_s[node_keys(self.schedule)])

    def cheapest_s(self) -> float:
        """Iteration time beyond which waiting costs more than slower units save."""
        relaxed = self._program.solve(_NO_DEADLINE * self.fastest_s)
        return self._iteration_time_s(relaxed.duration_s)

    def relaxed_energy_j(self, deadline_s: float) -> float:
        """The least energy that durations between the profiled ones reach, J.

        Raises:
            LinearProgramError: no frequencies meet the deadline.
        """
        return self._program.solve(self._attainable(deadline_s)).cost_j

    def plan(self, deadline_s: float) -> Plan:
        """The cheapest plan that is found, never slower than the deadline.

        Raises:
            LinearProgramError: no frequencies meet the deadline.
        """
        schedule, choices, conditions = self.schedule, self._choices, self.conditions
        deadline_s = self._attainable(deadline_s)
        relaxed = self._program.solve(deadline_s)
        # Not always the deadline: where waiting costs more than slower units save, it is earlier.
        end_s = min(deadline_s, self._iteration_time_s(relaxed.duration_s))
        bound_j = energy_lower_bound_j(
            schedule, choices, conditions.latency_s, self._tail_s, deadline_s, relaxed
        )
        rounding = Rounding(
            schedule,
            choices,
            conditions.latency_s,
            self._tail_s,
            end_s,
            hull_floor(schedule, choices, relaxed.duration_s),
        )
        rounding.repair()
        rounding.spend_slack()
        waiting_j = choices.waiting_power_w * end_s
        rounding.move_pairs((1 + _GOOD_GAP) * relaxed.cost_j - waiting_j)
        key = node_keys(schedule)
        frequency = np.array(
            [
                choices.units[k].frequency_mhz[index]
                for k, index in zip(key, rounding.chosen, strict=True)
            ]
        ).reshape(schedule.is_backward.shape)
        return Plan(
            "optimal", schedule, frequency, self.profile, conditions, energy_lower_bound_j=bound_j
        )

    def _iteration_time_s(self, duration_s: FloatArray) -> float:
        shape = self.schedule.is_backward.shape
        timeline = Timeline(self.schedule, duration_s.reshape(shape), self.conditions.latency_s)
        return float((timeline.end_s[:, -1] + self._tail_s).max())

    def _attainable(self, deadline_s: float) -> float:
        """The deadline, or the fastest iteration where that is later by rounding alone."""
        fastest_s = self.fastest_s
        if deadline_s < fastest_s * (1 - RELATIVE_TOLERANCE):
            raise LinearProgramError(
                f"Schedule '{self.schedule.name}' takes longer than the deadline (s) at any "
                "frequencies",
                value=deadline_s,
                remedy=f"Its fastest iteration takes {fastest_s:.6g} s.",
            )
        return max(deadline_s, fastest_s)


def all_maximum_s(schedule: Schedule, profile: Profile, conditions: Conditions) -> float:
    """Iteration time of the framework's own order with every unit at the highest clock, s."""
    own = framework_schedule(schedule)
    frequency = max_frequencies(own, profile)
    return Plan("baseline", own, frequency, profile, conditions).cost.iteration_time_s
