"""A node of fake GPUs, seen by any process through a fake libnvidia-ml.so.1 (see node.h)."""

import ctypes
import fcntl
import hashlib
import mmap
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fake_nvml.models import MODELS

SOURCES = sorted(Path(__file__).parent.glob("*.c"))
LIBRARY_NAME = "libnvidia-ml.so.1"
FOLDER_VARIABLE = "FAKE_NVML_FOLDER"

FAULTS = (
    "no_permission",  # changing calls fail with NO_PERMISSION
    "lost",  # every call fails with GPU_IS_LOST
    "slow_ms",  # every call takes that long; other GPUs are not held up
    "timeout",  # changing calls fail with TIMEOUT
    "not_supported",  # changing calls fail with NOT_SUPPORTED
    "no_energy",  # there is no energy counter
    "no_instant_power",  # there are no power fields, only GetPowerUsage
    "mig",
    "vgpu",
    "clock_cap_mhz",  # locks are accepted, the clock stays at or below this
    "throttle_reasons",  # NVML's bits
    "fail_after",  # that many more calls work, then all fail with UNKNOWN
    "requested_profiles",  # bits of workload power profiles, where the GPU has them
    "enforced_profiles",
    "power_limit_w",  # what the limit is now, in place of the default
    "process",  # this process computes on it
    "busy_percent",
    "temperature_c",  # cannot be read without
    "gone",  # the driver does not list it, so that others have other indices
    "counter_stands",  # the energy counter stays what it is
    "in_use",  # changing calls fail with IN_USE
    "held_mhz",  # locks are accepted, the clock is always this, and no reason is shown
)
NODE_FAULTS = ("driver_mismatch", "driver_not_loaded", "old_driver")

_MAX_GPUS = 16
_MEMORY_CLOCKS = 4
_GRAPHICS_CLOCKS = 256


class _Segment(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("low_mhz", "high_mhz", "since_ns", "energy_uj", "shown_uj", "power_mw")
    )


class _Gpu(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("bus_id", ctypes.c_char * 32),
        ("num_memory", ctypes.c_uint64),
        ("memory_mhz", ctypes.c_uint64 * _MEMORY_CLOCKS),
        ("num_graphics", ctypes.c_uint64 * _MEMORY_CLOCKS),
        ("graphics_mhz", ctypes.c_uint64 * _GRAPHICS_CLOCKS * _MEMORY_CLOCKS),
        ("current_memory_mhz", ctypes.c_uint64),
        ("power_limit_mw", ctypes.c_uint64),
        ("static_mw", ctypes.c_uint64),
        ("mw_per_mhz", ctypes.c_uint64),
        ("mig_capable", ctypes.c_uint64),
        ("has_profiles", ctypes.c_uint64),
        ("refresh_phase_ns", ctypes.c_uint64),
        ("faults", ctypes.c_uint64 * 24),
        ("active", ctypes.c_uint64),
        ("segments", _Segment * 2),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("num_gpus", ctypes.c_uint64),
        ("refresh_ns", ctypes.c_uint64),
        ("faults", ctypes.c_uint64 * 8),
        ("driver_version", ctypes.c_char * 80),
        ("gpus", _Gpu * _MAX_GPUS),
    )


@dataclass(frozen=True)
class Call:
    """One call of NVML by any process. `uuid` is empty where it was about no GPU; `result` is 0
    or NVML's error code; `time_s` is on CLOCK_MONOTONIC, as `time.monotonic()`."""

    pid: int
    function: str
    uuid: str
    arguments: tuple[int, ...]
    result: int
    time_s: float

    @property
    def changes_gpu(self) -> bool:
        return self.function.startswith(("nvmlDeviceSet", "nvmlDeviceReset"))


def build_library(folder: Path) -> Path:
    """Compile the library into a folder, once, however many processes ask for it at a time.

    Raises FileNotFoundError if there is no C compiler.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY_NAME
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return library
        unfinished = library.with_suffix(".tmp")
        done = subprocess.run(
            [
                "cc",
                *("-shared", "-fPIC", "-fvisibility=hidden", "-O1"),
                *("-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{LIBRARY_NAME}"),
                *("-o", str(unfinished), *map(str, SOURCES), "-lpthread"),
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the fake NVML library was not built:\n{done.stderr}")
        unfinished.rename(library)
    return library


class FakeNvml:
    """A node of GPUs in a folder. Faults act at once in every process; locks outlive them all.

    Args:
        folder: an empty one, for the node's state and history.
        library: what `build_library` gave.
        models: of each GPU, in the order of NVML's indices, which is that of PCI bus ids.
    """

    def __init__(self, folder: Path, library: Path, models: Sequence[str]) -> None:
        self.folder = folder
        self._library = library
        self._models = [MODELS[model] for model in models]
        self._use: AbstractContextManager[None] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "history").touch()
        path = folder / "state"
        path.write_bytes(bytes(ctypes.sizeof(_Node)))
        with path.open("r+b") as file:
            self._node = _Node.from_buffer(mmap.mmap(file.fileno(), 0))
        self._set_up()

    def _set_up(self) -> None:
        node = self._node
        node.num_gpus = len(self._models)
        node.refresh_ns = 100_000_000
        node.driver_version = b"580.00.00-fake"
        for index, model in enumerate(self._models):
            gpu = node.gpus[index]
            # Other UUIDs on each node, as on real ones, and such that index order is not theirs.
            digits = hashlib.sha256(f"{self.folder} {index}".encode()).hexdigest()
            parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
            gpu.uuid = f"GPU-{'-'.join(parts)}".encode()
            gpu.name = model.name.encode()
            gpu.bus_id = f"00000000:{0x1B + 0x22 * index:02X}:00.0".encode()
            gpu.num_memory = len(model.graphics_mhz)
            for row, (memory_mhz, graphics_mhz) in enumerate(model.graphics_mhz.items()):
                gpu.memory_mhz[row] = memory_mhz
                gpu.num_graphics[row] = len(graphics_mhz)
                gpu.graphics_mhz[row][: len(graphics_mhz)] = graphics_mhz
            gpu.current_memory_mhz = model.running_memory_mhz
            gpu.power_limit_mw = 1000 * model.power_limit_w
            gpu.static_mw = 1000 * model.static_w
            gpu.mw_per_mhz = round(1000 * model.w_per_mhz)
            gpu.mig_capable = model.mig_capable
            gpu.has_profiles = model.has_profiles
            gpu.refresh_phase_ns = 13_000_000 * index
            for fault, value in model.faults.items():
                gpu.faults[FAULTS.index(fault)] = value
            segment = gpu.segments[0]
            segment.since_ns = time.monotonic_ns()
            segment.energy_uj = segment.shown_uj = 10**12 * (index + 1)
            segment.power_mw = gpu.static_mw + gpu.mw_per_mhz * gpu.graphics_mhz[0][0]
        node.bytes = ctypes.sizeof(_Node)

    @property
    def environment(self) -> dict[str, str]:
        """Return what another process needs in its environment to see this node."""
        folders = [str(self._library.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            FOLDER_VARIABLE: str(self.folder),
            "LD_LIBRARY_PATH": os.pathsep.join(folder for folder in folders if folder),
        }

    @contextmanager
    def used_here(self) -> Iterator[None]:
        """Within it this process, and those it starts, see this node."""
        library = ctypes.CDLL(str(self._library))
        found = ctypes.CDLL(LIBRARY_NAME)  # what nvidia-ml-py is going to find
        if not hasattr(found, "fakeNvmlUse"):
            raise RuntimeError("this process has already loaded the real NVML library")
        library.fakeNvmlNodeBytes.restype = ctypes.c_uint64
        assert library.fakeNvmlNodeBytes() == ctypes.sizeof(_Node)
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        library.fakeNvmlUse(str(self.folder).encode())
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            library.fakeNvmlUse(None)

    def use_here(self) -> None:
        """As `used_here`, until the fixture that made this node ends."""
        if self._use is None:
            self._use = self.used_here()
            self._use.__enter__()

    def close(self) -> None:
        if self._use is not None:
            self._use.__exit__(None, None, None)
            self._use = None

    @property
    def uuids(self) -> list[str]:
        return [gpu.uuid.decode() for gpu in self._gpus()]

    @property
    def pci_bus_ids(self) -> list[str]:
        return [gpu.bus_id.decode() for gpu in self._gpus()]

    def history(self) -> list[Call]:
        """Every call so far, by whatever process, oldest first."""
        calls = []
        with self._locked():
            lines = (self.folder / "history").read_text().splitlines()
        for line in lines:
            if not line.endswith("\t."):
                continue  # empty, or of a caller that was killed before it changed anything
            time_ns, pid, function, uuid, arguments, result, _ = line.split("\t")
            numbers = tuple(int(number) for number in arguments.split(",") if number)
            calls.append(Call(int(pid), function, uuid, numbers, int(result), int(time_ns) / 1e9))
        return calls

    def changes(self) -> list[Call]:
        """The calls of the history that change a GPU, or would without a fault."""
        return [call for call in self.history() if call.changes_gpu]

    def locked_mhz(self, uuid: str) -> tuple[int, int] | None:
        """The locked range, None without a lock."""
        with self._locked():
            segment = self._segment(self._gpu(uuid))
            return (segment.low_mhz, segment.high_mhz) if segment.high_mhz else None

    def set_fault(self, uuid: str | None, fault: str, value: int = 1) -> None:
        """Switch a fault of `FAULTS` on, or off by the value 0; without uuid one of the node.

        `fail_after` may be 0: the next call fails.
        """
        with self._locked():
            if uuid is None:
                self._node.faults[NODE_FAULTS.index(fault)] = value
                return
            gpu = self._gpu(uuid)
            self._follow_clock(gpu)
            if fault == "fail_after":
                value += 1
            gpu.faults[FAULTS.index(fault)] = value
            self._follow_clock(gpu)

    def clear_faults(self) -> None:
        with self._locked():
            for fault in range(len(self._node.faults)):
                self._node.faults[fault] = 0
            for gpu, model in zip(self._gpus(), self._models, strict=True):
                for fault, name in enumerate(FAULTS):
                    gpu.faults[fault] = model.faults.get(name, 0)
                self._follow_clock(gpu)

    def _gpus(self) -> list[_Gpu]:
        return [self._node.gpus[index] for index in range(self._node.num_gpus)]

    def _gpu(self, uuid: str) -> _Gpu:
        return next(gpu for gpu in self._gpus() if gpu.uuid.decode() == uuid)

    @staticmethod
    def _segment(gpu: _Gpu) -> _Segment:
        return gpu.segments[gpu.active & 1]

    def _observed_mhz(self, gpu: _Gpu) -> int:
        if held_mhz := gpu.faults[FAULTS.index("held_mhz")]:
            return int(held_mhz)
        wanted_mhz = self._segment(gpu).high_mhz or gpu.graphics_mhz[0][0]
        cap_mhz = gpu.faults[FAULTS.index("clock_cap_mhz")]
        return min(wanted_mhz, cap_mhz) if cap_mhz else wanted_mhz

    def _follow_clock(self, gpu: _Gpu) -> None:
        """Begin another segment, with the power of the clock under the present faults."""
        now_ns = time.monotonic_ns()
        old, new = self._segment(gpu), gpu.segments[~gpu.active & 1]
        since_phase_ns = now_ns - gpu.refresh_phase_ns
        refresh_ns = now_ns - since_phase_ns % self._node.refresh_ns

        def energy_at_uj(time_ns: int) -> int:
            return old.energy_uj + (time_ns - old.since_ns) // 1000 * old.power_mw // 1000

        new.low_mhz, new.high_mhz, new.since_ns = old.low_mhz, old.high_mhz, now_ns
        new.energy_uj = energy_at_uj(now_ns)
        new.shown_uj = energy_at_uj(refresh_ns) if refresh_ns > old.since_ns else old.shown_uj
        new.power_mw = gpu.static_mw + gpu.mw_per_mhz * self._observed_mhz(gpu)
        gpu.active = ~gpu.active & 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened anew each time: threads and forked children must exclude each other too.
        with (self.folder / "state").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
