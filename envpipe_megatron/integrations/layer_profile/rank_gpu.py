"""Sets a GPU's clock, and reads its energy in windows, while layers are measured."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.control import choose_control, open_controlled
from envpipe_megatron.gpu.registry import open_reader, uid_of_cuda_device
from envpipe_megatron.gpu.site import read_site
from envpipe_megatron.integrations.layer_profile.measuring import Window
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError

#: A clock that was set has settled.
_SETTLE_S = 0.2
#: The counter refreshes after a window, without an event.
_MARGIN_S = 0.3
#: A number for the clock of a CPU, which is not set.
_CPU_MHZ = 1000


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
        return open_reader(GpuAddress("none", uid))
    return open_controlled(uid, choose_control("auto", read_site(), require=True))
