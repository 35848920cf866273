"""Runs on every rank what the planning rank decides, and reports what came of it.

A `Run` decides, on the planning rank only (`tuning`). All ranks hear of it by one small exchange
each few iterations, and by none between. A rank's report of a window has its times, and how its GPU
spent them at which clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Generic, TypeVar

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule, profiled_kinds
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import HELD_UP
from envpipe_megatron.formats.timeline import is_recorded
from envpipe_megatron.formats.wishes import Wishes
from envpipe_megatron.runtime.channel.collectives import DegradedError, by_planner, in_words
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.stage_run import (
    MOST_TRIES,
    IterationOrder,
    PhaseRun,
    constant_order,
)
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.runtime.job.planning import make_room
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import with_memory
from envpipe_megatron.tuning.commands import (
    Command,
    Report,
    Run,
    Window,
    merged,
)
from envpipe_megatron.tuning.measured.powers import (
    TAIL,
    WAITING,
    meter_sums,
    power_nodes_mhz,
)

T = TypeVar("T")

#: A step that lasts this many times as long as its like holds something that is no training.
_PAUSED = 2.0
_UNKNOWN = math.nan, math.nan


@dataclass(frozen=True)
class _Ended(Generic[T]):
    """The value that a run returned, in place of a command."""

    found: T


def run_commands(
    job: PhaseParts,
    schedule: Schedule,
    clocks_mhz: Sequence[int],
    records: Sequence[StageRecord],
    begin: Callable[[Window], Run[T]],
    kinds: Sequence[Kind] = (),
) -> PhaseRun[T]:
    """Run what a run decides; what it found, if it ends.

    Raises DegradedError if it failed on a rank.

    Args:
        job: this rank's parts.
        schedule: the framework's order.
        clocks_mhz: those that plans may use, the same on every rank; or this GPU's highest.
        records: of the iterations before, one at least.
        begin: begins the run by what `records` say, on the planning rank.
        kinds: those that it distinguishes; by default the framework's.
    """
    kinds, nodes_mhz = kinds or profiled_kinds(schedule), power_nodes_mhz(clocks_mhz)
    top_mhz = max(clocks_mhz)
    order = constant_order(Phase.WARMUP, schedule, top_mhz)
    command = Command(Phase.WARMUP, 0)
    run: Run[T] | None = None
    tries = 0

    def decide(stages: Sequence[Report | str], refused: str | None) -> Command | _Ended[T]:
        """Return what is next: after a plan, `refused` is empty or says why; else it is None."""
        nonlocal run, tries
        window = _window(stages, job.state.wishes)
        try:
            if run is None:
                run = begin(window)
                return next(run)
            tries = 0 if refused is not None or window.whole else (tries + 1) % MOST_TRIES
            if tries:
                note = "units came otherwise: looking again"
                return replace(command, settle=1, orders=(), note=note)
            return run.send(replace(window, refused=refused or ""))
        except StopIteration as end:
            return _Ended(end.value)

    records, steady = list(records), count()
    billed: list[str] = []
    while True:
        make_own = partial(make_report, job, records, order, command, kinds, nodes_mhz)
        stages = job.collectives.to_planner(_made(make_own), _merged)
        decided = by_planner(job.collectives, partial(decide, stages, None))
        while isinstance(decided, Command) and decided.plan is not None:
            refused = _refused(job, decided.plan, schedule)
            decided = by_planner(job.collectives, partial(decide, stages, refused))
        if isinstance(decided, _Ended):
            found: T = decided.found
            return found
        command = decided
        if command.orders:
            place = command.which[job.collectives.replica] if command.which else 0
            clocked = command.orders[place]
            clocks = clocked.frequency_mhz
            if job.options.changes_only_order:  # those of the planning rank's GPU
                clocks = np.full_like(clocks, top_mhz)
            order = replace(
                order, schedule=clocked.schedule, frequency_mhz=clocks, parking=clocked.parking
            )
            lowest_mhz = min(int(each.frequency_mhz.min()) for each in command.orders)
            order = replace(order, lowest_mhz=lowest_mhz if command.which else None)
        order = replace(order, phase=command.phase)
        for line in command.note.splitlines():
            job.say(line)
        if command.note:
            _append(job, command.phase, note=command.note)
        lines = [*map(job.named, command.billed.splitlines())]
        if lines != billed:
            kept = [note for note in job.state.notes if note not in billed]
            job.state.notes, billed = (*kept, *lines), lines
        if command.power is not None and not job.batch:
            job.state.power = command.power
        asked = job.state.wishes.power_budget
        # The step of a window's last iteration is known once another has begun.
        records = [] if command.orders or command.settle else records[-1:]
        for _ in range(command.settle):
            # Only the timeline reads the times of their units.
            timed = command.phase is not Phase.STEADY or is_recorded(command.phase, next(steady))
            yield replace(order, times_units=timed)
            if job.state.wishes.power_budget != asked:
                break  # it is not to wait for the end of a long rest
        for _ in range(command.iterations):
            records.append((yield order))


def _made(make: Callable[[], Report]) -> Report | str:
    """Return this rank's report, or why there is none: other ranks wait for either."""
    try:
        return make()
    except Exception as error:  # of any kind: it must not end training
        return in_words(error)


def _merged(parts: Sequence[Report | str]) -> Report | str:
    failures = [part for part in parts if isinstance(part, str)]
    return failures[0] if failures else merged([p for p in parts if isinstance(p, Report)])


def _window(stages: Sequence[Report | str], wishes: Wishes) -> Window:
    """Return the reports of all stages; DegradedError where one has none."""
    for stage, report in enumerate(stages):
        if isinstance(report, str):
            raise DegradedError(f"Stage {stage}: {report}")
    return Window(tuple(report for report in stages if isinstance(report, Report)), wishes)


def _refused(job: PhaseParts, plan: Plan, own: Schedule) -> str:
    """Return why a plan has no memory; else it is kept and runs from now on, on every rank.

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
    _append(job, job.state.phase, plan=plan)
    job.folder.keep_profile(with_memory(plan.profile, job.memory.stages))
    job.folder.write_plan(plan, job.batch)
    return ""


def _append(job: PhaseParts, phase: Phase, *, note: str = "", plan: Plan | None = None) -> None:
    """Append what a closed loop says, or what its plan of one pipeline predicts, to its file."""
    if job.options.closed_loop and job.collectives.is_planner:
        entry = {
            **job.folder.run_label(job.options.run),
            "batch": job.batch,
            "iteration": job.state.iteration,
            "phase": phase,
            "note": note,
            "time_s": plan and plan.cost.iteration_time_s,
            "energy_j": plan and plan.cost.energy_j,
        }
        job.folder.append("loop", entry)


def make_report(
    job: PhaseParts,
    records: Sequence[StageRecord],
    order: IterationOrder,
    command: Command,
    kinds: Sequence[Kind],
    nodes_mhz: FloatArray,
) -> Report:
    """Return this rank's report of a command's iterations, which ran one after the other.

    Args:
        job: this rank's parts.
        records: what was measured, one iteration at least.
        order: what they ran.
        command: says what is known of late clocks and tails, and whether to wait for the counter,
            where it has not seen all of them.
        kinds: those that are distinguished.
        nodes_mhz: as `meter_sums` takes them.

    Raises DegradedError if the control of a clock that is asked for has ended.
    """
    problems = job.clock.problems()
    if job.clock.error is not None and not job.options.changes_only_order:
        raise DegradedError(f"Clock control ended: {'; '.join(problems)}")
    clocks_mhz = order.frequency_mhz[job.stage]
    parked, tail_s = order.parked(job.stage), command.tail_s[job.stage] if command.tail_s else 0.0
    # Of each unit, the place of its kind; below zero if it takes no time.
    places = order.schedule.unit_keys(1, kinds)[job.stage] - len(kinds) * job.stage
    meter = job.meter
    begins_s = np.array([record.begin_s for record in records])
    ends_s = np.array([record.end_s[-1] for record in records])
    steps_s = np.append(np.diff(begins_s), np.nan)
    steps_s[:-1][[not _follows(*both) for both in pairwise(records)]] = np.nan
    steps_s[[not record.whole for record in records]] = np.nan
    if np.isfinite(steps_s).any():
        steps_s[steps_s > _PAUSED * np.nanmedian(steps_s)] = np.nan
    # Begin of iterations that follow each other, and how those were spent.
    runs, follows = [(records[0].begin_s, [np.zeros((3, 0))])], False
    for record, step_s in zip(records, steps_s.tolist(), strict=True):
        if record.whole:
            if not follows:
                runs.append((record.begin_s, []))
            until_s = record.begin_s + step_s
            runs[-1][1].append(
                _spent(record, clocks_mhz, places, parked, command.late_s, tail_s, until_s)
            )
        follows = math.isfinite(step_s)
    if command.metered and meter.last_refresh_s < begins_s[-1] + ends_s[-1]:
        meter.catch_up()
    refreshes = meter.refreshes(records[0].begin_s)
    first, *others = (
        meter_sums(begin_s, np.concatenate(spent, axis=1), *refreshes, nodes_mhz, len(kinds))
        for begin_s, spent in runs
    )
    sums = sum(others, first)
    unit_s = [record.unit_time_s for record in records if record.whole]
    return Report(
        unit_s=np.median(unit_s or [np.full(len(clocks_mhz), np.nan)], axis=0)[np.newaxis],
        ends_s=ends_s[np.newaxis],
        steps_s=steps_s[np.newaxis],
        waits_s=np.array([[record.receive_wait_s for record in records]]),
        meter=sums,
        power_w=np.array([_power_w(meter, begins_s, ends_s, steps_s)]),
        problems=problems,
    )


def _power_w(
    meter: EnergyMeter, begins_s: FloatArray, ends_s: FloatArray, steps_s: FloatArray
) -> tuple[float, float]:
    """Return the mean power in steps that were not held up, and its uncertainty; NaN: unknown."""
    if np.isfinite(steps_s).any():
        usual = steps_s <= HELD_UP * np.nanmedian(steps_s)
        # Those that follow each other are metered together; the last one is never known.
        spans = begins_s[np.flatnonzero(np.diff(usual, prepend=False))].reshape(-1, 2)
    else:  # something lies after each iteration
        spans = np.stack([begins_s, begins_s + ends_s], axis=1)
    try:
        windows = [meter.window(*span) for span in spans.tolist()]
    except MeterError:
        return _UNKNOWN
    time_s = float(np.diff(spans).sum())
    energy_j = math.fsum(window.energy_j for window in windows)
    return energy_j / time_s, math.hypot(*(window.uncertainty_j for window in windows)) / time_s


def _follows(record: StageRecord, after: StageRecord) -> bool:
    """True if one iteration came right after another: none of another batch, and no pause."""
    return record.followed and (record.number is None or after.number in (None, record.number + 1))


def _spent(
    record: StageRecord,
    clocks_mhz: IntArray,
    kinds: IntArray,
    parked: Mapping[int, tuple[int, float]],
    late_s: float,
    tail_s: float,
    until_s: float,
) -> FloatArray:
    """Return how a stage spent an iteration up to the next one's begin, as for `meter_sums`.

    Up to its last unit, if that begin is not known (NaN).
    """
    starts_s, ends_s = record.begin_s + record.start_s, record.begin_s + record.end_s
    last_s = np.append(record.begin_s, ends_s)
    # A unit's clock is asked for when the one before has ended, or after parking in the wait.
    park_mhz, own_s = clocks_mhz.copy(), last_s[:-1].copy()
    for position, (clock_mhz, after_s) in parked.items():
        if starts_s[position] > last_s[position]:
            park_mhz[position] = clock_mhz
            own_s[position] = min(last_s[position] + max(after_s, 0.0), starts_s[position])
    asked_s = np.append(np.stack([last_s[:-1], own_s], axis=1), last_s[-1])
    asked_mhz = np.append(np.stack([park_mhz, clocks_mhz], axis=1), clocks_mhz[0])
    new = np.diff(asked_mhz, prepend=clocks_mhz[0]) != 0
    asked_s, asked_mhz = asked_s[new], asked_mhz[new]
    # What is asked for before the last request has come takes its place.
    comes = asked_s + late_s < np.append(asked_s[1:], np.inf)
    comes_s, running_mhz = asked_s[comes] + late_s, np.append(clocks_mhz[0], asked_mhz[comes])
    until = np.stack([starts_s, ends_s], axis=1).ravel()
    ways = np.stack([np.full_like(kinds, WAITING), np.maximum(kinds, WAITING)], axis=1).ravel()
    if until_s > last_s[-1]:
        until = np.append(until, [min(last_s[-1] + tail_s, until_s), until_s])
        ways = np.append(ways, [TAIL, WAITING])
    until = np.maximum.accumulate(until)
    pieces_s = np.union1d(until, comes_s)
    pieces_s = pieces_s[(pieces_s > record.begin_s) & (pieces_s <= until[-1])]
    begun = np.searchsorted(comes_s, np.append(record.begin_s, pieces_s)[:-1], side="right")
    return np.stack([pieces_s, ways[np.searchsorted(until, pieces_s)], running_mhz[begun]])
