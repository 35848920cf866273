"""Energy of steps, intervals and the baseline, against counters of emulated GPUs that are exact."""

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import step_ranks
from energy_lines import bill_of_ranks, error_of, parsed
from fake_gpu import FakeGpu
from rank_pool import RankPool

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.formats.steps import (
    BaselineEnergy,
    IntervalEnergy,
    StepEnergy,
)
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.runtime.energy.log import EnergyLog, Window, measure_baseline
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.energy.training import TrainingEnergy
from envpipe_megatron.runtime.execution.executor import StageRecord

pytestmark = pytest.mark.xdist_group("pipeline")


def whole(lap: IntervalEnergy) -> tuple[float, float]:
    """J and s of all steps of a lap."""
    step = lap.step
    return (step.iterations * step.energy_j, step.iterations * step.time_s) if step else (0.0, 0.0)


def look(meter: EnergyMeter, gpu: FakeGpu, until_s: float) -> None:
    for time_s in np.arange(gpu.now_s, until_s + 0.01, 0.05):
        gpu.now_s = time_s
        meter._add(meter._gpu.read_energy())


# Bills ----------------------------------------------------------------------------------------


def test_laps_and_log_are_what_the_counter_says(three_ranks, tmp_path):
    """Whatever lies between steps: they begin and end at refreshes, where nothing is guessed."""
    told = three_ranks.run(step_ranks.bill_random_steps, tmp_path)
    for laps, billed, truth, sums in told:
        assert len(laps) > 4
        for lap, _, (energy_j, duration_s) in laps:
            assert whole(lap) == pytest.approx((energy_j, duration_s), rel=1e-5, abs=1e-6)
        assert billed == pytest.approx(truth, rel=1e-5)
        assert sum(lap.step.iterations for lap, *_ in laps if lap.step) == 24
        assert sum(own.steps for own in sums.values()) == 24
        assert sum(own.energy_j for own in sums.values()) == billed[0]
    # All ranks get the mean of all.
    for index in range(len(told[0][0]) - 1):
        laps = [rank[0][index] for rank in told]
        for _, job, _ in laps:
            energies_j = [lap.step.energy_j for lap, *_ in laps]
            assert job.step.energy_j == pytest.approx(np.mean(energies_j))
            assert job.step.time_s == pytest.approx(laps[0][0].step.time_s)


class OneRank:
    """Training on one GPU, at instants that a test says; two stages are like it.

    Args:
        baseline: of an earlier start.
        seen_s: up to when the meter has looked at the counter already.
        gpu: options of the fake GPU, by default one at 128 W, which makes no rounding.
    """

    def __init__(
        self, baseline: BaselineEnergy | None = None, seen_s: float = 20.0, **gpu: Any
    ) -> None:
        self.gpu = FakeGpu(**gpu or {"refresh_s": 0.125, "counter_j": lambda time_s: 128 * time_s})
        self.meter = EnergyMeter(self.gpu, poll_s=3600)
        look(self.meter, self.gpu, seen_s)
        self.now_s, self.late, self.number = 0.0, False, 0
        self.described: list[object] = []
        self.lines: list[dict[str, Any]] = []
        self.collectives = SimpleNamespace(
            is_planner=True, stage=0, by_stage=lambda sums, merge: [merge([sums])] * 2
        )
        self.energy = TrainingEnergy(
            self.meter,
            EnergyLog(self.meter, self.lines.append, {}),
            lambda: self.now_s,
            self.collectives,
            {} if baseline is None else {"": baseline},
            self.described.append,
        )

    def step(
        self,
        phase: Phase | None,
        begin_s: float,
        unit_s: float,
        end_s: float,
        same_work: bool = True,
    ) -> None:
        """From `begin_s` to `end_s`; its iteration, if it has one, from `unit_s` for half a s."""
        self.now_s = begin_s
        self.number += 1
        self.energy.begin_step()
        if phase is not None:
            self.iterate(phase, unit_s, same_work=same_work)
        self.now_s = end_s
        self.energy.end_step(self.number)
        if not self.late:
            self.energy.catch_up()

    def iterate(
        self, phase: Phase, begin_s: float, duration_s: float = 0.5, same_work: bool = True
    ) -> None:
        """Two units of a quarter of the time each, a wait of a tenth before each, and a rest."""
        start_s, end_s = np.array([0.1, 0.45]) * duration_s, np.array([0.35, 0.7]) * duration_s
        record = StageRecord(start_s, end_s, begin_s, duration_s)
        self.energy.add(phase, self.number, record, np.array([False, True]), same_work)

    def compared(self) -> dict[str, Any]:
        """Return what steady steps of this GPU save, as JSON has it."""
        return asdict(bill_of_ranks([self.energy.sums()]).comparison())

    def spans(self) -> list[tuple[str, float, float]]:
        """Return what the log bills: phase, begin and end of each window."""
        self.energy.catch_up()
        self.energy.close()
        return [
            (line["phase"], line["begin_s"], line["begin_s"] + line["duration_s"])
            for line in self.lines
        ]


@pytest.fixture(params=[False, True], ids=["", "late"])
def rank(request) -> Iterator[Callable[..., OneRank]]:
    """Steps are billed as they are told, or all that is told waits for whoever asks."""
    made: list[OneRank] = []

    def make(*arguments: Any, **options: Any) -> OneRank:
        made.append(OneRank(*arguments, **options))
        made[-1].late = request.param
        return made[-1]

    yield make
    for one in made:
        one.meter.close()


def test_all_that_is_told_of_one_job(rank):
    job = rank()
    energy = job.energy
    assert energy.gather(energy.lap()) == IntervalEnergy({}, None)
    energy.end_step(0)  # no step has begun
    job.step(None, 0.5, 0.5, 1.0)
    job.now_s = 1.25
    energy.end_step(0)  # it has ended
    energy.pause()
    for begin_s, end_s in ((1.5, 2.25), (2.25, 3.25), (3.25, 4.0)):
        job.step(Phase.WARMUP, begin_s, begin_s + 0.125, end_s)
    energy.begin_step()
    energy.pause()  # a step that was begun and not run
    energy.end_step(0)
    assert energy.baselines.get("") is None
    energy.settle_baseline()
    warm = StepEnergy(2, 0.875, error_of([1.0, 0.75]), 112.0, 0.0005)
    assert energy.baselines.get("") == BaselineEnergy(
        replace(warm, metering_uncertainty_j=pytest.approx(0.0005 / math.sqrt(2))),
        (warm, warm),
        warm,
    )
    assert job.described == [{"baseline": asdict(energy.baselines[""].mean)}]
    mixed = energy.lap()
    assert mixed.phases == {"framework": 1, "warm-up": 3}
    assert whole(mixed) == (384.0, 3.0)
    gathered = energy.gather(mixed)
    assert gathered.phases == mixed.phases
    assert gathered.step == replace(
        mixed.step,
        metering_uncertainty_j=pytest.approx(mixed.step.metering_uncertainty_j / math.sqrt(2)),
    )
    job.now_s = 5.0
    energy.begin_step()
    job.now_s = 6.5
    energy.add_between_phases(5, 5.5)  # from the step's begin, which was earlier
    job.iterate(Phase.STEADY, 6.625)
    job.now_s = 7.25
    energy.end_step(5)
    assert energy.lap() == IntervalEnergy(
        {"plan": 0, "steady": 1}, StepEnergy(1, 2.25, None, 288.0, 0.001)
    )
    for begin_s in (7.25, 7.75):
        job.step(Phase.STEADY, begin_s, begin_s, begin_s + 0.5)
    steady = energy.gather(energy.lap())
    energy.settle_baseline()  # was settled
    job.step(Phase.WARMUP, 9.0, 9.0, 9.5)  # is not settled again
    assert energy.baselines[""].mean.iterations == 2
    energy.catch_up()
    energy.close()

    sums = energy.sums()
    assert {name: (own.steps, own.duration_s) for name, own in sums.items()} == {
        "framework": (1, 0.5), "warm-up": (4, 3.75), "plan": (0, 1.5), "steady": (3, 1.75)
    }  # fmt: skip
    assert all(own.energy_j == 128 * own.duration_s for own in sums.values())
    other = {name: replace(own, last=replace(own.last, rank=1)) for name, own in sums.items()}
    assert bill_of_ranks([sums, other]).comparison_facts() == {
        "comparison": asdict(steady.saved),
        "other_batches": {},
    }
    # Of two steps, one of which takes a third longer, nobody knows what to expect.
    compared = job.compared()
    assert {value for name, value in compared.items() if "percent" in name} == {None}


def test_a_baseline_of_an_earlier_start_is_not_measured_again(rank):
    mean = StepEnergy(4, 1.0, 0.1, 100.0, 0.5)
    job = rank(BaselineEnergy(mean, (mean, mean)))
    assert job.described == [{"baseline": asdict(mean)}]
    for begin_s in (1.0, 2.0, 3.0):
        job.step(Phase.WARMUP, begin_s, begin_s, begin_s + 1)
    assert job.energy.warm_step_s("") == 1.0
    job.energy.settle_baseline()
    assert job.energy.baselines.get("") == BaselineEnergy(mean, (mean, mean))
    assert len(job.described) == 1
    job.step(Phase.STEADY, 4.0, 4.0, 4.5)
    job.energy.catch_up()
    job.energy.close()
    # What this GPU took then is not known: its stage's mean stands in.
    assert job.compared()["saving_percent"] == pytest.approx(36.0)


def test_a_stretch_of_the_frameworks_order_renews_the_baseline(rank):
    job = rank()
    job.collectives.is_planner = True
    for begin_s in (1.0, 2.0, 3.0):
        job.step(Phase.WARMUP, begin_s, begin_s, begin_s + 1)
    job.energy.settle_baseline()
    assert job.energy.baselines[""].mean.time_s == pytest.approx(1.0)
    job.step(Phase.STEADY, 4.0, 4.0, 5.0)
    for begin_s in (5.0, 6.5, 8.0):
        job.step(Phase.BASELINE, begin_s, begin_s, begin_s + 1.5)
    job.energy.settle_baseline()
    job.energy.settle_baseline()
    renewed = job.energy.baselines[""].mean
    assert (renewed.iterations, renewed.time_s) == (2, pytest.approx(1.5))  # without the first
    assert len(job.described) == 2


def test_ranks_settle_a_baseline_together_where_one_had_other_work(rank):
    """Its units came otherwise in all steps of a stretch: the others wait for its word."""
    heard = []
    for works in (True, False):
        job, sent = rank(seen_s=40.0), list[Any]()
        job.collectives.by_stage = lambda sums, merge, sent=sent: (
            sent.append(sums) or [merge([sums])] * 2
        )
        for begin_s in np.arange(1.0, 10.0):
            warm, steady = begin_s < 4, begin_s > 7
            phase = Phase.WARMUP if warm else Phase.STEADY if steady else Phase.BASELINE
            job.step(phase, begin_s, begin_s, begin_s + 1, same_work=works or warm)
            if phase is Phase.STEADY or begin_s == 3:
                job.energy.settle_baseline()
        heard.append(len(sent))
        job.energy.close()
        others = {"baseline", "steady"} if works else {"framework"}
        assert {*job.energy.sums()} == {"warm-up", *others}
    assert heard == [2, 2]


def test_a_warm_up_that_is_begun_anew_is_measured_if_the_first_was_too_short(rank):
    """A sweep that another size of batches interrupts begins with its warm-up."""
    job = rank(seen_s=40.0)
    for begin_s, length_s in ((1.0, 0.25), (10.0, 1.0)):
        for number in range(4):
            at_s = begin_s + number * length_s
            job.step(Phase.WARMUP, at_s, at_s, at_s + length_s)
        job.energy.settle_baseline()
    assert job.energy.baselines[""].mean.time_s == 1.0


def test_gpus_that_leave_out_other_steps_count_alike_in_a_baseline(rank):
    """One that was slow for longer, whose mean is of fewer steps, is a GPU as others are."""
    sent: list[Any] = []

    def by_stage(sums: Any, merge: Callable[..., Any]) -> list[Any]:
        sent.append(sums)
        return [merge([each]) for each in (sums, sent[0])]

    for watts, slow_s in ((384, (3.0, 3.0)), (128, ())):
        job = rank(refresh_s=0.125, counter_j=lambda time_s, watts=watts: watts * time_s)
        job.collectives.by_stage = by_stage
        begin_s = 1.0
        for length_s in (1.0, *slow_s, *[1.0] * (6 - len(slow_s))):
            job.step(Phase.WARMUP, begin_s, begin_s, begin_s + length_s)
            begin_s += length_s
        job.energy.settle_baseline()
    mean, (own, other) = job.energy.baselines[""].mean, job.energy.baselines[""].by_stage
    assert (own.iterations, other.iterations, mean.iterations) == (6, 4, 5)
    assert (own.energy_j, other.energy_j) == pytest.approx((128, 384))
    assert mean.energy_j == pytest.approx((128 + 384) / 2)


def test_stretches_that_are_too_short_renew_the_baseline_together(rank):
    """Each one's first step settles, and none of them is seen before all are long enough."""
    job = rank(seen_s=40.0)
    for begin_s in (1.0, 2.0, 3.0):
        job.step(Phase.WARMUP, begin_s, begin_s, begin_s + 1)
    job.energy.settle_baseline()
    times_s = []
    for begin_s in (10.0, 20.0, 30.0):
        for phase, length_s in (
            *[(Phase.STEADY, 0.5)] * 4,
            (Phase.BASELINE, 1.5),
            *[(Phase.BASELINE, 0.5)] * 2,
            *[(Phase.STEADY, 0.5)] * 2,
        ):
            job.step(phase, begin_s, begin_s, begin_s + length_s)
            begin_s += length_s
            if phase is Phase.STEADY:
                job.energy.settle_baseline()
        mean = job.energy.baselines[""].mean
        times_s.append((mean.iterations, mean.time_s))
    assert times_s == [(2, 1.0), (4, 0.5), (4, 0.5)]


def test_each_step_is_held_against_the_baseline_in_force_in_log_bill_and_summary(rank):
    """Sequences grow in mid-training, and other plans save another share of them."""
    spans = [(1.0, Phase.WARMUP, 100.0)] * 4 + [(1.0, Phase.STEADY, 80.0)] * 20
    spans += [(2.0, Phase.BASELINE, 100.0)] * 4 + [(2.0, Phase.STEADY, 70.0)] * 10
    ends_s = np.cumsum([0.0, *(duration_s for duration_s, *_ in spans)])
    joules = np.cumsum([0.0, *(duration_s * watts for duration_s, _, watts in spans)])
    job = rank(
        seen_s=65.0, refresh_s=0.125, counter_j=lambda t: float(np.interp(t, ends_s, joules))
    )
    told = []
    for (_, phase, _), (begin_s, end_s) in zip(spans, itertools.pairwise(ends_s), strict=True):
        job.step(phase, begin_s, begin_s, end_s)
        if phase is Phase.STEADY:
            job.energy.settle_baseline()
        told.append(job.energy.gather(job.energy.lap()).saved)
    assert told[:4] == told[24:28] == [None] * 4, "nothing is saved in these phases"
    steady = [saved for saved in told if saved is not None]
    assert [saved.saving_percent for saved in steady[:20]] == pytest.approx([20.0] * 20)
    assert [saved.slowdown_percent for saved in steady] == pytest.approx([0.0] * 30, abs=1e-6)
    last = asdict(steady[-1])
    assert last["saving_percent"] == pytest.approx(100 * (1 - (20 * 80 + 10 * 140) / 4000))
    job.energy.close()
    compared = job.compared()
    assert compared["saving_percent"] == pytest.approx(last["saving_percent"])
    bill = Bill(parsed([{**line, "node": "n"} for line in job.lines]))
    assert asdict(bill.comparison()) == pytest.approx(compared, abs=1e-9)


def test_a_job_without_a_meter_is_compared_by_its_time(rank):
    job = rank(seen_s=-1.0, error=GpuError("no counter"))
    ends_s = np.cumsum([0.5, *[1.0] * 5, *[0.8, 1.0, 0.85, 0.85] * 20])
    told = []
    for number, (begin_s, end_s) in enumerate(itertools.pairwise(ends_s)):
        phase = Phase.WARMUP if number < 5 else Phase.STEADY
        job.step(phase, begin_s, begin_s, end_s)
        if number == 4:
            job.energy.settle_baseline()
        told.append(job.energy.gather(job.energy.lap()))
    assert told[4].saved is None
    assert told[-1].step.energy_j is None
    known = asdict(told[-1].saved)
    assert known.pop("slowdown_percent") == pytest.approx(-12.5)
    assert 0.1 < known.pop("slowdown_uncertainty_percent") < 3
    assert known.pop("time_s") == pytest.approx(0.875)
    assert known.pop("iterations") == 80
    assert set(known.values()) == {None}
    assert str(told[-1].saved).startswith("12.50 +- ")
    assert str(told[-1].saved).endswith(" % less time")
    job.energy.close()
    assert job.compared() == asdict(told[-1].saved)


def test_a_counter_that_fails_in_training_leaves_out_windows_and_no_energy(rank):
    """What is not metered is in no comparison, where the baseline is."""
    job = rank()
    for begin_s in (1.0, 2.0, 3.0):
        job.step(Phase.WARMUP, begin_s, begin_s, begin_s + 1)
    job.energy.settle_baseline()
    for begin_s in np.arange(4.0, 60.0):  # the counter is seen up to 20 s
        job.step(Phase.STEADY, begin_s, begin_s, begin_s + 1)
    job.gpu.error = GpuError("lost")
    job.energy.close()
    compared = job.compared()
    assert compared["saving_percent"] == pytest.approx(0.0, abs=0.01)
    assert compared["energy_j"] == pytest.approx(128.0)


@pytest.mark.parametrize("planner", [True, False])
def test_where_the_warm_up_is_no_baseline_that_is_said_once(rank, caplog, planner):
    caplog.set_level(logging.INFO)
    job = rank()
    job.collectives.is_planner = planner
    job.step(Phase.WARMUP, 1.0, 1.0, 2.0)
    job.energy.settle_baseline()
    job.energy.settle_baseline()
    assert job.energy.baselines.get("") is None
    assert caplog.text.count("needs at least two more, lasting 1.2 s together") == planner
    job.step(Phase.STEADY, 4.0, 4.0, 4.5)
    job.energy.close()
    facts = bill_of_ranks([job.energy.sums()]).comparison_facts()
    assert facts == {"comparison": None, "other_batches": {}}


# Baseline -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps_s", "counted"),
    [
        ([], 0),
        ([1.0], 0),
        ([1.0, 1.0], 0),  # one that counts tells nothing of scatter
        ([1.0, 0.75, 0.5], 2),  # just ten refreshes; 0.75 s is just 1.2 of the median
        ([1.0, 0.6875, 0.5], 0),
        ([1.0, 1.25, 1.0, 1.0, 1.0], 3),
        ([1.0, 1.0, 1.0, 1.25, 1.0], 4),  # not in the first half
        ([0.5, 0.28125, 0.28125, 2.0, *[0.25] * 6], 6),  # CUDA graphs are captured
        ([0.125] * 10, 0),  # together they are too short
        ([0.125] * 12, 11),
    ],
)
def test_which_steps_of_a_warm_up_are_its_baseline(rank, steps_s, counted):
    ends_s = itertools.accumulate(steps_s)
    warmup = [
        Window("warm-up", 0, 0, end_s - duration_s, end_s)
        for end_s, duration_s in zip(ends_s, steps_s, strict=True)
    ]
    measured = measure_baseline(warmup, rank().meter)
    if not counted:
        assert measured is None
    else:
        kept_s = steps_s[-counted:]
        assert measured.iterations == counted
        assert measured.time_s == pytest.approx(np.mean(kept_s))
        assert measured.energy_j == pytest.approx(128 * np.mean(kept_s))
        assert measured.time_uncertainty_s == pytest.approx(error_of(kept_s))


def test_a_step_that_was_held_up_says_nothing_of_a_known_baseline(rank):
    mean = StepEnergy(4, 0.5, 0.1, 100.0, 0.5)
    job = rank(BaselineEnergy(mean, (mean, mean)))
    assert job.energy.warm_step_s("") is None
    ends_s = itertools.accumulate([2.0, 0.5, 0.5, 0.75, 0.5, 0.53125, 0.5], initial=0.0)
    for begin_s, end_s in itertools.pairwise(ends_s):
        job.step(Phase.WARMUP, begin_s, begin_s, end_s)
    assert job.energy.warm_step_s("") == pytest.approx(2.53125 / 5)
    assert job.energy.warm_step_s("") is None, "they were looked at"


# Steps and laps -------------------------------------------------------------------------------


def test_steps_follow_each_other_without_a_gap_but_for_pauses(rank):
    job = rank()
    job.step(Phase.WARMUP, 0.25, 0.5, 1.25)
    job.step(Phase.WARMUP, 1.5, 1.25, 2.0)  # units that began before the step are in it, too
    job.step(None, 2.25, 0.0, 2.5)
    job.now_s = 2.75
    job.energy.begin_step()
    job.now_s = 3.0
    job.energy.add_between_phases(3, 2.75)
    job.iterate(Phase.STEADY, 3.25)
    job.energy.pause()  # in the middle of the step, whose optimizer has no end
    job.step(Phase.STEADY, 5.0, 5.0, 5.5)
    job.number += 1
    job.iterate(Phase.STEADY, 5.75)  # nobody says where this one begins or ends
    job.step(Phase.RECONFIGURE, 6.5, 6.5, 7.0)
    assert job.spans() == [
        ("warm-up", 0.25, 2.0),
        ("framework", 2.0, 2.5),
        ("plan", 2.5, 3.0),
        ("steady", 3.0, 3.75),
        ("steady", 5.0, 6.25),
        ("reconfigure", 6.25, 7.0),
    ]
    (line,) = [line for line in job.lines if line["begin_s"] == 5.0]
    assert (line["compute_s"], line["blocking_s"]) == pytest.approx((0.5, 0.1))


def test_a_lap_may_have_no_step(rank):
    job = rank()
    assert job.energy.lap() == IntervalEnergy({}, None)
    job.energy.begin_step()
    job.now_s = 4.0
    job.energy.add_between_phases(4, 3.25)
    assert job.energy.lap() == IntervalEnergy({"plan": 0}, None)


def test_what_a_lap_told_too_high_is_made_up_for_once(rank):
    job = rank(seen_s=1.0, counter_j=lambda time_s: 400 * min(time_s, 1) + 100 * max(time_s - 1, 0))
    job.iterate(Phase.STEADY, 0.0)
    job.energy.pause()
    job.iterate(Phase.STEADY, 0.75, 0.45)
    assert whole(job.energy.lap())[0] == pytest.approx(200 + 180)  # 0.2 s at 400 W, not at 100
    assert job.energy.lap().step is None  # nothing to correct yet
    look(job.meter, job.gpu, 4.0)
    job.iterate(Phase.STEADY, 1.2, 2.4)
    assert whole(job.energy.lap())[0] == pytest.approx(240 - 60)
    job.iterate(Phase.STEADY, 3.6, 0.4)
    assert whole(job.energy.lap())[0] == pytest.approx(40)


def test_a_lap_does_not_wait_for_a_driver_that_hangs(rank):
    job = rank(seen_s=1.0, refresh_s=0.1)
    job.iterate(Phase.STEADY, 0.0, 1.2)
    reads = []
    job.gpu.read_energy = lambda: reads.append(1)  # type: ignore[method-assign,func-returns-value]
    assert whole(job.energy.lap())[0] == pytest.approx(120)  # two refreshes are not due yet
    job.iterate(Phase.STEADY, 1.2, 0.8)
    lap = job.energy.lap()
    assert lap.step.energy_j is None
    assert lap.step.time_s == pytest.approx(0.8)
    assert not reads
    del job.gpu.read_energy  # type: ignore[attr-defined]
    look(job.meter, job.gpu, 2.5)
    job.iterate(Phase.STEADY, 2.0, 0.5)
    assert whole(job.energy.lap())[0] == pytest.approx(50)
    job.gpu.error = GpuError("busy")
    job.meter.catch_up()
    job.iterate(Phase.STEADY, 2.5, 0.1)
    assert job.energy.lap().step.energy_j is None


# The end --------------------------------------------------------------------------------------


def test_closing_after_an_error_bills_what_had_ended(tmp_path):
    with RankPool(2, timeout_s=5) as pool:  # its own: the failed messages stay in the group
        told = pool.run(step_ranks.fail_and_close, tmp_path, 1)
    for rank, (errors, truth, sums, summary) in enumerate(told):
        assert errors[0].startswith("ValueError" if rank == 1 else "ChannelError")
        assert errors[1].startswith("EnvPipeError: An earlier iteration failed")
        assert sum(own.energy_j for own in sums.values()) == pytest.approx(truth[0], rel=1e-5)
        assert sums["warm-up"].steps == 2
        assert summary["clocks"]["error"] is None
        json.dumps(summary)
