"""An emulated GPU, shared by all processes of a node through a folder.

It has a virtual time that advances only by the work and waiting put on it (`run_unit`,
`advance_to`), time and power by a preset's model, clock changes that take their time, and an energy
counter that refreshes as a real one does. The same calls give the same bits, however busy the host
is. `store` says how one request replaces another.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

from envpipe_megatron.gpu.base import ClockState, EnergyReading, GpuAddress, GpuError
from envpipe_megatron.gpu.emulated.store import (
    EmulatedState,
    StateFile,
    default_root,
    list_emulated,
    tick_number,
)
from envpipe_megatron.gpu.presets import GpuPreset, load_preset, resolve_preset
from envpipe_megatron.gpu.registry import Device, Driver, VendorGpu


class EmulatedGpu(VendorGpu):
    """One emulated GPU. Make it with `create` or `open`; all state is in its file.

    Clocks here are requested clocks that have settled. A preset's power cap acts on time and power
    and is not shown as a lower clock. Every method that touches the state may raise GpuError: file
    missing, foreign, or, where a clock is set, the folder not writable. A full disk ends no work.
    """

    backend = "emulated"
    drives_hardware: ClassVar[bool] = False

    def __init__(
        self,
        index: int,
        file: StateFile,
        preset: GpuPreset,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self.preset = preset
        self.address = GpuAddress(self.backend, f"{file.path.parent}#{index}")
        self.name = f"{preset.gpu} (emulated)"
        self.supported_frequencies_mhz = preset.supported_frequencies_mhz
        self._file = file
        self._monotonic_s = monotonic_s

    @classmethod
    def create(cls, preset: str, index: int, root: str | os.PathLike[str] | None = None) -> Self:
        """Create a GPU at its maximum clock, or open it as it is if it exists already.

        `preset` is a name or the path of a file, `root` the folder of the node, by default
        `default_root`'s. Any number of processes may do so at once. Like a real GPU it keeps lock,
        time and energy from one job to the next. Raises GpuError if there is no such preset,
        this GPU exists with another preset, or the folder cannot be used.
        """
        model = load_preset(preset)
        # A path is kept absolute, since other processes may run in other folders.
        reference = str(resolve_preset(preset)) if preset.endswith(".toml") else preset
        file = StateFile(_folder(root), index)
        fresh = EmulatedState(reference, model.max_frequency_mhz)
        if file.path.exists():  # and is not written: its disk may be full
            found = file.read().preset
        else:
            found = file.change(lambda state: state.preset, fresh=fresh)
        if found != reference:
            raise GpuError(
                f"Emulated GPU {file.path} exists with preset {found!r}",
                value=reference,
                remedy="Use that preset, delete the folder, or set ENVPIPE_EMULATED_ROOT",
            )
        return cls(index, file, model)

    @classmethod
    def open(cls, root: str | os.PathLike[str] | None, index: int) -> Self:
        """Open a GPU that exists, of any preset.

        Raises GpuError if there is none, its file is foreign, or its preset is gone.
        """
        file = StateFile(_folder(root), index)
        return cls(index, file, load_preset(file.read().preset))

    @classmethod
    def owns(cls, uid: str) -> bool:
        """Tell whether it is a folder and an index."""
        return "#" in uid

    @classmethod
    def from_uid(cls, uid: str, reset_range_mhz: tuple[int, int] | None = None) -> Self:
        """Open a GPU by its folder and index; a reset always leaves the maximum clock."""
        root, _, index = uid.rpartition("#")
        return cls.open(root, int(index))

    @classmethod
    def driver(cls) -> Driver:
        """Return that there is none of a version."""
        return Driver("of emulated GPUs")

    @classmethod
    def list_gpus(cls) -> tuple[Device, ...]:
        """Return those of `default_root`'s folder."""
        gpus = (cls.open(None, index) for index in list_emulated(_folder(None)))
        return tuple(Device(cls.backend, gpu.index, gpu.address.uid, gpu.name, "") for gpu in gpus)

    # --- work -----------------------------------------------------------------------------------

    def run_unit(self, kind: str, time_at_max_s: float, ready_s: float) -> tuple[float, float]:
        """Run a unit as soon as it is ready and the one before has ended; return start and end, s.

        The GPU waits (at waiting power) up to `ready_s`, a virtual instant. `time_at_max_s` is how
        long the unit takes at the maximum clock; `EmulatedState.run_unit` says what a change of
        clock does to it.
        """
        model = self.preset

        def cost(clock_mhz: int) -> tuple[float, float]:
            time_s = model.unit_time_s(kind, clock_mhz, time_at_max_s)
            return time_s, model.busy_power_w(kind, clock_mhz)

        def run(state: EmulatedState) -> tuple[float, float]:
            state.wait_until(ready_s, model.wait_power_w)
            start_s = state.end_s
            state.run_unit(cost)
            return start_s, state.end_s

        return self._file.change(run, keep=True)

    def advance_to(self, time_s: float) -> None:
        """Wait, at waiting power, up to a virtual instant; nothing if that has passed."""
        wait_w = self.preset.wait_power_w
        self._file.change(lambda state: state.wait_until(time_s, wait_w), keep=True)

    def committed_end_s(self) -> float:
        """Return the virtual instant up to which work and waiting are committed."""
        return self._file.read().end_s

    # --- clocks ---------------------------------------------------------------------------------

    def _lock(self, frequency_mhz: int) -> None:
        self._request(frequency_mhz, frequency_mhz)

    def _reset(self) -> None:
        self._request(None, self.preset.max_frequency_mhz)

    def _request(self, requested_mhz: int | None, clock_mhz: int) -> None:
        # It takes the instant of the last committed end: that is when a real controller, which
        # waits for the previous unit to finish, makes it.
        change_s = self.preset.frequency_change_s
        self._file.change(lambda state: state.request(requested_mhz, clock_mhz, change_s))

    @property
    def requested_frequency_mhz(self) -> int | None:
        """The lock that any process set last, None for the driver's default (maximum)."""
        return self._file.read().requested_mhz

    def clock_state(self) -> ClockState:
        """Return the lock, and the clock in force now; in an anchored wait it settles with time."""
        state = self._file.read()
        now_s, clock_mhz = self._instant_s(state), state.clock_mhz
        if state.pending and state.pending[1] <= now_s:
            clock_mhz = state.pending[0]
        elif now_s < state.end_s and (segment := state.segment_at(now_s)):
            clock_mhz = segment.frequency_mhz
        return ClockState(state.requested_mhz, clock_mhz)

    # --- meters ---------------------------------------------------------------------------------

    def anchor(self, wall_minus_virtual_s: float | None) -> None:
        """Tie virtual time to the machine's monotonic clock, for readers in every process.

        A unit is committed when its computation is done, and the runtime then sleeps until its
        virtual end. With an anchor, "now" is `time.monotonic() - wall_minus_virtual_s`, but not
        beyond the committed end, so that a meter read during the sleep does not see the future.
        None removes it, and now is the committed end. It means nothing after a reboot: set it at
        the start of each job.
        """

        def set_anchor(state: EmulatedState) -> None:
            state.wall_minus_virtual_s = wall_minus_virtual_s

        self._file.change(set_anchor, keep=True)

    def time_s(self) -> float:
        """Return virtual now: never beyond the committed end."""
        state = self._file.read()
        return min(self._instant_s(state), state.end_s)

    @property
    def power_w(self) -> float:
        """The power now; without an anchor, that just before the committed end."""
        state = self._file.read()
        now_s = self._instant_s(state)
        segment = state.segment_at(now_s)
        waits = state.wall_minus_virtual_s is not None and now_s >= state.end_s
        return self.preset.wait_power_w if segment is None or waits else segment.power_w

    def read_energy(self) -> EnergyReading:
        """Return the counter at its last refresh: at a multiple of `refresh_s` of virtual time.

        One further back than the segments that are kept is of where they begin.
        """
        state, refresh_s = self._file.read(), self.preset.refresh_s
        now_s = min(self._instant_s(state), state.end_s)
        return state.energy_at(tick_number(now_s, refresh_s) * refresh_s)

    def _instant_s(self, state: EmulatedState) -> float:
        """Return the virtual instant of now, beyond the committed end if the wall clock is."""
        if state.wall_minus_virtual_s is None:
            return state.end_s
        return max(0.0, self._monotonic_s() - state.wall_minus_virtual_s)


def _folder(root: str | os.PathLike[str] | None) -> Path:
    # Absolute, so that an object outlives a change of the working folder.
    return (default_root() if root is None else Path(root)).absolute()
