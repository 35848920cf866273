"""Megatron's own function with hooks around its units: what a session is told of any call."""

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.integrations.framework_units import SeenUnit, UnitFollower

pytestmark = pytest.mark.xdist_group("megatron")

M = 2


class Session:
    """Notes what it is told; its runs are of one stage."""

    def __init__(self, *, begins=False):
        self.told: list[str] = []
        self.options = SimpleNamespace(num_microbatches=M)
        collectives = SimpleNamespace(first=lambda own: own and (0, own))
        self.parts = SimpleNamespace(stage=0, collectives=collectives)
        self._begins = begins

    def open_iteration(self, schedule, specs):
        self.told.append("open")
        left = list(schedule.stages[0])
        run = SimpleNamespace(units=schedule.stages[0], next_unit=left[0])

        def end_unit():
            self.told.append(str(left.pop(0)))
            run.next_unit = left[0] if left else None

        def begin_unit():
            if self._begins:
                self.told.append(f"begin {left[0]}")

        run.begin_unit, run.end_unit = begin_unit, end_unit
        return run

    def highest_clock(self):
        self.told.append("highest")


@pytest.fixture
def job(monkeypatch):
    """Calls a job of one stage: with letters, the kinds of the units that Megatron runs."""
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel import schedules
    from training import following

    monkeypatch.setattr(schedules, "forward_step", lambda **_: None)
    monkeypatch.setattr(schedules, "backward_step", lambda **_: None)
    steps = schedules.forward_step, schedules.backward_step

    def framework_function(**arguments):
        forwards = 0
        for letter in arguments["letters"]:
            if letter == "F":
                schedules.forward_step(current_microbatch=forwards)
                forwards += 1
            else:
                schedules.backward_step()
        return ["loss"]

    session: Any = Session()

    def order_of(count):
        return builders.one_f_one_b(1, count)

    job = following(session, framework_function, order_of)

    def call(letters):
        arguments = {"num_microbatches": letters.count("F"), "letters": letters}
        assert job._follow_units(**arguments) == ["loss"]
        assert (schedules.forward_step, schedules.backward_step) == steps
        told, session.told = session.told, []
        return told, job._why_lower

    return call


OWN = ("FBFB", "open F0 B0 F1 B1")
OTHER = ("FFBB", "open F0 highest B0 F1 B1")
WHY = "In this iteration, F1 came in place of B0"


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([OWN, OWN], None),
        # Each number has an order.
        ([("FB", "open F0 B0"), OWN, ("FBFBFB", "open F0 B0 F1 B1 F2 B2"), OWN], None),
        # A number whose units come otherwise from the first on has no level with units.
        ([OTHER], WHY),
        ([OWN, ("FFFBBB", "open F0 highest B0 F1 B1 F2 B2"), OWN], WHY),
        # Units that come otherwise later end nothing.
        ([OWN, OTHER, OWN], None),
    ],
)
def test_what_a_session_is_told_of_one_call_after_another(job, calls, why):
    for letters, told in calls:
        said, against = job(letters)
        assert " ".join(said) == told
    assert against == why


def test_a_unit_that_begins_within_another_is_followed_no_more():
    session: Any = Session(begins=True)
    run = session.open_iteration(builders.one_f_one_b(1, 2), None)
    followed = UnitFollower(run, session.highest_clock)
    followed.begin(SeenUnit(Kind.FORWARD, 0))
    followed.begin(SeenUnit(Kind.BACKWARD))
    followed.end()
    followed.complete()
    assert session.told[:4] == ["open", "begin F0", "highest", "F0"]
    assert run.next_unit is None


@pytest.mark.parametrize("letters", ["F", "FF", "FBF", "FBFBF"])
def test_a_step_of_more_or_fewer_units_is_no_step_of_its_phase(letters):
    """More of them would make it seem slow, and take more energy."""
    session: Any = Session()
    run = session.open_iteration(builders.one_f_one_b(1, 2), None)
    run.whole = run.same_work = True
    followed = UnitFollower(run, session.highest_clock)
    for letter in letters:
        followed.begin(SeenUnit(Kind.FORWARD if letter == "F" else Kind.BACKWARD))
        followed.end()
    followed.complete()
    assert (run.whole, run.same_work) == (False, False)


def test_an_end_that_nobody_began_is_none():
    session: Any = Session()
    run = session.open_iteration(builders.one_f_one_b(1, 1), None)
    followed = UnitFollower(run, session.highest_clock)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        followed.begin(SeenUnit(kind))
        followed.end()
        followed.end()
    assert session.told == ["open", "F0", "B0"]


def test_units_of_a_pair_begin_behind_their_waits():
    """Which are within Megatron's function that runs both."""
    pytest.importorskip("megatron.core")
    from envpipe_megatron.integrations.megatron.training import _reported_pairs

    told: list[str] = []
    reporter: Any = SimpleNamespace(
        begin=lambda seen: told.append(str(seen)), end=lambda: told.append("end")
    )

    def run(get_microbatch_id_in_model_chunk, get_model_chunk_id, f_virtual_microbatch_id,
            b_virtual_microbatch_id, pre_forward, pre_backward):  # fmt: skip
        for wait in (pre_forward, pre_backward):
            wait(0)
        told.append("run")

    waits = [lambda chunk, name=name: told.append(f"wait {name}") for name in "FB"]
    step = _reported_pairs(run, reporter)
    step(lambda virtual, forward: virtual, lambda virtual, forward: 1, 3, 2, *waits)
    assert told == ["wait F", "F3.1+", "end", "wait B", "B.1", "run", "end"]
