"""Inputs at the edge of what core takes: a clear error, or the right figure."""

import json

import pytest

from envpipe_megatron.core import builders
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan, PlanError, max_frequencies, read_plan
from envpipe_megatron.core.profile import ProfileError, ProfileRow, make_profile
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.planner import PlannerError, PlanRequest, make_plan


def profile(num_stages=2, frequencies=(1400, 1000)):
    rows = [
        (stage, kind, ProfileRow(f, 1400 / f, f / 100))
        for stage in range(num_stages)
        for kind in Kind
        for f in frequencies
    ]
    return make_profile(rows, source="made for a test")


def plan_of(schedule):
    prof = profile(schedule.num_stages).for_chunks(schedule.num_chunks)
    powers = (80.0,) * schedule.num_stages
    return Plan("baseline", schedule, max_frequencies(schedule, prof), prof, Conditions(powers))


@pytest.mark.parametrize(
    ("wish", "shown"),
    [
        ({"schedule": "zero-bubble"}, "zero-bubble"),
        ({"policy": "cheapest"}, "cheapest"),
        ({"policy": "envelope", "reconfigure": "fast"}, "fast"),
    ],
)
def test_unknown_names_are_refused(wish, shown):
    with pytest.raises(PlannerError, match=shown):
        make_plan(profile(), PlanRequest(4, **wish))


def test_profile_for_another_number_of_chunks_is_refused():
    schedule = builders.interleaved(2, 2, 2)
    prof = profile()
    with pytest.raises(PlanError, match="chunks"):
        Plan("baseline", schedule, max_frequencies(schedule, prof), prof, Conditions((0.0, 0.0)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_mhz", [[10**30] * 4] * 2),
        ("blocking_power_w", [10**400, 1]),
        ("num_microbatches", 10**9),
        ("policy", 5),
        ("schedule_name", [1]),
        ("schedule", [["F" + "9" * 5000] * 4] * 2),
    ],
)
def test_absurd_plan_fields_are_named(tmp_path, field, value):
    path = tmp_path / "plan.json"
    plan = plan_of(builders.one_f_one_b(2, 2))
    path.write_text(json.dumps(plan.to_json() | {field: value}))
    with pytest.raises(EnvPipeError, match=field):
        read_plan(path, plan.profile)


def test_deeply_nested_plan_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000)
    with pytest.raises(PlanError, match="not readable"):
        read_plan(path, profile())


@pytest.mark.parametrize(
    "rows",
    [
        [(0, kind, ProfileRow(1400, 1, 1)) for kind in (*Kind, Kind.FORWARD)],
        [(stage, kind, ProfileRow(1400, 1, 1)) for kind in Kind for stage in (-1, 0)],
    ],
)
def test_profiles_made_in_memory_are_checked(rows):
    with pytest.raises(ProfileError):
        make_profile(rows, source="made for a test")


@pytest.mark.parametrize(
    "row",
    [
        *[(clock, 1, 1) for clock in (0, 1_000_000)],
        *[(1400, time_s, 1) for time_s in (0, float("nan"), float("inf"))],
        *[(1400, 1, energy_j) for energy_j in (-1, -0.5, float("inf"))],
        *[(1400, 1, 1, uncertainty_j) for uncertainty_j in (-0.5, float("inf"))],
    ],
)
def test_rows_made_in_memory_are_checked(row):
    with pytest.raises(ProfileError, match="row"):
        ProfileRow(*row)
