"""How long a report of a large run takes, and whether Perfetto reads its trace.

    python benchmarks/report/report_scale.py --output runs/report_scale

Makes the folder of a job of 64 emulated ranks (32 stages, two replicas) and 1,000 iterations, all
of them recorded as if it went on reconfiguring nearly to its end. Then `envpipe report` is run on
it as a user would, and `perfetto_check.py` on the trace, by the Python that `--checker` names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.workloads import preset_profile
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.formats.energy import ENERGY_FORMAT, Phase
from envpipe_megatron.formats.timeline import FIRST_STEADY
from envpipe_megatron.gpu.presets import GpuPreset, load_preset
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.energy.timeline_log import timeline_line
from envpipe_megatron.runtime.execution.executor import make_record

CHECKER = Path(__file__).with_name("perfetto_check.py")
TARGET_S = 30.0
_GPUS_OF_A_NODE = 8
_WARMUP = 5
_TIME_AT_MAX_S = {Kind.FORWARD: 0.010, Kind.BACKWARD: 0.020}


@dataclass(frozen=True)
class Job:
    """The job that is made up."""

    stages: int
    replicas: int
    iterations: int
    preset: GpuPreset
    plan: Plan

    @property
    def ranks(self) -> int:
        """How many GPUs it has."""
        return self.stages * self.replicas

    def phase(self, iteration: int) -> Phase:
        """Of an iteration; all but the last ten are of phases that are recorded in full."""
        if iteration < _WARMUP:
            return Phase.WARMUP
        if iteration >= self.iterations - FIRST_STEADY:
            return Phase.STEADY
        return Phase.PROFILE if iteration < self.iterations // 5 else Phase.RECONFIGURE


def plan_of(preset: GpuPreset, stages: int, microbatches: int) -> Plan:
    """EnvPipe's order and envelope, by a profile that is the preset's own model."""
    clocks_mhz = sorted(preset.supported_frequencies_mhz, reverse=True)[:24:2]
    profile = preset_profile(preset.name, stages, _TIME_AT_MAX_S, clocks_mhz)
    request = PlanRequest(microbatches, "envpipe", "envelope", blocking_power_w=preset.wait_power_w)
    return make_plan(profile, request).plan


def plan_of_iteration(job: Job, iteration: int) -> Plan:
    """What an iteration runs: the framework's order, a clock of the sweep, or the plan so far."""
    baseline, phase = job.plan.baseline, job.phase(iteration)
    if phase is Phase.WARMUP:
        return baseline
    rows = job.plan.profile.rows[0][Kind.FORWARD]
    clock = rows[iteration % len(rows)].frequency_mhz
    if phase is Phase.PROFILE:
        return replace(baseline, frequency_mhz=np.full_like(baseline.frequency_mhz, clock))
    if phase is Phase.RECONFIGURE:
        raised = np.maximum(job.plan.frequency_mhz, clock)
        return replace(job.plan, frequency_mhz=raised)
    return job.plan


def make_folder(job: Job, folder: Path) -> None:
    """Write what the job's ranks would have left."""
    folder.mkdir(parents=True, exist_ok=True)
    job.plan.profile.write(folder / "profile.csv")
    job.plan.write(folder / "plan.json")
    scales = 1 + 0.005 * np.random.default_rng(1).standard_normal(job.iterations)
    known: dict[bytes, Plan] = {}
    begin_s = 1000.0
    with (
        (folder / "timeline.jsonl").open("w") as timelines,
        (folder / "energy.jsonl").open("w") as energies,
    ):
        for iteration, scale in enumerate(scales.tolist()):
            ran = plan_of_iteration(job, iteration)
            ran = known.setdefault(ran.schedule.name.encode() + ran.frequency_mhz.tobytes(), ran)
            for rank in range(job.ranks):
                line, window = _lines(job, ran, rank, iteration, begin_s, scale)
                timelines.write(json.dumps(line) + "\n")
                energies.write(json.dumps(window) + "\n")
            begin_s += scale * ran.cost.iteration_time_s


def _lines(
    job: Job, ran: Plan, rank: int, iteration: int, begin_s: float, scale: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a rank writes of an iteration: its timeline, and what its meter says."""
    stage, phase = rank % job.stages, job.phase(iteration)
    labels = {
        "emulated": True,
        "node": f"node{rank // _GPUS_OF_A_NODE}",
        "gpu": f"{job.preset.gpu} (emulated)",
        "gpu_uid": f"GPU-{rank}",
        "rank": rank,
        "stage": stage,
    }
    start_s, end_s = (
        (scale * times_s[stage]).tolist() for times_s in (ran.timeline.start_s, ran.timeline.end_s)
    )
    time_s = scale * ran.cost.iteration_time_s
    record = make_record(start_s, end_s, begin_s, time_s, time_s)
    order = [unit.label() for unit in ran.schedule.stages[stage]]
    line = timeline_line(labels, phase, iteration, record, order, ran.frequency_mhz[stage].tolist())
    busy_s = float(record.unit_time_s.sum())
    window = {
        "format": ENERGY_FORMAT,
        **labels,
        "phase": phase.value,
        "first_iteration": iteration,
        "last_iteration": iteration,
        "begin_s": begin_s,
        "duration_s": time_s,
        "energy_j": scale * float(ran.energy_by_stage_j[stage]),
        "energy_uncertainty_j": 1.0,
        "compute_s": busy_s,
        "blocking_s": time_s - busy_s,
        "idle_s": 0.0,
    }
    return line, window


def _run(command: list[str]) -> tuple[float, float, str]:
    """Wall and CPU seconds of a command, and what it printed."""
    before, begin_s = os.times(), time.monotonic()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    wall_s, after = time.monotonic() - begin_s, os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])
    return wall_s, cpu_s, done.stdout


def main() -> None:
    """Make a folder, report on it, and check the trace."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/report_scale"))
    parser.add_argument("--stages", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--checker", default=sys.executable, help="Python with perfetto, viztracer")
    options = parser.parse_args()
    preset = load_preset("a100-sxm")
    plan = plan_of(preset, options.stages, options.microbatches)
    job = Job(options.stages, options.replicas, options.iterations, preset, plan)
    folder = options.output / "run"
    make_folder(job, folder)
    report = [sys.executable, "-m", "envpipe_megatron.cli", "report", str(folder)]
    wall_s, cpu_s, shown = _run(report)
    print(shown)
    trace = folder / "report" / "trace.json.gz"
    units = job.plan.schedule.units_per_stage * job.ranks * job.iterations
    facts: dict[str, Any] = {
        "ranks": job.ranks,
        "iterations": job.iterations,
        "units_recorded": units,
        "timeline_bytes": (folder / "timeline.jsonl").stat().st_size,
        "trace_bytes": trace.stat().st_size,
        "report_s": wall_s,
        "report_cpu_s": cpu_s,
        "target_s": TARGET_S,
    }
    try:
        wall_s, _, found = _run([options.checker, str(CHECKER), str(trace)])
        facts |= {"perfetto_s": wall_s, "perfetto": json.loads(found)}
    except subprocess.CalledProcessError as error:
        facts["perfetto"] = error.stdout or "not checked: see above"
    text = json.dumps(facts, indent=1)
    (options.output / "report_scale.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
