"""Runs of emulated jobs beside the framework's own order under the same faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from emulated_job import EmulatedJob
from emulated_pipelines import Conditions, Faults, Iteration, Pipelines
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders.builders import framework_order
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.presets import GpuPreset, load_preset, override_for, sweep_range
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.execution.stage_run import constant_order
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import SessionState

BACKWARD_RATIO = 2.0


@dataclass(frozen=True)
class Ran:
    """A job, and the framework's own order at the highest clocks under the same faults.

    `said` has the iteration of each line; `state` is what the job has come to.
    """

    job: list[Iteration]
    own: list[Iteration]
    said: list[tuple[int, str]]
    state: SessionState
    pipelines: Pipelines

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what the bill says in the end."""
        return self.state.notes

    @property
    def steady(self) -> int:
        """The first iteration of the steady phase; their number where there is none."""
        phases = [iteration.phase for iteration in self.job]
        return phases.index(Phase.STEADY) if Phase.STEADY in phases else len(phases)

    @property
    def profiled(self) -> int:
        """The first iteration after the profile."""
        phases = [iteration.phase for iteration in self.job]
        return len(phases) - phases[::-1].index(Phase.PROFILE)

    @property
    def looks_at_top(self) -> list[int]:
        """Iterations of the steady phase in which some units ran at the highest clock, to see."""
        energies_j = np.array([iteration.energy_j for iteration in self.job[self.steady :]])
        more = energies_j > 1.001 * np.median(energies_j)
        return (self.steady + np.flatnonzero(more)).tolist()

    def lost(self, first: int, after: int) -> float:
        """Time lost, as a multiple of the framework's own iteration."""
        return sum(j.time_s / o.time_s - 1 for j, o in self._pairs(first, after))

    def slower(self, first: int, after: int) -> float:
        """The most that an iteration lasted longer than the framework's own, as a share."""
        return max(j.time_s / o.time_s - 1 for j, o in self._pairs(first, after))

    def longer(self, first: int, after: int) -> float:
        """How much longer iterations lasted on average, as a share."""
        pairs = self._pairs(first, after)
        return sum(j.time_s for j, _ in pairs) / sum(o.time_s for _, o in pairs) - 1

    def saved(self, first: int, after: int) -> float:
        """Share of the energy."""
        pairs = self._pairs(first, after)
        return 1 - sum(j.energy_j for j, _ in pairs) / sum(o.energy_j for _, o in pairs)

    def _pairs(self, first: int, after: int) -> list[tuple[Iteration, Iteration]]:
        return list(zip(self.job, self.own, strict=True))[first:after]


def run_job(
    config: JobOptions,
    preset: GpuPreset,
    forward_s: Sequence[float],
    *,
    iterations: int,
    replicas: int = 1,
    faults: Faults = lambda iteration: {},
    starts_again: Sequence[int] = (),
    emulated: Mapping[str, Any] | None = None,
    make: Callable[..., Pipelines] = Pipelines,
    **trouble: Any,
) -> Ran:
    """Run a job, and the framework's own order; `forward_s` is of a chunk of each stage.

    In the iterations of `starts_again` the job starts again, with what its folder keeps. More
    of the GPUs is `emulated`, as arguments of `make`; more of the job as those of `EmulatedJob`.
    """

    def pipelines() -> Pipelines:
        return make(
            preset,
            forward_s,
            replicas,
            backward_ratio=BACKWARD_RATIO,
            faults=faults,
            **(emulated or {}),
        )

    controlled = pipelines()
    said: list[tuple[int, str]] = []
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # ranks end a little later
        if starts_again:
            config = replace(config, output=Path(folder), fingerprint={})
        for first, after in pairwise((0, *starts_again, iterations)):
            with EmulatedJob(controlled, config, **trouble) as job:
                job.run(after - first)
            said += job.said
            assert job.planner is not None
            state = job.planner.state
    own, top = pipelines(), preset.max_frequency_mhz
    counts = config.num_microbatches, config.num_chunks, config.group_size
    order = framework_order(len(forward_s), *counts)
    for _ in range(iterations):
        own.run([constant_order(Phase.BASELINE, order, top)] * replicas)
    return Ran(controlled.iterations, own.iterations, said, state, controlled)


def exact_profile(
    preset: GpuPreset, forward_s: Sequence[float], now: Mapping[int, Conditions]
) -> Profile:
    """Return what a sweep without errors would measure, under faults of stages."""
    clocks = sweep_range(preset.supported_frequencies_mhz, override_for(preset.gpu))
    rows = []
    for stage, unit_s in enumerate(forward_s):
        on = now.get(stage, Conditions())
        for kind, at_max_s in zip(WHOLE, (unit_s, BACKWARD_RATIO * unit_s), strict=True):
            for clock in [max(clocks)] if on.stuck else clocks:
                time_s = on.unit_time_s(preset, kind, clock, at_max_s)
                energy_j = time_s * on.busy_power_w(preset, kind, clock)
                rows.append((stage, kind, ProfileRow(clock, time_s, energy_j)))
    waits = ({max(clocks): preset.wait_power_w},) * len(forward_s)
    sidecar = Sidecar(wait_power_w=waits, frequency_change_s=preset.frequency_change_s)
    return make_profile(rows, source="the preset", sidecar=sidecar)


def best_saving(
    preset: GpuPreset,
    forward_s: Sequence[float],
    request: PlanRequest,
    *,
    replicas: int = 1,
    faults: Faults = lambda iteration: {},
    iterations: Sequence[int] = (0,),
) -> float:
    """Share of the energy of some iterations that plans of profiles without errors save.

    Each replica has a plan for each fault, which takes as long as the slowest one needs.
    """
    plans: dict[str, Plan] = {}

    def planned(on: Mapping[int, Conditions], within: float) -> Plan:
        name = f"{sorted(on.items())} {within:.6f}"
        if name not in plans:
            exact = exact_profile(preset, forward_s, on)
            asked = replace(request, conditions=known_conditions(exact), deadline_factor=within)
            plans[name] = make_plan(exact, asked).plan
        return plans[name]

    wait_w = preset.wait_power_w * len(forward_s)

    def together_j(costs: Sequence[Cost]) -> float:
        slowest_s = max(cost.iteration_time_s for cost in costs)
        return sum(cost.energy_j + wait_w * (slowest_s - cost.iteration_time_s) for cost in costs)

    best_j = own_j = 0.0
    for iteration in iterations:
        ill: list[dict[int, Conditions]] = [{} for _ in range(replicas)]
        for (replica, stage), conditions in faults(iteration).items():
            ill[replica][stage] = conditions
        alone = [planned(on, 1.0).baseline.cost for on in ill]
        slowest_s = max(cost.iteration_time_s for cost in alone)
        factors = (slowest_s / cost.iteration_time_s for cost in alone)
        best_j += together_j([planned(*each).cost for each in zip(ill, factors, strict=True)])
        own_j += together_j(alone)
    return 1 - best_j / own_j


def slower(factor: float) -> Conditions:
    """A GPU whose units take so many times as long."""
    return Conditions(slower=dict.fromkeys(WHOLE, factor))


def restarts(kind: str, first: int, after: int) -> tuple[int, ...]:
    """When jobs start again with a fault that `scripted` has."""
    return (first, after) if kind in ("moved", "replaced") else ()


def scripted(kind: str, first: int, after: int, stages: int, replicas: int = 1) -> Faults:
    """Return faults from one iteration to another; `kind` is a key of `FAULTS`."""
    everywhere = [(replica, stage) for replica in range(replicas) for stage in range(stages)]

    def faults(iteration: int) -> dict[tuple[int, int], Conditions]:
        if not first <= iteration < after:
            return {}
        more = 1 + 0.02 * ((iteration - first) // 20 + 1)
        longer = Conditions(slower={Kind.FORWARD: 1.01 * more, Kind.BACKWARD: more})
        limited = Conditions(limit_mhz=0.85 * load_preset("a100-sxm").max_frequency_mhz)
        return {
            "slow": {(0, 1): slower(1.05)},
            "capped": {(0, 0): limited, (0, 1): limited},
            "grows": dict.fromkeys(everywhere, longer),
            "replica": {(replicas - 1, stage): slower(1.1) for stage in range(stages)},
            "silent": dict.fromkeys(everywhere, Conditions(silent=True)),
            "stuck": {(0, 0): Conditions(stuck=True)},
            "moved": {(0, 1): Conditions(slower=dict.fromkeys(WHOLE, 1.02), hungrier=1.1)},
            "replaced": {(0, 1): Conditions(slower=dict.fromkeys(WHOLE, 1.06), hungrier=0.9)},
        }[kind]

    return faults


#: What each fault is, in words.
FAULTS = {
    "slow": "one GPU is 5 % slower",
    "capped": "a power cap holds two GPUs of a node at 85 % of their clock",
    "grows": "sequences grow, by 2 % of the time each 20 iterations",
    "replica": "a replica is 10 % slower",
    "silent": "meters stop",
    "stuck": "a clock follows no request",
    "moved": "a rank starts again on a GPU that is 2 % slower and draws 10 % more, and back",
    "replaced": "a rank starts again on a GPU that is 6 % slower and draws 10 % less, and back",
}
