"""The closed loop of whole jobs on emulated GPUs: what it costs to get, and what faults do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

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

STAGES, MICROBATCHES = 3, 12
#: Faults begin here, when the loop is steady, and end there.
BEGIN, END = 45, 85
#: After so many iterations a job has found out.
FOUND_OUT = 10
REQUEST = PlanRequest(MICROBATCHES, schedule="auto", policy="optimal")


def exact_profile(preset: GpuPreset, forward_s: Sequence[float]) -> Profile:
    """What a sweep without errors would measure."""
    clocks = sweep_range(preset.supported_frequencies_mhz, override_for(preset.gpu))
    rows = []
    for stage, unit_s in enumerate(forward_s):
        for kind, at_max_s in zip(WHOLE, (unit_s, 2 * unit_s), strict=True):
            for clock in clocks:
                time_s = preset.unit_time_s(kind.value, clock, at_max_s)
                energy_j = time_s * preset.busy_power_w(kind.value, clock)
                rows.append((stage, kind, ProfileRow(clock, time_s, energy_j)))
    waits = ({clocks[0]: preset.wait_power_w},) * len(forward_s)
    sidecar = Sidecar(wait_power_w=waits, frequency_change_s=preset.frequency_change_s)
    return make_profile(rows, source="the preset", sidecar=sidecar)


@dataclass
class Ran:
    """A job in the closed loop, and the framework's own order under the same faults."""

    job: list[Iteration]
    own: list[Iteration]
    said: list[tuple[int, str]]

    def slower(self, first: int, after: int) -> float:
        """The most that an iteration lasted longer than the framework's own, as a share."""
        return max(j.time_s / o.time_s - 1 for j, o in self._pairs(first, after))

    def saved(self, first: int, after: int) -> float:
        """Share of the energy."""
        pairs = self._pairs(first, after)
        return 1 - sum(j.energy_j for j, _ in pairs) / sum(o.energy_j for _, o in pairs)

    def _pairs(self, first: int, after: int) -> list[tuple[Iteration, Iteration]]:
        return list(zip(self.job, self.own, strict=True))[first:after]


def run(
    forward_s: Sequence[float] = (0.03,) * STAGES,
    *,
    preset: str = "a100-sxm",
    iterations: int = 120,
    replicas: int = 1,
    faults: Faults = lambda iteration: {},
    hiccups: float = 0.0,
) -> Ran:
    def pipelines() -> Pipelines:
        return Pipelines(load_preset(preset), forward_s, replicas, faults=faults, hiccups=hiccups)

    with EmulatedJob(pipelines(), SessionConfig(REQUEST, closed_loop=True)) as job:
        ran = job.run(iterations)
    own = pipelines()
    top = own.gpus[0][0].preset.max_frequency_mhz
    order = builders.one_f_one_b(len(forward_s), MICROBATCHES)
    for _ in range(iterations):
        own.run([constant_order(Phase.BASELINE, order, top, top)] * replicas)
    return Ran(ran, own.iterations, job.said)


def slow(factor: float) -> Conditions:
    return Conditions(slower=dict.fromkeys(WHOLE, factor))


@pytest.mark.parametrize("preset", ["a100-sxm", "a40"])
@pytest.mark.parametrize("forward_s", [(0.03,) * STAGES, (0.03, 0.03, 0.0375)])
def test_the_best_plan_is_found_at_next_to_no_cost(preset, forward_s):
    ran = run(forward_s, preset=preset, iterations=50)
    phases = [iteration.phase for iteration in ran.job]
    steady = phases.index("steady")
    probed = [i for i, phase in enumerate(phases) if phase == "profile"]
    base_s = ran.own[0].time_s
    assert steady <= 40
    assert sum(ran.job[i].time_s - base_s for i in probed) < 2 * base_s
    assert ran.slower(probed[-1] + 1, 50) < 1e-3
    exact = exact_profile(load_preset(preset), forward_s)
    plan = make_plan(exact, replace(REQUEST, conditions=known_conditions(exact))).plan
    best = plan.cost.saving_percent(plan.baseline.cost)
    assert 100 * ran.saved(steady, 50) == pytest.approx(best, abs=0.5)


def scripted(kind: str) -> Faults:
    """What is the matter from BEGIN to END."""
    everywhere = [(0, stage) for stage in range(STAGES)]

    def faults(iteration: int) -> dict[tuple[int, int], Conditions]:
        if not BEGIN <= iteration < END:
            return {}
        if kind == "grows":
            more = 1 + 0.02 * ((iteration - BEGIN) // 20 + 1)
            both = {Kind.FORWARD: 1.01 * more, Kind.BACKWARD: more}
            return dict.fromkeys(everywhere, Conditions(slower=both))
        return {
            "slow": {(0, 1): slow(1.05)},
            "capped": {(0, 0): Conditions(limit_mhz=1200), (0, 1): Conditions(limit_mhz=1200)},
            "silent": dict.fromkeys(everywhere, Conditions(silent=True)),
            "stuck": {(0, 0): Conditions(stuck=True)},
        }[kind]

    return faults


@pytest.mark.parametrize("kind", ["slow", "capped", "grows", "silent", "stuck"])
def test_after_a_fault_steps_last_no_longer_than_the_frameworks_own(kind):
    ran = run(faults=scripted(kind))
    calm = ran.saved(BEGIN - 10, BEGIN)
    assert ran.slower(BEGIN + FOUND_OUT, END) < 0.005
    assert ran.slower(END + 2 * FOUND_OUT, 120) < 0.005
    if kind != "stuck":
        assert ran.saved(BEGIN + FOUND_OUT, END) > calm - 0.01
        assert ran.saved(END + 2 * FOUND_OUT, 120) > calm - 0.01
    seen = [text for at, text in ran.said if BEGIN <= at < BEGIN + FOUND_OUT]
    assert bool(seen) is (kind != "silent")


@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_follow_the_slowest_and_come_back(replicas):
    def faults(iteration: int) -> dict[tuple[int, int], Conditions]:
        slows = BEGIN <= iteration < END
        last = replicas - 1
        return {(last, stage): slow(1.1) for stage in range(STAGES)} if slows else {}

    ran = run(replicas=replicas, faults=faults)
    assert ran.slower(BEGIN + FOUND_OUT, END) < 0.005
    assert ran.slower(END + FOUND_OUT, 120) < 0.005
    calm, followed = ran.saved(BEGIN - 10, BEGIN), ran.saved(BEGIN + FOUND_OUT, END)
    assert followed > calm + 0.03
    during = ran.job[END - 2].replicas_s
    assert min(during) > 0.985 * max(during)  # up to the slowest, and not beyond it
    assert any("follow it" in text for _, text in ran.said)
    assert any("alike again" in text for _, text in ran.said)


def test_hiccups_raise_no_alarm():
    ran = run(replicas=2, hiccups=0.01)
    calm = run(replicas=1)
    assert ran.saved(60, 120) > calm.saved(60, 120) - 0.02
    assert ran.slower(60, 120) < 0.2  # of single iterations, by hiccups of either
    mean = sum(j.time_s for j in ran.job[60:]) / sum(o.time_s for o in ran.own[60:])
    assert mean < 1.005
