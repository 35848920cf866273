"""One training job under EnvPipe: each iteration executed by the interpreter, phase by phase."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from envpipe_megatron import builders
from envpipe_megatron.energy_file import append_line
from envpipe_megatron.gpu.base import Gpu
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.runtime.channel import P2PChannel, TensorSpec
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.completion import Completion, Done
from envpipe_megatron.runtime.energy_log import EnergyLog
from envpipe_megatron.runtime.energy_meter import EnergyMeter
from envpipe_megatron.runtime.executor import Executor, StageRecord
from envpipe_megatron.runtime.interpreter import StageWork, execute
from envpipe_megatron.runtime.memory import JobMemory, MemorySource, device_memory
from envpipe_megatron.runtime.memory_limit import check_memory_is_known
from envpipe_megatron.runtime.orders import IterationOrder, PhaseRun, constant_order
from envpipe_megatron.runtime.phases import (
    Job,
    SessionConfig,
    SessionError,
    SessionState,
    run_phases,
)
from envpipe_megatron.runtime.rank_clock import RankClock
from envpipe_megatron.schedule import Schedule

logger = logging.getLogger(__name__)

__all__ = ["Session", "SessionConfig", "SessionError", "SessionState"]


class Session:
    """Executes iterations for one rank; the clock comes back when it is closed.

    Every rank of the job makes one, together. Where a GPU is opened for reading alone, the job runs
    the framework's own order and no rank asks for a clock; energy is measured all the same.

    Args:
        config: what the job wants.
        gpu: this rank's GPU, as `rank_gpu.open_rank_gpu` opens it.
        make_executor: makes the executor, given what lets it wait for the clock controller.
        channel: to the neighbour stages.
        collectives: to all ranks.
        stage: this rank's stage.
        num_stages: p.
        rank: this rank, for the energy log.
        labels: what else each line of the energy log says.
        say: told of progress, on the planning rank alone.
        print_grid: told of reconfigure grids, on the planning rank alone.
        guarded: whether the node's guard holds the GPU; by default where it is real.
        memory: of this rank's device; by default of the CUDA device in use, if there is one.

    Raises:
        MemoryUnknownError: a limit by memory that nobody knows.
        GpuError: another job holds the GPU, or no guard could be had.
        OSError: there can be no output folder.
        CollectivesError: another rank of the job raised one of these.
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
        guarded: bool | None = None,
        memory: MemorySource | None = None,
    ) -> None:
        self._gpu = gpu
        self._channel = channel
        self._collectives = collectives
        self._stage = stage
        self._num_stages = num_stages
        silent: Callable[[str], None] = lambda text: None  # noqa: E731 - a null object
        self._say = say if collectives.is_planner else silent
        self._print_grid = print_grid if collectives.is_planner else silent
        self.state = SessionState()
        memory = memory or device_memory()
        self._memory = JobMemory(memory, stage, collectives, self._say)
        # What can fail comes before the GPU is held: nobody could close a session that is not made.
        controllable = collectives.everywhere(
            lambda: _prepared(config, gpu, memory, reads_files=collectives.is_planner)
        )
        everyone = collectives.gather_by_stage(controllable)
        self._controlled = all(all(stage) for stage in everyone)
        self._config = config if self._controlled else _without_control(config)
        if not self._controlled:
            self.state.notes = (
                "A GPU is opened for reading alone: the framework's order at baseline clocks",
            )
        self._rank_clock = _made_everywhere(collectives, gpu, config, guarded)
        self.clock = self._rank_clock.controller
        try:
            self.executor = make_executor(self.clock.wait_idle)
            self.meter = EnergyMeter(gpu)
        except BaseException:
            self._rank_clock.close()
            raise
        log = config.output_dir / "energy.jsonl" if config.output_dir else None
        own_labels: dict[str, object] = {
            "node": socket.gethostname(),
            "gpu": gpu.name,
            "gpu_uid": gpu.address.uid,
            "rank": rank,
            "stage": stage,
        }
        self._labels = {**(labels or {}), **own_labels}
        self.energy_log = EnergyLog(self.meter, log, self._labels)
        self._phases: PhaseRun[None] | None = None
        self._order: IterationOrder | None = None
        self._microbatches = 0
        self._broken = False
        self._closed = False
        #: The units of the last iteration, in the order in which this stage ran them.
        self.executed: list[str] = []

    @property
    def pipeline_ranks(self) -> list[int]:
        """Global rank of each stage of this rank's pipeline."""
        return self._channel.ranks

    def run_iteration(
        self, num_microbatches: int, spec: TensorSpec, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        """Execute one training iteration in the job's present phase.

        Raises:
            SessionError: another number of microbatches than before, or an earlier iteration
                failed.
            ChannelError: a neighbour is gone or silent.
        """
        if self._phases is None:
            self._microbatches = num_microbatches
            self._phases = run_phases(
                Job(
                    self._config,
                    self.state,
                    self._stage,
                    self._num_stages,
                    num_microbatches,
                    spec,
                    self._gpu,
                    self._channel,
                    self.executor,
                    self.clock,
                    self.meter,
                    self._collectives,
                    self._say,
                    self._print_grid,
                    self._memory,
                )
            )
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
        record = self._execute(order, spec, self._memory.watched(make_work))
        self.energy_log.add(
            order.phase.value,
            self.state.iteration,
            record,
            order.schedule.receives[self._stage],
        )
        self.state.iterations.append((order.phase, record.iteration_time_s, record.wall_time_s))
        self._broken = True  # until the phases have taken it in
        self._order = self._phases.send(record)
        self._broken = False
        return record

    def evaluate(
        self, num_microbatches: int, spec: TensorSpec, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        """Execute forwards alone at the maximum clock; not counted as training."""
        schedule = _forward_only(
            self._num_stages, num_microbatches, self._config.request.num_chunks
        )
        top = max(self._gpu.supported_frequencies_mhz)
        self.energy_log.interrupt()
        return self._execute(constant_order(self.state.phase, schedule, top, top), spec, make_work)

    def clock_summary(self) -> dict[str, Any]:
        """How this rank's clock was controlled and whether it followed; see `RankClock.summary`."""
        return self._rank_clock.summary()

    def close(self) -> None:
        """Give the clock back, then finish the energy log; safe to call twice.

        The output folder gets a line a rank in `clocks.jsonl`: `clock_summary`.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as last:  # each of these, whatever fails before
            last.callback(self.meter.close)
            last.callback(self.energy_log.close)
            last.callback(self.executor.let_counter_refresh)
            last.callback(self._tell_of_clocks)
            self._rank_clock.close()

    def _tell_of_clocks(self) -> None:
        summary = self.clock_summary()
        followed = summary["followed"]
        if followed and followed["warning"]:
            logger.warning("%s", followed["warning"])
        if self._config.output_dir:
            path = self._config.output_dir / "clocks.jsonl"
            try:
                append_line(path, {**self._labels, **summary})
            except OSError as error:
                logger.error("%s could not be written: %s", path, error)

    def _request(self, frequency_mhz: int, after: Completion) -> None:
        if self._controlled:
            self.clock.request(frequency_mhz, after)

    def _execute(
        self, order: IterationOrder, spec: TensorSpec, make_work: Callable[[Schedule], StageWork]
    ) -> StageRecord:
        if self._broken:
            raise SessionError(
                "An earlier iteration failed, so messages and phases do not match any more",
                remedy="Close this session and make a new one on every rank.",
            )
        frequencies = order.frequency_mhz[self._stage].tolist()
        executed: list[str] = []
        units = order.schedule.stages[self._stage]

        def unit_ended(position: int, completion: Completion) -> None:
            executed.append(units[position].label(order.schedule.num_chunks))
            # The wait before a unit runs at that unit's clock; after the last comes the next
            # iteration's first, which mostly is the same as this one's.
            self._request(frequencies[(position + 1) % len(frequencies)], completion)

        self._broken = True
        self._request(frequencies[0], Done())
        record = execute(
            order.schedule,
            self._stage,
            make_work(order.schedule),
            self._channel,
            spec,
            self.executor,
            unit_ended,
        )
        self._broken = False
        self.executed = executed
        return record


def _prepared(
    config: SessionConfig, gpu: Gpu, memory: MemorySource | None, *, reads_files: bool
) -> bool:
    """Whether this rank's clock may be asked for, once there is a folder for what it measures."""
    if config.plan_file is None and (reads_files or config.profile_file is None):
        check_memory_is_known(config.request, config.profile_file, memory)
    if config.output_dir:
        config.output_dir.mkdir(parents=True, exist_ok=True)
    return gpu.address.backend != "none"


def _made_everywhere(
    collectives: Collectives, gpu: Gpu, config: SessionConfig, guarded: bool | None
) -> RankClock:
    """A clock on every rank, or on none: nobody trains beside a rank that was refused."""
    made: list[RankClock] = []
    try:
        collectives.everywhere(
            lambda: made.append(
                RankClock(gpu, config.min_dwell_s, relock=config.relock, guarded=guarded)
            )
        )
    except BaseException:
        for clock in made:
            clock.close()
        raise
    return made[0]


def _without_control(config: SessionConfig) -> SessionConfig:
    """The same job by the framework's own order, at whatever clocks there are."""
    chunks = config.request.num_chunks
    request = PlanRequest(
        config.request.num_microbatches,
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
    )
    return replace(config, request=request, profile_file=None, plan_file=None)


@lru_cache(maxsize=4)
def _forward_only(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Checked once, not at every evaluation."""
    return builders.forward_only(num_stages, num_microbatches, num_chunks)
