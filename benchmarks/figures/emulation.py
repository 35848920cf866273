"""Time of an emulated job, shortened by one factor, so that figures take minutes.

All of the GPU's time is multiplied by it: units, the change of a clock, the refresh of the energy
counter. Power stays. So every share of time and energy is that of the real size, and seconds and
joules are those of the real size times the factor.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.figures.unit_times import UnitTimes
from envpipe_megatron.gpu.emulated.presets import load_preset, resolve_preset

#: The shortest forward of a pipeline is not made shorter than this share of what the longest is
#: asked to be, or the host would compute longer than the unit.
_SHORTEST_SHARE = 0.75
#: What of a preset is time.
_TIMES = ("frequency_change_s", "refresh_s")


def time_factor(times: UnitTimes, forward_s: float) -> float:
    """What emulated time is multiplied by for these units.

    Args:
        times: of the real size.
        forward_s: of the longest forward of the pipeline in wall time; longer where the shortest
            would else be too short for a host.
    """
    shortest_s = _SHORTEST_SHARE * forward_s
    return max(forward_s / max(times.forward_s), shortest_s / min(times.forward_s))


def write_scaled_preset(name: str, factor: float, folder: Path) -> Path:
    """Write a preset whose times are multiplied by a factor.

    Args:
        name: of a preset that comes with the package.
        factor: above 0.
        folder: is made where it is missing.
    """
    text = resolve_preset(name).read_text(encoding="utf-8")
    preset = load_preset(name)
    for field in _TIMES:
        value = f"{field} = {getattr(preset, field) * factor!r}"
        text, count = re.subn(rf"(?m)^{field} = .*$", value, text)
        assert count == 1, f"{name} says {field} {count} times"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    return path
