"""Newton steps of an interior-point method on a pipeline's dependency graph.

A step is a flow of corrections: each dependency conducts, each unit's segments conduct, and when
everything else is eliminated the ends of units remain as unknowns, in a symmetric positive definite
matrix (a graph Laplacian). Units that stand at like places of their stages depend on each other, so
in that order the matrix is a band as wide as the pipeline is deep.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve_banded, cholesky_banded

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.policies.optimal.duration_problem import DurationProblem

#: The pairs of a slack and its price: dependencies, ends of stages, segments from below and from
#: above, and how early or late the iteration is.
EDGE, LAST, BELOW, ABOVE, EARLY_LATE = range(5)
#: iteration time = deadline + _SIGN @ slack[EARLY_LATE].
_SIGN = np.array([-1.0, 1.0])
#: Orders of a band that are tried, each narrower as a rule; further ones gain next to nothing.
_PULLS = 30


@dataclass(frozen=True)
class Point:
    """An iterate: pairs of a slack and its price, one array for each of the pairs above.

    `end`, [num_nodes], and `iteration` are when units and the iteration end, for these slacks.
    """

    slack: list[FloatArray]
    price: list[FloatArray]
    end: FloatArray
    iteration: float

    @property
    def gap(self) -> float:
        """Sum of the products of slack and price: 0 at a solution."""
        return sum(float(s @ p) for s, p in zip(self.slack, self.price, strict=True))

    def moved(self, step: Point, of_slack: float, of_price: float) -> Point:
        """The point some way along a step."""
        return Point(
            [s + of_slack * d for s, d in zip(self.slack, step.slack, strict=True)],
            [p + of_price * d for p, d in zip(self.price, step.price, strict=True)],
            self.end + of_slack * step.end,
            self.iteration + of_slack * step.iteration,
        )

    def longest_steps(self, step: Point) -> tuple[float, float]:
        """How many of these steps slacks and prices can go before one of them is 0."""
        return _longest(self.slack, step.slack), _longest(self.price, step.price)


@dataclass(frozen=True)
class Residual:
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

    def cost(self, point: Point) -> float:
        """What the cost may be wrong by, to first order."""
        return (
            float(np.abs(self.edge) @ point.price[EDGE])
            + abs(self.iteration) * float(point.price[LAST].sum())
            + float(np.abs(self.segment) @ point.slack[BELOW])
            + float(np.abs(self.node) @ np.abs(point.end))
            + float(np.abs(self.early_late) @ point.slack[EARLY_LATE])
        )


class BandMatrix:
    """Where the entries of a Newton step's band matrix stand, and its factors.

    `near`, [num_nodes], is a number for each node; nodes that depend on each other have near ones.
    Through chunks, a band in that order is wide: it is made narrower step by step.
    """

    def __init__(self, problem: DurationProblem, near: IntArray) -> None:
        self.problem = problem
        edge = np.arange(len(problem.target))
        self.fed = edge[problem.source >= 0]
        # The two dependencies of a node with two: its sources push against each other.
        by_target = self.fed[np.argsort(problem.target[self.fed], kind="stable")]
        twice = np.flatnonzero(np.diff(problem.target[by_target]) == 0)
        self.pair = by_target[twice], by_target[twice + 1]
        rows = np.concatenate([problem.target[self.fed], problem.source[self.pair[0]]])
        columns = np.concatenate([problem.source[self.fed], problem.source[self.pair[1]]])
        # Each node is pulled between the two that it is linked with furthest from each other.
        places, pulled = [], near
        for _ in range(_PULLS):
            place = np.argsort(np.argsort(pulled, kind="stable"))
            places.append(place)
            first, last = place.copy(), place.copy()
            for here, there in ((rows, columns), (columns, rows)):
                np.minimum.at(first, here, place[there])
                np.maximum.at(last, here, place[there])
            pulled = first + 2 * place + last
        self.place = min(places, key=lambda p: int(np.abs(p[rows] - p[columns]).max(initial=0)))
        low = np.minimum(self.place[rows], self.place[columns])
        distance = np.abs(self.place[rows] - self.place[columns])
        self._height = int(distance.max(initial=0)) + 1
        self._entry = low * self._height + distance
        self._diagonal = self.place * self._height

    def factor(self, along: FloatArray, across: FloatArray, to_end: FloatArray) -> FloatArray:
        """Cholesky factor of the band; LinAlgError if rounding errors made it indefinite.

        Args:
            along: [num_edges] conductance of each dependency.
            across: [pairs] between the two sources of a node.
            to_end: [num_stages] between each last node and the end of the iteration.
        """
        problem = self.problem
        band = np.bincount(
            self._entry,
            -np.concatenate([along[self.fed], across]),
            minlength=self._height * problem.num_nodes,
        )
        diagonal = sum_at(problem, problem.target, along) + sum_at_source(problem, along)
        for edge in self.pair:
            diagonal += sum_at(problem, problem.source[edge], across)
        diagonal[problem.last_node] += to_end
        band[self._diagonal] = diagonal
        shape = (self._height, problem.num_nodes)
        factor: FloatArray = cholesky_banded(
            band.reshape(shape, order="F"), lower=True, check_finite=False
        )
        return factor

    def solve(self, factor: FloatArray, right: FloatArray) -> FloatArray:
        """[num_nodes] what the matrix takes to the right-hand side."""
        ordered = np.empty_like(right)
        ordered[self.place] = right
        solved: FloatArray = cho_solve_banded((factor, True), ordered, check_finite=False)
        return solved[self.place]


class NewtonStep:
    """The linear equations of one step, factored; each right-hand side is then cheap.

    Every pair of slack and price answers a change of the slack by -price/slack times it. What
    answers for a unit's segments together is its `give`: the change of its stretch for one of its
    price. Stretches, prices and the iteration time are eliminated; ends of units remain.
    """

    def __init__(
        self, problem: DurationProblem, matrix: BandMatrix, point: Point, residual: Residual
    ) -> None:
        self._problem, self._matrix = problem, matrix
        self._point, self._residual = point, residual
        slack, price = point.slack, point.price
        self._edge = price[EDGE] / slack[EDGE]
        self._last = price[LAST] / slack[LAST]
        self._segment = price[BELOW] / slack[BELOW] + price[ABOVE] / slack[ABOVE]
        self._give = problem.by_node(1.0 / self._segment)
        into = sum_at(problem, problem.target, self._edge)
        self._through = 1.0 / (1.0 + self._give * into)
        first, second = matrix.pair
        node = problem.target[first]
        along = self._edge * self._through[problem.target]
        self._factor = matrix.factor(
            along,
            self._edge[first] * self._edge[second] * (self._give * self._through)[node],
            self._last,
        )
        at_last = np.zeros(problem.num_nodes)
        at_last[problem.last_node] = self._last
        self._by_iteration = matrix.solve(self._factor, at_last)
        self._iteration_give = float((slack[EARLY_LATE] / price[EARLY_LATE]).sum())
        # What pulls at the end of the iteration is what arrives at its start: the sum there is of
        # positive terms, the one over the last nodes would cancel.
        start = problem.source < 0
        arrived = float(along[start] @ self._by_iteration[problem.target[start]])
        self._iteration_pull = 1.0 / self._iteration_give + arrived

    def step(self, product: list[FloatArray]) -> Point:
        """The step that changes each product of slack and price by the given, to first order."""
        problem, residual = self._problem, self._residual
        slack, price = self._point.slack, self._point.price
        # What would change with all ends of units held still.
        pushed = product[EDGE] / slack[EDGE] - self._edge * residual.edge
        wanted = residual.segment + product[BELOW] / slack[BELOW] - product[ABOVE] / slack[ABOVE]
        stretch = self._through * (
            problem.by_node(wanted / self._segment)
            - self._give * sum_at(problem, problem.target, pushed)
        )
        pushed = pushed + self._edge * stretch[problem.target]
        last = product[LAST] / slack[LAST]
        right = (
            residual.node + sum_at(problem, problem.target, pushed) - sum_at_source(problem, pushed)
        )
        right[problem.last_node] -= last
        still = self._matrix.solve(self._factor, right)
        drift = residual.iteration + float(
            _SIGN
            @ ((product[EARLY_LATE] - slack[EARLY_LATE] * residual.early_late) / price[EARLY_LATE])
        )
        iteration = (
            drift / self._iteration_give + float(last.sum() + self._last @ still[problem.last_node])
        ) / self._iteration_pull
        end = still + self._by_iteration * iteration
        # From the ends back to everything else.
        apart = end[problem.target] - source_end(problem, end)
        pull = sum_at(problem, problem.target, self._edge * apart)
        stretch = stretch + self._give * self._through * pull
        edge_slack = apart - stretch[problem.target] + residual.edge
        edge_price = (product[EDGE] - price[EDGE] * edge_slack) / slack[EDGE]
        into = sum_at(problem, problem.target, edge_price)
        segment = (wanted - into[problem.segment_node]) / self._segment
        last_slack = iteration - end[problem.last_node]
        last_price = (product[LAST] - price[LAST] * last_slack) / slack[LAST]
        ends = self._early_late(product[EARLY_LATE], iteration, float(last_price.sum()))
        return Point(
            [
                edge_slack,
                last_slack,
                segment,
                -segment,
                ends[0],
            ],
            [
                edge_price,
                last_price,
                (product[BELOW] - price[BELOW] * segment) / slack[BELOW],
                (product[ABOVE] + price[ABOVE] * segment) / slack[ABOVE],
                ends[1],
            ],
            end,
            iteration,
        )

    def _early_late(
        self, product: FloatArray, iteration: float, total: float
    ) -> tuple[FloatArray, FloatArray]:
        """Steps ds, dp of how early and late the iteration ends (slacks s), and of their prices p.

        They solve p ds + s dp = product ([2]) and _SIGN @ ds = iteration - residual; where s / p is
        less, dp = residual - _SIGN total. `total` is the step of the sum of prices LAST.
        """
        slack, price = self._point.slack[EARLY_LATE], self._point.price[EARLY_LATE]
        # ds of the larger s / p follows from the other: its p may be too near 0 to divide by.
        more = int(np.argmax(slack / price))
        less = 1 - more
        slack_step, price_step = np.empty(2), np.empty(2)
        price_step[less] = self._residual.early_late[less] - _SIGN[less] * total
        slack_step[less] = (product[less] - slack[less] * price_step[less]) / price[less]
        rest = iteration - self._residual.iteration - _SIGN[less] * slack_step[less]
        slack_step[more] = _SIGN[more] * rest
        price_step[more] = (product[more] - price[more] * slack_step[more]) / slack[more]
        return slack_step, price_step


def sum_at(problem: DurationProblem, nodes: IntArray, values: FloatArray) -> FloatArray:
    """[num_nodes] the sum of the values that stand at each node."""
    return np.bincount(nodes, values, minlength=problem.num_nodes).astype(np.float64)


def sum_at_source(problem: DurationProblem, by_edge: FloatArray) -> FloatArray:
    """[num_nodes] the sum over the dependencies on each node; the start is none."""
    fed = problem.source >= 0
    return sum_at(problem, problem.source[fed], by_edge[fed])


def source_end(problem: DurationProblem, end: FloatArray) -> FloatArray:
    """[num_edges] the end of each dependency's source; the iteration starts at 0."""
    return np.where(problem.source >= 0, end[problem.source], 0.0)


def _longest(values: list[FloatArray], steps: list[FloatArray]) -> float:
    longest = np.inf
    for value, step in zip(values, steps, strict=True):
        falling = step < 0
        if falling.any():
            longest = min(longest, float((-value[falling] / step[falling]).min()))
    return longest
