"""Megatron's own function with hooks around its units: what a session is told of any call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core import builders
from envpipe_megatron.core.schedule import Schedule

pytestmark = pytest.mark.xdist_group("megatron")

M = 2


class Session:
    """Notes what it is told; its runs are of one stage."""

    def __init__(self, schedule: Schedule) -> None:
        self.told: list[str] = []
        self._units = schedule.stages[0]

    def open_iteration(self, schedule: Schedule, specs: Any) -> Any:
        self.told.append("open")
        left = list(self._units)
        run = SimpleNamespace(next_unit=left[0])

        def end_unit() -> None:
            self.told.append(str(left.pop(0)))
            run.next_unit = left[0] if left else None

        run.begin_unit, run.end_unit = lambda: None, end_unit
        return run

    def close_iteration(self, run: Any) -> None:
        self.told.append("close")

    def highest_clock(self) -> None:
        self.told.append("highest")

    def pause(self) -> None:
        self.told.append("pause")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a job of one stage: with letters, the kinds of the units that Megatron runs."""
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel import schedules

    from envpipe_megatron.integrations.megatron import kept

    monkeypatch.setattr(schedules, "forward_step", lambda **_: None)
    monkeypatch.setattr(schedules, "backward_step", lambda **_: None)
    monkeypatch.setattr(kept, "_message", lambda arguments: None)
    monkeypatch.setattr(kept.StageSpecs, "alike", lambda spec: None)
    steps = schedules.forward_step, schedules.backward_step

    def framework_function(**arguments: Any) -> list[Any]:
        forwards = 0
        for letter in arguments["letters"]:
            if letter == "F":
                schedules.forward_step(current_microbatch=forwards)
                forwards += 1
            else:
                schedules.backward_step()
        return ["loss"]

    schedule = builders.one_f_one_b(1, M)
    session: Any = Session(schedule)
    stand_in = kept.KeptOrder(session, framework_function, schedule, 0, lambda own: own)

    def call(letters: str = "FBFB", *, ends: bool = True, **more: Any) -> list[str]:
        arguments = {"num_microbatches": letters.count("F"), "letters": letters, **more}
        assert stand_in(**arguments) == ["loss"]
        assert (schedules.forward_step, schedules.backward_step) == steps
        if ends:
            stand_in.end_step()
        told, session.told = session.told, []
        return told

    return call


def test_the_first_iteration_is_megatrons_and_others_are_told_of(job: Any) -> None:
    assert job() == []
    assert job() == ["open", "F0", "B0", "F1", "B1", "close"]


def test_forwards_alone_are_a_pause(job: Any) -> None:
    job()
    assert job("FF", forward_only=True) == ["pause"]


def test_another_number_of_microbatches_runs_at_the_highest_clock(job: Any) -> None:
    """As while a batch grows; the order is looked at when it has grown."""
    assert job("FB") == ["highest"]
    assert job() == []
    assert job("FBFBFB") == ["highest"]
    assert job()[0] == "open"


def test_an_iteration_that_is_run_again_closes_the_one_before(job: Any) -> None:
    job()
    assert job(ends=False)[-1] == "B1"
    assert job()[:2] == ["close", "open"]


def test_units_in_another_order_are_left_alone_for_good(job: Any) -> None:
    assert job("FFBB") == []
    assert job() == []


def test_units_that_come_otherwise_later_end_nothing(job: Any) -> None:
    job()
    assert job("FFBB") == ["open", "F0", "highest", "B0", "F1", "B1", "close"]
    assert job() == ["open", "F0", "B0", "F1", "B1", "close"]
