"""The phases of a job: warm-up, profile, plan, reconfigure, steady. Training goes on in all."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from envpipe_megatron import builders
from envpipe_megatron.channel_model import find_stall
from envpipe_megatron.energy_file import Phase
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.gpu.overrides import override_for, sweep_range
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.plan import Plan, check_stages, read_plan
from envpipe_megatron.policies.planner import PlanRequest, check_request, make_plan
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Ended
from envpipe_megatron.profile import Profile, read_profile
from envpipe_megatron.runtime.channel import P2PChannel
from envpipe_megatron.runtime.clock_controller import ClockController
from envpipe_megatron.runtime.collectives import Collectives, mean
from envpipe_megatron.runtime.energy_meter import EnergyMeter
from envpipe_megatron.runtime.executor import Executor, FloatArray, StageRecord
from envpipe_megatron.runtime.memory import JobMemory, StageMemory, Watch
from envpipe_megatron.runtime.memory_limit import in_flight_limit, knows_memory, with_memory
from envpipe_megatron.runtime.messages import StageSpecs
from envpipe_megatron.runtime.orders import IterationOrder, PhaseRun, constant_order
from envpipe_megatron.runtime.p2p_latency import measure_p2p_latency_s
from envpipe_megatron.runtime.profiler import (
    OnlineProfiler,
    ProfilerError,
    ProfilerSettings,
)
from envpipe_megatron.runtime.reconfigurer import OnlineReconfigurer, no_bubble_threshold_s
from envpipe_megatron.runtime.wait_power import WaitPower, measure_wait_power, wait_clocks
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.sidecar import Sidecar

logger = logging.getLogger(__name__)

#: A job of weeks must not grow.
_KEPT_ITERATIONS = 10_000
#: Iterations of the steady phase in which the peak of memory is held against its prediction.
_COMPARED_ITERATIONS = 3


class SessionError(EnvPipeError):
    """A job that changes shape, or one that EnvPipe cannot run."""


@dataclass(frozen=True)
class SessionConfig:
    """What a job wants of EnvPipe.

    Args:
        request: type, order and reconfiguring; its number of microbatches and blocking power are
            replaced by the job's own.
        warmup_iterations: of the framework's order at maximum clock; the first is not looked at.
        profiler: how long to profile.
        profile_file: a profile to use in place of the online one.
        plan_file: a plan to run as it stands; needs the profile file that prices it.
        output_dir: where profile, plan, grids and energy log are left.
        min_dwell_s: least time between two changes of a clock.
        relock: call the driver at every request, also where the clock stays. Beside a job without,
            it shows what the calls alone cost: some drivers hold up NCCL at each of them.
        facts: what the framework knows of the job, for the sidecar of the online profile.
        gpu_preset: the kind of GPU whose range of clocks is profiled; by default this GPU's.

    Raises:
        PlannerError: wishes that contradict each other.
        SessionError: a plan without its profile, or too short a warm-up.
    """

    request: PlanRequest
    warmup_iterations: int = 3
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    profile_file: Path | None = None
    plan_file: Path | None = None
    output_dir: Path | None = None
    min_dwell_s: float = 0.0
    relock: bool = False
    facts: Sidecar = field(default_factory=Sidecar)
    gpu_preset: str | None = None

    def __post_init__(self) -> None:
        check_request(self.request)
        if self.plan_file is not None and self.profile_file is None:
            raise SessionError(
                "A plan by file needs the profile that prices it",
                value=str(self.plan_file),
                remedy="Give the profile file too.",
            )
        needed = least_warmup(self.request)
        if self.warmup_iterations < needed:
            raise SessionError(
                f"The warm-up needs at least {needed} iteration(s) with reconfiguring "
                f"'{self.request.reconfigure}'",
                value=self.warmup_iterations,
                remedy="What a receive without a bubble takes is measured after the first.",
            )


def least_warmup(request: PlanRequest) -> int:
    """How many iterations the warm-up needs: what a wait without a bubble takes is seen in it."""
    return 1 if request.reconfigure == "default" else 2


@dataclass
class SessionState:
    """What the job has come to, for whoever reports it."""

    phase: Phase = Phase.WARMUP
    iteration: int = -1
    profile: Profile | None = None
    plan: Plan | None = None
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None
    notes: tuple[str, ...] = ()
    #: One for each stage; None where memory is not known.
    memory: tuple[StageMemory, ...] | None = None
    #: This rank's latest iterations: phase, time on the GPU's time base in s, wall time in s.
    iterations: deque[tuple[Phase, float, float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_ITERATIONS)
    )


@dataclass(frozen=True)
class Job:
    """What the phases of one rank work with; `say` and `print_grid` are the planner's alone.

    Args:
        kept_order: of a framework that runs its units itself; None where ours are executed.
    """

    config: SessionConfig
    state: SessionState
    stage: int
    num_stages: int
    num_microbatches: int
    specs: StageSpecs
    gpu: Gpu
    channel: P2PChannel
    executor: Executor
    clock: ClockController
    meter: EnergyMeter
    collectives: Collectives
    say: Callable[[str], None]
    print_grid: Callable[[str], None]
    memory: JobMemory
    kept_order: Schedule | None


def run_phases(job: Job) -> PhaseRun[None]:
    """Yield what each iteration runs, for ever; the same on every rank.

    Raises:
        EnvPipeError: a profile or plan that does not fit the job, on all ranks alike.
    """
    config, state = job.config, job.state
    schedule = _framework_schedule(job)
    top = max(job.gpu.supported_frequencies_mhz)
    at_top = constant_order(Phase.WARMUP, schedule, top, top)
    records = []
    job.say(f"warm-up: {config.warmup_iterations} iterations of {schedule.name} at {top} MHz")
    for left in reversed(range(config.warmup_iterations)):
        job.memory.watch = Watch.PEAK if left else Watch.UNITS
        records.append((yield at_top))
    job.memory.watch = Watch.PEAK
    if _is_baseline(config, schedule):
        _learn_memory(job, schedule)
        _predict_memory(job, schedule)
        yield from _steady(job, replace(at_top, phase=Phase.STEADY))
    try:
        profile = yield from _profile(job, schedule)
    except ProfilerError as error:
        _learn_memory(job, schedule)
        _predict_memory(job, schedule)
        # Every rank raises it at the same point: the job trains on as if without EnvPipe.
        state.notes = (f"No profile, so the clock stays at its maximum: {error}",)
        job.say(state.notes[0])
        yield from _steady(job, replace(at_top, phase=Phase.STEADY))
    state.profile = profile
    by_stage = job.collectives.gather_by_stage(set(job.gpu.supported_frequencies_mhz))
    clocks_mhz = [set.intersection(*replicas) for replicas in by_stage]
    state.plan, state.notes = job.collectives.agreed(lambda: _plan(job, profile, clocks_mhz))
    for note in state.notes:
        job.say(note)
    _predict_memory(job, state.plan.schedule)
    policy = RECONFIGURE_POLICIES.get(config.request.reconfigure)
    if policy and config.plan_file is None:
        extra = list(state.plan.schedule.extra_forwards)
        job.say(f"reconfigure: {policy.name}, extra forwards {extra}")
        threshold_s = _threshold_s(job, schedule, records[1:])
        loop = OnlineReconfigurer(
            state.plan, policy, threshold_s, clocks_mhz, job.collectives, job.print_grid
        )
        state.plan, state.reconfigure_steps, state.reconfigure_ended = yield from loop.run()
        ended = state.reconfigure_ended.value
        job.say(f"reconfigure: ended after {state.reconfigure_steps} steps, since {ended}")
    if job.collectives.is_planner and config.output_dir:
        path = config.output_dir / "plan.json"
        if config.plan_file != path:  # which is the plan already
            _leave(path, state.plan)
    steady = IterationOrder(Phase.STEADY, state.plan.schedule, state.plan.frequency_mhz)
    yield from _steady(job, steady)


def _leave(path: Path, result: Profile | Plan) -> None:
    """Write a result; a full disk ends no training."""
    try:
        result.write(path)
    except OSError as error:
        logger.error("%s could not be written, training goes on: %s", path, error)


def _steady(job: Job, order: IterationOrder) -> PhaseRun[None]:
    job.say(f"steady: {order.schedule.name}")
    peaks = []
    for _ in range(_COMPARED_ITERATIONS):
        yield order
        peaks.append(job.memory.peak_bytes())
    job.memory.compare(max((peak for peak in peaks if peak is not None), default=None))
    job.state.memory = job.memory.stages
    job.memory.watch = Watch.NOTHING
    while True:
        yield order


def _learn_memory(job: Job, schedule: Schedule) -> None:
    job.memory.learn(schedule, job.specs)
    job.state.memory = job.memory.stages


def _predict_memory(job: Job, schedule: Schedule) -> None:
    job.memory.predict(schedule)
    job.state.memory = job.memory.stages


def _framework_schedule(job: Job) -> Schedule:
    if job.kept_order is not None:
        return job.kept_order
    chunks = job.config.request.num_chunks
    if chunks > 1:
        return builders.interleaved(job.num_stages, job.num_microbatches, chunks)
    return builders.one_f_one_b(job.num_stages, job.num_microbatches)


def _is_baseline(config: SessionConfig, schedule: Schedule) -> bool:
    """Whether nothing needs to be known: the framework's own order at maximum clock."""
    own_order = config.request.schedule in ("1f1b", "interleaved", schedule.name)
    return config.request.policy == "baseline" and own_order and config.plan_file is None


def _profile(job: Job, schedule: Schedule) -> PhaseRun[Profile]:
    given = job.config.profile_file
    if given is not None:

        def read() -> Profile:
            profile = read_profile(given)
            check_stages(profile, job.num_stages)
            known = knows_memory(profile.sidecar)
            return profile if known else with_memory(profile, job.state.memory)

        _learn_memory(job, schedule)
        return job.collectives.agreed(read)
    clocks = _swept_clocks(job)
    if job.gpu.address.backend == "dry_run":
        job.say("profile: a dry run changes no clock, so energies and plan show the loop alone")
    wait_power = _wait_power(job, clocks)
    hops_s = job.collectives.gather_by_stage(
        measure_p2p_latency_s(job.stage, job.num_stages, job.channel, job.specs, job.executor)
    )
    known = replace(
        job.config.facts,
        gpu=job.gpu.name,
        num_chunks=schedule.num_chunks,
        p2p_latency_s=tuple(mean(replicas) for replicas in hops_s[:-1]),
    )
    profiler = OnlineProfiler(
        schedule,
        clocks,
        job.stage,
        job.clock,
        job.meter,
        wait_power,
        job.collectives,
        job.config.profiler,
        job.say,
    )
    profile = yield from profiler.run(known)
    # Not before: with skipped steps, the optimizer's state may have come into being meanwhile.
    _learn_memory(job, schedule)
    profile = with_memory(profile, job.state.memory)
    if job.collectives.is_planner and job.config.output_dir:
        _leave(job.config.output_dir / "profile.csv", profile)
    return profile


def _swept_clocks(job: Job) -> tuple[int, ...]:
    """The clocks to profile.

    Raises:
        ProfilerError: GPUs with different clocks, or a single one; on all ranks.
    """
    preset = job.config.gpu_preset
    override = load_preset(preset).control if preset else override_for(job.gpu.name)
    clocks = sweep_range(job.gpu.supported_frequencies_mhz, override)
    everyone = job.collectives.gather_by_stage(clocks)
    if any(other != clocks for stage in everyone for other in stage):
        raise ProfilerError(
            "The GPUs of the pipeline support different clocks",
            remedy="Profile each kind of GPU alone and give the profile by file.",
        )
    if len(clocks) < 2:
        raise ProfilerError(f"{job.gpu.name} has a single clock (MHz)", value=clocks[0])
    return clocks


def _wait_power(job: Job, clocks: Sequence[int]) -> WaitPower:
    """Waiting power at several clocks, or at the highest alone where clocks do not follow."""
    power_w: dict[int, float] = {}
    for frequency in sorted(wait_clocks(clocks), reverse=True):
        if power_w:
            follows = job.clock.error is None and job.gpu.address.backend != "dry_run"
            everyone = job.collectives.gather_by_stage(follows)
            if not all(all(stage) for stage in everyone):
                break
        job.say(f"profile: waiting power at {frequency} MHz")
        power_w[frequency] = measure_wait_power(
            frequency,
            job.stage,
            job.num_stages,
            job.channel,
            job.specs,
            job.executor,
            job.clock,
            job.meter,
        )
    return WaitPower(power_w)


def _plan(
    job: Job, profile: Profile, clocks_mhz: Sequence[set[int]]
) -> tuple[Plan, tuple[str, ...]]:
    """The plan to start from, and notes; called on the planner alone.

    Args:
        job: of this rank.
        profile: of its stages.
        clocks_mhz: for each stage, those of all its GPUs.
    """
    given = job.config.plan_file
    notes: tuple[str, ...] = ()
    if given is None:
        powers = profile.sidecar.wait_power_w
        # The loop online replaces the offline one: it starts from the plain policy.
        request = replace(
            job.config.request,
            num_microbatches=job.num_microbatches,
            reconfigure="default",
            channel_capacity=job.channel.capacity,
            blocking_power_w=(tuple(curve[max(curve)] for curve in powers) if powers else 0.0),
        )
        limit = in_flight_limit(request, profile, job.state.memory)
        if limit is not None:
            request = replace(request, max_in_flight=limit)
        made = make_plan(profile, request)
        plan, notes = made.plan, made.notes
        if limit is not None:
            notes = (*notes, f"Memory holds at most {list(limit)} microbatches in flight.")
    else:
        plan = read_plan(given, profile)
        if plan.schedule.num_microbatches != job.num_microbatches:
            raise SessionError(
                f"Plan {given} is for another number of microbatches",
                value=plan.schedule.num_microbatches,
                remedy=f"This job has {job.num_microbatches}.",
            )
        stall = find_stall(plan.schedule, job.channel.capacity)
        if stall is not None:
            raise SessionError(
                f"The order of plan {given} needs a deeper channel than this job has: {stall}",
                remedy="Plan with --channel-capacity 1, or set CUDA_DEVICE_MAX_CONNECTIONS=8.",
            )
    if job.kept_order is not None and plan.schedule.stages != job.kept_order.stages:
        raise SessionError(
            f"The framework runs its units itself, as {job.kept_order.name}, and the plan has "
            "another order",
            value=plan.schedule.name,
            remedy=f"Plan with --schedule {job.kept_order.name}, or let the job plan.",
        )
    for stage, supported in enumerate(clocks_mhz):
        unsupported = set(plan.frequency_mhz[stage].tolist()) - supported
        if unsupported:
            raise SessionError(
                f"The plan asks for clocks (MHz) that the GPUs of stage {stage} do not have",
                value=sorted(unsupported),
                remedy="Use a profile of these GPUs.",
            )
    return plan, notes


def _threshold_s(job: Job, schedule: Schedule, records: list[StageRecord]) -> float:
    own = [(record.receive_wait_s, record.unit_time_s.min()) for record in records]
    by_stage = [replicas[0] for replicas in job.collectives.gather_by_stage(own)]
    receives = schedule.receives.copy()
    receives[:, 0] = False  # waits for the pipeline to fill
    waits: list[FloatArray] = []
    for index in range(len(records)):
        stages = [stage[index][0][mask] for stage, mask in zip(by_stage, receives, strict=True)]
        waits.append(np.concatenate(stages))
    shortest = min(unit_s for stage in by_stage for _, unit_s in stage)
    return no_bubble_threshold_s(waits, shortest)
