"""Which clocks of a real GPU are worth profiling: derived from its own table, but for overrides.

The `[control]` tables of the presets say where a kind of GPU needs something else.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from envpipe_megatron.gpu.emulated.presets import ControlOverride, list_presets, load_preset

SWEEP_STEP = 0.04
"""Profiled clocks are this share of the maximum apart: the valley lies some ten clocks down."""


def override_for(nvml_name: str) -> ControlOverride | None:
    """Return the override for a GPU by the name that NVML reports, None if there is none."""
    name = _without_vendor(nvml_name)
    for preset in list_presets():
        control = load_preset(preset).control
        if control and any(fnmatchcase(name, _without_vendor(p)) for p in control.nvml_names):
            return control
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


def _without_vendor(name: str) -> str:
    return name.removeprefix("NVIDIA ")
