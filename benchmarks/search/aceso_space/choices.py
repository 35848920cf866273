"""What can be computed again in a block: every useful choice, with its time and what it saves.

A piece that is an operator can be recomputed with its neighbours: in a *run* of operators of one
block, all outputs but the last are dropped after the forward, and are there again, together, while
the run's backward runs. A run of one saves nothing. Pieces with other recomputations (a whole layer
that is recomputed selectively or in full) choose one each. Aceso (EuroSys'24) counts runs so in its
cost model; enter at `Choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.layer_profile import Measure

#: The recomputation of single operators, in runs.
OPERATOR = "operator"
#: Amounts that differ by less are equal.
TINY_BYTES = 1e-3
#: A choice is a number with two bits for each piece: 0 for none, n for its n-th recomputation.
_BITS = 2
_WAY, _MOST_PIECES = (1 << _BITS) - 1, 63 // _BITS


@dataclass(frozen=True)
class Run:
    """Operators `first` to `end - 1` of a block, computed again."""

    first: int
    end: int

    def saved(self, activation_bytes: FloatArray) -> float:
        """Bytes that are not kept of a microbatch in flight."""
        return float(activation_bytes[self.first : self.end - 1].sum())

    def working(self, activation_bytes: FloatArray) -> float:
        """Bytes held besides during its backward.

        A run that ends with its block holds the block's output too, as it does where the next block
        begins with a run.
        """
        end = self.end if self.end == len(activation_bytes) else self.end - 1
        return float(activation_bytes[self.first : end].sum())


@dataclass(frozen=True)
class _Step:
    """Pieces `first` to `end - 1`, recomputed in one way; `before` it stands what may be chosen."""

    first: int
    end: int
    before: int
    saved_bytes: float
    working_bytes: float
    time_s: float
    choice: int


@dataclass(frozen=True)
class Front:
    """Choices that no other beats, by rising time: [num_choices] arrays.

    `working_bytes` are held besides while the block's backward runs.
    """

    saved_bytes: FloatArray
    time_s: FloatArray
    working_bytes: FloatArray
    choice: IntArray

    @cached_property
    def hull(self) -> IntArray:
        """Those that are best if a byte has a price, by rising price; the first saves nothing."""
        corners = [0]
        for index in range(1, len(self.time_s)):
            while len(corners) > 1 and self._slope(*corners[-2:]) >= self._slope(
                corners[-1], index
            ):
                corners.pop()
            corners.append(index)
        return np.array(corners)

    @cached_property
    def slopes(self) -> FloatArray:
        """Seconds for each byte from one corner of the hull to the next."""
        return np.diff(self.time_s[self.hull]) / self.steps_bytes

    @cached_property
    def steps_bytes(self) -> FloatArray:
        """Bytes saved from one corner of the hull to the next."""
        return np.diff(self.saved_bytes[self.hull])

    def _slope(self, one: int, other: int) -> float:
        time_s = self.time_s[other] - self.time_s[one]
        return float(time_s / (self.saved_bytes[other] - self.saved_bytes[one]))


_NOTHING = Front(np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1, dtype=np.int64))


class Choices:
    """Recomputations of one block at some sizes."""

    def __init__(self, pieces: Sequence[Measure]) -> None:
        assert len(pieces) <= _MOST_PIECES
        self._pieces, self.num_pieces = pieces, len(pieces)
        self._steps = list(_steps(pieces))
        self._fronts: dict[tuple[int, float], list[Front]] = {}

    @property
    def working_bytes(self) -> set[float]:
        """What the ways of recomputing can hold besides: the caps that make a difference."""
        return {step.working_bytes for step in self._steps}

    def front(self, first: int, end: int, cap_bytes: float) -> Front:
        """Choices for pieces `first` to `end - 1` that hold at most some bytes besides."""
        key = (first, cap_bytes)
        if key not in self._fronts:
            self._fronts[key] = self._fronts_from(first, cap_bytes)
        return self._fronts[key][end - first]

    def names(self, choice: int, first: int, end: int) -> list[str | None]:
        """The recomputation of each of the pieces under a choice."""
        ways = [(choice >> _BITS * piece) & _WAY for piece in range(first, end)]
        return [
            self._pieces[piece].recomputation[way - 1].name if way else None
            for piece, way in zip(range(first, end), ways, strict=True)
        ]

    def priced(self, prices: FloatArray, cap_bytes: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Least time less the price of what is saved, of the first n pieces and of those from n on.

        Args:
            prices: [num_prices], seconds for each byte.
            cap_bytes: [num_caps].

        Returns two arrays [num_pieces + 1, num_caps, num_prices].
        """
        shape = (len(cap_bytes), len(prices))
        length = self.num_pieces
        heads, tails = [np.zeros(shape)], [np.zeros(shape)]
        for end in range(1, length + 1):
            steps = [step for step in self._steps if step.end == end]
            values = [
                heads[max(step.before, 0)] + _value(step, prices, cap_bytes) for step in steps
            ]
            heads.append(np.minimum.reduce([heads[-1], *values]))
        for first in reversed(range(length)):
            steps = [step for step in self._steps if step.first == first]
            after = [min(step.end + step.first - step.before, length) for step in steps]
            values = [
                tails[length - end] + _value(step, prices, cap_bytes)
                for step, end in zip(steps, after, strict=True)
            ]
            tails.append(np.minimum.reduce([tails[-1], *values]))
        return np.stack(heads), np.stack(tails[::-1])

    def _fronts_from(self, first: int, cap_bytes: float) -> list[Front]:
        fronts = [_NOTHING]
        for end in range(first + 1, self.num_pieces + 1):
            parts = [fronts[-1]]
            for step in self._steps:
                if step.end == end and step.first >= first and step.working_bytes <= cap_bytes:
                    before = fronts[max(step.before - first, 0)]
                    parts.append(
                        Front(
                            before.saved_bytes + step.saved_bytes,
                            before.time_s + step.time_s,
                            np.maximum(before.working_bytes, step.working_bytes),
                            before.choice | step.choice,
                        )
                    )
            fronts.append(_unbeaten(parts))
        return fronts


def unbeaten(time_s: FloatArray, saved_bytes: FloatArray) -> IntArray:
    """Indices of those that save more than all that take no longer, by rising time.

    Less than a thousandth of a byte more is a rounding error.
    """
    order = np.lexsort((-saved_bytes, time_s))
    saved = saved_bytes[order]
    before = np.maximum.accumulate(np.concatenate([[-np.inf], saved[:-1]]))
    kept: IntArray = order[saved > before + TINY_BYTES]
    return kept


def _unbeaten(parts: Sequence[Front]) -> Front:
    if len(parts) == 1:
        return parts[0]
    saved_bytes = np.concatenate([part.saved_bytes for part in parts])
    time_s = np.concatenate([part.time_s for part in parts])
    working_bytes = np.concatenate([part.working_bytes for part in parts])
    choice = np.concatenate([part.choice for part in parts])
    kept = unbeaten(time_s, saved_bytes)
    return Front(saved_bytes[kept], time_s[kept], working_bytes[kept], choice[kept])


def _value(step: _Step, prices: FloatArray, cap_bytes: FloatArray) -> FloatArray:
    fits = cap_bytes[:, None] >= step.working_bytes
    return np.where(fits, step.time_s - prices * step.saved_bytes, np.inf)


def _steps(pieces: Sequence[Measure]) -> list[_Step]:
    """All runs of two operators or more, and the other recomputations of each piece."""
    activation_bytes = np.array([piece.activation_bytes for piece in pieces])
    runs = [
        run
        for first in range(len(pieces))
        for run in (Run(first, end) for end in range(first + 2, len(pieces) + 1))
        if all(_operator(piece) for piece in pieces[run.first : run.end])
    ]
    steps = [
        _Step(
            run.first,
            run.end,
            run.first - 1,  # what would join the run is not recomputed
            run.saved(activation_bytes),
            run.working(activation_bytes),
            float(sum(piece.recomputation[0].time_s[0] for piece in pieces[run.first : run.end])),
            sum(1 << _BITS * index for index in range(run.first, run.end)),
        )
        for run in runs
    ]
    steps += [
        _Step(
            index,
            index + 1,
            index,
            piece.activation_bytes - way.activation_bytes,
            way.working_bytes,
            float(way.time_s[0]),
            number << _BITS * index,
        )
        for index, piece in enumerate(pieces)
        for number, way in enumerate(piece.recomputation, start=1)
        if way.name != OPERATOR
    ]
    return steps


def _operator(piece: Measure) -> bool:
    return piece.way(OPERATOR) is not None
