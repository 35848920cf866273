"""Sets a GPU's clock, and reads its energy, time and memory, while layers are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.control import choose_control, open_controlled
from envpipe_megatron.gpu.registry import READ_ONLY, open_gpu, uid_of_cuda_device
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError

#: How long a clock that was set takes to settle, at most.
_SETTLE_S = 0.2
#: How long to wait after a window for the counter's refresh.
_MARGIN_S = 0.3
#: A number for the clock of a CPU, which is not set.
_CPU_MHZ = 1000


class Window(NamedTuple):
    """Begin and end of some microbatches, by `time.monotonic`, and how many they were."""

    begin_s: float
    end_s: float
    runs: int

    @property
    def run_s(self) -> float:
        """Return the time of a microbatch."""
        return (self.end_s - self.begin_s) / self.runs


class RankGpu:
    """This rank's GPU, or its CPU, which has no counter and no clock.

    Args:
        clocks_mhz: those that will be set, the highest first. Without any the clock stays as it
            is, and the GPU is opened for reading.

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

    def energies_j(self, windows: Sequence[Window]) -> list[float]:
        """Return the energy of a run in each window, the last of which ended just now.

        NaN where the meter failed, or there is none.
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


def _energy_j(meter: EnergyMeter, window: Window) -> float:
    try:
        return meter.window(window.begin_s, window.end_s).energy_j / window.runs
    except MeterError:
        return math.nan


def _open(clocks_mhz: Sequence[int]) -> Gpu:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uid = uid_of_cuda_device(str(properties.uuid))
    if not clocks_mhz:
        return open_gpu(GpuAddress(READ_ONLY, uid))
    return open_controlled(uid, choose_control("auto", read_site(), uid).required())


class Marks:
    """Notes instants on the device's stream, without a wait for it; on a CPU, the host's."""

    def __init__(self) -> None:
        self._on_gpu = torch.cuda.is_available()
        self._marks: list[Any] = []

    def add(self) -> None:
        """Mark what has been handed to the device until here."""
        if not self._on_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def gaps(self) -> FloatArray:
        """Return [edges - 1, 1] time from each mark to the next, s."""
        now_s()
        pairs = pairwise(self._marks)
        return np.array([[a.elapsed_time(b) / 1e3 if self._on_gpu else b - a] for a, b in pairs])


class Looks:
    """Notes instants of the host, and the memory, at edges where the device has done all its work.

    On a CPU no memory is counted.
    """

    def __init__(self) -> None:
        self._looks: list[tuple[float, float, int, int]] = []

    def add(self) -> None:
        """Look at the clock, wait for the device, and look at the memory."""
        ended_s, allocated, peak = time.perf_counter(), 0, 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            allocated, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self._looks.append((ended_s, time.perf_counter(), allocated, peak))

    def gaps(self) -> FloatArray:
        """Return [edges - 1, 4] host's time, s; bytes held more; peak above begin and end."""
        return np.array(
            [
                (ended_s - begun_s, held - before, peak - before, peak - held)
                for (_, begun_s, before, _), (ended_s, _, held, peak) in pairwise(self._looks)
            ]
        )


def now_s() -> float:
    """Return the host's time when the device has done all that it was handed, s."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def free_bytes() -> float:
    """Return the memory that torch can still have, bytes; infinite on a CPU."""
    if not torch.cuda.is_available():
        return math.inf
    free, _ = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
