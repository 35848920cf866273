"""What a stage must compute again to fit: a quick lower bound for many stages, exact for one.

Each block of a stage, whole or cut by the stage's edges, makes one choice (`choices.Choices`).
Together they must save enough for all microbatches in flight, and for what the largest
recomputation holds besides, of which *caps* are tried: under a cap, choices that hold more are left
out. Bounds price bytes (Lagrange): at any price each block's best is found for itself, and so can
be summed over blocks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from benchmarks.search.aceso_space.choices import Choices
from benchmarks.search.aceso_space.knapsack import Alike, solve
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

#: Prices of a byte at which bounds are taken, and caps under which hulls are looked at for them.
_MOST_PRICES, _LOOKED_AT = 12, 8
#: How much dearer than any step of a hull the price is that tells what cannot fit.
_DEAR = 1000.0


@dataclass(frozen=True)
class Recomputed:
    """What a stage computes again: time in s, and the recomputation of each of its pieces."""

    time_s: float
    ways: tuple[str | None, ...]


class _Part(NamedTuple):
    """Pieces `first` to `end - 1` of a block of some kind."""

    kind: int
    first: int
    end: int


class StageRecompute:
    """The recomputation of any stage at some sizes."""

    def __init__(self, profile: LayerProfile, sizes: Sizes) -> None:
        measures = profile.at(sizes)
        self._kinds = [Choices([measures[p] for p in block.pieces]) for block in profile.blocks]
        repeats = [block.repeat for block in profile.blocks]
        self._kind_of_block = np.repeat(np.arange(len(repeats)), repeats)
        self._edges = np.array(profile.block_edges)
        self._cuts = np.arange(len(profile.pieces) + 1)
        self._block_before = np.searchsorted(self._edges, self._cuts, side="right") - 1
        self._block_behind = np.searchsorted(self._edges, self._cuts)
        caps = set().union(*(kind.working_bytes for kind in self._kinds)) or {0.0}
        self._caps = np.array(sorted(caps))
        self._prices = self._good_prices()
        # Of each kind [num_pieces + 1, num_caps, num_prices]: its first pieces, and its last.
        self._priced = [kind.priced(self._prices, self._caps) for kind in self._kinds]
        self._priced_at_cuts = self._price_cuts()

    def bound_s(
        self, first: IntArray, end: IntArray, over_bytes: FloatArray, in_flight: int
    ) -> FloatArray:
        """[num_stages] a lower bound on the time for stages that hold too much by some bytes.

        The price is taken at which it is highest. All choices are open, with the smallest cap.
        """
        to_save = (over_bytes + self._caps[0]) / in_flight
        in_one_block = self._block_behind[first] > self._block_before[end]
        from_first, to_end, of_head = self._priced_at_cuts
        rest_s = from_first[:, first] + to_end[:, end]
        rest_s = np.where(in_one_block, of_head[:, end], rest_s) + self._prices[:, None] * to_save
        return np.where(over_bytes > 0, rest_s.max(axis=0, initial=0.0), 0.0)

    def solve(
        self, first: int, end: int, over_bytes: float, in_flight: int, below_s: float
    ) -> Recomputed | None:
        """The least time with which a stage fits, over all choices; None if not below some s."""
        parts = self._parts(first, end)
        counts = Counter(parts)
        to_save = (over_bytes + self._caps) / in_flight
        priced = sum(count * self._part_priced(part) for part, count in counts.items())
        bounds_s = (priced + self._prices * to_save[:, None]).max(axis=1, initial=0.0)
        best_s, best = below_s, None
        for cap in np.argsort(bounds_s, kind="stable"):
            if bounds_s[cap] >= best_s:
                break
            classes = [
                Alike(self._kinds[part.kind].front(part.first, part.end, self._caps[cap]), count)
                for part, count in counts.items()
            ]
            selection = solve(classes, to_save[cap], self._caps[cap], best_s)
            if selection is not None and selection.time_s < best_s:
                best_s = selection.time_s
                best = {
                    part: iter(np.repeat(alike.front.choice, number))
                    for part, alike, number in zip(counts, classes, selection.counts, strict=True)
                }
        if best is None:
            return None
        name = cache(lambda part, choice: self._kinds[part.kind].names(choice, *part[1:]))
        ways = (way for part in parts for way in name(part, int(next(best[part]))))
        return Recomputed(float(best_s), tuple(ways))

    def _parts(self, first: int, end: int) -> list[_Part]:
        blocks = range(self._block_before[first], self._block_behind[end])
        return [
            _Part(
                int(self._kind_of_block[block]),
                max(first - int(self._edges[block]), 0),
                int(min(end, self._edges[block + 1]) - self._edges[block]),
            )
            for block in blocks
        ]

    def _part_priced(self, part: _Part) -> FloatArray:
        """[num_caps, num_prices] a lower bound, exact if the part has an end of its block."""
        heads, tails = self._priced[part.kind]
        whole = self._kinds[part.kind].num_pieces
        priced: FloatArray = heads[part.end] if part.end < whole else tails[part.first]
        return priced

    def _good_prices(self) -> FloatArray:
        """Of the steps of all blocks' hulls, thinned to some; and one that nothing is worth."""
        fronts = [
            kind.front(0, kind.num_pieces, cap)
            for kind in self._kinds
            for cap in self._caps[:: len(self._caps) // _LOOKED_AT + 1]
        ]
        steps = np.unique(np.concatenate([np.ones(0), *(front.slopes for front in fronts)]))
        if not len(steps):
            return np.ones(1)
        chosen = np.linspace(0, len(steps) - 1, min(_MOST_PRICES, len(steps))).round().astype(int)
        return np.append(steps[chosen], _DEAR * steps[-1])

    def _price_cuts(self) -> FloatArray:
        """[3, num_prices, num_cuts] what is best before and behind cuts.

        The best from a cut `first` to a cut `end` in another block is the first row at `first` and
        the second at `end`. The third is from the begin of the block in which `end` lies.
        """
        of_kind = [(heads[:, -1].T, tails[:, -1].T) for heads, tails in self._priced]
        whole = np.stack([of_kind[kind][0][:, -1] for kind in self._kind_of_block], axis=-1)
        before = np.cumsum(np.insert(whole, 0, 0.0, axis=-1), axis=-1)
        # Of the block that a cut lies in; at an edge nothing is before it and nothing behind.
        block = np.minimum(self._block_before, len(self._kind_of_block) - 1)
        inside = self._cuts - self._edges[self._block_before]
        heads = np.zeros((len(whole), len(self._cuts)))
        tails = np.zeros_like(heads)
        for number, (of_heads, of_tails) in enumerate(of_kind):
            here = np.flatnonzero((self._kind_of_block[block] == number) & (inside > 0))
            heads[:, here] = of_heads[:, inside[here]]
            tails[:, here] = of_tails[:, inside[here]]
        behind = tails - before[:, self._block_behind]
        return np.stack([behind, before[:, self._block_before] + heads, heads])
