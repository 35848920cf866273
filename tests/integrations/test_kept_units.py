"""Megatron's own function with hooks around its units: what a session is told of any call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.kinds import Kind, parse_unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.integrations.framework_units import Followed, Seen

pytestmark = pytest.mark.xdist_group("megatron")

M = 2
ALONE: Any = SimpleNamespace(stage=0, on_all=lambda own: own)


class Session:
    """Notes what it is told; its runs are of one stage."""

    def __init__(self, *, begins: bool = False) -> None:
        self.told: list[str] = []
        self._begins = begins

    def open_iteration(self, schedule: Schedule, specs: Any, *, full_batch: bool) -> Any:
        self.told.append("open" if full_batch else "open part")
        left = list(schedule.stages[0])
        run = SimpleNamespace(units=schedule.stages[0], next_unit=left[0])

        def end_unit() -> None:
            self.told.append(str(left.pop(0)))
            run.next_unit = left[0] if left else None

        def begin_unit() -> None:
            if self._begins:
                self.told.append(f"begin {left[0]}")

        run.begin_unit, run.end_unit = begin_unit, end_unit
        return run

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

    session: Any = Session()

    def order_of(count: int) -> Schedule:
        return builders.one_f_one_b(1, count)

    stand_in = kept.KeptOrder(session, framework_function, order_of, M, ALONE)

    def call(letters: str = "FBFB", **more: Any) -> list[str]:
        arguments = {"num_microbatches": letters.count("F"), "letters": letters, **more}
        assert stand_in(**arguments) == ["loss"]
        assert (schedules.forward_step, schedules.backward_step) == steps
        told, session.told = session.told, []
        return told

    return call


OWN = ("FBFB", "open F0 B0 F1 B1")


@pytest.mark.parametrize(
    "calls",
    [
        # The first iteration is Megatron's, and others are told of; forwards alone are a pause.
        [("FBFB", ""), OWN, ("FF", "pause"), OWN],
        # Each number has an order, and another's clocks are not left for what is Megatron's alone.
        [
            *(("FB", ""), ("FB", "open part F0 B0"), ("FBFB", "highest"), OWN),
            *(("FB", "open part F0 B0"), ("FBFBFB", "highest")),
            *(("FBFBFB", "open part F0 B0 F1 B1 F2 B2"), OWN),
        ],
        # A number whose units come otherwise is left alone, and in the full batch all are.
        [("FBFB", ""), ("FFFBBB", "highest"), ("FBFBFB", "highest"), OWN],
        [("FFBB", ""), ("FBFB", "")],
        # Units that come otherwise later end nothing.
        [("FBFB", ""), ("FFBB", "open F0 highest B0 F1 B1"), OWN],
    ],
)
def test_what_a_session_is_told_of_one_call_after_another(
    job: Any, calls: list[tuple[str, str]]
) -> None:
    for letters, told in calls:
        more = {"forward_only": True} if told == "pause" else {}
        assert " ".join(job(letters, **more)) == told


COMBINED = "combined_1f1b_schedule_for_interleaved_pipelining"
#: Virtual microbatches of one stage with two chunks, and of each its microbatch and chunk.
TABLE = [(0, 0), (0, 1), (1, 0), (1, 1)]
IN_PAIRS = "F0.0 F0.1 F1.0+ B0.1 F1.1+ B0.0 B1.1 B1.0"
#: Forwards and backwards of each call.
CALLS = [(0, None), (1, None), (2, 0), (3, 1), (None, 2), (None, 3)]


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a job whose communication of experts is overlapped; waits for inputs are told too."""
    pytest.importorskip("megatron.core")
    from megatron.core.pipeline_parallel import schedules

    from envpipe_megatron.integrations.megatron import kept

    schedule = Schedule("x", 2, 2, (tuple(parse_unit(text) for text in IN_PAIRS.split()),))
    session: Any = Session(begins=True)

    def combined(
        get_microbatch_id_in_model_chunk: Any,
        get_model_chunk_id: Any,
        f_virtual_microbatch_id: int | None = None,
        b_virtual_microbatch_id: int | None = None,
        pre_forward: Any = None,
        pre_backward: Any = None,
    ) -> str:
        for wait in (pre_forward, pre_backward):
            if wait is not None:
                wait(0)
        session.told.append("run")
        return "outputs"

    monkeypatch.setattr(schedules, COMBINED, combined)
    monkeypatch.setattr(kept, "_message", lambda arguments: None)
    monkeypatch.setattr(kept.StageSpecs, "alike", lambda spec: None)

    def microbatch_of(virtual: int, forward: bool) -> int:
        return TABLE[virtual][0]

    def chunk_of(virtual: int, forward: bool) -> int:
        return TABLE[virtual][1] if forward else 1 - TABLE[virtual][1]

    def framework_function(**arguments: Any) -> list[Any]:
        for forward, backward in arguments["calls"]:
            waits = {}
            if arguments["waits"] and None not in (forward, backward):
                waits = {
                    f"pre_{name}": lambda chunk, name=name: session.told.append(f"wait {name}")
                    for name in ("forward", "backward")
                }
            outputs = getattr(schedules, COMBINED)(
                microbatch_of,
                chunk_of,
                f_virtual_microbatch_id=forward,
                b_virtual_microbatch_id=backward,
                **waits,
            )
            assert outputs == "outputs"
        return ["loss"]

    stand_in = kept.KeptOrder(session, framework_function, lambda count: schedule, 2, ALONE)

    def call(calls: Any = CALLS, *, waits: bool = False) -> list[str]:
        assert stand_in(num_microbatches=2, calls=calls, waits=waits) == ["loss"]
        assert getattr(schedules, COMBINED) is combined
        told, session.told = session.told, []
        return told

    return call


def test_calls_are_a_forward_a_backward_or_a_pair(overlapped: Any) -> None:
    assert overlapped() == ["run"] * len(CALLS)
    told = overlapped()
    assert told[:7] == ["open", "begin F0", "run", "F0", "begin F0.1", "run", "F0.1"]
    assert told[7:12] == ["begin F1+", "F1+", "begin B0.1", "run", "B0.1"]
    assert [text for text in told if not text.startswith(("begin", "run"))] == [
        "open",
        *["F0", "F0.1", "F1+", "B0.1", "F1.1+", "B0", "B1.1", "B1"],
    ]


def test_a_pair_begins_behind_its_waits(overlapped: Any) -> None:
    overlapped(waits=True)
    pair = ["wait forward", "begin F1+", "F1+", "wait backward", "begin B0.1", "run", "B0.1"]
    assert overlapped(waits=True)[7:14] == pair


def test_units_of_a_pair_one_by_one_are_another_order(overlapped: Any) -> None:
    apart = [(0, None), (1, None), (2, None), (None, 0), (3, 1), (None, 2), (None, 3)]
    assert overlapped(apart) == ["run"] * len(apart)
    assert overlapped() == ["run"] * len(CALLS)  # for good


def test_a_unit_that_begins_within_another_is_followed_no_more() -> None:
    session: Any = Session(begins=True)
    run = session.open_iteration(builders.one_f_one_b(1, 2), None, full_batch=True)
    followed = Followed(run, session.highest_clock)
    followed.begin(Seen(Kind.FORWARD, 0))
    followed.begin(Seen(Kind.BACKWARD))
    followed.end()
    followed.complete()
    assert session.told[:4] == ["open", "begin F0", "highest", "F0"]
    assert run.next_unit is None


def test_an_end_that_nobody_began_is_none() -> None:
    session: Any = Session()
    run = session.open_iteration(builders.one_f_one_b(1, 1), None, full_batch=True)
    followed = Followed(run, session.highest_clock)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        followed.begin(Seen(kind))
        followed.end()
        followed.end()
    assert session.told == ["open", "F0", "B0"]
