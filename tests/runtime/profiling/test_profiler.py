"""The online profiler on one stage, driven by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.energy.meter import MeterError
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.going_on import GoesOnError
from envpipe_megatron.runtime.profiling.profiler import (
    OnlineProfiler,
    ProfilerError,
    ProfilerSettings,
)
from envpipe_megatron.runtime.profiling.wait_power import WaitPower

CLOCKS_MHZ = (1400, 1200, 1000)
FORWARD_S, BACKWARD_S = 0.1, 0.2  # at the highest clock
WAIT_POWER = WaitPower({1400: 50.0, 1000: 30.0})


class MeterByHand:
    """Knows the energy of each iteration by its begin and end."""

    refresh_s = 0.1

    def __init__(self, uncertainty_j: float = 0.0) -> None:
        self.last_refresh_s = 0.0
        self.iterations_j: dict[tuple[float, float], float] = {}
        self.uncertainty_j = uncertainty_j
        self.windows: list[tuple[float, float]] = []

    def energy_j(self, start_s: float, end_s: float) -> float:
        assert self.last_refresh_s >= end_s
        return self.iterations_j[start_s, end_s]

    def catch_up(self) -> None:
        self.last_refresh_s = max(end_s for _, end_s in self.iterations_j)

    def window(self, start_s: float, end_s: float) -> SimpleNamespace:
        self.windows.append((start_s, end_s))
        return SimpleNamespace(uncertainty_j=self.uncertainty_j)


class FailingMeter(MeterByHand):
    def energy_j(self, start_s: float, end_s: float) -> float:
        raise MeterError("The counter stands still")


@dataclass
class Hand:
    """One stage that is profiled: what its units take, and what others of its job say.

    Args:
        pair_j: energy of a pair, by forward and backward clock.
        stage: the last of a pipeline of so many and one.
        wait_s: before every unit, and thrice as long behind the last.
        late_s: how late a clock changes within an iteration; the first forward alone feels it.
        gap_s: from an iteration to the next.
        other: what the stages before say, from what this one says.
        replica: what another replica of a stage says, from what the first says.
        slowness: what units of each chunk take over those of a stage with one.
    """

    pair_j: Callable[[int, int], float]
    meter: MeterByHand = field(default_factory=MeterByHand)
    clocks_mhz: tuple[int, ...] = CLOCKS_MHZ
    settings: ProfilerSettings = field(default_factory=lambda: ProfilerSettings(min_window_s=0.1))
    microbatches: int = 2
    stage: int = 0
    wait_s: float = 0.0
    late_s: float = 0.0
    gap_s: float = 0.0
    other: Callable[[Any], Any] = lambda own: own
    replica: Callable[[Any], Any] | None = None
    slowness: tuple[float, ...] = (1.0,)
    error: Exception | None = None
    said: list[str] = field(default_factory=list)
    #: Forward and backward clock of each iteration that was run.
    ran: list[tuple[int, int]] = field(default_factory=list)

    def schedule(self) -> Schedule:
        job, chunks = (self.stage + 1, self.microbatches), len(self.slowness)
        return builders.interleaved(*job, chunks) if chunks > 1 else builders.one_f_one_b(*job)

    def profile(self) -> Profile:
        def gather(own: Any) -> list[Any]:
            return [*(self.other(own) for _ in range(self.stage)), own]

        pipeline = SimpleNamespace(leads=True, gather=gather, broadcast=lambda own: own)
        tree = []
        if self.replica is not None:
            two = SimpleNamespace(leads=True, broadcast=lambda own: own)
            two.gather = lambda own: [own, self.replica(own)]  # type: ignore[misc]
            tree.append(two)
        profiler = OnlineProfiler(
            self.schedule(),
            self.clocks_mhz,
            self.stage,
            SimpleNamespace(error=self.error),  # type: ignore[arg-type]
            self.meter,  # type: ignore[arg-type]
            WAIT_POWER,
            Collectives(self.stage, pipeline, tree, 1 + len(tree)),  # type: ignore[arg-type]
            self.settings,
            self.said.append,
        )
        run, record, now_s = profiler.run(Sidecar(gpu="A100")), None, 0.0
        try:
            while True:
                order = run.send(record)  # type: ignore[arg-type]  # a generator begins with None
                assert order.phase is Phase.PROFILE
                record = self.iterate(order, now_s)
                now_s = record.end_of_iteration_s + self.gap_s
        except StopIteration as ended:
            return ended.value

    def iterate(self, order: IterationOrder, now_s: float) -> StageRecord:
        clocks = order.frequency_mhz[self.stage]
        backward = order.schedule.is_backward[self.stage]
        forward_mhz, backward_mhz = int(clocks[~backward][0]), int(clocks[backward][0])
        self.ran.append((forward_mhz, backward_mhz))
        top = self.clocks_mhz[0]
        units_s = np.where(backward, BACKWARD_S, FORWARD_S) * top / clocks
        units_s *= np.array(self.slowness)[order.schedule.chunks[self.stage]]
        if forward_mhz != backward_mhz:
            units_s[0] -= self.microbatches * self.late_s * (top / forward_mhz - 1)
        end_s = np.cumsum(units_s + self.wait_s)
        total_s = float(end_s[-1]) + 3 * self.wait_s
        waits_s = [*[self.wait_s] * len(clocks), 3 * self.wait_s]
        waits_j = sum(
            wait_s * WAIT_POWER.at(int(clock))
            for wait_s, clock in zip(waits_s, [*clocks, clocks[0]], strict=True)
        )
        pairs = self.microbatches * len(self.slowness)
        units_j = pairs * self.pair_j(forward_mhz, backward_mhz)
        waits = np.full(len(clocks), self.wait_s)
        record = StageRecord(end_s - units_s, end_s, waits, now_s, total_s, total_s)
        self.meter.iterations_j[now_s, record.end_of_iteration_s] = units_j + waits_j
        return record


def profile_by_hand(
    meter: MeterByHand, pair_j: Callable[[int, int], float]
) -> tuple[Profile, list[str]]:
    """Profile one stage of two microbatches; a pair's energy by forward and backward clock."""
    hand = Hand(pair_j, meter)
    return hand.profile(), hand.said


@pytest.mark.parametrize(
    ("meter", "pair_j"),
    [(FailingMeter(), 60.0), (MeterByHand(), 0.0), (MeterByHand(), math.inf)],
)
def test_a_meter_that_fails_is_named_with_its_stage(meter, pair_j):
    with pytest.raises(GoesOnError, match="Stage 0: The energy counter failed"):
        profile_by_hand(meter, lambda f, b: pair_j)


@pytest.mark.parametrize(
    "part", ["_Point.read", "split_energies", "ends_and_gaps_s", "tail_times_s", "make_profile"]
)
def test_profiling_may_fail_anywhere(monkeypatch, part):
    def fails(*arguments: Any, **named: Any) -> Any:
        raise ZeroDivisionError("of a test")

    monkeypatch.setattr(f"envpipe_megatron.runtime.profiling.profiler.{part}", fails)
    with pytest.raises(GoesOnError, match="ZeroDivisionError: of a test"):
        Hand(told_apart).profile()


def test_a_clock_that_is_lost_is_named_with_its_stage():
    hand = Hand(told_apart, error=ValueError("of a test"))
    with pytest.raises(GoesOnError, match=r"Stage 0: Clock control ended .*: of a test"):
        hand.profile()


@pytest.mark.parametrize("iterations", [(0, 1), (1, 0)])
def test_a_clock_has_an_iteration_to_settle_and_one_to_be_measured(iterations):
    ProfilerSettings(1, 1)
    with pytest.raises(ProfilerError, match="at least one"):
        ProfilerSettings(*iterations)


FORWARD_J = {1400: 20.0, 1200: 15.0, 1000: 11.0}
BACKWARD_J = {1400: 40.0, 1200: 33.0, 1000: 28.0}


def told_apart(forward_mhz: int, backward_mhz: int) -> float:
    return FORWARD_J[forward_mhz] + BACKWARD_J[backward_mhz]


def test_a_clock_settles_and_is_measured_in_both_sweeps():
    hand = Hand(told_apart, settings=ProfilerSettings(2, 3, 1, min_window_s=0.1))
    hand.profile()
    together, apart = [(f, f) for f in CLOCKS_MHZ], [(f, 1400) for f in CLOCKS_MHZ[1:]]
    assert hand.ran == [
        *(clocks for clocks in together for _ in range(2 + 3)),
        *[together[-1]] * 2,
        *(clocks for clocks in apart for _ in range(2 + 1)),
        *[apart[-1]] * 2,
    ]
    assert hand.said == [
        *(
            f"profile: forward {clock} MHz, backward {clock} MHz ({n} of at most 3)"
            for n, clock in enumerate(CLOCKS_MHZ, 1)
        ),
        "profile: forward 1200 MHz, backward 1400 MHz (1 of at most 2)",
        "profile: forward 1000 MHz, backward 1400 MHz (2 of at most 2)",
    ]


def test_short_iterations_are_repeated_until_they_fill_a_window():
    """By the shortest of all stages' at the highest clock: equally often on every rank."""
    halved = {float: lambda own: own / 2}
    hand = Hand(
        told_apart,
        stage=1,
        other=lambda own: halved.get(type(own), lambda same: same)(own),
        settings=ProfilerSettings(1, 2, 2, min_window_s=1.0),
    )
    hand.profile()
    assert hand.ran[:6] == [(1400, 1400)] * 5 + [(1200, 1200)]  # 0.6 s, and 0.3 s elsewhere
    assert hand.ran.count((1200, 1200)) == 5
    assert hand.ran.count((1200, 1400)) == 5


def test_the_energy_of_waits_is_none_of_a_unit():
    """A wait is at the clock of the unit behind it, the last at that of the first."""
    hand = Hand(told_apart, wait_s=0.04, meter=MeterByHand(0.6), microbatches=4)
    profile = hand.profile()
    for clock in CLOCKS_MHZ:
        forward, backward = (profile.row(0, kind, clock) for kind in WHOLE)
        assert (forward.energy_j, backward.energy_j) == pytest.approx(
            (FORWARD_J[clock], BACKWARD_J[clock])
        )
        assert (forward.time_s, backward.time_s) == pytest.approx(
            (FORWARD_S * 1400 / clock, BACKWARD_S * 1400 / clock)
        )
    pairs = 4 * 5
    assert profile.row(0, Kind.FORWARD, 1400).energy_uncertainty_j == pytest.approx(0.6 / pairs / 3)
    assert not any("shared by time" in text for text in hand.said)
    begins_s = [start_s for start_s, _ in hand.meter.iterations_j]
    ends_s = [end_s for _, end_s in hand.meter.iterations_j]
    assert hand.meter.windows[0] == (begins_s[1], ends_s[5])


def test_a_counter_that_is_past_a_window_is_not_read_again(monkeypatch):
    meter = MeterByHand()
    meter.last_refresh_s = math.inf
    monkeypatch.setattr(meter, "catch_up", lambda: pytest.fail("it waits for a read"))
    profile_by_hand(meter, told_apart)


def test_energies_that_scatter_from_block_to_block_are_uncertain():
    """Blocks are of five refreshes of the meter, half a second: here of one iteration."""
    energies_j = itertools.cycle([60.0, 63.0, 57.0, 62.0])
    hand = Hand(
        lambda f, b: next(energies_j), settings=ProfilerSettings(1, 4, 4, 0.1), microbatches=2
    )
    row = hand.profile().row(0, Kind.FORWARD, 1400)
    error_j = 2 * math.hypot(0.5, 2.5, 3.5, 1.5) * math.sqrt(4 / 3)
    assert row.energy_uncertainty_j == pytest.approx(error_j / 8 / 3)


def test_units_at_the_wrong_clock_count_in_the_second_sweep_alone():
    hand = Hand(told_apart, late_s=0.01, microbatches=4)
    profile = hand.profile()
    assert profile.sidecar.frequency_change_s == pytest.approx(0.01)
    assert profile.sidecar.gpu == "A100"
    assert profile.row(0, Kind.FORWARD, 1200).time_s == pytest.approx(FORWARD_S * 1400 / 1200)


def test_chunks_are_measured_one_by_one_and_draw_the_same_power():
    hand = Hand(told_apart, slowness=(0.5, 1.7, 0.8), meter=MeterByHand(0.6), microbatches=4)
    profile = hand.profile()
    assert (profile.num_stages, profile.listed_chunks, profile.sidecar.num_chunks) == (1, 3, 3)
    for chunk, slow in enumerate(hand.slowness):
        for clock in CLOCKS_MHZ:
            forward, backward = (profile.row(chunk, kind, clock) for kind in WHOLE)
            assert forward.time_s == pytest.approx(slow * FORWARD_S * 1400 / clock)
            assert backward.time_s == pytest.approx(slow * BACKWARD_S * 1400 / clock)
            assert forward.energy_j == pytest.approx(slow * FORWARD_J[clock])
            assert backward.energy_j == pytest.approx(slow * BACKWARD_J[clock])
        row = profile.row(chunk, Kind.FORWARD, 1400)
        assert row.energy_uncertainty_j == pytest.approx(slow * 0.6 / (3 * 4 * 5) / 3)


#: A pair takes less than both of its units one after the other.
PAIR_S = 0.25


class Pairs(Hand):
    """Units run combined; backwards and pairs draw the same power."""

    def schedule(self) -> Schedule:
        return builders.interleaved(
            self.stage + 1, self.microbatches, len(self.slowness), combined=True
        )

    def iterate(self, order: IterationOrder, now_s: float) -> StageRecord:
        clocks, schedule = order.frequency_mhz[self.stage], order.schedule
        free, backward = schedule.combined[self.stage], schedule.is_backward[self.stage]
        whole_s = np.where(backward, np.where(np.roll(free, 1), PAIR_S, BACKWARD_S), FORWARD_S)
        slow = np.where(free, 0.0, np.array(self.slowness)[schedule.chunks[self.stage]])
        units_s = slow * whole_s * self.clocks_mhz[0] / clocks
        units_j = [
            part * (BACKWARD_J[clock] * s / BACKWARD_S if back else FORWARD_J[clock])
            for part, clock, s, back in zip(slow, clocks.tolist(), whole_s, backward, strict=True)
        ]
        end_s = np.cumsum(units_s)
        total_s = float(end_s[-1])
        record = StageRecord(end_s - units_s, end_s, np.zeros(len(clocks)), now_s, total_s, total_s)
        self.meter.iterations_j[now_s, record.end_of_iteration_s] = sum(units_j)
        return record


@pytest.mark.parametrize("microbatches", [2, 3, 6])
@pytest.mark.parametrize("stage", [0, 1])
def test_pairs_have_rows_of_their_own(microbatches, stage):
    hand = Pairs(told_apart, slowness=(0.5, 1.7), microbatches=microbatches, stage=stage)
    profile = hand.profile()
    assert (profile.num_stages, profile.listed_chunks) == (stage + 1, 2)
    order = hand.schedule().stages[stage]
    paired = {b.chunk for f, b in itertools.pairwise(order) if f.combined}
    for chunk, slow in enumerate(hand.slowness):
        # A chunk in no pair: as if one unit followed the other.
        pair_s = PAIR_S if chunk in paired else FORWARD_S + BACKWARD_S
        for clock in CLOCKS_MHZ:
            part = 2 * stage + chunk
            forward, backward, pair = (
                profile.row(part, kind, clock) for kind in (*WHOLE, Kind.COMBINED)
            )
            times_s = [row.time_s for row in (forward, backward, pair)]
            assert times_s == pytest.approx(
                [slow * s * 1400 / clock for s in (FORWARD_S, BACKWARD_S, pair_s)]
            )
            pair_j = BACKWARD_J[clock] * pair_s / BACKWARD_S
            energies_j = [row.energy_j for row in (forward, backward, pair)]
            assert energies_j == pytest.approx(
                [slow * j for j in (FORWARD_J[clock], BACKWARD_J[clock], pair_j)]
            )


def test_tails_are_those_of_the_iterations_that_followed_each_other():
    """The stage before has ended half a second earlier, and its clock changes later."""

    def earlier(own: Any) -> Any:
        if hasattr(own, "told_apart"):
            return replace(own, late_s=0.5)
        return (own[0] - 0.5, own[1]) if isinstance(own, tuple) else own

    hand = Hand(told_apart, stage=1, gap_s=0.25, other=earlier)
    profile = hand.profile()
    assert profile.sidecar.tail_time_s == pytest.approx((0.25, 0.25))
    assert profile.sidecar.frequency_change_s == 0.5
    hand = Hand(told_apart, gap_s=0.25, settings=ProfilerSettings(1, 1, 1, min_window_s=0.1))
    assert hand.profile().sidecar.tail_time_s is None


def test_a_profile_is_the_mean_of_the_replicas():
    def thrice(own: Any) -> Any:
        if not hasattr(own, "rows") or isinstance(own.rows, dict):
            return own
        return replace(
            own,
            rows=3 * own.rows,
            power_w=3 * own.power_w,
            tail_s=3 * own.tail_s,
            late_s=own.late_s + 0.5,
            told_apart=False,
        )

    hand = Hand(told_apart, gap_s=0.25, replica=thrice, meter=MeterByHand(0.6))
    profile = hand.profile()
    row = profile.row(0, Kind.BACKWARD, 1200)
    assert (row.time_s, row.energy_j) == pytest.approx((2 * 0.2 * 1400 / 1200, 2 * 33.0))
    first = profile.row(0, Kind.FORWARD, 1400)
    # Half the root of the sum of 1 and 3 times the square of one's.
    assert first.energy_uncertainty_j == pytest.approx(0.6 / 10 / 3)
    facts = profile.sidecar
    assert facts.wait_power_w == ({1400: 100.0, 1000: 60.0},)
    assert facts.tail_time_s == pytest.approx((0.5,))
    assert facts.frequency_change_s == pytest.approx(0.5)
    assert [text for text in hand.said if "stage 0" in text and "shared by time" in text]


#: Rises of energy begin at the third clock; one is interrupted by a plateau, one by a fall.
VALLEY_J = (60, 55, 50, 51, 52, 53, 54, 54, 55, 56, 57, 58, 57, 58, 59, 60, 61, 62, 63, 64)


@pytest.mark.parametrize(
    ("energies", "others", "measured"),
    [
        (VALLEY_J, 1, 18),
        (VALLEY_J, 18, 18),
        (VALLEY_J, 19, 19),
        (VALLEY_J, 99, 20),
        (range(50, 70), 1, 6),
    ],
)
def test_a_sweep_ends_when_every_stage_is_past_its_valley(energies, others, measured):
    """After five rises in a row; other stages are past it after so many clocks."""
    clocks = tuple(range(1400, 1000, -20))
    energies_j = dict(zip(clocks, energies, strict=True))
    hand = Hand(
        lambda f, b: energies_j[f],
        clocks_mhz=clocks,
        stage=1,
        other=lambda own: len(hand.ran) > 2 * others if isinstance(own, bool) else own,
        settings=ProfilerSettings(1, 1, 1, 0.1),
    )
    hand.profile()
    # The next clock has settled by then.
    assert len({f for f, b in hand.ran if f == b}) == min(measured + 1, 20)
