"""Our searches of Aceso's settings, each in a process of its own, which imports nothing else.

`python -m benchmarks.search.searches CALL RESULT`: both are pickles, a function of a module with
its arguments, and what it found with the most memory of the process, in MiB.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.outputs import memory_mib
from benchmarks.search.aceso_runs import Setting, profiles, read_setting, spend
from benchmarks.search.aceso_space.aceso_files import fold_blocks, read_switches
from benchmarks.search.aceso_space.divide import Division, divide
from envpipe_megatron.gpu.modelled import with_modelled_energy
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.search.configuration import Configuration, Job
from envpipe_megatron.search.search import search
from envpipe_megatron.search.space import Space

#: Virtual stages of a stage in Megatron's space at most.
MAX_CHUNKS = 4
#: By which energies are modelled.
PRESET = "a100-sxm"
#: How much longer than the fastest the configuration of the least energy may take.
_MAX_SLOWDOWN = 0.02

Result = TypeVar("Result")


@dataclass(frozen=True)
class Timed(Generic[Result]):
    """What was found, and what finding it took, Python's start included; memory at most."""

    found: Result
    wall_s: float
    cpu_s: float
    memory_mib: float


def alone(function: Callable[..., Result], *arguments: Any) -> Timed[Result]:
    """Call a function of a module in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        call, result = Path(folder) / "call", Path(folder) / "result"
        call.write_bytes(pickle.dumps((function, arguments)))
        command = [sys.executable, "-m", "benchmarks.search.searches", str(call), str(result)]
        spent = spend(command, Path.cwd())
        found, memory_mib = pickle.loads(result.read_bytes())
    return Timed(found, spent.wall_s, spent.cpu_s, memory_mib)


def divide_operators(folder: Path, setting: Setting) -> Division | None:
    """Search Aceso's space; sizes switch inside stages where theirs do."""
    profile, switch_s = read_setting(folder, setting), None
    if setting.model == "resnet":
        switch_s = read_switches(profiles(folder, setting), setting.prefix, profile)
    return divide(profile, setting.job, setting.batches, switch_s=switch_s)


def divide_layers(folder: Path, setting: Setting) -> Division | None:
    """Search the same between whole layers, with one size for all stages."""
    profile = fold_blocks(read_setting(folder, setting))
    return divide(profile, setting.job, setting.batches, same_size=True)


def search_megatron(folder: Path, setting: Setting) -> Configuration:
    """Search Megatron's space for the fastest."""
    profile, space = fold_blocks(read_setting(folder, setting)), Space(MAX_CHUNKS)
    ranked = search(profile, setting.job, space, Objective(goal=Goal.TIME)).ranked
    return ranked[0].candidate.configuration


def search_at_scale(folder: Path, setting: Setting, job: Job, goal: Goal) -> dict[str, Any]:
    """Search Megatron's space for the goal; what was found, for a table."""
    profile, wait_w = fold_blocks(read_setting(folder, setting)), 0.0
    if goal == Goal.ENERGY:
        preset = load_preset(PRESET)
        profile, wait_w = with_modelled_energy(profile, preset), preset.wait_power_w
    found = search(
        profile,
        job,
        Space(MAX_CHUNKS),
        Objective(goal=goal),
        blocking_power_w=wait_w,
        max_slowdown=_MAX_SLOWDOWN if goal == Goal.ENERGY else 0.0,
    )
    best = found.ranked[0]
    first = best.candidate.configuration.stages[0]
    return {
        "best": f"PP{len(best.candidate.works)} VP{len(first.chunks)}"
        f" TP{first.sizes.tensor_parallel} DP{first.data_parallel}",
        "shapes": found.num_shapes,
        "iteration_s": best.iteration_time_s,
        "modelled_kJ": None if best.cost is None else best.cost.energy_j / 1e3,
    }


def _main(call: str, result: str) -> None:
    function, arguments = pickle.loads(Path(call).read_bytes())
    found = function(*arguments)
    Path(result).write_bytes(pickle.dumps((found, memory_mib("VmHWM"))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
