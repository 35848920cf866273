"""Torch's schedules as orders of units, and orders as what torch's own runtime executes.

`_PipelineScheduleRuntime` runs any table of units: it adds sends and receives, and for FSDP when to
gather and reduce, so that all ranks come to them in one order and none waits for another forever.
It has no public name; torch's documentation and torchtitan use it by this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
)

from envpipe_megatron.core.kinds import Kind, ScheduleError
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.torch_csv import order_of_rows, table_rows

#: Their tables, in torch 2.13 and before, do not say what they run.
_WITHOUT_TABLE = {Schedule1F1B: builders.one_f_one_b, ScheduleGPipe: builders.gpipe}


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank, by their place in the model."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return sorted(stages, key=lambda stage: stage.stage_index)


def own_order(schedule: Any) -> Schedule:
    """The order that a schedule of torch's runs; of each rank, as it is known on all of them.

    A forward and a backward that torch lists as one are two units, which it runs one behind the
    other. Orders that have a name here get that. ScheduleError if the schedule does not say its
    order, or it is not one of a training step.
    """
    stage, count = stages_of(schedule)[0], schedule._n_microbatches
    build = _WITHOUT_TABLE.get(type(schedule))
    if build is not None:
        return build(stage.num_stages, count)
    name = type(schedule).__name__
    table = schedule.pipeline_order
    if not table:
        raise ScheduleError("The schedule does not say its order", value=name)
    rows = [
        [str(action) for action in table[rank] if action is not None and action.is_compute_op]
        for rank in sorted(table)
    ]
    found = _apart(order_of_rows(rows, name, source=name))
    for known in _known(found):
        if known.stages == found.stages and known.placement is found.placement:
            return known
    return found


def _apart(order: Schedule) -> Schedule:
    """Forwards by themselves, also where they are listed as one with a backward."""
    stages = tuple(
        tuple(
            replace(unit, combined=False) if unit.kind is Kind.FORWARD else unit for unit in units
        )
        for units in order.stages
    )
    return replace(order, stages=stages)


def _known(found: Schedule) -> Sequence[Schedule]:
    stages, count, chunks = found.num_stages, found.num_microbatches, found.num_chunks
    if chunks == 1:
        return builders.one_f_one_b(stages, count), builders.gpipe(stages, count)
    return (builders.interleaved(stages, count, chunks, group_size(stages, count)),)


def group_size(num_stages: int, num_microbatches: int) -> int:
    """Microbatches that pass a chunk before the next: torch makes rounds of about one a stage."""
    return num_microbatches // max(1, num_microbatches // num_stages)


class Runner:
    """Runs a schedule of torch's own, or another order of its units in its place.

    Args:
        schedule: whose `step` this takes the place of.
        own: the order of that.
    """

    def __init__(self, schedule: Any, own: Schedule) -> None:
        self._schedule, self._own = schedule, own
        #: What runs orders by table, and which it has; a schedule of one stage a rank runs none.
        self._runtime: Any = None
        self._loaded: Schedule | None = None
        self._own_tables: tuple[Any, Any] | None = None
        if isinstance(schedule, _PipelineScheduleRuntime):
            self._runtime, self._loaded = schedule, own
            self._own_tables = schedule.pipeline_order, schedule.pipeline_order_with_comms

    def turn_to(self, order: Schedule) -> Any:
        """What is to make the next step, so that it runs this order of the same units."""
        if order.stages == self._own.stages:
            if self._own_tables is None:
                return self._schedule
            order = self._own
        if self._runtime is None:
            self._runtime = _runtime_like(self._schedule)
        runtime = self._runtime
        if order is self._own and self._loaded is not order:
            assert self._own_tables is not None
            runtime.pipeline_order, runtime.pipeline_order_with_comms = self._own_tables
        elif order is not self._loaded:
            rows = enumerate(table_rows(order))
            runtime.pipeline_order = {
                rank: [_Action.from_str(cell) for cell in row] for rank, row in rows
            }
            runtime._prepare_schedule_with_comms(runtime.pipeline_order)
        self._loaded = order
        return runtime


def _runtime_like(schedule: Any) -> Any:
    """A runtime for the stages of a schedule, whose messages torch has prepared already."""
    runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]  # torch's
        stages_of(schedule),
        schedule._n_microbatches,
        loss_fn=schedule._loss_fn,
        args_chunk_spec=schedule._args_chunk_spec,
        kwargs_chunk_spec=schedule._kwargs_chunk_spec,
        output_merge_spec=schedule._output_merge_spec,
        scale_grads=schedule.scale_grads,
    )
    # To prepare again would run the model once more, which may change its buffers.
    if isinstance(schedule, PipelineScheduleMulti):
        prepared = schedule._stages_forward_initialized, schedule._stages_backward_initialized
    else:
        prepared = schedule._stage_forward_initialized, schedule._stage_backward_initialized
    runtime._stages_forward_initialized, runtime._stages_backward_initialized = prepared
    return runtime
