"""How a job's steps compare: with the framework's own order today, with what they may take.

`Harm` and `Silence` are what its bill and log must say: too slow steps, and silent meters.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.tuning.commands import Window, median_error

#: So many latest steps of a plan are kept, and of the baseline.
_KEPT_STEPS, _KEPT_BASELINE = 64, 16
#: A counter that was not seen for so long is silent, s: thirty of its refreshes.
_SILENT_S = 3.0


class Steps:
    """Times of the steps that ran one order at the same clocks, the latest of them, in s."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_KEPT_STEPS)

    def add(self, times_s: FloatArray) -> None:
        """Add those of a window."""
        self._times_s.extend(times_s.tolist())

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def median_s(self) -> float:
        """Their median: a pause between two steps, or a hiccup, moves no median."""
        return float(np.median(self._times_s))

    def error(self, count: int) -> float:
        """Standard error of the median of so many steps, as a share of it."""
        times_s = np.array(self._times_s)
        deviation_s = float(np.median(np.abs(times_s - np.median(times_s))))
        return median_error(deviation_s / self.median_s, count)


class Baseline:
    """The framework's own order at the highest clocks: measured now and then, predicted between.

    Of each step is kept how it compares with what was predicted when it ran, so that steps from
    before and after a change tell the same.
    """

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_KEPT_BASELINE)

    def add(self, steps_s: FloatArray, predicted_s: float) -> None:
        """Add steps, of which so much was predicted by what was known then."""
        self._ratios.extend((steps_s / predicted_s).tolist())

    def today_s(self, predicted_s: float) -> float:
        """Return what it would take now, if what is known of units today predicts so much."""
        return float(np.median(self._ratios)) * predicted_s

    def error(self, others: Steps) -> float:
        """Standard error, as a share: of few steps no less than others of the job would tell."""
        ratios = np.array(self._ratios)
        middle = np.median(ratios)
        deviation = float(np.median(np.abs(ratios / middle - 1)))
        return max(median_error(deviation, len(ratios)), others.error(len(ratios)))


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
