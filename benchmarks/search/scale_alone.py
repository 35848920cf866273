"""One search of Megatron's space in a process of its own, which imports nothing else.

python -m benchmarks.search.scale_alone FOLDER SEARCH

It prints what it found as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.search.aceso_runs import SETTINGS, Setting, read_setting
from benchmarks.search.aceso_space.folding import fold_blocks
from benchmarks.search.divide_alone import MAX_CHUNKS
from envpipe_megatron.gpu.emulated.modelled import with_modelled_energy
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.megatron.search import search
from envpipe_megatron.search.megatron.space import Space

PRESET = "a100-sxm"
#: How much longer than the fastest the configuration of the least energy may take.
_MAX_SLOWDOWN = 0.02


@dataclass(frozen=True)
class Scale:
    """A search, and what it may take at most."""

    setting: Setting
    objective: Goal
    most_s: float
    most_mib: float


_LAYERS = SETTINGS["1024-layers"]
_GPUS = replace(SETTINGS["gpt-2.6B-1024-gpus"], name="1024-gpus", num_layers=96, global_batch=4096)
SCALES = {
    f"{setting.name}-{goal}": Scale(setting, goal, most_s, 4096)
    for setting, most_s in ((_LAYERS, 10), (_GPUS, 30))
    for goal in (Goal.TIME, Goal.ENERGY)
}


def search_alone(folder: Path, scale: Scale) -> dict[str, Any]:
    """Search in this process; times of the best."""
    profile, wait_w = fold_blocks(read_setting(folder, scale.setting)), 0.0
    if scale.objective == Goal.ENERGY:
        preset = load_preset(PRESET)
        profile, wait_w = with_modelled_energy(profile, preset), preset.wait_power_w
    found = search(
        profile,
        scale.setting.job,
        Space(MAX_CHUNKS),
        Objective(goal=scale.objective),
        blocking_power_w=wait_w,
        max_slowdown=_MAX_SLOWDOWN if scale.objective == Goal.ENERGY else 0.0,
    )
    best = found.ranked[0]
    first = best.candidate.configuration.stages[0]
    return {
        "best": f"PP{len(best.candidate.works)} VP{len(first.chunks)}"
        f" TP{first.sizes.tensor_parallel} DP{first.data_parallel}",
        "shapes": found.num_shapes,
        "iteration_s": best.iteration_time_s,
        "modelled_kJ": None if best.cost is None else best.cost.energy_j / 1e3,
        "process_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    print(json.dumps(search_alone(Path(sys.argv[1]), SCALES[sys.argv[2]])))
