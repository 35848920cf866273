"""The pipelines that planners are compared on, and what rivals' authors published for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Cost
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest

_EMULATED_MODEL = "GPT-3 175B"
_EMULATED_MICROBATCHES = (12, 24, 48, 96)
#: GPU, file name and blocking power (W) of the emulated pipelines.
_EMULATED = (("A100 SXM", "a100_sxm", 83.64), ("A40", "a40", 70.38))


@dataclass(frozen=True)
class Workload:
    """One pipeline to plan.

    Args:
        key: name in CSV files, and of the folder or file the profile came from.
        emulated: whether the profile is the emulated GPT-3 175B; else of a measured training run.
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
    """The workloads of a folder of the form of ../shared/data/perseus_sosp24."""
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


#: Measured on an H200: W waiting at the highest clock, W idle at the lowest; MHz of both.
WAITING_W, IDLE_W = 124.0, 78.0
HIGHEST_MHZ, LOWEST_MHZ = 1980, 345


def conditions_with_curve(workload: Workload) -> Conditions:
    """Those of the workload, with an assumed waiting power by clock.

    The profile's authors published one blocking power: the ratio of powers at the ratio of clocks
    that an H200 was measured to have is taken, and a line between.
    """
    highest_mhz = max(row.frequency_mhz for row in workload.profile.rows[0][Kind.FORWARD])
    full_w = workload.blocking_power_w
    curve = {
        round(highest_mhz * LOWEST_MHZ / HIGHEST_MHZ): full_w * IDLE_W / WAITING_W,
        highest_mhz: full_w,
    }
    return replace(workload.conditions, wait_power_w=(curve,) * workload.profile.num_stages)


#: The pipeline that is used where there are no measured profiles: GPU, and times of units, s.
PRESET = "a100-sxm"
TIME_AT_MAX_S = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}


def preset_profile(
    name: str, num_stages: int, time_at_max_s: Mapping[Kind, float], clocks_mhz: Iterable[int]
) -> Profile:
    """A profile of even stages, as an emulated GPU's preset would make it without noise.

    `time_at_max_s` is of a unit of each kind at the highest clock.
    """
    preset = load_preset(name)
    clocks_mhz = list(clocks_mhz)
    rows = []
    for stage in range(num_stages):
        for kind, at_max_s in time_at_max_s.items():
            for mhz in clocks_mhz:
                time_s = preset.unit_time_s(kind.value, mhz, at_max_s)
                energy_j = time_s * preset.busy_power_w(kind.value, mhz)
                rows.append((stage, kind, ProfileRow(mhz, time_s, energy_j)))
    return make_profile(rows, source=f"preset {name}")


def preset_workload(num_stages: int, num_microbatches: int) -> Workload:
    """A pipeline of even stages, as an emulated A100 would profile it at every second clock."""
    preset = load_preset(PRESET)
    clocks_mhz = preset.supported_frequencies_mhz[::2]
    return Workload(
        PRESET,
        f"{num_stages} even stages",
        f"{preset.gpu} (emulated, {'fitted' if preset.fitted else 'not fitted'})",
        True,
        preset_profile(PRESET, num_stages, TIME_AT_MAX_S, clocks_mhz),
        num_microbatches,
        preset.wait_power_w,
    )


# What rivals' authors published for these workloads; nothing of it is recomputed. Two sources:
# savings as printed in "Reducing Energy Bloat in Large Model Training" (SOSP'24), and the files of
# its artifact. The artifact's GPT-3 175B was profiled at a tenth of the layers on one GPU of eight:
# its authors multiply time by 10 and energy by 10 x 8 where they report, and did so in
# `envpipe_result.csv`, but not in the frontiers. Here all figures are in the profile's own scale.

#: Layers of the model to layers of the profile, and GPUs of a stage.
_LAYER_SCALE, _TENSOR_PARALLEL = 10, 8

#: What sets published figures apart from those recomputed here.
WHAT_DIFFERS = (
    "Published figures are not to be set against recomputed ones: energies of the authors' GPT-3 "
    "175B plans come from exponentials fitted to the profile, not from its rows, and their times "
    "from durations rounded down to 1 ms (A100 SXM) or 0.1 ms (A40); their EnvPipe ran on plain "
    "1F1B, without EnvPipe's own order; the savings of measured workloads come from power meters, "
    "against a measured all-maximum run. Compare plans only by one evaluator: the tables above."
)


@dataclass(frozen=True)
class Saving:
    """Saving and slowdown against all-maximum, both in percent."""

    saving_percent: float
    slowdown_percent: float | None = None


#: Perseus and EnvPipe as printed, without stragglers; EnvPipe of GPT-3 175B was not printed.
_PRINTED: dict[str, tuple[Saving, Saving | None]] = {
    "gpt3-175b_a100_sxm_mb12": (Saving(15.2), None),
    "gpt3-175b_a100_sxm_mb24": (Saving(14.2), None),
    "gpt3-175b_a100_sxm_mb48": (Saving(13.6), None),
    "gpt3-175b_a100_sxm_mb96": (Saving(13.3), None),
    "gpt3-175b_a40_mb12": (Saving(11.8), None),
    "gpt3-175b_a40_mb24": (Saving(10.2), None),
    "gpt3-175b_a40_mb48": (Saving(9.3), None),
    "gpt3-175b_a40_mb96": (Saving(8.9), None),
    "A100_gpt3-xl_dp1_pp4_tp1": (Saving(13.2, 0.1), Saving(8.8, 0.1)),
    "A100_bloom-3b_dp1_pp4_tp1": (Saving(11.7, 0.2), Saving(8.9, 0.2)),
    "A100_bert-huge-uncased_dp1_pp4_tp1": (Saving(12.9, 0.5), Saving(8.0, 0.0)),
    "A40_gpt3-2.7b_dp1_pp8_tp1": (Saving(21.1, 0.2), Saving(21.7, 5.6)),
    "A40_wide-resnet101_8_dp1_pp8_tp1": (Saving(20.4, 0.2), Saving(16.5, 0.5)),
}


@dataclass(frozen=True)
class Published:
    """What is known of one workload; None where nothing is.

    Args:
        perseus: as printed.
        envpipe: as printed; on 1F1B.
        perseus_file: the fastest plan of the artifact's frontier, against our all-maximum.
        envpipe_file: the artifact's EnvPipe on 1F1B, against our all-maximum.
    """

    perseus: Saving | None
    envpipe: Saving | None
    perseus_file: Saving | None
    envpipe_file: Saving | None


def read_published(workload: Workload, baseline: Cost, data_dir: Path) -> Published:
    """What was published for a workload; `baseline` is its all-maximum plan by our evaluator."""
    perseus, envpipe = _PRINTED.get(workload.key, (None, None))
    perseus_file = envpipe_file = None
    if workload.emulated:
        emulation = data_dir / "emulation"
        plans = _read_costs(emulation / "frontier" / f"{workload.key}.csv", "time", {})
        if plans:
            fastest = min(plans, key=lambda cost: cost.iteration_time_s)
            perseus_file = _against(baseline, fastest)
        asked = {
            "model": workload.key.split("_")[0],
            "device": workload.gpu.lower().replace(" ", "_"),
            "num_microbatches": str(workload.num_microbatches),
        }
        for cost in _read_costs(emulation / "envpipe_result.csv", "iteration_time", asked):
            scaled = Cost(
                cost.iteration_time_s / _LAYER_SCALE,
                cost.energy_j / (_LAYER_SCALE * _TENSOR_PARALLEL),
            )
            envpipe_file = _against(baseline, scaled)
    return Published(perseus, envpipe, perseus_file, envpipe_file)


def _read_costs(path: Path, time_column: str, asked: dict[str, str]) -> list[Cost]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Cost(float(row[time_column]), float(row["energy"]))
            for row in csv.DictReader(file)
            if all(row[name] == value for name, value in asked.items())
        ]


def _against(baseline: Cost, cost: Cost) -> Saving:
    return Saving(cost.saving_percent(baseline), cost.slowdown_percent(baseline))
