"""The linear program over durations by an interior-point method, for pipelines of any size.

Mehrotra's predictor-corrector method (SIAM J. Optim. 2(4), 1992) on the structure of a pipeline:
the matrix of a step is a narrow band (`newton_step`), which LAPACK factors in a fraction of a
second where general solvers take minutes.

The deadline may be overrun at a price that no solution would pay, so that an interior exists even
at the fastest possible time. And slopes are disturbed by at most `_DISTURBANCE`, differently for
each unit, so that of many equally good solutions one is met where few units lie between profiled
times, which rounding needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError
from threadpoolctl import ThreadpoolController

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.policies.optimal.newton_step import (
    SIGN,
    BandMatrix,
    DurationProblem,
    Iterate,
    NewtonStep,
    Residual,
)

#: Solved when the duality gap is this fraction of the cost and of what slower units can save.
_GAP = 1e-9
#: Rounding errors end the progress of badly conditioned problems earlier: below such a gap, as many
#: steps may follow that do not halve it.
_NO_PROGRESS = ((1e-7, 2), (1e-5, 6))
_MAX_ITERATIONS = 150
#: Slopes change by up to this fraction, up or down, in larger pipelines; in smaller ones by this
#: fraction for each unit, which is as far above the gap that is left.
_DISTURBANCE, _DISTURBANCE_PER_UNIT = 5e-4, 5e-7
#: Steps go this far towards the boundary.
_STEP = 0.99
#: At the start: stretch as a fraction of its width, and slack of each dependency.
_FIRST_STRETCH, _FIRST_SLACK = 0.3, 0.1
#: Looking for the libraries takes as long as a small program: it is done once.
_THREADS = ThreadpoolController()


@dataclass(frozen=True)
class Solution:
    """The best point that was found, in the problem's units, not checked yet.

    Args:
        segment: [num_segments] how far each is used.
        edge_price: [num_edges] dual of each dependency.
        deadline_price: [num_stages] dual of the end of each stage.
    """

    segment: FloatArray
    edge_price: FloatArray
    deadline_price: FloatArray


class InteriorPoint:
    """One problem, ready to be solved for any number of deadlines.

    `near`, [num_nodes], is a number for each node; nodes that depend on each other have near ones.
    """

    def __init__(self, problem: DurationProblem, near: IntArray) -> None:
        self._problem = problem
        self._matrix = BandMatrix(problem, near)
        most = min(_DISTURBANCE, _DISTURBANCE_PER_UNIT * problem.num_nodes)
        disturbed = np.random.default_rng(0).uniform(1 - most, 1 + most, problem.num_nodes)
        self._slope = problem.slope * disturbed[problem.segment_node]
        # Nearly always more than any solution would pay for a second.
        self._overtime_cost = len(problem.tail) * float(1 + np.max(-self._slope, initial=0.0))

    def solve(self, deadline: float, dearer: float = 1.0) -> Solution:
        """Minimise for a deadline as far as rounding allows; overtime costs `dearer` times it."""
        problem = self._problem
        if not len(problem.width):  # one duration of each unit: nothing to choose
            return Solution(np.empty(0), np.zeros(len(problem.source)), np.zeros(len(problem.tail)))
        edge, last, below, _, _ = problem.pairs
        # A band is too narrow to share: with more than one thread LAPACK takes 10 times as long.
        # Numbers that overflow end the search, at the best point until then.
        with _THREADS.limit(limits=1, user_api="blas"), np.errstate(all="ignore"):
            point = self._minimise(deadline, dearer * self._overtime_cost)
        return Solution(point.slack[below], point.price[edge], point.price[last])

    def _minimise(self, deadline: float, overtime_cost: float) -> Iterate:
        point = self._start(deadline, overtime_cost)
        best, best_gap, since_best = point, np.inf, 0
        for _ in range(_MAX_ITERATIONS):
            residual = self._residual(point, deadline, overtime_cost)
            size = abs(self._cost(point)) + self._problem.can_save
            gap = (point.gap + self._cost_missed(point, residual)) / size
            since_best += 1
            if gap < 0.5 * best_gap:
                best, best_gap, since_best = point, gap, 0
            stuck = any(best_gap <= most and since_best > steps for most, steps in _NO_PROGRESS)
            if best_gap <= _GAP or stuck or not np.isfinite(gap):
                break
            try:
                newton = NewtonStep(self._problem, self._matrix, point, residual)
            except LinAlgError:
                break
            point = self._next(point, newton)
        return best

    def _start(self, deadline: float, overtime_cost: float) -> Iterate:
        problem = self._problem
        segment = _FIRST_STRETCH * problem.width
        stretch = problem.by_node(segment)
        end = problem.ends(stretch + _FIRST_SLACK)
        iteration = float((end[problem.last_node] + problem.tail).max()) + _FIRST_SLACK
        slack = np.concatenate(
            [
                problem.apart(end) - problem.least - stretch[problem.target],
                iteration - problem.tail - end[problem.last_node],
                segment,
                problem.width - segment,
                [max(1.0, deadline - iteration), 1.0],
            ]
        )
        centre = 2.0 * float(np.mean(-self._slope * problem.width)) if len(segment) else 1.0
        price = centre / slack
        price[-2:] = overtime_cost / 2
        return Iterate(slack, price, end, iteration)

    def _cost(self, point: Iterate) -> float:
        """Return the cost in the disturbed program."""
        units = self._problem.fixed_cost + float(self._slope @ point.slack[self._problem.pairs[2]])
        return units + self._problem.waiting_cost * point.iteration

    def _residual(self, point: Iterate, deadline: float, overtime_cost: float) -> Residual:
        problem = self._problem
        edge, last, below, above, ends = problem.pairs
        slack, price = point.slack, point.price
        into = problem.sum_at(problem.target, price[edge])
        node = problem.net(price[edge])
        node[problem.last_node] -= price[last]
        total = float(price[last].sum())
        length = problem.least + problem.by_node(slack[below])[problem.target]
        early_late = [total - problem.waiting_cost, problem.waiting_cost + overtime_cost - total]
        return Residual(
            edge=problem.apart(point.end) - length - slack[edge],
            iteration=deadline + float(SIGN @ slack[ends]) - point.iteration,
            segment=price[below] - price[above] - self._slope - into[problem.segment_node],
            node=node,
            early_late=np.array(early_late) - price[ends],
        )

    def _cost_missed(self, point: Iterate, residual: Residual) -> float:
        """Return by how much the cost may be wrong, to first order."""
        edge, last, below, _, ends = self._problem.pairs
        return (
            float(np.abs(residual.edge) @ point.price[edge])
            + abs(residual.iteration) * float(point.price[last].sum())
            + float(np.abs(residual.segment) @ point.slack[below])
            + float(np.abs(residual.node) @ np.abs(point.end))
            + float(np.abs(residual.early_late) @ point.slack[ends])
        )

    def _next(self, point: Iterate, newton: NewtonStep) -> Iterate:
        """Take one step: first straight for the solution, then with what that one missed."""
        products = point.slack * point.price
        affine = newton.step(-products)
        of_slack, of_price = point.longest_steps(affine)
        reached = (point.slack + of_slack * affine.slack) @ (point.price + of_price * affine.price)
        aim = (reached / point.gap) ** 3 * point.gap / len(products)
        step = newton.step(aim - products - affine.slack * affine.price)
        return point.moved(step, *point.longest_steps(step, _STEP))
