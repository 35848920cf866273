"""The ledger of one GPU: its lines leave nothing out, whatever its rank tells or does not tell."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_gpu import FakeGpu
from hypothesis import given, settings
from hypothesis import strategies as st

from envpipe_megatron.formats.energy import parse_line
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.launch import ledger as ledger_module
from envpipe_megatron.launch.ledger import GpuLedger

LABELS = {"gpu": "fake", "gpu_uid": "fake#0", "rank": 3, "stage": 1}


@pytest.fixture(autouse=True)
def _polls_when_asked(monkeypatch):
    monkeypatch.setattr(ledger_module, "_POLL_S", 3600)


def uneven_j(time_s: float) -> float:
    """A counter whose power is never the same."""
    return 100 * time_s + 20 * math.sin(3 * time_s)


def window(begin_s: float, end_s: float, iteration: int = 0, **fields):
    """A rank's line, half of it in units; it has metered a power that nobody else would."""
    length_s = end_s - begin_s
    return {
        "format": "envpipe-energy/1",
        **LABELS,
        "phase": "steady",
        "first_iteration": iteration,
        "last_iteration": iteration,
        "begin_s": begin_s,
        "duration_s": length_s,
        "energy_j": 77 * length_s,
        "energy_uncertainty_j": 0.25,
        "compute_s": length_s / 2,
        "blocking_s": length_s / 4,
        "idle_s": length_s / 4,
        **fields,
    }


class Billed:
    """A ledger of a GPU in the test's hands, and what it wrote."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.lines: list[dict] = []
        self.ledger = GpuLedger(gpu, LABELS, self.write)
        self.begin_s = self.ledger._meter.last_refresh_s

    def write(self, line: dict) -> None:
        json.dumps(line, allow_nan=False)
        parse_line(json.dumps(line).encode())
        self.lines.append(dict(line))

    def at(self, *times_s: float) -> None:
        """Let time come to these instants, and the meter look there."""
        for time_s in times_s:
            self.gpu.now_s = time_s
            self.ledger.look()
            self.ledger.settle()

    def at_each(self, begin_s: float, end_s: float, step_s: float = 0.1) -> None:
        self.at(*(begin_s + step_s * i for i in range(round((end_s - begin_s) / step_s) + 1)))

    @property
    def phases(self) -> list[str]:
        return [line["phase"] for line in self.lines]

    def spans(self, phase: str) -> list[tuple[float, float]]:
        return [
            (pytest.approx(line["begin_s"]), pytest.approx(line["begin_s"] + line["duration_s"]))
            for line in self.lines
            if line["phase"] == phase
        ]

    def check(self, energy_j: float | None = None) -> None:
        """Lines meet, each as long as its shares, and add up to what the counter counted."""
        for one, other in itertools.pairwise(self.lines):
            assert one["begin_s"] + one["duration_s"] == pytest.approx(other["begin_s"], abs=1e-9)
        for line in self.lines:
            assert line["duration_s"] > 0
            assert line["energy_j"] >= 0
            shares_s = line["compute_s"] + line["blocking_s"] + line["idle_s"]
            assert shares_s == pytest.approx(line["duration_s"], abs=1e-9)
        if energy_j is None:
            last_s = self.ledger._meter.last_refresh_s
            energy_j = self.gpu.counter_j(last_s) - self.gpu.counter_j(self.begin_s)
        total_j = math.fsum(line["energy_j"] for line in self.lines)
        assert total_j == pytest.approx(energy_j, abs=1e-6)
        assert self.ledger.energy_j == pytest.approx(total_j, abs=1e-6)


@contextmanager
def billed(gpu: FakeGpu) -> Iterator[Billed]:
    made = Billed(gpu)
    try:
        yield made
    finally:
        made.ledger.close()


@pytest.fixture
def bills() -> Iterator[Billed]:
    with billed(FakeGpu(now_s=5.0, counter_j=uneven_j)) as made:
        yield made


class WaitingGpu(FakeGpu):
    """Its first reading comes with the next refresh."""

    def read_energy(self):
        self.now_s = max(self.now_s, 5.1)
        return super().read_energy()


def test_a_bill_begins_at_the_first_reading_which_may_wait_for_a_refresh():
    with billed(WaitingGpu(now_s=5.03, counter_j=uneven_j)) as bills:
        assert bills.begin_s == pytest.approx(5.1)
        bills.at_each(5.2, 8.0)
        bills.ledger.take(window(6.0, 7.0))
        bills.ledger.finish()
        assert bills.phases == ["between", "steady", "between"]
        bills.check()


# Windows -------------------------------------------------------------------------------------


def test_windows_and_what_lies_between_add_up(bills):
    bills.at_each(5.1, 9.0)
    bills.ledger.take(window(5.55, 6.7, 10))
    bills.ledger.take(window(6.7, 7.0, 11))
    bills.ledger.take(window(8.0, 8.55, 12))
    assert bills.phases == ["between", "steady", "steady", "between", "steady"]
    assert bills.spans("steady") == [(5.55, 6.7), (6.7, 7.0), (8.0, 8.55)]
    assert [line["first_iteration"] for line in bills.lines] == [0, 10, 11, 11, 12]
    bills.ledger.finish()
    bills.check()
    assert bills.lines[1]["compute_s"] == pytest.approx(1.15 / 2)
    assert all(0 < line["energy_uncertainty_j"] < 10 for line in bills.lines)


def test_a_window_waits_for_the_counter_to_pass_its_end(bills):
    bills.at(5.1, 5.2)
    bills.ledger.take(window(5.0, 5.35))
    assert bills.lines == []
    bills.at(5.3)
    assert bills.lines == []
    bills.at(5.4)
    assert bills.spans("steady") == [(5.0, 5.35)]
    bills.ledger.finish()
    bills.check()


def test_a_window_of_a_rank_that_has_ended_is_billed_as_far_as_it_was_seen(bills):
    """Nothing is guessed: the sum is a difference of two readings."""
    bills.at(5.1, 5.2, 5.27)
    bills.ledger.take(window(5.0, 5.27))
    bills.ledger.finish()
    assert bills.spans("steady") == [(5.0, 5.2)]
    assert bills.lines[0]["energy_j"] == pytest.approx(uneven_j(5.2) - uneven_j(5.0))
    bills.check()


def test_a_window_that_lies_wholly_behind_the_last_refresh_waits_for_the_next(bills):
    bills.at(5.1, 5.29)
    bills.ledger.take(window(5.0, 5.1, 1))
    bills.ledger.take(window(5.21, 5.29, 2))
    bills.ledger.finish()
    assert [line["last_iteration"] for line in bills.lines] == [1, 1]
    bills.check()
    bills.at_each(5.3, 6.0)
    bills.ledger.finish()
    assert bills.phases == ["steady", "between", "between", "steady", "between"]
    assert bills.spans("steady") == [(5.0, 5.1), (5.21, 5.29)]
    bills.check()


def test_lost_windows_are_between(bills):
    bills.at_each(5.1, 8.0)
    bills.ledger.take(window(5.0, 6.0, 0))
    bills.ledger.take(window(7.0, 8.0, 2))
    assert bills.phases == ["steady", "between", "steady"]
    bills.check()


def test_windows_that_were_billed_before_are_passed_over(bills):
    """Repeated, out of order, within another one, of no length."""
    bills.at_each(5.1, 8.0)
    bills.ledger.take(window(6.0, 7.0, 1))
    for begin_s, end_s in [(6.0, 7.0), (5.0, 6.0), (6.2, 6.7), (7.0, 7.0), (6.5, 6.5)]:
        bills.ledger.take(window(begin_s, end_s, 9))
    assert bills.phases == ["between", "steady"]
    bills.ledger.finish()
    bills.check()


def test_of_a_window_that_overlaps_the_rest_is_billed(bills):
    bills.at_each(5.1, 8.0)
    bills.ledger.take(window(5.0, 6.0, 0))
    bills.ledger.take(window(5.5, 7.5, 1))
    assert bills.spans("steady") == [(5.0, 6.0), (6.0, 7.5)]
    assert bills.lines[1]["compute_s"] == pytest.approx(0.75)
    bills.ledger.finish()
    bills.check()


def test_a_long_gap_is_billed_before_the_next_window_comes(bills):
    bills.at(*range(6, 320))
    assert bills.phases == ["between"]
    assert 300 < bills.lines[0]["duration_s"] < 302
    bills.ledger.take(window(6.0, 319.0))  # an iteration that took that long after all
    assert bills.phases == ["between", "steady"]
    bills.check()


def test_finishing_twice_bills_once(bills):
    bills.at_each(5.1, 6.0)
    bills.ledger.finish()
    bills.ledger.finish()
    assert len(bills.lines) == 1
    bills.check()


def test_a_rank_that_starts_again_goes_on(bills):
    bills.at_each(5.1, 6.0)
    bills.ledger.take(window(5.0, 6.5, 7))
    bills.ledger.finish()
    bills.at_each(6.1, 9.0)
    bills.ledger.labels = {**LABELS, "rank": 0, "stage": 0}
    bills.ledger.take(window(8.0, 8.5, 3, rank=0, stage=0))
    bills.ledger.finish()
    assert bills.phases == ["steady", "between", "steady", "between"]
    assert [line["rank"] for line in bills.lines] == [3, 0, 0, 0]
    bills.check()


parts = st.floats(0, 1)
events = st.one_of(
    st.tuples(st.just("time"), st.floats(0.01, 1.5)),
    st.tuples(st.just("long time"), st.floats(100, 400)),
    st.tuples(st.just("window"), parts, parts, st.sampled_from([0.0, 3600.0])),
    st.tuples(st.just("again")),
    st.tuples(st.just("finish")),
)


@settings(deadline=None)
@given(st.lists(events, max_size=25))
def test_nothing_is_lost_or_billed_twice_whatever_windows_come(happened):
    """Late, overlapping, out of order, repeated, of no length, and of ranks that start again."""
    with billed(FakeGpu(now_s=5.0, counter_j=uneven_j)) as bills, pytest.MonkeyPatch.context() as p:
        gpu, ledger = bills.gpu, bills.ledger
        last, most_j = window(5.0, 5.0), 0.0
        for event, *values in happened:
            if event in ("time", "long time"):
                bills.at(gpu.now_s + values[0])
            elif event == "finish":
                ledger.finish()
            else:
                if event == "window":
                    begin, end, patience_s = values
                    p.setattr(ledger_module, "_PATIENCE_S", patience_s)
                    begin_s = gpu.now_s - 4 * begin
                    last = window(begin_s, begin_s + (gpu.now_s - begin_s) * end)
                ledger.take(last)
            assert ledger.metered_j >= most_j
            most_j = ledger.metered_j
        bills.at(gpu.now_s + 0.2)
        ledger.finish()
        bills.check()
        assert ledger.metered_j == pytest.approx(ledger.energy_j, abs=1e-6)


# The counter ---------------------------------------------------------------------------------


def stall(bills: Billed, monkeypatch) -> None:
    reading = bills.gpu.read_energy()
    monkeypatch.setattr(bills.gpu, "read_energy", lambda: reading)


def test_while_the_counter_stands_still_the_ranks_own_figures_stand_in(bills, monkeypatch, caplog):
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    bills.at_each(5.1, 6.0)
    bills.ledger.take(window(5.0, 6.0, 0))
    with monkeypatch.context() as stalled:
        stall(bills, stalled)
        bills.at_each(6.1, 9.0)
        bills.ledger.take(window(6.0, 7.0, 1))
        bills.ledger.take(window(7.5, 9.0, 2))
    assert [line["energy_j"] for line in bills.lines[1:]] == pytest.approx([77, 77 * 1.5])
    assert bills.lines[1]["energy_uncertainty_j"] == 0.25
    assert caplog.text.count("has not refreshed") == 1
    bills.at_each(9.1, 10.0)  # the counter had counted on
    bills.ledger.take(window(9.0, 10.0, 3))
    bills.check()
    assert bills.spans("steady") == [(5, 6), (6, 7), (7, 9), (9, 10)]


def test_a_figure_that_was_far_too_high_is_taken_back(bills, monkeypatch):
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    bills.at_each(5.1, 6.0)
    with monkeypatch.context() as stalled:
        stall(bills, stalled)
        bills.at(8.0)
        bills.ledger.take(window(5.0, 6.0, 0))
        bills.ledger.take(window(6.0, 7.0, 1, energy_j=650.0))
    for end in range(7, 15):
        bills.at_each(end + 0.1, end + 1)
        bills.ledger.take(window(end, end + 1, end))
    assert min(line["energy_j"] for line in bills.lines) == 0
    bills.check()


@pytest.fixture
def reloaded() -> Iterator[Billed]:
    """The driver is loaded anew at 7.25 s."""
    counted_j = lambda time_s: (1000 if time_s < 7.25 else 0) + 100 * time_s  # noqa: E731
    with billed(FakeGpu(now_s=5.0, counter_j=counted_j)) as made:
        yield made


def test_a_counter_that_goes_back_spoils_one_line(reloaded, caplog):
    """The rank, which may have seen more of it, stands in."""
    reloaded.at_each(5.1, 9.0)
    for begin in (5, 6, 7, 8):
        reloaded.ledger.take(window(begin, begin + 1, begin))
    assert [line["energy_j"] for line in reloaded.lines] == pytest.approx([100, 100, 77, 100])
    assert caplog.text.count("went back") == 1
    reloaded.check(377)


def test_figures_that_stood_in_before_a_counter_went_back_stay(reloaded, monkeypatch):
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    reloaded.at_each(5.1, 6.0)
    with monkeypatch.context() as stalled:
        stall(reloaded, stalled)
        reloaded.at(7.0)
        reloaded.ledger.take(window(5.0, 6.0, 0))
        reloaded.ledger.take(window(6.0, 7.0, 1))
    reloaded.at_each(7.1, 9.0)
    for begin in (7, 8):
        reloaded.ledger.take(window(begin, begin + 1, begin))
    assert [line["energy_j"] for line in reloaded.lines] == pytest.approx([100, 77, 77, 100])
    reloaded.check(354)


def test_a_counter_that_goes_back_while_nothing_trains(reloaded, caplog):
    """What it had counted is lost; it is told once, and later windows are right."""
    reloaded.at_each(5.1, 6.0)
    reloaded.ledger.take(window(5.0, 6.0))
    reloaded.at(*range(7, 400))  # settles after each
    assert caplog.text.count("went back") == 1
    reloaded.ledger.take(window(398.0, 399.0))
    assert reloaded.lines[-1]["energy_j"] == pytest.approx(100)
    assert reloaded.lines[1]["begin_s"] > 300
    reloaded.ledger.finish()
    told_j = [line["energy_j"] for line in reloaded.lines]
    assert told_j == pytest.approx([100 * line["duration_s"] for line in reloaded.lines])


def test_a_counter_that_cannot_be_read_at_first(monkeypatch):
    gpu = FakeGpu(now_s=5.0, counter_j=uneven_j, error=GpuError("not yet"))
    with billed(gpu) as bills:
        bills.at_each(5.1, 6.0)
        bills.ledger.take(window(5.5, 5.8, 0))
        gpu.error = None
        bills.at_each(6.1, 8.0)
        assert bills.lines[-1]["energy_j"] == pytest.approx(77 * 0.3)
        bills.ledger.take(window(7.0, 8.0, 1))
        assert bills.lines[-1]["energy_j"] == pytest.approx(uneven_j(8) - uneven_j(7))
        assert bills.lines[0]["begin_s"] >= 5.0
        assert bills.ledger.metered_j >= bills.lines[-1]["energy_j"]


def test_a_counter_that_is_never_read_leaves_the_ranks_own_figures(monkeypatch):
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    with billed(FakeGpu(now_s=5.0, error=GpuError("no"))) as bills:
        bills.at(6.0)
        bills.ledger.take(window(5.5, 5.8))
        assert bills.spans("steady") == [(5.0, 5.8)]
        bills.ledger.finish()
        bills.check(77 * 0.3)
        assert bills.ledger.metered_j == bills.ledger.energy_j


def test_a_gpu_that_does_not_tell_the_time_is_refused(monkeypatch):
    gpu = FakeGpu()
    monkeypatch.setattr(gpu, "time_s", lambda: (_ for _ in ()).throw(GpuError("lost")))
    with pytest.raises(GpuError, match="lost"):
        GpuLedger(gpu, LABELS, lambda line: None)


def test_what_was_metered_never_goes_back(bills, monkeypatch):
    """A monitor would take that for a new counter, and add all of it once more."""
    monkeypatch.setattr(ledger_module, "_PATIENCE_S", 0.0)
    told_j = [bills.ledger.metered_j]
    bills.at_each(5.1, 6.0)
    told_j.append(bills.ledger.metered_j)
    assert told_j[-1] == pytest.approx(uneven_j(6) - uneven_j(5))  # billed or not
    bills.ledger.take(window(5.0, 5.5))
    told_j.append(bills.ledger.metered_j)
    bills.gpu.counter_j = lambda time_s: time_s
    bills.at_each(6.1, 7.0)
    told_j.append(bills.ledger.metered_j)
    bills.ledger.take(window(5.5, 6.8))
    bills.ledger.finish()
    told_j.append(bills.ledger.metered_j)
    bills.at_each(7.1, 9.0)
    told_j.append(bills.ledger.metered_j)
    assert told_j == sorted(told_j)
    assert told_j[1] == told_j[2] == told_j[3]
    assert told_j[-1] == pytest.approx(bills.ledger.energy_j + 2.0)


# What a rank says ----------------------------------------------------------------------------


def without(name: str):
    return {key: value for key, value in window(5.5, 6.0).items() if key != name}


def spoilt(**fields):
    return {**window(5.5, 6.0), **fields}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        *(without(name) for name in ("begin_s", "duration_s", "energy_j")),
        *(
            spoilt(**{name: value})
            for name in ("begin_s", "duration_s", "energy_j")
            for value in (math.nan, math.inf, "soon", None, [1], 10**400)
        ),
        spoilt(begin_s=-math.inf),
        spoilt(duration_s=-1.0),
        spoilt(energy_j=-1.0),
        spoilt(phase=3),
        spoilt(compute_s="x"),
        spoilt(last_iteration="3"),
        spoilt(last_iteration=1.5),
        spoilt(format="envpipe-note/1"),
        spoilt(format="envpipe-note/1", note="ended"),
        window(5.5, 1e9),
        window(1e9, 1e9 + 1),
        spoilt(gpu={1, 2}),
    ],
)
def test_a_window_that_is_none_changes_nothing(bills, bad):
    bills.at_each(5.1, 8.0)
    with pytest.raises((ValueError, TypeError, KeyError, OverflowError)):
        bills.ledger.take(bad)
    bills.ledger.take(window(6.0, 7.0))
    assert bills.phases == ["between", "steady"]
    bills.ledger.finish()
    bills.check()


@pytest.mark.parametrize("unknown", [["compute_s"], ["blocking_s"], ["compute_s", "blocking_s"]])
def test_a_window_may_tell_no_shares(bills, unknown):
    bills.at_each(5.1, 6.0)
    told = window(5.0, 6.0, **dict.fromkeys([*unknown, "idle_s"]))
    bills.ledger.take(told)
    (line,) = bills.lines
    shares = ("compute_s", "blocking_s", "idle_s")
    assert [line[name] for name in shares] == [told[name] for name in shares]
    assert line["energy_j"] == pytest.approx(uneven_j(6) - uneven_j(5))


def test_what_cannot_be_written_is_in_the_next_line(bills):
    bills.at_each(5.1, 8.0)
    write, full = bills.ledger._write, OSError("No space left on device")
    bills.ledger._write = lambda line: (_ for _ in ()).throw(full)
    for begin in (5, 6):
        with pytest.raises(OSError, match="No space"):
            bills.ledger.take(window(begin, begin + 1))
    assert bills.ledger.energy_j == 0
    bills.ledger._write = write
    bills.ledger.take(window(7.0, 8.0))
    assert bills.spans("between") == [(5, 7)]
    bills.check()
