"""The state of one emulated GPU, its virtual time and clock, and its form as JSON.

Virtual time in s starts at 0 and advances only when work or waiting is committed. What is
committed is a chain of segments of constant power and clock; from it follow the cumulative energy,
the values of the energy counter, and the clock and power at a past instant.

Clock changes: a request made at instant t comes into force at t + change time; until then the old
clock stays. At most one request is on its way. A later one takes its place, also its settling time:
the superseded clock never comes into force. So a controller that changes its mind faster than the
GPU settles stays at the old clock.
"""

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FORMAT = "envpipe-emulated-gpu/1"

KEPT_TICKS = 64
KEPT_SEGMENTS = 32


@dataclass(frozen=True, slots=True)
class Segment:
    """A committed stretch of virtual time: s, s, W, MHz."""

    start_s: float
    end_s: float
    power_w: float
    frequency_mhz: int


@dataclass(slots=True)
class EmulatedState:
    """What is known of one emulated GPU.

    Mutable, unlike most data here: it is the working copy of one change, read from the file
    and dropped after it is written.

    Attributes:
        preset: name or path of the preset.
        clock_mhz: the clock in force at `end_s`.
        requested_mhz: the lock, None for the driver's default.
        pending: clock in MHz on its way and the instant in s at which it comes into force.
        end_s: the last committed end.
        energy_j: exact cumulative energy at `end_s`.
        ticks: counter values (number of the refresh, J), of which those between two entries lie on
            a straight line.
        segments: latest segments.
        wall_minus_virtual_s: the anchor, CLOCK_MONOTONIC minus virtual time; None without.
    """

    preset: str
    clock_mhz: int
    requested_mhz: int | None = None
    pending: tuple[int, float] | None = None
    end_s: float = 0.0
    energy_j: float = 0.0
    ticks: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])
    segments: list[Segment] = field(default_factory=list)
    wall_minus_virtual_s: float | None = None

    def commit(self, end_s: float, power_w: float, refresh_s: float) -> float:
        """Append a segment at the present clock up to `end_s`; return its energy in J."""
        start_s, start_j = self.end_s, self.energy_j
        energy_j = power_w * (end_s - start_s)
        # Only the first and last refresh of a segment are kept: power is constant, so those
        # between lie on the line. A segment of hours costs two entries, and any 64 refreshes or
        # more stay readable.
        first, last = tick_number(start_s, refresh_s) + 1, tick_number(end_s, refresh_s)
        for number in sorted({first, last}) if last >= first else ():
            self.ticks.append((number, start_j + power_w * (number * refresh_s - start_s)))
        if end_s > start_s:
            self.segments.append(Segment(start_s, end_s, power_w, self.clock_mhz))
        self.end_s, self.energy_j = end_s, start_j + energy_j
        del self.ticks[:-KEPT_TICKS], self.segments[:-KEPT_SEGMENTS]
        return energy_j

    def settle(self) -> None:
        """Let a pending clock whose instant has come take over at `end_s`."""
        if self.pending is not None and self.pending[1] <= self.end_s:
            self.clock_mhz = self.pending[0]
            self.pending = None

    def request(self, requested_mhz: int | None, target_mhz: int, change_s: float) -> None:
        """Note a request, made at the last committed end, for `target_mhz`."""
        self.requested_mhz = requested_mhz
        heading_for_mhz = self.pending[0] if self.pending else self.clock_mhz
        if target_mhz != heading_for_mhz:
            # Back to the clock that is still in force: nothing is on its way any more.
            going_back = target_mhz == self.clock_mhz
            self.pending = None if going_back else (target_mhz, self.end_s + change_s)

    def wait_until(self, time_s: float, power_w: float, refresh_s: float) -> None:
        """Commit waiting up to `time_s`; nothing where that has passed."""
        if self.pending is not None and self.end_s < self.pending[1] < time_s:
            self.commit(self.pending[1], power_w, refresh_s)
        self.settle()
        if self.end_s < time_s:
            self.commit(time_s, power_w, refresh_s)
            self.settle()

    def energy_at_tick(self, number: int) -> tuple[int, float]:
        """Return (number, J) of a refresh; of the oldest or newest known where it is outside."""
        after = bisect_right(self.ticks, (number, math.inf))
        if after in (0, len(self.ticks)):
            return self.ticks[max(after - 1, 0)]
        (low, low_j), (high, high_j) = self.ticks[after - 1 : after + 1]
        return number, low_j + (high_j - low_j) * ((number - low) / (high - low))

    def segment_at(self, time_s: float) -> Segment | None:
        """Return the segment that holds an instant, the oldest known before that, None if none."""
        for segment in reversed(self.segments):
            if segment.start_s <= time_s:
                return segment
        return self.segments[0] if self.segments else None

    def to_json(self) -> bytes:
        """Return the state as one line of JSON; floats come back bit for bit."""
        return json.dumps(
            {
                "format": FORMAT,
                "preset": self.preset,
                "clock_mhz": self.clock_mhz,
                "requested_mhz": self.requested_mhz,
                "pending": self.pending,
                "end_s": self.end_s,
                "energy_j": self.energy_j,
                "ticks": self.ticks,
                "segments": [
                    (s.start_s, s.end_s, s.power_w, s.frequency_mhz) for s in self.segments
                ],
                "wall_minus_virtual_s": self.wall_minus_virtual_s,
            }
        ).encode()


def tick_number(time_s: float, refresh_s: float) -> int:
    """Return the number of the last refresh at or before an instant; refresh k is at k * period."""
    number = int(time_s / refresh_s)
    # The quotient may round across a whole number: 0.3 / 0.1 is below 3, though 3 * 0.1 >= 0.3.
    while (number + 1) * refresh_s <= time_s:
        number += 1
    while number * refresh_s > time_s:
        number -= 1
    return number


def parse_state(text: bytes) -> EmulatedState:
    """Return the state in a file's content.

    Raises:
        ValueError: it is not such a state; the message says what is wrong.
    """
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    state: EmulatedState
    name = "preset"
    try:
        preset = raw[name]
        if not isinstance(preset, str):
            raise TypeError
        name = "clock_mhz"
        state = EmulatedState(preset, _mhz(raw[name]))
        name = "requested_mhz"
        state.requested_mhz = None if raw[name] is None else _mhz(raw[name])
        name = "pending"
        if raw[name] is not None:
            pending_mhz, settle_s = raw[name]
            state.pending = _mhz(pending_mhz), _finite(settle_s)
        name = "end_s"
        state.end_s = _finite(raw[name])
        name = "energy_j"
        state.energy_j = _finite(raw[name])
        name = "ticks"
        state.ticks = [(_whole(number), _finite(energy_j)) for number, energy_j in raw[name]]
        if not state.ticks or any(a[0] >= b[0] for a, b in pairwise(state.ticks)):
            raise ValueError
        name = "segments"
        state.segments = [
            Segment(_finite(start_s), _finite(end_s), _finite(power_w), _mhz(mhz))
            for start_s, end_s, power_w, mhz in raw[name]
        ]
        name = "wall_minus_virtual_s"
        state.wall_minus_virtual_s = None if raw[name] is None else _number(raw[name])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its field {name} is missing or wrong") from error
    return state


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _mhz(value: object) -> int:
    if type(value) is not int or value <= 0:
        raise ValueError
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]  # narrowed
        raise ValueError
    return float(value)  # type: ignore[arg-type]  # checked above


def _finite(value: object) -> float:
    number = _number(value)
    if number < 0:
        raise ValueError
    return number
