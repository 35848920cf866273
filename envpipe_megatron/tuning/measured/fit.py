"""Fits the times of units: how time follows the clock, and how late a change of it is.

Time follows the clock by a model with few parameters, fitted to few measurements: a unit takes
`a + b / g`, where `g` is the clock that the GPU reaches: the one that is asked for, up to the clock
where a power limit holds it. On published profiles of A100 and A40, five clocks give all others to
0.5 % in time in the mean.

Units of one kind and clock scatter, on an H200 by some 1.5 %. So a measurement (`Point`) counts by
how many units it is the mean of: one that agrees with what was known, within what such scatter
explains, is averaged with it; one that does not is a change, and replaces it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.core.timeline import Timeline

#: Limits that are tried, as shares of the highest clock. Without them a job with scatter whose
#: clock is stuck loses 0.8 iterations more.
_LIMITS = np.linspace(1.0, 0.6, 41)
#: A lower limit must explain the times better by this, or the higher one stays. Without it the same
#: job loses 3.0 iterations more.
_CLEARLY_BETTER = 1e-4
#: This many standard errors are no scatter: there are some hundred comparisons in each window.
#: With two, a job with scatter whose clock is stuck saves 1.1 points less.
_SURELY = 4.5
#: Ratios to what was known that differ by less are alike at any scatter.
_ALIKE = 0.005
#: A point never counts for more units: after weeks, what is measured still moves it. What is known
#: of scatter counts this much less with each measurement.
_MOST_UNITS, _FADES = 400.0, 0.98
#: From the median of absolute deviations to a standard deviation.
_FROM_MEDIAN = 1.4826
#: Error of what does not scatter.
_EXACT = 1e-9
#: Half-way between two measured clocks a tenth apart, and per tenth beyond them, by how much a
#: model may err: the mean error on published profiles, and twice that. Without both, counters that
#: refresh each second cost 0.4 points.
_ERRS_BETWEEN, _ERRS_BEYOND = 0.005, 0.02
#: No unit takes less, s: CUDA's events tell no more, and ratios need some time.
_LEAST_S = 1e-6
#: How late a change of clock is taken to be until one was seen, s. With 0, uneven stages save 11
#: points less.
_LATE_S = 0.01
#: Units that start this many times later than changes are late ran at their own clock.
_LATER = 2.0
#: Times at two clocks must differ by this share for a late change to be seen between them.
_TELLING = 0.05
#: The median of this many units that show how late it is, the latest ones, counts.
_KEPT_LATE = 64


def fit_times_s(
    clocks_mhz: FloatArray,
    measured_mhz: Sequence[float],
    measured_s: Sequence[float],
    trust: FloatArray | None = None,
) -> tuple[FloatArray, float]:
    """Return times at some clocks from measured ones, and the clock that no GPU exceeds, MHz.

    They equal the measured ones where both have a clock and these are trusted. Between measured
    clocks, what the model misses there is interpolated; beyond them it is kept.

    Args:
        clocks_mhz: ascending.
        measured_mhz: ascending, one at least; with a single one, all of the time follows the clock.
        measured_s: in the same order.
        trust: of each, from 0 to 1, by default in full: of the one the model's error is known, of
            the other nothing but scatter.
    """
    known_mhz, known_s = np.array(measured_mhz, dtype=float), np.array(measured_s)
    trust = np.ones_like(known_s) if trust is None else trust
    limit_mhz, terms = _fit_time(known_mhz, known_s, trust)

    def model_s(at_mhz: FloatArray) -> FloatArray:
        return np.asarray(terms[0] + terms[1] / np.minimum(at_mhz, limit_mhz))

    missed = trust**2 * (known_s / model_s(known_mhz) - 1)
    return model_s(clocks_mhz) * (1 + np.interp(clocks_mhz, known_mhz, missed)), limit_mhz


def _fit_time(
    known_mhz: FloatArray, known_s: FloatArray, trust: FloatArray
) -> tuple[float, FloatArray]:
    top_mhz = known_mhz[-1]
    if len(known_mhz) == 1:
        return float(top_mhz), np.array([0.0, known_s[0] * top_mhz])
    limits_mhz = _LIMITS * top_mhz
    constant = trust / known_s
    slowed = constant * top_mhz / np.minimum(known_mhz, limits_mhz[:, None])
    terms, errors = _two_terms(constant, slowed, trust)
    best = 0
    for at, error in enumerate(errors.tolist()):
        if error < errors[best] - _CLEARLY_BETTER:
            best = at
    return float(limits_mhz[best]), terms[best] * [1, top_mhz]


def _two_terms(
    first: FloatArray, second: FloatArray, wanted: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return terms of least squares, none below zero, [fits, 2], and their errors, [fits].

    All fits have the first column, [rows]; each has a second of its own, [fits, rows].
    """
    aa, ab, bb = first @ first, second @ first, (second**2).sum(axis=1)
    aw, bw = first @ wanted, second @ wanted
    none = np.zeros_like(bb)
    with np.errstate(divide="ignore", invalid="ignore"):  # where both columns are alike
        both = np.stack([bb * aw - ab * bw, aa * bw - ab * aw]) / (aa * bb - ab**2)
        choices = np.stack([both, [none + aw / aa, none], [none, bw / bb]])
        missed = choices[:, 0, :, None] * first + choices[:, 1, :, None] * second - wanted
        errors = np.linalg.norm(missed, axis=2)
    errors[~(choices >= 0).all(axis=1)] = np.inf  # nor what is no number
    best, fits = errors.argmin(axis=0), np.arange(len(bb))
    return choices[best, :, fits], errors[best, fits]


@dataclass(frozen=True)
class Point:
    """A time in s, and how many units it is the mean of."""

    time_s: float
    units: float

    def moved(self, ratio: float) -> Point:
        """Return the same units, all of which take `ratio` times as long."""
        return Point(ratio * self.time_s, self.units)

    def averaged(self, other: Point) -> Point:
        """Return both together."""
        units = self.units + other.units
        time_s = (self.units * self.time_s + other.units * other.time_s) / units
        return Point(time_s, min(units, _MOST_UNITS))


class Times:
    """Times of one kind of units.

    Attributes:
        time_s: [clocks] what they take.
        errs: [clocks] by which share that may be too short.
        limit_mhz: the clock where a power limit holds them.
        lowest_mhz: the lowest clock that was ever measured.
    """

    def __init__(self, clocks_mhz: FloatArray) -> None:
        self._clocks_mhz = clocks_mhz
        self.points: dict[int, Point] = {}
        self.time_s: FloatArray = np.full(len(clocks_mhz), np.nan)
        self.errs: FloatArray = np.zeros(len(clocks_mhz))
        self.limit_mhz, self.lowest_mhz = float(clocks_mhz[-1]), np.inf
        #: Sum of squares of what one unit differs from its like by, as a share, and their number.
        self._squares, self._degrees = 0.0, 0.0

    def learn(
        self, measured_s: Mapping[int, FloatArray], iterations: int, common: float = 0.0
    ) -> float:
        """Take in what units took; the share by which they changed most, 0 if that is scatter.

        Args:
            measured_s: for each clock, each unit's median over iterations.
            iterations: how many.
            common: standard error, as a share, that all these times have in common.
        """
        new = {}
        for clock, times_s in measured_s.items():
            median_s = max(float(np.median(times_s)), _LEAST_S)
            new[clock] = Point(median_s, float(len(times_s) * iterations))
            if len(times_s) > 2:
                count = len(times_s)
                apart = float(np.median(np.abs(times_s / median_s - 1)))
                squares = (count - 1) * iterations * (_FROM_MEDIAN * apart) ** 2
                self._squares = _FADES * self._squares + squares
                self._degrees = _FADES * self._degrees + count - 1
        return self._take_in(new, common)

    def fit(self) -> None:
        """Find times at all clocks from those that were measured."""
        known = sorted(self.points)
        self.lowest_mhz = min(self.lowest_mhz, known[0])
        errors = np.array([self._error(self.points[clock]) for clock in known])
        trust = _ALIKE / np.hypot(_ALIKE, errors)
        self.time_s, self.limit_mhz = fit_times_s(
            self._clocks_mhz, known, [self.points[clock].time_s for clock in known], trust
        )
        tenths = 10 * np.abs(self._clocks_mhz[:, None] - np.array(known)) / self._clocks_mhz[-1]
        beyond = self._clocks_mhz < known[0]
        errs = np.where(beyond, _ERRS_BEYOND, 2 * _ERRS_BETWEEN) * tenths.min(axis=1)
        self.errs = errs + np.interp(self._clocks_mhz, known, trust * errors)

    def follow(self, others: Sequence[Times]) -> None:
        """Take as long as some others, one after the other."""
        self.time_s = np.sum([times.time_s for times in others], axis=0)
        self.errs = np.max([times.errs for times in others], axis=0)
        self.limit_mhz = max(times.limit_mhz for times in others)
        self.lowest_mhz = max(times.lowest_mhz for times in others)

    def move(self, ratios: FloatArray) -> None:
        """Scale times at each clock by `ratios`, [clocks], as others were seen to change."""
        self.points = {
            clock: point.moved(float(np.interp(clock, self._clocks_mhz, ratios)))
            for clock, point in self.points.items()
        }
        if self.points:
            self.fit()

    def _error(self, *points: Point) -> float:
        """Return the standard error of a point, or of the ratio of two, as a share."""
        of_one = self._squares / max(self._degrees, 1.0)
        return max(float(np.sqrt(of_one * sum(1 / point.units for point in points))), _EXACT)

    def _take_in(self, new: Mapping[int, Point], off: float) -> float:
        """Average, replace and move points; the share by which they changed most."""
        points = self.points
        # A clock that was never measured may differ from its model: that is no change.
        seen = sorted(set(new) & set(points))
        if not seen:
            points.update(new)
            return 0.0
        ratios = np.array([new[clock].time_s / points[clock].time_s for clock in seen])
        errors = np.array([self._error(new[clock], points[clock]) for clock in seen])
        weights = errors**-2.0
        common = float((weights * ratios).sum() / weights.sum())
        differ = np.abs(ratios - common) > np.maximum(_ALIKE, _SURELY * errors)
        if not differ.any():
            changed = abs(common - 1) > _SURELY * np.hypot(1 / np.sqrt(weights.sum()), off)
            ratios = np.full(len(seen), common if changed else 1.0)
        elif not differ.all():
            ratios[~differ] = (weights * ratios)[~differ].sum() / weights[~differ].sum()
        self._move(dict(zip(seen, ratios.tolist(), strict=True)), set(points) - set(new))
        for clock, point in new.items():
            known = points.get(clock)
            if known is not None:
                apart = abs(point.time_s / known.time_s - 1)
                if apart <= _SURELY * np.hypot(self._error(point, known), off):
                    point = known.averaged(point)
            points[clock] = point
        return float(max(ratios - 1, key=abs))

    def _move(self, ratios: Mapping[int, float], unseen: set[int]) -> None:
        """Move points that were seen by these ratios; others follow those next to them."""
        points, seen = self.points, sorted(ratios)
        values = [ratios[clock] for clock in seen]
        alike = max(values) - min(values) <= _ALIKE
        for clock in unseen:
            ratio, after = float(np.interp(clock, seen, values)), bisect_left(seen, clock)
            near = values[max(after - 1, 0) : after + 1]
            if len(near) == 1:
                near.append(1.0)  # what was not seen may not have changed
            if len(seen) == 1 or alike or max(near) - min(near) <= _ALIKE:
                points[clock] = points[clock].moved(ratio)
            else:  # a limit came or went: the model knows more than a line
                del points[clock]
        for clock in seen:
            points[clock] = points[clock].moved(ratios[clock])


class Lateness:
    """How late changes of the clock are, on all GPUs of a job alike.

    Attributes:
        change_s: None until it was seen.
    """

    def __init__(self) -> None:
        self.change_s: float | None = None
        self._seen_s: deque[float] = deque(maxlen=_KEPT_LATE)

    @property
    def late_s(self) -> float:
        """Return how late a change is, or is taken to be."""
        return _LATE_S if self.change_s is None else self.change_s

    @property
    def planned_s(self) -> float:
        """Return the same for plans: 0 where no clock makes a difference, as in a dry run."""
        return self.change_s or 0.0

    def at_their_clock(self, asked: FloatArray, timeline: Timeline) -> BoolArray:
        """Return which units surely ran wholly at their clock, [num_stages, units_per_stage]."""
        arrives_s = np.maximum.accumulate(asked + _LATER * self.late_s, axis=1)
        return np.asarray(arrives_s <= timeline.start_s + 1e-9)

    def learn(
        self,
        own_s: FloatArray,
        old_s: FloatArray,
        timeline: Timeline,
        asked: FloatArray,
        known: BoolArray,
    ) -> None:
        """Take in units that began at the clock of the one before: of their time, some was at it.

        Args:
            own_s: what units take at their clock, [num_stages, units_per_stage], as all others.
            old_s: and at that of the unit before.
            timeline: of what they took.
            asked: as `Clocked.asked_s` gives it.
            known: of which units that is known well enough.
        """
        tell = known & (np.abs(old_s - own_s) > _TELLING * own_s) & (timeline.wait_s < _LATE_S)
        # The unit before surely ran at its own clock when it ended, and nothing was parked since.
        tell &= np.roll(self.at_their_clock(asked, timeline), 1, axis=1)
        tell[:, 1:] &= asked[:, 1:] <= timeline.end_s[:, :-1]
        tell[:, 0] = False
        if not tell.any():
            return
        own_s, old_s, took_s = own_s[tell], old_s[tell], timeline.duration_s[tell]
        late_s = (own_s - took_s) / (own_s / old_s - 1)
        late_s = np.clip(late_s, 0.0, np.minimum(own_s, old_s)) + timeline.wait_s[tell]
        self._seen_s.extend(late_s.tolist())
        self.change_s = float(np.median(self._seen_s))
