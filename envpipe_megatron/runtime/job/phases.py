"""The phases of a job: warm-up, profile, plan, reconfigure, steady. Training goes on in all.

Where the job has one clock, the search for it takes the place of profile, plan and reconfigure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule, profiled_kinds
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.formats.timeline import is_recorded
from envpipe_megatron.gpu.presets import SWEEP_STEP, load_preset, override_for, sweep_range
from envpipe_megatron.policies.frequencies import RECONFIGURE_POLICIES
from envpipe_megatron.runtime.channel.collectives import DegradedError, by_planner, on_every_rank
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.stage_run import (
    IterationOrder,
    PhaseRun,
    constant_order,
    iterations,
    whole,
)
from envpipe_megatron.runtime.job.measuring import (
    baseline_holds,
    known_and_measured,
    measure_hops_s,
    try_parts,
)
from envpipe_megatron.runtime.job.online import run_commands
from envpipe_megatron.runtime.job.parts import PhaseParts, note
from envpipe_megatron.runtime.job.planning import (
    check_plan,
    given_plan,
    make_room,
    make_room_for_messages,
    plan_online,
    profiled_clocks,
    read_files,
)
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.memory.stage import with_memory
from envpipe_megatron.tuning.commands import Run, Window
from envpipe_megatron.tuning.controller import Controller
from envpipe_megatron.tuning.judge import WINDOW
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.one_clock import ONE_CLOCK_STEP, OneClock
from envpipe_megatron.tuning.planner import Planner
from envpipe_megatron.tuning.shortest import ShortestOrder
from envpipe_megatron.tuning.sweep import measured_profile, planned_beside, reconfigured

_DRY_RUN = "profile: a dry run changes no clock, so energies and plan show only the loop"
#: Iterations after which a closed loop that failed is begun anew; twice as many each time that it
#: fails before it has a plan and has run for longer than the last ones.
_TRIED_AFTER = 200
#: Iterations of the steady phase, in the last of which the peak of memory is compared.
_COMPARED_ITERATIONS = 3


def run_phases(job: PhaseParts) -> PhaseRun[None]:
    """Yield what each iteration runs, forever; the same on every rank.

    Raises EnvPipeError on all ranks, before the first iteration, if a profile or plan by file is
    not one of this job, and MemoryFullError if messages have no memory. Nothing ends training later
    on.
    """
    options = job.options
    read_files(job)
    schedule = job.schedule
    make_room_for_messages(job, schedule)
    at_top = constant_order(Phase.WARMUP, schedule, job.top_mhz)
    known, usual = job.batch in job.energy.baselines, options.baseline_steps
    # Of a known one, an iteration that does not count and one that it is held against.
    for length in (2, usual) if known else (usual,):
        job.say(f"warm-up: {length} iterations of {schedule.name} at {job.top_mhz} MHz")
        warm_up = partial(_watched_last, at_top, length)
        if options.only_measures(schedule.name):  # nothing is learned from its units
            records = yield from warm_up()
        else:
            records = yield from whole(warm_up, job.collectives)
        if known and baseline_holds(job):
            break
    order = replace(at_top, phase=Phase.STEADY)
    try:
        if options.one_clock:
            yield from _one_clock(job)
        elif options.closed_loop:
            yield from _closed_loop(job, records[1:])
        elif options.only_measures(schedule.name):
            _keep_own_order(job)
        else:
            order = yield from _save_energy(job, records)
    except DegradedError as error:
        _go_on(job, error)
    yield from _steady(job, order)


def _go_on(job: PhaseParts, error: DegradedError) -> None:
    """Let the framework's order go on, for something has failed."""
    job.state.plan = None
    note(job, f"The framework's own order, at the highest clock: {error}")
    if not job.state.several_sizes:
        job.folder.forget_profile()
    _keep_own_order(job)


def _one_clock(job: PhaseParts) -> PhaseRun[None]:
    """Find a clock, and another when it is not right any more, forever. As `_save_energy`."""
    found, top = job.folder.found.one_clock_mhz, job.top_mhz
    if not job.collectives.on_all(found in job.gpu.supported_frequencies_mhz):
        found = None
    clocks = (top, *(clock for clock in _swept_clocks(job, ONE_CLOCK_STEP) if clock < top))
    _keep_own_order(job)
    first, phase = found or top, Phase.STEADY if found else Phase.PROFILE
    records = yield from _compared(job, constant_order(phase, job.schedule, first))

    def keep(clock: int, steps: Mapping[int, StepEnergy]) -> None:
        measured = [{"frequency_mhz": at, **asdict(step)} for at, step in steps.items()]
        job.folder.append("one_clock", {"chosen_mhz": clock, "clocks": measured})
        job.folder.keep(one_clock_mhz=clock)

    tuner = OneClock(
        job.schedule,
        clocks,
        job.options.slowdown_percent,
        job.options.steps_at_clock,
        job.collectives.on_all(job.gpu.changes_clock),
        found,
        keep,
    )
    yield from run_commands(job, job.schedule, clocks, records, tuner.run)


def _watched_last(order: IterationOrder, length: int) -> PhaseRun[list[StageRecord]]:
    """Run an order some times; what the units of the last iteration hold is watched."""
    records = yield from iterations(order, length - 1)
    records += yield from iterations(replace(order, watched=True))
    return records


def _closed_loop(job: PhaseParts, records: Sequence[StageRecord]) -> PhaseRun[None]:
    """Run the closed loop, forever: what fails soon is begun anew, each time later.

    The framework's order runs meanwhile. The records are of the warm-up, except for its first
    iteration.
    """
    steady = constant_order(Phase.STEADY, job.schedule, job.top_mhz)
    pause = _TRIED_AFTER
    while True:
        begun = job.state.iteration
        try:
            yield from _loop(job, records)
        except DegradedError as error:
            if job.state.plan is not None and job.state.iteration - begun > pause:
                pause = _TRIED_AFTER  # it had come back for good
            _go_on(job, error)
        clocks_mhz = job.gpu.supported_frequencies_mhz
        if not job.collectives.on_all(job.clock.error is None and len(clocks_mhz) > 1):
            # What is found from here on is no use to a start that has control again.
            without, none = job.options.without_control(), JobFolder(None, job.collectives)
            job = replace(job, options=without, folder=none)
        if not job.options.closed_loop:
            return
        if not job.state.several_sizes:
            job.state.profile = None  # it may be what has failed
        job.say(f"steady: {steady.schedule.name}")
        for _ in range(pause):
            yield steady
        pause *= 2
        note(job, "After a failure, the closed loop was begun anew")
        records = yield from whole(partial(_watched_last, steady, WINDOW), job.collectives)


def _loop(job: PhaseParts, records: Sequence[StageRecord]) -> PhaseRun[None]:
    """Run the closed loop, forever; DegradedError if that fails. As `_save_energy`."""
    schedule = job.schedule
    profile, measured = known_and_measured(job, records)
    if profile is not None:
        clocks = by_planner(job.collectives, partial(profiled_clocks, job, profile))
        facts = profile.sidecar
    else:
        # Of this GPU, others may have another; 0 where it has none.
        clocks = [job.top_mhz or 1]
        if not job.options.changes_only_order:
            clocks = list(_swept_clocks(job))
        facts = _learn(job, records)
    measured = yield from try_parts(job, measured)

    def begin(first: Window) -> Run[None]:
        store = Store(measured, clocks, facts)
        if profile is not None:
            store.take_profile(profile)
        options, ask, check = job.options, partial(plan_online, job), partial(check_plan, job)
        limits = options.goal, options.slowdown_percent / 100, options.min_dwell_s
        planner = Planner(store, ask, check, job.background(), *limits)
        tuner = ShortestOrder if options.changes_only_order else Controller
        return tuner(schedule, store, planner).run(first)

    yield from run_commands(job, schedule, clocks, records, begin, profiled_kinds(measured))


def _save_energy(job: PhaseParts, records: Sequence[StageRecord]) -> PhaseRun[IterationOrder]:
    """Profile, plan and reconfigure; the order of the steady phase. DegradedError if that fails.

    Args:
        job: this rank's parts.
        records: of the warm-up; its first iteration says nothing of the units.
    """
    profile, measured = known_and_measured(job, records[1:])
    if profile is None:
        profile = yield from _profile(job, measured, records[1:])
    job.state.profile = profile
    plan = yield from adopt_plan(job, records, profile)
    job.state.plan = plan
    return IterationOrder(Phase.STEADY, plan.schedule, plan.frequency_mhz)


def adopt_plan(job: PhaseParts, records: Sequence[StageRecord], profile: Profile) -> PhaseRun[Plan]:
    """Return the plan to start from, its memory ready: the user's, or one made meanwhile.

    Only that is reconfigured.

    Raises DegradedError if no plan can be made, or run: training is under way, whoever gave it.
    """
    options, state, own_clocks = job.options, job.state, job.gpu.supported_frequencies_mhz
    given = given_plan(job)
    if given is not None:
        job.folder.write_plan(given)
        return given

    def begin(first: Window) -> Run[tuple[Plan, tuple[str, ...]]]:
        return planned_beside(job.background(), plan_online(job, profile))

    plan, notes = yield from run_commands(job, job.schedule, own_clocks, records[-1:], begin)
    by_planner(job.collectives, partial(check_plan, job, plan))
    make_room(job, plan)
    state.plan = plan
    note(job, *notes)
    policy = RECONFIGURE_POLICIES.get(options.reconfigure)
    if policy:
        job.say(f"reconfigure: {policy.name}, extra forwards {list(plan.schedule.extra_forwards)}")
        raises = partial(reconfigured, plan, policy, job.schedule, job.clocks_mhz)
        run = run_commands(job, job.schedule, own_clocks, records[1:], raises)
        plan, state.reconfigure_steps, state.reconfigure_ended = yield from run
        ended = state.reconfigure_ended.value
        job.say(f"reconfigure: ended after {state.reconfigure_steps} steps, since {ended}")
    job.folder.write_plan(plan, job.batch)
    return plan


def _steady(job: PhaseParts, order: IterationOrder) -> PhaseRun[None]:
    job.say(f"steady: {order.schedule.name}")
    # Only the timeline reads the times of units, and timing is half of the host's work at a unit.
    untimed = replace(order, times_units=False)
    yield from _compared(job, order)
    for index in count(_COMPARED_ITERATIONS):
        yield order if is_recorded(Phase.STEADY, index) else untimed


def _compared(job: PhaseParts, order: IterationOrder) -> PhaseRun[list[StageRecord]]:
    """Run an order, and hold its peak of memory against the prediction."""
    watched = partial(_watched_last, order, _COMPARED_ITERATIONS)
    records = yield from whole(watched, job.collectives)
    job.memory.compare()
    return records


def _keep_own_order(job: PhaseParts) -> None:
    """Let the framework's order go on: it ran, so that too little memory for it is only said."""
    if job.memory.stages is None:
        job.memory.learn(job.schedule, job.specs)
    try:
        job.memory.predict(job.schedule)
    except DegradedError as error:
        job.say(f"memory: {error}")


def _profile(
    job: PhaseParts, measured: Schedule, records: Sequence[StageRecord]
) -> PhaseRun[Profile]:
    """Sweep; DegradedError on all ranks if that fails. As `_save_energy`."""
    swept, schedule = _swept_clocks(job), job.schedule
    facts = _learn(job, records)
    measured = yield from try_parts(job, measured)
    store = Store(measured, swept, facts)
    begin = partial(measured_profile, store, job.options.steps_at_clock)
    if not records or measured is not schedule:
        records = yield from iterations(constant_order(Phase.PROFILE, measured, swept[0]))
    profile = yield from run_commands(job, measured, swept, records, begin)
    profile = with_memory(profile, job.memory.stages)
    job.folder.keep_profile(profile)
    job.state.profiled = schedule
    return profile


def _learn(job: PhaseParts, records: Sequence[StageRecord]) -> Sidecar:
    """Learn what the warm-up shows beside times of units; every rank calls it."""
    if not (job.gpu.changes_clock or job.options.changes_only_order):
        job.say(_DRY_RUN)
    job.memory.learn(job.schedule, job.specs)
    hops_s = measure_hops_s(job, records)
    return replace(job.options.sidecar, gpu=job.gpu.name, p2p_latency_s=hops_s)


def _swept_clocks(job: PhaseParts, step: float = SWEEP_STEP) -> tuple[int, ...]:
    """Return the clocks to measure; DegradedError on all ranks if GPUs differ or have one."""
    preset = job.options.gpu

    def own() -> tuple[int, ...]:
        override = load_preset(preset).control if preset else override_for(job.gpu.name)
        return sweep_range(job.gpu.supported_frequencies_mhz, override, step)

    here = on_every_rank(job.collectives, own)
    clocks = job.collectives.from_planner(here)
    if not job.collectives.on_all(here == clocks):
        raise DegradedError(
            "The GPUs of the job support different clocks",
            remedy="Profile each kind of GPU by itself and give the profile by file.",
        )
    if len(clocks) < 2:
        raise DegradedError(f"{job.gpu.name} has a single clock (MHz)", value=clocks[0])
    return clocks
