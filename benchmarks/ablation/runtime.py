"""Some plans of the ablation run by the real runtime, to see whether the simulator is right.

Four gloo ranks, each with an emulated A100 whose clocks take their time to change. The units are
empty, and sleeps are jumped over.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.workloads import PRESET, preset_workload
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest

_STAGES, _MICROBATCHES = 4, 8
_DWELL_TIMES_S = (0.0, 0.2)
#: Iterations before those that are measured (the framework's order, and the plan's first, which
#: meets the clocks before it), and measured ones.
_BEFORE, _MEASURED = 3, 10


@dataclass(frozen=True)
class Checked:
    """Time and energy of an iteration as simulated and as run."""

    name: str
    simulated: Cost
    run: Cost

    @property
    def time_error_percent(self) -> float:
        """Simulated above run."""
        return 100.0 * (self.simulated.iteration_time_s / self.run.iteration_time_s - 1.0)

    @property
    def energy_error_percent(self) -> float:
        """The same of energy, which the meters see in steps of their refreshes."""
        return 100.0 * (self.simulated.energy_j / self.run.energy_j - 1.0)


def check_by_runtime() -> list[Checked]:
    """1F1B at full clock, and the best clocks of EnvPipe's order for some dwell times."""
    from rank_pool import RankPool  # type: ignore[import-not-found]  # of tests/

    checked = []
    with RankPool(_STAGES) as pool:
        for name, plan, dwell_s in _plans():
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                plan.profile.write(root / "profile.csv")
                plan.write(root / "plan.json")
                costs = pool.run(run_plan, root, dwell_s)
            energy_j = sum(cost.energy_j for cost in costs)
            run = Cost(costs[0].iteration_time_s, energy_j)
            checked.append(Checked(name, plan.cost, run))
    return checked


def _plans() -> list[tuple[str, Plan, float]]:
    """Name, plan and dwell time (s), where clocks come as late as on the emulated GPU."""
    workload = preset_workload(_STAGES, _MICROBATCHES)
    conditions = replace(workload.conditions, change_time_s=load_preset(PRESET).frequency_change_s)
    request = replace(workload.request("envpipe", "uniform"), conditions=conditions)
    schedule = make_plan(workload.profile, request).plan.schedule
    optimizer = Optimizer(schedule, workload.profile, conditions)
    deadline_s = all_maximum_s(schedule, workload.profile, conditions)
    plans = [
        (f"optimal, dwell time {1e3 * dwell_s:g} ms", optimizer.plan(deadline_s, dwell_s), dwell_s)
        for dwell_s in _DWELL_TIMES_S
    ]
    return [("1F1B, highest clock", plans[0][1].baseline, 0.0), *plans]


def run_plan(rank: int, root: Path, dwell_s: float) -> Cost:
    """Run the plan of a folder on every rank; time and this rank's energy of an iteration."""
    import plain_stages  # type: ignore[import-not-found]  # of tests/

    from benchmarks.planner.workloads import TIME_AT_MAX_S
    from envpipe_megatron.runtime.job.session import SessionConfig

    config = SessionConfig(
        PlanRequest(_MICROBATCHES),
        warmup_iterations=1,
        profile_file=root / "profile.csv",
        plan_file=root / "plan.json",
        min_dwell_s=dwell_s,
    )
    session, gpu = plain_stages.session(
        rank, config, root, preset=PRESET, time_at_max_s=TIME_AT_MAX_S
    )

    def train(iterations: int) -> None:
        for _ in range(iterations):
            session.run_iteration(
                _MICROBATCHES,
                plain_stages.SPECS,
                lambda schedule: plain_stages.PlainWork(schedule, rank),
            )

    try:
        train(_BEFORE)
        begin = gpu.read_energy()
        train(_MEASURED)
        end = gpu.read_energy()
        time_s = session.iterations[-1][1]
    finally:
        session.close()
    return Cost(time_s, time_s * (end.energy_j - begin.energy_j) / (end.time_s - begin.time_s))
