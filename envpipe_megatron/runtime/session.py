"""One training job under EnvPipe: phases in order, each iteration executed by the interpreter."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from envpipe_megatron import builders
from envpipe_megatron.channel_model import find_stall
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.plan import Plan, check_stages, read_plan
from envpipe_megatron.policies.planner import PlanRequest, make_plan
from envpipe_megatron.policies.reconfigure import RECONFIGURE_POLICIES, Ended
from envpipe_megatron.profile import Profile, read_profile
from envpipe_megatron.runtime.channel import P2PChannel, TensorSpec
from envpipe_megatron.runtime.clock_controller import ClockController
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.energy_log import EnergyLog
from envpipe_megatron.runtime.energy_meter import EnergyMeter
from envpipe_megatron.runtime.executor import Completion, Done, Executor, FloatArray, StageRecord
from envpipe_megatron.runtime.interpreter import StageWork, execute
from envpipe_megatron.runtime.orders import IterationOrder, Phase, PhaseRun, constant_order
from envpipe_megatron.runtime.profiler import OnlineProfiler, ProfilerSettings
from envpipe_megatron.runtime.reconfigurer import OnlineReconfigurer, no_bubble_threshold_s
from envpipe_megatron.schedule import Kind, Schedule, unit
from envpipe_megatron.sidecar import Sidecar

#: How long the pipeline stands still, once, to measure the power of waiting.
_WAIT_POWER_HOLD_S = 1.5
#: A job of weeks must not grow.
_KEPT_ITERATIONS = 10_000
#: Two refreshes of the counter.
_METER_MARGIN_S = 0.2


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
    """

    request: PlanRequest
    warmup_iterations: int = 3
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    profile_file: Path | None = None
    plan_file: Path | None = None
    output_dir: Path | None = None
    min_dwell_s: float = 0.0


@dataclass
class SessionState:
    """What the job has come to, for whoever reports it; the same on every rank."""

    phase: Phase = Phase.WARMUP
    iteration: int = -1
    profile: Profile | None = None
    plan: Plan | None = None
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None
    notes: tuple[str, ...] = ()
    #: The latest iterations: phase, time on the GPU's time base in s, wall time in s.
    iterations: deque[tuple[Phase, float, float]] = field(
        default_factory=lambda: deque(maxlen=_KEPT_ITERATIONS)
    )


class Session:
    """Executes iterations for one rank; the clock comes back when it is closed.

    Args:
        config: what the job wants.
        gpu: this rank's GPU.
        make_executor: makes the executor, given what lets it wait for the clock controller.
        channel: to the neighbour stages.
        collectives: to all ranks.
        stage: this rank's stage.
        num_stages: p.
        rank: this rank, for the energy log.
        labels: what else each line of the energy log says.
        say: told of progress, on the planning rank alone.
        print_grid: told of reconfigure grids, on the planning rank alone.
    """

    def __init__(
        self,
        config: SessionConfig,
        gpu: Gpu,
        make_executor: Callable[[Callable[[], None]], Executor],
        channel: P2PChannel,
        collectives: Collectives,
        *,
        stage: int,
        num_stages: int,
        rank: int,
        labels: Mapping[str, object] | None = None,
        say: Callable[[str], None] = lambda text: None,
        print_grid: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self._gpu = gpu
        self._channel = channel
        self._collectives = collectives
        self._stage = stage
        self._num_stages = num_stages
        silent: Callable[[str], None] = lambda text: None  # noqa: E731 - a null object
        self._say = say if collectives.is_planner else silent
        self._print_grid = print_grid if collectives.is_planner else silent
        self.state = SessionState()
        self.clock = ClockController(gpu, config.min_dwell_s)
        self.executor = make_executor(self.clock.wait_idle)
        self.meter = EnergyMeter(gpu)
        log = config.output_dir / "energy.jsonl" if config.output_dir else None
        self.energy_log = EnergyLog(
            self.meter, log, {**(labels or {}), "gpu": gpu.name, "rank": rank, "stage": stage}
        )
        self._phases: PhaseRun[None] | None = None
        self._order: IterationOrder | None = None
        self._spec: TensorSpec | None = None
        self._microbatches = 0
        self._closed = False
        #: The units of the last iteration, in the order in which this stage ran them.
        self.executed: list[str] = []

    def run_iteration(
        self, num_microbatches: int, spec: TensorSpec, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        """Execute one training iteration in the job's present phase.

        Raises:
            SessionError: another number of microbatches than before.
            ChannelError: a neighbour is gone or silent.
        """
        self._spec = spec
        if self._phases is None:
            self._microbatches = num_microbatches
            self._phases = self._run_phases()
            self._order = next(self._phases)
        if num_microbatches != self._microbatches:
            raise SessionError(
                f"EnvPipe planned for {self._microbatches} microbatches",
                value=num_microbatches,
                remedy="Keep the global batch size constant (no batch-size ramp-up).",
            )
        assert self._order is not None
        order = self._order
        self.state.phase = order.phase
        self.state.iteration += 1
        record = self._execute(order, make_work)
        self.energy_log.add(order.phase.value, self.state.iteration, record)
        self.state.iterations.append((order.phase, record.iteration_time_s, record.wall_time_s))
        self._order = self._phases.send(record)
        return record

    def evaluate(
        self, num_microbatches: int, spec: TensorSpec, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        """Execute forwards alone at the maximum clock; not counted as training."""
        chunks = self._config.request.num_chunks
        schedule = builders.forward_only(self._num_stages, num_microbatches, chunks)
        self._spec = spec
        top = max(self._gpu.supported_frequencies_mhz)
        self.energy_log.interrupt()
        return self._execute(constant_order(self.state.phase, schedule, top, top), make_work)

    def close(self) -> None:
        """Give the clock back, then finish the energy log; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self.clock.close()
        try:
            # A counter that stands still would leave the last refresh out of the bill.
            self.executor.wait_for_message(self.executor.now_s() + _METER_MARGIN_S)
            self.energy_log.close()
        finally:
            self.meter.close()

    def _execute(
        self, order: IterationOrder, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        frequencies = order.frequency_mhz[self._stage].tolist()
        assert self._spec is not None

        executed: list[str] = []
        units = order.schedule.stages[self._stage]

        def unit_ended(position: int, completion: Completion) -> None:
            executed.append(units[position].label(order.schedule.num_chunks))
            # The wait before a unit runs at that unit's clock; after the last comes the next
            # iteration's first, which mostly is the same as this one's.
            self.clock.request(frequencies[(position + 1) % len(frequencies)], completion)

        self.clock.request(frequencies[0], Done())
        record = execute(
            order.schedule,
            self._stage,
            make_work(order.schedule),
            self._channel,
            self._spec,
            self.executor,
            unit_ended,
        )
        self.executed = executed
        return record

    def _run_phases(self) -> PhaseRun[None]:
        schedule = self._framework_schedule()
        top = max(self._gpu.supported_frequencies_mhz)
        at_top = constant_order(Phase.WARMUP, schedule, top, top)
        records = []
        for _ in range(self._config.warmup_iterations):
            self._say(f"warm-up: {schedule.name} at {top} MHz")
            records.append((yield at_top))
        if self._runs_baseline():
            yield from self._steady(replace(at_top, phase=Phase.STEADY))
        profile = yield from self._profile(schedule)
        self.state.profile = profile
        plan, notes = self._plan(profile)
        self.state.plan, self.state.notes = plan, notes
        for note in notes:
            self._say(note)
        policy = RECONFIGURE_POLICIES.get(self._config.request.reconfigure)
        if policy and self._config.plan_file is None:
            self._say(
                f"reconfigure: {policy.name}, from extra forwards {plan.schedule.extra_forwards}"
            )
            threshold_s = self._threshold_s(schedule, records[1:])
            loop = OnlineReconfigurer(
                plan, policy, threshold_s, self._collectives, self._print_grid
            )
            plan, steps, ended = yield from loop.run()
            self.state.plan = plan
            self.state.reconfigure_steps, self.state.reconfigure_ended = steps, ended
            self._say(f"reconfigure: ended after {steps} steps, since {ended.value}")
        if self._collectives.is_planner and self._config.output_dir:
            plan.write(self._config.output_dir / "plan.json")
        yield from self._steady(IterationOrder(Phase.STEADY, plan.schedule, plan.frequency_mhz))

    def _steady(self, order: IterationOrder) -> PhaseRun[None]:
        self._say(f"steady: {order.schedule.name}")
        while True:
            yield order

    def _framework_schedule(self) -> Schedule:
        if self._config.request.num_chunks > 1:
            return builders.interleaved(
                self._num_stages, self._microbatches, self._config.request.num_chunks
            )
        return builders.one_f_one_b(self._num_stages, self._microbatches)

    def _runs_baseline(self) -> bool:
        """Whether nothing needs to be known: the framework's own order at maximum clock."""
        request = self._config.request
        own_order = request.schedule in ("1f1b", "interleaved")
        return request.policy == "baseline" and own_order and self._config.plan_file is None

    def _profile(self, schedule: Schedule) -> PhaseRun[Profile]:
        if self._config.profile_file is not None:
            profile = read_profile(self._config.profile_file)
            check_stages(profile, self._num_stages)
            return profile
        wait_power_w = self._measure_wait_power()
        profiler = OnlineProfiler(
            schedule,
            self._gpu.supported_frequencies_mhz,
            self._stage,
            self.meter,
            wait_power_w,
            self._collectives,
            self._config.profiler,
            self._say,
        )
        profile = yield from profiler.run(
            Sidecar(gpu=self._gpu.name, num_chunks=schedule.num_chunks)
        )
        if self._collectives.is_planner and self._config.output_dir:
            profile.write(self._config.output_dir / "profile.csv")
        return profile

    def _plan(self, profile: Profile) -> tuple[Plan, tuple[str, ...]]:
        if self._config.plan_file is not None:
            plan = read_plan(self._config.plan_file, profile)
            if plan.schedule.num_microbatches != self._microbatches:
                raise SessionError(
                    f"Plan {self._config.plan_file} is for another number of microbatches",
                    value=plan.schedule.num_microbatches,
                    remedy=f"This job has {self._microbatches}.",
                )
            stall = find_stall(plan.schedule, self._channel.capacity)
            if stall is not None:
                raise SessionError(
                    f"The order of plan {self._config.plan_file} needs a deeper channel than this "
                    f"job has: {stall}",
                    remedy="Plan with --channel-capacity 1, or set CUDA_DEVICE_MAX_CONNECTIONS=8.",
                )
            return plan, ()
        planned = None
        if self._collectives.is_planner:
            powers = profile.sidecar.wait_power_w
            # The loop online replaces the offline one: it starts from the plain policy.
            request = replace(
                self._config.request,
                num_microbatches=self._microbatches,
                reconfigure="default",
                channel_capacity=self._channel.capacity,
                blocking_power_w=(tuple(curve[max(curve)] for curve in powers) if powers else 0.0),
            )
            made = make_plan(profile, request)
            planned = (made.plan, made.notes)
        return self._collectives.from_planner(planned)

    def _threshold_s(self, schedule: Schedule, records: list[StageRecord]) -> float:
        own = [(record.receive_wait_s, record.unit_time_s.min()) for record in records]
        by_stage = [replicas[0] for replicas in self._collectives.gather_by_stage(own)]
        receives = schedule.cross_dependency.reshape(schedule.num_stages, -1) >= 0
        receives[:, 0] = False  # waits for the pipeline to fill
        waits: list[FloatArray] = []
        for index in range(len(records)):
            stages = [stage[index][0][mask] for stage, mask in zip(by_stage, receives, strict=True)]
            waits.append(np.concatenate(stages))
        shortest = min(unit_s for stage in by_stage for _, unit_s in stage)
        return no_bubble_threshold_s(waits, shortest)

    def _measure_wait_power(self) -> float:
        """Power of a GPU blocked in a receive at the clock now set, W.

        Every stage posts a receive from a neighbour that sends only after a while.
        """
        assert self._spec is not None
        receives, sends = (Kind.FORWARD, []) if self._stage else (Kind.BACKWARD, [])
        if self._stage + 1 < self._num_stages:
            sends.append(Kind.FORWARD)
        if self._stage == 1:
            sends.append(Kind.BACKWARD)
        self._channel.expect({receives: 1}, self._spec)
        begin_s = self._collectives.latest(self.executor.now_s())
        self.executor.wait_for_message(begin_s + _METER_MARGIN_S)
        time.sleep(_WAIT_POWER_HOLD_S)  # the neighbour's GPU waits meanwhile
        end_s = begin_s + _WAIT_POWER_HOLD_S
        payload = [
            torch.zeros(shape, dtype=self._spec.dtype, device=self._spec.device)
            for shape in self._spec.shapes
        ]
        for kind in sends:
            self._channel.send(unit(kind, 0), payload, end_s)
        message = self._channel.receive(unit(receives, 0))
        self.executor.wait_for_message(message.sent_s)
        self._channel.end_step()
        margin_s = _METER_MARGIN_S
        window = (begin_s + margin_s, end_s - margin_s)
        return self.meter.energy_j(*window) / (window[1] - window[0])
