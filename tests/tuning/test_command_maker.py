"""What ranks and the bill hear of a run, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def test_what_was_won_is_said_of_the_plan_that_runs():
    """Another one was no better: what splitting wins in that one is nobody's."""
    store, own = Store(1, 1, WHOLE, [1000, 2000], Sidecar()), builders.one_f_one_b(1, 2)
    limits = SimpleNamespace(allowed=1.0)
    planner: Any = SimpleNamespace(limits=limits, won="", ready=lambda plan: plan)
    job = Controller(own, own, store, 1, planner)
    job._followers = SimpleNamespace(lead=lambda plan: None)
    runs, other = (SimpleNamespace(policy="optimal", name=name) for name in "ab")

    def said(plan: Any, won: str) -> tuple[str, str]:
        planner.won = won
        job._adopt(plan)
        assert not planner.won
        command = job._commands.for_all(Phase.STEADY, store.at_top(own), 1)
        return command.billed, command.note

    assert said(runs, "4 %") == ("4 %", "4 %")
    assert said(runs, "5 %") == ("", "")
    assert said(other, "6 %") == ("6 %", "6 %")
