"""Parking: a lower clock inside a long wait than any unit asks for.

A wait runs at the clock of the unit that follows. Where waiting takes less power at another clock,
that one is set for as long as two changes of clock leave of the wait (`evaluation.evaluate`). In a
job times scatter, and a unit must never begin at the clock of the wait before it. So its own clock
is asked for one change and a margin before it has to be, and short waits are not parked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.clock_changes.clock_runs import shortest_dwell_s
from envpipe_megatron.tuning.commands import Parking
from envpipe_megatron.tuning.measured.store import Store

#: Standard deviation of the time of a unit, as on real GPUs, and how many of them surely suffice.
_SCATTER, _SURELY = 0.02, 4.0


def _margin_s(plan: Plan) -> float:
    """Return by how much a wait may turn out shorter than planned.

    A unit's input and the unit before it both follow from some unit a pipeline's length back or
    less, and what lies between scatters.
    """
    order = plan.schedule
    units = 2 * order.num_stages * order.num_chunks
    longest_s = float(plan.timeline.duration_s.max())
    return _SURELY * _SCATTER * longest_s * float(np.sqrt(units))


def parked(plan: Plan, store: Store, min_dwell_s: float, worth: float) -> Plan:
    """Return the plan, parked in its long waits; itself if that is not known to be worth it.

    It parks at the lowest clock whose power is known. Where waits were metered at one clock only,
    they are taken to draw as much at others, so that it pays nowhere. The wait before the first
    unit is left as it is: the optimizer is in it.

    Args:
        plan: has the conditions that `store` gives, and does not park.
        store: what is known of the job's units.
        min_dwell_s: least time between two changes of a clock.
        worth: share of the energy that parking must save.
    """
    change_s = store.lateness.change_s
    if not change_s:
        return plan
    least_s = np.full(plan.frequency_mhz.shape, _margin_s(plan) + 2 * change_s + min_dwell_s)
    least_s[:, 0] = np.inf
    clocks_mhz, nodes_mhz = store.clocks_mhz, store.powers.nodes_mhz
    lowest_mhz = np.full(len(least_s), int(clocks_mhz[clocks_mhz >= nodes_mhz[0]][0]))
    found = park(plan, min_dwell_s, clock_mhz=lowest_mhz, least_wait_s=least_s)
    return found if found.cost.energy_j < plan.cost.energy_j * (1 - worth) else plan


def timed(plan: Plan) -> Parking | None:
    """Return what ranks need to park as a plan does; None if it does not."""
    if plan.park_mhz is None:
        return None
    early_s = 2 * plan.conditions.change_time_s + _margin_s(plan)
    return Parking(plan.park_mhz, plan.timeline.wait_s - early_s)


def still_parked(plan: Plan, park_mhz: IntArray | None) -> Plan:
    """Return the plan with parking that was planned for other times, where it still fits."""
    if park_mhz is None:
        return plan
    fits = plan.timeline.wait_s > 2 * plan.conditions.change_time_s
    return replace(plan, park_mhz=np.where(fits, park_mhz, 0))


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
