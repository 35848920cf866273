"""What a stage measures of its tail, after its last unit; see `control.window.tail_times_s`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.runtime.execution.executor import StageRecord


def ends_and_gaps_s(records: Sequence[StageRecord]) -> tuple[FloatArray, FloatArray]:
    """One stage's measurements of its tails, from iterations that followed each other.

    For each iteration but the last: the end of its last unit after its own begin, in s, and the
    time from there to the begin of the next iteration, in s.
    """
    ends_s = [float(record.end_s[-1]) for record in records[:-1]]
    gaps_s = [
        after.begin_s - (before.begin_s + before.end_s[-1]) for before, after in pairwise(records)
    ]
    return np.array(ends_s), np.array(gaps_s)
