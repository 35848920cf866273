"""The pipelines that planners are compared on, from files of the form of ../shared/data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.profile import Profile, ProfileRow, make_profile, read_profile
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.planner import PlanRequest

_EMULATED_MODEL = "GPT-3 175B"
_EMULATED_MICROBATCHES = (12, 24, 48, 96)
#: GPU, file name and blocking power (W) of the emulated pipelines.
_EMULATED = (("A100 SXM", "a100_sxm", 83.64), ("A40", "a40", 70.38))


@dataclass(frozen=True)
class Workload:
    """One pipeline to plan.

    Args:
        key: name in CSV files, and of the folder or file the profile came from.
        model: for readers.
        gpu: for readers.
        emulated: whether the profile is the emulated GPT-3 175B; else of a measured training run.
        profile: without chunks.
        num_microbatches: M.
        blocking_power_w: of every stage's GPU.
    """

    key: str
    model: str
    gpu: str
    emulated: bool
    profile: Profile
    num_microbatches: int
    blocking_power_w: float

    @property
    def name(self) -> str:
        """For tables and pictures."""
        return f"{self.model}, {self.gpu}, M = {self.num_microbatches}"

    @property
    def conditions(self) -> Conditions:
        """What every plan of the workload is priced under."""
        return Conditions((self.blocking_power_w,) * self.profile.num_stages)

    def request(
        self,
        schedule: str = "1f1b",
        policy: str = "baseline",
        reconfigure: str = "default",
        max_extra_forwards: int | None = None,
        deadline_factor: float = 1.0,
    ) -> PlanRequest:
        """A request to plan this workload."""
        return PlanRequest(
            self.num_microbatches,
            schedule,
            policy,
            reconfigure,
            blocking_power_w=self.blocking_power_w,
            max_extra_forwards=max_extra_forwards,
            deadline_factor=deadline_factor,
        )


def read_workloads(data_dir: Path) -> list[Workload]:
    """The workloads of a folder of the form of ../shared/data/perseus_sosp24.

    Raises:
        ProfileError: a profile that is wrong.
    """
    workloads: list[Workload] = []
    for gpu, name, power_w in _EMULATED:
        profile = read_profile(data_dir / "emulation" / "stage_profile" / f"gpt3-175b_{name}.csv")
        workloads.extend(
            Workload(
                f"gpt3-175b_{name}_mb{count}", _EMULATED_MODEL, gpu, True, profile, count, power_w
            )
            for count in _EMULATED_MICROBATCHES
        )
    for meta_path in sorted((data_dir / "measured").glob("*/meta.json")):
        meta = json.loads(meta_path.read_text())
        workloads.append(
            Workload(
                meta_path.parent.name,
                meta["model"],
                meta["gpu"],
                False,
                read_profile(meta_path.parent / "profile.csv"),
                int(meta["num_microbatches"]),
                float(meta["blocking_power_w"]),
            )
        )
    return workloads


#: The pipeline that stands in where there are no measured profiles: GPU, and times of units, s.
PRESET = "a100-sxm"
TIME_AT_MAX_S = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}


def preset_workload(num_stages: int, num_microbatches: int) -> Workload:
    """A pipeline of even stages, as an emulated A100 would profile it at every second clock."""
    preset = load_preset(PRESET)
    rows = []
    for stage in range(num_stages):
        for kind, at_max_s in TIME_AT_MAX_S.items():
            for mhz in preset.supported_frequencies_mhz[::2]:
                time_s = preset.unit_time_s(kind.value, mhz, at_max_s)
                energy_j = time_s * preset.busy_power_w(kind.value, mhz)
                rows.append((stage, kind, ProfileRow(mhz, time_s, energy_j)))
    fitted = "fitted" if preset.fitted else "not fitted"
    return Workload(
        PRESET,
        f"{num_stages} even stages",
        f"{preset.gpu} (emulated, {fitted})",
        True,
        make_profile(rows, source=f"preset {PRESET}"),
        num_microbatches,
        preset.wait_power_w,
    )
