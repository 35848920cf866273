"""Measures how the work of iterations varies, as where sequences differ in length.

Units of all stages take longer together then. Where iterations vary as much among themselves, that
is no change of the GPUs: what units took is divided by it before anything is learnt from it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.tuning.commands import Window

#: The least iterations of one order that show how they vary, and the windows that are kept.
_TELLS, _KEPT = 3, 9
#: Work that differs from 1 by more standard errors than the first is a change of the GPUs; kept
#: windows whose median does by more than the second show that the usual work has changed. What
#: differs by a share less than the third is scatter.
_CHANGED, _GROWN, _LEAST = 9.0, 2.25, 0.005
#: Standard error, as a share, of times that were divided by the work of their window.
_INEXACT = 0.001


class Work:
    """Follows the work of windows, as a multiple of the usual work.

    Attributes:
        now: that of the last window; 1 if it shows no more than scatter, or a change of the GPUs.
    """

    def __init__(self) -> None:
        self.now = 1.0
        #: Of each window: standard errors of one iteration, by its work and by all else, as shares;
        #: and its work.
        self._windows: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def learn(
        self,
        window: Window,
        tail_s: FloatArray,
        measured_s: FloatArray,
        known_s: FloatArray,
        known: BoolArray,
    ) -> float:
        """Take in a window; return the standard error that all its units have in common, a share.

        Heat, hosts and the network make it, and work where `now` does not take that out.

        Args:
            window: what was measured.
            tail_s: of each stage.
            measured_s: what units took, [num_stages, units_per_stage], as all others.
            known_s: what they were known to take.
            known: which of them were measured before, and ran at their clock.
        """
        count = window.num_iterations
        of_stages = zip(measured_s, known_s, known, strict=True)
        stages = [np.median(own_s[of] / was_s[of]) for own_s, was_s, of in of_stages if of.any()]
        # A single stage may have changed by itself.
        work = float(np.median(stages if len(stages) > 1 else 1.0))
        if count >= _TELLS:  # of normal noise medians err by 1.25 standard deviations
            rest = window.own_error(tail_s) * float(np.sqrt(count))
            spread = float(np.median(window.works.std(axis=1, ddof=1)))
            self._windows.append((1.25 * spread, rest, work))
        # Medians: a window in which something changed varies by that, too.
        *errors, usual = np.median(self._windows or [(np.inf, 0.0, 1.0)], axis=0).tolist()
        error, rest = np.array(errors) / np.sqrt(count)
        self.now = work
        if not _LEAST < abs(work - 1) <= _CHANGED * error:
            self.now = 1.0
            return float(np.hypot(error, rest)) if self._windows else 0.0
        if len(self._windows) == _KEPT and abs(usual - 1) > max(_LEAST, _GROWN * error):
            self.now = work / usual  # the rest is learnt, as a change of all units
            self._windows.clear()
        return float(np.hypot(rest, _INEXACT))
