"""The linear program over durations by an interior-point method, for pipelines of any size.

Mehrotra's predictor-corrector method (SIAM J. Optim. 2(4), 1992) on the structure of a pipeline. A
Newton step is a flow of corrections through the dependency graph: each dependency conducts, each
unit's segments conduct, and only the ends of units remain as unknowns, in a symmetric positive
definite matrix. Units that stand at like places of their stages depend on each other, so in that
order the matrix is a band as wide as the pipeline is deep, and LAPACK factors it in a fraction of a
second where general solvers, which do not know the order, take minutes.

Two details make it serve planners. The deadline may be overrun at a price that no solution would
pay, so that an interior exists even at the fastest possible time. And slopes are disturbed by at
most `_DISTURBANCE`, differently for each unit, so that of many equally good solutions one is met
where few units lie between profiled times, which rounding needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_solve_banded, cholesky_banded
from threadpoolctl import threadpool_limits

from envpipe_megatron.policies.duration_problem import DurationProblem, Solution, SolverError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Solved when the duality gap is this fraction of the cost.
_GAP = 1e-9
#: A larger gap than this at the end is no solution.
_MAX_GAP = 1e-5
_MAX_ITERATIONS = 150
#: A deadline at this multiple of the slowest iteration is none.
_NEVER = 1.1
#: Later than the deadline by this fraction is in time.
_LATE = 1e-6
#: Slopes change by up to half of this fraction, up or down.
_DISTURBANCE = 1e-3
#: Steps go this far towards the boundary.
_STEP = 0.99
#: At the start: stretch as a fraction of its width, and slack of each dependency.
_FIRST_STRETCH, _FIRST_SLACK = 0.1, 0.05


@dataclass
class _Point:
    """An iterate: pairs of a primal slack and its price, and the ends that the slacks belong to.

    The pairs are dependencies, ends of stages, segments from below, segments from above, and how
    early or late the iteration is.
    """

    slack: list[FloatArray]
    price: list[FloatArray]
    end: FloatArray
    iteration: float

    @property
    def gap(self) -> float:
        """Sum of the products of slack and price: 0 at a solution."""
        return sum(float(s @ p) for s, p in zip(self.slack, self.price, strict=True))

    def moved(self, step: _Point, of_slack: float, of_price: float) -> _Point:
        """The point some way along a step."""
        return _Point(
            [s + of_slack * d for s, d in zip(self.slack, step.slack, strict=True)],
            [p + of_price * d for p, d in zip(self.price, step.price, strict=True)],
            self.end + of_slack * step.end,
            self.iteration + of_slack * step.iteration,
        )

    def longest_steps(self, step: _Point) -> tuple[float, float]:
        """How many of these steps slacks and prices can go before one of them is 0."""
        return _longest(self.slack, step.slack), _longest(self.price, step.price)


class InteriorPoint:
    """One problem, ready to be solved for any number of deadlines.

    Args:
        problem: the program but for its deadline.
        elimination_order: [num_nodes] an order in which units that depend on each other are near.
    """

    def __init__(self, problem: DurationProblem, elimination_order: IntArray) -> None:
        self._problem = problem
        self._matrix = _Matrix(problem, elimination_order)
        disturbed = np.random.default_rng(0).uniform(-0.5, 0.5, problem.num_nodes)
        self._slope = problem.slope * (1 + _DISTURBANCE * disturbed[problem.segment_node])
        # Nearly always more than any solution would pay for a second; if not, it is raised.
        steepest = np.zeros(problem.num_nodes)
        np.maximum.at(steepest, problem.segment_node, -self._slope)
        first_node = np.concatenate([[0], problem.last_node[:-1] + 1])
        self._overtime_cost = 1.01 * float(np.maximum.reduceat(steepest, first_node).sum()) + 1.0

    def solve(self, deadline: float) -> Solution:
        """Minimise for a deadline.

        Raises:
            SolverError: no durations meet the deadline, or the method came to no end.
        """
        problem = self._problem
        fastest, slowest = self._iteration(0.0), self._iteration(1.0)
        if deadline < fastest * (1 - _LATE):
            raise SolverError(f"the fastest iteration is {fastest / deadline:.6g} times as long")
        # Later than all units at their slowest is as good as never, and worse conditioned.
        deadline = min(deadline, _NEVER * slowest)
        # A band is too narrow to share: with more than one thread LAPACK takes 10 times as long.
        with threadpool_limits(limits=1, user_api="blas"):
            point = self._solve(deadline)
        segment = np.minimum(point.slack[2], problem.width)
        iteration = deadline - float(point.slack[4][0])
        return Solution(
            segment,
            point.price[0],
            point.price[1],
            problem.fixed_cost + float(problem.slope @ segment) + problem.waiting_cost * iteration,
        )

    def _iteration(self, stretch: float) -> float:
        """Iteration time with every unit stretched by this fraction of what it can be."""
        problem = self._problem
        length = problem.least + stretch * problem.by_node(problem.width)[problem.target]
        return float((_longest_path(problem, length)[problem.last_node] + problem.tail).max())

    def _solve(self, deadline: float) -> _Point:
        for dearer in (1.0, 10.0, 100.0, 1000.0):
            point = self._minimise(deadline, dearer * self._overtime_cost)
            if point.slack[4][1] <= _LATE * deadline:
                return point
        raise SolverError("the interior-point method stayed behind the deadline")

    def _minimise(self, deadline: float, overtime_cost: float) -> _Point:
        point = self._start(deadline, overtime_cost)
        best, best_gap, since_best = point, np.inf, 0
        for _ in range(_MAX_ITERATIONS):
            residual = self._residual(point, deadline, overtime_cost)
            cost = self._cost(point, deadline, overtime_cost)
            gap = (point.gap + residual.cost(point)) / abs(cost)
            if gap < 0.5 * best_gap:
                best, best_gap, since_best = point, gap, 0
            since_best += 1
            # Rounding errors end the progress of badly conditioned problems a little earlier.
            if best_gap <= _GAP or (best_gap <= _MAX_GAP and since_best > 6):
                break
            try:
                newton = _Newton(self._problem, self._matrix, point, residual)
            except LinAlgError:
                break
            point = self._next(point, newton)
        if not best_gap <= _MAX_GAP:
            raise SolverError(f"the interior-point method stopped at a gap of {best_gap:.1e}")
        return best

    def _start(self, deadline: float, overtime_cost: float) -> _Point:
        problem = self._problem
        segment = _FIRST_STRETCH * problem.width
        length = problem.least + problem.by_node(segment)[problem.target]
        end = _longest_path(problem, length + _FIRST_SLACK)
        iteration = float((end[problem.last_node] + problem.tail).max()) + _FIRST_SLACK
        slack = [
            end[problem.target] - _source_end(problem, end) - length,
            iteration - problem.tail - end[problem.last_node],
            segment,
            problem.width - segment,
            np.array([max(1.0, deadline - iteration), 1.0]),
        ]
        centre = 2.0 * float(np.mean(-self._slope * problem.width)) if len(segment) else 1.0
        price = [centre / s for s in slack[:4]]
        return _Point(slack, [*price, np.full(2, overtime_cost / 2)], end, iteration)

    def _cost(self, point: _Point, deadline: float, overtime_cost: float) -> float:
        """Of the disturbed program, with overtime."""
        problem, (early, late) = self._problem, point.slack[4]
        waiting = problem.waiting_cost * (deadline - early)
        overtime = (problem.waiting_cost + overtime_cost) * late
        stretched = float(self._slope @ point.slack[2])
        return problem.fixed_cost + stretched + float(waiting + overtime)

    def _residual(self, point: _Point, deadline: float, overtime_cost: float) -> _Residual:
        """By how much each equation is missed."""
        problem = self._problem
        slack, price = point.slack, point.price
        into = _sum_at(problem, problem.target, price[0])
        out_of = _sum_at_source(problem, price[0])
        out_of[problem.last_node] += price[1]
        total = float(price[1].sum())
        length = problem.least + problem.by_node(slack[2])[problem.target]
        early, late = slack[4]
        return _Residual(
            edge=point.end[problem.target] - _source_end(problem, point.end) - length - slack[0],
            iteration=deadline - early + late - point.iteration,
            segment=price[2] - price[3] - self._slope - into[problem.segment_node],
            node=into - out_of,
            early_late=np.array(
                [
                    total - problem.waiting_cost - price[4][0],
                    problem.waiting_cost + overtime_cost - total - price[4][1],
                ]
            ),
        )

    def _next(self, point: _Point, newton: _Newton) -> _Point:
        """One step: first straight for the solution, then with what that one missed."""
        products = [s * p for s, p in zip(point.slack, point.price, strict=True)]
        affine = newton.step([-x for x in products])
        of_slack, of_price = point.longest_steps(affine)
        reached = point.moved(affine, min(1.0, of_slack), min(1.0, of_price)).gap
        size = sum(len(x) for x in products)
        aim = (reached / point.gap) ** 3 * point.gap / size
        step = newton.step(
            [
                aim - x - ds * dp
                for x, ds, dp in zip(products, affine.slack, affine.price, strict=True)
            ]
        )
        of_slack, of_price = point.longest_steps(step)
        return point.moved(step, min(1.0, _STEP * of_slack), min(1.0, _STEP * of_price))


@dataclass(frozen=True)
class _Residual:
    """What is missing in each equation, to be made up by a step.

    Args:
        edge: [num_edges] in the slack of each dependency.
        iteration: in the iteration time.
        segment: [num_segments] in the price of each segment.
        node: [num_nodes] in what goes out of each node.
        early_late: [2] in the prices of early and late ends.
    """

    edge: FloatArray
    iteration: float
    segment: FloatArray
    node: FloatArray
    early_late: FloatArray

    def cost(self, point: _Point) -> float:
        """What the cost may be wrong by, to first order."""
        return (
            float(np.abs(self.edge) @ point.price[0])
            + abs(self.iteration) * float(point.price[1].sum())
            + float(np.abs(self.segment) @ point.slack[2])
            + float(np.abs(self.node) @ np.abs(point.end))
            + float(np.abs(self.early_late) @ point.slack[4])
        )


class _Matrix:
    """Where the entries of a Newton step's band matrix stand, and its factors."""

    def __init__(self, problem: DurationProblem, elimination_order: IntArray) -> None:
        self.problem = problem
        num_nodes = problem.num_nodes
        self.place = np.empty(num_nodes, dtype=np.int64)
        self.place[elimination_order] = np.arange(num_nodes)
        edge = np.arange(len(problem.target))
        self.fed = edge[problem.source >= 0]
        # The two dependencies of a node with two: its sources push against each other.
        by_target = self.fed[np.argsort(problem.target[self.fed], kind="stable")]
        twice = np.flatnonzero(np.diff(problem.target[by_target]) == 0)
        self.pair = by_target[twice], by_target[twice + 1]
        rows = np.concatenate([problem.target[self.fed], problem.source[self.pair[0]]])
        columns = np.concatenate([problem.source[self.fed], problem.source[self.pair[1]]])
        low = np.minimum(self.place[rows], self.place[columns])
        distance = np.abs(self.place[rows] - self.place[columns])
        self._height = int(distance.max(initial=0)) + 1
        self._entry = low * self._height + distance
        self._diagonal = self.place * self._height

    def factor(self, along: FloatArray, across: FloatArray, to_end: FloatArray) -> FloatArray:
        """Cholesky factor of the band.

        Args:
            along: [num_edges] conductance of each dependency.
            across: [pairs] between the two sources of a node.
            to_end: [num_stages] between each last node and the end of the iteration.

        Raises:
            LinAlgError: rounding errors made the matrix indefinite.
        """
        problem = self.problem
        band = np.bincount(
            self._entry,
            -np.concatenate([along[self.fed], across]),
            minlength=self._height * problem.num_nodes,
        )
        diagonal = _sum_at(problem, problem.target, along) + _sum_at_source(problem, along)
        for edge in self.pair:
            diagonal += _sum_at(problem, problem.source[edge], across)
        diagonal[problem.last_node] += to_end
        band[self._diagonal] = diagonal
        shape = (self._height, problem.num_nodes)
        factor: FloatArray = cholesky_banded(
            band.reshape(shape, order="F"), lower=True, overwrite_ab=True, check_finite=False
        )
        return factor

    def solve(self, factor: FloatArray, right: FloatArray) -> FloatArray:
        """[num_nodes] what the matrix takes to the right-hand side."""
        ordered = np.empty_like(right)
        ordered[self.place] = right
        solved: FloatArray = cho_solve_banded(
            (factor, True), ordered, overwrite_b=True, check_finite=False
        )
        return solved[self.place]


class _Newton:
    """The linear equations of one step, factored; each right-hand side is then cheap.

    Every pair of slack and price answers a change of the slack by -price/slack times it. What
    answers for a unit's segments together is its `give`: the change of its stretch for one of its
    price. Stretches, prices and the iteration time are eliminated; ends of units remain.
    """

    def __init__(
        self, problem: DurationProblem, matrix: _Matrix, point: _Point, residual: _Residual
    ) -> None:
        self._problem, self._matrix = problem, matrix
        self._point, self._residual = point, residual
        slack, price = point.slack, point.price
        self._edge = price[0] / slack[0]
        self._last = price[1] / slack[1]
        self._segment = price[2] / slack[2] + price[3] / slack[3]
        self._give = problem.by_node(1.0 / self._segment)
        into = _sum_at(problem, problem.target, self._edge)
        self._through = 1.0 / (1.0 + self._give * into)
        self._into = into
        first, second = matrix.pair
        node = problem.target[first]
        self._factor = matrix.factor(
            self._edge * self._through[problem.target],
            self._edge[first] * self._edge[second] * (self._give * self._through)[node],
            self._last,
        )
        at_last = np.zeros(problem.num_nodes)
        at_last[problem.last_node] = self._last
        self._by_iteration = matrix.solve(self._factor, at_last)
        self._iteration_give = float((slack[4] / price[4]).sum())
        self._iteration_pull = (
            1.0 / self._iteration_give
            + float(self._last.sum())
            - float(self._last @ self._by_iteration[problem.last_node])
        )

    def step(self, product: list[FloatArray]) -> _Point:
        """The step that changes each product of slack and price by the given, to first order."""
        problem, residual = self._problem, self._residual
        slack, price = self._point.slack, self._point.price
        # What would change with all ends of units held still.
        pushed = product[0] / slack[0] - self._edge * residual.edge
        wanted = residual.segment + product[2] / slack[2] - product[3] / slack[3]
        stretch = self._through * (
            problem.by_node(wanted / self._segment)
            - self._give * _sum_at(problem, problem.target, pushed)
        )
        pushed = pushed + self._edge * stretch[problem.target]
        last = product[1] / slack[1]
        right = (
            residual.node
            + _sum_at(problem, problem.target, pushed)
            - _sum_at_source(problem, pushed)
        )
        right[problem.last_node] -= last
        still = self._matrix.solve(self._factor, right)
        sign = np.array([-1.0, 1.0])
        drift = residual.iteration + float(
            sign @ ((product[4] - slack[4] * residual.early_late) / price[4])
        )
        iteration = (
            drift / self._iteration_give + float(last.sum() + self._last @ still[problem.last_node])
        ) / self._iteration_pull
        end = still + self._by_iteration * iteration
        # From the ends back to everything else.
        apart = end[problem.target] - _source_end(problem, end)
        pull = _sum_at(problem, problem.target, self._edge * apart)
        stretch = stretch + self._give * self._through * pull
        edge_slack = apart - stretch[problem.target] + residual.edge
        edge_price = (product[0] - price[0] * edge_slack) / slack[0]
        into = _sum_at(problem, problem.target, edge_price)
        segment = (wanted - into[problem.segment_node]) / self._segment
        last_slack = iteration - end[problem.last_node]
        last_price = (product[1] - price[1] * last_slack) / slack[1]
        total = float(last_price.sum())
        early_late_price = residual.early_late - sign * total
        return _Point(
            [
                edge_slack,
                last_slack,
                segment,
                -segment,
                (product[4] - slack[4] * early_late_price) / price[4],
            ],
            [
                edge_price,
                last_price,
                (product[2] - price[2] * segment) / slack[2],
                (product[3] + price[3] * segment) / slack[3],
                early_late_price,
            ],
            end,
            iteration,
        )


def _sum_at(problem: DurationProblem, nodes: IntArray, values: FloatArray) -> FloatArray:
    return np.bincount(nodes, values, minlength=problem.num_nodes).astype(np.float64)


def _sum_at_source(problem: DurationProblem, by_edge: FloatArray) -> FloatArray:
    """[num_nodes] the sum over the dependencies on each node; the start is none."""
    fed = problem.source >= 0
    return _sum_at(problem, problem.source[fed], by_edge[fed])


def _source_end(problem: DurationProblem, end: FloatArray) -> FloatArray:
    """[num_edges] the end of each dependency's source; the iteration starts at 0."""
    return np.where(problem.source >= 0, end[problem.source], 0.0)


def _longest_path(problem: DurationProblem, length: FloatArray) -> FloatArray:
    """[num_nodes] the earliest ends if dependencies have these lengths."""
    inward: list[list[tuple[int, float]]] = [[] for _ in range(problem.num_nodes)]
    for target, source, time in zip(
        problem.target.tolist(), problem.source.tolist(), length.tolist(), strict=True
    ):
        inward[target].append((source, time))
    end = [0.0] * (problem.num_nodes + 1)  # the last is the start, which stands at -1
    for node in problem.order.tolist():
        end[node] = max(end[source] + time for source, time in inward[node])
    return np.array(end[:-1])


def _longest(values: list[FloatArray], steps: list[FloatArray]) -> float:
    longest = np.inf
    for value, step in zip(values, steps, strict=True):
        falling = step < 0
        if falling.any():
            longest = min(longest, float((-value[falling] / step[falling]).min()))
    return longest
