"""A rank's training by megatron-core's functions: what the hooks of each framework on it share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config

from envpipe_megatron.core.channel_model import find_stall
from envpipe_megatron.core.kinds import ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.integrations.job import Placement, limits_of_ranks, say_line
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import Level, Limit, stands_against
from envpipe_megatron.integrations.megatron.core import ForwardBackward
from envpipe_megatron.integrations.megatron.job import (
    facts_of,
    limits_of,
    megatron_order,
    num_microbatches_of,
    orders_to_try,
    sequence_counts,
)
from envpipe_megatron.integrations.megatron.kept import KeptOrder, WholeSteps
from envpipe_megatron.integrations.megatron.limits import POSTED_AHEAD
from envpipe_megatron.integrations.megatron.self_check import SelfCheck
from envpipe_megatron.integrations.megatron.split_backward import why_whole
from envpipe_megatron.runtime.channel.collectives import of_all_ranks
from envpipe_megatron.runtime.channel.links import timeout_of
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.memory.peak import MemoryFullError


class Training(LeveledJob):
    """What a rank does from before its first step to after its last, at the job's level.

    Args:
        args: the job's arguments, by the names that Megatron-LM has for them.
        limits: what stands against which level, besides what the model has.
        model: the chunks of this rank.
        pipeline_group: the ranks of its pipeline.

    Raises LevelError and EnvPipeError as `LeveledJob` does.
    """

    #: Why the job goes on at a lower level behind this step.
    _why_lower: str | None = None

    def __init__(
        self,
        args: argparse.Namespace,
        options: JobOptions,
        limits: Iterable[Limit],
        model: Sequence[Any],
        pipeline_group: dist.ProcessGroup,
    ) -> None:
        self._model, self._microbatches = model, num_microbatches_of(args)
        self._order_of = partial(megatron_order, args, model)
        config = get_model_config(model[0])
        if options.scheduling == "auto" and len(model) > 1 and sequence_counts(config):
            options = replace(options, scheduling="1f1b", max_in_flight=None)
        whole = why_whole(model, config)
        own = None
        with suppress(ScheduleError):  # lower levels need none
            own = self._order_of(self._microbatches)
        placement = Placement(
            pipeline_group,
            self._microbatches,
            timeout_of(pipeline_group),
            messages_vary=config.variable_seq_lengths,
            splits=True,
            why_whole=next(filter(None, of_all_ranks(whole)), None),
            own_order=own,
            group_size=config.microbatch_group_size_per_vp_stage,
        )
        super().__init__(
            options,
            placement,
            facts_of(args),
            say_line,
            (*limits, *limits_of_ranks(limits_of(model))),
            args,
        )
        self._checked = bool(self.decision.to_check) or options.self_check == "always"
        #: What runs in place of Megatron's own function, once there is one.
        self._stand_in: ForwardBackward | KeptOrder | WholeSteps | None = None
        self._replaced: Callable[..., Any] | None = None
        if self.job is not None and self.level is Level.ORDER and (why := self._against_order()):
            self._lower_order(why, options.level)

    def announce(self) -> None:
        """Say what the job does."""
        super().announce()
        steps = self._args.train_iters
        if steps is not None and steps <= self.options.baseline_steps:
            self.tell("training ends within its baseline steps, so nothing will be planned")

    def in_place_of(self, framework_function: Callable[..., Any]) -> Callable[..., Any]:
        """What to call in place of Megatron's forward-backward function.

        The first such function is that of the model that is trained; another one stays.
        """
        if self._replaced is None:
            self._replaced = framework_function
            self._stand_in = self._make_stand_in()
        return (
            self._forward_backward if framework_function is self._replaced else framework_function
        )

    def begin_step(self, iteration: int | None = None) -> None:
        """The training step of this iteration begins; the first is 0."""
        super().begin_step(iteration)
        if self._stand_in is not None:
            self._stand_in.begin_step()

    def end_step(self, *, skipped: bool = False) -> None:
        """The iteration ends after the optimizer, which may have skipped: gradients overflowed.

        Raises SystemExit if only the profile was asked for, and it is written.
        """
        if self._stand_in is not None:
            self._stand_in.end_step(skipped=skipped)
        super().end_step()
        if isinstance(self._stand_in, ForwardBackward) and self._stand_in.failed:
            self._why_lower = self._stand_in.failed
        why, self._why_lower = self._why_lower, None
        if why is not None:
            self._lower_order(why)

    def log(self, iteration: int, tensorboard: Any, wandb: Any, meter: Any = None) -> str:
        """Energy since the last call: scalars for the writers, text for a log line.

        Every rank calls it at the same iteration; all but one without writers. `meter` is that of
        OpenTelemetry, if it is on.
        """
        report = self.report()
        for name, value in report.scalars().items():
            if tensorboard:
                tensorboard.add_scalar(name, value, iteration)
            if wandb:
                wandb.log({name: value}, iteration)
        if meter is not None:
            report.record(meter)
        return report.line()

    def end(self) -> None:
        """Give clocks back, and print the bill; every rank calls it."""
        super().end()
        self.check_profiled()

    def _against_order(self) -> str | None:
        """What the channel has against level `order`, alike on all ranks."""
        assert self.job is not None
        if self.decision.to_check and self.job.channel.posts_ahead:
            return POSTED_AHEAD
        stuck = find_stall(self._order_of(self._microbatches), self.job.channel.capacity)
        if not stuck:
            return None
        return f"Megatron's order needs a deeper channel than one hardware queue has: {stuck[0]}"

    def _lower_order(self, why: str, asked: Level | None = None) -> None:
        """Go on at level `units`; a LevelError if level `order` is `asked`."""
        features = ", ".join(limit.feature for limit in self.decision.to_check) or "this job"
        if self.lower([stands_against(features, Level.UNITS, why)], asked):
            self._stand_in = self._make_stand_in()

    def _make_stand_in(self) -> ForwardBackward | KeptOrder | WholeSteps | None:
        if self.job is None or self._replaced is None:
            return None
        session, collectives, microbatches = self.session, self.collectives, self._microbatches
        if not self.decision.tells_units:
            return WholeSteps(
                session,
                self._replaced,
                builders.whole_iteration(len(session.pipeline_ranks)),
                lambda: get_num_microbatches() == microbatches,
            )
        if self.level is not Level.ORDER:
            return KeptOrder(session, self._replaced, self._order_of, microbatches, collectives)
        check = None
        if self._checked or session.may_split:
            regroups = self.job.options.scheduling == "auto"
            orders_of = partial(orders_to_try, self._args, self._model, regroups=regroups)
            check = SelfCheck(
                orders_of,
                microbatches,
                self.job.channel,
                collectives,
                self.tell,
                session.split_no_more if session.may_split else None,
                needed=self._checked,
            )
        return ForwardBackward(
            session,
            framework_function=self._replaced,
            check=check,
            full_microbatches=microbatches,
            first=collectives.first,
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
