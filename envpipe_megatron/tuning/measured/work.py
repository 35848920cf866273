"""By how much the work of iterations differs, as that of sequences of other lengths.

Units of all stages take longer then, at all clocks that were measured before. As long as iterations
differ as much by themselves, that is no change of the GPUs, and nothing is learnt from it.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.tuning.commands import Window

#: Iterations of one order that show how they differ as a whole, and windows that are kept.
_TELLS, _KEPT = 3, 9
#: More standard errors of the work of one window are a change of the GPUs, and of that of many one
#: of the usual work. A smaller share is scatter.
_CHANGED, _GROWN, _LEAST = 9.0, 2.25, 0.005
#: Standard error, as a share, of what units would take at the usual work.
_INEXACT = 0.001


class Work:
    """The work of windows, as a multiple of the usual one.

    Attributes:
        now: of the last window.
        grown: how many times as much the usual one has become with it.
    """

    def __init__(self) -> None:
        self.now = self.grown = 1.0
        #: Of an iteration, the standard errors of its work and of the rest; the work of a window.
        self._windows: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def learn(
        self,
        window: Window,
        tail_s: FloatArray,
        measured_s: FloatArray,
        known_s: FloatArray,
        known: BoolArray,
    ) -> float:
        """Take in a window; by which share all its units may still be off together.

        That is what heat, hosts and the network do.

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
        # A stage by itself says nothing of the others.
        work = float(np.median(stages if len(stages) > 1 else 1.0))
        if count >= _TELLS:  # of normal noise medians err by 1.25 standard deviations
            rest = window.own_error(tail_s) * float(np.sqrt(count))
            spread = float(np.median(window.works.std(axis=1, ddof=1)))
            self._windows.append((1.25 * spread, rest, work))
        # A window in which something changed differs in itself, and shows nothing.
        *errors, usual = np.median(self._windows or [(np.inf, 0.0, 1.0)], axis=0).tolist()
        error, rest = np.array(errors) / np.sqrt(count)
        self.now, self.grown = work, 1.0
        if not _LEAST < abs(work - 1) <= _CHANGED * error:
            self.now = 1.0
            return float(np.hypot(error, rest)) if self._windows else 0.0
        if len(self._windows) == _KEPT and abs(usual - 1) > max(_LEAST, _GROWN * error):
            self.now, self.grown = work / usual, usual
            self._windows.clear()
        return float(np.hypot(rest, _INEXACT))
