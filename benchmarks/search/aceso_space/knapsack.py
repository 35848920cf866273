"""Least time to save some bytes, where each of many blocks makes one choice: an exact search.

The problem is a knapsack with multiple choices. Its relaxed form, in which a block may divide
itself between two choices, is solved by taking steps of all fronts' hulls from the cheapest byte
up, which gives a price of a byte. At this price each choice costs something over its block's best.
In the best selection these extra times add up to no more than what rounding the relaxed solution
costs, so few blocks differ from their best, and all such selections are tried (a *core*: Balas and
Zemel, 1980). Blocks that have the same choices are one class with a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.search.aceso_space.choices import TINY_BYTES, Front, unbeaten
from envpipe_megatron.core.arrays import FloatArray, IntArray

#: What rounding errors may make of nothing, of a sum of reduced times.
_TINY_S = 1e-12


@dataclass(frozen=True)
class Alike:
    """Blocks that have the same choices."""

    front: Front
    count: int


@dataclass(frozen=True)
class Selection:
    """The least time, in s, and for each class how often each of its choices is taken."""

    time_s: float
    counts: tuple[IntArray, ...]


@dataclass(frozen=True)
class _Relaxed:
    """The relaxed problem's solution.

    Args:
        time_s: a lower bound on the time.
        rounded_s: the time of a true solution, in which no block is divided.
        price: of the last byte, in s.
        divided: number of the class with the divided block.
    """

    time_s: float
    rounded_s: float
    price: float
    divided: int


@dataclass(frozen=True)
class _States:
    """Selections of some classes: [num_states], and [num_states, num_choices] for each class.

    `spent_s` are their reduced times, less those of the best.
    """

    saved_bytes: FloatArray
    time_s: FloatArray
    spent_s: FloatArray
    counts: tuple[IntArray, ...]

    def at(self, index: IntArray) -> _States:
        return _States(
            self.saved_bytes[index],
            self.time_s[index],
            self.spent_s[index],
            tuple(each[index] for each in self.counts),
        )


def solve(
    classes: Sequence[Alike], bytes_to_save: float, cap_bytes: float, below_s: float
) -> Selection | None:
    """The selection with the least time; None if none saves enough in less than some s.

    No choice holds more than `cap_bytes` besides, and selections of which none holds as much may be
    left out: they are found under a smaller cap.
    """
    relaxed = _relax(classes, bytes_to_save)
    if relaxed is None or relaxed.time_s >= below_s:
        return None
    spare_s = min(relaxed.rounded_s, below_s) - relaxed.time_s + _TINY_S
    extra_s = [_extra_s(alike.front, relaxed.price) for alike in classes]
    to_cap_s = min(
        extra[alike.front.working_bytes >= cap_bytes].min(initial=np.inf)
        for extra, alike in zip(extra_s, classes, strict=True)
    )
    if to_cap_s > spare_s:
        return None
    # The class of which a block is divided comes last, to fill up what is missing.
    order = sorted(range(len(classes)), key=lambda number: number == relaxed.divided)
    states = _States(np.zeros(1), np.zeros(1), np.zeros(1), ())
    for number in order[:-1]:
        best = int(np.argmin(extra_s[number]))
        states = _joined(_with_class(states, classes[number], extra_s[number], spare_s, best))
    last, extra = classes[order[-1]], extra_s[order[-1]]
    step = int(np.searchsorted(last.front.slopes, relaxed.price))
    base, fill = (int(choice) for choice in last.front.hull[step : step + 2])
    layers = _with_class(states, last, extra, spare_s, base, left_out=fill)
    states = _joined(
        [
            _filled(layer, last.front, extra, base, fill, last.count - used, bytes_to_save)
            for used, layer in enumerate(layers)
        ]
    )
    enough = np.flatnonzero(states.saved_bytes + TINY_BYTES >= bytes_to_save)
    if not len(enough):
        return None
    best = enough[np.argmin(states.time_s[enough])]
    chosen = dict(zip(order, (counts[best] for counts in states.counts), strict=True))
    return Selection(
        float(states.time_s[best]), tuple(chosen[number] for number in range(len(classes)))
    )


def _relax(classes: Sequence[Alike], bytes_to_save: float) -> _Relaxed | None:
    """Solve the relaxed problem; None if so much cannot be saved."""
    fronts = [alike.front for alike in classes]
    number = np.repeat(np.arange(len(classes)), [len(front.slopes) for front in fronts])
    slopes = np.concatenate([front.slopes for front in fronts])
    order = np.argsort(slopes, kind="stable")
    slopes, number = slopes[order], number[order]
    each = np.concatenate([front.steps_bytes for front in fronts])[order]
    total = np.cumsum(each * np.array([alike.count for alike in classes])[number])
    if not len(total) or total[-1] + TINY_BYTES < bytes_to_save:
        return None
    last = min(int(np.searchsorted(total, bytes_to_save)), len(total) - 1)
    amounts = np.diff(total, prepend=0.0)[:last]
    time_s = float((amounts * slopes[:last]).sum())
    rest = bytes_to_save - float(amounts.sum())
    # A true solution: as many whole steps as fit, and one block that makes any other choice.
    whole = min(int(rest / each[last]), classes[number[last]].count - 1)
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
    )


def _odd_s(front: Front, now: int, bytes_to_save: float) -> float:
    """Least time that a block adds if it changes from a choice to one that saves so much more."""
    enough = np.searchsorted(front.saved_bytes - front.saved_bytes[now], bytes_to_save - TINY_BYTES)
    return (
        np.inf if enough == len(front.time_s) else float(front.time_s[enough] - front.time_s[now])
    )


def _extra_s(front: Front, price: float) -> FloatArray:
    """What each choice costs over the best at a price of a byte."""
    reduced_s = front.time_s - price * front.saved_bytes
    extra_s: FloatArray = reduced_s - reduced_s.min()
    return extra_s


def _with_class(
    states: _States,
    alike: Alike,
    extra_s: FloatArray,
    spare_s: float,
    base: int,
    left_out: int = -1,
) -> list[_States]:
    """Selections with one class more, by how many of its blocks do not make the base choice.

    All of which the reduced times add up to what can be spared; one choice can be left out.
    """
    front = alike.front
    moves = np.flatnonzero(extra_s <= spare_s)
    moves = moves[(moves != base) & (moves != left_out)]
    counts = np.zeros((len(states.time_s), len(extra_s)), dtype=np.int64)
    counts[:, base] = alike.count
    layer = _States(
        states.saved_bytes + alike.count * front.saved_bytes[base],
        states.time_s + alike.count * front.time_s[base],
        states.spent_s,
        (*states.counts, counts),
    )
    layers = [layer]
    for _ in range(alike.count if len(moves) else 0):
        fits = layer.spent_s[:, None] + extra_s[moves] <= spare_s
        state, move = np.nonzero(fits)
        if not len(state):
            break
        layer = _moved(layer.at(state), front, extra_s, base, moves[move], np.ones(len(state), int))
        layer = layer.at(unbeaten(layer.time_s, layer.saved_bytes))
        layers.append(layer)
    return layers


def _filled(
    states: _States,
    front: Front,
    extra_s: FloatArray,
    base: int,
    fill: int,
    left: int,
    bytes_to_save: float,
) -> _States:
    """As many blocks as needed, of those that are left, move from the base to another choice."""
    missing = bytes_to_save - TINY_BYTES - states.saved_bytes
    blocks = np.ceil(missing / (front.saved_bytes[fill] - front.saved_bytes[base]))
    blocks = np.clip(blocks, 0, left).astype(np.int64)
    return _moved(states, front, extra_s, base, np.full(len(blocks), fill), blocks)


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


def _joined(layers: Sequence[_States]) -> _States:
    """All states that no other beats."""
    states = _States(
        np.concatenate([layer.saved_bytes for layer in layers]),
        np.concatenate([layer.time_s for layer in layers]),
        np.concatenate([layer.spent_s for layer in layers]),
        tuple(map(np.concatenate, zip(*(layer.counts for layer in layers), strict=True))),
    )
    return states.at(unbeaten(states.time_s, states.saved_bytes))
