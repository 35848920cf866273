"""The tail of an iteration: what a stage does after its last unit (gradients, optimizer, data)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from envpipe_megatron.core.arrays import FloatArray


def tail_times_s(ends_s: ArrayLike, gaps_s: ArrayLike) -> FloatArray:
    """The tail of each stage, s: the median over iterations.

    A planner wants tails that make an iteration as long as it is: the latest of (end of a stage's
    last unit + its tail). A stage's gap until its next iteration holds its tail and, where stages
    synchronise at the end of an iteration (norm of all gradients, a barrier), its wait for the
    slowest stage. That wait is the *slack*: the latest end of all stages less its own. So the tail
    is gap - slack if the gap is as long as the slack. A shorter gap proves that the stage did
    not wait for the slowest one: it is the tail itself.

    The slowest stage has no slack, so its end and gap give the whole iteration either way. Of the
    others, what they do within their slack cannot be told from waiting, and does not lengthen the
    iteration. Ends are compared after each stage's own begin: nodes share no clock, and where
    stages synchronise they begin together.

    Both arguments are [num_stages, iterations], as ranks measure them; the result [num_stages].
    """
    end, gap = np.asarray(ends_s), np.asarray(gaps_s)
    slack = end.max(axis=0) - end
    # Clocks of host and GPU differ by microseconds: an emulated gap is its slack but for rounding.
    waited = gap >= slack - 1e-9
    tails: FloatArray = np.median(np.where(waited, gap - slack, gap), axis=1)
    return np.maximum(tails, 0.0)
