"""Energy of steps, intervals and the baseline, against counters of emulated GPUs that are exact."""

from __future__ import annotations

import itertools
import json
import logging
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import step_ranks
from fake_gpu import FakeGpu
from rank_pool import RankPool

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.runtime.energy import intervals as interval_energy
from envpipe_megatron.runtime.energy.intervals import (
    BaselineEnergy,
    BaselineSteps,
    IntervalEnergy,
    IntervalMeter,
    PhaseMean,
    StepEnergy,
    StepSums,
    compare,
    error_of_mean,
    mean_over_gpus,
    percent,
)
from envpipe_megatron.runtime.energy.log import EnergyLog
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import StageRecord

pytestmark = pytest.mark.xdist_group("pipeline")


# Bills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_laps_and_log_are_what_the_counter_says(three_ranks, tmp_path, seed):
    """Whatever lies between steps: they begin and end at refreshes, where nothing is guessed."""
    told = three_ranks.run(step_ranks.bill_random_steps, tmp_path, seed, True)
    for laps, billed, truth, summary in told:
        assert len(laps) > 4
        for lap, _, (energy_j, duration_s) in laps:
            assert lap.duration_s == pytest.approx(duration_s, abs=1e-6)
            assert lap.energy_j == pytest.approx(energy_j, rel=1e-5)
        assert billed == pytest.approx(truth, rel=1e-5)
        assert sum(lap.iterations for lap, *_ in laps) == 40
        assert sum(p["iterations"] for p in summary["gpu"]["phases"].values()) == 40
        assert summary["gpu"]["total_energy_j"] == billed[0]
        phases = summary["gpu"]["phases"].values()
        assert sum(phase["total_energy_j"] for phase in phases) == pytest.approx(billed[0])
    # All ranks get the mean of all.
    for index in range(len(told[0][0]) - 1):
        laps = [rank[0][index] for rank in told]
        for _, job, _ in laps:
            energies_j = [lap.energy_j / lap.iterations for lap, *_ in laps]
            assert [stage.energy_j for stage in job.by_stage] == pytest.approx(energies_j)
            assert job.mean.energy_j == pytest.approx(np.mean(energies_j))
            assert job.mean.time_s == pytest.approx(laps[0][0].duration_s / job.mean.iterations)


class OneRank:
    """Training on one GPU at 128 W, at instants that a test says; two stages are like it."""

    def __init__(self, baseline: BaselineEnergy | None = None) -> None:
        self.gpu = FakeGpu(refresh_s=0.125, counter_j=lambda time_s: 128 * time_s)  # no rounding
        self.meter = EnergyMeter(self.gpu, poll_s=3600)
        look(self.meter, self.gpu, 20.0)
        self.now_s = 0.0
        self.described: list[object] = []
        self.collectives = SimpleNamespace(
            is_planner=True, by_stage=lambda sums, merge: [merge([sums])] * 2
        )
        self.energy = TrainingEnergy(
            self.meter,
            EnergyLog(self.meter, None, {}),
            lambda: self.now_s,
            self.collectives,
            baseline,
            self.described.append,
        )

    def step(self, phase: Phase | None, begin_s: float, unit_s: float, end_s: float) -> None:
        """From `begin_s` to `end_s`; its iteration, if it has one, from `unit_s` for half a s."""
        self.now_s = begin_s
        self.energy.begin_step()
        if phase is not None:
            self.iterate(phase, unit_s)
        self.now_s = end_s
        self.energy.end_step(1)

    def iterate(self, phase: Phase, begin_s: float) -> None:
        zero = np.zeros(1)
        record = StageRecord(zero, zero, zero, begin_s, 0.5, 0.5)
        self.energy.add(phase, 1, record, np.array([False]))


def test_all_that_is_told_of_one_job():
    job = OneRank()
    energy = job.energy
    assert energy.gather(energy.lap()) is None
    energy.add_between_phases(0, 0.5)  # no step has begun: it is nobody's
    energy.end_step(0)  # nor this
    job.step(None, 0.5, 0.5, 1.0)
    job.now_s = 1.25
    energy.end_step(0)  # it has ended
    energy.pause()
    for begin_s, end_s in ((1.5, 2.25), (2.25, 3.25), (3.25, 4.0)):
        job.step(Phase.WARMUP, begin_s, begin_s + 0.125, end_s)
    energy.begin_step()
    energy.pause()  # a step that was begun and not run
    energy.end_step(0)
    assert energy.baseline is None
    energy.settle_baseline()
    warm = StepEnergy(2, 0.875, error_of_mean([1.0, 0.75]), 112.0, 0.0005)
    assert energy.baseline == BaselineEnergy(
        replace(warm, metering_uncertainty_j=pytest.approx(0.0005 / math.sqrt(2))),
        (warm, warm),
        warm,
    )
    assert job.described == [{"baseline": asdict(energy.baseline.mean)}]
    mixed = energy.lap()
    assert mixed.phases == {"framework": 1, "warm-up": 3}
    assert (mixed.duration_s, mixed.energy_j) == (3.0, 384.0)
    gathered = energy.gather(mixed)
    assert gathered.phases == mixed.phases
    assert gathered.mean == replace(
        mixed.step, metering_uncertainty_j=mixed.step.metering_uncertainty_j / math.sqrt(2)
    )
    assert gathered.by_stage == (mixed.step, mixed.step)
    job.now_s = 5.0
    energy.begin_step()
    job.now_s = 6.5
    energy.add_between_phases(5, 5.5)  # from the step's begin, which was earlier
    job.iterate(Phase.STEADY, 6.625)
    job.now_s = 7.25
    energy.end_step(5)
    assert energy.lap() == IntervalEnergy(
        {"plan": 0, "steady": 1}, 2.25, 288.0, 0.001, StepEnergy(1, 2.25, None, 288.0, 0.001)
    )
    for begin_s in (7.25, 7.75):
        job.step(Phase.STEADY, begin_s, begin_s, begin_s + 0.5)
    steady = energy.gather(energy.lap()).mean
    energy.settle_baseline()  # was settled
    job.step(Phase.WARMUP, 9.0, 9.0, 9.5)  # is not settled again
    assert energy.baseline.mean.iterations == 2
    energy.log.close()

    def told(step: StepEnergy) -> dict[str, object]:
        return {**asdict(step), "power_w": step.power_w}

    def of_gpu(step: StepEnergy, total_s: float) -> dict[str, object]:
        whole = {"total_energy_j": 128 * total_s, "total_duration_s": total_s}
        return {**told(step), **whole}

    times_s = {"framework": 0.5, "warm-up": 3.75, "steady": 1.75}
    own = {
        name: StepEnergy(
            steps,
            times_s[name] / steps,
            0.0,
            128 * times_s[name] / steps,
            pytest.approx(uncertainty_j / steps),
        )
        for name, steps, uncertainty_j in (
            ("framework", 1, 0.001),
            ("warm-up", 4, 0.001 * math.sqrt(3)),  # of three windows
            ("steady", 3, 0.001 * math.sqrt(2)),
        )
    }
    summary = energy.summary()
    assert summary == {
        "gpu": {
            "total_energy_j": 128 * 7.5,
            "total_duration_s": 7.5,
            "phases": {
                **{name: of_gpu(step, times_s[name]) for name, step in own.items()},
                "plan": {"iterations": 0, "total_energy_j": 192.0, "total_duration_s": 1.5},
            },
            "comparison": summary["gpu"]["comparison"],
        },
        "job": {
            "phases": {"steady": told(steady)},
            "comparison": asdict(compare(steady, energy.baseline.mean)),
        },
        "baseline": told(energy.baseline.mean),
    }
    assert summary["gpu"]["comparison"]["saving_percent"] == pytest.approx(100 / 3)
    assert summary["gpu"]["comparison"]["saving_uncertainty_percent"] == pytest.approx(
        100 * 2 / 3 * warm.energy_uncertainty_j / 112, rel=1e-4
    )
    job.meter.close()


def test_a_baseline_of_an_earlier_start_is_not_measured_again():
    mean = StepEnergy(4, 1.0, 0.1, 100.0, 0.5)
    job = OneRank(BaselineEnergy(mean, (mean, mean)))
    assert job.described == [{"baseline": asdict(mean)}]
    for begin_s in (1.0, 2.0, 3.0):
        job.step(Phase.WARMUP, begin_s, begin_s, begin_s + 1)
    job.energy.settle_baseline()
    assert job.energy.baseline == BaselineEnergy(mean, (mean, mean))
    assert len(job.described) == 1
    job.step(Phase.STEADY, 4.0, 4.0, 4.5)
    job.energy.log.close()
    summary = job.energy.summary()
    assert summary["gpu"]["comparison"] is None  # what this GPU took then is not known
    assert summary["baseline"] == {**asdict(mean), "power_w": 100.0}
    job.meter.close()


@pytest.mark.parametrize("planner", [True, False])
def test_where_the_warm_up_is_no_baseline_that_is_said_once(caplog, planner):
    caplog.set_level(logging.INFO)
    job = OneRank()
    job.collectives.is_planner = planner
    job.energy.settle_baseline()
    job.energy.settle_baseline()
    assert job.energy.baseline is None
    assert caplog.text.count("must have at least two, and last 1.2 s") == planner
    job.step(Phase.STEADY, 4.0, 4.0, 4.5)
    job.energy.log.close()
    summary = job.energy.summary()
    assert summary["baseline"] is None
    assert summary["gpu"]["comparison"] is None
    assert summary["job"] == {"phases": {}, "comparison": None}
    job.meter.close()


def test_laps_between_refreshes_are_as_uncertain_as_they_say(three_ranks, tmp_path):
    errors, uncertainties, misses = [], [], []
    for seed in range(2, 4):
        told = three_ranks.run(step_ranks.bill_random_steps, tmp_path / str(seed), seed, False)
        for laps, billed, truth, _ in told:
            for lap, _, (energy_j, duration_s) in laps:
                if lap.iterations:
                    assert lap.duration_s == pytest.approx(duration_s, abs=1e-6)
                    errors.append(abs(lap.energy_j - energy_j))
                    uncertainties.append(lap.metering_uncertainty_j)
            misses.append(billed[0] / truth[0] - 1)
    within = np.array(errors) <= 2 * np.array(uncertainties)
    assert within.mean() >= 0.9
    assert max(abs(miss) for miss in misses) < 0.01


@pytest.mark.parametrize("follows", ["evaluation", "checkpoint", "phase", "end"])
def test_the_optimizer_is_billed_with_its_iteration(three_ranks, tmp_path, follows):
    """Of the first step alone: the others' are in other windows, or in another phase."""
    for rank, (truth, totals, lines) in enumerate(
        three_ranks.run(step_ranks.bill_the_optimizer, tmp_path, follows)
    ):
        windows = [json.loads(line) for line in lines.splitlines()]
        first = next(w for w in windows if w["rank"] == rank)
        assert (first["phase"], first["first_iteration"]) == ("warm-up", 0)
        assert (first["energy_j"], first["duration_s"]) == pytest.approx(truth, rel=1e-5)
        assert first["last_iteration"] == 0
        if follows == "phase":
            assert totals["warm-up"] == pytest.approx((truth[0], 1))
            # Measuring the power of waits belongs to no step.
            assert totals["plan"][0] > 100
            assert totals["plan"][1] == 0


def test_steps_of_the_framework_are_in_the_bill(three_ranks, tmp_path):
    for lap, truths, totals in three_ranks.run(step_ranks.run_framework_steps, tmp_path):
        assert lap.phases == {"framework": 2}
        assert (lap.energy_j, lap.duration_s) == pytest.approx(truths[0], rel=1e-5)
        assert totals["framework"] == pytest.approx((truths[0][0], 2), rel=1e-5)
        assert totals["warm-up"][0] + totals["steady"][0] == pytest.approx(truths[1][0], rel=1e-5)


def test_what_was_not_metered_is_unknown(three_ranks, tmp_path):
    """Of one rank in one lap; nobody else's figures suffer, and none is wrong."""
    told = three_ranks.run(step_ranks.meter_nothing, tmp_path, 1)
    for rank, laps in enumerate(told):
        known = [lap.energy_j is not None for lap, _ in laps]
        assert known == [True, rank != 1, True]
        jobs = [job for _, job in laps]
        assert [job.mean.energy_j is None for job in jobs] == [False, True, False]
        assert jobs[1].by_stage[0].energy_j > 0
        assert jobs[1].mean.time_s > 0


# Baseline -------------------------------------------------------------------------------------


def test_the_baseline_is_the_warm_up_without_its_slow_steps(three_ranks, tmp_path):
    told = three_ranks.run(step_ranks.measure_a_baseline, tmp_path, 7, 2, 5)
    energies_j = [truth[0] / 5 for _, _, truth, _, _ in told]
    for rank, (before, baseline, truth, comparison, summary) in enumerate(told):
        assert before == [None] * 7  # as long as the warm-up goes on
        assert baseline.mean.iterations == 5
        assert baseline.own.energy_j == pytest.approx(energies_j[rank], rel=1e-5)
        assert baseline.mean.energy_j == pytest.approx(np.mean(energies_j), rel=1e-5)
        assert [s.energy_j for s in baseline.by_stage] == pytest.approx(energies_j, rel=1e-5)
        assert baseline.mean.time_s == pytest.approx(truth[1] / 5, rel=1e-5)
        # The same order at the same clock saves nothing.
        assert comparison.saving_percent == pytest.approx(0, abs=0.1)
        assert comparison.slowdown_percent == pytest.approx(0, abs=0.1)
        assert not comparison.saves_for_sure
        for scope in ("gpu", "job"):
            assert summary[scope]["comparison"]["saving_percent"] == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("warmup", [1, 2])
def test_a_short_warm_up_is_no_baseline(three_ranks, tmp_path, warmup):
    for _, baseline, _, comparison, summary in three_ranks.run(
        step_ranks.measure_a_baseline, tmp_path, warmup, 1, 3
    ):
        assert baseline is None
        assert comparison is None
        assert summary["baseline"] is None
        assert summary["job"]["comparison"] is None
        assert summary["job"]["phases"]["steady"]["energy_j"] > 0


def test_a_baseline_of_less_than_ten_refreshes_says_nothing():
    gpu = FakeGpu()
    meter = EnergyMeter(gpu, poll_s=3600)
    steps = BaselineSteps()
    for begin_s in np.arange(6) * 0.15:
        steps.add(begin_s, begin_s + 0.15)
    look(meter, gpu, 1.5)
    assert steps.measure(meter) is None  # 0.75 s of them count
    for begin_s in 0.9 + np.arange(3) * 0.15:
        steps.add(begin_s, begin_s + 0.15)
    measured = steps.measure(meter)
    assert measured.iterations == 8
    assert measured.energy_j == pytest.approx(15)
    meter.close()


@pytest.mark.parametrize(
    ("steps_s", "ended_s", "counted"),
    [
        ([], None, 0),
        ([1.0], None, 0),
        ([1.0, 1.0], None, 0),  # one that counts tells nothing of scatter
        ([1.0, 0.75, 0.5], None, 2),  # just ten refreshes; 0.75 s is just 1.2 of the median
        ([1.0, 0.6875, 0.5], None, 0),
        ([1.0, 1.25, 1.0, 1.0, 1.0], None, 3),
        ([1.0, 1.0, 1.25, 1.0, 1.0], None, 4),  # not at the start
        ([1.0, 0.5, 0.5], 2.5, 2),  # the last of them ended later
    ],
)
def test_which_steps_of_a_warm_up_are_its_baseline(steps_s, ended_s, counted):
    gpu = FakeGpu(refresh_s=0.125)
    meter = EnergyMeter(gpu, poll_s=3600)
    look(meter, gpu, 6.0)
    steps = BaselineSteps()
    ends_s = list(itertools.accumulate(steps_s))
    for end_s, duration_s in zip(ends_s, steps_s, strict=True):
        steps.add(end_s - duration_s, end_s)
    if ended_s is not None:
        steps.end_step(ended_s)
        steps_s[-1] += ended_s - ends_s[-1]
    measured = steps.measure(meter)
    if not counted:
        assert measured is None
    else:
        kept_s = steps_s[-counted:]
        assert measured.iterations == counted
        assert measured.time_s == pytest.approx(np.mean(kept_s))
        assert measured.energy_j == pytest.approx(100 * np.mean(kept_s))
        assert measured.time_uncertainty_s == error_of_mean(kept_s)
    meter.close()


@pytest.mark.parametrize(("saved", "noise", "count"), [(0.0, 0.02, 3), (0.0, 0.05, 10)])
def test_a_saving_is_not_claimed_where_there_is_none(saved, noise, count):
    """Short baselines of noisy steps: a claim is wrong in 2.5 % of jobs at most, and a bit."""
    rng = np.random.default_rng(7)
    claims = 0
    for _ in range(2000):
        steps = []
        for n in (count, 50):
            times_s = 1 + noise * rng.standard_normal(n)
            steps.append(
                StepEnergy(n, times_s.mean(), error_of_mean(list(times_s)), 300 * times_s.mean(), 0)
            )
        claims += compare(steps[1], steps[0]).saves_for_sure
    assert claims / 2000 <= 0.035


def test_savings_and_slowdowns_carry_their_uncertainty():
    baseline = StepEnergy(10, 1.0, 0.01, 400.0, 3.0)
    step = StepEnergy(100, 1.02, 0.0, 320.0, 0.0)
    found = compare(step, baseline)
    assert found.saving_percent == pytest.approx(20)
    assert found.saving_uncertainty_percent == pytest.approx(100 * 0.8 * 5 / 400)
    assert found.slowdown_percent == pytest.approx(2)
    assert found.slowdown_uncertainty_percent == pytest.approx(100 * 1.02 * 0.01)
    assert found.saves_for_sure
    assert not replace(found, saving_uncertainty_percent=20 / 1.96).saves_for_sure
    assert replace(found, saving_uncertainty_percent=10.2).saves_for_sure
    once = compare(replace(step, time_uncertainty_s=None), baseline)
    assert once.saving_percent == pytest.approx(20)
    assert once.saving_uncertainty_percent is None
    assert not once.saves_for_sure
    unmetered = compare(replace(step, energy_j=None), baseline)
    assert unmetered == replace(found, saving_percent=None, saving_uncertainty_percent=None)
    assert not unmetered.saves_for_sure
    assert compare(step, replace(baseline, energy_j=None)) == unmetered
    # 320 +- 4 J in 1.02 +- 0.02 s, of which 3.5 J by the scatter of the time.
    both = StepEnergy(100, 1.25, 0.02, 320.0, 4.0)
    assert both.power_w == 256
    assert both.energy_uncertainty_j == pytest.approx(math.hypot(4, 256 * 0.02))
    found = compare(both, baseline)
    assert found.saving_uncertainty_percent == pytest.approx(
        100 * math.hypot(both.energy_uncertainty_j, 0.8 * 5) / 400
    )
    assert found.slowdown_percent == pytest.approx(25)
    assert found.slowdown_uncertainty_percent == pytest.approx(100 * math.hypot(0.02, 1.25 * 0.01))
    longer = replace(baseline, time_s=4.0)
    assert compare(both, longer).slowdown_percent == pytest.approx(-68.75)
    assert compare(both, longer).slowdown_uncertainty_percent == pytest.approx(
        25 * math.hypot(0.02, 1.25 / 4 * 0.01)
    )
    assert compare(both, replace(baseline, time_uncertainty_s=None)) == replace(
        found, saving_uncertainty_percent=None, slowdown_uncertainty_percent=None
    )
    nothing = StepEnergy(2, 0.0, 0.0, 0.0, 0.001)
    assert nothing.power_w is None
    assert nothing.energy_uncertainty_j is None
    assert compare(step, replace(baseline, energy_j=0.0)).saving_percent is None


@pytest.mark.parametrize(
    ("value", "uncertainty", "said"),
    [
        (None, None, "not known"),
        (12.345, None, "12.35 %"),
        (-0.5, 0.25, "-0.50 +- 0.49 %"),
        (0.0, 0.0, "0.00 +- 0.00 %"),
    ],
)
def test_percent_has_its_interval_where_that_is_known(value, uncertainty, said):
    assert percent(value, uncertainty) == said


def test_a_mean_of_two_has_an_error_and_of_one_none():
    assert error_of_mean([3.0]) is None
    # 12.706 of 1.96 is Student's t of one degree of freedom at 95 %; the deviation is sqrt(2).
    assert error_of_mean([3.0, 5.0]) == pytest.approx(12.706 / 1.96, rel=1e-4)


# Intervals ------------------------------------------------------------------------------------


def look(meter: EnergyMeter, gpu: FakeGpu, until_s: float) -> None:
    for time_s in np.arange(gpu.now_s, until_s + 0.01, 0.05):
        gpu.now_s = time_s
        meter._sample()


def test_what_a_lap_says():
    gpu = FakeGpu(refresh_s=0.125, counter_j=lambda time_s: 128 * time_s)  # no rounding in these
    meter = EnergyMeter(gpu, poll_s=3600)
    for tick in range(64):
        gpu.now_s = tick / 8
        meter._sample()
    interval = IntervalMeter(meter)
    interval.add("warm-up", 0.5, 1.0)
    interval.add("warm-up", 1.0, 1.75)
    interval.add_between("plan", 1.75, 2.25)
    interval.add("steady", 2.5, 2.75)
    interval.end_step(3.25)
    interval.end_step(3.0)  # it has ended already
    lap = interval.lap()
    uncertainty_j = math.sqrt(2) * 0.001  # of two spans, each known to the counter's resolution
    assert lap == IntervalEnergy(
        {"warm-up": 2, "plan": 0, "steady": 1},
        2.5,
        320.0,
        pytest.approx(uncertainty_j),
        StepEnergy(
            3,
            2.5 / 3,
            error_of_mean([0.5, 0.75, 0.75]),
            320 / 3,
            pytest.approx(uncertainty_j / 3),
        ),
    )
    assert lap.iterations == 3
    interval.end_step(4.0)  # the lap's last step goes on after it
    assert interval.lap() == IntervalEnergy({}, 0.75, 96.0, 0.001, None)
    interval.add_between("plan", 4.0, 4.5)
    assert interval.lap() == IntervalEnergy({"plan": 0}, 0.5, 64.0, 0.001, None)
    assert interval.lap() == IntervalEnergy({}, 0.0, 0.0, 0.0, None)
    meter.close()


def test_what_a_lap_told_too_high_is_made_up_for_once(monkeypatch):
    gpu = FakeGpu(counter_j=lambda time_s: 400 * min(time_s, 1) + 100 * max(time_s - 1, 0))
    meter = EnergyMeter(gpu, poll_s=3600)
    look(meter, gpu, 1.0)
    interval = IntervalMeter(meter)
    interval.add("steady", 0.0, 0.5)
    interval.add("steady", 0.75, 1.2)
    assert interval.lap().energy_j == pytest.approx(200 + 180)  # 0.2 s at 400 W, not at 100
    assert interval.lap().energy_j == 0  # nothing to correct yet
    look(meter, gpu, 4.0)
    monkeypatch.setattr(interval_energy, "_LONGEST_PENDING_S", 0.5)
    for begin_s in (1.2, 2.0, 2.8):  # what came before is metered with the next
        interval.add("steady", begin_s, begin_s + 0.8)
    assert interval.lap().energy_j == pytest.approx(240 - 60)
    interval.add("steady", 3.6, 4.0)
    assert interval.lap().energy_j == pytest.approx(40)
    meter.close()


def test_an_interval_of_hours_outlives_the_meters_memory():
    """Without a lap the meter would have forgotten where it began."""
    gpu = FakeGpu()
    gpu.refresh_s = 1.0
    meter = EnergyMeter(gpu, poll_s=3600, horizon_s=1000.0)
    interval = IntervalMeter(meter)
    for begin_s in range(0, 10_000, 10):
        gpu.now_s = begin_s + 10
        for time_s in range(begin_s, begin_s + 11):
            gpu.now_s = time_s
            meter._sample()
        interval.add("steady", begin_s, begin_s + 10)
    lap = interval.lap()
    assert lap.energy_j == pytest.approx(100 * 10_000)
    assert lap.step.iterations == 1000
    meter.close()


def test_steps_are_metered_together_and_not_before_their_end_was_seen():
    """Else each end adds its uncertainty, and what was extrapolated stays in the bill."""
    gpu = FakeGpu()
    gpu.refresh_s = 1.0
    gpu.counter_j = lambda time_s: 100 * time_s + 20 * np.sin(3 * time_s)
    meter = EnergyMeter(gpu, poll_s=3600, horizon_s=1000.0)
    interval = IntervalMeter(meter)
    for end_s in range(10, 1501, 10):
        for time_s in range(end_s - 10, end_s - 5):
            gpu.now_s = time_s
            meter._sample()
        interval.add("steady", end_s - 10, end_s - 5)  # its end was not seen yet
        interval.add("steady", end_s - 5, end_s)
    gpu.now_s = 1500
    meter._sample()
    lap = interval.lap()
    assert lap.energy_j == pytest.approx(gpu.counter_j(1500) - gpu.counter_j(0), abs=1e-6)
    assert lap.metering_uncertainty_j < 3 * meter.window(900, 1500).uncertainty_j
    meter.close()


def test_laps_add_up_where_the_counter_had_refreshed():
    gpu = FakeGpu()
    gpu.counter_j = lambda time_s: 100 * time_s + 20 * np.sin(3 * time_s)
    meter = EnergyMeter(gpu, poll_s=3600)
    interval = IntervalMeter(meter)
    laps = []
    for begin, end in itertools.pairwise(range(0, 60, 3)):
        look(meter, gpu, end / 10)
        interval.add("steady", begin / 10, end / 10 - 0.1)
        interval.end_step(end / 10)
        if end % 9 == 0:
            laps.append(interval.lap())
    laps.append(interval.lap())
    assert sum(lap.energy_j for lap in laps) == pytest.approx(gpu.counter_j(5.7), rel=1e-5)
    assert sum(lap.duration_s for lap in laps) == pytest.approx(5.7)
    meter.close()


def test_laps_that_end_in_a_wait_add_up_all_the_same():
    """Extrapolated from work, each end would be told too high, and nothing make up for it."""
    gpu = FakeGpu()

    def counter_j(time_s: float) -> float:
        """Steps of 0.25 s: 0.17 s of work at 400 W, then a wait at 100 W."""
        steps, within_s = divmod(time_s, 0.25)
        return 76 * steps + 400 * min(within_s, 0.17) + 100 * max(within_s - 0.17, 0.0)

    gpu.counter_j = counter_j
    meter = EnergyMeter(gpu, poll_s=3600)
    interval = IntervalMeter(meter)
    told_j = 0.0
    for step in range(200):
        end_s = (step + 1) * 0.25
        look(meter, gpu, end_s - 0.04)
        interval.add("steady", step * 0.25, end_s)
        told_j += interval.lap().energy_j
    assert told_j == pytest.approx(200 * 76, rel=2e-3)
    meter.close()


def test_a_lap_does_not_wait_for_a_driver_that_hangs():
    gpu = FakeGpu()
    meter = EnergyMeter(gpu, poll_s=3600)
    look(meter, gpu, 1.0)
    interval = IntervalMeter(meter)
    interval.add("steady", 0.0, 0.5)
    interval.add("steady", 0.5, 1.2)
    reads = []
    gpu.read_energy = lambda: reads.append(1)  # type: ignore[method-assign,func-returns-value]
    assert interval.lap().energy_j == pytest.approx(120)  # two refreshes are not due yet
    interval.add("steady", 1.2, 2.0)
    lap = interval.lap()
    assert lap.energy_j is None
    assert lap.step.time_s == pytest.approx(0.8)
    assert not reads
    del gpu.read_energy  # type: ignore[attr-defined]
    look(meter, gpu, 2.5)
    interval.add("steady", 2.0, 2.5)
    assert interval.lap().energy_j == pytest.approx(50)
    gpu.error = GpuError("busy")
    meter.catch_up()
    interval.add("steady", 2.5, 2.6)
    assert interval.lap().energy_j is None
    meter.close()


def test_gpus_of_a_stage_stand_in_for_each_other():
    def step(energy_j):
        return StepEnergy(4, 1.0, 0.1, energy_j, None if energy_j is None else 3.0)

    def stage(*energies_j):
        return StepSums(*np.sum([StepSums.of(step(energy_j)) for energy_j in energies_j], axis=0))

    mean = mean_over_gpus([stage(100.0, None), stage(300.0, 320.0)])
    assert mean.energy_j == pytest.approx((100 + 100 + 300 + 320) / 4)
    assert mean.metering_uncertainty_j == pytest.approx(math.hypot(6, 3, 3) / 4)
    unmetered = mean_over_gpus([stage(None), stage(300.0)])
    assert unmetered == StepEnergy(4, 1.0, 0.1, None, None)
    assert mean_over_gpus([stage(100.0), StepSums.of(None)]) is None
    unlike = [StepEnergy(4, 1.0, 0.1, 100.0, 3.0), StepEnergy(2, 2.0, 0.3, 300.0, 4.0)]
    assert mean_over_gpus([StepSums.of(step) for step in unlike]) == StepEnergy(
        3, 1.5, 0.2, 200.0, 2.5
    )
    unlike[1] = replace(unlike[1], time_uncertainty_s=None)
    assert mean_over_gpus([StepSums.of(step) for step in unlike]).time_uncertainty_s is None


def test_a_job_of_single_steps_a_lap_has_a_mean_with_an_error():
    mean = PhaseMean()
    assert mean.step is None
    only = StepEnergy(5, 1.0, 0.01, 100.0, 1.0)
    mean.add(only)
    assert mean.step == only
    mean.add(StepEnergy(3, 2.0, 0.02, 300.0, 2.0))
    # A lap counts by its steps: 5 of 1 s, 3 of 2 s; their uncertainties are 5 and 6 J.
    assert mean.step == StepEnergy(
        8, 11 / 8, error_of_mean([1.0, 2.0]), 1400 / 8, pytest.approx(math.hypot(5, 6) / 8)
    )
    mean = PhaseMean()
    for time_s in (1.0, 1.1, 0.9):
        mean.add(StepEnergy(1, time_s, None, 100 * time_s, 1.0))
    mean.add(StepEnergy(1, 50.0, None, None, None))
    assert mean.step.time_s == pytest.approx(1.0)
    assert mean.step.energy_j == pytest.approx(100)
    assert mean.step.time_uncertainty_s == pytest.approx(
        4.303 / 1.96 * 0.1 / math.sqrt(3), rel=1e-3
    )
    assert mean.step.iterations == 3


# The end --------------------------------------------------------------------------------------


def test_closing_after_an_error_bills_what_had_ended(tmp_path):
    with RankPool(2, timeout_s=5) as pool:  # its own: the failed messages stay in the group
        told = pool.run(step_ranks.fail_and_close, tmp_path, 1)
    for rank, (errors, truth, summary) in enumerate(told):
        assert errors[0] == ("ValueError" if rank == 1 else "ChannelError")
        assert errors[1] == "SessionError"
        assert summary["gpu"]["total_energy_j"] == pytest.approx(truth[0], rel=1e-5)
        assert summary["gpu"]["phases"]["warm-up"]["iterations"] == 2
        assert summary["clocks"]["error"] is None
        json.dumps(summary)


def test_closing_beside_a_dead_rank_does_not_hang(tmp_path):
    with RankPool(3, timeout_s=20) as pool:
        pool.start(step_ranks.outlive_a_dead_rank, tmp_path)
        outcomes = pool.outcomes(ranks=[0, 1])
    for worked, told in outcomes.values():
        assert worked, told
        closing_s, truth, summary = told
        assert closing_s < 5  # of 8 that a collective would wait
        assert summary["gpu"]["total_energy_j"] == pytest.approx(truth[0], rel=1e-5)
