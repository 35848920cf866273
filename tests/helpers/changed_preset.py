"""GPU presets with fewer clocks, or a counter that refreshes more often: tests take less time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envpipe_megatron.gpu.emulated.presets import preset_folder


def write_changed_preset(path: Path, changes: Mapping[str, tuple[float, float]]) -> Path:
    """Write an A100 SXM with some lines changed: what each says, and what it shall say."""
    text = (preset_folder() / "a100-sxm.toml").read_text()
    for name, (stock, changed) in changes.items():
        assert f"\n{name} = {stock}\n" in text
        text = text.replace(f"\n{name} = {stock}\n", f"\n{name} = {changed}\n")
    path.write_text(text)
    return path
