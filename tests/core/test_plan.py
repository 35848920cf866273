"""Plans: the definition of iteration energy by hand, and files that are never believed."""

import json
import logging
import random
from dataclasses import replace

import numpy as np
import pytest
from core_cases import PROFILE, random_schedule, uniform_profile, with_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_conditions

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import (
    Cost,
    Plan,
    PlanError,
    framework_schedule,
    read_plan,
)
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward

CONDITIONS = Conditions((40.0, 50.0))
FREQUENCY = np.array([[1200, 900, 900, 1200], [1200, 1200, 1200, 1200]])


def small_plan(**changes):
    plan = Plan("mine", builders.one_f_one_b(2, 2), FREQUENCY, PROFILE, CONDITIONS)
    return replace(plan, **changes)


def test_baseline_is_everything_at_the_highest_clock():
    # 1F1B at 1200 MHz ends after 9 s as well; both stages are busy for 6 s.
    assert small_plan().cost == Cost(9.0, 338.0)  # as in test_evaluation
    baseline = small_plan().baseline
    assert set(baseline.frequency_mhz.ravel()) == {1200}
    assert baseline.cost == Cost(9.0, 2 * (10 + 24 + 11 + 25) + 40 * 3 + 50 * 3)
    assert small_plan().cost.slowdown_percent(baseline.cost) == 0
    assert small_plan().cost.saving_percent(baseline.cost) == pytest.approx(100 * (1 - 338 / 410))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (builders.gpipe(3, 6), "1f1b"),
        (builders.envpipe(3, 6, [2, 1, 0]), "1f1b"),
        (builders.interleaved(3, 6, 2), "interleaved"),
        (builders.breadth_first(2, 4, 2), "interleaved"),
        # Megatron's order cannot run in groups of 5 and 2.
        (builders.breadth_first(5, 7, 2), "breadth-first"),
        (builders.whole_iteration(3), "whole-iteration"),
    ],
)
def test_the_baseline_order_is_the_frameworks(schedule, expected):
    framework = framework_schedule(schedule)
    assert framework.name == expected
    assert framework.num_chunks == schedule.num_chunks
    assert framework.num_microbatches == schedule.num_microbatches


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("group_size", [3, 4, 7, 11])
def test_the_baseline_of_megatrons_order_has_its_groups(group_size, num_chunks):
    schedule = builders.interleaved(3, 11, num_chunks, group_size)
    assert framework_schedule(schedule) == schedule


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_mhz": FREQUENCY[:, :3]},
        {"conditions": Conditions((40.0,))},
        {"park_mhz": FREQUENCY[:1]},
        {"energy_lower_bound_j": 0.0},
        {"profile": uniform_profile(3, {1200: (1, 1)})},
        {"profile": PROFILE.for_chunks(2)},
    ],
)
def test_plans_that_do_not_fit_are_refused(changes):
    with pytest.raises(PlanError):
        small_plan(**changes)


def test_a_frequency_that_was_not_profiled_is_refused():
    plan = small_plan(frequency_mhz=np.where(FREQUENCY == 900, 1000, FREQUENCY))
    with pytest.raises(ProfileError, match="got 1000"):
        _ = plan.cost


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_round_trip_of_any_schedule(tmp_path_factory, seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    profile = uniform_profile(schedule.num_stages, {1200: (0.1, 1 / 3), 900: (0.2, 0.1)})
    split = SplitBackward(0.4, 0.1)
    priced = profile.with_split_backwards(split) if schedule.split else profile
    priced = priced.for_chunks(schedule.num_chunks)
    frequency = np.array([[rng.choice([1200, 900]) for _ in order] for order in schedule.stages])
    curves = tuple({1200: rng.uniform(0, 99), 900: 1 / 3} for _ in schedule.stages)
    conditions = replace(
        random_conditions(rng, profile),
        wait_power_w=rng.choice([None, curves]),
        change_time_s=rng.choice([0.0, rng.uniform(0, 0.2)]),
        change_energy_j=rng.choice([0.0, rng.uniform(0, 1)]),
    )
    plan = Plan("mine", schedule, frequency, priced, conditions)
    bound_j = rng.choice([None, plan.cost.energy_j / 3])
    plan = replace(plan, energy_lower_bound_j=bound_j)
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan.write(path)
    again = read_plan(path, profile)
    assert again.schedule == schedule
    assert again.policy == "mine"
    assert again.conditions == plan.conditions
    assert np.array_equal(again.frequency_mhz, frequency)
    assert again.cost == plan.cost
    assert again.energy_lower_bound_j == bound_j
    assert again.to_json() == plan.to_json()


OPTIONAL_FIELDS = {
    "tail_time_s": [0.5, 3.0],
    "gpus_per_stage": [2, 4],
    "wait_power_w": [
        {"stage": 0, "frequency_mhz": 900, "power_w": 30.0},
        {"stage": 0, "frequency_mhz": 1200, "power_w": 60.0},
        {"stage": 1, "frequency_mhz": 1200, "power_w": 50.0},
    ],
    "frequency_change_s": 0.25,
    "frequency_change_j": 0.5,
}
REALISTIC = Conditions(
    (40.0, 50.0), 0.125, (0.5, 3.0), (2, 4), ({900: 30.0, 1200: 60.0}, {1200: 50.0}), 0.25, 0.5
)
PARK = np.array([[0, 0, 300, 0], [0, 0, 0, 0]])


def realistic_plan(**changes):
    return replace(small_plan(conditions=REALISTIC, park_mhz=PARK), **changes)


@pytest.mark.parametrize("field", [*OPTIONAL_FIELDS, "p2p_latency_s", "park_mhz"])
def test_a_condition_that_is_taken_out_changes_the_figures(tmp_path, field):
    path = tmp_path / "plan.json"
    plan = realistic_plan()
    path.write_text(json.dumps({k: v for k, v in plan.to_json().items() if k != field}))
    with pytest.raises(PlanError, match=r"iteration_time_s|energy_j|park_mhz"):
        read_plan(path, PROFILE)


class TestLowerBound:
    def test_gap(self):
        assert small_plan().gap_percent is None
        assert small_plan(energy_lower_bound_j=325.0).gap_percent == pytest.approx(4.0)
        assert small_plan(energy_lower_bound_j=0.5).gap_percent == pytest.approx(67500.0)

    def test_above_the_plans_energy_is_refused(self, tmp_path):
        path = tampered(tmp_path, energy_lower_bound_j=338.01)
        with pytest.raises(PlanError, match=r"field 'energy_lower_bound_j'.*338\.0 J"):
            read_plan(path, PROFILE)

    def test_of_another_profile_is_left_out_with_a_warning(self, tmp_path, caplog):
        path = tampered(tmp_path, energy_lower_bound_j=325.0)
        with caplog.at_level(logging.WARNING):
            plan = read_plan(path, dearer_profile())
        assert plan.energy_lower_bound_j is None
        assert "lower bound" in caplog.text


def tampered(tmp_path, **changes):
    path = tmp_path / "plan.json"
    small_plan().write(path)
    data = json.loads(path.read_text())
    for name, value in changes.items():
        if value is ...:
            del data[name]
        else:
            data[name] = value
    path.write_text(json.dumps(data))
    return path


GOOD = ["F0", "F1", "B0", "B1"]
ROW = [1200] * 4


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("format", ("envpipe-plan/2", None, ...)),
        ("num_stages", (0, 2.0, "2", True, ...)),
        *[(name, (5, [1])) for name in ("policy", "schedule_name")],
        ("num_microbatches", (-1, None, [2], 10**9, ...)),
        ("num_chunks", (0, "1", None)),
        ("schedule", (..., "F0", [], [GOOD], [GOOD, "F0"], [GOOD, []], [GOOD, GOOD[:3]])),
        ("schedule", ([GOOD, ["F0", "B0", "F1", bad]] for bad in ("B2", 1, "F0", "F" + 99 * "9"))),
        ("schedule", ([["F0", "B0", "F1", "B1"], ["F1", "B1", "F0", "B0"]],)),  # deadlock
        ("frequency_mhz", (..., None, 1200, [ROW], [ROW, ROW[:3]], [ROW, 1200])),
        ("frequency_mhz", ([ROW, [*ROW[:3], bad]] for bad in (9.0, "9", 0, 10**6, 10**30, True))),
        ("blocking_power_w", (..., 40.0, [40.0])),
        ("blocking_power_w", ([40.0, bad] for bad in ("50", -1, float("nan"), 10**400))),
        # Of all that is around, more that is wrong is in test_conditions and test_sidecar.
        ("p2p_latency_s", (None, 0.1, [0.1, 0.1], [-0.1])),
        ("gpus_per_stage", (None, [8], [8, 0], [8, 2.0], [8, 1_000_000])),
        ("wait_power_w", (80.0, [], [{"stage": 0, "frequency_mhz": 900, "power_w": 1}])),
        *[
            (name, (None, "1", -1, float("inf"), 10**400))
            for name in ("frequency_change_s", "frequency_change_j", "energy_lower_bound_j")
        ],
        ("park_mhz", (None, 300, [], [[0] * 4], [[0] * 4, [0, 0, 0, -1]])),
        ("park_mhz", ([[0] * 4, [300, 0, 0, 0]],)),  # without waiting power by clock
        ("iteration_time_s", (..., "9", 9.001, float("nan"), 10**400)),
        ("energy_j", (..., None, 338.0005, {})),
    ],
)
def test_a_tampered_field_is_named(tmp_path, field, values):
    for value in values:
        with pytest.raises(PlanError, match=f"field '{field}'"):
            read_plan(tampered(tmp_path, **{field: value}), PROFILE)


def test_more_chunks_than_there_are_units_for_are_refused_before_they_are_made(tmp_path):
    with pytest.raises(PlanError, match="field 'num_microbatches'"):
        read_plan(tampered(tmp_path, num_chunks=1000), PROFILE)


def test_figures_may_differ_by_rounding(tmp_path):
    assert read_plan(tampered(tmp_path, energy_j=338.0003), PROFILE).cost.energy_j == 338


def test_a_plan_for_another_number_of_stages_is_refused(tmp_path):
    path = tampered(tmp_path)
    with pytest.raises(PlanError, match=r"has 3 stages, and the pipeline 2"):
        read_plan(path, uniform_profile(3, {1200: (1, 1), 900: (1, 1)}))


def dearer_profile():
    dearer = with_rows(PROFILE, lambda row: replace(row, energy_j=2 * row.energy_j))
    return replace(dearer, sha256="another")


def test_another_profile_prices_the_plan_anew_with_a_warning(tmp_path, caplog):
    path = tampered(tmp_path)
    with caplog.at_level(logging.WARNING):
        plan = read_plan(path, dearer_profile())
    assert plan.cost == Cost(9.0, 2 * 128 + 210)
    assert "energy_j" in caplog.text
    assert "338" in caplog.text
    assert "iteration_time_s" not in caplog.text  # that is the same


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\x00", b"F0,B0\n", b"[" * 10**5])
def test_files_that_are_no_plan_are_refused_with_their_name(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        read_plan(path, PROFILE)
    with pytest.raises(PlanError, match="absent"):
        read_plan(tmp_path / "absent", PROFILE)
