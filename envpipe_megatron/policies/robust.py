"""Plans that keep their time in the mean, although the times of units vary.

Where paths of nearly the same length meet, the iteration waits for the slowest of them: the mean of
the longest is longer than the longest of the means. A plan that has stretched all units to the
deadline loses more by this than the framework's order at full clock. So clocks are raised where a
second of a unit is worth most in the mean iteration, over draws (`core.uncertainty`), for the least
energy, until the mean keeps the deadline.

This is a local search from the plan for mean times: greedy, without a bound, and of one order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.longest_path import LongestPath
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.core.uncertainty import (
    NUM_DRAWS,
    draw,
    draw_factors,
    drawn_path,
    iteration_times_s,
)
from envpipe_megatron.policies.clock_changes.parking import park
from envpipe_megatron.policies.optimal.choices import Choices, make_choices, node_keys
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.waiting import mean_waiting_power_w

#: Draws that plans are made by, and those that they are judged by.
_SEED, _JUDGE = 1, 2
_PAIRS, _FEWEST_PAIRS = 200, 32
#: Of raising clocks, each by other draws; the second or third is mostly the last.
_ROUNDS = 10
#: Units x pairs of draws at once: with ends and durations 200 MB.
_NUMBERS = 1 << 22
#: What the mean may lie above its deadline, as a fraction: draws know it no better.
_TOLERANCE = 1e-4
#: Of what is too long, the share that one step takes away before the weights are found anew.
_STEP = 0.25


def mean_cost(plan: Plan) -> Cost:
    """What the plan takes in the mean of the draws that plans are judged by."""
    drawn = draw(plan, NUM_DRAWS, _JUDGE)
    return Cost(float(drawn.time_s.mean()), float(drawn.energy_j.mean()))


def keep_mean_time(plan: Plan, factor: float) -> Plan:
    """The plan, with clocks raised until its mean time is at most a factor of the baseline's.

    LinearProgramError: they are raised as far as they can be, and it is more.
    """
    longest_s = factor * (1 + _TOLERANCE) * mean_cost(plan.baseline).iteration_time_s
    parked = plan.park_mhz is not None and bool(plan.park_mhz.any())
    power_w = mean_waiting_power_w(plan)
    choices = make_choices(plan.profile, power_w, plan.conditions.gpus_by_stage)
    kept = replace(plan, park_mhz=None)
    for part in range(_ROUNDS):
        if mean_cost(kept).iteration_time_s <= longest_s:
            if kept.cost.iteration_time_s > plan.cost.iteration_time_s:  # late clocks can do that
                kept = replace(kept, energy_lower_bound_j=None)
            return park(kept) if parked else kept
        kept = _raise_clocks(kept, factor * (1 + _TOLERANCE / 2), part, choices, power_w)
    raise LinearProgramError(
        f"No clocks of schedule '{plan.schedule.name}' keep this iteration time (s) in the mean, "
        "with times that vary as stated",
        value=longest_s,
        remedy="Allow more time.",
    )


def _raise_clocks(
    plan: Plan, factor: float, part: int, choices: Choices, power_w: FloatArray
) -> Plan:
    """The plan with clocks raised until it keeps a factor in some draws, or as far as that helps.

    A plan is a little better by the draws that it was made by, so each `part` has its own.
    """
    longest_s = factor * float(_drawn(plan.baseline, part)[2].mean())
    while True:
        factors, path, time_s = _drawn(plan, part)
        over_s = float(time_s.mean()) - longest_s
        if over_s <= 0:
            return plan
        weight = _weights(plan, factors, path, time_s)
        raised = _raised(plan, choices, power_w, weight, _STEP * over_s)
        if raised is None:
            return plan
        plan = raised


def _drawn(plan: Plan, part: int) -> tuple[FloatArray, LongestPath, FloatArray]:
    """Factors, ends and iteration times of draws, as many as memory holds."""
    pairs = max(_FEWEST_PAIRS, min(_PAIRS, _NUMBERS // plan.baseline.schedule.num_units))
    factors = draw_factors(plan, pairs, _SEED, part)
    path = drawn_path(plan, factors)
    return factors, path, iteration_times_s(plan, path)


def _weights(plan: Plan, factors: FloatArray, path: LongestPath, time_s: FloatArray) -> FloatArray:
    """[num_units] by how much the mean iteration time grows with a unit's time, s by s.

    That is how often the unit is on the critical path, each time by its factor.
    """
    schedule, width = plan.schedule, plan.schedule.units_per_stage
    cross, end_s = schedule.cross_dependency.tolist(), path.end_s
    nothing = np.zeros(time_s.size, dtype=bool)
    critical = [nothing] * schedule.num_units
    for stage, tail_s in enumerate(plan.conditions.tail_by_stage_s):
        last = (stage + 1) * width - 1
        critical[last] = end_s[last] + tail_s >= time_s
    weight = np.zeros(schedule.num_units)
    for node in reversed(path.order):
        here, before, source = critical[node], node - 1, cross[node]
        weight[node] = factors[node] @ here
        if source < 0:
            if node % width:
                critical[before] = critical[before] | here
        elif node % width == 0:
            critical[source] = critical[source] | here
        else:
            by_source = here & (end_s[source] + path.hop_s[node] > end_s[before])
            critical[source] = critical[source] | by_source
            critical[before] = critical[before] | (here & ~by_source)
    return weight / time_s.size


def _raised(
    plan: Plan, choices: Choices, power_w: FloatArray, weight: FloatArray, wanted_s: float
) -> Plan | None:
    """The plan with the next higher clock for the units that shorten the mean most for a joule.

    As many as shorten it by about `wanted_s`, and at least one; None if none can.
    """
    time_s, energy_j = (
        of_unit.ravel() for of_unit in plan.profile.lookup(plan.schedule, plan.frequency_mhz)
    )
    gpus = np.repeat(plan.conditions.gpus_by_stage, plan.schedule.units_per_stage)
    waiting_w = np.repeat(power_w, plan.schedule.units_per_stage)
    cost_j = gpus * (energy_j - waiting_w * time_s)
    frequency = plan.frequency_mhz.ravel().copy()
    faster, gain_s, more_j = frequency.copy(), np.zeros(len(weight)), np.ones(len(weight))
    keys = node_keys(plan.schedule, choices)
    for key, units in enumerate(choices.units):
        own = np.flatnonzero(keys == key)
        at = np.searchsorted(units.time_s, time_s[own] * (1 - 1e-9)) - 1
        own, at = own[at >= 0], at[at >= 0]
        faster[own] = units.frequency_mhz[at]
        gain_s[own] = weight[own] * (time_s[own] - units.time_s[at])
        more_j[own] = units.cost_j[at] - cost_j[own]
    order = np.argsort(-gain_s / np.maximum(more_j, 1e-9 * np.abs(cost_j).max()))
    useful = int(np.count_nonzero(gain_s > 0))
    if not useful:
        return None
    enough = 1 + int(np.searchsorted(np.cumsum(gain_s[order]), wanted_s))
    chosen = order[: min(enough, useful)]
    frequency[chosen] = faster[chosen]
    return replace(plan, frequency_mhz=frequency.reshape(plan.frequency_mhz.shape))
