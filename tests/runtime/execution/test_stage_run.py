"""What a stage's units are made of, in one process: calls, messages, clocks and emulated time."""

import logging
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_stages import SPECS, OtherStages
from random_orders import random_order

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.orders.builders import one_f_one_b, split_in_place
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.presets import times_by_kind_s
from envpipe_megatron.runtime.execution.executor import (
    EmulatedExecutor,
    Passed,
    always,
)
from envpipe_megatron.runtime.execution.stage_run import (
    IterationOrder,
    Rehearsal,
    StageRun,
    execute,
)
from host_executor import make_record

#: What executors sleep by.
CLOCK = "envpipe_megatron.runtime.execution.executor.time"
RECORD = make_record([0.5, 2.0], [1.0, 4.0], 10.0, 5.0)


class Parts:
    """Executor, channel, clock and work of one stage, which note how they are called."""

    def __init__(self, *, lets_go: bool = False) -> None:
        self.calls: list[Any] = []
        self.ended = 0
        self.lets_go = lets_go

    def begin_step(self, schedule: Schedule, specs: Any) -> None:
        self.calls.append(("begin step", schedule.name, specs))

    def begin_iteration(self, schedule: Schedule, stage: int) -> None:
        self.calls.append(("begin", schedule.name, stage))

    def receive(self, unit: Any) -> list[torch.Tensor]:
        self.calls.append(("receive", str(unit)))
        return [torch.tensor(float(self.ended))]

    def begin_unit(self) -> Passed:
        self.calls.append("unit")
        looks = iter([False, True])
        text = f"input {self.ended + 1}"
        return lambda: next(looks) or self.calls.append(f"{text} has not come")

    def end_unit(self) -> Passed:
        self.ended += 1
        return always

    def request(self, frequency_mhz: int, after: Any) -> None:
        self.calls.append((frequency_mhz, after))

    def send(self, unit: Any, tensors: list[torch.Tensor]) -> None:
        self.calls.append(("send", str(unit), [tensor.item() for tensor in tensors]))

    def check(self) -> None:
        self.calls.append("check")

    def end_iteration(self, check: Any) -> Any:
        self.checks = check
        self.calls.append("end")
        return lambda: self.calls.append("read") or RECORD

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


def run_of(schedule: Schedule, stage: int, parts: Any) -> StageRun:
    clocks = np.arange(schedule.is_backward.size).reshape(schedule.is_backward.shape)
    order = IterationOrder(Phase.STEADY, schedule, clocks)
    return StageRun(order, stage, parts, parts.request, parts.check)


def test_each_unit_is_timed_sent_and_followed_by_the_next_ones_clock():
    parts: Any = Parts()
    schedule = builders.one_f_one_b(2, 2)
    run = run_of(schedule, 0, parts)

    def unit_ended(unit: Unit) -> None:
        parts.calls.append(("ended", str(unit)))

    execute(parts, run, parts, SPECS, unit_ended)
    assert run.executed == ["F0", "F1", "B0", "B1"]
    assert parts.calls == [
        ("begin step", "1f1b", SPECS),
        ("begin", "1f1b", 0),
        "unit",
        ("forward", "F0", None),
        (1, None),
        ("send", "F0", [100.0]),
        ("sent", "F0", [None]),
        ("ended", "F0"),
        "unit",
        ("forward", "F1", None),
        (2, None),
        ("send", "F1", [101.0]),
        ("sent", "F1", [None]),
        ("ended", "F1"),
        ("receive", "B0"),
        "unit",
        ("backward", "B0", [2.0]),
        (3, None),
        ("sent", "B0", [None, None]),
        ("ended", "B0"),
        ("receive", "B1"),
        "unit",
        ("backward", "B1", [3.0]),
        (0, None),  # for the next iteration's first
        ("sent", "B1", [None, None]),
        ("ended", "B1"),
        "end step",
    ]
    parts.calls.clear()  # an optimizer is handed over
    record = run.end(7)
    assert (record.number, parts.calls) == (7, ["end"])
    assert record.end_s is RECORD.end_s
    assert (record.number, record.iteration_time_s) == (7, RECORD.iteration_time_s)
    assert replace(record, followed=False).start_s is RECORD.start_s
    assert not hasattr(record, "something else")
    assert parts.calls == ["end", "read"]
    assert parts.checks == parts.check


@pytest.mark.parametrize(("stage", "last"), [(0, 4), (1, 3)])
def test_where_a_channel_lets_go_nothing_follows_units_whose_input_may_never_come(stage, last):
    """The last stage's last unit has none."""
    parts: Any = Parts(lets_go=True)
    schedule = builders.one_f_one_b(2, 2)
    run = run_of(schedule, stage, parts)
    execute(parts, run, parts, SPECS)
    assert parts.calls[-3:] == [f"input {last} has not come", "check", "end step"]
    assert run.end().end_s is RECORD.end_s


def test_units_of_a_framework_are_timed_without_messages():
    parts: Any = Parts()
    schedule = builders.interleaved(2, 2, 2)
    run = run_of(schedule, 1, parts)
    run.begin()
    seen = []
    while run.next_unit is not None:
        seen.append(run.next_unit)
        run.begin_unit()
        assert run.next_unit is seen[-1]  # also while it runs
        run.end_unit()
    assert run.end().end_s is RECORD.end_s
    assert tuple(seen) == schedule.stages[1]
    assert run.executed == [unit.label(2) for unit in schedule.stages[1]]
    units = len(seen)
    clocks = [(units + (n + 1) % units, None) for n in range(units)]
    each = [call for clock in clocks for call in ("unit", clock)]
    assert parts.calls == [("begin", schedule.name, 1), *each, "end", "read"]


def test_units_that_another_iterations_stand_for_are_not_timed():
    """Only the iteration is; clocks change as ever."""
    parts: Any = Parts()
    schedule = builders.one_f_one_b(2, 2)
    clocks = np.arange(8).reshape(2, 4)
    order = IterationOrder(Phase.STEADY, schedule, clocks, times_units=False)
    like = make_record([0.0, 1.5, 2.5, 4.0], [1.0, 2.0, 3.5, 5.0], 70.0, 5.5)
    run = StageRun(order, 1, parts, parts.request, like=like)
    run.begin()
    while run.next_unit is not None:
        assert not run.has_ended
        run.begin_unit()
        run.end_unit()
    assert not run.times_units
    assert [call for call in parts.calls if isinstance(call, str)] == ["unit"]
    assert [call[0] for call in parts.calls if isinstance(call, tuple)] == ["begin", 5, 6, 7, 4]
    assert parts.ended == 1
    assert parts.calls[-1] == (4, None)
    parts.end_iteration = lambda check: lambda: make_record([0.25], [6.0], 90.0, 6.5)
    record = run.end(7)
    assert record.start_s == pytest.approx([0.0, 1.8, 3.0, 4.8])
    assert record.end_s == pytest.approx([1.2, 2.4, 4.2, 6.0])
    assert record.receive_wait_s == pytest.approx([0.0, 0.6, 0.6, 0.6])
    assert (record.number, record.begin_s, record.iteration_time_s) == (7, 90.0, 6.5)


def test_the_wall_clock_follows_emulated_time(monkeypatch, tmp_path):
    """Behind units for which the host is late, it catches up."""
    gpu, stages = EmulatedGpu.create("a100-sxm", 0, tmp_path), OtherStages([3.75, 7.25], 0.25)
    wall_s, slept_s, settled = 1000.0, list[float](), list[None]()

    def sleep(duration_s: float) -> None:
        nonlocal wall_s
        slept_s.append(duration_s)
        wall_s += duration_s

    clock = SimpleNamespace(monotonic=lambda: wall_s, sleep=sleep)
    monkeypatch.setattr(CLOCK, clock)
    times_s = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}
    timed: Any = EmulatedExecutor(gpu, times_s, stages, lambda: settled.append(None))  # type: ignore
    timed.begin_iteration(builders.one_f_one_b(2, 2), 0)
    assert gpu.committed_end_s() == 0.25
    for number, real_s in enumerate((0.5, 5.0, 0.0, 1.125), 1):
        timed.begin_unit()
        wall_s += real_s
        assert timed.end_unit()() is True
        assert len(settled) == number
    assert slept_s == pytest.approx([0.5, 1.875])
    assert stages.sent == [(pytest.approx(1.25), 1), (pytest.approx(2.25), 1)]
    record = timed.end_iteration(always)()
    assert record.start_s == pytest.approx([0.0, 1.0, 3.5, 7.0])
    assert record.end_s == pytest.approx([1.0, 2.0, 5.5, 9.0])
    assert record.receive_wait_s == pytest.approx([0.0, 0.0, 1.5, 1.5])
    assert (record.begin_s, record.iteration_time_s) == pytest.approx((0.25, 9.25))
    assert gpu.committed_end_s() == pytest.approx(9.5)
    assert wall_s - 1000.0 == pytest.approx(9.0)
    timed.idle(0.25)
    assert timed.now_s() == pytest.approx(9.75)


@pytest.mark.parametrize("seed", range(5))
def test_emulated_units_wait_for_their_own_inputs_in_any_order(monkeypatch, tmp_path, seed):
    rng, mail = random.Random(seed), dict[tuple[int, int], float]()
    order = random_order(rng, 3, 4, 2, split=seed > 1)
    whole_s, executors = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}, []
    late = SimpleNamespace(monotonic=lambda: 1e9)  # a host that never sleeps
    monkeypatch.setattr(CLOCK, late)
    for stage in range(3):
        gpu, others = EmulatedGpu.create("a100-sxm", stage, tmp_path), OtherStages()
        others.send = lambda end_s, to, tag: mail.update({(to, tag): end_s}) or []  # type: ignore
        others.receive = lambda _, tag, stage=stage: mail.pop((stage, tag))  # type: ignore
        executors.append(EmulatedExecutor(gpu, whole_s, others, lambda: None))  # type: ignore
        executors[-1].begin_iteration(order, stage)
    late.monotonic = lambda: 2e9
    for node in order.topological_order:
        executor = executors[order.stage_of(node)]
        executor.begin_unit()
        executor.end_unit()
    assert not mail
    prices_s = np.array([times_by_kind_s(whole_s)[kind] for kind in Kind])
    expected = Timeline(order, prices_s[order.priced_kinds])
    for stage, executor in enumerate(executors):
        ends_s = [end_s for _, end_s in executor._times_s]
        assert ends_s == pytest.approx(expected.end_s[stage].tolist())


# An error in work that is rehearsed ------------------------------------------------------------


#: The stage between two others sends all that it makes, but for weight gradients.
ORDER, STAGE = split_in_place(one_f_one_b(3, 2), 2), 1
UNITS = [str(unit) for unit in ORDER.stages[STAGE]]
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

    def drop(self) -> None:
        self.ran.append("dropped")


def run(work: Work) -> tuple[Rehearsal, dict[str, list[torch.Tensor]]]:
    sent: dict[str, list[torch.Tensor]] = {}
    parts: Any = Parts()
    parts.send = lambda unit, outputs: sent.update({str(unit): outputs})
    rehearsal = Rehearsal(ORDER, SPECS)
    execute(rehearsal.of(work, work.drop), run_of(ORDER, STAGE, parts), parts, SPECS)
    return rehearsal, sent


def test_without_an_error_work_runs_as_it_is() -> None:
    rehearsal, sent = run(work := Work())
    assert rehearsal.error is None
    assert work.ran == [each for unit in UNITS for each in (unit, f"{unit} is sent")]
    assert list(sent) == [unit for unit in UNITS if unit[0] != "W"]
    assert all(torch.stack(outputs).eq(1).all() for outputs in sent.values())


@pytest.mark.parametrize("fails_at", UNITS)
def test_behind_an_error_messages_are_empty_and_nothing_runs(
    fails_at: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rehearsal, sent = run(work := Work(fails_at))
    assert rehearsal.error == f"RuntimeError: {fails_at} of a test"
    assert "and more" in caplog.text
    assert len(caplog.records) == 1
    assert work.ran[-2:] == [fails_at, "dropped"]
    assert list(sent) == [unit for unit in UNITS if unit[0] != "W"]
    for unit, outputs in sent.items():
        failed = UNITS.index(unit) >= UNITS.index(fails_at)
        kind = Kind.FORWARD if unit[0] == "F" else Kind.BACKWARD
        shapes = [each.shape for each in ZEROS[kind]]
        assert [each.shape for each in outputs] == shapes
        assert all(each.eq(0 if failed else 1).all() for each in outputs)
