"""What repeats of a measurement say where some of them were held up.

A host that others use, too, starts kernels more slowly for half a second to a second at times.
What waits for the host is then longer, by 40 % to twofold, and never shorter: repeats that are
seconds apart tell one from the other.
"""

from __future__ import annotations

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray

#: Work of a GPU varies by less from repeat to repeat, with its clock.
_HELD_UP = 1.05


def not_held_up(times_s: FloatArray) -> BoolArray:
    """[num_repeats] which repeats took about as long as the shortest."""
    kept: BoolArray = times_s <= _HELD_UP * times_s.min()
    return kept


def undisturbed_s(times_s: FloatArray) -> float:
    """The median of the repeats that were not held up."""
    return float(np.median(times_s[not_held_up(times_s)]))
