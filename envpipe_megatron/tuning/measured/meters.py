"""Readings of a rank's energy counter, as sums that the powers of units are fitted to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray

#: What drivers' counters count in (mJ).
RESOLUTION_J = 1e-3


@dataclass(frozen=True)
class MeterSums:
    """Readings of an energy counter in iterations, as the sums that powers are fitted to.

    Columns are each kind of unit at each node of the clock, then waiting at each node, then the
    tail; see `meter_sums`.

    Attributes:
        products: [columns, columns] s^2.
        weighted: [columns] s J.
        squares: sum of the squares of energies, J^2, and `count`, their number.
    """

    products: FloatArray
    weighted: FloatArray
    squares: float = 0.0
    count: float = 0.0

    @classmethod
    def none(cls, columns: int) -> MeterSums:
        """Return the sums of no measurement."""
        return cls(np.zeros((columns, columns)), np.zeros(columns))

    def __add__(self, other: MeterSums) -> MeterSums:
        return MeterSums(
            self.products + other.products,
            self.weighted + other.weighted,
            self.squares + other.squares,
            self.count + other.count,
        )

    def faded(self, share: float) -> MeterSums:
        """Return the same with this share of its weight, so that what comes counts for more."""
        squares, count = share * self.squares, share * self.count
        return MeterSums(share * self.products, share * self.weighted, squares, count)

    def scatter_j(self, power_w: FloatArray) -> float:
        """Return the standard deviation of energies from those of some powers, [columns] W.

        It is never less than what the counter resolves.
        """
        explained = power_w @ (2 * self.weighted - self.products @ power_w)
        variance = (self.squares - float(explained)) / max(self.count, 1.0)
        return max(math.sqrt(max(variance, 0.0)), RESOLUTION_J)


#: Kinds of time that a GPU spends in no unit.
WAITING, TAIL = -1, -2


def meter_sums(
    begin_s: float,
    spent: FloatArray,
    refreshes_s: FloatArray,
    energies_j: FloatArray,
    nodes_mhz: FloatArray,
    num_kinds: int,
) -> MeterSums:
    """Add up one GPU's refreshes within stretches of time, which follow each other from a begin.

    From one refresh of the counter to the next, energy is the sum over all that the GPU did of time
    by power; power at a clock is that of the nodes next to it, by distance. So each pair of
    refreshes is one linear equation for the powers at the nodes.

    Args:
        spent: [3, stretches] of each its end in s, the kind of unit or `WAITING` or `TAIL`, and the
            clock in MHz that was asked for.
        refreshes_s: [refreshes] their instants; those outside the stretches are left out.
        energies_j: [refreshes] the counter.
        nodes_mhz: [nodes] rising.
    """
    nodes, (ends_s, kinds, clocks_mhz) = len(nodes_mhz), spent
    columns = (num_kinds + 1) * nodes + 1
    bounds_s = np.append(begin_s, ends_s)
    inside = (refreshes_s >= begin_s) & (refreshes_s <= bounds_s[-1])
    if inside.sum() < 2:
        return MeterSums.none(columns)
    below = np.clip(np.searchsorted(nodes_mhz, clocks_mhz) - 1, 0, nodes - 2)
    above = (clocks_mhz - nodes_mhz[below]) / np.diff(nodes_mhz)[below]
    above = np.where(kinds == TAIL, 0.0, np.clip(above, 0.0, 1.0))
    first = below + nodes * np.where(kinds == WAITING, num_kinds, kinds).astype(int)
    first[kinds == TAIL] = columns - 1
    by_column, rows = np.zeros((len(ends_s), columns + 1)), np.arange(len(ends_s))
    by_column[rows, first] = (1 - above) * np.diff(bounds_s)
    by_column[rows, first + 1] = above * np.diff(bounds_s)
    spent_until = np.concatenate([np.zeros((1, columns)), by_column[:, :-1].cumsum(axis=0)])
    times_s, energy_j = refreshes_s[inside], energies_j[inside]
    at_refresh = np.stack(
        [np.interp(times_s, bounds_s, of_column) for of_column in spent_until.T], axis=1
    )
    equations, gained_j = np.diff(at_refresh, axis=0), np.diff(energy_j)
    return MeterSums(
        equations.T @ equations,
        equations.T @ gained_j,
        float(gained_j @ gained_j),
        float(len(gained_j)),
    )
