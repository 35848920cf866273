"""Attaches EnvPipe to a schedule of torch.distributed.pipelining: bill, profile, plan, clocks.

The schedule is called as ever. Torch runs all units and sends all messages: in its own order by the
schedule's own function, in a planned one by torch's own runtime of tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.device import check_current
from envpipe_megatron.integrations.framework_units import UnitRecorder, once
from envpipe_megatron.integrations.job import (
    FrameworkJob,
    limits_of_ranks,
    same_by_facts,
    say_line,
)
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import Level, Limit
from envpipe_megatron.integrations.options import read_settings
from envpipe_megatron.integrations.torch_pipelining.orders import (
    Runner,
    facts_of,
    group_size,
    is_prepared,
    known_order,
    limits_of,
    limits_seen,
    message_of,
    stages_trained_by,
)
from envpipe_megatron.integrations.torch_pipelining.units import NOT_TRIED, Units, known_reason
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import of_all_ranks

#: Options that do not go with a framework that sends its messages itself.
_WITHOUT = ("channel", "profile_only", "self_check")


class AttachedPipeline(LeveledJob):
    """Runs EnvPipe on a schedule, whose `step` and `eval` are called as ever; `attach` makes it.

    Every rank of the job makes one at the same point of the program, replicas and the other ranks
    of a stage too, before the schedule's first step, and calls its methods at the same points.
    Where a GPU cannot be read, or while another job of this process has not ended, the schedule
    stays as it is. A step lasts from one call of the schedule's `step` to the next one: what lies
    between, such as the optimizer, is billed to the step before.

    Args:
        schedule: of torch.distributed.pipelining, of one stage a rank or several, or its runtime
            with a table loaded.
        facts: what tells this job from others, of JSON's types: `model`, `microbatch_size`,
            `samples_per_iteration`, `tokens_per_iteration` or anything else. The bill shows it, and
            a job that is started again with the same facts and `output` goes on with its profile
            and baseline. Without facts it starts over.
        say: prints a line; called on one rank.
        settings: EnvPipe's options, as in docs/lookup/options.md, without `--envpipe-` and with
            underscores: `level`, `type`, `output`, `max_slowdown` and so on.

    Raises:
        AttachError: the schedule has none of torch's stages, or does not train.
        JobError: the level that settings name cannot be had.
        EnvPipeError: an option or file is wrong, or there is no control that is required.
    """

    def __init__(
        self,
        schedule: Any,
        *,
        facts: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = say_line,
        **settings: object,
    ) -> None:
        self._schedule = schedule
        self._stages = stages_trained_by(schedule)
        for stage in self._stages:
            check_current(torch.device(stage.device))
        group = self._stages[0].group or dist.GroupMember.WORLD
        assert group is not None
        num_stages = dist.get_world_size(group)
        on_gpu = torch.cuda.is_available()
        options = read_settings(settings, _WITHOUT, num_stages=num_stages, on_gpu=on_gpu)
        self._own, why_not = known_order(schedule)
        own, count = self._own, int(schedule._n_microbatches)  # it may be NumPy's
        same_job = {
            "facts": same_by_facts(facts),
            "order": None if own is None else own.name,
            "chunks": 1 if own is None else own.num_chunks,
        }
        framework = FrameworkJob(
            group,
            count,
            runs_units=True,
            why_whole=max(of_all_ranks(known_reason(self._stages))),
            framework_order=own,
            group_size=group_size(num_stages, count),
            bill=facts or {},
            same_job=same_job,
        )
        super().__init__(
            options,
            framework,
            say,
            limits_of_ranks(limits_of(schedule, own, why_not, self._stages)),
        )
        self._units = Units(
            self._stages,
            lambda why: self.session.parts.collectives.over_replicas(why, max),
            split=self._own is not None and self._own.split,
        )
        self._units.report_losses_of(schedule)
        self._runner = None if self._own is None else Runner(schedule, self._own)
        self._torch_step = schedule.step
        self._seen = False
        self._warn_of_change = once()
        if self.job is None:
            self.close()
            return
        self._units.replace(schedule, "step", self._step)
        self._planned_facts = facts_of(schedule)
        #: Whether messages have the shapes that are planned for.
        self._has_known_shapes = True

    def pause(self) -> None:
        """Pause for what is not training, such as a checkpoint; `eval` pauses by itself.

        It runs at the highest clock and is not billed. Training goes on with the next step.
        """
        self._end_step()
        super().pause()

    def end_training(self) -> None:
        """Give the clock back and print the energy bill; every rank calls it.

        Training that ends without it gives clocks back as well, and has no bill. The schedule is
        only torch's from here on. Raises CollectivesError if a rank is gone or silent.
        """
        self._end_step()
        self.end()

    def close(self) -> None:
        """Give the clock back and finish the energy log; safe to call twice.

        The schedule is only torch's from here on.
        """
        self._units.release()
        super().close()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the schedule's `step`, with its arguments and result."""
        if self.closed or not self._schedule._has_backward:
            self.pause()
            return self._torch_step(*args, **kwargs)
        self._end_step()
        self.begin_step()
        try:
            if self._seen:
                return self._planned_step(*args, **kwargs)
            return self._first_step(*args, **kwargs)
        except BaseException:  # if it is caught, training may go on
            self._units.forget()
            self.fail()
            raise

    def _planned_step(self, *args: Any, **kwargs: Any) -> Any:
        # All ranks of a pipeline see the same here, or torch's own step could not run. Replicas may
        # see another: they have an iteration of the same phase, which does not count here.
        infers_shapes = not is_prepared(self._schedule)
        changed = facts_of(self._schedule) != self._planned_facts
        changed |= not (self._has_known_shapes or infers_shapes)
        if changed and self.session.parts.collectives.stage == 0:
            self._warn_of_change(
                "A step has other microbatches, functions or units than EnvPipe plans for: such "
                "steps run as by torch only. If they stay so, call end_training and attach again"
            )
        if self.decision.sees_units:
            assert self._own is not None
            run = self.follow(self._own, StageSpecs.alike(self._message)).run
            # Until shapes are inferred, it is not known whether another order still fits.
            by_torch = changed or (infers_shapes and self._own.stages != run.order.schedule.stages)
            result = self._run_units(run.order.schedule, by_torch, *args, **kwargs)
        else:
            run = self.follow_whole().run
            result = self._torch_step(*args, **kwargs)
            run.whole = run.same_work = not changed
        if infers_shapes and self.job is not None:
            same = message_of(self._stages) == self._message
            self._has_known_shapes = all(self.session.parts.collectives.in_pipeline(same))
            run.whole &= self._has_known_shapes
            run.same_work = self._has_known_shapes and not changed
        return result

    def _run_units(self, order: Schedule, by_torch: bool, /, *args: Any, **kwargs: Any) -> Any:
        """Run a step in an order, or by torch only: also where its runtime refuses the order.

        Then the job's level is lower from here on.
        """
        assert self._runner is not None
        assert self._followed is not None
        runs = None
        try:
            runs = self._runner.turn_to(order)
        except Exception as error:  # alike on every rank, which all have the same order
            why = f"torch's runtime refuses an order: {type(error).__name__}: {error}"
        if by_torch or runs is None:
            self._followed.fail()
        else:
            self._units.report_losses_of(runs)
            self._units.split = order.split
            self._units.reporter = self._followed
        if self._units.reporter is None or runs is self._schedule:
            result = self._torch_step(*args, **kwargs)
        else:
            result = self._runner.step(runs, *args, **kwargs)
        self._units.reporter = None
        self._followed.complete()
        if runs is None:
            self._end_step()
            self.lower(limits_of_ranks([Limit(order.name, Level.UNITS, why)]))
            self.begin_step()
        return result

    def _first_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step by torch, and compare its units with the order that the schedule names."""
        seen, self._units.seen = UnitRecorder(), set()
        if self.session.may_split and self._units.why_whole is None:  # else one has failed before
            # Of what was wrapped after `attach`. A trial is of all ranks of a stage, or of none.
            why = max(of_all_ranks(known_reason(self._stages))) or NOT_TRIED
            self._units.why_whole = dict.fromkeys(range(len(self._stages)), why)
            # What loading a checkpoint has left cached is the driver's again: a trial asks that. No
            # message is under way yet that this could wait for.
            torch.cuda.empty_cache()
        self._units.reporter = seen
        try:
            result = self._torch_step(*args, **kwargs)
        finally:
            self._units.forget()
            changed, self._units.seen = self._units.seen, None
        collectives = self.session.parts.collectives
        self._seen = True
        self._message = message_of(self._stages)
        known = self.session.options.why_whole
        why_whole = max((self._units.why_whole or {}).values(), default=known)
        if self._own is not None:
            own = known_order(self._schedule)[0] or self._own  # of the number in this step
            found = limits_seen(
                self._own,
                self._stages,
                in_order=seen.shows(own.stages[collectives.stage]),
                seen=changed,
                why_whole=why_whole,
            )
            self.lower(limits_of_ranks(found))
        why_whole = max(of_all_ranks(why_whole))
        if why_whole and self.job is not None and self.session.may_split:
            self.session.split_no_more(why_whole)
        return result

    def _end_step(self) -> None:
        """End the last step, if there is one that has not failed: the optimizer has stepped."""
        if self.in_step:
            self.end_step()


attach = AttachedPipeline
