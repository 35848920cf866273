"""Aceso's own search and cost model, unmodified, in processes of their own.

The archive of ../shared/data is unpacked into a folder that the caller gives and drops. A plan goes
to their cost model as the JSON that their search writes.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.search.aceso_space.aceso_files import read_aceso_profile, read_splits
from benchmarks.search.aceso_space.choices import OPERATOR
from benchmarks.search.aceso_space.divide import Division, Switch
from benchmarks.search.aceso_space.plans import PieceStage
from envpipe_megatron.search.configuration import Configuration, Job, StageLayout
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

ARCHIVE = Path("../shared/data/aceso_eurosys24/aceso.tar.xz")
_MIB = 2.0**20


@dataclass(frozen=True)
class Setting:
    """A search as the authors' scripts have it.

    Args:
        name: of the setting, for tables.
        database: `eurosys` or `miniset`, the folder of profiles.
        model, size: as they name them.
        memory_mib: of a GPU.
        options: of their script besides.
        batches: samples of an aggregate microbatch.
    """

    name: str
    database: str
    model: str
    size: str
    num_layers: int
    num_gpus: int
    global_batch: int
    memory_mib: int = 28_000
    options: tuple[str, ...] = ()
    batches: tuple[int, ...] = (1, 2, 4, 8)

    @property
    def prefix(self) -> str:
        """With which the files of the model begin."""
        if self.model == "scale-layer":
            return "gpt_scale-layer"
        return f"{self.model}_{self.size}"

    @property
    def job(self) -> Job:
        """The setting as a job."""
        return Job(self.num_gpus, self.num_gpus, self.global_batch, self.memory_mib * _MIB)


_SCALE = ("--op-group-size", "1", "--peak-mem-in-backward", "1000", "--predict-delta-time")
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("gpt-1.3B-small", "miniset", "gpt", "1_3B", 24, 4, 512, 12_000),
        Setting("gpt-1.3B", "eurosys", "gpt", "1_3B", 24, 4, 1024),
        Setting("gpt-2.6B", "eurosys", "gpt", "2_6B", 32, 8, 1024),
        Setting("t5-3B", "eurosys", "t5", "3B", 24, 4, 1024),
        Setting(
            "resnet-2B", "eurosys", "resnet", "2B", 50, 4, 1536,
            options=("--finetune-after-trial", "1"), batches=(16, 32, 48, 64),
        ),
        Setting("64-layers", "eurosys", "scale-layer", "64layers", 64, 8, 1024, options=_SCALE),
        Setting(
            "1024-layers", "eurosys", "scale-layer", "1024layers", 1024, 8, 1024, options=_SCALE
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """What their cost model says of a plan, and the most that a GPU holds."""

    time_ms: float
    memory_mib: float


@dataclass(frozen=True)
class Spent:
    """A process that ended: what it printed, and what it and its children took."""

    output: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Searched:
    """A run of their search: the file of its best plan, judged, and what the search took."""

    plan: Path
    judged: Judged
    wall_s: float
    cpu_s: float


def unpack(folder: Path) -> None:
    """Unpack the archive of the data."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def read_setting(folder: Path, setting: Setting) -> LayerProfile:
    """The profile of a setting's model."""
    return read_aceso_profile(profiles(folder, setting), setting.prefix, setting.num_layers)


def judge(folder: Path, setting: Setting, plan: Path) -> Judged:
    """Ask their cost model what a plan takes, and the most that a GPU holds."""
    spent = _run(
        folder,
        "aceso_cost_model.py",
        ["--initial-point", str(plan), *_hardware(folder, setting)],
    )
    time_ms, memory_mib = (
        float(match[1]) if (match := re.search(pattern, spent.output)) else float("nan")
        for pattern in (r"overall time = ([\d.]+) ms", r"max allocated memory = ([\d.]+) MB")
    )
    return Judged(time_ms, memory_mib)


def search(folder: Path, setting: Setting, budget_s: int) -> Searched:
    """Run their search as their scripts do."""
    results = folder / "results" / setting.name
    for name in ("trends", "top_configs", "csv"):
        (results / name).mkdir(parents=True)
    spent = _run(
        folder,
        "aceso_search.py",
        [
            *("--model-name", setting.model, "--model-size", setting.size),
            *("--global-batch-size", str(setting.global_batch)),
            *("--log-path", f"{results}/", "--config-save-path", f"{results}/"),
            *("--max-num-hops", "7", "--time-budget-total", str(budget_s)),
            *("--initial-point", "balance", *_hardware(folder, setting), *setting.options),
        ],
    )
    (plan,) = (results / "top_configs").glob("*.json")
    return Searched(plan, judge(folder, setting, plan), spent.wall_s, spent.cpu_s)


def write_plan(folder: Path, setting: Setting, division: Division) -> Path:
    """Write a division as their search writes its plans."""
    stages = division.configuration.stages
    profile = read_setting(folder, setting)
    splits = read_splits(profiles(folder, setting), setting.prefix)
    sizes = [_sizes_of_each(*pair) for pair in zip(stages, division.switches, strict=True)]
    named = setting.model if setting.model != "scale-layer" else "gpt"
    plan: dict[str, Any] = {
        "model_name": named,
        "model_size": setting.prefix.removeprefix(f"{named}_"),
        "num_layers": setting.num_layers,
        "global_batch_size": setting.global_batch,
        "micro_batch_size": setting.global_batch // division.configuration.num_microbatches,
        "num_stages": len(stages),
        "num_gpus": [stage.num_gpus for stage in stages],
        "num_ops_in_each_stage": [len(stage.pieces) for stage in stages],
        "model_parallel_size_of_each_op": [
            [each.tensor_parallel for each, _ in of_stage] for of_stage in sizes
        ],
        "data_parallel_size_of_each_op": [
            [data_parallel for _, data_parallel in of_stage] for of_stage in sizes
        ],
        "recompute_ops": [
            [int(way is not None) for way in stage.ways]
            for stage in stages
            if isinstance(stage, PieceStage)
        ],
        "algo_of_each_op": [
            [
                splits[each][profile.pieces[piece]]
                for piece, (each, _) in zip(stage.pieces, of_stage, strict=True)
            ]
            for stage, of_stage in zip(stages, sizes, strict=True)
        ],
    }
    path = folder / f"{setting.name}.json"
    path.write_text(json.dumps(plan))
    return path


def _sizes_of_each(stage: StageLayout, switch: Switch | None) -> list[tuple[Sizes, int]]:
    """Sizes and data parallel ranks of each piece of a stage."""
    before = (stage.sizes, stage.data_parallel)
    behind = before if switch is None else (switch.sizes, switch.data_parallel)
    return [before if switch is None or piece < switch.piece else behind for piece in stage.pieces]


def read_plan(path: Path) -> Configuration | None:
    """A plan of theirs; None if sizes differ inside a stage."""
    plan = json.loads(path.read_text())
    stages, first = [], 0
    for number, count in enumerate(plan["num_ops_in_each_stage"]):
        tensor, data = (
            set(plan[f"{kind}_parallel_size_of_each_op"][number]) for kind in ("model", "data")
        )
        if len(tensor) > 1 or len(data) > 1:
            return None
        data_parallel = data.pop()
        sizes = Sizes(tensor.pop(), plan["micro_batch_size"] // data_parallel)
        ways = tuple(OPERATOR if flag else None for flag in plan["recompute_ops"][number])
        stages.append(PieceStage(((first, first + count),), sizes, data_parallel, ways=ways))
        first += count
    return Configuration(tuple(stages), plan["global_batch_size"] // plan["micro_batch_size"])


def profiles(folder: Path, setting: Setting) -> Path:
    """Where the profiles of a setting's model lie."""
    return folder / "profiler" / f"profiled-time-{setting.database}"


def _hardware(folder: Path, setting: Setting) -> list[str]:
    return [
        *("--profiled-time-path", f"{profiles(folder, setting)}/"),
        *("--num-nodes", "1", "--num-gpus-per-node", str(setting.num_gpus)),
        *("--memory-limit", str(setting.memory_mib), "--num-layers", str(setting.num_layers)),
        *("--micro-batch-size", *map(str, setting.batches)),
    ]


def _run(folder: Path, script: str, options: Sequence[str]) -> Spent:
    return spend([sys.executable, script, *options], folder / "search")


def spend(command: Sequence[str], folder: Path) -> Spent:
    """Run a command in a folder, and wait for it."""
    begin_s, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    wall_s, after = time.monotonic() - begin_s, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(done.stdout, wall_s, cpu_s)
