"""How time and power follow the clock: models with few parameters, fitted to few measurements.

A unit takes `a + b / g`, where `g` is the clock that the GPU reaches: the one that is asked for, up
to the clock where a power limit holds it. Power is `s + g (c0 + c1 u + c2 u^2)`, where `u` is how
far `g` lies above the knee up to which the voltage stays at its floor. On published profiles of
A100 and A40, five clocks give all others to 0.5 % in time and 1.1 % in energy in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from envpipe_megatron.core.arrays import FloatArray

#: Limits that are tried, as shares of the highest clock.
_LIMITS = np.linspace(1.0, 0.6, 41)
#: A lower limit must explain the times better by this, or the higher one stays.
_CLEARLY_BETTER = 1e-4
#: Knees that are tried, as shares of the highest clock.
_KNEES = np.linspace(0.4, 0.95, 23)
#: Terms of a kind's power beside the static one.
_TERMS = 3


def fit_times_s(
    clocks_mhz: FloatArray,
    measured_mhz: Sequence[float],
    measured_s: Sequence[float],
    trust: FloatArray | None = None,
) -> tuple[FloatArray, float]:
    """Times at some clocks from measured ones, and the clock in MHz that no GPU goes beyond.

    They equal the measured ones where both have a clock and these are trusted. Between measured
    clocks, what the model misses there is interpolated; beyond them it is kept.

    Args:
        clocks_mhz: ascending.
        measured_mhz: ascending, one at least; with a single one, all of the time follows the clock.
        measured_s: in the same order.
        trust: of each, from 0 to 1, by default in full: of the one the model's error is known, of
            the other nothing but scatter.
    """
    known_mhz, known_s = np.array(measured_mhz, dtype=float), np.array(measured_s)
    trust = np.ones_like(known_s) if trust is None else trust
    limit_mhz, terms = _fit_time(known_mhz, known_s, trust)

    def model_s(at_mhz: FloatArray) -> FloatArray:
        return np.asarray(terms[0] + terms[1] / np.minimum(at_mhz, limit_mhz))

    missed = trust**2 * (known_s / model_s(known_mhz) - 1)
    return model_s(clocks_mhz) * (1 + np.interp(clocks_mhz, known_mhz, missed)), limit_mhz


def _fit_time(
    known_mhz: FloatArray, known_s: FloatArray, trust: FloatArray
) -> tuple[float, FloatArray]:
    top_mhz = known_mhz[-1]
    if len(known_mhz) == 1:
        return float(top_mhz), np.array([0.0, known_s[0] * top_mhz])
    limits_mhz = _LIMITS * top_mhz
    constant = trust / known_s
    slowed = constant * top_mhz / np.minimum(known_mhz, limits_mhz[:, None])
    terms, errors = _two_terms(constant, slowed, trust)
    best = 0
    for at, error in enumerate(errors.tolist()):
        if error < errors[best] - _CLEARLY_BETTER:
            best = at
    return float(limits_mhz[best]), terms[best] * [1, top_mhz]


def _two_terms(
    first: FloatArray, second: FloatArray, wanted: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """[fits, 2] terms of least squares, none below zero, and [fits] what they miss by.

    All fits have the first column, [rows]; each has a second of its own, [fits, rows].
    """
    aa, ab, bb = first @ first, second @ first, (second**2).sum(axis=1)
    aw, bw = first @ wanted, second @ wanted
    none = np.zeros_like(bb)
    with np.errstate(divide="ignore", invalid="ignore"):  # where both columns are alike
        both = np.stack([bb * aw - ab * bw, aa * bw - ab * aw]) / (aa * bb - ab**2)
        choices = np.stack([both, [none + aw / aa, none], [none, bw / bb]])
        missed = choices[:, 0, :, None] * first + choices[:, 1, :, None] * second - wanted
        errors = np.linalg.norm(missed, axis=2)
    errors[~(choices >= 0).all(axis=1)] = np.inf  # nor what is no number
    best, fits = errors.argmin(axis=0), np.arange(len(bb))
    return choices[best, :, fits], errors[best, fits]


class PowerModel:
    """Power of each kind of unit, of waiting and of the tail, on one GPU.

    Args:
        nodes_mhz: [nodes] clocks at which powers stand in sums, the highest last.
        num_kinds: kinds of units.
    """

    def __init__(self, nodes_mhz: FloatArray, num_kinds: int) -> None:
        self._nodes_mhz = nodes_mhz
        self._num_kinds = num_kinds

    def fit(
        self,
        products: FloatArray,
        weighted: FloatArray,
        limit_mhz: float,
        alikeness: float = 1e-5,
    ) -> tuple[FloatArray, float]:
        """[kinds + 1, nodes] W, waiting last, and the tail's, from sums of what was measured.

        Kinds that nothing tells apart are taken to draw the same power.

        Args:
            products: [columns, columns] sums of products of times, s^2; see `meter_sums`.
            weighted: [columns] sums of times by energies, s J.
            limit_mhz: the clock that units do not go beyond.
            alikeness: how much it counts that all draw the same, against what was measured.
        """
        values, vectors = np.linalg.eigh(products)
        kept = values > 1e-9 * values[-1]
        root = np.sqrt(values[kept])
        rows = root[:, None] * vectors[:, kept].T
        wanted = (vectors[:, kept].T @ weighted) / root
        alike = self._alike(np.sqrt(alikeness * values[-1]))
        best: tuple[float, FloatArray] | None = None
        for knee in _KNEES:
            shapes = self._shapes(knee, limit_mhz)
            terms, error = nnls(
                np.concatenate([rows @ shapes, alike]),
                np.concatenate([wanted, np.zeros(len(alike))]),
                maxiter=100 * shapes.shape[1],
            )
            if best is None or error < best[0]:
                best = float(error), shapes @ terms
        assert best is not None
        power_w = best[1]
        return power_w[:-1].reshape(self._num_kinds + 1, -1), float(power_w[-1])

    def _shapes(self, knee: float, limit_mhz: float) -> FloatArray:
        """[columns, terms]: static power, each kind's terms, two of waiting, and the tail's."""
        asked = self._nodes_mhz / self._nodes_mhz[-1]
        reached = np.minimum(self._nodes_mhz, limit_mhz) / limit_mhz
        above = np.maximum(reached - knee, 0.0)
        terms = reached[:, None] * np.stack([np.ones_like(above), above, above**2], axis=1)
        nodes, kinds = len(asked), self._num_kinds
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

    def _alike(self, weight: float) -> FloatArray:
        """Rows that are 0 where all kinds draw the same, and waiting and tail static power."""
        kinds = self._num_kinds
        rows = np.zeros((_TERMS * (kinds - 1) + 3, 1 + _TERMS * kinds + 3))
        for term in range(_TERMS * (kinds - 1)):
            rows[term, 1 + term], rows[term, 1 + term + _TERMS] = weight, -weight
        rows[-3, 0], rows[-3, -3] = weight, -weight
        rows[-2, -3:] = weight, weight, -weight
        rows[-1, -2] = weight  # waiting that was seen at one clock alone takes as much at others
        return rows
