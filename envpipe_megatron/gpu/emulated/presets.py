"""GPU presets: how time and power of a kind of GPU follow its SM clock, loaded from TOML.

The model, with `g = min(f, cap)` the clock that the GPU really reaches when `f` is requested and
`top` the clock it reaches when its maximum is requested:

    time(f)  = time(max) * (m + (1 - m) * top / g)
    power(f) = static + dynamic * (g / top) * V(g)^2

`m` is the part of the time that waits for memory, whatever the clock. The voltage V, relative to
that at `top`, lies at a floor up to a knee and rises linearly to 1 from there.

The cap is a clock because that is what a power limit looks like from outside: above it, more
requested clock changes neither time nor power.
"""

import math
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from envpipe_megatron.files import read_text
from envpipe_megatron.gpu.base import GpuError

Kind: TypeAlias = Literal["forward", "backward"]

FORMAT = "envpipe-gpu-preset/1"


class PresetError(GpuError):
    """A preset does not exist, or its file is wrong."""


@dataclass(frozen=True, slots=True)
class KindModel:
    """What differs between forward and backward.

    Attributes:
        memory_fraction: part of the time at the maximum clock that no clock shortens, in [0, 1].
        dynamic_power_w: power at the top clock above the static power, W.
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
    """What to do with a real GPU of this kind otherwise than its clock tables suggest.

    Attributes:
        nvml_names: patterns (`NVIDIA A100-SXM4-*`) of the names that NVML reports for it; a leading
            `NVIDIA`, which old drivers leave out, does not count.
        profile_max_mhz: no higher clock is profiled, None for the GPU's maximum.
        profile_min_mhz: no lower clock is profiled, None where the sweep finds its end by itself.
        profile_step_mhz: distance of two profiled clocks, None for the sweep's own.
        memory_clock_mhz: the memory clock in MHz under which CUDA runs, None where it is the
            highest. SM clocks are those that the GPU supports under it.
    """

    nvml_names: tuple[str, ...]
    profile_max_mhz: int | None = None
    profile_min_mhz: int | None = None
    profile_step_mhz: int | None = None
    memory_clock_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class GpuPreset:
    """One kind of GPU.

    Attributes:
        name: the file's stem, for example `a100-sxm`.
        gpu: the product's name.
        fitted: whether time and power are fitted to measurements; if not they are guesses that
            only make the emulation run.
        source: what the numbers stand on.
        max_frequency_mhz: highest lockable SM clock.
        min_frequency_mhz: lowest lockable SM clock.
        frequency_step_mhz: distance of two clocks, counted down from the maximum; V100: 7.5, of
            which drivers show the whole part.
        power_cap_frequency_mhz: clock above which a full load does not get, None where it does.
        frequency_change_s: from the request for a clock to that clock, s.
        wait_power_w: power while blocked in a receive. Measured at the maximum clock only, so it
            is taken to be the same at every clock.
        refresh_s: period of the energy counter, s.
        static_power_w: power that no clock changes.
        voltage_floor: V at and below the knee, relative to V at the top clock, in (0, 1].
        voltage_knee_mhz: clock up to which the voltage stays at its floor.
        forward: model of forward units.
        backward: model of backward units.
        fit_error_percent: None where not fitted.
        control: for real GPUs of this kind, None where the preset is for emulation alone.
    """

    name: str
    gpu: str
    fitted: bool
    source: str
    max_frequency_mhz: int
    min_frequency_mhz: int
    frequency_step_mhz: float
    power_cap_frequency_mhz: int | None
    frequency_change_s: float
    wait_power_w: float
    refresh_s: float
    static_power_w: float
    voltage_floor: float
    voltage_knee_mhz: float
    forward: KindModel
    backward: KindModel
    fit_error_percent: FitError | None
    control: ControlOverride | None

    @property
    def supported_frequencies_mhz(self) -> tuple[int, ...]:
        """Every lockable SM clock in MHz, highest first, counted down from the maximum."""
        span_mhz = self.max_frequency_mhz - self.min_frequency_mhz
        count = int(span_mhz / self.frequency_step_mhz) + 1
        return tuple(
            int(self.max_frequency_mhz - i * self.frequency_step_mhz) for i in range(count)
        )

    @property
    def top_frequency_mhz(self) -> int:
        """The clock in MHz that a full load reaches when the maximum is requested."""
        return min(self.max_frequency_mhz, self.power_cap_frequency_mhz or self.max_frequency_mhz)

    def unit_time_s(self, kind: Kind, frequency_mhz: float, time_at_max_s: float) -> float:
        """Return the duration in s at a clock of a unit that takes `time_at_max_s` at the maximum.

        Raises:
            GpuError: unknown kind, or a clock that is not positive.
        """
        memory_fraction = self._kind(kind).memory_fraction
        top = self.top_frequency_mhz
        return time_at_max_s * (
            memory_fraction + (1.0 - memory_fraction) * (top / self._reached(frequency_mhz))
        )

    def busy_power_w(self, kind: Kind, frequency_mhz: float) -> float:
        """Return the power in W while a unit runs at a clock.

        Raises:
            GpuError: unknown kind, or a clock that is not positive.
        """
        model = self._kind(kind)
        reached_mhz = self._reached(frequency_mhz)
        voltage = self.relative_voltage(reached_mhz)
        return (
            self.static_power_w
            + model.dynamic_power_w * (reached_mhz / self.top_frequency_mhz) * voltage**2
        )

    def relative_voltage(self, frequency_mhz: float) -> float:
        """Return the voltage at a clock, relative to that at the top clock."""
        knee_mhz, floor = self.voltage_knee_mhz, self.voltage_floor
        if frequency_mhz <= knee_mhz:
            return floor
        return floor + (1.0 - floor) * (frequency_mhz - knee_mhz) / (
            self.top_frequency_mhz - knee_mhz
        )

    def _reached(self, frequency_mhz: float) -> float:
        if not frequency_mhz > 0:
            raise GpuError("A clock must be a positive number of MHz", value=frequency_mhz)
        return min(frequency_mhz, self.top_frequency_mhz)

    def _kind(self, kind: Kind) -> KindModel:
        if kind == "forward":
            return self.forward
        if kind == "backward":
            return self.backward
        raise GpuError("Unknown kind of unit", value=kind, remedy="Use 'forward' or 'backward'")


def preset_folder() -> Path:
    """Return the folder of the preset files: in the installed package, or else in the checkout.

    Raises:
        PresetError: neither exists.
    """
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "configs" / "gpus", package.parent / "configs" / "gpus"):
        if folder.is_dir():
            return folder
    raise PresetError(
        "The GPU presets are missing from this installation",
        value=str(package),
        remedy="Reinstall envpipe-megatron",
    )


def list_presets() -> tuple[str, ...]:
    """Return the names of the presets that come with the package, sorted."""
    return tuple(sorted(path.stem for path in preset_folder().glob("*.toml")))


def load_preset(name_or_path: str) -> GpuPreset:
    """Load a preset by name (`a100-sxm`), or from a file of your own (a path ending in `.toml`).

    Raises:
        PresetError: no such preset (the error lists those there are), or a wrong field (the error
            names file and field).
    """
    return _load(resolve_preset(name_or_path))


def resolve_preset(name_or_path: str) -> Path:
    """Return the absolute path of the file of a preset that is given by name or by path.

    Raises:
        PresetError: there is none.
    """
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path).expanduser().resolve()
        if path.is_file():
            return path
        raise PresetError("No such GPU preset file", value=str(path), remedy="Check the path")
    names = list_presets()
    if name_or_path not in names:
        raise PresetError(
            "Unknown GPU preset",
            value=name_or_path,
            remedy=f"Use one of {', '.join(names)}, or the path of a .toml file",
        )
    return preset_folder() / f"{name_or_path}.toml"


@cache
def _load(path: Path) -> GpuPreset:
    try:
        table = tomllib.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise PresetError(
            f"Cannot read the GPU preset {path}: {error}", remedy="Repair or remove the file"
        ) from error
    return _Reader(path, "", table).preset()


class _Reader:
    """Takes fields out of one TOML table; every complaint names file and field."""

    def __init__(self, path: Path, prefix: str, table: dict[str, object]) -> None:
        self._path = path
        self._prefix = prefix
        self._table = table

    def preset(self) -> GpuPreset:
        if self._text("format") != FORMAT:
            raise self._wrong("format", f"must be {FORMAT!r}")
        self._refuse_unknown({"format"} | ({f.name for f in fields(GpuPreset)} - {"name"}))
        preset = GpuPreset(
            name=self._path.stem,
            gpu=self._text("gpu"),
            fitted=self._flag("fitted"),
            source=self._text("source"),
            max_frequency_mhz=self._whole("max_frequency_mhz"),
            min_frequency_mhz=self._whole("min_frequency_mhz"),
            frequency_step_mhz=self._number("frequency_step_mhz", above=0.0),
            power_cap_frequency_mhz=(
                self._whole("power_cap_frequency_mhz")
                if "power_cap_frequency_mhz" in self._table
                else None
            ),
            frequency_change_s=self._number("frequency_change_s"),
            wait_power_w=self._number("wait_power_w"),
            refresh_s=self._number("refresh_s", above=0.0),
            static_power_w=self._number("static_power_w"),
            voltage_floor=self._number("voltage_floor", above=0.0, most=1.0),
            voltage_knee_mhz=self._number("voltage_knee_mhz"),
            forward=self._sub("forward").kind(),
            backward=self._sub("backward").kind(),
            fit_error_percent=(
                self._sub("fit_error_percent").fit_error()
                if "fit_error_percent" in self._table
                else None
            ),
            control=self._sub("control").control() if "control" in self._table else None,
        )
        if preset.min_frequency_mhz > preset.max_frequency_mhz:
            raise self._wrong("min_frequency_mhz", "must not exceed max_frequency_mhz")
        if preset.voltage_knee_mhz >= preset.top_frequency_mhz:
            raise self._wrong(
                "voltage_knee_mhz", f"must be below the top clock, {preset.top_frequency_mhz}"
            )
        if preset.fitted and preset.fit_error_percent is None:
            raise self._wrong("fit_error_percent", "is needed where fitted = true")
        return preset

    def kind(self) -> KindModel:
        self._refuse_unknown({f.name for f in fields(KindModel)})
        return KindModel(
            memory_fraction=self._number("memory_fraction", most=1.0),
            dynamic_power_w=self._number("dynamic_power_w"),
        )

    def control(self) -> ControlOverride:
        self._refuse_unknown({f.name for f in fields(ControlOverride)})
        names = self._table.get("nvml_names")
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            raise self._wrong("nvml_names", "must be a list of names")
        given = [f.name for f in fields(ControlOverride)[1:] if f.name in self._table]
        control = ControlOverride(tuple(names), **{name: self._whole(name) for name in given})
        if (control.profile_min_mhz or 0) > (control.profile_max_mhz or math.inf):
            raise self._wrong("profile_min_mhz", "must not exceed profile_max_mhz")
        return control

    def fit_error(self) -> FitError:
        names = [f.name for f in fields(FitError)]
        self._refuse_unknown(set(names))
        return FitError(**{name: self._number(name) for name in names})

    def _sub(self, field: str) -> "_Reader":
        value = self._table.get(field)
        if not isinstance(value, dict):
            raise self._wrong(field, "must be a table")
        return _Reader(self._path, f"{self._prefix}{field}.", value)

    def _text(self, field: str) -> str:
        value = self._table.get(field)
        if not isinstance(value, str) or not value:
            raise self._wrong(field, "must be a text")
        return value

    def _flag(self, field: str) -> bool:
        value = self._table.get(field)
        if not isinstance(value, bool):
            raise self._wrong(field, "must be true or false")
        return value

    def _whole(self, field: str) -> int:
        value = self._table.get(field)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(field, "must be a whole number above 0")
        return value

    def _number(self, field: str, *, above: float | None = None, most: float = math.inf) -> float:
        value = self._table.get(field)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(field, "must be a number")
        low_enough = value <= most and math.isfinite(value)
        if not low_enough or value < 0 or (above is not None and value <= above):
            raise self._wrong(field, "is out of range")
        return float(value)

    def _refuse_unknown(self, known: set[str]) -> None:
        for field in self._table:
            if field not in known:
                raise self._wrong(field, "is not a field of a GPU preset")

    def _wrong(self, field: str, problem: str) -> PresetError:
        what = f"GPU preset {self._path}: field {self._prefix}{field} {problem}"
        if field not in self._table:
            return PresetError(what, remedy="The field is missing: add it")
        return PresetError(what, value=self._table[field], remedy="Correct this field")
