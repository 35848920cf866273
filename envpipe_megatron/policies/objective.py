"""The objective of a plan: what is to be least, what it must not exceed, and its power."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.evaluation import waiting_energy_j
from envpipe_megatron.core.fields import AMOUNT, COUNT, ENERGY, JOULES_PER_KWH, TIME, Number, option
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.errors import EnvPipeError

_SECONDS_PER_HOUR = 3600.0
_POWER_CAP = Number(positive=True, unit="W", mistaken=(("kW", 1e3),))
_WINDOW = replace(TIME, positive=True, below=Number.below)


class Goal(StrEnum):
    """The quantity that is to be least."""

    ENERGY = "energy"
    TIME = "time"
    COST = "cost"
    #: The energy-delay product.
    EDP = "edp"


@dataclass(frozen=True)
class Objective:
    """Goal and limits of a plan of one pipeline; EnvPipeError for parts that contradict each other.

    Fields are options of `envpipe plan`. How long an iteration may take is not one of them, since
    that is relative to an order.
    """

    goal: str = option(
        "With --policy optimal: what is to be least; edp is energy x time.",
        tuple(goal.value for goal in Goal),
        Goal.ENERGY.value,
        flag="objective",
    )
    max_energy_j: float | None = option(
        "Most energy of an iteration, J.", replace(ENERGY, positive=True)
    )
    power_cap_w: float | None = option(
        "Most power of all GPUs of the pipeline, the mean over an iteration, W.", _POWER_CAP
    )
    power_window_s: float | None = option(
        "The cap is for the mean over every window of this length, s.", _WINDOW
    )
    stages_per_node: int | None = option(
        "The cap is for each node, of this many stages in a row.", COUNT
    )
    energy_price: float = option("With --objective cost: price of a kWh.", AMOUNT, 0.0)
    gpu_price: float = option("With --objective cost: price of an hour of a GPU.", AMOUNT, 0.0)

    def __post_init__(self) -> None:
        if self.goal not in set(Goal):
            known = ", ".join(Goal)
            raise EnvPipeError("Unknown objective", value=self.goal, remedy=f"Known: {known}.")
        for name in ("max_energy_j", "power_cap_w", "power_window_s", "stages_per_node"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise EnvPipeError(f"'{name}' must be above 0", value=value)
        if self.power_cap_w is None and (self.power_window_s or self.stages_per_node):
            raise EnvPipeError(
                "A window of power and stages of a node go with a power cap",
                value=self.power_window_s or self.stages_per_node,
                remedy="Give --power-cap, or leave them out.",
            )
        prices = self.energy_price, self.gpu_price
        if not all(0 <= price < math.inf for price in prices):
            raise EnvPipeError("Prices must be zero or more", value=prices)
        if (self.goal == Goal.COST) != any(prices):
            raise EnvPipeError(
                "The objective cost, and no other, needs a price above 0",
                value=self.goal,
                remedy="Use --objective cost with --energy-price, --gpu-price or both.",
            )

    def score(self, cost: Cost, num_gpus: int) -> float:
        """Return the quantity that is to be least."""
        return float(self.scores(cost.iteration_time_s, np.array(cost.energy_j), num_gpus))

    def scores(
        self, iteration_time_s: float | FloatArray, energy_j: FloatArray, num_gpus: int
    ) -> FloatArray:
        """Return [n] scores of n iteration times and energies."""
        if self.goal == Goal.ENERGY:
            return energy_j
        if self.goal == Goal.TIME:
            return np.asarray(iteration_time_s)
        if self.goal == Goal.EDP:
            return energy_j * iteration_time_s
        of_gpus = self.gpu_price / _SECONDS_PER_HOUR * num_gpus * iteration_time_s
        return self.energy_price / JOULES_PER_KWH * energy_j + of_gpus

    def judged(self, cost: Cost) -> float:
        """Return the figure to judge orders by: energy (J), or time (s) where only that counts."""
        return cost.iteration_time_s if self == SHORTEST else cost.energy_j

    def limits(self, num_stages: int) -> list[tuple[float, float, float]]:
        """Return (a, b, c): plans within the limits keep a T + b E <= c (s, J).

        Windows and single nodes are left out: a plan that keeps their cap keeps it in the mean over
        the iteration and the nodes too.
        """
        kept = []
        if self.max_energy_j is not None:
            kept.append((0.0, 1.0, self.max_energy_j))
        if self.power_cap_w is not None:
            all_w = self.power_cap_w * len(self._nodes(num_stages))
            kept.append((-all_w, 1.0, 0.0))
        return kept

    def gpus_below_cap(self, conditions: Conditions) -> int:
        """Return how many GPUs share the power cap, of the node with the most."""
        return max(
            int(conditions.gpus_by_stage[node].sum()) for node in self._nodes(conditions.num_stages)
        )

    def _nodes(self, num_stages: int) -> list[slice]:
        step = self.stages_per_node or num_stages
        return [slice(first, first + step) for first in range(0, num_stages, step)]

    def power_w(self, plan: Plan) -> float:
        """Return the power of a plan that is held against the cap, W."""
        nodes = self._nodes(plan.schedule.num_stages)
        if self.power_window_s is not None:
            return max(peak_power_w(plan, self.power_window_s, node) for node in nodes)
        by_stage_w = plan.energy_by_stage_j / plan.cost.iteration_time_s
        return max(float(by_stage_w[node].sum()) for node in nodes)

    def excess(self, plan: Plan) -> float:
        """Return how much of its tightest limit a plan takes: more than 1 breaks it."""
        shares = [0.0]
        if self.max_energy_j is not None:
            shares.append(plan.cost.energy_j / self.max_energy_j)
        if self.power_cap_w is not None:
            shares.append(self.power_w(plan) / self.power_cap_w)
        return max(shares)

    def to_json(self) -> dict[str, Any]:
        """Return the request, for a plan's file: all that is not the default, and the goal."""
        asked = asdict(self)
        return {
            field.name: asked[field.name]
            for field in fields(self)
            if field.name == "goal" or asked[field.name] != field.default
        }


LEAST_ENERGY = Objective()
#: The least time, at any energy and power.
SHORTEST = Objective(Goal.TIME)


def peak_power_w(plan: Plan, window_s: float, stages: slice = slice(None)) -> float:
    """Return the largest mean power, W, of all GPUs of some stages in any window of a length, s.

    A unit takes its mean power from start to end, and so does a wait, parked or not; what changes
    of clock take is spread over the iteration. Over a whole iteration that adds up to the plan's
    energy.
    """
    at_s, used_j = _energy_over_time(plan, stages)
    iteration_s, iteration_j = float(at_s[-1]), float(used_j[-1])
    whole, rest_s = divmod(window_s, iteration_s)
    # What a window holds is linear in its begin, but where its begin or its end meets a corner.
    begin_s = np.concatenate([at_s, (at_s - rest_s) % iteration_s])
    end_s = begin_s + rest_s
    over = end_s > iteration_s
    until_j = np.interp(end_s - over * iteration_s, at_s, used_j) + over * iteration_j
    most_j = float((until_j - np.interp(begin_s, at_s, used_j)).max())
    return (whole * iteration_j + most_j) / window_s


def _energy_over_time(plan: Plan, stages: slice) -> tuple[FloatArray, FloatArray]:
    """Return [n] times from 0 to the iteration's end, and the energy used until then, J."""
    timeline, conditions = plan.timeline, plan.conditions
    iteration_s = timeline.iteration_time_s
    start_s, end_s = timeline.start_s, timeline.end_s
    unit_j = plan.evaluation.unit_energy_j
    waiting_j = waiting_energy_j(timeline, plan.frequency_mhz, conditions, plan.park_mhz)
    changes_w = conditions.change_energy_j * plan.evaluation.clock_changes / iteration_s
    curves = []
    for stage in range(plan.schedule.num_stages)[stages]:
        # Start and end of each unit; the first wait lies at both ends of the iteration.
        corner_s = np.column_stack([start_s[stage], end_s[stage]]).ravel()
        step_j = np.column_stack([waiting_j[stage], unit_j[stage]]).ravel()
        wait_s = float(timeline.wait_s[stage, 0])
        share = corner_s[0] / wait_s if wait_s > 0 else 0.0
        after_j = (1 - share) * step_j[0]
        step_j[0] *= share
        corner_s = np.concatenate([[0.0], corner_s, [iteration_s]])
        used_j = np.concatenate([[0.0], np.cumsum(step_j), [step_j.sum() + after_j]])
        used_j += changes_w[stage] * corner_s
        curves.append((corner_s, conditions.gpus_by_stage[stage] * used_j))
    at_s = np.unique(np.concatenate([corner_s for corner_s, _ in curves]))
    return at_s, sum(np.interp(at_s, corner_s, used_j) for corner_s, used_j in curves)
