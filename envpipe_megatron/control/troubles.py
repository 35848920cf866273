"""What a job's bill and log must say of its loop: steps that were too slow, and silent meters."""

from __future__ import annotations

import numpy as np

from envpipe_megatron.control.window import Window
from envpipe_megatron.core.arrays import FloatArray

#: A counter that was not seen for so long is silent, s: thirty of its refreshes.
_SILENT_S = 3.0


class Harm:
    """How long steps lasted longer than they may, as the bill has it."""

    def __init__(self) -> None:
        self._steps, self._lost_s, self._worst = 0, 0.0, 0.0

    def add(self, window: Window, own_s: float, why: str) -> str:
        """Take in a window of the plan that was too slow; all there was so far, in words.

        Args:
            window: what was measured.
            own_s: what the framework's own order would take at the highest clocks.
            why: what is known of it.
        """
        steps_s = window.steps_s
        self._steps += len(steps_s)
        self._lost_s += max(float((steps_s - own_s).sum()), 0.0)
        self._worst = max(self._worst, float(steps_s.max()) / own_s - 1)
        return (
            f"Too slow: {self._steps} steps took {self._lost_s:.2g} s longer in all than in the "
            f"framework's order at the highest clocks, one {100 * self._worst:.1f} % longer, until "
            f"these were asked for. The last time: {why}"
        )


class Silence:
    """Stages whose energy counters say nothing any more."""

    def __init__(self, num_stages: int) -> None:
        self._unseen_s: FloatArray = np.zeros(num_stages)

    def add(self, window: Window) -> list[str]:
        """Take in a window; what is new, in words."""
        silent = self._unseen_s >= _SILENT_S
        seen = np.array([report.metered > 0 for report in window.stages])
        self._unseen_s = np.where(seen, 0.0, self._unseen_s + window.steps_s.sum())
        changes = {
            "say nothing: what they said before counts on": (self._unseen_s >= _SILENT_S) & ~silent,
            "are back": silent & seen,
        }
        return [
            f"energy counters of stage {', '.join(map(str, np.flatnonzero(of)))} {what}"
            for what, of in changes.items()
            if of.any()
        ]
