"""The one loop that executes a stage's units, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from envpipe_megatron.runtime.channel import P2PChannel
from envpipe_megatron.runtime.completion import Completion
from envpipe_megatron.runtime.executor import Executor, StageRecord
from envpipe_megatron.runtime.messages import StageSpecs
from envpipe_megatron.schedule import Kind, Schedule, Unit


class StageWork(Protocol):
    """What a training framework does for one unit of this stage."""

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; `inputs` is None on the first chunk of the first stage."""

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; `gradients` is None on the last chunk of the last stage."""

    def sent(self, unit: Unit) -> None:
        """The unit's output is in the channel: what only it needed may be freed."""


#: Called with the position of the unit that was just handed over, and its completion.
UnitEnded = Callable[[int, Completion], None]


def execute(
    schedule: Schedule,
    stage: int,
    work: StageWork,
    channel: P2PChannel,
    specs: StageSpecs,
    executor: Executor,
    unit_ended: UnitEnded,
) -> StageRecord:
    """Execute one stage's order once.

    Args:
        schedule: the whole pipeline's; this stage's order is executed.
        stage: this rank's stage.
        work: what a unit does.
        channel: to the neighbours.
        specs: what the messages carry.
        executor: how time passes.
        unit_ended: told of each unit; the clock of the next unit hangs on it.

    Returns:
        the times that the stage measured.

    Raises:
        ChannelError: a neighbour is gone or silent.
    """
    order: Sequence[Unit] = schedule.stages[stage]
    first = stage * schedule.units_per_stage
    cross = schedule.cross_dependency[first : first + len(order)].tolist()
    successor = schedule.cross_successor[first : first + len(order)].tolist()
    channel.begin_step(schedule, specs)
    executor.begin_iteration(schedule, stage)
    for position, unit in enumerate(order):
        message = channel.receive(unit) if cross[position] >= 0 else None
        executor.begin_unit(message.sent_s if message else None)
        run = work.forward if unit.kind is Kind.FORWARD else work.backward
        outputs = run(unit, message.tensors if message else None)
        sent_s, completion = executor.end_unit()
        unit_ended(position, completion)
        if successor[position] >= 0:
            channel.send(unit, outputs, sent_s)
        del message, outputs  # they would take memory from the next unit
        work.sent(unit)
    record = executor.end_iteration()
    channel.end_step()
    return record
