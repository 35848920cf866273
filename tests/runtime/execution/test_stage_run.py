"""What a stage's units are made of, in one process: calls, messages, clocks and emulated time."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_stages import SPECS

from envpipe_megatron.core import builders
from envpipe_megatron.core.schedule import Kind, Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.messages import Message
from envpipe_megatron.runtime.execution import emulated_executor
from envpipe_megatron.runtime.execution.emulated_executor import EmulatedExecutor
from envpipe_megatron.runtime.execution.executor import make_record
from envpipe_megatron.runtime.execution.interpreter import execute
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.execution.stage_run import StageRun
from envpipe_megatron.runtime.profiling import p2p_latency
from envpipe_megatron.runtime.profiling.p2p_latency import measure_p2p_latency_s


class Parts:
    """Executor, channel, clock and work of one stage, which note how they are called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.ended = 0

    def begin_step(self, schedule: Schedule, specs: Any) -> None:
        self.calls.append(("begin step", schedule.name, specs))

    def begin_iteration(self, schedule: Schedule, stage: int) -> None:
        self.calls.append(("begin", schedule.name, stage))

    def receive(self, unit: Any) -> Message:
        return Message([torch.tensor(float(self.ended))], 0.25 + self.ended)

    def begin_unit(self, sent_s: float | None) -> None:
        self.calls.append(("unit", sent_s))

    def end_unit(self) -> tuple[float, Any]:
        self.ended += 1
        return float(self.ended), f"event {self.ended}"

    def request(self, frequency_mhz: int, after: Any) -> None:
        self.calls.append((frequency_mhz, after))

    def send(self, unit: Any, tensors: list[torch.Tensor], sent_s: float) -> None:
        self.calls.append(("send", str(unit), [tensor.item() for tensor in tensors], sent_s))

    def end_iteration(self) -> str:
        self.calls.append("end")
        return "record"

    def end_step(self) -> None:
        self.calls.append("end step")

    def forward(self, unit: Any, inputs: Any) -> Any:
        return self._compute("forward", unit, inputs)

    def backward(self, unit: Any, inputs: Any) -> Any:
        return self._compute("backward", unit, inputs)

    def _compute(self, kind: str, unit: Any, inputs: Any) -> Any:
        got = inputs and [tensor.item() for tensor in inputs]
        self.calls.append((kind, str(unit), got))
        made = [torch.tensor(100.0 + self.ended)]
        self._alive = [weakref.ref(tensor) for tensor in (*made, *(inputs or []))]
        return made

    def sent(self, unit: Any) -> None:
        # Not before: what a unit made and got would take memory from the next.
        self.calls.append(("sent", str(unit), [alive() for alive in self._alive]))


def run_of(schedule: Schedule, stage: int, parts: Any, channel: Any) -> StageRun:
    clocks = np.arange(schedule.is_backward.size).reshape(schedule.is_backward.shape)
    order = IterationOrder(Phase.STEADY, schedule, clocks)
    return StageRun(order, stage, parts, parts.request, channel, SPECS)


def test_each_unit_is_timed_sent_and_followed_by_the_next_ones_clock():
    parts: Any = Parts()
    schedule = builders.one_f_one_b(2, 2)
    run = run_of(schedule, 0, parts, parts)
    assert execute(schedule, 0, parts, run) == "record"
    assert run.executed == ["F0", "F1", "B0", "B1"]
    assert parts.calls == [
        ("begin step", "1f1b", SPECS),
        ("begin", "1f1b", 0),
        ("unit", None),
        ("forward", "F0", None),
        (1, "event 1"),
        ("send", "F0", [100.0], 1.0),
        ("sent", "F0", [None]),
        ("unit", None),
        ("forward", "F1", None),
        (2, "event 2"),
        ("send", "F1", [101.0], 2.0),
        ("sent", "F1", [None]),
        ("unit", 2.25),
        ("backward", "B0", [2.0]),
        (3, "event 3"),
        ("sent", "B0", [None, None]),
        ("unit", 3.25),
        ("backward", "B1", [3.0]),
        (0, "event 4"),  # for the next iteration's first
        ("sent", "B1", [None, None]),
        "end",
        "end step",
    ]


def test_units_of_a_framework_are_timed_without_messages():
    parts: Any = Parts()
    schedule = builders.interleaved(2, 2, 2)
    run = run_of(schedule, 1, parts, None)
    run.begin()
    seen = []
    while run.next_unit is not None:
        seen.append(run.next_unit)
        assert run.begin_unit() is None
        assert run.next_unit is seen[-1]  # also while it runs
        run.end_unit([])
    assert run.end() == "record"
    assert tuple(seen) == schedule.stages[1]
    assert run.executed == [unit.label(2) for unit in schedule.stages[1]]
    units = len(seen)
    clocks = [(units + (n + 1) % units, f"event {n + 1}") for n in range(units)]
    each = [call for clock in clocks for call in (("unit", None), clock)]
    assert parts.calls == [("begin", schedule.name, 1), *each, "end"]


class World:
    """A wall clock, and an emulated GPU whose unit takes as long as at its highest clock."""

    def __init__(self) -> None:
        self.wall_s, self.end_s = 1000.0, 50.0
        self.calls: list[Any] = []

    def monotonic(self) -> float:
        return self.wall_s

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.calls.append(("sleep", duration_s))
        self.wall_s += duration_s

    def anchor(self, wall_s: float) -> None:
        self.calls.append(("anchor", wall_s))

    def advance_to(self, end_s: float) -> None:
        self.calls.append(("advance", end_s))
        self.end_s = max(self.end_s, end_s)

    def committed_end_s(self) -> float:
        return self.end_s

    def run_unit(self, kind: str, time_at_max_s: float, ready_s: float) -> Any:
        self.calls.append(kind)
        start_s = max(self.end_s, ready_s)
        self.end_s = start_s + time_at_max_s
        return SimpleNamespace(start_s=start_s, end_s=self.end_s)

    def settle(self) -> None:
        self.calls.append("settle")


@pytest.fixture
def world(monkeypatch) -> Any:
    world = World()
    monkeypatch.setattr(emulated_executor, "time", world)
    return world


def test_the_wall_clock_follows_emulated_time(world):
    times_s = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
    # Another stage is a quarter of a second behind.
    timed = EmulatedExecutor(world, times_s, lambda own_s: own_s + 0.25, world.settle)
    timed.begin_iteration(builders.one_f_one_b(1, 2), 0)
    assert world.calls == [("advance", 50.25), ("anchor", 949.75)]
    ends = []
    for sent_s, real_s in ((None, 0.5), (52.0, 1.125), (None, 5.0), (55.0, 0.0)):
        timed.begin_unit(sent_s)
        world.calls.clear()
        world.wall_s += real_s
        end_s, completion = timed.end_unit()
        assert completion.query() is True
        ends.append((end_s, *world.calls))
    assert ends == [
        (51.25, "settle", "forward", ("sleep", 0.5)),
        (54.0, "settle", "backward", ("sleep", 1.625)),
        (55.0, "settle", "forward"),  # the host is late, and catches up
        (57.0, "settle", "backward"),
    ]
    assert (timed.fidelity.units, timed.fidelity.overruns) == (4, 2)
    assert list(timed.fidelity.real_shares) == [0.5, 0.5625, 5.0, 0.0]
    world.calls.clear()
    record = timed.end_iteration()
    assert world.calls == ["settle", ("advance", 57.25)]
    assert record.start_s.tolist() == [0.0, 1.75, 3.75, 4.75]
    assert record.end_s.tolist() == [1.0, 3.75, 4.75, 6.75]
    assert record.receive_wait_s.tolist() == [0.0, 0.75, 0.0, 0.0]
    assert (record.begin_s, record.iteration_time_s) == (50.25, 7.0)
    assert record.wall_time_s == world.wall_s - 1000.0 == 8.75


def test_outside_iterations_only_what_is_waited_for_takes_emulated_time(world):
    timed = EmulatedExecutor(world, {}, lambda own_s: own_s, world.settle)
    timed.wait_for_message(None)
    assert (timed.now_s(), world.calls) == (50.0, [])
    timed.wait_for_message(60.0)
    assert timed.now_s() == 60.0
    world.calls.clear()
    timed.let_counter_refresh()
    assert world.calls == ["settle", ("advance", 60.2), ("anchor", 1000.0 - 60.2)]


class Neighbour:
    """Channel and executor beside which a stage sits that answers each message after a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, emulated: bool) -> None:
        self.calls: list[Any] = []
        self.wall_s, self.emulated = 7.0, emulated
        self.received = 0
        monkeypatch.setattr(p2p_latency, "time", SimpleNamespace(monotonic=lambda: self.wall_s))

    def meet(self) -> float:
        return 5.0

    def wait_for_message(self, sent_s: float | None) -> None:
        self.calls.append(("waited", sent_s))
        self.wall_s += 0.5  # on the device

    def expect(self, messages: Any, specs: Any) -> None:
        self.calls.append(("expect", messages, specs))

    def receive(self, unit: Any) -> Message:
        trip_s = 100.0 if self.received < 3 else [1.0, 9.0, 2.0, 1.0][self.received % 4]
        self.received += 1
        self.wall_s += trip_s
        self.calls.append(("receive", str(unit)))
        return Message([], 5.0 + trip_s if self.emulated else None)

    def send(self, unit: Any, tensors: list[torch.Tensor], sent_s: float | None) -> None:
        self.calls.append(("send", str(unit), [tuple(tensor.shape) for tensor in tensors], sent_s))

    def end_step(self) -> None:
        self.calls.append("end step")


@pytest.mark.parametrize("emulated", [True, False])
def test_a_hop_is_half_the_median_of_the_round_trips_after_the_first(monkeypatch, emulated):
    beside: Any = Neighbour(monkeypatch, emulated=emulated)
    found_s = measure_p2p_latency_s(0, 2, beside, SPECS, beside)
    # Eleven of 1, 9, 2 and 1 s, and what the device takes to see them.
    assert found_s == (0.5 if emulated else 0.75)
    number = beside.received
    calls = iter(beside.calls)
    assert next(calls) == ("expect", {Kind.BACKWARD: number}, SPECS)
    for n in range(number):
        arrived_s = 105.0 if n < 3 else [6.0, 14.0, 7.0, 6.0][n % 4]
        assert next(calls) == ("send", f"F{n}", [(2, 3)], 5.0)
        assert next(calls) == ("receive", f"B{n}")
        assert next(calls) == ("waited", arrived_s if emulated else None)
    assert list(calls) == ["end step"]


@pytest.mark.parametrize("emulated", [True, False])
def test_the_last_stage_sends_every_message_back_with_its_time(monkeypatch, emulated):
    beside: Any = Neighbour(monkeypatch, emulated=emulated)
    assert measure_p2p_latency_s(1, 2, beside, SPECS, beside) == 0.0
    expect, *calls, last = beside.calls
    assert expect == ("expect", {Kind.FORWARD: beside.received}, SPECS)
    assert last == "end step"
    for number in range(beside.received):
        received, sent, waited = calls[3 * number : 3 * number + 3]
        assert received == ("receive", f"F{number}")
        assert sent == ("send", f"B{number}", [(2, 3)], waited[1])
        assert (waited[1] is not None) is emulated


def test_a_stage_serves_the_boundary_before_it_first(monkeypatch):
    beside: Any = Neighbour(monkeypatch, emulated=True)
    measure_p2p_latency_s(1, 3, beside, SPECS, beside)
    kinds = [next(iter(call[1])) for call in beside.calls if call[0] == "expect"]
    assert kinds == [Kind.FORWARD, Kind.BACKWARD]


def test_a_record_tells_waits_units_and_its_end():
    record = make_record([0.5, 2.0], [1.0, 4.0], 10.0, 5.0, 6.0)
    assert record.receive_wait_s.tolist() == [0.5, 1.0]
    assert record.unit_time_s.tolist() == [0.5, 2.0]
    assert (record.end_of_iteration_s, record.wall_time_s) == (15.0, 6.0)
