"""What one kind of units of a stage takes over the clock: measured points, and how sure they are.

Units of one kind and clock scatter, on an H200 by some 1.5 %. So a measurement counts by how many
units it stands for: one that agrees with what was known, within what such scatter explains, is
averaged with it; one that does not is a change, and replaces it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.control.known.curves import fit_times_s
from envpipe_megatron.core.arrays import FloatArray

#: So many standard errors are no scatter: there are some hundred comparisons in each window.
_SURELY = 4.5
#: Ratios to what was known that differ by less are alike, whatever the scatter.
_ALIKE = 0.005
#: Variance of a median, as a multiple of that of the mean.
_OF_MEDIAN = 1.57
#: A point never stands for more units, so that it follows what changes slowly.
_MOST_UNITS = 400.0
#: What is known of scatter counts this much less with each window.
_FADES = 0.95
#: From the median of absolute deviations to a standard deviation; of few, a little more.
_FROM_MEDIAN = 1.4826
#: Error of what does not scatter.
_EXACT = 1e-9
#: Half-way between two measured clocks a tenth apart, and per tenth beyond them, by how much a
#: model may err: the mean error on published profiles, and twice that.
_ERRS_BETWEEN, _ERRS_BEYOND = 0.005, 0.02


@dataclass(frozen=True)
class Point:
    """A time in s, and how many units it stands for.

    `raised` is how many times as long it is as when it was measured, for what others showed since.
    """

    time_s: float
    units: float
    raised: float = 1.0

    def moved(self, ratio: float) -> Point:
        """The same units, all of which take so many times as long."""
        return Point(ratio * self.time_s, self.units, self.raised)

    def following(self, ratio: float) -> Point:
        """Unseen, where another takes so many times as long: never less than was measured.

        To take it for faster might cost time.
        """
        raised = max(1.0, self.raised * ratio)
        return Point(self.time_s * raised / self.raised, self.units, raised)

    def averaged(self, other: Point) -> Point:
        """Both together."""
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
        # Where each unit has a clock of its own, a window tells nothing of scatter.
        if any(len(times_s) > 2 for times_s in measured_s.values()):
            self._squares, self._degrees = _FADES * self._squares, _FADES * self._degrees
        for clock, times_s in measured_s.items():
            median_s = float(np.median(times_s))
            new[clock] = Point(median_s, float(len(times_s) * iterations))
            if len(times_s) > 2:
                count = len(times_s)
                apart = float(np.median(np.abs(times_s / median_s - 1))) * count / (count - 0.8)
                self._squares += (count - 1) * iterations * (_FROM_MEDIAN * apart) ** 2
                self._degrees += count - 1
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

    def _error(self, *points: Point) -> float:
        """Standard error of a point, or of the ratio of two, as a share."""
        of_one = _OF_MEDIAN * self._squares / max(self._degrees, 1.0)
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
        alone = np.abs(ratios - common) > np.maximum(_ALIKE, _SURELY * errors)
        if not alone.any():
            changed = abs(common - 1) > _SURELY * np.hypot(1 / np.sqrt(weights.sum()), off)
            ratios = np.full(len(seen), common if changed else 1.0)
        elif not alone.all():
            ratios[~alone] = (weights * ratios)[~alone].sum() / weights[~alone].sum()
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
        """Points that were seen take so many times as long; others follow those next to them."""
        points, seen = self.points, sorted(ratios)
        values = [ratios[clock] for clock in seen]
        alike = max(values) - min(values) <= _ALIKE
        for clock in unseen:
            ratio, after = float(np.interp(clock, seen, values)), bisect_left(seen, clock)
            near = values[max(after - 1, 0) : after + 1]
            if len(near) == 1:
                near.append(1.0)  # what was not seen may not have changed
            if len(seen) == 1:
                points[clock] = points[clock].following(ratio)
            elif alike or max(near) - min(near) <= _ALIKE:
                points[clock] = points[clock].moved(ratio)
            else:  # a limit came or went: the model tells more than a line
                del points[clock]
        for clock in seen:
            points[clock] = points[clock].moved(ratios[clock])
