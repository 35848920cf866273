"""How long the framework's own order would take at the highest clocks, as the job is today."""

from __future__ import annotations

from collections import deque

import numpy as np

from envpipe_megatron.control.window import median_error
from envpipe_megatron.core.arrays import FloatArray

#: So many latest steps of a plan, or of the baseline, are kept.
_KEPT_STEPS = 64


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

    def error(self, count: int | None = None) -> float:
        """Standard error of the median of so many steps, by default of all, as a share of it."""
        times_s = np.array(self._times_s)
        deviation_s = float(np.median(np.abs(times_s - np.median(times_s))))
        return median_error(deviation_s / self.median_s, count or len(times_s))


class Baseline:
    """The framework's own order at the highest clocks: measured now and then, predicted between.

    Args:
        steps: what was measured.
        predicted_s: what was known of units then predicts.
    """

    def __init__(self, steps: Steps, predicted_s: float) -> None:
        self._steps = steps
        self._predicted_s = predicted_s

    def today_s(self, predicted_s: float) -> float:
        """What it would take now, if what is known of units today predicts so much."""
        return self._steps.median_s * predicted_s / self._predicted_s

    def error(self, others: Steps) -> float:
        """Standard error, as a share: of few steps no less than others of the job would tell."""
        return max(self._steps.error(), others.error(len(self._steps)))
