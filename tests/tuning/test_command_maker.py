"""What ranks and the bill hear of a run, and when."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Command
from envpipe_megatron.tuning.controller import Controller
from envpipe_megatron.tuning.measured.store import Store


def test_the_bill_keeps_what_splitting_won_beside_what_was_too_slow():
    """The lines of a command take the place of all that were before."""
    store = Store(1, 1, WHOLE, [1000, 2000], Sidecar())
    commands, order = CommandMaker(store), store.at_top(builders.one_f_one_b(1, 2))

    def billed(late: str = "", won: str = "") -> str:
        commands.billed, commands.won = late, won
        return commands.for_all(Phase.STEADY, order, 1).billed

    assert billed() == ""
    assert billed(won="5 %") == "5 %"
    assert billed() == ""
    assert billed(late="slow") == "slow\n5 %"
    assert billed(late="slower", won="4 %") == "slower\n4 %"


def test_the_bill_says_nothing_of_what_a_plan_that_does_not_run_would_have_won():
    store = Store(1, 1, WHOLE, [1000, 2000], Sidecar())
    commands, order = CommandMaker(store), store.at_top(builders.one_f_one_b(1, 2))

    def adopt(plan: Any, won: str) -> Command:
        commands.adopted, commands.won = plan, won
        return commands.for_all(Phase.STEADY, order, 1)

    commands.billed = "slow"
    assert commands.take_back(adopt("the first", "4 %")) is None
    assert commands.for_all(Phase.STEADY, order, 1).billed == "slow"
    assert adopt("the second", "5 %").billed == "slow\n5 %"
    assert commands.take_back(adopt("the third", "6 %")) == "the second"
    assert commands.for_all(Phase.STEADY, order, 1).billed == "slow\n5 %"


@pytest.mark.parametrize(("better", "splits"), [(True, True), (False, True), (False, False)])
def test_what_splitting_wins_is_said_of_the_plan_that_runs(monkeypatch, better, splits):
    """Whole backwards run; a new plan may split them, and be no better."""
    store, own = Store(1, 1, WHOLE, [1000, 2000], Sidecar()), builders.one_f_one_b(1, 2)

    def plan(*, split: bool) -> Any:
        cost, schedule = SimpleNamespace(energy_j=1.0), SimpleNamespace(split=split)
        return SimpleNamespace(policy="optimal", schedule=schedule, cost=cost)

    planner: Any = SimpleNamespace(
        limits=SimpleNamespace(allowed=lambda expected=1.0: expected),
        busy=True,
        won="4 %",
        take=lambda failed: {0: plan(split=splits)},
        ready=lambda of: of,
        repriced=lambda of: of,
    )
    job: Any = Controller(own, own, store, 1, planner)
    job.plan, job._followers = plan(split=False), SimpleNamespace(lead=lambda of: None)
    for name, value in (("_plan_command", None), ("_learn_plan", 0), ("_harmed", False)):
        monkeypatch.setattr(job, name, lambda *of, value=value, **named: value)
    for name in ("_prediction_error", "_expected"):
        monkeypatch.setattr(job, name, lambda of: 0.0)
    monkeypatch.setattr(job, "_better", lambda of: better)
    correct = job._correct()
    next(correct)
    with suppress(StopIteration):
        correct.send(None)
    assert job._commands.won == ("" if splits and not better else "4 %")
