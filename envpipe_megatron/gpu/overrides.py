"""Which clocks of a real GPU are worth profiling: derived from its own table, but for overrides.

The `[control]` tables of the presets say where a kind of GPU needs something else.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from envpipe_megatron.gpu.emulated.presets import (
    ControlOverride,
    GpuPreset,
    list_presets,
    load_preset,
)

SWEEP_STEP = 0.04
"""Profiled clocks are this share of the maximum apart: the valley lies some ten clocks down."""


def override_for(nvml_name: str) -> ControlOverride | None:
    """Return the override for a GPU by the name that NVML reports, None if there is none."""
    preset = _preset_named(nvml_name)
    return None if preset is None else preset.control


def model_for(gpu_name: str) -> GpuPreset | None:
    """The preset whose model is nearest to a GPU's product, emulated or not; None if none is.

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
