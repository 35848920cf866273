"""Aceso's own search and cost model (EuroSys'24), unmodified, in processes of their own.

The archive of ../shared/data is unpacked into a folder that the caller gives and drops.
"""

from __future__ import annotations

import re
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import Spent, run_command
from benchmarks.search.aceso_files import read_aceso_profile
from envpipe_megatron.search.configuration import Job
from envpipe_megatron.search.layer_profile import LayerProfile

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
        Setting("64-layers", "eurosys", "scale-layer", "64layers", 64, 8, 1024, options=_SCALE),
        Setting(
            "1024-layers", "eurosys", "scale-layer", "1024layers", 1024, 8, 1024, options=_SCALE
        ),
    )
}


@dataclass(frozen=True)
class Searched:
    """A run of their search: the file of its best plan, what it took, and their judgement of it.

    By their cost model, `time_ms` is of an iteration and `peak_mib` the most that a GPU holds.
    """

    plan: Path
    spent: Spent
    time_ms: float
    peak_mib: float


def unpack(folder: Path) -> None:
    """Unpack the archive of the data."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def read_setting(folder: Path, setting: Setting) -> LayerProfile:
    """Return the profile of a setting's model."""
    return read_aceso_profile(_profiles(folder, setting), setting.prefix, setting.num_layers)


def search(folder: Path, setting: Setting, budget_s: int) -> Searched:
    """Run their search as their scripts do, and their cost model on its best plan."""
    results = folder / "results" / setting.name
    for name in ("trends", "top_configs", "csv"):
        (results / name).mkdir(parents=True)
    _, spent = _run(
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
    model = ["--initial-point", str(plan), *_hardware(folder, setting)]
    said, _ = _run(folder, "aceso_cost_model.py", model)
    time_ms, peak_mib = (
        float(match[1]) if (match := re.search(pattern, said)) else float("nan")
        for pattern in (r"overall time = ([\d.]+) ms", r"max allocated memory = ([\d.]+) MB")
    )
    return Searched(plan, spent, time_ms, peak_mib)


def _profiles(folder: Path, setting: Setting) -> Path:
    return folder / "profiler" / f"profiled-time-{setting.database}"


def _hardware(folder: Path, setting: Setting) -> list[str]:
    return [
        *("--profiled-time-path", f"{_profiles(folder, setting)}/"),
        *("--num-nodes", "1", "--num-gpus-per-node", str(setting.num_gpus)),
        *("--memory-limit", str(setting.memory_mib), "--num-layers", str(setting.num_layers)),
        *("--micro-batch-size", "1", "2", "4", "8"),
    ]


def _run(folder: Path, script: str, options: Sequence[str]) -> tuple[str, Spent]:
    return run_command([sys.executable, script, *options], folder / "search")
