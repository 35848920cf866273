"""How late a change of the clock is, and which units ran at the clock that was asked for."""

from __future__ import annotations

from collections import deque

import numpy as np

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.tuning.commands import Clocked

#: How late a change of clock is taken to be until one was seen, s. With 0, uneven stages save 11
#: points less.
_LATE_S = 0.01
#: Units that start this many times later than changes are late ran at their own clock.
_SURELY = 2.0
#: Times at two clocks must differ by this share for a late change to be seen between them.
_TELLING = 0.05
#: The median of this many units that show how late it is, the latest ones, counts.
_KEPT = 64


def asked_s(clocked: Clocked, timeline: Timeline, *, fresh: bool) -> FloatArray:
    """Return when units' clocks were asked for, [num_stages, units_per_stage]; -inf: before.

    Args:
        clocked: what ran.
        timeline: of what units took.
        fresh: whether another order ran before.
    """
    frequency_mhz, parking = clocked.frequency_mhz, clocked.parking
    changes = frequency_mhz[:, 1:] != frequency_mhz[:, :-1]
    asked = np.full(frequency_mhz.shape, -np.inf)
    asked[:, 1:] = np.where(changes, timeline.end_s[:, :-1], -np.inf)
    # The first unit's clock was asked for at the end of the iteration before, or when it began.
    first = (frequency_mhz[:, 0] != frequency_mhz[:, -1]) | fresh
    asked[:, 0] = np.where(first, timeline.start_s[:, 0], -np.inf)
    if parking is not None:
        in_wait_s = timeline.start_s - timeline.wait_s + parking.own_after_s
        asked = np.where(parking.park_mhz, np.minimum(in_wait_s, timeline.start_s), asked)
    return asked


class Lateness:
    """How late changes of the clock are, on all GPUs of a job alike.

    Attributes:
        change_s: None until it was seen.
    """

    def __init__(self) -> None:
        self.change_s: float | None = None
        self._seen_s: deque[float] = deque(maxlen=_KEPT)

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
        arrives_s = np.maximum.accumulate(asked + _SURELY * self.late_s, axis=1)
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
            asked: as `asked_s` gives it.
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
