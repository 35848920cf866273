"""A rank's training by megatron-core's functions: what the hooks of each framework on it share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from envpipe_megatron.integrations.hooking import check_profiled
from envpipe_megatron.integrations.job import (
    Job,
    close_at_exit,
    limits_of_ranks,
    limits_of_replicas,
    say_line,
)
from envpipe_megatron.integrations.levels import Decision, Level, Limit, decide, stands_against
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.job import (
    limits_of,
    make_job,
    make_stand_in,
    num_microbatches_of,
    what_stalls,
)
from envpipe_megatron.integrations.megatron.kept import KeptOrder, WholeSteps
from envpipe_megatron.integrations.megatron.limits import POSTED_AHEAD
from envpipe_megatron.integrations.options import Options
from envpipe_megatron.integrations.reporting import IntervalReport
from envpipe_megatron.runtime.memory.peak import MemoryFullError


class Training:
    """What a rank does from before its first step to after its last, at the job's level.

    Every rank makes one, at the same point of the program.

    Args:
        args: the job's arguments, by the names that Megatron-LM has for them.
        limits: what stands against which level, besides what the model has.
        model: the chunks of this rank.
        pipeline_group: the ranks of its pipeline.

    Raises:
        LevelError: the level that options name cannot be had.
        WithoutEnvPipeError, EnvPipeError: as `Job` raises them.
    """

    #: Why the job goes on at a lower level behind this step.
    _why_lower: str | None = None

    def __init__(
        self,
        args: argparse.Namespace,
        options: Options,
        limits: Iterable[Limit],
        model: Sequence[Any],
        pipeline_group: dist.ProcessGroup,
    ) -> None:
        self._args, self._options, self._model = args, options, model
        self._pipeline_group = pipeline_group
        of_ranks = limits_of_ranks(limits_of(model))
        self._limits = *limits, *limits_of_replicas(num_microbatches_of(args)), *of_ranks
        self._decision = self._decide(options.level)
        self._checked = bool(self._decision.to_check) or options.self_check == "always"
        self.job = self._make_job()
        close_at_exit(self.close)
        #: What runs in place of Megatron's own function, once there is one.
        self._stand_in: ForwardBackward | KeptOrder | WholeSteps | None = None
        self._replaced: Callable[..., Any] | None = None
        if self._decision.level is Level.ORDER and (why := self._against_order()):
            self._lower(options.level, why)

    def announce(self) -> None:
        """Say what the job does."""
        if self.job.collectives.is_planner:
            say_line(f"{self._decision}; {self.job.banner()}")
            steps = self._args.train_iters
            if steps is not None and steps <= self.job.options.baseline_steps:
                say_line("training ends within its baseline steps, so nothing will be planned")

    def in_place_of(self, framework_function: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in place of Megatron's forward-backward function.

        The first such function is that of the model that is trained; another one stays.
        """
        if self._stand_in is None:
            self._replaced = framework_function
            self._stand_in = self._make_stand_in(framework_function)
        return (
            self._forward_backward if framework_function is self._replaced else framework_function
        )

    def begin_step(self, iteration: int) -> None:
        """The training step of this iteration begins; the first is 0."""
        self.job.session.begin_step(iteration)
        if self._stand_in is not None:
            self._stand_in.begin_step()

    def end_step(self, *, skipped: bool) -> None:
        """The iteration ends after the optimizer, which may have skipped: gradients overflowed.

        Raises SystemExit if only the profile was asked for, and it is written; WithoutEnvPipeError,
        on all ranks, if the job was to go on at a lower level and cannot: nothing else is to be
        called then, and Megatron's own function runs.
        """
        if self._stand_in is not None:
            self._stand_in.end_step(skipped=skipped)
        self.job.session.end_step()
        if isinstance(self._stand_in, ForwardBackward) and self._stand_in.failed:
            self._why_lower = self._stand_in.failed
        if self._why_lower is not None:
            self._lower(None, self._why_lower)
            self._why_lower = None
            self.announce()
        if self.job.has_its_profile():
            self.end()
            dist.barrier()  # the planner has written it
            raise SystemExit(0)

    def log(self, iteration: int, tensorboard: Any, wandb: Any, meter: Any = None) -> str:
        """Energy since the last call: scalars for the writers, text for a log line.

        Every rank calls it at the same iteration; all but one without writers. `meter` is that of
        OpenTelemetry, if it is on.
        """
        report = IntervalReport.gather(self.job.session)
        for name, value in report.scalars().items():
            if tensorboard:
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log({name: value}, iteration)
        if meter is not None:
            report.record(meter)
        return report.line()

    def pause(self) -> None:
        """Something that is not training follows, until the next iteration begins."""
        self.job.session.pause()

    def end(self) -> None:
        """Give clocks back, and print the bill; every rank calls it."""
        self.job.end()
        self.close()
        check_profiled(self.job.options, self.job.session.state.profile is not None)

    def close(self) -> None:
        """Give the clock back; safe to call twice."""
        self.job.close()

    def _decide(self, asked: Level | None, *more: Limit) -> Decision:
        checks = self._options.self_check != "off"
        return decide(self._args, (*self._limits, *more), asked, checks=checks)

    def _against_order(self) -> str | None:
        """What the channel has against level `order`, alike on all ranks."""
        if self._decision.to_check and self.job.channel.posts_ahead:
            return POSTED_AHEAD
        return what_stalls(self._args, self._model, self.job)

    def _lower(self, asked: Level | None, why: str) -> None:
        """Go on at level `units`, with a job of that level; every rank does.

        Raises LevelError if `asked` is level `order`.
        """
        features = ", ".join(limit.feature for limit in self._decision.to_check) or "this job"
        limit = stands_against(features, Level.UNITS, why)
        self._decision = self._decide(asked, limit)
        if self._options.plan is not None and self.job.collectives.is_planner:
            say_line(f"the plan {self._options.plan} is not run: it may be of another order")
        self._options = replace(self._options, plan=None)
        self.job.close()
        self._stand_in = None  # unless there is another job
        self.job = self._make_job()
        if self._replaced is not None:
            self._stand_in = self._make_stand_in(self._replaced)

    def _make_job(self) -> Job:
        level, group = self._decision.level, self._pipeline_group
        return make_job(self._args, self._options, level, self._model, group)

    def _make_stand_in(
        self, framework_function: Callable[..., Any]
    ) -> ForwardBackward | KeptOrder | WholeSteps:
        return make_stand_in(
            self._args,
            self._model,
            self._decision,
            self.job,
            framework_function,
            checked=self._checked,
        )

    def _forward_backward(self, **arguments: Any) -> Any:
        """What Megatron calls in each step; what it gets once may stand for another later."""
        assert self._replaced is not None
        if self._stand_in is None:
            return self._replaced(**arguments)
        try:
            return self._stand_in(**arguments)
        except MemoryFullError as error:  # on all ranks, and no unit has run
            self._why_lower = str(error)
            return self._replaced(**arguments)
