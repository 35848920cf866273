"""Frequencies worth giving to units, and the best durations of these for a deadline.

The planning cost of a unit is its energy less what its GPUs would have used by waiting as long:
then iteration energy = sum of costs + waiting power of the whole pipeline x iteration time, and
only the iteration time, not each wait, has to be known (the identity behind Perseus' cost model;
Chung et al., SOSP'24, section 4.1).

With the convex hull of cost over time of each unit, the cheapest iteration that meets a deadline is
a linear program: one end time a unit, one bounded variable a hull segment, one row a dependency
(the continuous relaxation of Perseus' problem, section 4). An interior-point method of our own
solves it. No answer is taken unchecked: one longest path shows that its durations are in time, and
a bound by additions (`lower_bound_j`) how much cheaper others can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE, LongestPath
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.optimal.interior_point import InteriorPoint
from envpipe_megatron.policies.optimal.newton_step import DurationProblem

#: Later than the deadline by this fraction is the solver's tolerance, which rounding makes up for.
_LATE = 1e-6
#: An answer may be this much dearer than its bound, as a fraction of the iteration's energy and of
#: what slower units can save: a little more than the solver's disturbed slopes can cost.
_GAP = 6e-4
#: Times the usual, what being late costs the solver, until the answer is as near to its bound.
_OVERTIME = (1.0, 10.0, 100.0, 1000.0)

Choice = tuple[float, float, int]  #: time in s, cost in J, and whose they are


@dataclass(frozen=True)
class UnitChoices:
    """The frequencies of one part and kind that no other beats in both time and planning cost.

    Args:
        frequency_mhz: [n], the fastest first.
        time_s: [n], rising.
        cost_j: [n], falling; of all GPUs of the stage.
        hull: [h] indices of the choices on the lower convex hull of cost over time; the fastest and
            the cheapest choice are on it.
    """

    frequency_mhz: IntArray
    time_s: FloatArray
    cost_j: FloatArray
    hull: IntArray


@dataclass(frozen=True)
class Choices:
    """All choices of a pipeline under one waiting power.

    Args:
        units: the choices of each kind, for each part of the profile, as `Profile.keys` has them.
        waiting_power_w: power of all the pipeline's GPUs, the price of waiting.
        by_stage_w: [num_stages] the power of one waiting GPU of each.
    """

    units: tuple[UnitChoices, ...]
    profile: Profile
    waiting_power_w: float
    by_stage_w: FloatArray


def make_choices(profile: Profile, waiting_power_w: FloatArray, gpus_by_stage: IntArray) -> Choices:
    """Return the choices of each part and kind.

    `waiting_power_w`, [num_stages], is of one GPU; `gpus_by_stage`, [num_stages], follow one plan.
    """
    units = tuple(
        _unit_choices(rows, float(waiting_power_w[stage]), int(gpus))
        for stage, gpus in enumerate(gpus_by_stage)
        for part in profile.parts(stage)
        for rows in part.values()
    )
    all_w = float(np.dot(waiting_power_w, gpus_by_stage))
    return Choices(units, profile, all_w, waiting_power_w)


def _unit_choices(rows: Sequence[ProfileRow], waiting_power_w: float, gpus: int) -> UnitChoices:
    kept = unbeaten(
        (row.time_s, gpus * (row.energy_j - waiting_power_w * row.time_s), row.frequency_mhz)
        for row in rows
    )
    times, costs, frequencies = zip(*kept, strict=True)
    return UnitChoices(
        np.array(frequencies, dtype=np.int64),
        np.array(times),
        np.array(costs),
        np.array(lower_hull(kept), dtype=np.int64),
    )


def unbeaten(choices: Iterable[Choice]) -> list[Choice]:
    """Leave out what another beats in both time and cost, by rising time and falling cost.

    Times that only rounding tells apart are the same: joules over such a difference are prices of
    1e14 W, in which a bound loses its digits.
    """
    kept: list[Choice] = []
    for choice in sorted(choices):
        if kept and choice[1] >= kept[-1][1]:
            continue
        if kept and choice[0] <= kept[-1][0] * (1 + RELATIVE_TOLERANCE):
            kept.pop()
        kept.append(choice)
    return kept


def lower_hull(kept: Sequence[Choice]) -> list[int]:
    """Return indices of the unbeaten choices on the lower convex hull of cost over time."""
    hull: list[int] = []
    for index, (time_s, cost_j, _) in enumerate(kept):
        while len(hull) >= 2:
            (t0, c0, _), (t1, c1, _) = kept[hull[-2]], kept[hull[-1]]
            if (c1 - c0) * (time_s - t0) < (cost_j - c0) * (t1 - t0):
                break
            hull.pop()
        hull.append(index)
    return hull


class LinearProgramError(EnvPipeError):
    """A deadline that no frequencies meet."""


@dataclass(frozen=True)
class Relaxed:
    """The solution of the linear program.

    Args:
        duration_s: [num_units] duration of each node; between profiled times.
        end_s: when the iteration may end: before the deadline where waiting costs more than slower
            units save.
        cost_j: planning cost plus waiting power x iteration time, of these durations.
        lower_bound_j: what no durations on the hulls go below, by the prices.
        price_w: [num_units] what a second less of each unit is worth.
        slope_w: by how much the bound rises for each second of another deadline, zero or less.
    """

    duration_s: FloatArray
    end_s: float
    cost_j: float
    lower_bound_j: float
    price_w: FloatArray
    slope_w: float


class DurationProgram:
    """The linear program of one schedule, ready to be solved for any number of deadlines.

    ProfileError: the profile has no rows of a kind that the schedule has.
    """

    def __init__(self, schedule: Schedule, choices: Choices, conditions: Conditions) -> None:
        self.schedule = schedule
        self.choices = choices
        self.conditions = conditions
        #: [num_units] the index of each node's choices.
        self.key = choices.profile.keys(schedule).ravel().astype(np.int64)
        fastest_s = np.array([unit.time_s[0] for unit in choices.units])
        # Seconds and joules of any size become numbers around 1, for which tolerances are made.
        self._time_unit_s = float(fastest_s.mean())
        self._cost_unit_j = max(float(u.cost_j[0] - u.cost_j[-1]) for u in choices.units) or 1.0
        self._fastest_s = fastest_s[self.key]
        self._path = LongestPath(
            schedule, self._fastest_s.tolist(), conditions.latency_s, conditions.tail_by_stage_s
        )
        #: With every unit at its fastest.
        self.fastest_iteration_s = self._iteration_s(self._fastest_s)
        self._problem = self._make_problem()
        # Like places of the stages depend on each other.
        position = np.arange(schedule.num_units) % schedule.units_per_stage
        self._solver = InteriorPoint(self._problem, position)
        #: [num_segments] a solution that is so near to a profiled time is meant to be there.
        self._near = (0.5 * _LATE / self._time_unit_s * self._fastest_s)[self._problem.segment_node]
        #: The last deadline and its solution: searches judge by what plans are then made from.
        self._last: tuple[float, Relaxed] | None = None

    def attainable(self, deadline_s: float) -> float:
        """Return the deadline, or the fastest iteration if that is later only by rounding.

        LinearProgramError: no durations meet the deadline.
        """
        fastest_s = self.fastest_iteration_s
        if deadline_s < fastest_s * (1 - RELATIVE_TOLERANCE):
            raise LinearProgramError(
                f"Schedule '{self.schedule.name}' takes longer than the deadline (s) at any "
                "frequencies",
                value=deadline_s,
                remedy=f"Its fastest iteration takes {fastest_s:.6g} s: multiply --deadline-factor "
                f"by {np.ceil(1e4 * fastest_s / deadline_s) / 1e4:g}, or use another order.",
            )
        return max(deadline_s, fastest_s)

    def solve(self, deadline_s: float) -> Relaxed:
        """Minimise for a deadline; LinearProgramError: no durations meet it."""
        deadline_s = self.attainable(deadline_s)
        if self._last is None or self._last[0] != deadline_s:
            self._last = deadline_s, self._solve(deadline_s)
        return self._last[1]

    def _solve(self, deadline_s: float) -> Relaxed:
        """Return the first answer that its bound shows to be right, or that nearest to its bound.

        However badly conditioned a program is, there is an answer: a bound holds for any prices.
        """
        can_save_j = self._problem.can_save * self._cost_unit_j
        best, least = None, np.inf
        for dearer in _OVERTIME:
            answer = self._checked(deadline_s, dearer)
            gap_j = answer.cost_j - answer.lower_bound_j
            gap = gap_j / (abs(answer.cost_j) + can_save_j or 1.0)  # 0 without a meter
            if best is None or gap < least:
                best, least = answer, gap
            if gap <= _GAP:
                break
        assert best is not None
        return best

    def _checked(self, deadline_s: float, dearer: float) -> Relaxed:
        """Return the solver's answer, made to be in time, with the bound that its prices give."""
        problem = self._problem
        solution = self._solver.solve(deadline_s / self._time_unit_s, dearer)
        segment, left = solution.segment, problem.width - solution.segment
        segment = np.where(
            segment < self._near, 0.0, np.where(left < self._near, problem.width, segment)
        )
        duration_s = self._fastest_s + problem.by_node(segment) * self._time_unit_s
        end_s = self._iteration_s(duration_s)
        if end_s > deadline_s * (1 + _LATE):
            # The end is convex in the durations: between these and the fastest some are in time.
            share = (deadline_s - self.fastest_iteration_s) / (end_s - self.fastest_iteration_s)
            segment *= share
            duration_s = self._fastest_s + share * (duration_s - self._fastest_s)
            end_s = self._iteration_s(duration_s)
        per_second = self._cost_unit_j / self._time_unit_s
        deadline_w = solution.deadline_price * per_second
        bound_j, price_w = self.lower_bound_j(
            deadline_s, solution.edge_price * per_second, deadline_w
        )
        units_j = (problem.fixed_cost + float(problem.slope @ segment)) * self._cost_unit_j
        cost_j = units_j + self.choices.waiting_power_w * end_s
        slope_w = min(0.0, self.choices.waiting_power_w - float(deadline_w.sum()))
        if end_s > deadline_s * (1 - _LATE):
            end_s = deadline_s
        return Relaxed(duration_s, end_s, cost_j, bound_j, price_w, slope_w)

    def lower_bound_j(
        self, deadline_s: float, edge_w: FloatArray, deadline_w: FloatArray
    ) -> tuple[float, FloatArray]:
        """Return the least energy, J, of any frequencies on this order, checked by additions.

        And by which prices of a second of each unit, W, [num_units].

        Price every dependency with a flow: 1 J/s enters where the iteration ends, runs back through
        the dependencies of each unit to its start, and is never lost on the way. At any
        frequencies the iteration is at least as long as every path, so its energy is at least

            sum over units of min over choices (cost + price of the unit's time x time)
            + price of each dependency x latency + price of each tail x tail
            + (waiting power - total price) x iteration time,

        which is smallest at the deadline or at the fastest iteration (Lagrangian duality; the dual
        of the linear program is a flow). Any flow gives a valid bound; the linear program's own
        gives the best. It does not rest on a solver's tolerances, nor on its having finished.

        Args:
            deadline_s: of the iteration.
            edge_w: [num_edges] the price of a second at each dependency, J/s: a solution's dual, or
                any guess that is not negative. A unit's price is divided by these over what it
                waits for.
            deadline_w: [num_stages] the same between each stage's last unit and the deadline.
        """
        choices, conditions = self.choices, self.conditions
        price, cross_price = self._flow(edge_w, deadline_w)
        total = 0.0
        for index, unit in enumerate(choices.units):
            values, count = np.unique(price[self.key == index], return_counts=True)
            least = (unit.cost_j[:, None] + unit.time_s[:, None] * values).min(axis=0)
            total += float(np.dot(count, least))
        total += float(np.dot(cross_price, self._path.hop_s))
        total += float(np.dot(deadline_w, conditions.tail_by_stage_s))
        remaining = choices.waiting_power_w - float(deadline_w.sum())
        return total + min(remaining * deadline_s, remaining * self.fastest_iteration_s), price

    def _flow(self, edge_w: FloatArray, deadline_w: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the price of each node's time, and of its cross dependency, J/s.

        Nothing is lost between them. From the end back: a node's price is what arrived from the
        nodes after it, and goes on to the nodes before it in proportion to theirs.
        """
        schedule, target = self.schedule, self._problem.target
        width, inside = schedule.units_per_stage, schedule.num_units - schedule.num_stages
        same, cross = slice(inside), slice(inside, len(self._problem.source))
        by_node = np.zeros((2, schedule.num_units))
        for of_node, edges in zip(by_node, (same, cross), strict=True):
            of_node[target[edges]] = edge_w[edges]
        same_w, cross_w = by_node.tolist()
        sources = schedule.cross_dependency.tolist()
        price = [0.0] * schedule.num_units
        cross_price = [0.0] * schedule.num_units
        for stage, dual in enumerate(deadline_w.tolist()):
            price[(stage + 1) * width - 1] = dual
        for node in reversed(schedule.topological_order):
            arrived = price[node]
            if arrived == 0.0:
                continue
            source = sources[node]
            if source < 0:
                share = 0.0
            elif node % width == 0:
                share = 1.0
            else:
                both = same_w[node] + cross_w[node]
                share = cross_w[node] / both if both > 0.0 else 0.0
            if source >= 0:
                cross_price[node] = share * arrived
                price[source] += cross_price[node]
            if node % width:
                price[node - 1] += arrived - cross_price[node]
        return np.array(price), np.array(cross_price)

    def _iteration_s(self, duration_s: FloatArray) -> float:
        """Return when the last stage is done, tails included, for [num_units] durations."""
        self._path.duration_s = duration_s.tolist()
        self._path.find_ends()
        return max(self._path.stage_end_s)

    def _make_problem(self) -> DurationProblem:
        """Return the program; dependencies come on the same stage, on a neighbour, on nothing."""
        schedule, choices, key = self.schedule, self.choices, self.key
        time_unit_s = self._time_unit_s
        width = schedule.units_per_stage
        node = np.arange(schedule.num_units)
        cross = schedule.cross_dependency.astype(np.int64)
        inside = node[node % width > 0]
        fed = node[cross >= 0]
        free = node[(node % width == 0) & (cross < 0)]
        target = np.concatenate([inside, fed, free])
        source = np.concatenate([inside - 1, cross[fed]])
        least_s = self._fastest_s[target]
        least_s[len(inside) : len(inside) + len(fed)] += np.array(self._path.hop_s)[fed]

        def ends(stretch: FloatArray) -> FloatArray:
            self._iteration_s(self._fastest_s + stretch * time_unit_s)
            return np.array(self._path.end_s) / time_unit_s

        widths_s = [np.diff(unit.time_s[unit.hull]) for unit in choices.units]
        slopes = [
            np.diff(unit.cost_j[unit.hull]) / width_s * (time_unit_s / self._cost_unit_j)
            for unit, width_s in zip(choices.units, widths_s, strict=True)
        ]
        segments = np.array([len(width_s) for width_s in widths_s])[key]
        fastest_j = np.array([unit.cost_j[0] for unit in choices.units])
        return DurationProblem(
            target=target,
            source=source,
            least=least_s / time_unit_s,
            segment_node=np.repeat(node, segments),
            width=np.concatenate([widths_s[k] for k in key]) / time_unit_s,
            slope=np.concatenate([slopes[k] for k in key]),
            last_node=np.arange(1, schedule.num_stages + 1) * width - 1,
            tail=self.conditions.tail_by_stage_s / time_unit_s,
            waiting_cost=choices.waiting_power_w * time_unit_s / self._cost_unit_j,
            fixed_cost=float(fastest_j[key].sum()) / self._cost_unit_j,
            num_nodes=schedule.num_units,
            ends=ends,
        )
