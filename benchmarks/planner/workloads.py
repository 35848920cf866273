"""The pipelines that planners are compared on, and what rivals' authors published for them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
from presets import preset_profile  # of tests/helpers

from benchmarks import outputs
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.request import PlanRequest

_EMULATED_MODEL = "GPT-3 175B"
_EMULATED_MICROBATCHES = (12, 24, 48, 96)
#: GPU, file name and blocking power (W) of the emulated pipelines.
_EMULATED = (("A100 SXM", "a100_sxm", 83.64), ("A40", "a40", 70.38))


@dataclass(frozen=True)
class Workload:
    """One pipeline to plan.

    Args:
        key: name in rows, and of the folder or file the profile came from.
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


def workloads_here(names: Iterable[str] = ("",)) -> list[Workload]:
    """Return those of ../shared/data whose keys contain one of some names.

    Without the data it says so, and there are none. Raises click.UsageError if no key has a name.
    """
    if not outputs.PERSEUS_DATA.is_dir():
        click.echo(f"Skipped: there are no profiles at {outputs.PERSEUS_DATA}.")
        return []
    known = read_workloads(outputs.PERSEUS_DATA)
    found = [workload for workload in known if any(name in workload.key for name in names)]
    if not found:
        raise click.UsageError(f"No workload has such a name: {', '.join(names)}")
    return found


#: The pipeline that is used where there are no measured profiles: GPU, and times of units, s.
PRESET = "a100-sxm"
TIME_AT_MAX_S = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}


def preset_workload(num_stages: int, num_microbatches: int) -> Workload:
    """A pipeline of even stages, as an emulated A100 would profile it at every second clock."""
    preset = load_preset(PRESET)
    clocks_mhz = preset.supported_frequencies_mhz[2::2]
    return Workload(
        PRESET,
        f"{num_stages} even stages",
        f"{preset.gpu} (emulated, {'fitted' if preset.fitted else 'not fitted'})",
        True,
        preset_profile(PRESET, num_stages, TIME_AT_MAX_S, clocks_mhz),
        num_microbatches,
        preset.wait_power_w,
    )


#: What sets published figures apart from those recomputed here.
WHAT_DIFFERS = (
    "Published figures are not to be set against recomputed ones: energies of the authors' GPT-3 "
    "175B plans come from exponentials fitted to the profile, not from its rows, and their times "
    "from durations rounded down to 1 ms (A100 SXM) or 0.1 ms (A40); their EnvPipe ran on plain "
    "1F1B, without EnvPipe's own order; the savings of measured workloads come from power meters, "
    "against a measured all-maximum run. Compare plans only by one evaluator: the tables above."
)
#: Savings (%) of Perseus without stragglers, as printed in "Reducing Energy Bloat in Large Model
#: Training" (SOSP'24), by the key of the workload.
PERSEUS_SAVED_PERCENT = {
    "gpt3-175b_a100_sxm_mb12": 15.2,
    "gpt3-175b_a100_sxm_mb24": 14.2,
    "gpt3-175b_a100_sxm_mb48": 13.6,
    "gpt3-175b_a100_sxm_mb96": 13.3,
    "gpt3-175b_a40_mb12": 11.8,
    "gpt3-175b_a40_mb24": 10.2,
    "gpt3-175b_a40_mb48": 9.3,
    "gpt3-175b_a40_mb96": 8.9,
    "A100_gpt3-xl_dp1_pp4_tp1": 13.2,
    "A100_bloom-3b_dp1_pp4_tp1": 11.7,
    "A100_bert-huge-uncased_dp1_pp4_tp1": 12.9,
    "A40_gpt3-2.7b_dp1_pp8_tp1": 21.1,
    "A40_wide-resnet101_8_dp1_pp8_tp1": 20.4,
}
