"""The linear program over durations as arrays, for solvers that know nothing of pipelines.

Every unit ends no sooner than a fixed time after each unit it waits for, plus what it is stretched
by; a stretch is a sum of segments, each bounded and each with a price a second that falls from one
to the next; the iteration ends a tail after the last unit of each stage:

    minimise  sum of slope x segment + waiting cost x iteration
    with      end[target] - end[source] - sum of target's segments >= least   for every dependency
              iteration - end[last unit] >= tail                              for every stage
              0 <= segment <= width,  iteration <= deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray


class SolverError(Exception):
    """A solver ended without a solution; the message says how."""


@dataclass(frozen=True)
class DurationProblem:
    """The program but for its deadline, in units that make its numbers lie around 1.

    Args:
        target: [num_edges] the node that waits.
        source: [num_edges] the node it waits for, or -1 for the start of the iteration.
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

    def by_node(self, by_segment: FloatArray) -> FloatArray:
        """[num_nodes] the sum over each node's segments."""
        total = np.bincount(self.segment_node, by_segment, minlength=self.num_nodes)
        return total.astype(np.float64)


@dataclass(frozen=True)
class Solution:
    """What a solver found, in the problem's units.

    Args:
        segment: [num_segments] how far each is used.
        edge_price: [num_edges] dual of each dependency.
        deadline_price: [num_stages] dual of the end of each stage.
    """

    segment: FloatArray
    edge_price: FloatArray
    deadline_price: FloatArray
