"""GPU presets with lines changed, and profiles as a preset would measure them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.gpu.presets import load_preset, resolve_preset


def write_changed_preset(path: Path, changes: Mapping[str, float], of: str = "a100-sxm") -> Path:
    """Write a preset with some numbers changed."""
    text = resolve_preset(of).read_text()
    for name, changed in changes.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {changed}", text)
        assert count == 1, name
    path.write_text(text)
    return path


def preset_profile(
    preset_name: str, num_stages: int, time_at_max_s: Mapping[Kind, float], clocks: Sequence[int]
) -> Profile:
    """All stages alike, at the highest clock and some others in MHz."""
    preset = load_preset(preset_name)
    rows = []
    for stage in range(num_stages):
        for kind, unit_s in time_at_max_s.items():
            for mhz in (preset.max_frequency_mhz, *clocks):
                time_s = preset.unit_time_s(kind.value, mhz, unit_s)
                energy_j = time_s * preset.busy_power_w(kind.value, mhz)
                rows.append((stage, kind, ProfileRow(mhz, time_s, energy_j)))
    return make_profile(rows, source="the preset")
