"""Fit the time and power model of the GPU presets to measured profiles, and print TOML lines.

The presets a100-sxm, a40 and a100-pcie come from here; the others are not fitted. Run from the
checkout: `python benchmarks/gpu/fit_presets.py --data ../shared/data`.
"""

import csv
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import FitError, GpuPreset, KindModel, load_preset

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Samples:
    """Measured points of all stages, one entry a (stage, kind, clock).

    `time_ratio` is over the time of the same stage and kind at the maximum clock.
    """

    backward: npt.NDArray[np.bool_]
    frequency_mhz: Array
    time_ratio: Array
    power_w: Array


@dataclass(frozen=True)
class Target:
    """What one preset is fitted to.

    Attributes:
        profiles: glob pattern of profile CSVs below the data folder.
        caps_mhz: clocks to try as the power cap.
        same_power: the profiles cannot tell forward from backward power, and their level differs
            by stage and workload: scale each to the mean level, and fit one dynamic power.
    """

    preset: str
    profiles: str
    caps_mhz: tuple[int, ...]
    same_power: bool = False


TARGETS = (
    Target(
        "a100-sxm",
        "perseus_sosp24/emulation/stage_profile/*_a100_sxm.csv",
        caps_mhz=(1410, 1395, 1380, 1365, 1350),
    ),
    Target(
        "a40",
        "perseus_sosp24/emulation/stage_profile/*_a40.csv",
        caps_mhz=(1740, *range(1515, 1395, -15)),
    ),
    Target(
        "a100-pcie",
        "perseus_sosp24/measured/A100_*/profile.csv",
        caps_mhz=(1260,),
        same_power=True,
    ),
)


def load_samples(data: Path, target: Target, max_frequency_mhz: int) -> Samples:
    """Read a target's profiles; raise EnvPipeError without any, or without the maximum clock."""
    paths = sorted(data.glob(target.profiles))
    if not paths:
        raise EnvPipeError(
            f"No profile matches {target.profiles}",
            value=str(data),
            remedy="Give the shared data folder with --data",
        )
    groups: dict[tuple[Path, str, str], dict[int, tuple[float, float]]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                group = groups.setdefault((path, row["stage"], row["instruction"]), {})
                time_s = float(row["time"])
                group[int(row["frequency"])] = (time_s, float(row["energy"]) / time_s)
    for key, group in groups.items():
        if max_frequency_mhz not in group:
            raise EnvPipeError(f"{key}: no row at the maximum clock", value=max_frequency_mhz)
    level_w = float(np.mean([group[max_frequency_mhz][1] for group in groups.values()]))
    points = []
    for (_, _, instruction), group in groups.items():
        time_at_max_s, power_at_max_w = group[max_frequency_mhz]
        scale = level_w / power_at_max_w if target.same_power else 1.0
        for frequency_mhz, (time_s, power_w) in group.items():
            backward = float(instruction == "backward")
            points.append((backward, frequency_mhz, time_s / time_at_max_s, power_w * scale))
    table = np.array(points)
    return Samples(table[:, 0] > 0, table[:, 1], table[:, 2], table[:, 3])


def errors(preset: GpuPreset, samples: Samples) -> FitError:
    """Return how far a preset, through its own functions, is from the samples, in percent."""
    time_error, power_error = [], []
    for backward, frequency_mhz, ratio, power_w in zip(
        samples.backward, samples.frequency_mhz, samples.time_ratio, samples.power_w, strict=True
    ):
        kind = "backward" if backward else "forward"
        time_error.append(abs(preset.unit_time_s(kind, frequency_mhz, 1.0) / ratio - 1) * 100)
        power_error.append(abs(preset.busy_power_w(kind, frequency_mhz) / power_w - 1) * 100)
    return FitError(
        time_mean=float(np.mean(time_error)),
        time_max=float(np.max(time_error)),
        power_mean=float(np.mean(power_error)),
        power_max=float(np.max(power_error)),
    )


def fit(start: GpuPreset, target: Target, samples: Samples) -> GpuPreset:
    """Fit memory fractions, powers, voltage curve and cap; return the preset with its errors.

    Relative residuals, because a percent of a slow clock's time matters as much as one of a fast.
    The cap is scanned, for the error is not smooth in it. The worst errors decide, not the means:
    they lie at the highest clocks, where the cap acts and where a plan takes its first savings.
    """
    fits = [_fit_at_cap(start, cap_mhz, target.same_power, samples) for cap_mhz in target.caps_mhz]

    def worst(preset: GpuPreset) -> float:
        error = preset.fit_error_percent
        assert error is not None  # set by _fit_at_cap
        return error.time_max + error.power_max

    return min(fits, key=worst)


def _fit_at_cap(start: GpuPreset, cap_mhz: int, same_power: bool, samples: Samples) -> GpuPreset:
    top_mhz = float(min(start.max_frequency_mhz, cap_mhz))
    reached = np.minimum(samples.frequency_mhz, top_mhz)
    backward = samples.backward

    def time_residuals(x: Array) -> Array:
        memory = np.where(backward, x[1], x[0])
        ratio: Array = memory + (1 - memory) * top_mhz / reached
        return ratio / samples.time_ratio - 1

    def power_residuals(x: Array) -> Array:
        static, floor, knee, forward_w = x[:4]
        dynamic = np.where(backward, x[-1], forward_w)
        slope = (1 - floor) / (top_mhz - knee)
        voltage = floor + slope * np.maximum(reached - knee, 0)
        power_w: Array = static + dynamic * (reached / top_mhz) * voltage**2
        return power_w / samples.power_w - 1

    time_x = least_squares(time_residuals, [0.3, 0.3], bounds=(0, 1)).x
    low_mhz = float(samples.frequency_mhz.min())
    kinds = 1 if same_power else 2
    bounds = (
        [0.0, 0.3, low_mhz, *[0.0] * kinds],
        [200.0, 1.0, top_mhz - 30, *[1000.0] * kinds],
    )
    # Several knees to start from: the residual has a kink there, so one start can be caught.
    knees = np.linspace(low_mhz + 10, top_mhz - 60, 6)
    power_x = min(
        (_least(power_residuals, [80.0, 0.8, knee, *[300.0] * kinds], bounds) for knee in knees),
        key=lambda x: float((power_residuals(x) ** 2).sum()),
    )
    # Rounded before the errors are computed: the stated errors are those of the committed file.
    fitted = dataclasses.replace(
        start,
        power_cap_frequency_mhz=cap_mhz if cap_mhz < start.max_frequency_mhz else None,
        static_power_w=round(float(power_x[0]), 2),
        voltage_floor=round(float(power_x[1]), 4),
        voltage_knee_mhz=round(float(power_x[2]), 1),
        forward=KindModel(round(float(time_x[0]), 4), round(float(power_x[3]), 2)),
        backward=KindModel(round(float(time_x[1]), 4), round(float(power_x[-1]), 2)),
    )
    return dataclasses.replace(fitted, fit_error_percent=errors(fitted, samples))


def _least(
    residuals: Callable[[Array], Array], start: list[float], bounds: tuple[list[float], list[float]]
) -> Array:
    scale = [max(abs(value), 0.1) for value in start]
    result: Array = least_squares(residuals, start, bounds=bounds, x_scale=scale).x
    return result


def toml_lines(preset: GpuPreset) -> str:
    """Return the fitted lines of a preset file."""
    lines = [f"# {preset.name}"]
    if preset.power_cap_frequency_mhz is not None:
        lines.append(f"power_cap_frequency_mhz = {preset.power_cap_frequency_mhz}")
    for field in ("static_power_w", "voltage_floor", "voltage_knee_mhz"):
        lines.append(f"{field} = {getattr(preset, field)}")
    for kind, model in (("forward", preset.forward), ("backward", preset.backward)):
        lines += ["", f"[{kind}]", f"memory_fraction = {model.memory_fraction}"]
        lines.append(f"dynamic_power_w = {model.dynamic_power_w}")
    error = preset.fit_error_percent
    assert error is not None  # a fit always carries its error
    lines += ["", "[fit_error_percent]"]
    lines += [f"{name} = {value:.3f}" for name, value in dataclasses.asdict(error).items()]
    return "\n".join(lines)


@click.command()
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path("../shared/data"),
    show_default=True,
    help="Folder that holds perseus_sosp24/.",
)
def main(data: Path) -> None:
    """Print the fitted lines of each preset.

    Example: python benchmarks/gpu/fit_presets.py --data ../shared/data
    """
    for target in TARGETS:
        start = load_preset(target.preset)
        samples = load_samples(data, target, start.max_frequency_mhz)
        click.echo(toml_lines(fit(start, target, samples)) + "\n")


if __name__ == "__main__":
    main()
