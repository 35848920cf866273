"""Which microbatches of a very long schedule get variables of their own.

With all of them the linear program over durations is exact. Beyond some size it takes minutes, and
little is lost when only some, the knots, have variables and the others lie between them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.schedule import Schedule

#: Above this many units only some microbatches get variables of their own.
_MAX_EXACT_UNITS = 20_000
#: How fast knots grow apart between fill and drain.
_KNOT_GROWTH = 1.2


def choose_knots(schedule: Schedule) -> NDArray[np.int64] | None:
    """Every microbatch of fill and drain, and ever fewer towards the middle; None for all."""
    if schedule.num_units <= _MAX_EXACT_UNITS:
        return None
    dense = max(schedule.warmup_forwards) + 1
    half = [float(m) for m in range(dense)]
    step = 1.0
    while half[-1] < schedule.num_microbatches / 2:
        step *= _KNOT_GROWTH
        half.append(half[-1] + step)
    left = np.array(half, dtype=np.int64)
    left = left[left < schedule.num_microbatches]
    return np.union1d(left, schedule.num_microbatches - 1 - left)
