"""An error in work that is rehearsed: the rest of the order runs, without it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_stages import SPECS

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders.builders import one_f_one_b
from envpipe_megatron.core.orders.zero_bubble import split_in_place
from envpipe_megatron.runtime.execution.stage_run import Rehearsal, execute

ORDER = split_in_place(one_f_one_b(1, 2), 2)
ZEROS = {kind: SPECS.sends[kind].make(torch.zeros) for kind in SPECS.sends}


class Work:
    """Sends ones, and fails at a unit."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.ran: list[str] = []

    def forward(self, unit: Unit, inputs: Any) -> list[torch.Tensor]:
        self.ran.append(str(unit))
        if str(unit) == self.fails_at:
            raise RuntimeError(f"{unit} of a test\nand more")
        return SPECS.sends[Kind.FORWARD].make(torch.ones)

    backward = forward

    def weight_gradient(self, unit: Unit) -> None:
        self.forward(unit, None)

    def sent(self, unit: Unit) -> None:
        self.ran.append(f"{unit} is sent")


def run(work: Work) -> tuple[Rehearsal, dict[str, list[torch.Tensor]]]:
    sent: dict[str, list[torch.Tensor]] = {}
    units = iter(ORDER.stages[0])
    stage_run: Any = SimpleNamespace(
        begin=lambda: None,
        begin_unit=lambda: None,
        end_unit=lambda outputs: sent.update({str(next(units)): list(outputs)}),
        hand_over=lambda: None,
    )
    rehearsal = Rehearsal(ORDER, SPECS)
    execute(ORDER, 0, rehearsal.of(work), stage_run)
    return rehearsal, sent


def test_without_an_error_work_runs_as_it_is() -> None:
    rehearsal, sent = run(work := Work())
    assert rehearsal.error is None
    units = [str(unit) for unit in ORDER.stages[0]]
    assert work.ran == [each for unit in units for each in (unit, f"{unit} is sent")]
    assert all(torch.stack(sent[unit]).eq(1).all() for unit in units if unit[0] != "W")


@pytest.mark.parametrize("fails_at", [str(unit) for unit in ORDER.stages[0]])
def test_behind_an_error_messages_are_empty_and_nothing_runs(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rehearsal, sent = run(work := Work(fails_at))
    assert rehearsal.error == f"RuntimeError: {fails_at} of a test"
    assert "and more" in caplog.text
    assert len(caplog.records) == 1
    assert work.ran[-1] == fails_at
    assert work not in vars(rehearsal).values()  # else its activations stay for the next run
    units = [str(unit) for unit in ORDER.stages[0]]
    assert list(sent) == units
    failed = False
    for unit, outputs in sent.items():
        failed |= unit == fails_at
        if unit[0] != "W":
            kind = Kind.FORWARD if unit[0] == "F" else Kind.BACKWARD
            shapes = [each.shape for each in ZEROS[kind]]
            assert [each.shape for each in outputs] == shapes
            assert all(each.eq(0 if failed else 1).all() for each in outputs)
