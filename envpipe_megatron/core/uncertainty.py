"""How sure a plan's saving is, given how sure the profile's energies are.

Errors of a profile's rows are taken as independent. A row's error is that of all the units that it
prices, and what plan and baseline both take from a row cancels.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import SPLIT, Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileRow

#: Half of the 95 % interval of a normal distribution, in standard deviations.
NORMAL_95 = 1.96


def saving_uncertainty_percent(plan: Plan) -> float | None:
    """Standard uncertainty of the saving, in points, from that of the profile's energies.

    Linear: the saving changes with a row's energy by how many units the row prices, in the plan
    and in the baseline. Late clocks count as the clocks that come. None if a row that is used has
    no uncertainty.
    """
    profile, base_j = plan.profile, plan.baseline.cost.energy_j
    gpus = plan.conditions.gpus_by_stage
    own, base = _row_uses(plan), _row_uses(plan.baseline)
    net = own - plan.cost.energy_j / base_j * base
    errors_j: dict[tuple[int, Kind, int], float] = defaultdict(float)
    for at, (part, kind, row) in enumerate(_rows(profile)):
        if kind is Kind.NOTHING or not (own[at] or base[at]):
            continue
        if row.energy_uncertainty_j is None:
            return None
        # Both parts of a backward that were priced by assumption share its row's error.
        measured = Kind.BACKWARD if profile.assumed and kind in SPLIT[1:] else kind
        error_j = net[at] * gpus[part // profile.listed_chunks] * row.energy_uncertainty_j
        errors_j[part, measured, row.frequency_mhz] += error_j
    return 100 * math.hypot(*errors_j.values()) / base_j


def _rows(profile: Profile) -> list[tuple[int, Kind, ProfileRow]]:
    """All rows with their part and kind, in the order of `Profile.curves`."""
    return [
        (part, kind, row)
        for part, kinds in enumerate(profile.rows)
        for kind, rows in kinds.items()
        for row in reversed(rows)
    ]


def _row_uses(plan: Plan) -> FloatArray:
    """How many units each of `_rows` prices; between two clocks, a share of a unit each."""
    keys = plan.profile.keys(plan.schedule)
    uses = []
    for key, (clocks, *_) in enumerate(plan.profile.curves):
        used_mhz = plan.frequency_mhz[keys == key]
        uses += [np.interp(used_mhz, clocks, row).sum() for row in np.eye(len(clocks))]
    return np.array(uses)
