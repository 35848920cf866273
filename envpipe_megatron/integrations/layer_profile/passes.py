"""Measures a model's pieces at a microbatch size, in passes over the GPU's clocks.

Seconds lie between the repeats of a pass. Windows are as long in each: where a GPU is at its power
limit, a shorter one would run at a higher clock. Each holds several refreshes of the GPU's counter.
Enter at `measure_pieces`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import (
    Looks,
    Marks,
    Microbatches,
    Window,
    free_bytes,
    lowest,
)
from envpipe_megatron.integrations.layer_profile.rank_gpu import RankGpu
from envpipe_megatron.search.layer_profile import EMBEDDING, LOSS

_PASSES = 3
#: Length of a window; of one in which the GPU rests as long again; of one on a CPU.
_WINDOW_S, _RESTED_WINDOW_S, _CPU_WINDOW_S = 0.5, 0.3, 0.02
_FEWEST, _MOST, _LOOKS = 2, 200, 3
#: Of the free memory, what a microbatch may take.
_MEMORY_SHARE = 0.8
#: Work of a GPU varies by less from repeat to repeat, with its clock. A host that others use, too,
#: starts kernels more slowly for half a second to a second at times: work that waits for it is then
#: longer, by 40 % to twofold, and never shorter.
_HELD_UP = 1.05
#: Power of layers as a multiple of the mean power of all pieces, at least and at most: what lies
#: beyond is the counter's error in a difference of windows.
_POWER_RANGE = (0.5, 2.0)


class Held(NamedTuple):
    """Memory of one piece, as `Measure` has it; zeros on a CPU, which does not count."""

    activation_bytes: float
    forward_workspace_bytes: float
    backward_workspace_bytes: float


@dataclass(frozen=True)
class MeasuredPiece:
    """A piece as it is, or recomputed in some way; arrays go by clock.

    Args:
        host_s: of both directions, until the host has handed them over to the device.
        both_j: energy of both directions; NaN if not known.
        rested_s: of both directions where the GPU rests as long; NaN if not known.
    """

    held: Held
    host_s: float
    forward_s: FloatArray
    backward_s: FloatArray
    both_j: FloatArray
    rested_s: FloatArray

    @property
    def both_s(self) -> FloatArray:
        """Return the time of both directions."""
        return self.forward_s + self.backward_s


#: What each piece that runs holds, and how long the host takes to hand it over, s.
_Look = tuple[list[Held], FloatArray]


def measure_pieces(
    pieces: GptPieces, microbatches: Microbatches, size: int, gpu: RankGpu
) -> dict[tuple[str, str | None], MeasuredPiece]:
    """Measure each piece as it is (None) and with each recomputation; every rank calls it.

    Of layers of a kind, the mean of those in a row.
    """
    ways = (None, *dict.fromkeys(way for name in pieces.names for way in pieces.ways(name)))
    with pieces.rows(1):
        looks: dict[str | None, _Look] = {None: _look(microbatches, size)}
        slots = pieces.slots
    row = pieces.longest_row
    if not _fits(pieces, dict(zip(slots, looks[None][0], strict=True)), row):
        row = 1
    repeats: dict[str | None, list[list[FloatArray]]] = {way: [] for way in ways}
    with pieces.rows(row):
        slots = pieces.slots
        for way in ways:
            with pieces.recomputing(way):
                looks[way] = _look(microbatches, size)
                shortly, _ = microbatches.measure(size, _FEWEST, Marks())  # loads, and compiles
            repeats[way] = [[] for _ in gpu.frequency_mhz]
    round_s = float(shortly[:, 0].sum())
    for _ in range(_PASSES):
        for at, clock_mhz in enumerate(gpu.frequency_mhz):
            gpu.set(clock_mhz)
            one_pass = _Pass(pieces, microbatches, gpu, size, row, round_s)
            for way, measured in one_pass.measure(ways, clock_mhz).items():
                repeats[way][at].append(measured)
    found = {}
    for way in ways:
        by_clock = np.array([_medians(np.array(each)) for each in repeats[way]])
        for name in dict.fromkeys(slots):
            at_slots = [at for at, slot in enumerate(slots) if slot == name]
            if way is None or way in pieces.ways(name):
                held, hosts_s = looks[way]
                figures = by_clock[:, :, at_slots].mean(axis=2).T
                host_s = float(np.mean(hosts_s[at_slots]))
                if name not in (EMBEDDING, LOSS) and gpu.name is not None:
                    # The host gets ahead of a few layers at the loss, and not of a whole model.
                    figures = figures * np.maximum(1.0, host_s / (figures[0] + figures[1]))
                found[name, way] = MeasuredPiece(
                    Held(*np.mean([held[at] for at in at_slots], axis=0).tolist()),
                    host_s,
                    *figures,
                )
    return found


def _look(microbatches: Microbatches, size: int) -> _Look:
    """Return the look at each piece."""
    looked, _ = microbatches.measure(size, _LOOKS, Looks())
    _, forward, backward = np.split(looked, [1, 1 + len(looked) // 2])
    received = np.full(len(forward), microbatches.message_bytes * torch.cuda.is_available())
    received[-1] = 0  # nothing comes back to the loss
    held = np.maximum(np.stack([forward[:, 1], forward[:, 3], backward[:, 2] + received], 1), 0.0)
    return [Held(*each) for each in held.tolist()], forward[:, 0] + backward[:, 0]


def _fits(pieces: GptPieces, held: Mapping[str, Held], row: int) -> bool:
    """Check that a microbatch of the longest rows has room, on all ranks."""
    with pieces.rows(row):
        kept = sum(held[name].activation_bytes for name in pieces.slots)
    beside = max(max(each[1:]) for each in held.values())
    return bool(lowest(kept + beside <= _MEMORY_SHARE * free_bytes()))


@dataclass(frozen=True)
class _Pass:
    """One pass at one clock over a model with rows of layers.

    Args:
        round_s: of a microbatch, about.
    """

    pieces: GptPieces
    microbatches: Microbatches
    gpu: RankGpu
    size: int
    row: int
    round_s: float

    def measure(self, ways: Sequence[str | None], clock_mhz: int) -> dict[str | None, FloatArray]:
        """Return [4, slots] by way: forward, backward (s); both (J); both rested (s)."""
        found, windows = {}, {}
        with self.pieces.rows(self.row):
            layers = np.array([name not in (EMBEDDING, LOSS) for name in self.pieces.slots])
            for way in reversed(ways):  # what is not recomputed last, before its windows
                with self.pieces.recomputing(way):
                    found[way], windows[way] = self._times(_WINDOW_S)
            rested = found[None]
            if torch.cuda.is_available():
                cycles = int(found[None].sum() * clock_mhz * 1e6)
                rested, _ = self._times(_RESTED_WINDOW_S, cycles)
        with self.pieces.rows(1):
            few = self.microbatches.run(self.size, self._count(_WINDOW_S), Marks())
        *of_ways, few_j = self.gpu.energies_j((*windows.values(), few))
        means_w = {
            way: joules / _run_s(windows[way]) for way, joules in zip(windows, of_ways, strict=True)
        }
        own, plain_j = found[None], means_w[None] * _run_s(windows[None])
        both_w = _powers_w((windows[None], few), (plain_j, few_j), own[0] + own[1], layers)
        return {
            way: np.stack(
                [
                    each[0],
                    each[1],
                    (each[0] + each[1]) * both_w * (means_w[way] / means_w[None]),
                    rested[0] + rested[1] if self.gpu.name else np.full(len(layers), np.nan),
                ]
            )
            for way, each in found.items()
        }

    def _times(self, window_s: float, rest_cycles: int = 0) -> tuple[FloatArray, Window]:
        """Return [2, slots] forwards and backwards, s; and the window.

        A microbatch's data count with both ends of the model: each stage that has one loads them.
        """
        count = self._count(window_s)
        times, window = self.microbatches.measure(self.size, count, Marks(), rest_cycles)
        data_s, *of_slots = times[:, 0]
        both_s = np.reshape(of_slots, (2, -1))
        both_s[0, [0, -1]] += data_s
        return both_s, window

    def _count(self, window_s: float) -> int:
        """Return how many microbatches fill a window, the same on all ranks."""
        window_s = window_s if torch.cuda.is_available() else _CPU_WINDOW_S
        return lowest(min(max(_FEWEST, math.ceil(window_s / self.round_s)), _MOST))


def _run_s(window: Window) -> float:
    return (window.end_s - window.begin_s) / window.runs


def _powers_w(
    windows: Sequence[Window], joules: Sequence[float], times_s: FloatArray, layers: BoolArray
) -> FloatArray:
    """Return [slots] mean power of layers, and of the pieces around them.

    Args:
        windows: of microbatches with rows of layers, and with one of each kind.
        joules: of a run in each.
        times_s: [slots] of the former.
    """
    runs_s = list(map(_run_s, windows))
    mean_w = of_layers_w = joules[0] / runs_s[0]
    layers_s = float(times_s[layers].sum())
    around_s = max(runs_s[0] - layers_s, 1e-9)
    if runs_s[0] > runs_s[1] * _HELD_UP:  # else there is one layer of each kind
        of_layers_w = (joules[0] - joules[1]) / (runs_s[0] - runs_s[1])
    of_layers_w = float(np.clip(of_layers_w, *np.multiply(_POWER_RANGE, mean_w)))
    around_w = (joules[0] - of_layers_w * layers_s) / around_s
    around_w = float(np.clip(around_w, *np.multiply(_POWER_RANGE, mean_w)))
    return np.where(layers, of_layers_w, around_w)


def _medians(repeats: FloatArray) -> FloatArray:
    """Return [4, slots] medians of the [passes, 4, slots] that were not held up.

    Both directions decide: where the host is slower, the GPU waits in the one or the other.
    """
    both_s = repeats[:, 0] + repeats[:, 1]
    kept = (both_s <= _HELD_UP * both_s.min(axis=0)).T
    medians = [np.median(repeats[own, :, slot], axis=0) for slot, own in enumerate(kept)]
    return np.stack(medians, axis=1)
