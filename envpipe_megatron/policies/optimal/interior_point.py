"""The linear program over durations by an interior-point method, for pipelines of any size.

Mehrotra's predictor-corrector method (SIAM J. Optim. 2(4), 1992) on the structure of a pipeline:
the matrix of a step is a narrow band (`newton_step`), which LAPACK factors in a fraction of a
second, where general solvers take minutes.

The deadline may be overrun at a price that no solution would pay, so that an interior exists even
at the fastest possible time. And slopes are disturbed by at most `_DISTURBANCE`, differently for
each unit, so that of many equally good solutions one is met where few units lie between profiled
times, which rounding needs.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import LinAlgError
from threadpoolctl import threadpool_limits

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.policies.optimal.duration_problem import (
    DurationProblem,
    Solution,
    SolverError,
)
from envpipe_megatron.policies.optimal.newton_step import (
    ABOVE,
    BELOW,
    EARLY_LATE,
    EDGE,
    LAST,
    BandMatrix,
    NewtonStep,
    Point,
    Residual,
    source_end,
    sum_at,
    sum_at_source,
)

#: Solved when the duality gap is this fraction of the cost.
_GAP = 1e-9
#: A larger gap than this at the end is no solution.
_MAX_GAP = 1e-5
_MAX_ITERATIONS = 150
#: Later than the deadline by this fraction is in time.
_LATE = 1e-6
#: Slopes change by up to this fraction, up or down.
_DISTURBANCE = 5e-4
#: Steps go this far towards the boundary.
_STEP = 0.99
#: At the start: stretch as a fraction of its width, and slack of each dependency.
_FIRST_STRETCH, _FIRST_SLACK = 0.1, 0.05


class InteriorPoint:
    """One problem, ready to be solved for any number of deadlines; `near` is as of `BandMatrix`."""

    def __init__(self, problem: DurationProblem, near: IntArray) -> None:
        self._problem = problem
        self._matrix = BandMatrix(problem, near)
        low, high = 1 - _DISTURBANCE, 1 + _DISTURBANCE
        disturbed = np.random.default_rng(0).uniform(low, high, problem.num_nodes)
        self._slope = problem.slope * disturbed[problem.segment_node]
        # Nearly always more than any solution would pay for a second; if not, it is raised.
        self._overtime_cost = len(problem.tail) * float(1 + np.max(-self._slope, initial=0.0))

    def solve(self, deadline: float) -> Solution:
        """Minimise for a deadline; SolverError if the method came to no end."""
        # A band is too narrow to share: with more than one thread LAPACK takes 10 times as long.
        # Numbers that overflow end as a gap that is too large, which is reported below.
        with threadpool_limits(limits=1, user_api="blas"), np.errstate(all="ignore"):
            point = self._solve(deadline)
        return Solution(point.slack[BELOW], point.price[EDGE], point.price[LAST])

    def _solve(self, deadline: float) -> Point:
        for dearer in (1.0, 10.0, 100.0, 1000.0):
            point = self._minimise(deadline, dearer * self._overtime_cost)
            if point.slack[EARLY_LATE][1] <= _LATE * deadline:
                return point
        raise SolverError("the interior-point method stayed behind the deadline")

    def _minimise(self, deadline: float, overtime_cost: float) -> Point:
        point = self._start(deadline, overtime_cost)
        best, best_gap, since_best = point, np.inf, 0
        for _ in range(_MAX_ITERATIONS):
            residual = self._residual(point, deadline, overtime_cost)
            gap = (point.gap + residual.cost(point)) / abs(self._cost(point))
            if gap < 0.5 * best_gap:
                best, best_gap, since_best = point, gap, 0
            since_best += 1
            # Rounding errors end the progress of badly conditioned problems a little earlier.
            if best_gap <= _GAP or (best_gap <= _MAX_GAP and since_best > 6):
                break
            try:
                newton = NewtonStep(self._problem, self._matrix, point, residual)
            except LinAlgError:
                break
            point = self._next(point, newton)
        if not best_gap <= _MAX_GAP:
            raise SolverError(f"the interior-point method stopped at a gap of {best_gap:.1e}")
        return best

    def _start(self, deadline: float, overtime_cost: float) -> Point:
        problem = self._problem
        segment = _FIRST_STRETCH * problem.width
        stretch = problem.by_node(segment)
        length = problem.least + stretch[problem.target]
        end = problem.ends(stretch + _FIRST_SLACK)
        iteration = float((end[problem.last_node] + problem.tail).max()) + _FIRST_SLACK
        slack = [
            end[problem.target] - source_end(problem, end) - length,
            iteration - problem.tail - end[problem.last_node],
            segment,
            problem.width - segment,
            np.array([max(1.0, deadline - iteration), 1.0]),
        ]
        centre = 2.0 * float(np.mean(-self._slope * problem.width)) if len(segment) else 1.0
        price = [centre / s for s in slack[:4]]
        return Point(slack, [*price, np.full(2, overtime_cost / 2)], end, iteration)

    def _cost(self, point: Point) -> float:
        """Cost in the disturbed program."""
        units = self._problem.fixed_cost + float(self._slope @ point.slack[BELOW])
        return units + self._problem.waiting_cost * point.iteration

    def _residual(self, point: Point, deadline: float, overtime_cost: float) -> Residual:
        """By how much each equation is missed."""
        problem = self._problem
        slack, price = point.slack, point.price
        into = sum_at(problem, problem.target, price[EDGE])
        out_of = sum_at_source(problem, price[EDGE])
        out_of[problem.last_node] += price[LAST]
        total = float(price[LAST].sum())
        length = problem.least + problem.by_node(slack[BELOW])[problem.target]
        early, late = slack[EARLY_LATE]
        return Residual(
            edge=point.end[problem.target] - source_end(problem, point.end) - length - slack[EDGE],
            iteration=deadline - early + late - point.iteration,
            segment=price[BELOW] - price[ABOVE] - self._slope - into[problem.segment_node],
            node=into - out_of,
            early_late=np.array(
                [
                    total - problem.waiting_cost - price[EARLY_LATE][0],
                    problem.waiting_cost + overtime_cost - total - price[EARLY_LATE][1],
                ]
            ),
        )

    def _next(self, point: Point, newton: NewtonStep) -> Point:
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
