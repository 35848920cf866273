"""Energies of forward and backward told apart, and the error of a sum of iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.runtime.energy.split import (
    Measured,
    error_of_sum,
    mean_without_outliers,
    split_energies,
)


@pytest.mark.parametrize(
    ("forward_late_s", "backward_late_s"), [(0, 0), (0.01, 0.01), (0.004, 0.015)]
)
def test_split_finds_the_energies_behind_late_clocks(forward_late_s, backward_late_s):
    """Units that start at the clock of the unit before them for some milliseconds."""
    clocks = [1400, 1300, 1200, 1100, 1000, 900]

    def truth(kind: Kind, clock: int) -> tuple[float, float]:
        memory, power_w = (0.1, 300) if kind is Kind.FORWARD else (0.3, 300)
        time_s = (0.06 if kind is Kind.FORWARD else 0.11) * (memory + (1 - memory) * 1400 / clock)
        return time_s, time_s * (60 + (power_w - 60) * (clock / 1400) ** 2.2)

    def mixed(kind: Kind, early: int, late: int, late_s: float) -> tuple[float, float]:
        """A unit whose first `late_s` run at the clock `early`, and the rest at `late`."""
        early_time_s, early_j = truth(kind, early)
        late_time_s, late_j = truth(kind, late)
        share = late_s / early_time_s
        return late_s + (1 - share) * late_time_s, share * early_j + (1 - share) * late_j

    together, apart = [], []
    for clock in clocks:
        forward_s, forward_j = truth(Kind.FORWARD, clock)
        backward_s, backward_j = truth(Kind.BACKWARD, clock)
        together.append(Measured(forward_s, backward_s, forward_j + backward_j))
        if clock != clocks[0]:
            forward_s, forward_j = mixed(Kind.FORWARD, clocks[0], clock, forward_late_s)
            backward_s, backward_j = mixed(Kind.BACKWARD, clock, clocks[0], backward_late_s)
            apart.append(Measured(forward_s, backward_s, forward_j + backward_j))
    split = split_energies(clocks, together, apart)
    assert split.told_apart
    assert split.late_s == pytest.approx(max(forward_late_s, backward_late_s), rel=0.01, abs=1e-9)
    for kind in WHOLE:
        for row in split.rows[kind]:
            time_s, energy_j = truth(kind, row.frequency_mhz)
            assert row.time_s == pytest.approx(time_s)
            assert row.energy_j == pytest.approx(energy_j, rel=0.01)


@pytest.mark.parametrize(
    "apart",
    [
        Measured(0.13, 0.2, 5.0),  # absurd: less than a meter could say
        Measured(0.13, 0.2, 90.0),  # more than both together
        Measured(0.13, 0.2, 42.0, 4.0),  # 2 J of a forward, known to 5
        Measured(0.11, 0.2, 55.0),  # most of each forward still ran at the highest clock
        Measured(0.13, 0.25, 55.0),  # most of each backward ran at the forward's
    ],
)
def test_energies_that_are_not_told_apart_are_shared_by_time(apart):
    clocks = [1400, 1000]
    together = [Measured(0.1, 0.2, 60.0, 3.0), Measured(0.13, 0.26, 50.0)]
    split = split_energies(clocks, together, [apart])
    assert not split.told_apart
    for index, pair in enumerate(together):
        forward, backward = (split.rows[kind][index] for kind in WHOLE)
        assert forward.energy_j == pytest.approx(pair.pair_j / 3)
        assert backward.energy_j == pytest.approx(pair.pair_j * 2 / 3)
        assert forward.energy_uncertainty_j == pytest.approx(pair.pair_uncertainty_j / 3)


def test_split_carries_uncertainty_to_each_kind():
    """Each of the three energies that a row stands on moves it; together, by its uncertainty."""
    clocks = [1400, 1200, 1000]
    together = [
        Measured(0.10, 0.20, 60.0, 0.3),
        Measured(0.117, 0.233, 54.0, 0.2),
        Measured(0.14, 0.28, 51.0, 0.25),
    ]
    apart = [Measured(0.116, 0.203, 57.8, 0.15), Measured(0.138, 0.206, 56.9, 0.35)]
    split = split_energies(clocks, together, apart)
    assert split.told_apart
    moved = {kind: np.zeros((5, 3)) for kind in WHOLE}
    for index, pair in enumerate([*together, *apart]):
        pairs = [*together, *apart]
        pairs[index] = replace(pair, pair_j=pair.pair_j + pair.pair_uncertainty_j)
        other = split_energies(clocks, pairs[:3], pairs[3:])
        for kind, rows in split.rows.items():
            moved[kind][index] = [
                b.energy_j - a.energy_j for a, b in zip(rows, other.rows[kind], strict=True)
            ]
    for kind, rows in split.rows.items():
        assert [row.frequency_mhz for row in rows] == clocks
        stated_j = [row.energy_uncertainty_j for row in rows]
        assert stated_j == pytest.approx(np.linalg.norm(moved[kind], axis=0))
        assert min(stated_j) > 0.05


def test_a_split_without_lower_clocks_or_with_early_ones():
    alone = split_energies([1400], [Measured(0.1, 0.3, 60.0)], [])
    assert (alone.told_apart, alone.late_s) == (True, 0.0)
    assert [alone.rows[kind][0].energy_j for kind in WHOLE] == pytest.approx([15, 45])
    # Shorter than at its own clock: noise, since no unit runs at a clock before it was asked for.
    together = [Measured(0.1, 0.2, 60.0), Measured(0.13, 0.26, 50.0)]
    early = split_energies([1400, 1000], together, [Measured(0.131, 0.199, 55.0)])
    assert (early.told_apart, early.late_s) == (True, 0.0)
    assert early.rows[Kind.FORWARD][1].energy_j == pytest.approx(20 - 5)


@pytest.mark.parametrize("duration_s", [0.11, 0.3, 1.0])
def test_error_of_a_sum_from_its_parts(duration_s):
    """Whatever the length of the iterations, the error is that of the sum."""
    rng = np.random.default_rng(4)
    count = 24
    errors_j = [
        error_of_sum(rng.normal(50, 2, count).tolist(), [duration_s] * count, block_s=0.5)
        for _ in range(500)
    ]
    assert np.sqrt(np.mean(np.square(errors_j))) == pytest.approx(2 * np.sqrt(count), rel=0.1)


def test_what_the_meter_puts_into_the_next_iteration_is_no_scatter():
    """Short iterations see the counter's steps: one has too much, the next too little."""
    swing_j = [10.0 + (1 if i % 2 else -1) * 3 for i in range(40)]
    assert error_of_sum(swing_j, [0.05] * 40, block_s=0.5) == pytest.approx(0, abs=1e-9)
    assert error_of_sum(swing_j, [0.05] * 40, block_s=0.05) > 15
    assert error_of_sum([50.0] * 3, [0.1] * 3, block_s=0.5) == 0  # one block tells nothing


def test_iterations_that_fill_no_block_count_with_the_one_before():
    # Of 0.2 s in blocks of 0.3 s: two, two, and one that is too short to stand alone.
    # 4 and 21 J, where 10 and 15 J would be the same power.
    assert error_of_sum([1.0, 3.0, 5.0, 7.0, 9.0], [0.2] * 5, block_s=0.3) == pytest.approx(12)
    assert error_of_sum([1.0, 3.0, 9.0], [0.2] * 3, block_s=0.3) == 0  # one block alone


def test_mean_without_outliers():
    assert mean_without_outliers([1.0, 1.0, 1.0, 1.0, 9.0]) == 1.0
    assert mean_without_outliers([3.0, 3.0]) == 3.0
    assert mean_without_outliers([1.0, 2.0]) == 1.5
