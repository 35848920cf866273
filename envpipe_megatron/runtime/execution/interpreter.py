"""The one loop that executes a stage's units, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.runtime.execution.stage_run import StageRun


class StageWork(Protocol):
    """What a training framework does for one unit of this stage."""

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; `inputs` is None on the first chunk of the first stage."""

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward; `gradients` is None on the last chunk of the last stage."""

    def sent(self, unit: Unit) -> None:
        """The unit's output is in the channel: what only it needed may be freed."""


def execute(
    schedule: Schedule,
    stage: int,
    work: StageWork,
    run: StageRun,
    unit_ended: Callable[[Unit], None] | None = None,
) -> None:
    """Execute one stage's order of a schedule once; `run.end` tells the times measured.

    `unit_ended` is called with each unit once its output is in the channel and its memory freed.
    Raises ChannelError if a neighbour is gone or silent.
    """
    run.begin()
    for unit in schedule.stages[stage]:
        inputs = run.begin_unit()
        compute = work.forward if unit.kind is Kind.FORWARD else work.backward
        outputs = compute(unit, inputs)
        run.end_unit(outputs)
        del inputs, outputs  # they would take memory from the next unit
        work.sent(unit)
        if unit_ended is not None:
            unit_ended(unit)
    run.hand_over()
