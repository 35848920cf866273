"""The ledger of one GPU: its lines leave nothing out, whatever its rank says or does not say."""

import itertools
import json
import math
from dataclasses import asdict
from typing import Any
from unittest.mock import Mock

import pytest
from energy_lines import bill, window
from fake_gpu import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

from envpipe_megatron.formats.energy import parse_line, parse_window
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.gpu.base import ClockState, EnergyReading, GpuError
from envpipe_megatron.launch.agent import ledger as ledger_module
from envpipe_megatron.launch.agent.ledger import GpuLedger

LABELS = {"gpu": "fake", "gpu_uid": "fake#0", "rank": 3, "stage": 1}


def uneven_j(time_s: float) -> float:
    """A counter whose power is never the same."""
    return 1000 + 100 * time_s + 20 * math.sin(3 * time_s)


class Billed:
    """A ledger of a GPU whose time a test sets, and what it wrote."""

    def __init__(self, **gpu: Any) -> None:
        self.gpu = FakeGpu(**{"now_s": 5.0, "counter_j": uneven_j, **gpu})
        self.lines: list[dict[str, Any]] = []
        self.ledger = GpuLedger(self.gpu, LABELS, self.write)

    def write(self, line: dict[str, Any]) -> None:
        parse_line(json.dumps(line, allow_nan=False).encode())
        self.lines.append(dict(line))

    def at(self, time_s: float) -> None:
        self.gpu.now_s = time_s

    def window(
        self, begin_s: float, end_s: float, iteration: int = 0, **fields: Any
    ) -> dict[str, Any]:
        """A rank's line, half of it in units."""
        length_s = end_s - begin_s
        begin_j, end_j = self.gpu.counter_j(begin_s), self.gpu.counter_j(end_s)
        own = {
            **LABELS,
            "begin_s": begin_s,
            "duration_s": length_s,
            "compute_s": length_s / 2,
            "blocking_s": length_s / 4,
            "idle_s": length_s / 4,
            "begin_counter": [begin_j, 0.3],
            "end_counter": [end_j, 0.4],
        }
        return {**window(0, iteration, end_j - begin_j), **own, **fields}

    def take(self, begin_s: float, end_s: float, iteration: int = 0, **fields: Any) -> None:
        """A window that has just ended."""
        self.gpu.now_s = max(self.gpu.now_s, end_s)
        self.ledger.take(self.window(begin_s, end_s, iteration, **fields))

    def finish(self) -> None:
        """The rank has ended."""
        self.ledger.bill_up_to(self.ledger.read())

    def spans(self) -> list[tuple[str, float, float]]:
        """Phase, begin and end of each line."""
        return [
            (
                line["phase"],
                round(line["begin_s"], 9),
                round(line["begin_s"] + line["duration_s"], 9),
            )
            for line in self.lines
        ]

    def check(self, begin_s: float = 5.0) -> None:
        """Lines follow each other without a gap, and add up to the counter's difference."""
        end_s = begin_s
        for line in self.lines:
            assert line["begin_s"] == pytest.approx(end_s)
            assert line["duration_s"] > 0
            parts_s = line["compute_s"] + line["blocking_s"] + line["idle_s"]
            assert parts_s == pytest.approx(line["duration_s"])
            end_s = line["begin_s"] + line["duration_s"]
        total_j = math.fsum(line["energy_j"] for line in self.lines)
        counted_j = self.gpu.counter_j(end_s) - self.gpu.counter_j(begin_s)
        assert total_j == pytest.approx(counted_j, abs=1e-6)
        assert self.ledger.energy_j == pytest.approx(total_j, abs=1e-6)


@pytest.fixture
def bills() -> Billed:
    return Billed()


# For those who look now -----------------------------------------------------------------------
def test_looks_at_the_clock_add_up_to_times_in_which_it_was_held_back(bills, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(ledger_module.time, "monotonic", lambda: now_s)
    own = bills.ledger.clock()
    assert own == bills.gpu.clock_state()
    state = {"requested_mhz": 1200, "observed_mhz": 1100}
    for seconds, *reasons in [(0, "power cap"), (0.5, "power cap", "sync boost"), (0.5, "idle"),
                              (60, "power cap"), (0.5,)]:  # fmt: skip
        now_s += seconds
        bills.ledger.look({**state, "throttle_reasons": reasons})
    assert bills.ledger.throttled_s == {"power cap": 0.5, "sync boost": 0.5}
    assert bills.ledger.clock() == ClockState(1200, 1100)
    now_s += 4  # the rank has ended: what it saw tells nothing of now
    assert bills.ledger.clock() == own
    with pytest.raises(KeyError):
        bills.ledger.look({})


# Windows -------------------------------------------------------------------------------------
def test_windows_and_what_lies_between_add_up(bills):
    bills.take(5.55, 6.7, 10)
    bills.take(6.7, 7.0, 11)
    bills.take(8.0, 8.55, 12)
    bills.at(9.0)
    bills.finish()
    bills.finish()  # bills nothing twice
    assert bills.spans() == [
        ("between", 5, 5.55),
        ("steady", 5.55, 6.7),
        ("steady", 6.7, 7.0),
        ("between", 7.0, 8.0),
        ("steady", 8.0, 8.55),
        ("between", 8.55, 9.0),
    ]
    assert [line["first_iteration"] for line in bills.lines] == [0, 10, 11, 11, 12, 12]
    assert bills.lines[1]["compute_s"] == pytest.approx(1.15 / 2)
    assert "begin_counter" not in bills.lines[1]
    # Of both ends, by the rank and by a reading that has none, and of the counter's resolution.
    uncertainties_j = [line["energy_uncertainty_j"] for line in bills.lines]
    assert uncertainties_j[0] == pytest.approx(math.hypot(0.3, 0.001))
    assert uncertainties_j[2] == pytest.approx(math.hypot(0.4, 0.4, 0.001))
    assert uncertainties_j[-1] == pytest.approx(math.hypot(0.4, 0.001))
    bills.check()


def test_windows_that_meet_but_for_rounding_have_nothing_between(bills):
    begins_s = [5.0 + 0.1 * math.sqrt(i) for i in range(40)]
    for begin_s, end_s in itertools.pairwise(begins_s):
        bills.take(begin_s, end_s)
    assert {phase for phase, *_ in bills.spans()} == {"steady"}
    bills.check()


def test_nothing_is_saved_by_ranks_that_share_a_gpu():
    """What one rank's window leaves of the other's is no step that took less time and energy."""
    bills = Billed(counter_j=lambda time_s: 100 * time_s)
    baseline = asdict(StepEnergy(9, 1.0, 0.01, 100.0, 0.5))
    for step, rank in itertools.product(range(40), range(2)):
        begin_s = 5.1 + step + 0.03 * rank
        bills.take(begin_s, begin_s + 1, step, rank=rank, baseline=baseline)
    bills.finish()
    found = bill(*bills.lines).comparison()
    assert (found.saving_percent, found.slowdown_percent) == pytest.approx((0.0, 0.0), abs=1e-6)
    bills.check()


def test_iterations_of_minutes_are_no_gaps(bills):
    """The window of one is written when the next one ends."""
    bills.at(1500.0)
    assert not bills.ledger.is_behind()
    bills.take(5.0, 805.0, 0)
    bills.at(2405.0)
    assert not bills.ledger.is_behind()
    bills.take(805.0, 1605.0, 1)
    assert bills.spans() == [("steady", 5, 805), ("steady", 805, 1605)]
    bills.at(5606.0)
    assert bills.ledger.is_behind()
    bills.finish()
    assert not bills.ledger.is_behind()
    bills.check()


#: In thousandths: shorter windows have energies that rounding makes negative.
parts = st.integers(0, 1000).map(lambda part: part / 1000)
events = st.one_of(
    st.tuples(st.just("time"), st.one_of(st.floats(0.01, 1.5), st.floats(100, 400))),
    st.tuples(st.just("window"), parts, parts),
    st.tuples(st.just("again")),
    st.tuples(st.just("finish")),
)


@settings(deadline=None)
@given(st.lists(events, max_size=25))
def test_nothing_is_lost_or_billed_twice_whatever_windows_come(happened):
    """Late, overlapping, out of order, repeated, of no length, and of ranks that start again."""
    bills = Billed()
    gpu, ledger = bills.gpu, bills.ledger
    last, most_j = bills.window(5.0, 5.0), 0.0
    for event, *values in happened:
        if event == "time":
            bills.at(gpu.now_s + values[0])
        elif event == "finish":
            bills.finish()
        else:
            if event == "window":
                begin_s = gpu.now_s - 4 * values[0]
                last = bills.window(begin_s, begin_s + (gpu.now_s - begin_s) * values[1])
            ledger.take(last)
        assert ledger.energy_j >= most_j, "a monitor would take it for a new counter"
        most_j = ledger.energy_j
    bills.at(gpu.now_s + 0.2)
    bills.finish()
    bills.check()


# The counter ---------------------------------------------------------------------------------
def test_a_reading_is_as_uncertain_as_its_instant(bills, monkeypatch):
    monkeypatch.setattr(type(bills.gpu), "power_w", 300.0)
    monkeypatch.setattr(bills.gpu, "read_energy", lambda: EnergyReading(1700.0, 7.0, 0.002))
    bills.finish()
    assert bills.lines[0]["energy_uncertainty_j"] == pytest.approx(math.hypot(0.6, 0.001))


def test_a_counter_that_goes_back_loses_what_it_had_counted(caplog):
    """Between two windows, or before a reading; a rank bills no window over it."""
    bills = Billed(counter_j=lambda time_s: (1000 if time_s < 7.25 else 0) + 100 * time_s)
    bills.take(5.0, 6.0)
    bills.take(8.0, 9.0)
    assert bills.spans() == [("steady", 5, 6), ("steady", 8, 9)]
    bills.gpu.counter_j = lambda time_s: 10 * time_s
    bills.at(11.0)
    bills.finish()
    bills.take(11.0, 12.0)
    assert [line["energy_j"] for line in bills.lines] == pytest.approx([100, 100, 10])
    assert caplog.text.count("went back") == 2
    assert bills.ledger.energy_j == pytest.approx(210)


def test_a_single_wrong_reading_is_not_billed(caplog):
    bills = Billed(counter_j=lambda time_s: (time_s < 7.25 or time_s > 7.75) * (1e9 + 100 * time_s))
    bills.take(5.0, 6.0)
    bills.take(7.5, 7.6)
    bills.take(8.0, 9.0)
    assert [line["energy_j"] for line in bills.lines] == pytest.approx([100, 0, 100])
    assert caplog.text.count("went back or leapt") == 2


def test_readings_at_instants_that_are_not_exact_are_no_counter_that_went_back(bills, caplog):
    """The end of a window was taken a little late, the reading behind it a little early."""
    end_j = uneven_j(6.0)
    bills.take(5.0, 5.99, end_counter=[end_j + 3.0, 2.0])
    bills.at(6.0)
    bills.finish()
    bills.at(7.0)
    bills.finish()
    assert bills.spans() == [("steady", 5, 5.99), ("between", 5.99, 7)]
    assert bills.ledger.energy_j == pytest.approx(uneven_j(7) - uneven_j(5))
    assert caplog.text == ""


def test_a_counter_that_cannot_be_read_is_billed_later(bills, caplog):
    bills.gpu.error = GpuError("not now")
    bills.at(6.0)
    bills.finish()
    bills.finish()
    assert caplog.text.count("cannot be read: not now") == 1
    assert bills.lines == []
    bills.gpu.error = None
    bills.at(7.0)
    bills.finish()
    assert bills.spans() == [("between", 5, 7)]
    bills.check()


def test_a_counter_that_cannot_be_read_at_first():
    """The bill begins with what a rank says, or with a later reading."""
    bills = Billed(error=GpuError("not yet"))
    assert bills.ledger.is_behind()
    bills.take(5.5, 5.8)
    assert bills.spans() == [("steady", 5.5, 5.8)]
    other = Billed(error=GpuError("not yet"))
    other.gpu.error = None
    other.at(6.0)
    other.finish()
    other.take(6.0, 7.0)
    assert other.spans() == [("steady", 6, 7)]


def test_a_gpu_that_does_not_tell_the_time_is_refused(monkeypatch):
    """Of which nobody could say whether its rank is behind."""
    monkeypatch.setattr(gpu := FakeGpu(), "time_s", Mock(side_effect=GpuError("lost")))
    with pytest.raises(GpuError, match="lost"):
        GpuLedger(gpu, LABELS, print)


# What a rank says ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields",
    [
        *(
            {name: value}
            for name in ("begin_s", "duration_s", "energy_j")
            for value in (math.nan, math.inf, "soon", None, [1], 10**400, -1.0)
        ),
        *(
            {"end_counter": value}
            for value in (None, 5, [], [1], [1, 2, 3], [-1, 0], [math.nan, 0], ["1", 0])
        ),
        {"phase": 3},
        {"compute_s": "x"},
        {"last_iteration": 1.5},
        {"format": "envpipe-note/1", "note": "ended"},
        {"begin_s": 1e9},
        {"duration_s": 1e9},
        {"gpu": {1, 2}},
    ],
)
def test_a_window_that_is_none_changes_nothing(bills, fields):
    bills.at(8.0)
    for bad in ({**bills.window(5.5, 6.0), **fields}, {}):
        with pytest.raises((ValueError, TypeError, KeyError, OverflowError)):
            bills.ledger.take(bad)
    bills.take(6.0, 7.0)
    assert bills.spans() == [("between", 5, 6), ("steady", 6, 7)]
    bills.check()


@pytest.mark.parametrize("unknown", [["compute_s"], ["blocking_s"], ["compute_s", "blocking_s"]])
def test_a_window_may_tell_no_shares(bills, unknown):
    bills.take(5.0, 6.0, **dict.fromkeys([*unknown, "idle_s"]))
    (line,) = bills.lines
    assert not {"compute_s", "blocking_s", "idle_s"} & line.keys()


def test_a_gpu_that_trains_for_a_day_has_some_thousand_lines_and_all_joules(bills):
    """And what is shown of it is of its last window."""
    for iteration in range(8640):
        if iteration % 100 == 99:
            bills.at(bills.gpu.now_s + 60.0)  # an evaluation
        begin_s = bills.gpu.now_s
        bills.take(begin_s, begin_s + 10.0, iteration)
    step_j = bills.gpu.counter_j(bills.gpu.now_s) - bills.gpu.counter_j(begin_s)
    last = bills.ledger.last
    assert (last.duration_s, last.energy_j) == pytest.approx((10.0, step_j))
    behind_s = bills.gpu.now_s - bills.spans()[-1][2]
    assert 0 < behind_s < 610, "the log lacks ten minutes at most"
    bills.finish()
    assert len(bills.lines) < 700
    bills.check()
    steady = [line for line in bills.lines if line["phase"] == "steady"]
    assert sum(parse_window(line).steps for line in steady) == 8640
