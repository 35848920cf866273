"""One training job under EnvPipe: each iteration executed by the interpreter, phase by phase."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.timeline import TimelineLog
from envpipe_megatron.gpu.base import ClockState, Gpu
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.clocks.rank_clock import RankClock, hold_everywhere
from envpipe_megatron.runtime.energy.agent_link import connect_to_agent, own_log_name
from envpipe_megatron.runtime.energy.log import EnergyLog
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import METER_MARGIN_S, Executor
from envpipe_megatron.runtime.execution.stage_run import (
    StageRun,
    StageWork,
    constant_order,
    execute,
)
from envpipe_megatron.runtime.job.iterations import Batches, Iterations
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.parts import ControlFile, PhaseParts, SessionState, note
from envpipe_megatron.runtime.job.planning import make_room_for_messages
from envpipe_megatron.runtime.job.restarts import JobFolder
from envpipe_megatron.runtime.memory.peak import JobMemory
from envpipe_megatron.runtime.memory.stage import device_memory
from envpipe_megatron.tuning.background import Background

logger = logging.getLogger(__name__)

#: Lines of the timeline that wait for a slow disk; of more, those that come meanwhile are left out.
_MOST_LINES = 256


class Session:
    """Executes iterations for one rank; the clock comes back when it is closed.

    Every rank of the job makes one, together. If a GPU is opened for reading only or not held, no
    rank requests a clock, and the job is `JobOptions.without_control`; energy is still measured.

    For each step of training, a framework calls `begin_step`, `run_iteration` and `end_step`; and
    `pause` before anything that is not training. Times are read when the next iteration's units
    have been handed over, or its phase looks at them before that: the optimizer is launched
    without a wait for the device, and mostly the next iteration too. A framework that runs its
    units itself, in its own order, calls `open_iteration` instead.

    Args:
        gpu: as `open_rank_gpu` opens it.
        make_executor: gets a function that waits for the clock controller.
        say: prints progress, on the planning rank only.

    Raises:
        EnvPipeError: on every rank of the job: control is required and a GPU cannot be held.
    """

    def __init__(
        self,
        options: JobOptions,
        gpu: Gpu,
        make_executor: Callable[[Callable[[], None]], Executor],
        channel: P2PChannel,
        collectives: Collectives,
        *,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._collectives, stage, num_stages = collectives, collectives.stage, len(channel.ranks)
        say = say if collectives.is_planner else lambda text: None
        folder = JobFolder(options.output, collectives, options.files)
        self.state = SessionState(wishes=options.power_budget, notes=folder.notes)
        self._agent = None
        self._timeline: TimelineLog | None = None
        #: What `close` calls once the clock is back, the last first.
        self._closing = contextlib.ExitStack()
        self._closing.callback(folder.close)
        control = None
        if folder.path is not None and collectives.is_planner:
            control = ControlFile(folder.path, options.power_budget)
            self._closing.callback(control.close)
        with contextlib.ExitStack() as half_made:
            half_made.push(self._closing)

            def make_clock(gpu: Gpu) -> RankClock:
                return RankClock(gpu, options.min_dwell_s, on_sample=self._see_clock)

            #: `refused` says why control was given up when the GPUs were to be held, if it was.
            self.clock, gpu, self.refused = hold_everywhere(
                gpu, collectives, make_clock, required=options.require_control
            )
            half_made.callback(self.clock.close)
            self._controlled = not gpu.read_only  # on all ranks alike
            #: What the job does, where it was asked for more than it may too.
            self.options = options if self._controlled else options.without_control()
            keeps = self._controlled or self.options.closed_loop
            folder.resume(self.options, num_stages, gpu, keeps=keeps)
            if folder.found.phases_done:
                done = ", ".join(folder.found.phases_done)
                say(f"resumed: {done} of the job started {folder.found.starts[0]} are done")
            if not self._controlled:
                runs = self.options.order_in_words(options)
                notes = f"A GPU is opened for reading only: {runs}", self.refused
                self.state.notes += tuple(filter(None, notes))
            self._labels: dict[str, object] = {
                **folder.run_label(options.run),
                "node": folder.node,
                "gpu": gpu.name,
                "gpu_uid": gpu.address.uid,
                "clock_backend": gpu.address.backend,
                "rank": channel.ranks[stage],
                "num_ranks": num_stages * collectives.num_replicas,
                "stage": stage,
            }
            about = None if control is None else control.about()
            self._agent = connect_to_agent(gpu, self._labels, collectives, about)
            if self._agent is not None:
                self._labels["node"] = self._agent.node  # the agent's lines use this name
            append = partial(folder.append, "timeline", most=_MOST_LINES)
            self._timeline = timeline = TimelineLog(append, self._labels)
            self._closing.callback(timeline.close)
            if self._agent is not None:  # its bill waits for no disk
                self._closing.callback(self._agent.close)
            self._request = self.clock.request if self._controlled else _unheard
            self.executor = make_executor(self.clock.wait_idle)
            meter = EnergyMeter(gpu)
            self._closing.callback(meter.close)
            half_made.pop_all()
        agent, own_log = self._agent, partial(folder.append, own_log_name())
        log_window = (lambda line: agent.post("window", line=line)) if agent else own_log
        #: The bill of this rank's GPU.
        self.energy = TrainingEnergy(
            meter,
            EnergyLog(meter, log_window, self._labels, with_counter=bool(agent)),
            self.executor.now_s,
            collectives,
            folder.found.baselines,
            self.describe_job,
            compares=not self.options.only_measures(),
        )
        self._closing.callback(self.energy.close)
        #: This rank's, in order; `latest` waits for the last unit.
        self.iterations = Iterations(stage, self.executor, self.energy, timeline)
        self._closing.callback(self.iterations.end)
        self._closing.callback(self.executor.idle, METER_MARGIN_S)
        self._closing.callback(self._say_last)
        #: What the phases work with.
        self.parts = PhaseParts(
            options=self.options,
            state=self.state,
            folder=folder,
            stage=stage,
            num_stages=num_stages,
            gpu=gpu,
            clocks_mhz=collectives.by_stage(
                set(gpu.supported_frequencies_mhz), lambda replicas: set.intersection(*replicas)
            ),
            channel=channel,
            executor=self.executor,
            clock=self.clock,
            meter=meter,
            energy=self.energy,
            collectives=collectives,
            memory=JobMemory(device_memory(), collectives, say),
            say=say,
            control=control,
            background=lambda: self._closing.enter_context(contextlib.closing(Background())),
        )
        self._batches = Batches(self.parts, self.describe_job)
        #: The iteration that has not ended.
        self._running: StageRun | None = None
        self._step_begun = False
        self._pid = os.getpid()
        self._last_run: StageRun | None = None
        #: The lowest clock of any unit since `slowest_share`.
        self._lowest_mhz = self.parts.top_mhz

    @property
    def executed(self) -> list[str]:
        """Return the units of the last iteration, in the order in which this stage ran them."""
        return [] if self._last_run is None else self._last_run.executed

    def begin_step(self, iteration: int | None = None) -> None:
        """Begin a training step: `iteration` may go back after a restart; by default, one more."""
        self.close_iteration()
        self.state.iteration = self.state.iteration + 1 if iteration is None else iteration
        self._step_begun = True
        self.energy.begin_step()

    def run_iteration(
        self,
        num_microbatches: int,
        specs: StageSpecs,
        make_work: Callable[[Schedule], StageWork],
        longest: StageSpecs | None = None,
    ) -> None:
        """Execute one training iteration in the job's present phase.

        If a phase has ended, the work between two phases (measurements) comes first. The number of
        microbatches may change: see `Batches`.

        Args:
            num_microbatches: M of this iteration.
            specs: what messages carry.
            make_work: of the order that runs.
            longest: what those of any iteration carry at most, for which there is to be memory.

        Raises:
            MemoryFullError: on all ranks, messages have no memory; no unit has run.
            EnvPipeError: a plan for another order, or an earlier iteration failed.
            ChannelError: a neighbour is gone or silent.
        """
        run = self._open(num_microbatches, longest or specs, None)
        work = make_work(run.order.schedule)
        watch = self.parts.memory.watch() if run.order.watched else None
        execute(work, run, self.parts.channel, specs, watch)
        self._running = run
        self.close_iteration()

    def make_room(self, specs: StageSpecs) -> None:
        """Have memory for messages of other shapes than before; every rank calls it.

        Raises MemoryFullError on all ranks alike.
        """
        if self._batches.now is not None:
            order = self._batches.now.order.schedule
            make_room_for_messages(replace(self.parts, specs=specs), order)

    @property
    def may_split(self) -> bool:
        """True if orders may come that split backwards."""
        return self.options.may_split and not self.state.whole

    def split_no_more(self, why: str) -> None:
        """Have whole backwards only; every rank calls it, before the first iteration."""
        self.state.whole = why
        note(self.parts, f"Backwards stay whole: {why}")

    def rehearse(
        self, order: Schedule, specs: StageSpecs, make_work: Callable[[Schedule], StageWork]
    ) -> None:
        """Execute an order once, apart from the job's phases: no clock changes, nothing is kept.

        Raises ChannelError if a neighbour is gone or silent.
        """
        at_top = constant_order(Phase.WARMUP, order, self.parts.top_mhz)
        self.iterations.catch_up()
        channel = self.parts.channel
        run = StageRun(at_top, self.parts.stage, self.executor, _unheard, channel.check)
        execute(make_work(order), run, channel, specs)
        _ = run.end().end_s  # waits for the last unit

    def open_iteration(self, own_order: Schedule, specs: StageSpecs | None = None) -> StageRun:
        """Begin an iteration whose units and messages the framework runs; as `run_iteration`.

        A unit's messages need nothing that the framework does after the iteration's last unit: the
        times of the iteration before are read there. The number of microbatches may change: see
        `Batches`. The `order` of what is returned is to be run.

        Args:
            own_order: the framework's own order of units, the same in every iteration of as many
                microbatches.
            specs: shapes of its messages, where another order may run: a microbatch in flight
                holds one at least.
        """
        specs = specs or StageSpecs({}, {})
        run = self._open(own_order.num_microbatches, specs, own_order)
        run.all_ended = self.iterations.catch_up
        if self.options.reorders and run.order.watched:
            run.unit_ended = self.parts.memory.watch()
        run.begin()
        self._running = run
        return run

    def close_iteration(self) -> None:
        """End an iteration of which all units have run; its times are read later.

        Raises ChannelError if a neighbour is gone or silent.
        """
        run = self._running
        if run is None or run.next_unit is not None:
            return
        self._running = None
        assert self._batches.now is not None
        # Once control has ended, requests are dropped.
        controlled = self._controlled and not (self.clock.error or self.clock.given_back)
        name = self._batches.now.name
        self.iterations.add(self.state.iteration, run, name, controlled=controlled)
        self._batches.unfinished = False

    def describe_job(self, facts: Mapping[str, Any]) -> None:
        """Add facts about the job to the bill of the node's agent, if there is one.

        Facts are `tokens_per_iteration`, `samples_per_iteration`, `model`, `microbatch_size`,
        `type`, `scheduling`, `reconfigure`, `level`, `predicted` (saving and slowdown of the plan),
        `power` (how a power budget is kept) and `notes`, of JSON's types.
        """
        if self._agent is not None and self._collectives.is_planner:
            self._agent.post("job", facts=facts)

    def _see_clock(self, time_s: float, state: ClockState) -> None:
        """Take in what the watch saw of the clock, on its own thread."""
        if self._timeline is not None:
            seen = state.requested_mhz, state.observed_mhz, state.throttle_reasons
            self._timeline.add_clock(time_s, *seen)
        if self._agent is not None:
            self._agent.clock(state)

    def end_step(self) -> None:
        """End the last iteration's step, after the optimizer, whose energy counts to this step.

        If none was run since `begin_step`, the framework ran the step by itself, which is billed as
        phase `framework`.
        Raises ChannelError if a neighbour is gone or silent.
        """
        self.close_iteration()
        if self._step_begun:  # the framework may be ahead of an iteration that is held back
            self.iterations.catch_up()
        self.energy.end_step(self.state.iteration)
        self._step_begun = False

    def pause(self) -> None:
        """Prepare for what is not training: it runs at the highest clock, not billed.

        That clock is waited for, as `RankClock.confirm` does.
        """
        self.close_iteration()
        self.iterations.note_pause()
        self.energy.pause()
        self.highest_clock()
        self.clock.confirm()

    def highest_clock(self) -> None:
        """Ask for it: what follows is no iteration that is planned for."""
        self._request(self.parts.top_mhz, None)

    def slowest_share(self) -> float:
        """Return the lowest clock of a unit since the last call, as a share of the highest.

        Of all GPUs of the job; 1 where no clock is set.
        """
        last, lowest_mhz = self._last_run, self._lowest_mhz
        self._lowest_mhz = self.parts.top_mhz if last is None else last.order.slowest_mhz
        sets = self._controlled and self.parts.gpu.changes_clock
        return lowest_mhz / self.parts.top_mhz if sets else 1.0

    def summary(self) -> dict[str, Any]:
        """Return the job so far, as this rank knows it; complete once the session is closed.

        Keys: `rank`, `stage`, `phase`, `iteration`, `notes`, `reconfigure` (`steps`, `ended`),
        `power` (how a power budget was kept) and `clocks`.
        """
        state = self.state
        return {
            "rank": self._labels["rank"],
            "stage": self.parts.stage,
            "phase": state.phase.value,
            "iteration": state.iteration,
            "notes": [*state.notes],
            "reconfigure": {"steps": state.reconfigure_steps, "ended": state.reconfigure_ended},
            "power": state.power,
            "clocks": self.clock.summary(),
        }

    def close(self) -> None:
        """Give the clock back, then finish the energy log; safe to call twice.

        An iteration that the device has not ended is left out: peers may be gone, so nothing is
        waited for.
        `clocks.jsonl` gets the summary of the rank's clock. In a forked child, nothing happens.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:  # all of them, even if some fail, but once
            # The second time too: a signal may have interrupted the first one.
            self.clock.close()

    def _say_last(self) -> None:
        if self.state.power is not None:  # the bill heard of it a while ago
            self.describe_job({"power": self.state.power})
        summary = self.clock.summary()
        followed = summary["followed"]
        if followed and followed["warning"]:
            logger.warning("%s", followed["warning"])
        self.parts.folder.append("clocks", {**self._labels, **summary})

    def _open(
        self, num_microbatches: int, specs: StageSpecs, own_order: Schedule | None
    ) -> StageRun:
        self.close_iteration()
        if not self._step_begun:
            self.state.iteration += 1
        self._step_begun = False
        order = self._batches.next_order(
            self.iterations.last_record, num_microbatches, specs, own_order
        )
        self.iterations.catch_up_before(order.schedule)
        self.state.phase = order.phase
        self.clock.given_back = order.phase is Phase.OFF
        self._batches.unfinished = True  # until it is closed
        like, check = None, self.parts.channel.check
        if own_order is not None and order.parking is None and not self.clock.waits:
            like = self.iterations.like(order)
        run = StageRun(order, self.parts.stage, self.executor, self._request, check, like)
        self._last_run = run
        self._lowest_mhz = min(self._lowest_mhz, order.slowest_mhz)
        self._request(run.frequencies_mhz[0], None)
        return run


def _unheard(frequency_mhz: int, delay_s: float | None) -> None:
    """Ignore a request where no clock is to change."""
