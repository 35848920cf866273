"""Parking: a lower clock inside a long wait than any unit asks for.

A wait runs at the clock of the unit that follows. Where waiting takes less power at another clock,
that one is set for as long as two changes of clock leave of the wait (`evaluation.evaluate`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s


def park(
    plan: Plan,
    min_dwell_s: float,
    clock_mhz: IntArray,
    least_wait_s: FloatArray | float,
) -> Plan:
    """Park in every wait in which that saves energy; the plan itself if none does.

    The clock to park at is one of the stage's own, or the clock of the unit before, kept until the
    unit that follows needs its own. Parking keeps the dwell time (see
    `clock_runs.shortest_dwell_s`) if the plan itself does. It may take less than the plan's lower
    bound, which is left out.

    Args:
        plan: what it parks already is forgotten.
        min_dwell_s: least time between two changes.
        clock_mhz: [num_stages] clocks to park at.
        least_wait_s: [num_stages, units_per_stage], or one: how long waits must be.
    """
    plain = replace(plan, park_mhz=None)
    if plan.conditions.wait_power_w is None:
        return plain
    park_mhz, saved_j = _best_clocks(plain, clock_mhz, least_wait_s)
    if min_dwell_s:
        park_mhz = _keep_dwell(plain, park_mhz, saved_j, min_dwell_s)
    parked = replace(plain, park_mhz=park_mhz, energy_lower_bound_j=None)
    return parked if parked.cost.energy_j < plain.cost.energy_j else plain


def _best_clocks(
    plan: Plan, clock_mhz: IntArray, least_wait_s: FloatArray | float
) -> tuple[IntArray, FloatArray]:
    """Return [num_stages, units_per_stage] the clock to park at or 0, and what that saves."""
    conditions, frequency = plan.conditions, plan.frequency_mhz
    before = np.roll(frequency, 1, axis=1)
    wait_s = plan.timeline.wait_s
    parked_s = wait_s - 2 * conditions.change_time_s
    long = (parked_s > 0) & (wait_s >= least_wait_s)
    power_w = conditions.waiting_power_w(frequency)
    best_mhz, best_j = np.zeros_like(frequency), np.zeros(frequency.shape)
    for clock in (np.broadcast_to(clock_mhz[:, None], frequency.shape), before):
        more_changes = (clock != before).astype(int) + (clock != frequency)
        more_changes -= before != frequency
        saved_j = (power_w - conditions.waiting_power_w(clock)) * parked_s
        saved_j -= conditions.change_energy_j * more_changes
        better = long & (saved_j > best_j)
        best_mhz, best_j = np.where(better, clock, best_mhz), np.where(better, saved_j, best_j)
    return best_mhz, best_j * conditions.gpus_by_stage[:, None]


def _keep_dwell(
    plan: Plan, park_mhz: IntArray, saved_j: FloatArray, min_dwell_s: float
) -> IntArray:
    """Return the waits to park in that keep a dwell time, chosen by savings, largest first."""
    kept = np.zeros_like(park_mhz)
    for node in np.argsort(-saved_j, axis=None)[: np.count_nonzero(park_mhz)]:
        tried = kept.copy()
        tried.flat[node] = park_mhz.flat[node]
        dwell_s = shortest_dwell_s(replace(plan, park_mhz=tried))
        if dwell_s >= min_dwell_s * (1 - RELATIVE_TOLERANCE):
            kept = tried
    return kept
