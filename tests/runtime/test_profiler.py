"""The online profiler on one stage, driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from envpipe_megatron import builders
from envpipe_megatron.profile import Profile
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.energy_meter import MeterError
from envpipe_megatron.runtime.executor import StageRecord
from envpipe_megatron.runtime.profiler import OnlineProfiler, ProfilerError, ProfilerSettings
from envpipe_megatron.runtime.wait_power import WaitPower
from envpipe_megatron.schedule import Kind
from envpipe_megatron.sidecar import Sidecar

CLOCKS_MHZ = (1400, 1200, 1000)
FORWARD_S, BACKWARD_S = 0.1, 0.2  # at the highest clock


class MeterByHand:
    """Knows the energy of each iteration by its begin."""

    refresh_s = 0.1

    def __init__(self) -> None:
        self.last_refresh_s = float("inf")
        self.iterations_j: dict[float, float] = {}

    def energy_j(self, start_s: float, end_s: float) -> float:
        return self.iterations_j[start_s]

    def window(self, start_s: float, end_s: float) -> SimpleNamespace:
        return SimpleNamespace(uncertainty_j=0.0)


class FailingMeter(MeterByHand):
    def energy_j(self, start_s: float, end_s: float) -> float:
        raise MeterError("The counter stands still")


def profile_by_hand(
    meter: MeterByHand, pair_j: Callable[[int, int], float]
) -> tuple[Profile, list[str]]:
    """Profile one stage of two microbatches; a pair's energy by forward and backward clock."""
    said: list[str] = []
    alone = SimpleNamespace(leads=True, gather=lambda own: [own], broadcast=lambda own: own)
    collectives = Collectives(0, alone, [], 1)  # type: ignore[arg-type]
    profiler = OnlineProfiler(
        builders.one_f_one_b(1, 2),
        CLOCKS_MHZ,
        0,
        SimpleNamespace(error=None),  # type: ignore[arg-type]
        meter,  # type: ignore[arg-type]
        WaitPower({CLOCKS_MHZ[0]: 50.0}),
        collectives,
        ProfilerSettings(min_window_s=0.1),
        said.append,
    )
    run, record, now_s = profiler.run(Sidecar()), None, 0.0
    try:
        while True:
            order = run.send(record)  # type: ignore[arg-type]  # a generator begins with None
            clocks, backward = order.frequency_mhz[0], order.schedule.is_backward[0]
            units_s = np.where(backward, BACKWARD_S, FORWARD_S) * CLOCKS_MHZ[0] / clocks
            end_s = np.cumsum(units_s)
            total_s = float(end_s[-1])
            meter.iterations_j[now_s] = 2 * pair_j(*map(int, (clocks[0], clocks[1])))
            record = StageRecord(end_s - units_s, end_s, np.zeros(4), now_s, total_s, total_s)
            now_s += total_s
    except StopIteration as ended:
        return ended.value, said


def test_a_pair_whose_kinds_are_told_apart_is_split():
    forward_j = {1400: 20.0, 1200: 15.0, 1000: 11.0}
    backward_j = {1400: 40.0, 1200: 33.0, 1000: 28.0}
    profile, said = profile_by_hand(MeterByHand(), lambda f, b: forward_j[f] + backward_j[b])
    for clock in CLOCKS_MHZ:
        row = profile.row(0, Kind.FORWARD, clock)
        assert row.energy_j == pytest.approx(forward_j[clock])
        assert profile.row(0, Kind.BACKWARD, clock).energy_j == pytest.approx(backward_j[clock])
    assert not any("shared by time" in text for text in said)


def test_energies_that_cannot_be_told_apart_are_shared_by_time_and_said():
    def pair_j(forward_mhz: int, backward_mhz: int) -> float:
        return 5.0 if forward_mhz != backward_mhz else forward_mhz / 20

    profile, said = profile_by_hand(MeterByHand(), pair_j)
    for clock in CLOCKS_MHZ:
        forward, backward = (profile.row(0, kind, clock) for kind in Kind)
        assert forward.energy_j == pytest.approx(clock / 20 / 3)
        assert backward.energy_j == pytest.approx(clock / 20 * 2 / 3)
    assert [text for text in said if "stage 0" in text and "shared by time" in text]


def test_a_meter_that_fails_is_named_with_its_stage():
    with pytest.raises(ProfilerError, match="energy counter of stage 0"):
        profile_by_hand(FailingMeter(), lambda f, b: 60.0)
