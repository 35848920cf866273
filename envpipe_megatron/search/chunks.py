"""Cuts into virtual stages: slots of pieces, of which stage s has every p-th from s on.

The evenest slots come from the dynamic program of plain stages; then single pieces move between
slots as long as that shortens the estimate. Unlike the plain cut this need not be the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.cuts import Shape, least_path
from envpipe_megatron.search.runs import Pieces, runs_within

_BETTER = 1 - 1e-9


def spread(pieces: Pieces, shape: Shape) -> IntArray | None:
    """[slots + 1] the first piece of each slot, and the number of pieces; None for too few."""
    slots = shape.num_stages * shape.num_chunks
    if pieces.num_pieces < slots:
        return None
    # Slots that are filled one after another exceed their share by less than a piece.
    longest_s = pieces.time_s[-1] / slots + np.diff(pieces.time_s).max()
    runs = runs_within(pieces, np.arange(pieces.num_pieces + 1), slots, longest_s / _BETTER)
    assert runs is not None
    weights = [np.where(each.inside, each.time_s, np.inf) for each in runs]
    _, cut = least_path(runs, weights, largest=True)
    return _improved(pieces, shape, cut)


def _improved(pieces: Pieces, shape: Shape, cut: IntArray) -> IntArray:
    """The cut after the best moves out of the stage that forces the most, until none helps."""
    value = float(_forced_s(pieces, shape, cut[None]).max())
    while True:
        worst = int(_forced_s(pieces, shape, cut[None])[0].argmax())
        moved = np.array(list(_moves(cut, range(worst, len(cut) - 1, shape.num_stages))))
        if not len(moved):
            return cut
        values = _forced_s(pieces, shape, moved).max(axis=1)
        best = int(values.argmin())
        if values[best] >= value * _BETTER:
            return cut
        cut, value = moved[best], float(values[best])


def _moves(cut: IntArray, slots: Iterable[int]) -> Iterator[IntArray]:
    """Cuts in which one of some slots has one piece less, and another slot one more."""
    for slot in slots:
        if cut[slot + 1] - cut[slot] == 1:
            continue
        for other in range(len(cut) - 1):
            moved = cut.copy()
            if other < slot:
                moved[other + 1 : slot + 1] += 1
            elif other > slot:
                moved[slot + 1 : other + 1] -= 1
            else:
                continue
            yield moved


def _forced_s(pieces: Pieces, shape: Shape, cuts: IntArray) -> FloatArray:
    """[num_cuts, num_stages] the least time (s) that each stage forces.

    All its microbatches, and the way of the first one there and of the last one back through the
    slots before it.
    """
    slot_s = np.diff(pieces.time_s[cuts], axis=1)
    by_chunk = slot_s.reshape(len(cuts), shape.num_chunks, shape.num_stages)
    ahead_s = np.cumsum(by_chunk[:, 0], axis=1) - by_chunk[:, 0]
    forced_s: FloatArray = shape.num_microbatches * by_chunk.sum(axis=1) + ahead_s
    return forced_s
