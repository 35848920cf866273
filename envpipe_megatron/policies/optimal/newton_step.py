"""The linear program over durations as arrays, and one Newton step of the method that solves it.

Every unit ends no sooner than a fixed time after each unit it waits for, plus what it is stretched
by; a stretch is a sum of segments, each bounded and each with a price a second that falls from one
to the next; the iteration ends a tail after the last unit of each stage:

    minimise  sum of slope x segment + waiting cost x iteration
    with      end[target] - end[source] - sum of target's segments >= least   for every dependency
              iteration - end[last unit] >= tail                              for every stage
              0 <= segment <= width,  iteration <= deadline.

A step is a flow of corrections: each dependency conducts, each unit's segments conduct, and when
everything else is eliminated the ends of units remain as unknowns, in a symmetric positive definite
matrix (a graph Laplacian). Units at like places of their stages depend on each other, so in that
order the matrix is a band as wide as the pipeline is deep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.lapack import dpbtrf, dpbtrs

from envpipe_megatron.core.arrays import FloatArray, IntArray

#: iteration time = deadline + SIGN @ (how early, how late).
SIGN = np.array([-1.0, 1.0])
#: Orders of a band that are tried, each narrower as a rule; further ones gain next to nothing.
_PULLS = 30


@dataclass(frozen=True)
class DurationProblem:
    """The program except for its deadline, in units that make its numbers lie around 1.

    Args:
        target: [num_edges] the node that waits.
        source: [num_fed] the node that each of the first dependencies waits for; the others wait
            for the start of the iteration.
        least: [num_edges] time from the source's end to the target's at its fastest.
        segment_node: [num_segments] the node that a segment stretches, rising.
        width: [num_segments] the longest that each can be.
        slope: [num_segments] cost of a second of the segment, below 0.
        last_node: [num_stages] the last node of each stage.
        tail: [num_stages] time after that node.
        waiting_cost: cost of a second of the iteration.
        fixed_cost: cost of all units at their fastest.
        num_nodes: how many units there are.
        ends: [num_nodes] what each node is stretched by to their earliest ends.
    """

    target: IntArray
    source: IntArray
    least: FloatArray
    segment_node: IntArray
    width: FloatArray
    slope: FloatArray
    last_node: IntArray
    tail: FloatArray
    waiting_cost: float
    fixed_cost: float
    num_nodes: int
    ends: Callable[[FloatArray], FloatArray]

    @cached_property
    def pairs(self) -> tuple[slice, slice, slice, slice, slice]:
        """Slices of slacks and their prices in one array, in this order.

        Dependencies, ends of stages, segments from below and from above, and how early and how late
        the iteration is.
        """
        segments = len(self.width)
        at = np.cumsum([0, len(self.target), len(self.tail), segments, segments, 2]).tolist()
        edge, last, below, above, ends = map(slice, at, at[1:])
        return edge, last, below, above, ends

    @cached_property
    def can_save(self) -> float:
        """Cost that all units save at their slowest against their fastest."""
        return -float(self.slope @ self.width)

    def by_node(self, by_segment: FloatArray) -> FloatArray:
        """Return [num_nodes] the sum over each node's segments."""
        return self.sum_at(self.segment_node, by_segment)

    def sum_at(self, nodes: IntArray, values: FloatArray) -> FloatArray:
        """Return [num_nodes] the sum of the values at each node."""
        return np.bincount(nodes, values, minlength=self.num_nodes).astype(np.float64, copy=False)

    def net(self, by_edge: FloatArray) -> FloatArray:
        """Return [num_nodes] sums over what a node waits for, less those over what waits for it."""
        passed = self.sum_at(self.source, by_edge[: len(self.source)])
        return self.sum_at(self.target, by_edge) - passed

    def apart(self, end: FloatArray) -> FloatArray:
        """Return [num_edges] the time from the end of each source to that of its target."""
        apart = end[self.target]
        apart[: len(self.source)] -= end[self.source]
        return apart


@dataclass(frozen=True)
class Iterate:
    """An iterate: slacks and their prices, all above 0, as `DurationProblem.pairs` has them.

    `end`, [num_nodes], and `iteration` are when units and the iteration end, for these slacks.
    """

    slack: FloatArray
    price: FloatArray
    end: FloatArray
    iteration: float

    @property
    def gap(self) -> float:
        """Sum of the products of slack and price: 0 at a solution."""
        return float(self.slack @ self.price)

    def moved(self, step: Iterate, of_slack: float, of_price: float) -> Iterate:
        """Return the point some way along a step."""
        return Iterate(
            self.slack + of_slack * step.slack,
            self.price + of_price * step.price,
            self.end + of_slack * step.end,
            self.iteration + of_slack * step.iteration,
        )

    def longest_steps(self, step: Iterate, share: float = 1.0) -> tuple[float, float]:
        """Return the shares of a step, at most 1, that take slacks and prices that far to 0."""
        return (
            1.0 / max(1.0, float((step.slack / self.slack).min()) / -share),
            1.0 / max(1.0, float((step.price / self.price).min()) / -share),
        )


@dataclass(frozen=True)
class Residual:
    """Errors of a point in each equation, to be made up by a step.

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


class BandMatrix:
    """Places of the entries of a Newton step's band matrix, and its factors.

    Through chunks, a band in the order of `near` (see `InteriorPoint`) is wide: it is made narrower
    step by step.
    """

    def __init__(self, problem: DurationProblem, near: IntArray) -> None:
        self.problem = problem
        target, source = problem.target[: len(problem.source)], problem.source
        # The two dependencies of a node with two: its sources push against each other.
        by_target = np.argsort(target, kind="stable")
        twice = np.flatnonzero(np.diff(target[by_target]) == 0)
        self.pair = by_target[twice], by_target[twice + 1]
        rows = np.concatenate([target, source[self.pair[0]]])
        columns = np.concatenate([source, source[self.pair[1]]])
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
        """Return the Cholesky factor of the band; LinAlgError if rounding made it indefinite.

        Args:
            along: [num_edges] conductance of each dependency.
            across: [pairs] between the two sources of a node.
            to_end: [num_stages] between each last node and the end of the iteration.
        """
        problem = self.problem
        along_fed = along[: len(problem.source)]
        size = self._height * problem.num_nodes
        band = np.bincount(self._entry, -np.concatenate([along_fed, across]), minlength=size)
        diagonal = problem.sum_at(problem.target, along) + problem.sum_at(problem.source, along_fed)
        for edge in self.pair:
            diagonal += problem.sum_at(problem.source[edge], across)
        diagonal[problem.last_node] += to_end
        band[self._diagonal] = diagonal
        shape = (self._height, problem.num_nodes)
        factor, failed = dpbtrf(band.reshape(shape, order="F"), lower=1, overwrite_ab=1)
        if failed:
            raise LinAlgError(f"the band's minor of order {failed} is not positive definite")
        found: FloatArray = factor
        return found

    def solve(self, factor: FloatArray, right: FloatArray) -> FloatArray:
        """Return [num_nodes] the solution for a right-hand side."""
        ordered = np.empty_like(right)
        ordered[self.place] = right
        solved: FloatArray = dpbtrs(factor, ordered, lower=1, overwrite_b=1)[0]
        return solved[self.place]


class NewtonStep:
    """The linear equations of one step, factored; each right-hand side is then cheap.

    Every pair of slack and price answers a change of the slack by -price/slack times it. What
    answers for a unit's segments together is its `give`: the change of its stretch for one of its
    price. Stretches, prices and the iteration time are eliminated; ends of units remain.
    """

    def __init__(
        self, problem: DurationProblem, matrix: BandMatrix, point: Iterate, residual: Residual
    ) -> None:
        self._problem, self._matrix = problem, matrix
        self._point, self._residual = point, residual
        edge, last, below, above, ends = problem.pairs
        conducts = point.price / point.slack
        self._edge, self._last = conducts[edge], conducts[last]
        self._segment_give = 1.0 / (conducts[below] + conducts[above])
        self._give = problem.by_node(self._segment_give)
        into = problem.sum_at(problem.target, self._edge)
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
        self._iteration_give = (1.0 / conducts[ends]).sum()  # NumPy's numbers overflow quietly
        # What pulls at the end of the iteration is what arrives at its start: the sum there is of
        # positive terms, the one over the last nodes would cancel.
        start = slice(len(problem.source), None)
        arrived = along[start] @ self._by_iteration[problem.target[start]]
        self._iteration_pull = 1.0 / self._iteration_give + arrived

    def step(self, product: FloatArray) -> Iterate:
        """Return the step that changes products of slack and price as given, to first order."""
        problem, residual = self._problem, self._residual
        edge, last, below, above, ends = problem.pairs
        slack, price = self._point.slack, self._point.price
        push = product / slack
        # What would change with all ends of units held still.
        pushed = push[edge] - self._edge * residual.edge
        wanted = residual.segment + push[below] - push[above]
        stretch = self._through * (
            problem.by_node(wanted * self._segment_give)
            - self._give * problem.sum_at(problem.target, pushed)
        )
        pushed += self._edge * stretch[problem.target]
        right = residual.node + problem.net(pushed)
        right[problem.last_node] -= push[last]
        still = self._matrix.solve(self._factor, right)
        late = (product[ends] - slack[ends] * residual.early_late) / price[ends]
        pulled = float(push[last].sum() + self._last @ still[problem.last_node])
        drift = (residual.iteration + float(SIGN @ late)) / self._iteration_give
        iteration = (drift + pulled) / self._iteration_pull
        end = still + self._by_iteration * iteration
        # From the ends back to everything else.
        apart = problem.apart(end)
        pull = problem.sum_at(problem.target, self._edge * apart)
        stretch += self._give * self._through * pull
        slack_step = np.empty_like(slack)
        slack_step[edge] = apart - stretch[problem.target] + residual.edge
        slack_step[last] = iteration - end[problem.last_node]
        edge_price = push[edge] - self._edge * slack_step[edge]
        into = problem.sum_at(problem.target, edge_price)
        slack_step[below] = (wanted - into[problem.segment_node]) * self._segment_give
        slack_step[above] = -slack_step[below]
        slack_step[ends] = 0.0
        price_step = (product - price * slack_step) / slack
        total = float(price_step[last].sum())
        slack_step[ends], price_step[ends] = self._early_late(product[ends], iteration, total)
        return Iterate(slack_step, price_step, end, iteration)

    def _early_late(
        self, product: FloatArray, iteration: float, total: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return steps ds, dp of how early and late the iteration ends (slacks s, prices p).

        They solve p ds + s dp = product ([2]) and SIGN @ ds = iteration - residual; where s / p is
        less, dp = residual - SIGN total. `total` is the step of the sum of the stages' prices.
        """
        ends = self._problem.pairs[-1]
        slack, price = self._point.slack[ends], self._point.price[ends]
        # ds of the larger s / p follows from the other: its p may be too near 0 to divide by.
        more = int(np.argmax(slack / price))
        less = 1 - more
        slack_step, price_step = np.empty(2), np.empty(2)
        price_step[less] = self._residual.early_late[less] - SIGN[less] * total
        slack_step[less] = (product[less] - slack[less] * price_step[less]) / price[less]
        rest = iteration - self._residual.iteration - SIGN[less] * slack_step[less]
        slack_step[more] = SIGN[more] * rest
        price_step[more] = (product[more] - price[more] * slack_step[more]) / slack[more]
        return slack_step, price_step
