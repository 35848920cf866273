"""Predicted iteration times against Sailor's 15 runs on 4 to 128 GH200 (SOSP'25).

Run from the checkout:

    python -m benchmarks.search.sailor

Three predictions of each run, from the fp32 op profile of OPT-350M:

- `within node`: Aceso's formula, (m - 1) max t + sum t, all messages as within a node, as the
  authors of Sailor run it;
- `simulated`: 1F1B by our simulator, then the measured all-reduces and optimizer, which neither the
  profile nor the formula has;
- `corrected`: the same with forwards and backwards longer by what a model's compute took beside the
  sum of its operators: the median of the *other* runs' timers, so no run has a part in its own.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.outputs import leave, make_console, make_table, output_option
from benchmarks.search.aceso_files import read_aceso_profile
from benchmarks.search.aceso_plans import column
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.orders.builders import one_f_one_b
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.search.layer_profile import LayerProfile, Sizes

ARCHIVE = Path("../shared/data/sailor_sosp25/sailor.tar.xz")
_ROOT = Path("sailor/Planner/baselines/Aceso")
_RUNS = _ROOT / "aceso_validation_clariden"
_PROFILE = _ROOT / "profiler/GH-96/profiled-data-fp32"
_NUM_LAYERS, _GPUS_PER_NODE = 24, 4
PREDICTIONS = ("within node", "simulated", "corrected")


@dataclass(frozen=True)
class Measured:
    """One run: times in s; by stage the means over its ranks."""

    name: str
    num_microbatches: int
    iteration_s: float
    forward_s: FloatArray
    backward_s: FloatArray
    reduction_s: float


@dataclass(frozen=True)
class Pipeline:
    """One microbatch of a run by the profile: times in s by stage; messages by pair of stages.

    `message_within_s` are what messages would take within a node.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    message_s: FloatArray
    message_within_s: FloatArray

    def formula_s(self, num_microbatches: int) -> float:
        """Aceso's formula: each stage takes the messages at both of its ends."""
        ends_s = np.pad(self.message_within_s, 1)
        stage_s = self.forward_s + self.backward_s + ends_s[:-1] + ends_s[1:]
        return float((num_microbatches - 1) * stage_s.max() + stage_s.sum())

    def simulated_s(
        self, num_microbatches: int, forward_s: FloatArray, backward_s: FloatArray
    ) -> float:
        """1F1B with some times of units."""
        order = one_f_one_b(len(forward_s), num_microbatches)
        duration_s = np.where(order.is_backward, backward_s[:, None], forward_s[:, None])
        return Timeline(order, duration_s, tuple(self.message_s)).iteration_time_s


def read_runs(folder: Path) -> list[tuple[Measured, Pipeline]]:
    """All runs, with what the profile says of them."""
    profile = read_aceso_profile(folder / _PROFILE, "OPT-350", _NUM_LAYERS)
    runs = []
    for path in sorted((folder / _RUNS / "configs").glob("*.json")):
        plan = json.loads(path.read_text())
        name = path.stem.removeprefix("OPT-350_")
        timers = _read_timers(folder / _RUNS / "runtime/OPT-350/time/csv", path.stem)
        num_microbatches = plan["global_batch_size"] // plan["micro_batch_size"]
        runs.append((_measured(name, num_microbatches, timers), _pipeline(profile, plan)))
    return runs


def _read_timers(folder: Path, name: str) -> list[dict[str, float]]:
    """Timers in ms of each stage, the mean over its ranks."""
    by_stage: dict[int, list[dict[str, float]]] = {}
    for path in folder.glob(f"{name}_stage*_rank*.csv"):
        (stage,) = re.findall(r"_stage(\d+)_", path.name)
        with path.open(newline="") as file:
            (row,) = csv.DictReader(file)
        by_stage.setdefault(int(stage), []).append({key: float(row[key]) for key in row})
    return [
        {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
        for _, rows in sorted(by_stage.items())
    ]


def _measured(name: str, num_microbatches: int, timers: Sequence[dict[str, float]]) -> Measured:
    def by_stage(key: str) -> FloatArray:
        return np.array([stage[key] for stage in timers]) / 1e3

    # Where a stage waits for another, its timer of what both do is the longer.
    embedding_s = by_stage("backward-embedding-all-reduce")[[0, -1]].min()
    reduction_s = by_stage("backward-params-all-reduce").max() + embedding_s
    return Measured(
        name=name,
        num_microbatches=num_microbatches,
        iteration_s=float(by_stage("time").mean()),
        forward_s=by_stage("forward-compute") / num_microbatches,
        backward_s=by_stage("backward-compute") / num_microbatches,
        reduction_s=float(reduction_s + by_stage("optimizer").min()),
    )


def _pipeline(profile: LayerProfile, plan: dict[str, Any]) -> Pipeline:
    """A plan of theirs, of which each stage has the same sizes."""
    tensor_parallel = plan["model_parallel_size_of_each_op"][0][0]
    data_parallel = plan["data_parallel_size_of_each_op"][0][0]
    sizes = Sizes(tensor_parallel, plan["micro_batch_size"] // data_parallel)
    ends = np.cumsum(plan["num_ops_in_each_stage"])
    begins = np.insert(ends[:-1], 0, 0)
    crosses = plan["num_gpus"][0] >= _GPUS_PER_NODE
    sent_bytes = column(profile, sizes, "output_bytes")[ends[:-1] - 1]
    return Pipeline(
        np.add.reduceat(column(profile, sizes, "forward_s")[:, 0], begins),
        np.add.reduceat(column(profile, sizes, "backward_s")[:, 0], begins),
        profile.links.message_s(sent_bytes, crosses),
        profile.links.message_s(sent_bytes, crosses=False),
    )


def predict(runs: Sequence[tuple[Measured, Pipeline]]) -> list[dict[str, Any]]:
    """A row for each run: errors in percent."""
    # By how much a run's compute was longer than the sum of its operators.
    longer = [
        (run.forward_s + run.backward_s).sum() / (pipe.forward_s + pipe.backward_s).sum()
        for run, pipe in runs
    ]
    rows = []
    for number, (run, pipe) in enumerate(runs):
        others = statistics.median(longer[:number] + longer[number + 1 :])
        units_s = {
            "simulated": (pipe.forward_s, pipe.backward_s),
            "corrected": (pipe.forward_s * others, pipe.backward_s * others),
        }
        predicted_s = {"within node": pipe.formula_s(run.num_microbatches)} | {
            name: pipe.simulated_s(run.num_microbatches, *units) + run.reduction_s
            for name, units in units_s.items()
        }
        errors = {name: 100 * (predicted_s[name] / run.iteration_s - 1) for name in PREDICTIONS}
        rows.append({"run": run.name, "measured_s": run.iteration_s, **errors})
    return rows


@click.command()
@output_option("search_sailor")
def main(output: Path) -> None:
    """Predict all runs."""
    console = make_console()
    if not ARCHIVE.exists():
        console.print(f"Skipped: {ARCHIVE} is not there", highlight=False)
        return
    with tempfile.TemporaryDirectory() as temporary, tarfile.open(ARCHIVE) as archive:
        archive.extractall(temporary, filter="data")
        rows = predict(read_runs(Path(temporary)))
    means = {name: statistics.mean(abs(row[name]) for row in rows) for name in PREDICTIONS}
    mean_s = statistics.mean(row["measured_s"] for row in rows)
    rows.append({"run": "mean of absolute errors", "measured_s": mean_s, **means})
    console.print(make_table("Errors of predicted iteration times, in percent", rows))
    leave(output, "computed", {"sailor": rows})


if __name__ == "__main__":
    main()
