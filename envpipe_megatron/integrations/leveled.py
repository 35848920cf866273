"""Keeps a rank's job at the highest level that it can have: makes it again where that is lower.

Limits of its level may show before the first step, in it, or in any later one.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist

from envpipe_megatron import __version__
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.bill import SUMMARY_FORMAT, Bill
from envpipe_megatron.formats.energy import FRAMEWORK, Phase, split_phase
from envpipe_megatron.formats.energy_sums import total_of
from envpipe_megatron.formats.steps import IntervalEnergy, StepEnergy
from envpipe_megatron.integrations.framework_units import UnitFollower, once
from envpipe_megatron.integrations.job import (
    FrameworkJob,
    WithoutEnvPipeError,
    limits_of_replicas,
    open_job,
)
from envpipe_megatron.integrations.levels import Decision, JobError, Level, Limit, decide
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import CollectivesError
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.session import Session

logger = logging.getLogger(__name__)


class LeveledJob:
    """Runs a job from before its first step to after its last, for any framework.

    Every rank makes one, which prints what it does, and calls its methods at the same points of
    the program. Where a GPU cannot be read, there is no `job`: the framework trains without
    EnvPipe, and methods do nothing. So it does while another job of this process has not ended.

    Args:
        options, framework, say: as for `open_job`.
        limits: of the level, the same on all ranks.

    Raises:
        JobError: the level that options name cannot be had.
        EnvPipeError: as `open_job` raises it.
    """

    #: The one of this process that meters its GPU and sets its clock; None without.
    _with_gpu: ClassVar[LeveledJob | None] = None

    def __init__(
        self,
        options: JobOptions,
        framework: FrameworkJob,
        say: Callable[[str], None],
        limits: Iterable[Limit] = (),
    ) -> None:
        self.options = options
        self._open = partial(open_job, framework=framework, say=partial(_say, say))
        self._tokens = framework.bill.get("tokens_per_iteration")
        of_replicas = limits_of_replicas(framework.num_microbatches)
        self._limits = *limits, *of_replicas
        self.decision = self._decide(options.level)
        self.job = self._open_job(options, of_replicas)
        self.closed = self.job is None
        self._failed = False
        #: Begins the step that is under way, in a job that is made again; None between steps.
        self._begin_again: Callable[[], None] | None = None
        #: Gets that step's units, or the step as one, where the framework runs them.
        self._followed: UnitFollower | None = None
        #: Warns of units that come otherwise than planned.
        self._warn = once()
        # Where a signal ends the process at once, as SIGTERM does by default, the guard gives the
        # clock back: a handler would run only when a rank that waits in NCCL for a peer comes back.
        atexit.register(self._give_back)

    @property
    def level(self) -> Level:
        """Return the level at which EnvPipe runs in this job."""
        return self.decision.level

    @property
    def phase(self) -> str:
        """Return the last step's phase; `framework` where the job trains without EnvPipe."""
        return FRAMEWORK if self.job is None else self.session.state.phase.value

    @property
    def session(self) -> Session:
        """Return the job's session; there is none where it trains without EnvPipe."""
        assert self.job is not None
        return self.job

    @property
    def in_step(self) -> bool:
        """True from where a step begins to its end, or to a pause."""
        return self._begin_again is not None

    def say(self, text: str) -> None:
        """Print a line on the planning rank; an empty one nowhere."""
        if text and self.job is not None:
            self.session.parts.say(text)

    def lower(self, found: Sequence[Limit], asked: Level | None = None) -> bool:
        """Make the job again if limits that showed by now, the same on all ranks, are below it.

        What options ask for beyond the new level is left out: it ends no training that has begun. A
        step that has begun begins again. Raises JobError if the level `asked` cannot be had, and
        gives the GPU back: who asks has no job yet to close.
        """
        self._limits = *self._limits, *found
        try:
            decision = self._decide(asked)
        except JobError:
            self.close()
            raise
        if self.job is None or decision.level >= self.level:
            return False
        self.decision = decision
        if self.options.plan is not None:
            self.say(f"the plan {self.options.plan} is not run: it may be of another order")
        files = self.options.files  # not to be written over, or moved, by the job at its new level
        options = self.options = replace(self.options, plan=None, unused_files=files)
        if decision.level < Level.UNITS:
            if options.profile is not None or options.profile_only:
                self.say("no profile is used or written: it is of units, and the level below that")
            self.options = replace(options, profile=None)
            options = replace(self.options, profile_only=False)
        if decision.level is Level.OBSERVE:
            options = replace(options, require_control=False)
        read = self.session.state.given
        self._give_back()
        self.job = self._open_job(options, found)
        if self.job is None:
            self.close()
        elif read is not None:
            self.job.state.given = read[0], None  # its file may have gone since
        if self._begin_again is not None:
            self._begin_again()
        return True

    def begin_step(self, iteration: int | None = None) -> None:
        """Begin the training step of this iteration; by default, of the next one."""
        if self._failed:  # what has followed, such as a restart, is not part of it
            self.pause()
        self._begin_again = partial(LeveledJob.begin_step, self, iteration)
        if not self.closed:
            self.session.begin_step(iteration)

    def follow(self, order: Schedule, specs: StageSpecs | None = None) -> UnitFollower:
        """Open this step's iteration, whose units the framework runs; return what gets them.

        The arguments are those of `Session.open_iteration`.
        """
        run = self.session.open_iteration(order, specs)
        self._followed = UnitFollower(run, self.session.highest_clock, self._warn)
        return self._followed

    def follow_whole(self) -> UnitFollower:
        """Begin this step as one unit."""
        self._followed = UnitFollower.whole_step(self.session)
        return self._followed

    def fail(self) -> None:
        """Drop this step, which has failed; training may go on.

        Peers may be gone: until another step or a pause begins, nothing waits for them.
        """
        self._failed, self._begin_again = True, None
        if self._followed is not None:
            self._followed.fail()
        elif not self.closed:
            self.session.highest_clock()

    def end_step(self) -> None:
        """End this step, whose optimizer has stepped.

        Raises SystemExit if only the profile was asked for, and it is written; a JobError if there
        can be none.
        """
        self._leave_step()
        if self.closed:
            return
        self.session.end_step()
        state = self.session.state
        if self.options.profile_only and state.phase is not Phase.WARMUP:
            if state.profile is not None:
                self.end()
                dist.barrier()  # the planner has written it
                raise SystemExit(0)
            if state.phase is Phase.STEADY:
                raise JobError(f"There is no profile to write: {' '.join(state.notes)}")

    def pause(self) -> None:
        """Pause for what is not training, until the next step begins."""
        self._leave_step()
        if not self.closed:
            self.session.pause()

    def report(self) -> IntervalEnergy:
        """Return the energy since the last report, on an average GPU of the job.

        Every rank calls it after the same step.
        """
        if self.closed:
            return IntervalEnergy({}, None)
        return self.session.energy.gather(self.session.energy.lap())

    def log(self, iteration: int, tensorboard: Any, wandb: Any = None) -> str:
        """Write energy since the last call to the writers, and return it as text for a log line.

        Every rank calls it at the same iteration; all but one without writers.
        """
        report = self.report()
        for name, value in report.scalars().items():
            if tensorboard:
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log({name: value}, iteration)
        return report.line()

    def end(self) -> None:
        """Give the clock back, and print the bill; every rank calls it.

        A step that has not ended stays so: the device may wait for a peer that is gone. Raises
        JobError if only the profile was asked for, and there is none.
        """
        if self.closed:
            return
        profile_only = self.options.profile_only
        with closing(self):
            self.session.close()
            folder = self.session.parts.folder.path
            try:
                lines = end_of_job(self.session, self._tokens, self.options.energy_price or None)
            except CollectivesError:
                raise
            except Exception:  # of any kind: the last checkpoint may be still to be saved
                lines = []
                logger.exception("The bill could not be made, a fault of EnvPipe's")
            if lines and folder is not None and not profile_only:
                lines.append(f"envpipe report {folder} shows where time and energy went")
            for line in lines:
                self.say(line)
        if profile_only and self.session.state.profile is None:
            raise JobError(
                "Training ended before every stage was profiled",
                remedy="Train for more steps (--train-iters).",
            )

    def close(self) -> None:
        """Give the clock back; safe to call twice."""
        self.closed, self._followed = True, None
        atexit.unregister(self._give_back)
        self._give_back()

    def _give_back(self) -> None:
        if LeveledJob._with_gpu is self:
            LeveledJob._with_gpu = None
        if self.job is not None:
            self.job.close()
            self.job.parts.channel.close()

    def _leave_step(self) -> None:
        followed, self._followed = self._followed, None
        self._failed, self._begin_again = False, None
        if followed is not None:
            followed.complete()

    def _decide(self, asked: Level | None) -> Decision:
        checks = self.options.self_check != "off"
        return decide(self._limits, asked, checks=checks)

    def _open_job(self, options: JobOptions, found: Sequence[Limit]) -> Session | None:
        busy, notes = LeveledJob._with_gpu is not None, [*map(str, found)]
        try:
            session = self._open(options, decision=self.decision, notes=notes, busy=busy)
        except WithoutEnvPipeError:
            return None
        LeveledJob._with_gpu = self
        return session


def _say(say: Callable[[str], None], text: str) -> None:
    """Say a line; where a function of the user's cannot, log it."""
    try:
        say(text)
    except Exception:
        logger.exception("A line could not be said: %s", text)


def end_of_job(session: Session, tokens: object, energy_price: float | None = None) -> list[str]:
    """Return the bill of a closed session: lines for the log, on the planning rank only.

    Every rank calls it. It is written to `summary.json` too; if that fails, an error is logged.
    `tokens` are those of an iteration, if they are known; `energy_price` is that of a kWh, in place
    of the environment's.
    """
    own, collectives = session.summary(), session.parts.collectives
    by_stage = collectives.all_to_planner((own, session.energy.sums()))
    if not collectives.is_planner:
        return []
    only_measures = session.options.only_measures()
    ranks, sums = zip(*(rank for replicas in by_stage for rank in replicas), strict=True)
    bill = Bill()
    for of_rank in sums:
        bill.add_sums(of_rank.values())
    bill.facts = {"tokens_per_iteration": tokens, "power": ranks[0]["power"]}
    memory, measured = session.parts.memory.stages, session.energy.baselines.get("")
    baseline = None if measured is None else measured.mean
    phases = {phase: bill.steps(phase) for _, _, phase, _ in bill.phases}
    summary = {
        "format": SUMMARY_FORMAT,
        "created_by": f"envpipe {__version__}",
        "started": session.parts.folder.started,
        "only_measures": only_measures,
        "tokens_per_iteration": tokens,
        "baseline": baseline and _facts(baseline),
        "phases": {phase: _facts(step) for phase, step in phases.items() if step},
        "job": bill.comparison_facts(),
        "memory": None if memory is None else [asdict(stage) for stage in memory],
        "ranks": ranks,
    }
    if session.parts.folder.path is not None:
        path = session.parts.folder.path / "summary.json"
        try:
            replace_files({path: [json.dumps(summary, indent=1, default=str), "\n"]})
        except OSError as error:
            logger.error("%s could not be written: %s", path, error)
    tariff = Tariff.of_environment(os.environ, energy_price)
    lines = list(account_lines(bill, tariff, bill.comparisons(), " in training"))
    lines += _step_line("the latest baseline", baseline)
    for phase, step in phases.items():  # by energy logs: a lap may be of two phases
        lines += _step_line(phase, step)
    steady = total_of(
        own
        for (_, _, phase, _), own in bill.phases.items()
        if split_phase(phase)[0] == Phase.STEADY
    )
    whole_iterations = len(session.executed) == 1
    if only_measures and not whole_iterations and steady.duration_s:
        share = 100 * (1 - steady.shares_s[0] / steady.duration_s)
        lines.append(
            f"in {share:.1f} % of the steady steps' time no forward or backward ran on a GPU"
        )
    lines += dict.fromkeys(note for rank in ranks for note in rank["notes"])
    followed = (rank["clocks"]["followed"] for rank in ranks)
    lines += sorted({each["warning"] for each in followed if each and each["warning"]})
    return lines


def _facts(step: StepEnergy) -> dict[str, Any]:
    return {**asdict(step), "power_w": step.power_w}


def _step_line(phase: str, step: StepEnergy | None) -> Iterator[str]:
    """Yield a line, unless nothing was metered; the framework's first step may be unseen."""
    if step is not None and step.power_w is not None:
        yield (
            f"{phase}: {step.iterations} iterations, {step.time_s:.4f} s and "
            f"{step.energy_j:.1f} J each on an average GPU ({step.power_w:.1f} W)"
        )
