"""Peak memory as predicted from 1F1B alone, beside what was measured in another order.

`cpu_memory` measures a small GPT of megatron-core on four CPU ranks, first in 1F1B, from which the
peaks of EnvPipe's order are predicted (`envpipe_megatron.runtime.memory.peak`), then in that order.
Counted are the bytes of live tensors, as a GPU's allocator would count them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.workloads import preset_workload
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies

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
    from rank_pool import RankPool  # type: ignore[import-not-found]  # of tests/

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
    """Rows of a CSV."""
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
