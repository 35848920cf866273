"""All pieces of a microbatch size, in passes: seconds lie between the repeats of a piece.

Enter at `measure_pieces`. Windows are as long in each pass: where a GPU is at its power limit, a
shorter one would run at a higher clock. Each holds three refreshes of the GPU's counter.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from envpipe_megatron.core.arrays import BoolArray, FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.control import choose_control, open_controlled
from envpipe_megatron.gpu.devices import open_reader, uid_of_cuda_device
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.integrations.layer_profile.gpt import GptPieces
from envpipe_megatron.integrations.layer_profile.measuring import (
    Held,
    Timing,
    Window,
    measure_host_s,
    measure_memory,
    measure_rested_s,
    measure_time,
    repeats_that_fit,
    run_forwards,
)
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError

#: A clock that was set has settled.
_SETTLE_S = 0.2
#: The counter refreshes after a window, without an event.
_MARGIN_S = 0.3
#: Stands for the clock of a CPU, which nobody sets.
_CPU_MHZ = 1000
_PASSES = 3
_WINDOW_S, _RESTED_WINDOW_S = 0.3, 0.15
#: Work of a GPU varies by less from repeat to repeat, with its clock.
_HELD_UP = 1.05


def not_held_up(times_s: FloatArray) -> BoolArray:
    """[num_repeats] which repeats took about as long as the shortest.

    A host that others use, too, starts kernels more slowly for half a second to a second at times.
    Work that waits for the host is then longer, by 40 % to twofold, and never shorter.
    """
    kept: BoolArray = times_s <= _HELD_UP * times_s.min()
    return kept


def undisturbed_s(times_s: FloatArray) -> float:
    """The median of the repeats that were not held up."""
    return float(np.median(times_s[not_held_up(times_s)]))


class RankGpu:
    """This rank's GPU, or its CPU, which has no counter and no clock.

    Args:
        clocks_mhz: those that will be set, the highest first. None leaves the clock alone, and the
            GPU is opened for reading.

    Raises GpuError if the GPU cannot be opened, or clocks may not be set.
    """

    def __init__(self, clocks_mhz: Sequence[int]) -> None:
        self.name: str | None = None
        self.frequency_mhz: tuple[int, ...] = (_CPU_MHZ,)
        self._meter: EnergyMeter | None = None
        self._clock: RankClock | None = None
        if torch.cuda.is_available():
            gpu = _open(clocks_mhz)
            self._clock = RankClock(gpu) if clocks_mhz else None
            self._meter = EnergyMeter(gpu)
            self.name = gpu.name
            self.frequency_mhz = tuple(clocks_mhz) or gpu.supported_frequencies_mhz[:1]
        elif clocks_mhz:
            raise EnvPipeError(
                "Clocks were asked for where there is no GPU",
                value=list(clocks_mhz),
                remedy="Leave out --clocks.",
            )

    def set(self, frequency_mhz: int) -> None:
        """Run at this clock from now on, where clocks are set; EnvPipeError if that fails."""
        if self._clock is None:
            return
        self._clock.request(frequency_mhz)
        self._clock.wait_idle()
        if self._clock.error is not None:
            raise EnvPipeError(f"The clock could not be set: {self._clock.error}")
        time.sleep(_SETTLE_S)

    def energies_j(self, windows: Sequence[Window | None]) -> list[float]:
        """Of a run in each window, the last of which ended just now.

        NaN where there is no window, or the meter failed.
        """
        if self._meter is None:
            return [math.nan] * len(windows)
        time.sleep(_MARGIN_S)
        self._meter.catch_up()
        return [_energy_j(self._meter, window) for window in windows]

    def close(self) -> None:
        """Stop reading, and reset the clock if it was set."""
        if self._meter is not None:
            self._meter.close()
        if self._clock is not None:
            self._clock.close()


def _energy_j(meter: EnergyMeter, window: Window | None) -> float:
    if window is None:
        return math.nan
    try:
        return meter.energy_j(window.begin_s, window.end_s) / window.runs
    except MeterError:
        return math.nan


def _open(clocks_mhz: Sequence[int]) -> Gpu:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uid = uid_of_cuda_device(str(properties.uuid))
    if not clocks_mhz:
        return open_reader(GpuAddress("none", uid))
    site = read_site()
    return open_controlled(uid, choose_control("auto", site, require=True), site)


@dataclass(frozen=True)
class Way:
    """A piece as it is, or recomputed in some way; arrays go by clock.

    Args:
        both_j, forward_j: energy of both directions, and of the forward alone; NaN if it is not
            known, as the forward's is where it is recomputed.
        host_s: of both directions, until the host has handed them over to the device. None where
            it is recomputed, and on a CPU, which nobody hands anything over to.
        rested_s: of both directions where the GPU rests as long; NaN where `host_s` is None.
    """

    held: Held
    forward_s: FloatArray
    backward_s: FloatArray
    both_j: FloatArray
    forward_j: FloatArray
    host_s: float | None
    rested_s: FloatArray

    @property
    def both_s(self) -> FloatArray:
        """Time of both directions."""
        return self.forward_s + self.backward_s


class _Key(NamedTuple):
    piece: str
    way: str | None


class _Repeat(NamedTuple):
    """What one pass measured; NaN where it is not known."""

    forward_s: float
    backward_s: float
    both_j: float
    forward_j: float
    rested_s: float


@dataclass
class _Row:
    """A piece, or layers of a kind in a row, and what was measured of it by now."""

    held: Held
    length: int
    #: Of each clock.
    repeats: list[list[_Repeat]]
    hosts_s: list[float] = field(default_factory=list)

    def way(self) -> Way:
        """Of one layer."""
        medians = np.array([_undisturbed(repeats) for repeats in self.repeats]) / self.length
        forward_s, backward_s, both_j, forward_j, rested_s = medians.T
        host_s = undisturbed_s(np.array(self.hosts_s)) / self.length if self.hosts_s else None
        rested_s = np.minimum(rested_s, forward_s + backward_s)
        return Way(self.held, forward_s, backward_s, both_j, forward_j, host_s, rested_s)


def measure_pieces(
    pieces: GptPieces, names: Iterable[str], size: int, gpu: RankGpu
) -> Mapping[tuple[str, str | None], Way]:
    """Each piece as it is (None) and recomputed in each of its ways; every rank calls it."""
    keys = [_Key(name, way) for name in names for way in (None, *pieces.ways(name))]
    rows = {key: _row(pieces, key, size, len(gpu.frequency_mhz)) for key in keys}
    for _ in range(_PASSES):
        for at, frequency_mhz in enumerate(gpu.frequency_mhz):
            gpu.set(frequency_mhz)
            _measure_once(pieces, rows, size, gpu, at)
    return {key: row.way() for key, row in rows.items()}


def _row(pieces: GptPieces, key: _Key, size: int, num_clocks: int) -> _Row:
    with pieces.running(key.piece, size, key.way) as (piece, hidden):
        held = measure_memory(piece, hidden)
    length = max(1, repeats_that_fit(held, pieces.row_length(key.piece)))
    return _Row(held, length, [[] for _ in range(num_clocks)])


def _measure_once(
    pieces: GptPieces, rows: Mapping[_Key, _Row], size: int, gpu: RankGpu, at: int
) -> None:
    """One pass over all pieces, at the clock of this number."""
    timings: list[Timing] = []
    forwards: list[Window | None] = []
    rested_s: list[float] = []
    for key, row in rows.items():
        with pieces.running(key.piece, size, key.way, row.length) as (piece, hidden):
            timing = measure_time(piece, hidden, _WINDOW_S)
            timings.append(timing)
            if key.way is not None:
                forwards.append(None)
                rested_s.append(math.nan)
                continue
            forwards.append(run_forwards(piece, hidden, timing.forward_s, _WINDOW_S))
            clock_mhz = gpu.frequency_mhz[at]
            rested_s.append(measure_rested_s(piece, hidden, timing, _RESTED_WINDOW_S, clock_mhz))
            if at == 0 and gpu.name is not None:
                row.hosts_s.append(measure_host_s(piece, hidden))
    joules = gpu.energies_j([*(timing.window for timing in timings), *forwards])
    both_j, forward_j = joules[: len(timings)], joules[len(timings) :]
    for row, timing, *of_run in zip(
        rows.values(), timings, both_j, forward_j, rested_s, strict=True
    ):
        row.repeats[at].append(_Repeat(timing.forward_s, timing.backward_s, *of_run))


def _undisturbed(repeats: Sequence[_Repeat]) -> FloatArray:
    """[5] medians of the repeats that were not held up, by forward and backward together.

    Where the host is slower than the GPU, the GPU's waits lie in the one or the other.
    """
    measured = np.array(repeats)
    kept: FloatArray = np.median(measured[not_held_up(measured[:, :2].sum(axis=1))], axis=0)
    return kept
