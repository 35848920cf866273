"""GPU presets with lines changed, and profiles as a preset would measure them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.gpu.presets import load_preset, preset_folder


def write_changed_preset(path: Path, changes: Mapping[str, tuple[float, float]]) -> Path:
    """Write an A100 SXM with some lines changed: what each says, and what it shall say."""
    text = (preset_folder() / "a100-sxm.toml").read_text()
    for name, (stock, changed) in changes.items():
        assert f"\n{name} = {stock}\n" in text
        text = text.replace(f"\n{name} = {stock}\n", f"\n{name} = {changed}\n")
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
