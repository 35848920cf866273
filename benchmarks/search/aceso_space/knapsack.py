"""Least time to save some bytes, where each of many blocks makes one choice: an exact search.

The problem is a knapsack with multiple choices. Its relaxed form, in which a block may divide
itself between two choices, is solved by taking steps of all fronts' hulls from the cheapest byte
up, which gives a price of a byte. At this price each choice costs something over its block's best.
In the best selection these extra times add up to no more than what rounding the relaxed solution
costs, so few blocks differ from their best, and all such selections are tried (a *core*: Balas and
Zemel, 1980). Blocks that have the same choices are one class with a count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.search.aceso_space.choices import TINY_BYTES, Front, unbeaten
from envpipe_megatron.core.arrays import FloatArray, IntArray

#: What rounding errors may make of nothing, of a sum of reduced times.
_TINY_S = 1e-12


class Alike(NamedTuple):
    """Blocks that have the same choices."""

    front: Front
    num_blocks: int


class Selection(NamedTuple):
    """The least time, in s, and for each class how often each of its choices is taken."""

    time_s: float
    counts: tuple[IntArray, ...]


class _Relaxed(NamedTuple):
    """The relaxed problem's solution.

    Args:
        rounded_s: the time of a true solution, in which no block is divided.
        price: of the last byte, in s.
        divided: number of the class with the divided block, and the choices between which it is.
    """

    time_s: float
    rounded_s: float
    price: float
    divided: int
    between: tuple[int, int]


class _States(NamedTuple):
    """Selections of some classes: [num_states], and [num_states, num_choices] for each class.

    `spent_s` are their reduced times, less those of the best.
    """

    saved_bytes: FloatArray
    time_s: FloatArray
    spent_s: FloatArray
    counts: tuple[IntArray, ...]

    def at(self, index: IntArray) -> _States:
        """Some of them."""
        saved_bytes, time_s, spent_s = self.saved_bytes, self.time_s, self.spent_s
        counts = tuple(each[index] for each in self.counts)
        return _States(saved_bytes[index], time_s[index], spent_s[index], counts)


def solve(
    classes: Sequence[Alike], bytes_to_save: float, cap_bytes: float, below_s: float
) -> Selection | None:
    """Find the selection with the least time; None if none saves enough in less than some s.

    No choice holds more than `cap_bytes` besides, and selections of which none holds as much may be
    left out: they are found under a smaller cap.
    """
    relaxed = _relax(classes, bytes_to_save)
    if relaxed is None or relaxed.time_s >= below_s:
        return None
    spare_s = min(relaxed.rounded_s, below_s) - relaxed.time_s + _TINY_S
    to_cap_s = min(
        _extra_s(front, relaxed.price)[front.working_bytes >= cap_bytes].min(initial=np.inf)
        for front, _ in classes
    )
    if to_cap_s > spare_s:
        return None
    states = _States(np.zeros(1), np.zeros(1), np.zeros(1), ())
    # The class of which a block is divided comes last, to fill up what is missing.
    order = sorted(range(len(classes)), key=lambda number: number == relaxed.divided)
    for number in order:
        fills = (relaxed.between, bytes_to_save) if number == relaxed.divided else None
        states = _with_class(states, classes[number], relaxed.price, spare_s, fills)
    enough = np.flatnonzero(states.saved_bytes + TINY_BYTES >= bytes_to_save)
    if not len(enough):
        return None
    best = enough[np.argmin(states.time_s[enough])]
    chosen = dict(zip(order, (counts[best] for counts in states.counts), strict=True))
    return Selection(float(states.time_s[best]), tuple(chosen[n] for n in range(len(classes))))


def _relax(classes: Sequence[Alike], bytes_to_save: float) -> _Relaxed | None:
    """Solve the relaxed problem; None if so much cannot be saved."""
    fronts = [alike.front for alike in classes]
    number = np.repeat(np.arange(len(classes)), [len(front.slopes) for front in fronts])
    slopes = np.concatenate([front.slopes for front in fronts])
    order = np.argsort(slopes, kind="stable")
    slopes, number = slopes[order], number[order]
    each = np.concatenate([front.steps_bytes for front in fronts])[order]
    total = np.cumsum(each * np.array([alike.num_blocks for alike in classes])[number])
    if not len(total) or total[-1] + TINY_BYTES < bytes_to_save:
        return None
    last = min(int(np.searchsorted(total, bytes_to_save)), len(total) - 1)
    amounts = np.diff(total, prepend=0.0)[:last]
    time_s = float((amounts * slopes[:last]).sum())
    rest = bytes_to_save - float(amounts.sum())
    # A true solution: as many whole steps as fit, and one block that makes any other choice.
    whole = min(int(rest / each[last]), classes[number[last]].num_blocks - 1)
    taken = np.bincount(number[:last], minlength=len(classes))
    odd_s = min(
        _odd_s(front, int(front.hull[corner]), rest - whole * each[last])
        for front, corner in zip(fronts, taken, strict=True)
    )
    return _Relaxed(
        time_s=time_s + float(rest * slopes[last]),
        rounded_s=time_s + float(whole * each[last] * slopes[last]) + odd_s,
        price=float(slopes[last]),
        divided=int(number[last]),
        between=tuple(fronts[number[last]].hull[taken[number[last]] :][:2].tolist()),
    )


def _odd_s(front: Front, now: int, bytes_to_save: float) -> float:
    """Least time that a block adds if it changes from a choice to one that saves so much more."""
    enough = np.searchsorted(front.saved_bytes - front.saved_bytes[now], bytes_to_save - TINY_BYTES)
    return (
        math.inf if enough == len(front.time_s) else float(front.time_s[enough] - front.time_s[now])
    )


def _extra_s(front: Front, price: float) -> FloatArray:
    """What each choice costs over the best at a price of a byte."""
    reduced_s = front.time_s - price * front.saved_bytes
    extra_s: FloatArray = reduced_s - reduced_s.min()
    return extra_s


def _with_class(
    states: _States,
    alike: Alike,
    price: float,
    spare_s: float,
    fills: tuple[tuple[int, int], float] | None,
) -> _States:
    """Selections with one class more whose reduced times add up to what can be spared at most.

    With `fills`, two choices and bytes to save, as many blocks as are needed change from the first
    to the second.
    """
    front, count = alike
    extra_s = _extra_s(front, price)
    base, fill = fills[0] if fills else (int(np.argmin(extra_s)), -1)
    moves = np.flatnonzero(extra_s <= spare_s)
    moves = moves[(moves != base) & (moves != fill)]
    counts = np.zeros((len(states.time_s), len(extra_s)), dtype=np.int64)
    counts[:, base] = count
    layers = [
        _States(
            states.saved_bytes + count * front.saved_bytes[base],
            states.time_s + count * front.time_s[base],
            states.spent_s,
            (*states.counts, counts),
        )
    ]
    # In each layer, one block more makes another choice than most.
    while len(moves) and len(layers) <= count:
        state, move = np.nonzero(layers[-1].spent_s[:, None] + extra_s[moves] <= spare_s)
        if not len(state):
            break
        ones = np.ones(len(state), dtype=np.int64)
        layer = _moved(layers[-1].at(state), front, extra_s, base, moves[move], ones)
        layers.append(layer.at(unbeaten(layer.time_s, layer.saved_bytes)))
    if fills:
        for number, layer in enumerate(layers):
            missing = fills[1] - TINY_BYTES - layer.saved_bytes
            blocks = np.ceil(missing / (front.saved_bytes[fill] - front.saved_bytes[base]))
            blocks = blocks.clip(0, count - number).astype(np.int64)
            fill_all = np.full(len(blocks), fill)
            layers[number] = _moved(layer, front, extra_s, base, fill_all, blocks)
    joined = _States(
        np.concatenate([layer.saved_bytes for layer in layers]),
        np.concatenate([layer.time_s for layer in layers]),
        np.concatenate([layer.spent_s for layer in layers]),
        tuple(map(np.concatenate, zip(*(layer.counts for layer in layers), strict=True))),
    )
    return joined.at(unbeaten(joined.time_s, joined.saved_bytes))


def _moved(
    states: _States,
    front: Front,
    extra_s: FloatArray,
    base: int,
    choice: IntArray,
    blocks: IntArray,
) -> _States:
    """In each state some blocks of the last class move from the base to another choice."""
    counts, rows = states.counts[-1].copy(), np.arange(len(choice))
    counts[rows, base] -= blocks
    counts[rows, choice] += blocks
    return _States(
        states.saved_bytes + blocks * (front.saved_bytes[choice] - front.saved_bytes[base]),
        states.time_s + blocks * (front.time_s[choice] - front.time_s[base]),
        states.spent_s + blocks * extra_s[choice],
        (*states.counts[:-1], counts),
    )
