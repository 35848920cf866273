"""The iterations of a job: what each runs (`Batches`), and how it is kept (`Iterations`).

A job has its phases for each size of its batches. What units cost does not depend on how many there
are, so one profile serves all; but what a step takes and which clocks are best does. So each number
of microbatches has a warm-up, which is its baseline, a plan, and the loop that corrects that by
waits of its own iterations. Its phases wait while iterations of another number run, except for a
profile, whose iterations must follow each other: that is begun anew. Called by `session`.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase, phase_in_batch
from envpipe_megatron.formats.timeline import TimelineLog
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import Executor, StageRecord
from envpipe_megatron.runtime.execution.stage_run import (
    IterationOrder,
    PhaseRun,
    StageRun,
    constant_order,
)
from envpipe_megatron.runtime.job.parts import PhaseParts, note
from envpipe_megatron.runtime.job.phases import run_phases
from envpipe_megatron.runtime.job.planning import predicted

#: What a job says that is asked for a power budget and cannot keep one.
_NO_POWER = "The power budget is not kept: this job chooses no clocks"
#: A job of weeks must not grow.
_KEPT_ITERATIONS = 10_000
#: The bill hears of power so often, s, and of another budget at once.
_POWER_S = 60.0
#: Notes of when the job was off that the bill keeps, of the last times.
_KEPT_NOTES = 50
#: How often the planning rank is asked what an operator asks, and the least iteration for it, s.
_HEARD_S, _LEAST_STEP_S = 1.0, 1e-3


@dataclass
class Batch:
    """Iterations of one number of microbatches, and what runs next.

    Args:
        name: empty for the batch of full size, see `phase_in_batch`.
        order: what the next one runs, unless the job is off.
        off: what it runs then, the framework's order.
    """

    name: str
    phases: PhaseRun[None]
    order: IterationOrder
    off: IterationOrder


class Batches:
    """The phases of each size of batch that has come, and what they run next.

    All ranks turn to the same ones. While an operator has the job off, phases wait.

    Args:
        describe_job: called with new notes, and with what a new plan predicts.
    """

    def __init__(self, job: PhaseParts, describe_job: Callable[[Mapping[str, Any]], None]) -> None:
        self._job = job
        self._describe_job = describe_job
        self._switch, self._described_notes = Switch(job), tuple[str, ...]()
        #: The one whose iterations run now; None before the first.
        self.now: Batch | None = None
        self._waiting: dict[int, Batch] = {}
        #: When the bill hears again how a power budget is kept, on the GPU's time base, and of
        #: which budget it has heard.
        self._power_due_s = 0.0
        self._budget_w: float | None = None
        #: Whether an iteration, or what phases do after it, has begun and not ended: no other may
        #: begin. Whoever runs iterations says so too.
        self.unfinished = False

    def next_order(
        self,
        last: StageRecord | None,
        num_microbatches: int,
        specs: StageSpecs,
        own_order: Schedule | None,
    ) -> IterationOrder:
        """Return what the next iteration runs, after the phases got the last one's record.

        Batches of another size than the one that the job is about are billed apart, and their plans
        are kept in files of their own.
        Raises EnvPipeError if an earlier iteration failed.
        """
        if self.unfinished:
            raise EnvPipeError(
                "An earlier iteration failed, so messages and phases do not match any more",
                remedy="Close this session and make a new one on every rank.",
            )
        state = self._job.state
        was_off, is_off = state.wishes.off, self._switch.hear()
        if self.now is not None and last is not None and not was_off:
            self.unfinished = True  # even if the phases raise
            self._advance(self.now, last)
        if state.notes != self._described_notes:
            self._described_notes = state.notes
            self._describe_job({"notes": [*state.notes]})
        left = self.now
        if left is not None and left.off.schedule.num_microbatches == num_microbatches:
            return left.off if is_off else left.order
        if left is not None:
            state.several_sizes = True
            # A sweep that is cut short is not gone on with: later there may be a profile.
            swept = left.order.phase is Phase.PROFILE and state.profile is None
            if self._job.options.closed_loop or not swept:
                self._waiting[left.off.schedule.num_microbatches] = left
        self.now = self._waiting.pop(num_microbatches, None)
        if self.now is None:
            apart = own_order is not None and own_order.placement is Placement.APART
            full = apart or num_microbatches == self._job.num_microbatches
            name = "" if full else f"m{num_microbatches}"
            parts = replace(
                self._job.of_batch(name, num_microbatches), specs=specs, own_order=own_order
            )
            phases = run_phases(parts)
            order = next(phases)
            off = constant_order(Phase.OFF, parts.schedule, parts.top_mhz)
            off = replace(off, times_units=False)
            self.now = Batch(name, phases, order, off)
        return self.now.off if is_off else self.now.order

    def _advance(self, batch: Batch, last: StageRecord) -> None:
        """Let a batch's phases look at its last iteration, and say what the next one runs."""
        job, ended = self._job, batch.order.phase
        begin_s, plan = job.executor.now_s(), job.state.plan
        if ended not in (Phase.WARMUP, Phase.BASELINE):
            job.energy.settle_baseline(batch.name)
            job.folder.keep_baselines(job.energy.baselines)
        batch.order = batch.phases.send(last)
        if job.state.plan is not plan and not batch.name and job.collectives.is_planner:
            self._describe_job({"predicted": predicted(job.state.plan)})
        power = job.state.power
        if power is not None and (
            begin_s >= self._power_due_s or power["budget_w"] != self._budget_w
        ):
            self._describe_job({"power": power})
            self._power_due_s, self._budget_w = begin_s + _POWER_S, power["budget_w"]
        if batch.order.phase is not ended:
            job.energy.add_between_phases(job.state.iteration, begin_s)


class Switch:
    """Turns the whole job off and on again, on all ranks in the same iteration.

    Args:
        job: this rank's parts; without a folder only its options are heard.
    """

    def __init__(self, job: PhaseParts) -> None:
        self._job = job
        #: Iterations before the planning rank is asked again, those since, and when it was, s.
        self._pause, self._since, self._asked_s = 0, 0, -math.inf
        self._heard = NO_WISHES
        #: The notes of when it was off, the last one last.
        self._off: list[str] = []

    def hear(self) -> bool:
        """Return whether the iteration that begins is off; every rank calls it before each."""
        state, collectives, now = self._job.state, self._job.collectives, ""
        self._since += 1
        if self._job.folder.path is not None and self._since > self._pause:
            said = self._said() if collectives.is_planner else None
            state.wishes, self._pause, now = collectives.from_planner(said)
            self._since = 0
        before, self._heard = self._heard, state.wishes
        if before.off != state.wishes.off:
            self._note_turn(now)
        budget = state.wishes.power_budget
        if budget not in (None, before.power_budget) and not self._job.options.keeps_power:
            note(self._job, _NO_POWER)
        return state.wishes.off

    def _said(self) -> tuple[Wishes, int, str]:
        """Return wishes, iterations until the planning rank says them again, and the time."""
        assert self._job.control is not None
        now_s = self._job.executor.now_s()
        step_s = (now_s - self._asked_s) / self._since
        self._asked_s = now_s
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return self._job.control.wishes, int(_HEARD_S / max(step_s, _LEAST_STEP_S)), now

    def _note_turn(self, now: str) -> None:
        state, gone = self._job.state, self._off[: 1 - _KEPT_NOTES]
        text = f"Off from iteration {state.iteration} ({now})"
        if not state.wishes.off:
            gone = self._off[-1:]
            text = f"{gone[0]} to {state.iteration - 1} ({now})"
        self._off = [*(said for said in self._off if said not in gone), text]
        state.notes = tuple(said for said in state.notes if said not in gone)
        note(self._job, text)


class Iterations:
    """Bills the iterations of one rank, and writes each down as soon as its times may be read."""

    def __init__(
        self, stage: int, executor: Executor, energy: TrainingEnergy, timeline: TimelineLog
    ) -> None:
        self._stage = stage
        self._executor = executor
        self._energy = energy
        self._timeline = timeline
        #: The last one that has ended; the phases get it when the next one begins.
        self.last_record: StageRecord | None = None
        #: The one whose times are to be read while the next one runs, and what writes it down.
        self._late: tuple[StageRun, Callable[[], None]] | None = None
        #: The last one whose units were timed, all of them, and what it ran.
        self._timed: tuple[IterationOrder, StageRecord] | None = None
        self._kept: deque[tuple[Phase, float]] = deque(maxlen=_KEPT_ITERATIONS)

    @property
    def latest(self) -> Sequence[tuple[Phase, float]]:
        """Return phase and time, s, of each.

        Waits for the last unit, if its times are not read yet.
        """
        self.catch_up()
        return self._kept

    def add(self, number: int, run: StageRun, batch: str, *, controlled: bool) -> None:
        """Add an iteration whose units have all run; its times are read while the next one runs.

        Args:
            number: of the iteration.
            batch: name of the batch whose iteration it is.
            controlled: whether clocks are still asked for.

        Raises ChannelError if a neighbour is gone or silent.
        """
        self.catch_up()
        record = self.last_record = run.end(number)
        if run.times_units and run.whole:
            self._timed = run.order, record
        phase, receives = phase_in_batch(run.order.phase, batch), run.order.schedule.receives
        self._energy.add(phase, number, record, receives[self._stage], run.same_work)
        clocks_mhz = run.frequencies_mhz if controlled else None

        def write_down() -> None:
            self._energy.catch_up()
            if run.whole:
                span_s = record.begin_s, record.iteration_time_s
                units_s = (record.start_s, record.end_s) if run.times_units else None
                self._timeline.add(phase, number, span_s, units_s, lambda: run.executed, clocks_mhz)
            self._kept.append((run.order.phase, record.iteration_time_s))

        self._late = run, write_down

    def catch_up(self) -> None:
        """Write the last iteration down, if that was left until its times may be read."""
        if self._late is not None:
            (_, write_down), self._late = self._late, None
            write_down()

    def like(self, order: IterationOrder) -> StageRecord | None:
        """Return an iteration with the times of units that the next one takes; None: time them."""
        if order.times_units or self._timed is None:
            return None
        timed, record = self._timed
        same = timed.schedule is order.schedule and timed.frequency_mhz is order.frequency_mhz
        return record if same else None

    def catch_up_before(self, order: Schedule) -> None:
        """Catch up if another order follows: it may replace memory with messages of a late one."""
        if self._late is not None and self._late[0].order.schedule is not order:
            self.catch_up()

    def note_pause(self) -> None:
        """Note that no iteration follows at once: the last record says that one does."""
        self.catch_up()
        if self.last_record is not None:
            self.last_record = replace(self.last_record, followed=False)

    def end(self) -> None:
        """Write the last one down, if it has ended: peers may be gone, so nothing is waited for."""
        self._executor.wait_no_more()
        with contextlib.suppress(Exception):  # the device may have failed
            if self._late is not None and self._late[0].has_ended:
                self.catch_up()
