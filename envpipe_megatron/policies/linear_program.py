"""The best durations of a schedule's units for a deadline, as a linear program.

With the convex hull of cost over time of each unit, the cheapest iteration that meets a deadline is
a linear program: one end time a unit, one bounded variable a hull segment, one row a dependency
(the project's facts on planning; the continuous relaxation of Perseus' problem, Chung et al.,
SOSP'24, section 4). HiGHS solves it, and solves it again for another deadline from where it stood.

**Knots.** For very long schedules only some microbatches, the *knots*, get variables; end times and
durations of the others lie on the straight line between their neighbours. A dependency between two
such lines has a slack that is piecewise linear in the microbatch, so it needs a row only where a
line bends or the pattern of the order changes. What comes out is feasible for the whole schedule,
at a cost that is never below the true optimum; with every microbatch a knot it is the optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.choices import Choices
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.timeline import latency_by_node

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class LinearProgramError(EnvPipeError):
    """A deadline that no frequencies meet, or a solver that gave up."""


@dataclass(frozen=True)
class Relaxed:
    """The solution of the linear program.

    Args:
        duration_s: [num_units] duration of each node; between profiled times.
        cost_j: planning cost plus waiting power x iteration time. With every microbatch a knot it
            is the least energy that any durations on the hulls can have.
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
        knots: microbatches with variables of their own, rising, with the first and the last; None
            for all of them.
    """

    def __init__(
        self,
        schedule: Schedule,
        choices: Choices,
        latency_s: float | tuple[float, ...],
        tail_s: FloatArray,
        knots: IntArray | None = None,
    ) -> None:
        self._schedule = schedule
        self._lines = _Lines(schedule, knots)
        self._edges = _edges(schedule, self._lines)
        key = node_keys(schedule)
        fastest_s = np.array([unit.time_s[0] for unit in choices.units])
        # Seconds and joules of any size become numbers around 1, for which tolerances are made.
        self._time_unit_s = float(fastest_s.mean())
        self._cost_unit_j = choices.waiting_power_w * self._time_unit_s or 1.0
        self._fastest = fastest_s[key] / self._time_unit_s
        self._highs: Any = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        latency = np.array(latency_by_node(schedule, latency_s)) / self._time_unit_s
        self._build(choices, key, latency, tail_s / self._time_unit_s)

    def solve(self, deadline_s: float) -> Relaxed:
        """Minimise for a deadline.

        Raises:
            LinearProgramError: no durations meet the deadline, or HiGHS gave up.
        """
        highs = self._highs
        highs.changeColBounds(self._num_columns - 1, 0.0, deadline_s / self._time_unit_s)
        highs.run()
        status = highs.getModelStatus()
        if status != highspy.HighsModelStatus.kOptimal:
            raise LinearProgramError(
                f"No frequencies bring schedule '{self._schedule.name}' to this deadline (s): "
                f"{highs.modelStatusToString(status).lower()}",
                value=deadline_s,
                remedy="Allow more time.",
            )
        solution = highs.getSolution()
        values = np.array(solution.col_value)
        lines, first = self._lines, self._lines.num_knots
        stretched = np.bincount(
            self._segment_knot, values[first:-1], minlength=lines.num_knots
        )  # beyond the fastest, by knot
        duration = self._fastest + lines.interpolate(stretched.astype(np.float64))
        per_second = self._cost_unit_j / self._time_unit_s
        duals = np.maximum(np.array(solution.row_dual), 0.0) * per_second
        same, cross, deadline = self._edges.spread(duals)
        return Relaxed(
            duration * self._time_unit_s,
            float(highs.getObjectiveValue()) * self._cost_unit_j,
            same,
            cross,
            deadline,
        )

    def _build(
        self, choices: Choices, key: IntArray, latency: FloatArray, tail: FloatArray
    ) -> None:
        lines, edges = self._lines, self._edges
        hulls = [(unit.time_s[unit.hull], unit.cost_j[unit.hull]) for unit in choices.units]
        widths = [np.diff(time_s) / self._time_unit_s for time_s, _ in hulls]
        slopes = [
            np.diff(cost_j) / np.diff(time_s) * (self._time_unit_s / self._cost_unit_j)
            for time_s, cost_j in hulls
        ]
        knot_key = key[lines.knot_node]
        segments = np.array([len(width) for width in widths])[knot_key]
        self._segment_knot = np.repeat(np.arange(lines.num_knots), segments)
        first_segment = lines.num_knots + np.concatenate([[0], np.cumsum(segments)])
        weight = lines.weights()
        self._num_columns = int(first_segment[-1]) + 1
        iteration = self._num_columns - 1

        # x_v - x_u - (stretch of v) >= fastest v + latency, for every kept dependency u -> v.
        rows, columns, factors = [], [], []

        def add(row: IntArray, column: IntArray, factor: FloatArray) -> None:
            rows.append(row)
            columns.append(column)
            factors.append(factor)

        num_edges = len(edges.target)
        at = np.arange(num_edges)
        fed = edges.source >= 0
        for knot, share in lines.ends(edges.target):
            add(at, knot, share)
            count = segments[knot]
            row = np.repeat(at, count)
            offset = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
            add(row, np.repeat(first_segment[knot], count) + offset, -np.repeat(share, count))
        for knot, share in lines.ends(edges.source[fed]):
            add(at[fed], knot, -share)
        # iteration - x_last >= tail, for every stage.
        stages = self._schedule.num_stages
        width = self._schedule.units_per_stage
        last_row = num_edges + np.arange(stages)
        for knot, share in lines.ends(np.arange(1, stages + 1) * width - 1):
            add(last_row, knot, -share)
        add(last_row, np.full(stages, iteration), np.ones(stages))

        shape = (num_edges + stages, self._num_columns)
        matrix = coo_matrix(
            (np.concatenate(factors), (np.concatenate(rows), np.concatenate(columns))), shape=shape
        ).tocsr()
        matrix.eliminate_zeros()
        program = highspy.HighsLp()
        program.num_row_, program.num_col_ = shape
        infinity = highspy.kHighsInf
        program.col_cost_ = np.concatenate(
            [
                np.zeros(lines.num_knots),
                *[slopes[k] * w for k, w in zip(knot_key, weight, strict=True)],
                [choices.waiting_power_w * self._time_unit_s / self._cost_unit_j],
            ]
        )
        program.col_lower_ = np.zeros(shape[1])
        program.col_upper_ = np.concatenate(
            [np.full(lines.num_knots, infinity), *[widths[k] for k in knot_key], [infinity]]
        )
        hop = np.where(edges.is_cross, latency[edges.target], 0.0)
        program.row_lower_ = np.concatenate([self._fastest[edges.target] + hop, tail])
        program.row_upper_ = np.full(shape[0], infinity)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = matrix.indptr
        program.a_matrix_.index_ = matrix.indices
        program.a_matrix_.value_ = matrix.data
        fastest_cost = np.array([unit.cost_j[0] for unit in choices.units])
        program.offset_ = float(fastest_cost[key].sum()) / self._cost_unit_j
        self._highs.passModel(program)


def node_keys(schedule: Schedule) -> IntArray:
    """[num_units] the index of each node's stage and kind in `Choices.units`."""
    stages = np.arange(schedule.num_stages, dtype=np.int64)[:, None]
    return (2 * stages + schedule.is_backward).ravel()


class _Lines:
    """Where each node stands between the knots of its stage, kind and chunk."""

    def __init__(self, schedule: Schedule, knots: IntArray | None) -> None:
        microbatches = schedule.num_microbatches
        if knots is None:
            knots = np.arange(microbatches)
        self.knots = knots
        line = (2 * np.arange(schedule.num_stages)[:, None] + schedule.is_backward) * (
            schedule.num_chunks
        ) + schedule.chunks
        self.line: IntArray = line.ravel().astype(np.int64)
        self.microbatch: IntArray = schedule.microbatches.ravel().astype(np.int64)
        self.node_at = np.empty((int(self.line.max()) + 1, microbatches), dtype=np.int64)
        self.node_at[self.line, self.microbatch] = np.arange(schedule.num_units)
        self.knot_node = self.node_at[:, knots].ravel()
        self.num_knots = len(self.knot_node)
        self.is_knot = np.isin(self.microbatch, knots)
        left = np.searchsorted(knots, self.microbatch, side="right") - 1
        right = np.minimum(left + 1, len(knots) - 1)
        gap = np.maximum(knots[right] - knots[left], 1)
        self._share = (self.microbatch - knots[left]) / gap  # of the right knot
        self._left = self.line * len(knots) + left
        self._right = self.line * len(knots) + right

    def ends(self, nodes: IntArray) -> list[tuple[IntArray, FloatArray]]:
        """The two knots of each node and the share that each has in it."""
        share = self._share[nodes]
        return [(self._left[nodes], 1.0 - share), (self._right[nodes], share)]

    def interpolate(self, by_knot: FloatArray) -> FloatArray:
        """[num_units] values on the lines through the knots' values."""
        value: FloatArray = (
            by_knot[self._left] * (1.0 - self._share) + by_knot[self._right] * self._share
        )
        return value

    def weights(self) -> FloatArray:
        """[num_knots] how many nodes each knot stands for."""
        return self._gather(np.arange(len(self.line)), np.ones(len(self.line)))

    def spread(self, nodes: IntArray, values: FloatArray) -> FloatArray:
        """[num_units] values of some nodes, gathered by their knots and given out to all nodes."""
        return self.interpolate(self._gather(nodes, values) / self.weights())

    def _gather(self, nodes: IntArray, values: FloatArray) -> FloatArray:
        total = np.zeros(self.num_knots)
        for knot, share in self.ends(nodes):
            total += np.bincount(knot, share * values, minlength=self.num_knots)
        return total


@dataclass(frozen=True)
class _Edges:
    """The dependencies that have a row.

    Args:
        target: the node that waits.
        source: the node it waits for, or -1 for the start of the iteration.
        is_cross: whether the source is on a neighbour stage.
    """

    target: IntArray
    source: IntArray
    is_cross: NDArray[np.bool_]
    lines: _Lines

    def spread(self, duals: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Row duals as same-stage and cross duals by node, and deadline duals by stage.

        Rows that were left out share in the duals of the knots around them. What the rows of a knot
        receive is what leaves it, so their sums divide a price as the whole schedule would.
        """
        num_edges = len(self.target)
        same, cross = (
            self.lines.spread(self.target[kind], duals[:num_edges][kind])
            for kind in (~self.is_cross, self.is_cross)
        )
        return same, cross, duals[num_edges:]


def _edges(schedule: Schedule, lines: _Lines) -> _Edges:
    """Dependencies that need a row: all, or those where a line bends or the pattern changes."""
    nodes = np.arange(schedule.num_units)
    inside = nodes % schedule.units_per_stage > 0
    before = np.where(inside, nodes - 1, -1)
    cross = schedule.cross_dependency.astype(np.int64)
    # The pattern of a node's same-stage dependency: on which line it lies, how far back.
    pattern = np.where(
        inside,
        lines.line[before] * (2 * schedule.num_microbatches)
        + lines.microbatch
        - lines.microbatch[before],
        -1,
    )
    by_line = pattern[lines.node_at]
    changes = np.zeros(by_line.shape, dtype=bool)
    different = by_line[:, 1:] != by_line[:, :-1]
    changes[:, 1:] |= different
    changes[:, :-1] |= different
    changed = np.zeros(schedule.num_units, dtype=bool)
    changed[lines.node_at] = changes
    same = inside & (lines.is_knot | lines.is_knot[before] | changed)
    fed = (cross >= 0) & lines.is_knot
    started = ~inside & (cross < 0)
    target = np.concatenate([nodes[same], nodes[fed], nodes[started]])
    source = np.concatenate([before[same], cross[fed], np.full(int(started.sum()), -1)])
    is_cross = np.zeros(len(target), dtype=bool)
    is_cross[int(same.sum()) : int(same.sum() + fed.sum())] = True
    return _Edges(target, source, is_cross, lines)
