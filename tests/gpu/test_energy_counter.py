"""The instants of a counter's refreshes, found by watching one that does not say them."""

import itertools
import math
import random

import pytest

from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.energy_counter import STALL_S, EnergyCounter

POWER_W = 200.0


class Staircase:
    """A counter on a clock of its own: a read takes 3.4 ms and sees the value at some point."""

    def __init__(self, period_s, seed=0, read_s=0.0034):
        self._random = random.Random(seed)
        self._period_s = period_s
        self._phase_s = self._random.random() * period_s
        self._read_s = read_s
        self.now_s = 1e6  # eleven days of uptime
        self.offset_j = 0.0
        self.stalled_at_s = math.inf
        self.reads = 0
        self.refresh_s = {}
        self.fail = False

    def read_j(self):
        self.reads += 1
        if self.fail:
            raise RuntimeError("lost")
        before_s = self._random.random() * self._read_s
        seen_s = min(self.now_s + before_s, self.stalled_at_s)
        self.now_s += self._read_s
        number = math.floor((seen_s - self._phase_s) / self._period_s)
        energy_j = round(number * self._period_s * POWER_W, 3) + self.offset_j
        self.refresh_s[energy_j] = number * self._period_s + self._phase_s
        return energy_j

    def monotonic_s(self):
        return self.now_s

    def sleep(self, time_s):
        assert time_s >= 0
        self.now_s += time_s + self._random.random() * 1e-4  # sleeps overshoot

    def counter(self):
        return EnergyCounter(self.read_j, "GPU", self.monotonic_s, self.sleep)


def _poll_until_it_fails(counter, staircase):
    while True:
        counter.read()
        staircase.now_s += 0.05


@pytest.mark.parametrize("period_s", [0.1, 0.1003, 0.0997, 0.02, 0.15])
@pytest.mark.parametrize("poll_s", [0.0, 0.02, 0.0466, 0.05, 0.2, 7.0])
@pytest.mark.parametrize("seed", range(3))
def test_refreshes_are_where_the_reading_says(period_s, poll_s, seed):
    staircase = Staircase(period_s, seed)
    counter = staircase.counter()
    for _ in range(200):
        reading = counter.read()
        error_s = reading.time_s - staircase.refresh_s[reading.energy_j]
        assert abs(error_s) <= reading.time_uncertainty_s
        # Two reads and a step: half of that.
        assert reading.time_uncertainty_s < 0.0045
        staircase.now_s += poll_s


def test_a_poll_of_50_ms_sees_each_refresh_with_few_reads():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.reads = 0
    readings = set()
    for _ in range(400):
        readings.add(counter.read())
        staircase.now_s += 0.05
    energies = sorted(reading.energy_j for reading in readings)
    steps = {round(b - a) for a, b in itertools.pairwise(energies)}
    assert steps == {20}  # J in 0.1 s
    assert staircase.reads <= 4 * len(readings)


def test_a_fresh_reading_is_given_again():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    reading = counter.read()
    reads = staircase.reads
    staircase.now_s = reading.time_s + 0.039
    assert counter.read() is reading
    assert staircase.reads == reads
    staircase.now_s = reading.time_s + 0.041
    assert counter.read().energy_j == reading.energy_j + 20.0


def test_a_counter_that_stands_still():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.stalled_at_s = staircase.now_s
    begun_s = staircase.now_s
    with pytest.raises(GpuError, match=r"not moved for 3 s.*not measured"):
        _poll_until_it_fails(counter, staircase)
    assert STALL_S < staircase.now_s - begun_s < STALL_S + 0.5
    staircase.stalled_at_s = math.inf
    assert counter.read().energy_j > 0


def test_a_counter_that_goes_back_is_read_as_it_is():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    first = counter.read()
    staircase.offset_j = -1000.0
    staircase.now_s += 0.05
    after = counter.read()
    assert after.energy_j < first.energy_j
    assert after.time_s > first.time_s
    assert counter.read() == after


def test_a_read_that_fails_leaves_the_next_one_whole():
    staircase = Staircase(0.1)
    counter = staircase.counter()
    counter.read()
    staircase.now_s += 0.05
    staircase.fail = True
    with pytest.raises(RuntimeError, match="lost"):
        counter.read()
    staircase.fail = False
    reading = counter.read()
    assert abs(reading.time_s - staircase.refresh_s[reading.energy_j]) < 0.0045
