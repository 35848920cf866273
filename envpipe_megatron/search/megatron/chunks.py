"""Cuts into virtual stages: slots of pieces, of which stage s has every p-th from s on.

The evenest slots come from the dynamic program of plain stages; then single pieces move between
slots as long as that shortens the estimate. Unlike the plain cut this need not be the best one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.megatron.cuts import Pieces, Runs, Shape, least_path

_BETTER = 1 - 1e-9


def spread(pieces: Pieces, shape: Shape) -> IntArray | None:
    """[slots + 1] the first piece of each slot, and the number of pieces; None for too few."""
    slots = shape.num_stages * shape.num_chunks
    if pieces.num_pieces < slots:
        return None
    runs = Runs(pieces, np.arange(pieces.num_pieces + 1), pieces.num_pieces)
    weight = np.where(runs.inside, runs.time_s, np.inf)
    _, cut = least_path([weight] * slots, largest=True)
    return _improved(cut, lambda some: _estimates_s(pieces, shape, some))


def _improved(cut: IntArray, estimate: Callable[[IntArray], FloatArray]) -> IntArray:
    """The cut after the best single moves, until none is better."""
    value = float(estimate(cut[None])[0])
    while True:
        moved = np.array(list(_moves(cut)))
        if not len(moved):
            return cut
        values = estimate(moved)
        best = int(values.argmin())
        if values[best] >= value * _BETTER:
            return cut
        cut, value = moved[best], float(values[best])


def _moves(cut: IntArray) -> Iterator[IntArray]:
    """Cuts in which one piece less is in one slot, and one more in another."""
    for a in range(1, len(cut) - 1):
        for b in range(a, len(cut) - 1):
            for step in (-1, 1):
                moved = cut.copy()
                moved[a : b + 1] += step
                if (np.diff(moved) > 0).all():
                    yield moved


def _estimates_s(pieces: Pieces, shape: Shape, cuts: IntArray) -> FloatArray:
    """[num_cuts] the least time that the slowest stage forces.

    All its microbatches, and the way of the first one there and of the last one back through the
    slots before it.
    """
    slot_s = np.diff(pieces.time_s[cuts], axis=1)
    by_chunk = slot_s.reshape(len(cuts), shape.num_chunks, shape.num_stages)
    ahead_s = np.cumsum(by_chunk[:, 0], axis=1) - by_chunk[:, 0]
    times_s: FloatArray = (shape.num_microbatches * by_chunk.sum(axis=1) + ahead_s).max(axis=1)
    return times_s
