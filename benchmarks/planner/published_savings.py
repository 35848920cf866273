"""What rivals' authors published for the compared workloads. Nothing here is recomputed.

Two sources: savings as printed in "Reducing Energy Bloat in Large Model Training" (SOSP'24), and
the files of its artifact. The artifact's GPT-3 175B was profiled at a tenth of the layers on one
GPU of eight: its authors multiply time by 10 and energy by 10 x 8 where they report, and did so in
`envpipe_result.csv`, but not in the frontiers. Here all figures are in the profile's own scale.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.planning_workloads import Workload
from envpipe_megatron.core.plan import Cost

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
    """What was published for a workload.

    Args:
        workload: of `planning_workloads.read_workloads`.
        baseline: its all-maximum plan by our evaluator, in the profile's scale.
        data_dir: of the form of ../shared/data/perseus_sosp24.
    """
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
