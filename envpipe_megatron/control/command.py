"""What the planning rank tells all ranks to run next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase


@dataclass(frozen=True, eq=False)
class Parking:
    """Clocks that waits are spent at; both arrays are [num_stages, units_per_stage].

    Attributes:
        park_mhz: in the wait before a unit, asked for when the unit before has ended; 0 for none.
        own_after_s: so long after that the unit's own clock is asked for, or when the unit begins.
    """

    park_mhz: IntArray
    own_after_s: FloatArray

    def of_stage(self, stage: int) -> dict[int, tuple[int, float]]:
        """Both, by position, of the units of a stage whose wait is parked in."""
        park_mhz = self.park_mhz[stage]
        return {
            int(position): (int(park_mhz[position]), float(self.own_after_s[stage, position]))
            for position in np.flatnonzero(park_mhz)
        }


@dataclass(frozen=True, eq=False)
class Clocked:
    """An order of units and their clocks, [num_stages, units_per_stage] MHz."""

    schedule: Schedule
    frequency_mhz: IntArray
    parking: Parking | None = None


@dataclass(frozen=True)
class Command:
    """A few iterations, after which every rank reports.

    Attributes:
        phase: what they are for.
        iterations: how many are measured.
        settle: how many run before them, and are not.
        late_s: by how much a change of the clock comes late, as far as it is known.
        tail_s: for each stage, what it does after its last unit.
        orders: what replicas run; empty if it is what they ran last.
        which: for each replica, its place among the orders.
        plan: what level 0 of the frontier is from now on, if that is new.
        note: what was seen and done; empty if there is nothing to say.
        billed: what the bill says of these steps from now on, in place of what it said; empty if
            nothing changes.
    """

    phase: Phase
    iterations: int
    settle: int
    late_s: float
    tail_s: tuple[float, ...]
    orders: tuple[Clocked, ...] = ()
    which: tuple[int, ...] = ()
    plan: Plan | None = None
    note: str = ""
    billed: str = ""
