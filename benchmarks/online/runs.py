"""Runs of emulated jobs beside the framework's own order under the same faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.online.emulated_job import Conditions, EmulatedJob, Faults, Iteration, Pipelines
from envpipe_megatron.core.conditions import known_conditions
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.presets import GpuPreset, load_preset
from envpipe_megatron.gpu.overrides import override_for, sweep_range
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.execution.orders import constant_order
from envpipe_megatron.runtime.job.config import SessionConfig

BACKWARD_RATIO = 2.0


@dataclass(frozen=True)
class Ran:
    """A job, and the framework's own order at the highest clocks under the same faults."""

    job: list[Iteration]
    own: list[Iteration]
    said: list[tuple[int, str]]

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

    def lost(self, first: int, after: int) -> float:
        """Time lost, as a multiple of the framework's own iteration."""
        return sum(j.time_s / o.time_s - 1 for j, o in self._pairs(first, after))

    def slower(self, first: int, after: int) -> float:
        """The most that an iteration lasted longer than the framework's own, as a share."""
        return max(j.time_s / o.time_s - 1 for j, o in self._pairs(first, after))

    def saved(self, first: int, after: int) -> float:
        """Share of the energy."""
        pairs = self._pairs(first, after)
        return 1 - sum(j.energy_j for j, _ in pairs) / sum(o.energy_j for _, o in pairs)

    def _pairs(self, first: int, after: int) -> list[tuple[Iteration, Iteration]]:
        return list(zip(self.job, self.own, strict=True))[first:after]


def run_job(
    config: SessionConfig,
    preset: GpuPreset,
    forward_s: Sequence[float],
    *,
    iterations: int,
    replicas: int = 1,
    faults: Faults = lambda iteration: {},
    hiccups: float = 0.0,
) -> Ran:
    """Run a job and the framework's own order, with forwards of so many s on each stage."""

    def pipelines() -> Pipelines:
        return Pipelines(
            preset,
            forward_s,
            replicas,
            backward_ratio=BACKWARD_RATIO,
            faults=faults,
            hiccups=hiccups,
        )

    with EmulatedJob(pipelines(), config) as job:
        ran = job.run(iterations)
    own, top = pipelines(), preset.max_frequency_mhz
    order = builders.one_f_one_b(len(forward_s), config.request.num_microbatches)
    for _ in range(iterations):
        own.run([constant_order(Phase.BASELINE, order, top, top)] * replicas)
    return Ran(ran, own.iterations, job.said)


def exact_profile(preset: GpuPreset, forward_s: Sequence[float]) -> Profile:
    """What a sweep without errors would measure."""
    clocks = sweep_range(preset.supported_frequencies_mhz, override_for(preset.gpu))
    rows = []
    for stage, unit_s in enumerate(forward_s):
        for kind, at_max_s in zip(WHOLE, (unit_s, BACKWARD_RATIO * unit_s), strict=True):
            for clock in clocks:
                time_s = preset.unit_time_s(kind.value, clock, at_max_s)
                energy_j = time_s * preset.busy_power_w(kind.value, clock)
                rows.append((stage, kind, ProfileRow(clock, time_s, energy_j)))
    waits = ({clocks[0]: preset.wait_power_w},) * len(forward_s)
    sidecar = Sidecar(wait_power_w=waits, frequency_change_s=preset.frequency_change_s)
    return make_profile(rows, source="the preset", sidecar=sidecar)


def best_saving(preset: GpuPreset, forward_s: Sequence[float], request: PlanRequest) -> float:
    """Share of the energy that the plan of a profile without errors saves."""
    exact = exact_profile(preset, forward_s)
    plan = make_plan(exact, replace(request, conditions=known_conditions(exact))).plan
    return plan.cost.saving_percent(plan.baseline.cost) / 100


def slower(factor: float) -> Conditions:
    """A GPU whose units take so many times as long."""
    return Conditions(slower=dict.fromkeys(WHOLE, factor))


def scripted(kind: str, first: int, after: int, stages: int, replicas: int = 1) -> Faults:
    """What is the matter from one iteration to another; a key of `FAULTS`."""
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
}
