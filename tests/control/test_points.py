"""Times of one kind of units at a few clocks, as windows tell them."""

from __future__ import annotations

import numpy as np
import pytest

from envpipe_megatron.control.curves import Times

CLOCKS_MHZ = np.array([990.0, 1125.0, 1260.0, 1410.0])


def learned(times: Times, measured_s: dict[int, list[float]]) -> float:
    change = times.learn({mhz: np.array(values) for mhz, values in measured_s.items()}, 4)
    times.fit()
    return change


def test_scatter_stays_known_where_no_two_units_run_alike():
    """With few microbatches each unit has a clock of its own, for thousands of windows."""
    times, random = Times(CLOCKS_MHZ), np.random.default_rng(1)

    def units(count: int) -> list[float]:
        return (0.03 * (1 + random.choice([-0.015, 0.015], count))).tolist()

    learned(times, {1410: units(100)})
    for _ in range(1000):
        assert learned(times, {1410: units(1)}) == 0.0
    assert learned(times, {1410: [1.2 * 0.03]}) == pytest.approx(0.2, abs=0.02)


def test_what_passes_raises_no_time_at_a_clock_that_was_not_seen():
    """The slowest stage runs at the highest clock alone."""
    times = Times(CLOCKS_MHZ)
    learned(times, {1410: [0.03] * 3, 1125: [0.036] * 3})
    for _ in range(20):
        assert learned(times, {1410: [0.0306] * 3}) == pytest.approx(0.02)
        assert times.points[1125].time_s == pytest.approx(1.02 * 0.036)
        assert learned(times, {1410: [0.03] * 3}) == pytest.approx(-0.02, abs=0.001)
    assert times.points[1125].time_s == pytest.approx(0.036, rel=1e-3)
    learned(times, {1410: [0.027] * 3})
    assert times.points[1125].time_s == pytest.approx(0.036, rel=1e-3), "as measured, not faster"
