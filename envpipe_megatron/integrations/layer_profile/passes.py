"""All pieces of a microbatch size, in passes: seconds lie between the repeats of a piece.

Enter at `measure_pieces`. The first pass takes joules, too, over windows that are long enough for
the GPU's counter. The further ones are short, and there to tell where the host was held up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import (
    Held,
    Timing,
    Window,
    measure_host_s,
    measure_memory,
    measure_time,
    repeats_that_fit,
    run_forwards,
)
from envpipe_megatron.integrations.layer_profile.rank_gpu import RankGpu
from envpipe_megatron.integrations.layer_profile.undisturbed import not_held_up, undisturbed_s

_PASSES = 3
_LONG_S, _SHORT_S = 0.6, 0.15


@dataclass(frozen=True)
class Way:
    """A piece as it is, or recomputed in some way; arrays go by clock.

    Args:
        both_j, forward_j: energy of both directions, and of the forward alone; NaN if it is not
            known. The forward's is empty where it is recomputed.
        host_s: of both directions, until the host has handed them over to the device. None where
            it is recomputed, and on a CPU, which nobody hands anything over to.
    """

    held: Held
    forward_s: FloatArray
    backward_s: FloatArray
    both_j: FloatArray
    forward_j: FloatArray
    host_s: float | None

    @property
    def both_s(self) -> FloatArray:
        """Time of both directions."""
        return self.forward_s + self.backward_s


class _Key(NamedTuple):
    piece: str
    way: str | None


@dataclass
class _Row:
    """A piece, or layers of a kind in a row, and what was measured of it by now; lists by clock."""

    held: Held
    length: int
    timings: list[list[Timing]]
    both_j: list[float] = field(default_factory=list)
    forward_j: list[float] = field(default_factory=list)
    hosts_s: list[float] = field(default_factory=list)

    def way(self) -> Way:
        """Of one layer."""
        forward_s, backward_s = np.array([_undisturbed(repeats) for repeats in self.timings]).T
        return Way(
            self.held,
            forward_s / self.length,
            backward_s / self.length,
            np.array(self.both_j) / self.length,
            np.array(self.forward_j) / self.length,
            undisturbed_s(np.array(self.hosts_s)) / self.length if self.hosts_s else None,
        )


def measure_pieces(
    pieces: GptPieces, names: Iterable[str], size: int, gpu: RankGpu
) -> Mapping[tuple[str, str | None], Way]:
    """Each piece as it is (None) and recomputed in each of its ways; every rank calls it."""
    keys = [_Key(name, way) for name in names for way in (None, *pieces.ways(name))]
    rows = {key: _row(pieces, key, size, len(gpu.frequency_mhz)) for key in keys}
    for number in range(_PASSES):
        for at, frequency_mhz in enumerate(gpu.frequency_mhz):
            gpu.set(frequency_mhz)
            _measure_once(pieces, rows, size, gpu, at, first=number == 0)
    return {key: row.way() for key, row in rows.items()}


def _row(pieces: GptPieces, key: _Key, size: int, num_clocks: int) -> _Row:
    with pieces.running(key.piece, size, key.way) as (piece, hidden):
        held = measure_memory(piece, hidden)
    length = max(1, repeats_that_fit(held, pieces.row_length(key.piece)))
    return _Row(held, length, [[] for _ in range(num_clocks)])


def _measure_once(
    pieces: GptPieces, rows: Mapping[_Key, _Row], size: int, gpu: RankGpu, at: int, *, first: bool
) -> None:
    """One pass over all pieces, at the clock of this number."""
    windows: list[Window] = []
    into: list[list[float]] = []
    for key, row in rows.items():
        with pieces.running(key.piece, size, key.way, row.length) as (piece, hidden):
            timing = measure_time(piece, hidden, _LONG_S if first else _SHORT_S)
            row.timings[at].append(timing)
            if key.way is None and at == 0 and gpu.name is not None:
                row.hosts_s.append(measure_host_s(piece, hidden))
            if first:
                windows.append(timing.window)
                into.append(row.both_j)
            if first and key.way is None:
                windows.append(run_forwards(piece, hidden, timing.forward_s, _LONG_S))
                into.append(row.forward_j)
    if first:
        for joules, each_j in zip(into, gpu.energies_j(windows), strict=True):
            joules.append(each_j)


def _undisturbed(repeats: Sequence[Timing]) -> FloatArray:
    """Forward and backward, s, of the repeats that were not held up: both belong together.

    Where the host is slower than the GPU, the GPU's waits lie in the one or the other.
    """
    times_s = np.array([(timing.forward_s, timing.backward_s) for timing in repeats])
    kept: FloatArray = np.median(times_s[not_held_up(times_s.sum(axis=1))], axis=0)
    return kept
