"""GPU presets: how time and power of a kind of GPU follow its SM clock, loaded from TOML.

With `g = min(f, cap)` the clock that the GPU really reaches when `f` is requested and `top` the
clock it reaches when its maximum is requested:

    time(f)  = time(max) * (m + (1 - m) * top / g)
    power(f) = static + dynamic * (g / top) * V(g)^2

`m` is the part of the time that waits for memory, the same at every clock. The voltage V, relative
to that at `top`, lies at a floor up to a knee and rises linearly to 1 from there. The cap is a
clock because that is what a power limit looks like from outside.

A real GPU's clocks come from its own table: `sweep_range` says which are worth profiling, and a
preset's table `[control]` where that kind of GPU needs something else.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from envpipe_megatron.core.fields import parse_toml
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile_rows import MEASURED_SPLIT
from envpipe_megatron.files import shipped_folder
from envpipe_megatron.gpu.base import GpuError

_FORMAT = "envpipe-gpu-preset/1"
_FOLDER = "configs/gpus"
SWEEP_STEP = 0.04
"""Profiled clocks are this share of the maximum apart: the valley lies some ten clocks down."""
_MODELLED_STEP_MHZ = 45
"""Clocks of the model are at least this far apart: the planner needs no more of them."""


@dataclass(frozen=True, slots=True)
class KindModel:
    """The part of a preset that differs between forward and backward.

    `memory_fraction` is the part of the time at the maximum clock that no clock shortens, in [0,
    1]; `dynamic_power_w` is the power at the top clock above the static power.
    """

    memory_fraction: float
    dynamic_power_w: float


@dataclass(frozen=True, slots=True)
class FitError:
    """How far the model is from the data it was fitted to, percent, mean and worst."""

    time_mean: float
    time_max: float
    power_mean: float
    power_max: float


@dataclass(frozen=True, slots=True)
class ControlOverride:
    """Corrections, for a real GPU of this kind, of what its clock tables suggest.

    Attributes:
        nvml_names: patterns (`NVIDIA A100-SXM4-*`) of the names that NVML reports for it; a leading
            `NVIDIA`, which old drivers leave out, does not count.
        profile_max_mhz: no higher clock is profiled; nor one below `profile_min_mhz`.
        profile_step_mhz: distance of two profiled clocks, None for the sweep's own.
        memory_clock_mhz: the memory clock under which CUDA runs, None if it is the highest. SM
            clocks are those that the GPU supports under it.
    """

    nvml_names: tuple[str, ...]
    profile_max_mhz: int | None = None
    profile_min_mhz: int | None = None
    profile_step_mhz: int | None = None
    memory_clock_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """One kind of GPU, named by its file's stem.

    Attributes:
        gpu: the product's name.
        fitted: whether time and power are fitted to measurements; if not they are guesses.
        max_frequency_mhz: highest lockable SM clock.
        frequency_step_mhz: distance of two clocks, counted down from the maximum; clocks are
            rounded down to whole MHz, as drivers do.
        frequency_change_s: time from the request for a clock to that clock.
        wait_power_w: power while blocked in a receive. Measured at the maximum clock only, so it is
            taken to be the same at every clock.
        refresh_s: period of the energy counter.
        static_power_w: power that no clock changes.
        voltage_floor: V at and below the knee, relative to V at the top clock, in (0, 1].
        power_cap_frequency_mhz: the highest clock that a full load reaches, None for the maximum.
        control: for real GPUs of this kind, None if the preset is for emulation only.
    """

    name: str
    gpu: str
    fitted: bool
    source: str
    max_frequency_mhz: int
    min_frequency_mhz: int
    frequency_step_mhz: float
    frequency_change_s: float
    wait_power_w: float
    refresh_s: float
    static_power_w: float
    voltage_floor: float
    voltage_knee_mhz: float
    forward: KindModel
    backward: KindModel
    power_cap_frequency_mhz: int | None = None
    fit_error_percent: FitError | None = None
    control: ControlOverride | None = None

    @property
    def supported_frequencies_mhz(self) -> tuple[int, ...]:
        """Every lockable SM clock, highest first, counted down from the maximum."""
        span_mhz = self.max_frequency_mhz - self.min_frequency_mhz
        count = int(span_mhz / self.frequency_step_mhz) + 1
        return tuple(
            int(self.max_frequency_mhz - i * self.frequency_step_mhz) for i in range(count)
        )

    @property
    def top_frequency_mhz(self) -> int:
        """The clock that a full load reaches when the maximum is requested."""
        return min(self.max_frequency_mhz, self.power_cap_frequency_mhz or self.max_frequency_mhz)

    def unit_time_s(self, kind: str, frequency_mhz: float, time_at_max_s: float) -> float:
        """Return the duration at a clock of a unit from that at the maximum."""
        memory_fraction = self._kind(kind).memory_fraction
        top_mhz = self.top_frequency_mhz
        return time_at_max_s * (
            memory_fraction + (1.0 - memory_fraction) * (top_mhz / min(frequency_mhz, top_mhz))
        )

    def busy_power_w(self, kind: str, frequency_mhz: float) -> float:
        """Return the power while a unit runs at a clock."""
        reached_mhz = min(frequency_mhz, self.top_frequency_mhz)
        dynamic_w = self._kind(kind).dynamic_power_w * (reached_mhz / self.top_frequency_mhz)
        return self.static_power_w + dynamic_w * self.relative_voltage(reached_mhz) ** 2

    def modelled(self, kind: Kind, time_at_max_s: float) -> list[tuple[int, float, float]]:
        """Return clock in MHz, time in s and energy in J of a unit, the highest clock first.

        Down to where this GPU's control stops profiling. Nothing here was measured on a GPU: what
        is planned from it is modelled, and is to say so.
        """
        control = self.control or ControlOverride(())
        steps = replace(control, profile_max_mhz=None, profile_step_mhz=_MODELLED_STEP_MHZ)
        costs = []
        for mhz in sweep_range(self.supported_frequencies_mhz, steps):
            time_s = self.unit_time_s(kind.value, mhz, time_at_max_s)
            costs.append((mhz, time_s, time_s * self.busy_power_w(kind.value, mhz)))
        return costs

    def relative_voltage(self, frequency_mhz: float) -> float:
        """Return the voltage at a clock, relative to that at the top clock."""
        knee_mhz, floor = self.voltage_knee_mhz, self.voltage_floor
        if frequency_mhz <= knee_mhz:
            return floor
        return floor + (1.0 - floor) * (frequency_mhz - knee_mhz) / (
            self.top_frequency_mhz - knee_mhz
        )

    def _kind(self, kind: str) -> KindModel:
        return self.forward if kind == "forward" else self.backward


def times_by_kind_s(whole_s: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return what units take at the maximum clock, from what forwards and whole backwards take.

    Both parts of a backward take what `MEASURED_SPLIT` charges; a forward and a backward that run
    as one take as long as one after the other.
    """
    backward_s = whole_s.get(Kind.BACKWARD, 0.0)  # a whole iteration is a forward
    return {
        **whole_s,
        **{kind: share * backward_s for kind, share in MEASURED_SPLIT.shares.items()},
        Kind.COMBINED: whole_s[Kind.FORWARD] + backward_s,
        Kind.NOTHING: 0.0,
    }


def list_presets() -> tuple[str, ...]:
    """Return the names of the presets that come with the package, sorted."""
    return tuple(sorted(path.stem for path in shipped_folder(_FOLDER).glob("*.toml")))


def load_preset(name_or_path: str) -> GpuPreset:
    """Load a preset by name (`a100-sxm`), or from a file of your own (a path ending in `.toml`).

    Raises GpuError if there is no such preset, or for a wrong field.
    """
    return _load(resolve_preset(name_or_path))


def read_preset_name(given: str) -> str | None:
    """Return the preset, whose name users write in any case, or its file's absolute path."""
    if given == "auto":
        return None
    name = str(resolve_preset(given)) if given.endswith(".toml") else given.lower()
    load_preset(name)
    return name


def resolve_preset(name_or_path: str) -> Path:
    """Return the absolute path of the file of a preset that is given by name or by path."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        with suppress(RuntimeError):  # there is no such user: it is a name like others
            path = path.expanduser()
        path = path.resolve()
        if path.is_file():
            return path
        raise GpuError("No such GPU preset file", value=str(path), remedy="Check the path")
    names = list_presets()
    if name_or_path not in names:
        raise GpuError(
            "Unknown GPU preset",
            value=name_or_path,
            remedy=f"Use one of {', '.join(names)}, or the path of a .toml file",
        )
    return shipped_folder(_FOLDER) / f"{name_or_path}.toml"


@cache
def _load(path: Path) -> GpuPreset:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise GpuError(f"Cannot read the GPU preset {path}: {error}") from error
    preset = parse_toml(content, path, _FORMAT, GpuError).make_typed(GpuPreset, name=path.stem)
    _check(preset, path)
    return preset


def _check(preset: GpuPreset, path: Path) -> None:
    """Refuse values that do not go together, and numbers out of their range."""
    top_mhz = preset.top_frequency_mhz
    for wrong, problem in (
        (preset.frequency_step_mhz == 0, "frequency_step_mhz must be above 0"),
        (preset.refresh_s == 0, "refresh_s must be above 0"),
        (not 0 < preset.voltage_floor <= 1, "voltage_floor must be above 0 and at most 1"),
        (preset.forward.memory_fraction > 1, "forward.memory_fraction must be at most 1"),
        (preset.backward.memory_fraction > 1, "backward.memory_fraction must be at most 1"),
        (
            preset.min_frequency_mhz > preset.max_frequency_mhz,
            "min_frequency_mhz must not exceed max_frequency_mhz",
        ),
        (
            preset.voltage_knee_mhz >= top_mhz,
            f"voltage_knee_mhz must be below the top clock, {top_mhz}",
        ),
    ):
        if wrong:
            raise GpuError(f"{path}: field {problem}", remedy="Correct the file.")


def override_for(nvml_name: str) -> ControlOverride | None:
    """Return the override for a GPU by the name that NVML reports, None if there is none."""
    preset = _preset_named(nvml_name)
    return None if preset is None else preset.control


def model_for(gpu_name: str) -> GpuPreset | None:
    """Return the preset whose model is nearest to a GPU's product, emulated or not, or None.

    Where no preset has the name, one of the same chip: the first word of its name with a digit.
    """
    name = gpu_name.removesuffix(" (emulated)")
    presets = [load_preset(preset) for preset in list_presets()]
    exact = next((preset for preset in presets if preset.gpu == name), None)
    chips = (preset for preset in presets if _chip(preset.gpu) in name.split())
    return exact or _preset_named(name) or next(chips, None)


def _preset_named(nvml_name: str) -> GpuPreset | None:
    name = _without_vendor(nvml_name)
    for preset in map(load_preset, list_presets()):
        control = preset.control
        if control and any(fnmatchcase(name, _without_vendor(p)) for p in control.nvml_names):
            return preset
    return None


def sweep_range(
    supported_mhz: Sequence[int],
    override: ControlOverride | None,
    step: float = SWEEP_STEP,
) -> tuple[int, ...]:
    """Return the clocks to measure, from the highest downwards; `supported_mhz` has at least one.

    Each is the highest supported clock at least a step, which is a share of the highest clock,
    below the one before. An override's range that leaves fewer than two of this GPU's clocks is for
    another variant of it, and is not followed.
    """
    clocks = sorted(set(supported_mhz), reverse=True)
    step_mhz = step * clocks[0]
    if override is not None:
        highest = override.profile_max_mhz or clocks[0]
        lowest = override.profile_min_mhz or 0
        within = [clock for clock in clocks if lowest <= clock <= highest]
        if len(within) > 1:
            clocks = within
            step_mhz = override.profile_step_mhz or step * clocks[0]
    swept = [clocks[0]]
    for clock in clocks:
        if clock <= swept[-1] - step_mhz:
            swept.append(clock)
    return tuple(swept)


def _chip(product: str) -> str:
    return next(word for word in product.split() if any(map(str.isdigit, word)))


def _without_vendor(name: str) -> str:
    return name.removeprefix("NVIDIA ")
