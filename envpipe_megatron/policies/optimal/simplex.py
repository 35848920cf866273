"""The linear program over durations by HiGHS' simplex, for pipelines of moderate size.

Its solutions are vertices: few units lie between profiled times, so rounding loses least. And it
solves for another deadline from where it stood, which a frontier needs.
"""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np
from scipy.sparse import coo_matrix

from envpipe_megatron.policies.optimal.duration_problem import (
    DurationProblem,
    Solution,
    SolverError,
)


class _SilentHighs(highspy.Highs):  # type: ignore[misc]  # it has no types
    """HiGHS without output; from 1.16 on it names itself while it is made, in this call."""

    def enableCallbacks(self) -> None:  # noqa: N802 - as HiGHS calls it
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()


class Simplex:
    """One problem, ready to be solved for any number of deadlines."""

    def __init__(self, problem: DurationProblem) -> None:
        self._problem = problem
        self._highs: Any = _SilentHighs()
        self._highs.passModel(_model(problem))

    def solve(self, deadline: float) -> Solution:
        """Minimise for a deadline; SolverError if no durations meet it, or HiGHS gave up."""
        highs, problem = self._highs, self._problem
        iteration = problem.num_nodes + len(problem.width)
        highs.changeColBounds(iteration, 0.0, deadline)
        highs.run()
        status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise SolverError(highs.modelStatusToString(status).lower())
        solution = highs.getSolution()
        prices = np.maximum(np.array(solution.row_dual), 0.0)
        return Solution(
            np.array(solution.col_value)[problem.num_nodes : iteration],
            prices[: len(problem.target)],
            prices[len(problem.target) :],
        )


def _model(problem: DurationProblem) -> highspy.HighsLp:
    """Columns: ends of nodes, segments, the iteration. Rows: dependencies, ends of stages."""
    num_edges, num_nodes = len(problem.target), problem.num_nodes
    num_segments, num_stages = len(problem.width), len(problem.tail)
    edge, iteration = np.arange(num_edges), num_nodes + num_segments
    fed = problem.source >= 0
    segments = np.bincount(problem.segment_node, minlength=num_nodes)
    count = segments[problem.target]
    segment_row = np.repeat(edge, count)
    offset = np.arange(len(segment_row)) - np.repeat(np.cumsum(count) - count, count)
    first = num_nodes + np.cumsum(segments) - segments
    stage_row = num_edges + np.arange(num_stages)
    entries = (
        (edge, problem.target, 1.0),
        (edge[fed], problem.source[fed], -1.0),
        (segment_row, np.repeat(first[problem.target], count) + offset, -1.0),
        (stage_row, problem.last_node, -1.0),
        (stage_row, np.full(num_stages, iteration), 1.0),
    )
    rows, columns, factors = zip(
        *((row, column, np.full(len(row), factor)) for row, column, factor in entries), strict=True
    )
    shape = (num_edges + num_stages, iteration + 1)
    matrix = coo_matrix(
        (np.concatenate(factors), (np.concatenate(rows), np.concatenate(columns))), shape=shape
    ).tocsr()
    infinity = highspy.kHighsInf
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = shape
    model.col_cost_ = np.concatenate([np.zeros(num_nodes), problem.slope, [problem.waiting_cost]])
    model.col_lower_ = np.zeros(shape[1])
    model.col_upper_ = np.concatenate([np.full(num_nodes, infinity), problem.width, [infinity]])
    model.row_lower_ = np.concatenate([problem.least, problem.tail])
    model.row_upper_ = np.full(shape[0], infinity)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    return model
