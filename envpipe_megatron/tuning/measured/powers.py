"""Sums of what energy counters said of a stage, and the powers that explain them.

From one refresh of a counter to the next, energy is the sum over all that the GPU did of time by
power. So each pair of refreshes is one linear equation for powers at some clocks, the nodes; `Sums`
of many of them are what powers are fitted to.

Power is `s + g (c0 + c1 u + c2 u^2)`, where `g` is the clock that the GPU reaches and `u` how far
it lies above the knee up to which the voltage stays at its floor. On published profiles of A100 and
A40, five clocks give all others to 1.1 % in energy in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from scipy.optimize import nnls

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError

#: The step of drivers' counters, which count mJ.
RESOLUTION_J = 1e-3

#: Nodes of the clock at which sums have powers, and the lowest as a share of the highest
#: clock: no plan goes lower, since the valleys of all GPUs lie above it. With eight nodes a job in
#: which a GPU becomes slow saves 1.2 points less.
_NUM_NODES, _LOWEST_NODE = 23, 0.45
#: Knees that are tried, as shares of the highest clock. With one, a job in which a GPU becomes slow
#: saves 0.9 points less.
_KNEES = np.linspace(0.4, 0.95, 23)
#: How much it counts that all kinds draw the same power, against what was measured, until each
#: draws some. Without it a job whose counters refresh each second saves 14 points less.
_ALIKENESS = (1e-5, 1e-3, 0.1)
#: Terms of a kind's power beside the static one.
_TERMS = 3
#: Kinds of time that a GPU spends in no unit.
WAITING, TAIL = -1, -2
#: Sums over equations, [columns + 2, columns + 2]: products of the times that were spent in each
#: column, s^2; next to the last, of these with energies, s J, and the squares of energies, J^2; and
#: last, in the corner, the number of equations. Columns are each kind of unit at each node of the
#: clock, then waiting at each node, then the tail.
Sums: TypeAlias = FloatArray


class Powers:
    """Energies that the counters of stages said, and the powers that explain them.

    Args:
        num_stages: p.
        clocks_mhz: those that plans may use.
        num_kinds: kinds of units.

    Attributes:
        nodes_mhz: [nodes] clocks at which sums have powers, rising.
        sums: of each stage, one after the other.
    """

    def __init__(self, num_stages: int, clocks_mhz: Sequence[int], num_kinds: int) -> None:
        self.nodes_mhz = power_nodes_mhz(clocks_mhz)
        self._needs_meters = len(clocks_mhz) > 1
        self._num_kinds = num_kinds
        size = (num_kinds + 1) * _NUM_NODES + 3
        self.sums: FloatArray = np.zeros((num_stages, size, size))

    def look(self, stage: int, kind: int, clock_mhz: float, power_w: float) -> None:
        """Add what a counter would have said of a second spent so."""
        second, energies_j = np.array([[1.0], [kind], [clock_mhz]]), np.array([0.0, power_w])
        self.sums[stage] += meter_sums(
            0.0, second, np.array([0.0, 1.0]), energies_j, self.nodes_mhz, self._num_kinds
        )

    def fit(self, stage: int, limit_mhz: float) -> tuple[FloatArray, FloatArray]:
        """Return W of a GPU of a stage, [kinds + 1, nodes], waiting last, and their errors.

        Units go beyond no clock above the limit. EnvPipeError without meters; or 0 W where there is
        only one clock, as nothing is decided by powers then.
        """
        if not self.sums[stage].any():
            if not self._needs_meters:
                nothing_w = np.zeros((self._num_kinds + 1, len(self.nodes_mhz)))
                return nothing_w, nothing_w
            raise EnvPipeError(
                f"No energy counter of stage {stage} refreshed twice in steps in a row",
                remedy="If steps are long enough for it, look at the driver's log. A profile by "
                "file needs no counter.",
            )
        return fit_powers(self.sums[stage], self.nodes_mhz, self._num_kinds, limit_mhz)


def meter_sums(
    begin_s: float,
    spent: FloatArray,
    refreshes_s: FloatArray,
    energies_j: FloatArray,
    nodes_mhz: FloatArray,
    num_kinds: int,
) -> Sums:
    """Add up one GPU's refreshes within stretches of time, which follow each other from a begin.

    Power at a clock is that of the nodes next to it, by distance.

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
    below = np.clip(np.searchsorted(nodes_mhz, clocks_mhz) - 1, 0, nodes - 2)
    above = (clocks_mhz - nodes_mhz[below]) / np.diff(nodes_mhz)[below]
    above = np.where(kinds == TAIL, 0.0, np.clip(above, 0.0, 1.0))
    first = below + nodes * np.where(kinds == WAITING, num_kinds, kinds).astype(int)
    first[kinds == TAIL] = columns - 1
    by_column, rows = np.zeros((len(ends_s), columns + 1)), np.arange(len(ends_s))
    by_column[rows, first] = (1 - above) * np.diff(bounds_s)
    by_column[rows, first + 1] = above * np.diff(bounds_s)
    spent_until = np.concatenate([np.zeros((1, columns)), by_column[:, :-1].cumsum(axis=0)])
    times_s, gained_j = refreshes_s[inside], np.diff(energies_j[inside])
    at_refresh = np.stack(
        [np.interp(times_s, bounds_s, of_column) for of_column in spent_until.T], axis=1
    )
    equations = np.diff(at_refresh, axis=0)
    sums = np.zeros((columns + 2, columns + 2))
    sums[:-2, :-2] = equations.T @ equations
    sums[:-2, -2] = equations.T @ gained_j
    sums[-2, -2], sums[-1, -1] = gained_j @ gained_j, len(gained_j)
    return sums


def fit_powers(
    sums: Sums, nodes_mhz: FloatArray, num_kinds: int, limit_mhz: float
) -> tuple[FloatArray, FloatArray]:
    """Fit the power of each kind of unit, of waiting and of the tail, on one GPU.

    Kinds that no measurement separates are taken to draw the same power.

    Args:
        sums: of what was measured; some time, at least.
        nodes_mhz: [nodes] clocks at which sums have powers, the highest last.
        num_kinds: kinds of units.
        limit_mhz: the clock that units do not go beyond.

    Returns:
        [kinds + 1, nodes] W, waiting last, and their standard errors, by how energies scatter: no
        less than the counter resolves.
    """
    products, wanted_j = sums[:-2, :-2], sums[:-2, -2]
    values, vectors = np.linalg.eigh(products)
    kept = values > 1e-9 * values[-1]
    root = np.sqrt(values[kept])
    rows = root[:, None] * vectors[:, kept].T
    wanted = (vectors[:, kept].T @ wanted_j) / root
    for alikeness in _ALIKENESS:
        alike = _alike(np.sqrt(alikeness * values[-1]), num_kinds)
        fits = []
        for knee in _KNEES:
            shapes = _shapes(nodes_mhz, num_kinds, knee, limit_mhz)
            terms, error = nnls(
                np.concatenate([rows @ shapes, alike]),
                np.concatenate([wanted, np.zeros(len(alike))]),
                maxiter=100 * shapes.shape[1],
            )
            fits.append((float(error), shapes @ terms, shapes))
        _, power_w, shapes = min(fits, key=lambda fit: fit[0])
        kinds_w = power_w[:-1].reshape(num_kinds + 1, -1)
        # A few noisy refreshes may not separate one way of spending time from the others.
        if (kinds_w.max(axis=1) > 0).all():
            break
    explained = float(power_w @ (2 * wanted_j - products @ power_w))
    variance = (float(sums[-2, -2]) - explained) / max(float(sums[-1, -1]), 1.0)
    scatter_j = max(math.sqrt(max(variance, 0.0)), RESOLUTION_J)
    covariance = np.linalg.pinv(shapes.T @ products @ shapes + alike.T @ alike)
    errors = np.sqrt(np.einsum("ni,ij,nj->n", shapes, covariance, shapes))
    return kinds_w, scatter_j * errors[:-1].reshape(kinds_w.shape)


def _shapes(nodes_mhz: FloatArray, kinds: int, knee: float, limit_mhz: float) -> FloatArray:
    """Return static power, each kind's terms, two of waiting, and the tail's, [columns, terms]."""
    asked = nodes_mhz / nodes_mhz[-1]
    reached = np.minimum(nodes_mhz, limit_mhz) / limit_mhz
    above = np.maximum(reached - knee, 0.0)
    terms = reached[:, None] * np.stack([np.ones_like(above), above, above**2], axis=1)
    nodes = len(asked)
    shapes = np.zeros(((kinds + 1) * nodes + 1, 1 + _TERMS * kinds + 3))
    for kind in range(kinds):
        rows = slice(kind * nodes, (kind + 1) * nodes)
        shapes[rows, 0] = 1.0
        shapes[rows, 1 + _TERMS * kind : 1 + _TERMS * (kind + 1)] = terms
    waiting = 1 + _TERMS * kinds
    shapes[kinds * nodes : -1, waiting] = 1.0
    shapes[kinds * nodes : -1, waiting + 1] = asked
    shapes[-1, -1] = 1.0
    return shapes


def _alike(weight: float, kinds: int) -> FloatArray:
    """Return rows that are 0 where all kinds draw the same, and waiting and tail static power."""
    rows = np.zeros((_TERMS * (kinds - 1) + 3, 1 + _TERMS * kinds + 3))
    for term in range(_TERMS * (kinds - 1)):
        rows[term, 1 + term], rows[term, 1 + term + _TERMS] = weight, -weight
    rows[-3, 0], rows[-3, -3] = weight, -weight
    rows[-2, -3:] = weight, weight, -weight
    rows[-1, -2] = weight  # waiting that was seen at one clock only takes as much at others
    return rows


def power_nodes_mhz(clocks_mhz: Sequence[int]) -> FloatArray:
    """Return the nodes of the clock that every rank adds its meter's sums up at."""
    top_mhz = max(clocks_mhz)
    return np.linspace(_LOWEST_NODE * top_mhz, top_mhz, _NUM_NODES)
