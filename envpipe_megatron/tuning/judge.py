"""Sees whether something has changed, and whether steps last longer than they may.

`Judge` holds the steps of a plan against what the framework's own order would take today, and adds
up for the bill what too slow ones cost. `Due` counts when to look again, `Silence` is what the log
must say of meters.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.tuning.commands import Window, median_error

#: Iterations after which ranks report: with one to settle, a fault is seen within ten. With eight,
#: a job whose plans are late saves 4.8 points less.
WINDOW = 4
#: This many latest steps of a plan are kept, and of the baseline: a pause in one moves no median.
_KEPT_STEPS, _KEPT_BASELINE = 64, 16
#: A counter that was not seen for so long is silent, s: thirty of its refreshes.
SILENT_S = 3.0
#: A stage whose units have changed by more than this share is not the one that was looked at: its
#: clock follows no more, or again. Without it a job whose clock is stuck loses 3.2 iterations.
#: But where all stages changed as much, within the second share, it is the work that has: without
#: that a job whose sequences become short again saves 2 points less.
_FAR, _ALIKE = 0.1, 0.05
#: A gain of less time than this share is none, however little steps scatter.
_LEAST_GAIN = 1e-3
#: Plans are made faster than what is asked by this share at most. Without it a job that splits
#: backwards, and in which some unit waits for what nobody explains, saves 10 points less.
_MOST_FASTER = 0.02
#: Iterations of the framework's order at the highest clocks, and of others between two of these:
#: they cost less than a hundredth of what is saved.
BASELINE_ITERATIONS, BASELINE_EVERY = 3, 500
#: Windows until a few units run at the highest clock, if no others do: the first number, and twice
#: as many each time that nothing has changed, up to the second. Without such looks, iterations of
#: a job whose power cap has ended are 9.5 % too long until the next baseline; with the second
#: number only, for up to 33 iterations.
_LOOKS_AT_TOP, _SELDOM = 2, 8
#: Most windows until planning that failed is tried again.
_LATEST = 1024


def drifted_far(drift: FloatArray) -> BoolArray:
    """Return which stages drifted so far that clocks mean something else there, [num_stages]."""
    return np.asarray((np.abs(drift) > _FAR) & (np.ptp(drift) > _ALIKE))


def larger(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return the larger of two drifts of each stage, [num_stages]."""
    return np.where(np.abs(one) > np.abs(other), one, other)


def what_drifted(drift: FloatArray, window: Window) -> str:
    """Say which change may have made steps longer; `drift` is as `Store.learn` has it."""
    stage = int(np.abs(drift).argmax())
    text = f"stage {stage}'s units take {100 * drift[stage]:+.1f} %"
    if not drift.any():
        text = "steps last longer than they may, and no stage's units say why"
    return "; ".join([text, *window.problems])


class Steps:
    """Times of the steps that ran one order at the same clocks, the latest of them, in s."""

    def __init__(self, kept: int = _KEPT_STEPS) -> None:
        self._times_s: deque[float] = deque(maxlen=kept)

    def add(self, times_s: FloatArray) -> None:
        """Add those of a window."""
        self._times_s.extend(times_s.tolist())

    def __len__(self) -> int:
        return len(self._times_s)

    @property
    def median_s(self) -> float:
        """Return their median: a pause between two steps, or a hiccup, moves no median."""
        return float(np.median(self._times_s))

    def error(self, count: int) -> float:
        """Return the standard error of the median of `count` steps, as a share of that median."""
        times_s = np.array(self._times_s)
        deviation_s = float(np.median(np.abs(times_s - np.median(times_s))))
        return median_error(deviation_s / self.median_s, count)


class Judge:
    """Sees whether steps of a plan last longer than they may, by more than noise.

    Of each step of the framework's own order is kept how it compares with what was predicted when
    it ran, so that steps from before and after a change can be compared.
    Where only what was measured counts, the framework's own order is predicted to take 1 s.

    Attributes:
        allowed: how many times as long as the framework's own order they may last.
        faster: by which share plans are to be made faster than what is asked, for they turned out
            slower.
        latest_s: steps of a plan that were added last.
    """

    def __init__(self, allowed: float) -> None:
        self.allowed = allowed
        self._baseline = Steps(_KEPT_BASELINE)
        #: Since the plan that runs was swapped in.
        self._steps = Steps()
        self.latest_s: FloatArray = np.zeros(1)
        self.faster = 0.0
        #: Steps that lasted longer than they may, by how much, s, and the longest's share.
        self._harm = 0, 0.0, 0.0

    @property
    def begins(self) -> bool:
        """True before the first window of a plan, or after something has changed."""
        return not len(self._steps)

    def begin(self) -> None:
        """Forget the steps so far: another plan runs, or the same one elsewhere."""
        self._steps = Steps()

    def add_baseline(self, steps_s: FloatArray, predicted_s: float, *, anew: bool = False) -> None:
        """Take in the framework's own order; `anew`: what it took before does not count."""
        if anew:
            self._baseline = Steps(_KEPT_BASELINE)
        self._baseline.add(steps_s / predicted_s)

    def add(self, steps_s: FloatArray) -> None:
        """Take in steps of a window of a plan."""
        self._steps.add(steps_s)
        self.latest_s = steps_s

    def _own_s(self, predicted_s: float) -> float:
        """Return the time of the framework's own order today, if what is known predicts so much."""
        return self._baseline.median_s * predicted_s

    @property
    def _own_error(self) -> float:
        """Return its standard error, as a share: of few steps, no less than other steps show."""
        count = len(self._baseline)
        return max(self._baseline.error(count), self._steps.error(count))

    def late(self, own_s: float) -> float:
        """Return by which share the latest steps are longer than the framework's order today.

        Args:
            own_s: what is predicted of that, by what is known of units.
        """
        return float(np.median(self.latest_s)) / self._own_s(own_s) - 1

    def harmed(self, own_s: float) -> bool:
        """True if steps last longer than they may; `own_s` as for `late`."""
        allowed_s = self._own_s(own_s) * self.allowed
        steps, latest_s = self._steps, float(np.median(self.latest_s))
        for median_s, count in ((latest_s, WINDOW), (steps.median_s, len(steps))):
            noise = 2 * float(np.hypot(steps.error(count), self._own_error))
            if median_s > allowed_s * (1 + noise):
                return True
        return False

    def gain(self) -> float:
        """Return by which share steps are shorter than those of the framework's own order were."""
        return 1 - self._steps.median_s / self._own_s(1.0)

    def gains(self) -> bool:
        """True if that is more than noise."""
        # Few steps may seem to scatter less than they do: no less than the baseline's.
        error = self._own_error * float(np.sqrt(1 + len(self._baseline) / len(self._steps)))
        return self.gain() > max(_LEAST_GAIN, 2 * error)

    def blame(self, steps_s: FloatArray, own_s: float, error: float, why: str) -> str:
        """Take in harm; what the bill says.

        Args:
            steps_s: `latest_s` of then; `own_s` as for `late`.
            error: by which share it lasted longer than what its units took explains.
            why: what is known of it.
        """
        self.faster = min(_MOST_FASTER, self.faster + max(0.0, error))
        allowed_s = self._own_s(own_s) * self.allowed
        steps, lost_s, worst = self._harm
        lost_s += max(float((steps_s - allowed_s).sum()), 0.0)
        worst = max(worst, float(steps_s.max()) / allowed_s - 1)
        steps, *_ = self._harm = steps + len(steps_s), lost_s, worst
        return (
            f"Too slow: {steps} steps took {lost_s:.2g} s longer in all than they may, one "
            f"{100 * worst:.1f} % longer, until the framework's order ran at the highest clocks. "
            f"The last time: {why}"
        )

    def ease(self) -> bool:
        """Give back what plans were made faster by; True if there was any.

        It may have been for a change of the GPUs that is over.
        """
        eased, self.faster = self.faster > 0, 0.0
        return eased


class Due:
    """Counts when looks at the highest clock, baselines and new plans are due, in windows.

    Attributes:
        windows: how many windows of plans have passed.
        baseline_at: how many had passed at the last baseline.
        failures: how often planning has failed, or ranks had no memory, since a plan led.
        plan_at: the window after which the best plan is made again; infinite for never.
        far: whether stages that drifted far are to be looked at before.
    """

    def __init__(self) -> None:
        self.windows = self.baseline_at = self.failures = 0
        self.plan_at, self.far = math.inf, False
        self._every, self._look_at = _LOOKS_AT_TOP, _LOOKS_AT_TOP

    @property
    def baseline(self) -> bool:
        """True if a baseline is due."""
        return WINDOW * (self.windows - self.baseline_at) >= BASELINE_EVERY

    @property
    def look(self) -> bool:
        """True if a look at the highest clock is due."""
        return self.windows >= self._look_at

    @property
    def plan(self) -> bool:
        """True if the best plan is due to be made again."""
        return self.windows >= self.plan_at

    def looked(self, *, calm: bool) -> None:
        """Have the next look later than this one was, if all is as before."""
        self._every = min(2 * self._every, _SELDOM) if calm else _LOOKS_AT_TOP
        self._look_at = self.windows + self._every

    def plan_again(self, *, far: bool = False) -> None:
        """Have the best plan made again: now, or when the one that is being made is there."""
        self.plan_at = self.windows
        self.far |= far

    def failed(self) -> None:
        """Have the best plan made again, each time later."""
        self.failures += 1
        self.plan_at = self.windows + min(2**self.failures, _LATEST)


class Silence:
    """Stages whose energy counters say nothing any more."""

    def __init__(self, num_stages: int) -> None:
        self._unseen_s: FloatArray = np.zeros(num_stages)

    def add(self, window: Window) -> list[str]:
        """Take in a window; what is new, in words."""
        silent = self._unseen_s >= SILENT_S
        seen = np.array([report.metered for report in window.stages])
        self._unseen_s = np.where(seen, 0.0, self._unseen_s + window.steps_s.sum())
        changes = {
            "say nothing: what they said before counts on": (self._unseen_s >= SILENT_S) & ~silent,
            "are back": silent & seen,
        }
        return [
            f"energy counters of stage {', '.join(map(str, np.flatnonzero(of)))} {what}"
            for what, of in changes.items()
            if of.any()
        ]
