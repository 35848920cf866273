"""Which clock is kept for a whole job, and how few are measured; and jobs that end at the top."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import one_clock_ranks
import pytest

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.formats.steps import StepEnergy
from envpipe_megatron.gpu.emulated.presets import load_preset, override_for, sweep_range
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.job.config import SessionConfig, SessionError
from envpipe_megatron.tuning.one_clock import ONE_CLOCK_STEP, ClockSearch

#: Time in s and energy in J of a step at a clock in MHz.
Model = Callable[[int], tuple[float, float]]


def model_of(preset: str) -> tuple[list[int], Model]:
    """The clocks of a kind of GPU, and steps on it: a forward, and a backward twice as long."""
    gpu = load_preset(preset)
    clocks = sweep_range(gpu.supported_frequencies_mhz, override_for(gpu.gpu), ONE_CLOCK_STEP)

    def step(clock: int) -> tuple[float, float]:
        units = [
            (gpu.unit_time_s(kind.value, clock, time_s), gpu.busy_power_w(kind.value, clock))
            for kind, time_s in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
        ]
        return sum(time_s for time_s, _ in units), math.fsum(t * watts for t, watts in units)

    return list(clocks), step


def found(
    clocks: list[int], model: Model, allowed: float, noise: Callable[[], float] = lambda: 0.0
) -> tuple[int, list[int]]:
    """The clock that is kept, and those that were measured; times are off by shares of noise."""
    search = ClockSearch(clocks, allowed)
    measured: list[int] = []
    sums: dict[int, float] = {}
    while (clock := search.next_mhz()) is not None:
        measured.append(clock)
        time_s, energy_j = model(clock)
        off = noise()
        sums[clock] = sums.get(clock, 0.0) + off
        rounds = measured.count(clock)
        share = 1 + sums[clock] / rounds
        error_s = abs(off) and time_s * 0.005 / math.sqrt(rounds)
        step = StepEnergy(5 * rounds, time_s * share, error_s, energy_j * share, 0.0)
        search.windows[clock].append(None)
        search.tried[clock] = step
    return search.best_mhz(), measured


@pytest.mark.parametrize("allowed", [0.0, 1.0, 3.0, 5.0, 20.0, 1000.0])
@pytest.mark.parametrize("preset", ["a100-sxm", "a100-pcie", "a40", "h100", "v100"])
def test_the_best_clock_is_found_with_few_measurements(preset, allowed):
    clocks, model = model_of(preset)
    top_s = model(clocks[0])[0]
    allowed_s = top_s * (1 + allowed / 100) * (1 + 1e-9)
    best, measured = found(clocks, model, allowed)
    fast_enough = [clock for clock in clocks if model(clock)[0] <= allowed_s]
    least_j = min(model(clock)[1] for clock in fast_enough)
    assert model(best)[1] == pytest.approx(least_j, rel=1e-9)
    assert best in fast_enough
    assert measured[0] == clocks[0]
    assert len(measured) <= 16
    # At most a sixth of the highest clock below what is fast enough.
    assert min(measured) >= min(fast_enough) - 0.2 * clocks[0]
    if best != clocks[0]:
        assert measured[-2:] == [clocks[0], best]
        assert measured.count(best) == 2


def test_clocks_above_a_power_cap_are_free_and_none_below():
    """An A40 under load does not get above 1470 MHz."""
    clocks, model = model_of("a40")
    best, measured = found(clocks, model, 0.0)
    assert best == min(clock for clock in clocks if clock >= 1470) < clocks[0]
    assert len(measured) <= 12


def test_a_job_that_waits_for_memory_gets_the_lowest_clock():
    clocks = list(range(1400, 190, -15))
    best, measured = found(clocks, lambda clock: (1.0, 100.0 + clock), 0.0)
    assert best == clocks[-1]
    assert len(measured) <= 16


@pytest.mark.parametrize("count", [2, 3, 4, 9, 17, 40])
def test_any_number_of_clocks_is_searched(count):
    clocks = list(range(2000, 2000 - 20 * count, -20))
    for valley in range(count):
        best, _ = found(clocks, lambda clock, at=clocks[valley]: (1.0, abs(clock - at) + 1.0), 0.0)
        assert best == clocks[valley]


def test_noise_does_not_excuse_a_slower_clock():
    """Steps that scatter by 0.5 %, and clocks that are slower by what they are lower."""
    clocks = list(range(1400, 690, -14))
    slower = []
    for seed in range(200):
        noise = partial(random.Random(seed).gauss, 0.0, 0.005)
        best, _ = found(clocks, lambda clock: (1400 / clock, clock / 1400), 0.0, noise)
        slower.append(100 * (1400 / best - 1))
    assert sum(slower) / len(slower) < 0.5
    assert max(slower) < 3


@pytest.mark.parametrize(
    ("policy", "files"),
    [("envelope", {}), ("baseline", {}), ("uniform", {"profile_file": Path("profile.csv")})],
)
def test_one_clock_goes_with_nothing_that_is_planned(policy, files):
    with pytest.raises(SessionError, match="One clock for the whole job"):
        SessionConfig(PlanRequest(4, policy=policy), one_clock_slowdown_percent=0.0, **files)


def test_a_dry_run_searches_and_ends_at_the_highest_clock(three_ranks, tmp_path):
    told = three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0, True)
    for rank in told:
        assert rank == told[0]
        assert set().union(*rank["requested"].values()) == {None}, "no clock was changed"
        assert rank["notes"][0].startswith("One clock for the whole job: 1410 MHz; a dry run")
        assert len(rank["notes"]) > 3


def test_units_that_nobody_sees_get_one_clock_on_all_stages(three_ranks, tmp_path):
    """Three stages; an iteration is one unit on each, and what they send each other is not known.

    Stages wait for the slowest at the iteration's end, so lower clocks save there alone.
    """
    told = three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 5.0, False)
    gpu = load_preset("a100-sxm")
    clocks, _ = model_of("a100-sxm")
    lowest = min(c for c in clocks if gpu.unit_time_s("forward", c, 1.0) <= 1.05)
    for rank in told:
        assert rank["notes"] == told[0]["notes"]
        assert (rank["requested"]["warm-up"], rank["requested"]["steady"]) == ({1410}, {lowest})
        assert {1410, lowest} < rank["requested"]["profile"]
        assert rank["executed"] == ["F0"]
        assert rank["iterations"][0] == pytest.approx(1.2)
        assert rank["iterations"][-1] == pytest.approx(gpu.unit_time_s("forward", lowest, 1.2))


def test_a_gpu_with_a_single_clock_keeps_it(three_ranks, tmp_path):
    for rank in three_ranks.run(one_clock_ranks.train_unseen, tmp_path, 0.0, False, (1410,)):
        assert rank["requested"] == {"warm-up": {1410}, "profile": set(), "steady": {1410}}
        assert "has a single clock" in rank["notes"][0]


def test_a_clock_that_is_right_is_looked_at_again_and_kept(three_ranks, tmp_path):
    told = three_ranks.run(one_clock_ranks.train_on, tmp_path, 0.7, 0.7)
    for steps, _ in told:
        found = next(at for at, (phase, _) in enumerate(steps) if phase == "steady")
        after = steps[found:]
        assert {clock for phase, clock in after if phase == "baseline"} == {1410}
        (kept,) = {clock for phase, clock in after if phase == "steady"}
        assert kept < 1410
        assert {phase for phase, _ in after} == {"baseline", "steady"}
    assert not [text for text in told[0][1] if "not right" in text]


def test_a_clock_that_has_become_too_slow_is_looked_for_anew(three_ranks, tmp_path):
    """Steps that waited for memory compute: a clock that cost 5 % costs more."""
    gpu = load_preset("a100-sxm")
    told = three_ranks.run(one_clock_ranks.train_on, tmp_path, 0.9, 0.3)
    for steps, _ in told:
        kept = [clock for phase, clock in steps if phase == "steady"]
        for clock, waits in ((kept[0], 0.9), (kept[-1], 0.3)):
            model = replace(gpu, forward=replace(gpu.forward, memory_fraction=waits))
            assert 1.04 < model.unit_time_s("forward", clock, 1.0) <= 1.05
    (why,) = [text for text in told[0][1] if "not right any more" in text]
    assert f"{kept[0]} MHz" in why
