"""Replicas follow the slowest of them: with data parallelism, being faster only means waiting.

A replica that could be faster runs a plan further along the frontier of time and energy, up to the
time of the slowest and not beyond it (Chung et al., SOSP'24, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.parking import timed

#: Replicas differ if the slowest takes this share longer than another, and this many standard
#: errors of what each takes: noise sets the slowest of 64 apart from the fastest by five, and
#: four iterations make errors seem a quarter smaller than they are. Without the first 16 replicas
#: with hiccups save 1.1 points less, without the second four of them take up to 0.4 % longer.
_DIFFER, _SURELY = 0.01, 7.0
#: From one level of the frontier to the next, plans take this share longer.
_LEVEL = 0.005
#: A level is run that is higher by this share of one: else noise has a replica leave its level.
_NEARLY = 0.1


def gpu_power_w(plan: Plan) -> float:
    """Return the mean power of a GPU in a plan."""
    return plan.cost.mean_power_w / float(plan.conditions.gpus_by_stage.sum())


def level_factor(level: int) -> float:
    """Return how many times as long as the first a plan of a level may take."""
    return float((1 + _LEVEL) ** level)


class ReplicaLevels:
    """Which level of the frontier each replica runs; level 0 is the plan itself."""

    def __init__(self) -> None:
        #: [replicas] the level that each runs; none before the first plan.
        self.levels = list[int]()
        #: Levels that replicas would run if they were planned, and those that were asked for.
        self.missing: list[int] = []
        self._asked: set[int] = set()
        #: How many times as long as a usual replica the slowest takes by the same plan.
        self.slowest = 1.0
        #: A replica that is as fast as the median, or the next faster one.
        self.usual = 0
        self._factor: FloatArray = np.ones(1)
        self._differ = _DIFFER
        #: By level, what was planned, and how ranks run it.
        self._plans: dict[int, Plan] = {}
        self._orders: dict[int, Clocked] = {}

    @property
    def running(self) -> tuple[tuple[Clocked, ...], tuple[int, ...]]:
        """Return the orders that run, and for each replica its place among them."""
        levels = sorted(set(self.levels))
        which = tuple(levels.index(level) for level in self.levels)
        return tuple(self._orders[level] for level in levels), which

    def lead(self, plan: Plan) -> None:
        """Have all replicas that were compared run this plan; the frontier before is forgotten."""
        self._plans, self._orders = {}, {}
        self.levels, self.missing = [0] * len(self._factor), []
        self._asked = set()
        self.extend({0: plan})

    def extend(self, plans: Mapping[int, Plan]) -> None:
        """Add plans of levels."""
        for level, plan in plans.items():
            self._plans[level] = plan
            self._orders[level] = Clocked(plan.schedule, plan.frequency_mhz, timed(plan))

    @property
    def power_w(self) -> float:
        """Return the mean power of a GPU that is predicted, of all replicas at their levels."""
        return float(np.mean([gpu_power_w(self._plans[level]) for level in self.levels]))

    def asked(self) -> list[int]:
        """Return the missing levels, once: what could not be planned is not asked for again."""
        asked, self.missing = self.missing, []
        self._asked |= set(asked)
        return asked

    def compare(self, own_s: FloatArray, error: float, *, alike: bool = False) -> None:
        """Take in how long each pipeline took by itself, at its level or all `alike`.

        The error is the standard error of these times, as a share.
        """
        plans = [] if alike else [self._plans[level] for level in self.levels]
        times_s = [plan.cost.iteration_time_s for plan in plans] or 1.0
        factor = self._factor = own_s / times_s
        self._differ = max(_DIFFER, _SURELY * error)
        self.usual = int(factor.argsort()[(len(factor) - 1) // 2])
        self.slowest = float(factor.max() / factor[self.usual])

    def follow(self) -> str:
        """Choose levels by what was compared last; what changed, in words."""
        factor = self._factor
        room = factor.max() / factor
        wanted = np.where(room < 1 + self._differ, 0, np.log(room) / np.log(1 + _LEVEL) + _NEARLY)
        # The highest level that is planned and no higher.
        levels = [max(known for known in self._orders if known <= level) for level in wanted]
        known = set(self._orders) | self._asked
        self.missing = sorted(set(wanted.astype(int).tolist()) - known)
        if levels == self.levels:
            return ""
        self.levels = levels
        following = sum(level > 0 for level in levels)
        if not following:
            return "replicas are alike again: all run the same plan"
        return (
            f"replica {int(factor.argmax())} takes {100 * (self.slowest - 1):.1f} % longer than "
            f"others: {following} follow it along the frontier"
        )
