"""The comparison of planners: who is priced how, what is a miss, and what is left out."""

import math
from functools import partial

import numpy as np
import pytest
from core_cases import like_a_gpu

from benchmarks.planner import compare as command
from benchmarks.planner import plans as made
from benchmarks.planner.lowtime_rival import LowtimeRun, run_lowtime
from benchmarks.planner.plans import PlanKind, compare, lowtime_row
from benchmarks.planner.workloads import PERSEUS_SAVED_PERCENT, Workload
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, max_frequencies
from envpipe_megatron.errors import EnvPipeError

POWER_W = 80.0
STAGES, MICROBATCHES = 3, 6
CLOCKS = (1400, 1300, 1200, 1100, 1000, 900)
SCHEDULE = builders.one_f_one_b(STAGES, MICROBATCHES)


PROFILE = like_a_gpu(STAGES, CLOCKS)
WORKLOAD = Workload("made-up", "model", "GPU", False, PROFILE, MICROBATCHES, POWER_W)


def priced(frequency_mhz):
    return Plan("test", SCHEDULE, frequency_mhz, PROFILE, Conditions((POWER_W,) * STAGES)).cost


MAXIMUM = max_frequencies(SCHEDULE, PROFILE)
BASELINE = priced(MAXIMUM)


def lowtime_run(plans, finished=True):
    return LowtimeRun(plans, np.zeros(len(plans)), 77.0, finished)


def no_lowtime(*asked):
    raise EnvPipeError("no run is stored")


@pytest.fixture(scope="module", autouse=True)
def few_points():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "FRONTIER_POINTS", 6)
        yield


@pytest.fixture(scope="module")
def comparison(few_points):
    return compare(WORKLOAD, no_lowtime)


def test_every_plan_is_there_and_none_beats_what_no_order_can(comparison):
    labels = [row.label for row in comparison.rows]
    assert labels == [
        "all-maximum",
        "uniform",
        "EnvPipe on 1F1B",
        "EnvPipe in full",
        "ours on 1F1B",
        "ours joint, extra <= 0",
        "ours joint, extra <= 1",
        "ours joint, extra <= 2",
        "ours joint, extra <= 4",
        "ours joint, extra unlimited",
    ]
    assert comparison.row(PlanKind.ALL_MAXIMUM).cost == BASELINE
    for limit in (0, 1, 2, 4, None):
        row = comparison.row(PlanKind.OURS_JOINT, limit)
        assert row.any_order_saving_percent >= row.saving_percent
        assert row.slowdown_percent <= 1e-9
        assert max(row.plan.schedule.extra_forwards) <= (math.inf if limit is None else limit)
    for row in comparison.rows:
        assert row.planning_time_s > 0
        assert row.peak_in_flight >= STAGES
    assert [frontier.order for frontier in comparison.frontiers] == ["1f1b", "auto"]


def test_lowtime_is_taken_at_the_time_its_plan_takes_not_the_one_it_states():
    slow_last_unit, slow_idle_unit = MAXIMUM.copy(), MAXIMUM.copy()
    slow_last_unit[0, -1] = 900  # on the critical path: cheap, but late
    slow_idle_unit[0, -2] = 1300  # in a bubble: cheaper in the same time
    assert priced(slow_last_unit).iteration_time_s > BASELINE.iteration_time_s
    assert priced(slow_idle_unit).iteration_time_s == BASELINE.iteration_time_s
    stated_s = 0.99 * BASELINE.iteration_time_s
    plans = [(stated_s, clocks) for clocks in (slow_last_unit, slow_idle_unit, MAXIMUM)]
    row = lowtime_row(WORKLOAD, lowtime_run(plans))
    assert row.cost == priced(slow_idle_unit)
    assert row.planning_cpu_s == 77.0
    assert row.plan.gap_percent > 0
    assert row.label == "1F1B + lowtime"
    # Where none keeps the time, the fastest counts.
    late = lowtime_row(WORKLOAD, lowtime_run(plans[:1]))
    assert late.cost == priced(slow_last_unit)
    assert late.slowdown_percent > 1


def test_without_time_for_lowtime_only_stored_runs_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(made, "EXTRA_FORWARDS", (0,))
    with pytest.raises(EnvPipeError, match="no run is stored"):
        run_lowtime(PROFILE, 6, POWER_W, time_limit_s=0, output_dir=tmp_path)
    found = lowtime_run([(BASELINE.iteration_time_s, MAXIMUM)])
    comparison = compare(WORKLOAD, lambda *asked: found)
    assert comparison.row(PlanKind.LOWTIME).cost == BASELINE
    assert not comparison.skipped
    limits = {"time_limit_s": 0, "output_dir": tmp_path}
    (left_out,) = compare(WORKLOAD, partial(run_lowtime, **limits)).skipped
    assert left_out.startswith("model, GPU, M = 6: lowtime: no run is stored")


def test_what_perseus_prints_is_beside_our_plan_on_1f1b_only(comparison, monkeypatch):
    monkeypatch.setitem(PERSEUS_SAVED_PERCENT, WORKLOAD.key, 12.5)
    printed = {
        row.kind: command.plan_row(WORKLOAD, row)["perseus_prints_percent"]
        for row in comparison.rows
    }
    assert printed.pop(PlanKind.OURS_ON_1F1B) == 12.5
    assert set(printed.values()) == {None}
