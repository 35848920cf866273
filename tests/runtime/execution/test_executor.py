"""CUDA events around units, on a stand-in for CUDA that takes the time it is told."""

from types import SimpleNamespace
from typing import Any

import pytest

from envpipe_megatron.core.orders import builders
from envpipe_megatron.runtime.execution import executor

CHECK = object()


class Cuda:
    """Work on one stream takes `time_s` along; the host is as far."""

    def __init__(self):
        self.time_s, self.made = 100.0, 0
        self.host_is_late = False
        self.waited: list[str] = []
        #: How far the device is, where a test says so, and which instants the host saw pass.
        self.device_s: float | None = None
        self.seen_s: list[float] = []
        self.stream = SimpleNamespace(synchronize=lambda: self.waited.append("stream"))
        cuda = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing
                cuda.made += 1

            def record(self, stream):
                assert stream is cuda.stream
                self.at_s = cuda.time_s

            def elapsed_time(self, later):
                return (later.at_s - self.at_s) * 1e3

            def query(self):
                return cuda.host_is_late if cuda.device_s is None else self.at_s <= cuda.device_s

        self.Event = Event

    def current_stream(self):
        return self.stream

    def wait_for(self, passed: Any, check: Any) -> None:
        assert check is CHECK
        self.waited.append("event")
        self.seen_s.append(passed.__self__.at_s)

    def begin(self, timed: Any, begin_s: float, *units_s: float) -> list[Any]:
        """Run units of an iteration that begins then; what stands for their ends."""
        self.time_s, ends = begin_s, []
        timed.begin_iteration(builders.one_f_one_b(1, 2), 0)
        for unit_s in units_s:
            timed.begin_unit()
            self.time_s += unit_s
            ends.append(timed.end_unit())
        return ends


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(executor, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(executor, "time", SimpleNamespace(monotonic=lambda: cuda.time_s))
    monkeypatch.setattr(executor, "wait_for", cuda.wait_for)
    return cuda


def test_units_and_waits_are_timed_by_events_that_are_used_every_third_iteration(cuda):
    timed, schedule = executor.CudaExecutor(), builders.one_f_one_b(1, 2)
    ends = []
    for number in range(4):
        cuda.time_s = begin_s = 100.0 * (number + 1)
        timed.begin_iteration(schedule, 0)
        for wait_s, unit_s in ((0.0, 0.5), (0.25, 1.0), (0.0, 2.0)):
            cuda.time_s += wait_s
            timed.begin_unit()
            cuda.time_s += unit_s
            ends.append(timed.end_unit())
        assert not cuda.waited
        record = timed.end_iteration(CHECK)()
        assert cuda.waited.pop() == "event"
        assert record.start_s.tolist() == pytest.approx([0.0, 0.75, 1.75])
        assert record.end_s.tolist() == pytest.approx([0.5, 1.75, 3.75])
        assert record.receive_wait_s.tolist() == pytest.approx([0.0, 0.25, 0.0])
        assert record.begin_s == pytest.approx(begin_s)
        assert record.iteration_time_s == pytest.approx(3.75)
        if number == 2:
            made = cuda.made
            assert len({*ends}) == len(ends)  # the controller may still look at them
    assert cuda.made == made


def test_a_host_that_comes_after_the_last_unit_waits_for_nothing(cuda):
    """It knows when an earlier event passed, and counts from there, for half a minute."""
    timed, waits = executor.CudaExecutor(), []
    for begin_s in (100.0, 110.0, 125.0, 145.0):
        cuda.host_is_late = begin_s > 100
        cuda.begin(timed, begin_s, 1.5, 1.5)
        if cuda.host_is_late:
            cuda.time_s += 2.0  # the optimizer's
        record = timed.end_iteration(CHECK)()
        assert record.begin_s == pytest.approx(begin_s)
        assert record.iteration_time_s == pytest.approx(3.0)
        waits.append(len(cuda.waited))
    assert waits == [1, 1, 1, 2]


def test_times_may_be_read_while_the_next_iteration_runs(cuda):
    """Nothing is waited for then, and what the next one records changes none of them."""
    timed, reads = executor.CudaExecutor(), []
    for number in range(4):
        cuda.host_is_late = number > 0
        cuda.begin(timed, 100.0 + 9.0 * number, 1.0 + number, 1.0 + number)
        reads.append(timed.end_iteration(CHECK))
        if number:
            record = reads[number - 1]()
            assert record.begin_s == pytest.approx(100.0 + 9.0 * (number - 1))
            assert record.end_s.tolist() == pytest.approx([number, 2.0 * number])
    assert cuda.waited == ["event"]  # for a look at the clock


def test_a_look_at_the_clock_waits_for_the_event_that_comes_next_or_for_none(cuda):
    """And not for all that the next iteration has handed over."""
    timed = executor.CudaExecutor()

    def iterate(*times_s: float) -> Any:
        cuda.begin(timed, *times_s)
        return timed.end_iteration(CHECK)

    cuda.device_s = 0.0  # nothing has passed
    assert iterate(100.0, 1.0, 1.0)().begin_s == pytest.approx(100.0)
    for begin_s, looks in ((200.0, True), (400.0, False)):
        if not looks:
            timed.wait_no_more()
        late = iterate(begin_s, 1.0, 1.0)
        iterate(begin_s + 100.0, 1.0, 2.0, 3.0)
        cuda.device_s, cuda.seen_s = begin_s + 101.5, []
        cuda.time_s = begin_s + 103.0  # the host goes on when the event has passed
        assert late().begin_s == pytest.approx(begin_s)
        assert cuda.seen_s == ([begin_s + 103.0] if looks else [])


def test_a_look_that_waits_for_none_changes_no_time_of_an_iteration_not_read_yet(cuda):
    """The event that was seen last may be one of its own, and all that came since have passed."""
    timed, reads = executor.CudaExecutor(), list[Any]()
    for number, begin_s in enumerate((100.0, 200.0, 300.0, 340.0)):
        cuda.begin(timed, begin_s, 1.0, 1.0)
        # Of the third iteration, the host sees an event; when it is read, all others have passed.
        cuda.device_s = begin_s + (1.5 if number == 2 else 9.0)
        if number:
            record = reads[-1]()
            assert record.end_s.tolist() == pytest.approx([1.0, 2.0]), number
        reads.append(timed.end_iteration(CHECK))


def test_a_look_at_the_clock_changes_no_time_of_the_iteration_that_runs(cuda):
    """As a session reads: behind the last unit of the next iteration, before its end is said."""
    timed, read, looks = executor.CudaExecutor(), None, 0
    for number in range(8):
        begin_s = 100.0 + 12.0 * number  # a look is due in every third
        cuda.begin(timed, begin_s, 1.0, 1.0)
        cuda.device_s, cuda.seen_s = begin_s + 1.5, []
        if read is not None:
            record = read()
            assert record.begin_s == pytest.approx(begin_s - 12.0)
            assert record.start_s.tolist() == pytest.approx([0.0, 1.0])
            assert record.end_s.tolist() == pytest.approx([1.0, 2.0])
            looks += len(cuda.seen_s)
        read = timed.end_iteration(CHECK)
    assert looks == 3


def test_outside_iterations_the_hosts_clock_tells_the_time(cuda, monkeypatch):
    timed = executor.CudaExecutor()
    assert timed.now_s() == 100.0
    slept: list[float] = []
    monkeypatch.setattr(executor.time, "sleep", slept.append, raising=False)
    timed.idle(0.2)
    assert slept == [0.2]
