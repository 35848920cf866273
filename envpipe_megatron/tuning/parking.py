"""Parking online: where waits are surely long enough, and when a unit's own clock is asked for.

`policies.clock_changes.parking` has the rule that saves most at the times that are known. In a job
times scatter, and a unit must never begin at the clock of the wait before it. So its own clock is
asked for one change and a margin before it has to be, and short waits are not parked.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.clock_changes.parking import park
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
