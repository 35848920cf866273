"""The closed loop on every rank: runs what the planning rank's controller says, and reports.

The controller decides on the planning rank alone (`control.controller`). All ranks learn of it by
one small exchange each few iterations, and by none between. Each rank reports what a window of
iterations measured (`make_report`).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from envpipe_megatron.control.controller import Controller, Run
from envpipe_megatron.control.knowledge import Knowledge, power_nodes_mhz
from envpipe_megatron.control.planner import Limits, Planner
from envpipe_megatron.control.window import (
    TAIL,
    WAITING,
    Command,
    Report,
    Stretch,
    Window,
    merged,
    meter_sums,
)
from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import MOST_TRIES, PhaseRun, constant_order
from envpipe_megatron.runtime.going_on import by_planner
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.runtime.job.planning import check_plan, make_room, plan_online
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import with_memory
from envpipe_megatron.runtime.profiling.profiler import profiled_kinds

#: A step that lasts this many times as long as its like holds something that is no training.
_PAUSED = 2.0


def run_online(
    job: PhaseParts,
    schedule: Schedule,
    clocks_mhz: Sequence[int],
    facts: Sidecar,
    profile: Profile | None,
    records: Sequence[StageRecord],
) -> PhaseRun[None]:
    """Everything after the warm-up, forever; GoesOnError on all ranks if nothing can be planned.

    Args:
        job: this rank's parts.
        schedule: the framework's order.
        clocks_mhz: those that plans may use, the same on every rank.
        facts: what is known of the job, for profiles.
        profile: what an earlier start or the user knows; None to measure while training goes on.
        records: of the warm-up, but for its first iteration.
    """
    kinds, nodes_mhz = profiled_kinds(schedule), power_nodes_mhz(clocks_mhz)
    replica = _replica(job)
    top_mhz = max(clocks_mhz)
    order = replace(constant_order(Phase.WARMUP, schedule, top_mhz, top_mhz), billed_late=True)
    command = Command(Phase.WARMUP, 0, 0, 0.0, (0.0,) * job.num_stages)
    controller: Controller | None = None
    run: Run | None = None

    def begin() -> None:
        nonlocal controller, run
        controller = _controller(job, schedule, kinds, clocks_mhz, facts, profile)
        run = _whole(controller.run())
        next(run)

    by_planner(job.collectives, begin)
    records, billed = list(records), ""
    while True:
        report = make_report(
            records,
            order.frequency_mhz[job.stage].tolist(),
            _places(order.schedule, job.stage, kinds),
            parked=order.parked(job.stage),
            meter=job.meter,
            nodes_mhz=nodes_mhz,
            num_kinds=len(kinds),
            late_s=command.late_s,
            tail_s=command.tail_s[job.stage],
            problems=job.problems(),
        )
        stages = job.collectives.to_planner(report, merged)

        command = by_planner(job.collectives, partial(_next, run, stages))
        if command.plan is not None and (why := _refused(job, command.plan, schedule)):
            refused = partial(_instead, controller, command, why)
            command = by_planner(job.collectives, refused)
        if command.orders:
            clocked = command.orders[command.which[replica]]
            order = replace(
                order,
                schedule=clocked.schedule,
                frequency_mhz=clocked.frequency_mhz,
                parking=clocked.parking,
            )
        order = replace(order, phase=command.phase)
        if command.note:
            job.say(command.note)
        if job.collectives.is_planner and (command.note or command.plan is not None):
            job.folder.append("loop", _told(job, command))
        if command.billed:
            kept = [note for note in job.state.notes if note != billed]
            billed = f"{job.batch}: {command.billed}" if job.batch else command.billed
            job.state.notes = (*kept, billed)
        # The step of a window's last iteration is known once another has begun.
        records = [] if command.orders or command.settle else records[-1:]
        for _ in range(command.settle):
            yield order
        for _ in range(command.iterations):
            records.append((yield order))


def _next(run: Run | None, stages: Sequence[Report]) -> Command:
    """Return the controller's command upon the reports of all stages; on the planning rank."""
    assert run is not None
    command = run.send(Window(tuple(stages)))
    assert command is not None
    return command


def _whole(run: Run) -> Run:
    """The controller's commands, each again while no iteration of its window ran whole."""
    command = next(run)
    while True:
        for left in reversed(range(MOST_TRIES)):
            window = yield command
            if command is None or window.whole or not left:
                break
            note = "units came otherwise: looking again"
            command = replace(command, settle=1, orders=(), plan=None, note=note, billed="")
        command = run.send(window)


def _instead(controller: Controller | None, command: Command, why: str) -> Command:
    """The controller's command in place of one whose plan is refused; likewise."""
    assert controller is not None
    return controller.refuse(command, why)


def _controller(
    job: PhaseParts,
    schedule: Schedule,
    kinds: Sequence[Kind],
    clocks_mhz: Sequence[int],
    facts: Sidecar,
    profile: Profile | None,
) -> Controller:
    knowledge = Knowledge(job.num_stages, schedule.num_chunks, kinds, clocks_mhz, facts)
    if profile is not None:
        knowledge.take_profile(profile)
    config = job.config
    limits = Limits(
        config.max_slowdown_percent / 100,
        config.request.deadline_factor or 1.0,
        config.request.min_dwell_s,
    )
    check = partial(check_plan, job, clocks_mhz=())
    planner = Planner(knowledge, partial(plan_online, job), check, limits, job.background)
    return Controller(schedule, knowledge, job.collectives.num_replicas, planner)


def _refused(job: PhaseParts, plan: Plan, own: Schedule) -> str:
    """Why a new plan has no memory; else it is kept and runs from now on, on every rank.

    The framework's own order ran, so that too little memory for it is only said.
    """
    before = job.state.plan
    if before is None or before.schedule.stages != plan.schedule.stages:
        try:
            make_room(job, plan)
        except MemoryFullError as error:
            if plan.schedule.stages != own.stages:
                return str(error)
            job.say(f"memory: {error}")
    job.state.plan, job.state.profile = plan, plan.profile
    job.folder.keep_profile(with_memory(plan.profile, job.memory.stages))
    job.folder.keep_plan(plan, 0, None, job.batch)
    return ""


def _told(job: PhaseParts, command: Command) -> dict[str, object]:
    """Return what the loop says and predicts from this iteration on, of one pipeline."""
    cost = None if command.plan is None else command.plan.cost
    return {
        **job.folder.run_label(job.config.labels),
        "batch": job.batch,
        "iteration": job.state.iteration,
        "phase": command.phase,
        "note": command.note,
        "time_s": cost and cost.iteration_time_s,
        "energy_j": cost and cost.energy_j,
    }


def _replica(job: PhaseParts) -> int:
    """The place of this rank's pipeline among the replicas, as the planner gets their values."""
    own = secrets.token_hex(8)
    stages = job.collectives.from_planner(job.collectives.all_to_planner(own))
    return stages[job.stage].index(own)


def _places(schedule: Schedule, stage: int, kinds: Sequence[Kind]) -> list[int]:
    """The place of the kind of each of a stage's units; below zero if it takes no time."""
    places: list[int] = (schedule.unit_keys(1, kinds)[stage] - len(kinds) * stage).tolist()
    return places


def make_report(
    records: Sequence[StageRecord],
    clocks_mhz: Sequence[int],
    kinds: Sequence[int],
    *,
    parked: Mapping[int, tuple[int, float]],
    meter: EnergyMeter,
    nodes_mhz: FloatArray,
    num_kinds: int,
    late_s: float,
    tail_s: float,
    problems: tuple[str, ...],
) -> Report:
    """The report of iterations that ran one order, one after the other.

    Args:
        records: what was measured, one iteration at least.
        clocks_mhz: of each of this stage's units.
        kinds: of each unit the place of its kind; below zero if it takes no time.
        parked: as `IterationOrder.parked` gives it.
        meter: this rank's.
        nodes_mhz: as `meter_sums` takes them, and `num_kinds`.
        late_s: by how much a change of the clock comes late.
        tail_s: what this stage does after its last unit.
        problems: what is wrong with this rank's GPU.
    """
    begins_s = np.array([record.begin_s for record in records])
    ends_s = np.array([record.end_s[-1] for record in records])
    steps_s = np.append(np.diff(begins_s), np.nan)
    steps_s[:-1][[not _follows(*both) for both in pairwise(records)]] = np.nan
    steps_s[[not record.whole for record in records]] = np.nan
    if np.isfinite(steps_s).any():
        steps_s[steps_s > _PAUSED * np.nanmedian(steps_s)] = np.nan
    stretches: list[Stretch] = []
    for record, step_s in zip(records, steps_s.tolist(), strict=True):
        until_s = record.begin_s + step_s
        if not record.whole:
            break
        stretches += _stretches(record, clocks_mhz, kinds, parked, late_s, tail_s, until_s)
        if math.isnan(step_s):
            break
    begin_s = records[0].begin_s
    sums = meter_sums(begin_s, stretches, *meter.refreshes(begin_s), nodes_mhz, num_kinds)
    unit_s = [record.unit_time_s for record in records if record.whole]
    return Report(
        np.median(unit_s or [np.full(len(kinds), np.nan)], axis=0)[np.newaxis],
        ends_s[np.newaxis],
        (steps_s - ends_s)[np.newaxis],
        steps_s[np.newaxis],
        sums,
        int(sums.time_s > 0),
        problems,
    )


def _follows(record: StageRecord, after: StageRecord) -> bool:
    """True if one iteration came right after another: none of another batch, and no pause."""
    return record.followed and (record.number is None or after.number in (None, record.number + 1))


def _stretches(
    record: StageRecord,
    clocks_mhz: Sequence[int],
    kinds: Sequence[int],
    parked: Mapping[int, tuple[int, float]],
    late_s: float,
    tail_s: float,
    until_s: float,
) -> list[Stretch]:
    """How one stage spent an iteration up to the next one's begin, NaN if that is not known."""
    spent: list[Stretch] = []
    running = coming = float(clocks_mhz[0])
    last_s = arrives_s = record.begin_s

    def ask(clock_mhz: float) -> None:
        nonlocal coming, arrives_s
        if clock_mhz != coming:
            coming, arrives_s = float(clock_mhz), last_s + late_s

    def spend(end_s: float, kind: int) -> None:
        nonlocal running, last_s
        if running != coming and arrives_s < end_s:
            if arrives_s > last_s:
                spent.append(Stretch(arrives_s, kind, running))
            running = coming
        spent.append(Stretch(end_s, kind, running))
        last_s = end_s

    starts_s, ends_s = record.begin_s + record.start_s, record.begin_s + record.end_s
    units = zip(starts_s.tolist(), ends_s.tolist(), clocks_mhz, kinds, strict=True)
    for position, (start_s, end_s, clock, kind) in enumerate(units):
        if position in parked and start_s > last_s:
            park_mhz, own_after_s = parked[position]
            ask(park_mhz)
            spend(min(last_s + own_after_s, start_s), WAITING)
        ask(clock)
        if start_s > last_s:
            spend(start_s, WAITING)
        if kind >= 0 and end_s > last_s:
            spend(end_s, kind)
    if until_s > last_s:  # not of the last iteration, whose step is not known
        ask(clocks_mhz[0])
        if tail_s:
            spend(min(last_s + tail_s, until_s), TAIL)
        if until_s > last_s:
            spend(until_s, WAITING)
    return spent
