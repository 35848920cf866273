"""Plans that differ from the full configuration, or from the baseline, in one ingredient.

The *full* configuration is what `--schedule auto --policy optimal` plans: no limit on memory,
clocks that change at once, and waiting at the power that was measured. The *baseline* is 1F1B with
every unit at the highest clock. All plans have the time of the baseline as their deadline, where
their policy knows one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner.workloads import PRESET, Workload, conditions_with_curve, preset_workload
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Cost, Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.clock_changes.parking import park
from envpipe_megatron.policies.frequencies import POLICIES as RULES
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError
from envpipe_megatron.policies.optimal.optimizer import Optimizer, all_maximum_s
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, reconfigure
from envpipe_megatron.policies.request import PlanRequest

#: Microbatches in flight beyond those of 1F1B on its fullest stage.
MEMORY_STEPS = (0, 1, 2, 4)
DWELL_TIMES_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
CHANGE_TIMES_S = (0.01, 0.03)
#: A plan that takes this much longer than the baseline (%) takes as long.
SAME_TIME_PERCENT = 1e-6
#: What Perseus reports for a change of clock, s.
CHANGE_TIME_S = 0.01


class Ablation(StrEnum):
    """What is switched."""

    ORDER = "order"
    POLICY = "policy"
    MEMORY = "memory limit"
    DWELL = "dwell time"
    CHANGE = "time of a clock change"
    WAITING = "waiting power"


class Start(StrEnum):
    """The configuration in which it is switched."""

    FULL = "full"
    BASELINE = "baseline"


@dataclass(frozen=True)
class Row:
    """One plan, with the lower bound of the best one in the same order and time, if known.

    Its planning time includes the search for orders.
    """

    workload: Workload
    ablation: Ablation
    start: Start
    setting: str
    plan: Plan
    planning_time_s: float

    @property
    def saving_percent(self) -> float:
        """Energy saved against 1F1B at full clock under the same conditions."""
        return self.plan.cost.saving_percent(self.plan.baseline.cost)

    @property
    def slowdown_percent(self) -> float:
        """Time lost against it."""
        return self.plan.cost.slowdown_percent(self.plan.baseline.cost)

    @property
    def peak_in_flight(self) -> int:
        """Microbatches in flight on the fullest stage."""
        return max(self.plan.schedule.peak_in_flight)


class Timed(NamedTuple):
    """A plan, and how long it took to make."""

    plan: Plan
    seconds: float


def timed(make: Callable[[], Plan]) -> Timed:
    """Make a plan, with a clock on it."""
    start_s = time.perf_counter()
    return Timed(make(), time.perf_counter() - start_s)


def _made(workload: Workload, request: PlanRequest) -> Timed:
    return timed(lambda: make_plan(workload.profile, request).plan)


#: Where an ingredient is switched, to what, and the plan.
_Made = tuple[Start, str, Timed]


def ablate(workload: Workload) -> list[Row]:
    """All plans of one workload, an ingredient at a time."""
    full = _made(workload, workload.request("auto", "optimal"))
    makers = {
        Ablation.ORDER: _orders,
        Ablation.POLICY: _policies,
        Ablation.MEMORY: _memory_limits,
        Ablation.DWELL: _dwell_times,
        Ablation.CHANGE: _change_times,
        Ablation.WAITING: _waiting_powers,
    }
    return [
        Row(workload, ablation, start, setting, *made)
        for ablation, make in makers.items()
        for start, setting, made in make(workload, full)
    ]


def _orders(workload: Workload, full: Timed) -> Iterator[_Made]:
    """The best clocks on three orders, and three orders at the highest clocks."""
    for name, label in (("1f1b", "1F1B"), ("envpipe", "EnvPipe's")):
        for policy, start in (("optimal", Start.FULL), ("baseline", Start.BASELINE)):
            yield start, label, _made(workload, workload.request(name, policy))
    yield Start.FULL, "auto", full
    yield Start.BASELINE, "auto", timed(partial(_by_rule, full.plan, "baseline", "default"))


#: Policy, way of reconfiguring, and both in words.
_POLICIES = (
    ("baseline", "default", "highest clock"),
    ("uniform", "default", "uniform"),
    ("envelope", "default", "envelope, default"),
    ("envelope", "greedy", "envelope, greedy"),
    ("envelope", "balanced", "envelope, balanced"),
)


def _policies(workload: Workload, full: Timed) -> Iterator[_Made]:
    """Every policy on the order of the full configuration, and on 1F1B."""
    on_1f1b = _made(workload, workload.request("1f1b", "optimal"))
    for start, best in ((Start.FULL, full), (Start.BASELINE, on_1f1b)):
        for policy, reconfiguring, label in _POLICIES:
            made = timed(partial(_by_rule, best.plan, policy, reconfiguring))
            plan, bound_j = made.plan, best.plan.energy_lower_bound_j
            if plan.cost.slowdown_percent(plan.baseline.cost) <= SAME_TIME_PERCENT:
                made = Timed(replace(plan, energy_lower_bound_j=bound_j), made.seconds)
            yield start, label, made
        yield start, "optimal", best


def _by_rule(best: Plan, policy: str, reconfiguring: str) -> Plan:
    plan = Plan(
        policy, best.schedule, RULES[policy](best.schedule, best.profile), best.profile,
        best.conditions,
    )  # fmt: skip
    if reconfiguring == "default":
        return plan
    found = reconfigure(plan, RECONFIGURE_POLICIES[reconfiguring])
    return replace(plan, frequency_mhz=found.frequency_mhz)


def _memory_limits(workload: Workload, full: Timed) -> Iterator[_Made]:
    of_1f1b = max(full.plan.baseline.schedule.peak_in_flight)
    for more in MEMORY_STEPS:
        request = replace(workload.request("auto", "optimal"), max_in_flight=of_1f1b + more)
        yield Start.FULL, f"1F1B's + {more}" if more else "1F1B's", _made(workload, request)
    yield Start.FULL, "no limit", full


def _dwell_times(workload: Workload, full: Timed) -> Iterator[_Made]:
    yield Start.FULL, "0 ms", full
    for dwell_s in DWELL_TIMES_S:
        made = _planned(full.plan.schedule, workload, workload.conditions, dwell_s)
        if made is not None:
            yield Start.FULL, f"{1e3 * dwell_s:g} ms", made


def _change_times(workload: Workload, full: Timed) -> Iterator[_Made]:
    """The order of the full configuration, clocks coming late; planned for it, and not."""
    yield Start.FULL, "0 ms", full
    for change_s in CHANGE_TIMES_S:
        conditions = replace(workload.conditions, change_time_s=change_s)
        label = f"{1e3 * change_s:g} ms"
        yield Start.FULL, f"{label}, not planned for", _under(full, conditions)
        made = _planned(full.plan.schedule, workload, conditions)
        if made is not None:
            yield Start.FULL, label, made


def _waiting_powers(workload: Workload, full: Timed) -> Iterator[_Made]:
    """The order of the full configuration under other waiting powers, and parked clocks."""
    schedule, known = full.plan.schedule, workload.conditions
    free = replace(known, blocking_power_w=(0.0,) * known.num_stages)
    by_clock = replace(conditions_with_curve(workload), change_time_s=CHANGE_TIME_S)
    planned_free = _planned(schedule, workload, free)
    if planned_free is not None:
        yield Start.FULL, "0 W", planned_free
        yield Start.FULL, "as measured, planned as if 0", _under(planned_free, known)
    yield Start.FULL, "as measured", full
    for parking, label in ((False, "by clock (assumed)"), (True, "by clock, parked")):
        made = _planned(schedule, workload, by_clock, parking=parking)
        if made is not None:
            yield Start.FULL, label, made
    at_maximum = replace(full.plan.baseline, conditions=by_clock)
    yield Start.BASELINE, "by clock (assumed)", timed(lambda: at_maximum)
    yield Start.BASELINE, "by clock, parked", timed(lambda: park(at_maximum))


def _under(made: Timed, conditions: Conditions) -> Timed:
    """The same plan, which does not know of the conditions that price it."""
    plan = replace(made.plan, conditions=conditions, energy_lower_bound_j=None)
    return Timed(plan, made.seconds)


def _planned(
    schedule: Schedule,
    workload: Workload,
    conditions: Conditions,
    min_dwell_s: float = 0.0,
    *,
    parking: bool = False,
) -> Timed | None:
    """The best clocks of an order at the time of 1F1B at full clock; None where none keep it."""
    deadline_s = all_maximum_s(schedule, workload.profile, conditions)
    optimizer = Optimizer(schedule, workload.profile, conditions, parking=parking)
    try:
        return timed(lambda: optimizer.plan(deadline_s, min_dwell_s))
    except LinearProgramError:
        return None


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
    from envpipe_megatron.runtime.job.options import JobOptions

    config = JobOptions(
        num_microbatches=_MICROBATCHES,
        type="baseline",
        baseline_steps=1,
        profile=root / "profile.csv",
        plan=root / "plan.json",
        min_dwell_ms=1000.0 * dwell_s,
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
        time_s = session.iterations.latest[-1][1]
    finally:
        session.close()
    return Cost(time_s, time_s * (end.energy_j - begin.energy_j) / (end.time_s - begin.time_s))
