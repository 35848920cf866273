"""The state of one emulated GPU, its virtual time and clock, and its form as JSON.

Virtual time in s starts at 0 and advances only when work or waiting is committed. What is
committed is a chain of segments of constant power and clock; from it follow the cumulative energy,
the values of the energy counter, and the clock and power at a past instant.

Clock changes: a request made at instant t comes into force at t + change time; until then the old
clock stays. At most one request is pending. A later one replaces it, also its settling time: the
replaced clock never comes into force. So a controller that changes its mind faster than the GPU
settles stays at the old clock.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FORMAT = "envpipe-emulated-gpu/1"

KEPT_TICKS = 64
KEPT_SEGMENTS = 32


class Segment(NamedTuple):
    """A committed stretch of virtual time."""

    start_s: float
    end_s: float
    power_w: float
    frequency_mhz: int


@dataclass
class EmulatedState:
    """What is known of one emulated GPU.

    Mutable, unlike most data here: it is the working copy of one change, read from the file and
    dropped after it is written.

    Attributes:
        clock_mhz: the clock in force at `end_s`.
        requested_mhz: the lock, None for the driver's default.
        pending: clock in MHz that is requested and the instant in s at which it comes into force.
        end_s: the last committed end, at which `energy_j` is the exact cumulative energy.
        ticks: counter values (number of the refresh, J), of which those between two entries lie on
            a straight line.
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
        coming_mhz = self.pending[0] if self.pending else self.clock_mhz
        if target_mhz == self.clock_mhz:
            self.pending = None
        elif target_mhz != coming_mhz:
            self.pending = (target_mhz, self.end_s + change_s)

    def wait_until(self, time_s: float, power_w: float, refresh_s: float) -> None:
        """Commit waiting up to `time_s`; nothing if that has passed."""
        if self.pending is not None and self.end_s < self.pending[1] < time_s:
            self.commit(self.pending[1], power_w, refresh_s)
        self.settle()
        if self.end_s < time_s:
            self.commit(time_s, power_w, refresh_s)
            self.settle()

    def energy_at_tick(self, number: int) -> tuple[int, float]:
        """Return (number, J) of a refresh; of the oldest or newest known if it is outside."""
        after = bisect_right(self.ticks, number, key=lambda tick: tick[0])
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
        return json.dumps({"format": FORMAT, **vars(self)}).encode()


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
    """Return the state in a file's content; a ValueError says what is wrong with it."""
    try:
        raw: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(raw, dict) or raw.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    try:
        state = EmulatedState(**raw)
        state.pending = state.pending and (state.pending[0], state.pending[1])
        state.ticks = [(number, energy_j) for number, energy_j in state.ticks]
        state.segments = [Segment(*segment) for segment in state.segments]
    except (TypeError, ValueError) as error:
        raise ValueError(f"it has other fields than a state: {error}") from error
    return state
