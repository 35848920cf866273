"""The simulator against measured training runs: clocks in, iteration time and energy out.

Every run of every workload folder is predicted by `measured_runs.validate`. Peak memory is
predicted from 1F1B alone and measured in EnvPipe's order, where there are ranks to train: a small
GPT of megatron-core on four CPU ranks, bytes of live tensors counted as a GPU's allocator would
count them. Run from the checkout:

    python benchmarks/planner/validation.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console

from benchmarks.outputs import PERSEUS_DATA, leave, make_console, make_table, output_option
from benchmarks.planner.measured_runs import (
    PROFILED_SYSTEM,
    Validation,
    errors_of,
    validate,
)
from benchmarks.planner.workloads import preset_workload
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies

RUNS = PERSEUS_DATA / "measured"
HALF_NAMES = ("A", "B")


_STAGES, _MICROBATCHES = 4, 8
_EXTRA_FORWARDS = (3, 2, 2, 0)
#: Iterations of 1F1B, in the last of which memory is measured, and of both orders.
_WARMUP, _STEPS = 3, 7


@dataclass(frozen=True)
class MemoryPrediction:
    """The peak memory of one stage, on the device and model that `where` names.

    The prediction starts from 1F1B's peak, `baseline_bytes`.
    """

    where: str
    stage: int
    in_flight: int
    baseline_bytes: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error_percent(self) -> float:
        """Predicted above measured."""
        return 100.0 * (self.predicted_bytes / self.measured_bytes - 1.0)


def cpu_memory() -> list[MemoryPrediction]:
    """Train on CPU ranks and compare; takes some ten seconds."""
    from jobs import Job, Ours  # type: ignore[import-not-found]  # of tests/pipeline
    from live_memory import train_and_watch  # type: ignore[import-not-found]
    from rank_pool import RankPool  # of tests/helpers

    order = builders.envpipe(_STAGES, _MICROBATCHES, _EXTRA_FORWARDS)
    with tempfile.TemporaryDirectory() as folder, RankPool(_STAGES) as pool:
        profile_file, plan_file = Path(folder) / "profile.csv", Path(folder) / "plan.json"
        profile = preset_workload(_STAGES, _MICROBATCHES).profile
        profile.write(profile_file)
        clocks = max_frequencies(order, profile)
        Plan("baseline", order, clocks, profile, Conditions((0.0,) * _STAGES)).write(plan_file)
        how = Ours(profile_file=profile_file, plan_file=plan_file, warmup_iterations=_WARMUP)
        job = Job(_STAGES, microbatches=_MICROBATCHES, steps=_STEPS)
        found = pool.run(train_and_watch, job, how, Path(folder))[0]
    return [
        MemoryPrediction(
            "tiny GPT on CPU ranks",
            stage,
            memory.in_flight,
            memory.baseline_peak_bytes,
            memory.predicted_peak_bytes,
            memory.measured_peak_bytes,
        )
        for stage, memory in enumerate(found)
    ]


def memory_cells(predictions: Iterable[MemoryPrediction]) -> list[dict[str, object]]:
    """Rows of evidence."""
    return [
        {
            "where": one.where,
            "stage": one.stage,
            "in_flight": one.in_flight,
            "baseline_peak_bytes": one.baseline_bytes,
            "predicted_peak_bytes": one.predicted_bytes,
            "measured_peak_bytes": one.measured_bytes,
            "error_percent": round(one.error_percent, 4),
        }
        for one in predictions
    ]


@click.command()
@output_option("planner_validation")
def main(output: Path) -> None:
    """Predict the runs of ../shared/data and print how far off the predictions are."""
    console = make_console()
    folders = sorted(path.parent for path in RUNS.glob("*/runs.csv"))
    if not folders:
        console.print(f"Time and energy are skipped: there are no runs at {RUNS}.")
    validations = [validate(folder) for folder in folders]
    memory = _memory(console)
    tables: dict[str, list[dict[str, object]]] = {}
    if validations:
        lines = [_summary(validation) for validation in validations]
        tables["validation"] = lines
        tables["prediction"] = list(_prediction_rows(validations))
        console.print(make_table("Mean absolute error of predicted runs (%)", lines))
        console.print(make_table("Of all models", tables["prediction"]))
    if memory:
        tables["validation_memory"] = memory_cells(memory)
        console.print(make_table("Peak memory in EnvPipe's order", tables["validation_memory"]))
    leave(output, "computed", tables)


def _memory(console: Console) -> list[MemoryPrediction]:
    """Of megatron-core's ranks here, where it is installed."""
    if find_spec("megatron") is None:
        console.print("Memory is skipped: megatron-core is not installed.")
        return []
    return cpu_memory()


def _prediction_rows(validations: Sequence[Validation]) -> Iterator[dict[str, object]]:
    """Rows of docs/evidence/planning.md: the worst model, and runs that no unit time is made of."""
    by_model = [validation.errors for validation in validations]
    yield {
        "runs": f"{sum(errors.num_runs for errors in by_model)} measured runs of {len(by_model)} "
        "models, tail and blocking power fitted on the other half; mean of the worst model",
        "error in time (%)": max(errors.time_held_out for errors in by_model),
        "in energy (%)": max(errors.energy_held_out for errors in by_model),
    }
    apart = [p for v in validations for p in v.predictions if p.run.system != PROFILED_SYSTEM]
    if apart:
        errors = errors_of(apart)
        yield {
            "runs": f"the {errors.num_runs} runs that the profiles' times are not made from",
            "error in time (%)": errors.time_held_out,
            "in energy (%)": errors.energy_held_out,
        }


def _summary(validation: Validation) -> dict[str, object]:
    """Errors of all runs of a workload, and what was fitted on each half of them."""
    errors, workload = validation.errors, validation.workload
    row: dict[str, object] = {
        "workload": workload.name,
        "runs": errors.num_runs,
        "time_error_unfitted_percent": round(errors.time_unfitted, 4),
        "time_error_held_out_percent": round(errors.time_held_out, 4),
        "energy_error_unfitted_percent": round(errors.energy_unfitted, 4),
        "energy_error_held_out_percent": round(errors.energy_held_out, 4),
        "worst_time_run": errors.worst_time.run.name,
        "worst_energy_run": errors.worst_energy.run.name,
        "interpolated_rows": workload.interpolated_rows,
        "extended_rows": workload.extended_rows,
    }
    for name, fitted in zip(HALF_NAMES, validation.fitted, strict=True):
        hops = fitted.latency_s  # a tuple once it was checked
        assert not isinstance(hops, float)
        row |= {
            f"tail_time_s_{name}": round(fitted.tail_by_stage_s[0], 4),
            f"latency_s_{name}": " ".join(f"{hop:.4f}" for hop in hops),
            f"blocking_power_w_{name}": round(fitted.blocking_power_w[0], 2),
        }
    return row


if __name__ == "__main__":
    main()
