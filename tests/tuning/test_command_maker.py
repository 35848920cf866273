"""What ranks and the bill hear of a run, and when."""

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Command
from envpipe_megatron.tuning.controller import Controller
from envpipe_megatron.tuning.measured.store import Store

ORDER = builders.one_f_one_b(1, 2)


@pytest.fixture
def commands() -> CommandMaker:
    return CommandMaker(Store(ORDER, [1000, 2000], Sidecar()))


def said(commands: CommandMaker, **bill: str) -> Command:
    """The next command, where the bill is to say something new."""
    commands.bill |= bill
    order = Store(ORDER, [1000, 2000], Sidecar()).at_top(ORDER)
    return commands.metered(Phase.STEADY, order, 1)


def test_the_bill_keeps_what_splitting_won_beside_what_was_too_slow(commands):
    """The lines of a command take the place of all that were before."""
    assert said(commands).billed == ""
    assert said(commands, won="5 %").billed == "5 %"
    assert said(commands, late="slow").billed == "slow\n5 %"
    assert said(commands, late="slower", won="4 %").billed == "slower\n4 %"


@pytest.mark.parametrize(("better", "splits"), [(True, True), (False, True)])
def test_what_splitting_wins_is_said_of_the_plan_that_runs(monkeypatch, better, splits):
    """Whole backwards run; a new plan may split them, and be no better."""
    store = Store(ORDER, [1000, 2000], Sidecar())

    def plan(*, split: bool) -> Any:
        cost, schedule = SimpleNamespace(energy_j=1.0), SimpleNamespace(split=split, stages=())
        return SimpleNamespace(policy="optimal", schedule=schedule, cost=cost, objective=None)

    planner: Any = SimpleNamespace(
        allowed=lambda expected=1.0: expected,
        objective=None,
        won="4 %",
        reorders=True,
        take=lambda: {0: plan(split=splits)},
        ready=lambda of: of,
        repriced=lambda of: of,
    )
    job: Any = Controller(ORDER, store, planner)
    job.plan = plan(split=False)
    job._replicas = SimpleNamespace(lead=lambda of: None, extend=lambda of: None, levels=[0])
    for name in ("_prediction_error", "_expected"):
        monkeypatch.setattr(job, name, lambda of: 0.0)
    monkeypatch.setattr(job, "_better", lambda of: better)
    monkeypatch.setattr(job._commands, "adopt", lambda of: iter(()))  # ranks have memory
    assert not list(job._take_plans())
    assert job._commands.bill["won"] == ("4 %" if better else "")
