"""The best durations of a schedule's units for a deadline, as a linear program.

With the convex hull of cost over time of each unit, the cheapest iteration that meets a deadline is
a linear program: one end time a unit, one bounded variable a hull segment, one row a dependency
(the project's facts on planning; the continuous relaxation of Perseus' problem, Chung et al.,
SOSP'24, section 4). It is solved exactly at every size: by HiGHS' simplex, which solves again for
another deadline from where it stood, and by an interior-point method of our own where the simplex
would take minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.longest_path import LongestPath
from envpipe_megatron.policies.choices import Choices
from envpipe_megatron.policies.duration_problem import DurationProblem, Solution, SolverError
from envpipe_megatron.policies.interior_point import InteriorPoint
from envpipe_megatron.policies.simplex import Simplex
from envpipe_megatron.schedule import Schedule

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Up to this many units the simplex solves within about a second.
_MAX_SIMPLEX_UNITS = 2_000


class LinearProgramError(EnvPipeError):
    """A deadline that no frequencies meet, or a solver that gave up."""


@dataclass(frozen=True)
class Relaxed:
    """The solution of the linear program.

    Args:
        duration_s: [num_units] duration of each node; between profiled times.
        cost_j: planning cost plus waiting power x iteration time: the least energy that any
            durations on the hulls can have.
        same_stage_dual: [num_units] what a second later end of the unit before on the same stage
            costs through this unit, J/s.
        cross_dual: [num_units] the same for the unit on the neighbour stage that feeds it.
        deadline_dual: [num_stages] the same for each stage's last unit and the deadline.
    """

    duration_s: FloatArray
    cost_j: float
    same_stage_dual: FloatArray
    cross_dual: FloatArray
    deadline_dual: FloatArray


class DurationProgram:
    """The linear program of one schedule, ready to be solved for any number of deadlines.

    Args:
        schedule: the order of units.
        choices: what each unit can run at.
        latency_s: p2p latency, as `Timeline` takes it.
        tail_s: [num_stages] the time after each stage's last unit.
        max_simplex_units: above this many units the interior-point method solves.
    """

    def __init__(
        self,
        schedule: Schedule,
        choices: Choices,
        latency_s: float | tuple[float, ...],
        tail_s: FloatArray,
        max_simplex_units: int = _MAX_SIMPLEX_UNITS,
    ) -> None:
        self._schedule = schedule
        key = node_keys(schedule)
        fastest_s = np.array([unit.time_s[0] for unit in choices.units])
        # Seconds and joules of any size become numbers around 1, for which tolerances are made.
        self._time_unit_s = float(fastest_s.mean())
        self._cost_unit_j = max(float(u.cost_j[0] - u.cost_j[-1]) for u in choices.units) or 1.0
        self._fastest_s = fastest_s[key]
        self._nodes, self._cross_nodes, problem = self._problem(choices, key, latency_s, tail_s)
        if schedule.num_units <= max_simplex_units:
            self._solver: Simplex | InteriorPoint = Simplex(problem)
        else:
            # Like places of the stages depend on each other.
            position = np.arange(schedule.num_units) % schedule.units_per_stage
            self._solver = InteriorPoint(problem, position)
        self._stated = problem

    def solve(self, deadline_s: float) -> Relaxed:
        """Minimise for a deadline.

        Raises:
            LinearProgramError: no durations meet the deadline, or the solver gave up.
        """
        solution = self._solve(deadline_s)
        per_second = self._cost_unit_j / self._time_unit_s
        same_stage_dual = np.zeros(self._schedule.num_units)
        cross_dual = np.zeros(self._schedule.num_units)
        price = solution.edge_price * per_second
        same_stage_dual[self._nodes] = price[: len(self._nodes)]
        cross_dual[self._cross_nodes] = price[len(self._nodes) :][: len(self._cross_nodes)]
        return Relaxed(
            self._fastest_s + self._stated.by_node(solution.segment) * self._time_unit_s,
            solution.cost * self._cost_unit_j,
            same_stage_dual,
            cross_dual,
            solution.deadline_price * per_second,
        )

    def _solve(self, deadline_s: float) -> Solution:
        deadline = deadline_s / self._time_unit_s
        if isinstance(self._solver, InteriorPoint):
            try:
                return self._solver.solve(deadline)
            except SolverError:  # badly conditioned: the simplex takes longer and is exact
                self._solver = Simplex(self._stated)
        try:
            return self._solver.solve(deadline)
        except SolverError as error:
            raise LinearProgramError(
                f"The linear program of schedule '{self._schedule.name}' has no solution for this "
                f"deadline (s): {error}",
                value=deadline_s,
                remedy="Allow more time.",
            ) from error

    def _problem(
        self,
        choices: Choices,
        key: IntArray,
        latency_s: float | tuple[float, ...],
        tail_s: FloatArray,
    ) -> tuple[IntArray, IntArray, DurationProblem]:
        """Nodes with a unit before on their stage, nodes fed by a neighbour, and the program.

        Dependencies stand in this order: on the same stage, on a neighbour, on nothing.
        """
        schedule, time_unit_s = self._schedule, self._time_unit_s
        width = schedule.units_per_stage
        node = np.arange(schedule.num_units)
        cross = schedule.cross_dependency.astype(np.int64)
        inside = node[node % width > 0]
        fed = node[cross >= 0]
        free = node[(node % width == 0) & (cross < 0)]
        target = np.concatenate([inside, fed, free])
        source = np.concatenate([inside - 1, cross[fed], np.full(len(free), -1)])
        least_s = self._fastest_s[target]
        path = LongestPath(schedule, self._fastest_s.tolist(), latency_s)
        least_s[len(inside) : len(inside) + len(fed)] += np.array(path.hop_s)[fed]

        def ends(stretch: FloatArray) -> FloatArray:
            path.duration_s = (self._fastest_s + stretch * time_unit_s).tolist()
            path.find_ends()
            return np.array(path.end_s) / time_unit_s

        widths_s = [np.diff(unit.time_s[unit.hull]) for unit in choices.units]
        slopes = [
            np.diff(unit.cost_j[unit.hull]) / width_s * (time_unit_s / self._cost_unit_j)
            for unit, width_s in zip(choices.units, widths_s, strict=True)
        ]
        segments = np.array([len(width_s) for width_s in widths_s])[key]
        fastest_j = np.array([unit.cost_j[0] for unit in choices.units])
        problem = DurationProblem(
            target=target,
            source=source,
            least=least_s / time_unit_s,
            segment_node=np.repeat(node, segments),
            width=np.concatenate([widths_s[k] for k in key]) / time_unit_s,
            slope=np.concatenate([slopes[k] for k in key]),
            last_node=np.arange(1, schedule.num_stages + 1) * width - 1,
            tail=tail_s / time_unit_s,
            waiting_cost=choices.waiting_power_w * time_unit_s / self._cost_unit_j,
            fixed_cost=float(fastest_j[key].sum()) / self._cost_unit_j,
            num_nodes=schedule.num_units,
            ends=ends,
        )
        return inside, fed, problem


def node_keys(schedule: Schedule) -> IntArray:
    """[num_units] the index of each node's stage and kind in `Choices.units`."""
    stages = np.arange(schedule.num_stages, dtype=np.int64)[:, None]
    return (2 * stages + schedule.is_backward).ravel()
