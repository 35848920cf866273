"""Runs EnvPipe in any pipeline framework that reports when its units begin and end.

The framework keeps its own loop, its own messages and its own order of units, which is 1F1B or
GPipe; EnvPipe profiles, plans, sets clocks and meters. docs/start/other.md says where the calls
belong.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import FRAMEWORK
from envpipe_megatron.integrations.framework_units import (
    Reporter,
    SeenUnit,
    UnitRecorder,
)
from envpipe_megatron.integrations.job import FrameworkJob, same_by_facts, say_line
from envpipe_megatron.integrations.leveled import LeveledJob
from envpipe_megatron.integrations.levels import Level, Limit
from envpipe_megatron.integrations.options import OF_LEVELS, read_settings, read_values
from envpipe_megatron.runtime.channel.collectives import of_all_ranks

logger = logging.getLogger(__name__)

#: Options that do not go with a framework that keeps its own order and messages.
_WITHOUT = (*OF_LEVELS, "scheduling", "max_in_flight", "profile_only", "channel")
#: Where a call is made, for errors.
_OUTSIDE, _WITHIN = "outside a step", "within a step"


class InstrumentedPipeline:
    """Saves energy in a pipeline that keeps its own order of units, or in a job without one.

    Every rank of the job makes one, calls the methods from its training thread, and reports each
    training step: `step` around it, the optimizer included, and `instruction` around each forward
    and backward. The first step is recorded, and the job made at its end: clocks are controlled and
    energy is metered from the second step on. Messages of the framework are idle between steps.

    Calls that make no step are an EnvPipeError up to the end of the first one. Later they are
    logged once, and training goes on: a unit that comes otherwise than in the first step runs at
    the highest clock, as the rest of its step does, and a step that failed ends nothing.

    On a GPU, the stream that is current in `on_step_begin` is the one that units run on, and waits
    for a unit's input before its `on_instruction_begin`: a wait after it counts as the unit's own.

    Args:
        pipeline_group: the ranks of this rank's pipeline, in order of their stages; of gloo or
            NCCL, None for the default group. The i-th forward and the i-th backward are those of
            microbatch i. A job without a pipeline has a group for each rank, and gets one clock.
        num_microbatches: M, of each pipeline and step.
        facts: what tells this job from others, of JSON's types: `model`, `microbatch_size`,
            `samples_per_iteration`, `tokens_per_iteration` or anything else. The energy bill shows
            it, and a job that is started again with the same facts and `output` goes on with its
            profile and baseline. Without facts it starts over.
        say: prints a line; called on one rank.
        settings: EnvPipe's options, as in docs/lookup/options.md, without `--envpipe-` and with
            underscores: `type`, `objective` (all but `time`), `energy_price`, `gpu_price`,
            `reconfigure`, `baseline_steps`, `profile_steps`, `profile`, `plan`, `sweep`,
            `max_slowdown`, `power_budget`, `output`, `gpu_control`, `require_control`,
            `min_dwell_ms`, `gpu`.

    Raises EnvPipeError if an option or a file is wrong, or would change the order.
    """

    def __init__(
        self,
        pipeline_group: dist.ProcessGroup | None,
        num_microbatches: int,
        *,
        facts: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = say_line,
        **settings: object,
    ) -> None:
        try:
            count = operator.index(num_microbatches)  # of NumPy's or torch's, say
        except TypeError:
            count = 0
        if count < 1:
            raise EnvPipeError("A step has one microbatch or more", value=num_microbatches)
        same_job = same_by_facts(facts)
        self._framework = FrameworkJob(
            pipeline_group, count, runs_units=True, bill=facts or {}, same_job=same_job
        )
        if self._framework.stage < 0:
            raise EnvPipeError(
                "This rank is in no pipeline that it gave",
                value=dist.get_rank(),
                remedy="Give each rank, as pipeline_group, the group of its own pipeline.",
            )
        num_stages, on_gpu = self._framework.num_stages, torch.cuda.is_available()
        read_values(settings, _WITHOUT)
        # Of the orders that flags know, the one whose defaults keep the framework's order.
        self._options = read_settings(
            {**settings, "scheduling": "1f1b"}, num_stages=num_stages, on_gpu=on_gpu
        )
        self._say = say
        self._job: LeveledJob | None = None
        #: Notes a step's units: a record in the first, then its iteration; None between steps.
        self._reporter: Reporter | None = None
        self._running: Kind | None = None
        self._paused = self._closed = False
        self._logged: set[str] = set()

    @property
    def phase(self) -> str:
        """Return the last step's phase: `framework` for the first, then a job's up to `steady`."""
        return FRAMEWORK if self._job is None else self._job.phase

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within, run a training step: from its first instruction up to its optimizer's end."""
        self.on_step_begin()
        try:
            yield
        except BaseException:
            self._reporter = self._running = None
            if self._job is not None:
                self._job.fail()
            raise
        self.on_step_end()

    @contextmanager
    def instruction(self, name: str) -> Iterator[None]:
        """Within, run a unit of this stage: `forward` or `backward` of the next microbatch."""
        self.on_instruction_begin(name)
        yield
        self.on_instruction_end(name)

    def on_step_begin(self) -> None:
        """Begin a training step, on all ranks; between two phases, this takes a while.

        Raises EnvPipeError if a given plan has another order.
        """
        trains_without = self._job is not None and self._job.job is None
        if not trains_without:
            self._check_place("on_step_begin", _OUTSIDE)
        if self._closed:
            return
        self._leave_step()
        reporter: Reporter = UnitRecorder()
        if self._job is not None:
            assert self._framework.framework_order is not None
            self._job.begin_step()
            reporter = self._job.follow(self._framework.framework_order)
        self._reporter = reporter  # not before: the step may fail to begin
        self._paused = False

    def on_instruction_begin(self, name: str) -> None:
        """Begin a `forward` or `backward`: its input is there, or the stream waits for it.

        In a pause, nothing happens. An EnvPipeError is an unknown name, or a unit outside a
        step or within another one.
        """
        kind = self._kind(name)
        if self._paused or self._closed or kind is None:
            return
        self._check_place("on_instruction_begin", _WITHIN)
        if self._reporter is None:
            self.pause()
            return
        self._reporter.begin(SeenUnit(kind))
        self._running = kind

    def on_instruction_end(self, name: str) -> None:
        """End a unit: its work is handed to the device, or done, and its output is not sent yet.

        In a pause, nothing happens. An EnvPipeError is one that has not begun.
        """
        kind = self._kind(name)
        if self._paused or self._closed or kind is None:
            return
        if self._check_place("on_instruction_end", f"within a {kind}"):
            assert self._reporter is not None
            self._running = None
            self._reporter.end()

    def on_step_end(self) -> None:
        """End a training step, its optimizer included, on all ranks.

        The end of the first one makes the job. An EnvPipeError is one outside a step, or within
        a unit.

        Raises:
            EnvPipeError: the first step's order is neither 1F1B nor GPipe, or there is no control
                though it is required; on all ranks.
        """
        if self._closed:
            return
        self._check_place("on_step_end", _WITHIN)
        if isinstance(self._reporter, UnitRecorder):
            self._job = self._begin_job(self._reporter)
            self._closed = self._job.job is None
            self._reporter = None
        self._leave_step()

    def pause(self) -> None:
        """Pause for what is not training: an evaluation, or a checkpoint.

        It runs at the highest clock, is not billed, and may report units as training does.
        Training goes on with the next step. Within a step, this is an EnvPipeError.
        """
        if not self._closed and self._check_place("pause", _OUTSIDE):
            self._paused = True
            if self._job is not None:
                self._job.pause()

    def report(self) -> str:
        """Return energy since the last report, as a log line; all ranks call it at the same step.

        J per step and GPU, W, saving and slowdown; empty if no whole step was metered.
        """
        return "" if self._job is None else self._job.report().line()

    def end_training(self) -> None:
        """Give the clock back and print the energy bill; every rank calls it.

        Training that ends without it gives clocks back as well, and has no bill.

        Raises:
            CollectivesError: a rank is gone or silent.
        """
        self._closed = True
        if self._job is not None:
            self._job.end()

    def close(self) -> None:
        """Give the clock back and finish the energy log; safe to call twice."""
        self._closed = True
        if self._job is not None:
            self._job.close()

    def _leave_step(self) -> None:
        """End the step that is under way, if there is one."""
        left, self._reporter, self._running = self._reporter, None, None
        if left is not None and self._job is not None:
            self._job.end_step()

    def _kind(self, name: str) -> Kind | None:
        try:
            return Kind(name)
        except ValueError:
            self._misused("No such instruction", f"There are {', '.join(WHOLE)}.", value=name)
            return None

    def _check_place(self, call: str, expected: str) -> bool:
        """Return whether a call is made where it belongs; if not, raise or log it."""
        place = _OUTSIDE if self._reporter is None else _WITHIN
        if self._running is not None:
            place = f"within a {self._running}"
        if self._closed:
            place = "after end_training or close"
        if place != expected:
            self._misused(f"{call} was called {place}", f"It is to be called {expected}.")
        return place == expected

    def _misused(self, what: str, remedy: str, **value: object) -> None:
        """Raise an EnvPipeError in the first step; later or closed, log it once and go on."""
        error = EnvPipeError(what, remedy=remedy, **value)
        if self._job is None and not self._closed:
            raise error
        if what not in self._logged:
            self._logged.add(what)
            logger.warning("Training goes on: %s", error)

    def _begin_job(self, recorded: UnitRecorder) -> LeveledJob:
        framework, seen = self._framework, "".join(each.kind.letter for each in recorded.units)
        pipeline = tuple(dist.get_process_group_ranks(framework.pipeline_group))
        own = (pipeline, framework.stage, seen, framework.num_microbatches)
        stages: dict[tuple[int, ...], list[str]] = {}
        everyone = of_all_ranks(own)
        counts = {ranks: count for ranks, _, _, count in everyone}
        for ranks, _, letters, _ in sorted(everyone):
            stages.setdefault(ranks, []).append(letters)
        # Every rank checks all pipelines, so that none goes on if another is refused.
        orders = {ranks: _recognized(letters, counts[ranks]) for ranks, letters in stages.items()}
        order = orders[pipeline]
        same_job = {**framework.same_job, "kept_order": order.name}
        self._framework = replace(framework, framework_order=order, same_job=same_job)
        highest = Level.UNIFORM if framework.num_stages == 1 else Level.UNITS
        options = self._options
        if len(set(counts.values())) > 1:  # a step has run: what was given ends nothing now
            options = replace(options, profile=None, plan=None)
        limit = Limit("units of its own", highest, "the framework keeps its order")
        return LeveledJob(options, self._framework, self._say, [limit])


def _recognized(letters: list[str], num_microbatches: int) -> Schedule:
    """Return the schedule of a recorded step, from each stage's letters, such as `FFBFBB`.

    Raises EnvPipeError for any other than 1F1B and GPipe, one chunk a stage.
    """
    for builder in (builders.one_f_one_b, builders.gpipe):
        known = builder(len(letters), num_microbatches)
        if ["".join(unit.kind.letter for unit in units) for units in known.stages] == letters:
            return known
    raise EnvPipeError(
        f"The first step is neither 1F1B nor GPipe of {num_microbatches} microbatches",
        value=dict(enumerate(letters)),
        remedy="Report every forward and backward, and give the right num_microbatches. Other "
        "orders, with several chunks a stage or split backwards, EnvPipe has to execute "
        "(docs/start/other.md).",
    )
