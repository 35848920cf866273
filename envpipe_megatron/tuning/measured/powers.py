"""How power follows the clock: fitted to what energy counters said of all that a stage did.

Power is `s + g (c0 + c1 u + c2 u^2)`, where `g` is the clock that the GPU reaches and `u` how far
it lies above the knee up to which the voltage stays at its floor. On published profiles of A100 and
A40, five clocks give all others to 1.1 % in energy in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.tuning.measured.meters import MeterSums, meter_sums

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


class StoreError(EnvPipeError):
    """Measurements that say too little."""


class Powers:
    """Energies that the counters of stages said, and the powers that explain them.

    Args:
        num_stages: p.
        clocks_mhz: those that plans may use.
        num_kinds: kinds of units.

    Attributes:
        nodes_mhz: [nodes] clocks at which sums have powers, rising.
        sums: of each stage.
    """

    def __init__(self, num_stages: int, clocks_mhz: Sequence[int], num_kinds: int) -> None:
        self.nodes_mhz = power_nodes_mhz(clocks_mhz)
        self._needs_meters = len(clocks_mhz) > 1
        self._num_kinds = num_kinds
        columns = (num_kinds + 1) * _NUM_NODES + 1
        self.sums = [MeterSums.none(columns) for _ in range(num_stages)]

    def look(self, stage: int, kind: int, clock_mhz: float, power_w: float) -> None:
        """Add what a counter would have said of a second spent so."""
        second, energies_j = np.array([[1.0], [kind], [clock_mhz]]), np.array([0.0, power_w])
        self.sums[stage] += meter_sums(
            0.0, second, np.array([0.0, 1.0]), energies_j, self.nodes_mhz, self._num_kinds
        )

    def add(self, stage: int, sums: MeterSums, fades: float) -> None:
        """Add what counters of a stage said; what they said before keeps this share of weight."""
        self.sums[stage] = self.sums[stage].faded(fades) + sums

    def fade(self, share: float) -> None:
        """Let all that was said keep this share of its weight."""
        self.sums = [sums.faded(share) for sums in self.sums]

    def fit(self, stage: int, limit_mhz: float) -> tuple[FloatArray, FloatArray]:
        """Return W of a GPU of a stage, [kinds + 1, nodes], waiting last, and their errors.

        Units go beyond no clock above the limit. Without meters, StoreError; or 0 W where there is
        only one clock, as nothing is decided by powers then.
        """
        sums = self.sums[stage]
        if not np.trace(sums.products) > 0:
            if not self._needs_meters:
                nothing_w = np.zeros((self._num_kinds + 1, len(self.nodes_mhz)))
                return nothing_w, nothing_w
            raise StoreError(
                f"The energy counters of stage {stage} have said nothing",
                remedy="Look at the driver's log; a profile by file needs no counter.",
            )
        power_w, tail_w, errors = fit_powers(sums, self.nodes_mhz, self._num_kinds, limit_mhz)
        return power_w, sums.scatter_j(np.append(power_w, tail_w)) * errors


def fit_powers(
    sums: MeterSums, nodes_mhz: FloatArray, num_kinds: int, limit_mhz: float
) -> tuple[FloatArray, float, FloatArray]:
    """Fit the power of each kind of unit, of waiting and of the tail, on one GPU.

    Kinds that no measurement separates are taken to draw the same power.

    Args:
        sums: of what was measured; some time, at least.
        nodes_mhz: [nodes] clocks at which sums have powers, the highest last.
        num_kinds: kinds of units.
        limit_mhz: the clock that units do not go beyond.

    Returns:
        [kinds + 1, nodes] W, waiting last; the tail's; and [kinds + 1, nodes] their standard errors
        per J that readings scatter by.
    """
    products = sums.products
    values, vectors = np.linalg.eigh(products)
    kept = values > 1e-9 * values[-1]
    root = np.sqrt(values[kept])
    rows = root[:, None] * vectors[:, kept].T
    wanted = (vectors[:, kept].T @ sums.weighted) / root
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
    covariance = np.linalg.pinv(shapes.T @ products @ shapes + alike.T @ alike)
    errors = np.sqrt(np.einsum("ni,ij,nj->n", shapes, covariance, shapes))
    return kinds_w, float(power_w[-1]), errors[:-1].reshape(kinds_w.shape)


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
