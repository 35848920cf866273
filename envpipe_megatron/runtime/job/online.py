"""Runs on every rank what the planning rank decides, and reports what came of it.

A `Run` decides, on the planning rank only (`tuning`). All ranks hear of it by one small exchange
each few iterations, and by none between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

import numpy as np

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule, profiled_kinds
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.timeline import is_recorded
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import (
    MOST_TRIES,
    IterationOrder,
    PhaseRun,
    constant_order,
)
from envpipe_megatron.runtime.fallback import DegradedError, by_planner, in_words
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.runtime.job.planning import make_room
from envpipe_megatron.runtime.job.reports import make_report
from envpipe_megatron.runtime.memory.peak import MemoryFullError
from envpipe_megatron.runtime.memory.stage import with_memory
from envpipe_megatron.tuning.commands import (
    Command,
    PlanRefusedError,
    Report,
    Run,
    Window,
    merged,
)
from envpipe_megatron.tuning.measured.powers import power_nodes_mhz

T = TypeVar("T")


@dataclass(frozen=True)
class _Ended:
    """The value that a run returned, in place of a command."""

    found: Any


def run_commands(
    job: PhaseParts,
    schedule: Schedule,
    clocks_mhz: Sequence[int],
    records: Sequence[StageRecord],
    begin: Callable[[Window], Run[T]],
    kinds: Sequence[Kind] = (),
) -> PhaseRun[tuple[T, IterationOrder]]:
    """Run what a run decides; what it found, if it ends, and what ran last.

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
    needs_clocks = job.options.closed_loop and not job.options.changes_only_order
    top_mhz = max(clocks_mhz)
    order = constant_order(Phase.WARMUP, schedule, top_mhz, billed_late=True)
    command = Command(Phase.WARMUP, 0)
    run: Run[T] | None = None

    def decide(stages: Sequence[Report | str]) -> Command | _Ended:
        nonlocal run
        window = replace(_window(stages, needs_clocks=needs_clocks), wishes=job.state.wishes)
        try:
            if run is not None:
                return run.send(window)
            run = _whole(begin(window))
            return next(run)
        except StopIteration as end:
            return _Ended(end.value)

    records, steady = list(records), count()
    billed: list[str] = []
    while True:
        make_own = partial(make_report, job, records, order, command, kinds, nodes_mhz)
        stages = job.collectives.to_planner(_made(make_own), _merged)
        decided = by_planner(job.collectives, partial(decide, stages))
        if isinstance(decided, _Ended):
            return decided.found, order
        command = decided
        if command.plan is not None and (why := _refused(job, command.plan, schedule)):
            command = by_planner(job.collectives, partial(_instead, run, why))
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
        is_news = job.options.closed_loop and (command.note or command.plan is not None)
        if job.collectives.is_planner and is_news:
            job.folder.append("loop", _described(job, command))
        if command.billed:
            kept = [note for note in job.state.notes if note not in billed]
            billed = [*map(job.named, command.billed.splitlines())]
            job.state.notes = (*kept, *billed)
        if command.power is not None and not job.batch:
            job.state.power = command.power
        asked = job.state.wishes.power_budget
        # The step of a window's last iteration is known once another has begun.
        records = [] if command.orders or command.settle else records[-1:]
        for _ in range(command.settle):
            # But for the timeline, nobody looks at times of their units.
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


def _window(stages: Sequence[Report | str], *, needs_clocks: bool) -> Window:
    """Return the reports of all stages; DegradedError where one has none, or a clock is lost."""
    for stage, report in enumerate(stages):
        if isinstance(report, str):
            raise DegradedError(f"Stage {stage}: {report}")
        if needs_clocks and report.lost:
            raise DegradedError(f"Stage {stage}: Clock control ended: {'; '.join(report.problems)}")
    return Window(tuple(report for report in stages if isinstance(report, Report)))


def _whole(run: Run[T]) -> Run[T]:
    """Yield the commands of a run, each again while no iteration of its window ran whole."""
    try:
        command = next(run)
        while True:
            try:
                for left in reversed(range(MOST_TRIES)):
                    window = yield command
                    if window.whole or not left:
                        break
                    note = "units came otherwise: looking again"
                    command = replace(command, settle=1, orders=(), plan=None, note=note, billed="")
            except PlanRefusedError as refused:
                command = run.throw(refused)
            else:
                command = run.send(window)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # of a generator


def _instead(run: Run[Any] | None, why: str) -> Command:
    """Return the run's command in place of one whose plan is refused; on the planning rank."""
    assert run is not None
    return run.throw(PlanRefusedError(why))


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
    job.folder.keep_profile(with_memory(plan.profile, job.memory.stages))
    job.folder.write_plan(plan, job.batch)
    return ""


def _described(job: PhaseParts, command: Command) -> dict[str, object]:
    """Return what the run says and predicts from this iteration on, of one pipeline."""
    cost = None if command.plan is None else command.plan.cost
    return {
        **job.folder.run_label(job.options.labels),
        "batch": job.batch,
        "iteration": job.state.iteration,
        "phase": command.phase,
        "note": command.note,
        "time_s": cost and cost.iteration_time_s,
        "energy_j": cost and cost.energy_j,
    }
