"""Frontiers of time and of memory, and what is stored of them."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from operator import le

import pytest
from core_cases import uniform_profile
from on_request import on_request

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import PlanError
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow, SplitBackward
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.frontier import (
    CSV_COLUMNS,
    read_frontier,
    write_frontier,
)
from envpipe_megatron.policies.planner import make_frontier, make_memory_frontier, make_plan
from envpipe_megatron.policies.request import PlanRequest

#: {frequency_mhz: (time_s, energy_j)}: slower is cheaper down to 900 MHz, and dearer below.
CURVE = {1400: (1.0, 100.0), 1200: (1.1, 85.0), 1050: (1.25, 76.0), 900: (1.4, 72.0),
         600: (2.0, 80.0)}  # fmt: skip
PROFILE = uniform_profile(4, CURVE, backward=2.0)


def request(schedule="1f1b", **wishes):
    return PlanRequest(8, schedule, "optimal", blocking_power_w=30.0, **wishes)


@pytest.mark.parametrize("schedule", ["1f1b", "envpipe", "gpipe", "auto"])
def test_energy_never_rises_with_time(schedule):
    plans = make_frontier(PROFILE, request(schedule), 25)
    assert len(plans) > 5
    for faster, slower in pairwise(plans):
        assert faster.cost.iteration_time_s < slower.cost.iteration_time_s
        assert faster.cost.energy_j > slower.cost.energy_j
    for plan in plans:
        assert plan.energy_lower_bound_j <= plan.cost.energy_j * (1 + 1e-12)


def test_it_spans_from_the_fastest_iteration_to_the_cheapest():
    plans = make_frontier(PROFILE, request(), 25)
    baseline = plans[0].baseline.cost
    assert plans[0].cost.iteration_time_s == pytest.approx(baseline.iteration_time_s)
    # With all the time there is, no plan is cheaper, and none is slower for nothing.
    free = make_plan(PROFILE, request(deadline_factor=50.0)).plan.cost
    assert plans[-1].cost.energy_j == pytest.approx(free.energy_j, rel=3e-3)
    assert plans[-1].cost.iteration_time_s == pytest.approx(free.iteration_time_s, rel=3e-2)
    assert free.iteration_time_s < 2 * baseline.iteration_time_s


def test_the_joint_frontier_is_nowhere_above_those_of_its_orders():
    joint = make_frontier(PROFILE, request("auto"), 25)
    for schedule in ("1f1b", "envpipe"):
        for plan in make_frontier(PROFILE, request(schedule), 25):
            as_fast = [
                p.cost.energy_j
                for p in joint
                if p.cost.iteration_time_s <= plan.cost.iteration_time_s * 1.01
            ]
            assert min(as_fast) <= plan.cost.energy_j * 1.005


@pytest.mark.parametrize("make", [lambda p, r: make_frontier(p, r, 5), make_memory_frontier])
def test_frontiers_are_made_of_optimal_plans(make):
    with pytest.raises(EnvPipeError, match="optimal"):
        make(PROFILE, PlanRequest(8, "envpipe", "envelope"))


def test_a_profile_without_a_valley_has_a_frontier():
    """EnvPipe's rule alone needs a clock that forwards and backwards share."""
    profile = make_profile(
        [
            (stage, kind, ProfileRow(clock - apart, time_s, 100 * time_s * clock / 1400))
            for stage in range(2)
            for kind, apart in ((Kind.FORWARD, 0), (Kind.BACKWARD, 15))
            for clock, time_s in ((1400, 1.0), (1200, 1.1))
        ],
        source="made for a test",
    )
    plans = make_frontier(profile, request("auto"), 5)
    assert plans[-1].cost.energy_j < plans[0].baseline.cost.energy_j


def test_a_memory_frontier_compares_orders():
    with pytest.raises(EnvPipeError, match="auto"):
        make_memory_frontier(PROFILE, request("envpipe"))


def test_more_memory_never_costs_energy_and_the_first_point_is_1f1b():
    points = make_memory_frontier(PROFILE, request("auto"))
    assert points[0].plan.schedule.name == "1f1b"
    assert points[0].peak_in_flight == 4
    assert len(points) > 2
    for less, more in pairwise(points):
        assert less.max_extra_forwards < more.max_extra_forwards
        assert more.plan.cost.energy_j <= less.plan.cost.energy_j
    for point in points:
        assert max(point.plan.schedule.extra_forwards) <= point.max_extra_forwards
        baseline_s = point.plan.baseline.cost.iteration_time_s
        assert point.plan.cost.iteration_time_s <= baseline_s * (1 + 1e-9)


def test_a_limit_in_flight_ends_the_memory_frontier():
    points = make_memory_frontier(PROFILE, request("auto", max_in_flight=(5, 4, 3, 2)))
    assert [point.max_extra_forwards for point in points] == [0, 1]
    assert points[-1].plan.schedule.peak_in_flight <= (5, 4, 3, 2)


@pytest.mark.parametrize(
    ("chunks", "own"), [(1, builders.one_f_one_b(4, 8)), (2, builders.interleaved(4, 8, 2))]
)
def test_a_memory_frontier_is_of_all_families(chunks, own):
    """Its plans hold what they may, and the last saves what the plan without a limit does."""
    asked = request("auto", num_chunks=chunks, split=SplitBackward(0.5, 0.0))
    points = make_memory_frontier(PROFILE, asked)
    assert len(points) > 2
    for point in points:
        order = point.plan.schedule
        most = (held + point.max_extra_forwards for held in own.microbatches_in_flight)
        assert all(map(le, order.microbatches_in_flight, most))
    for less, more in pairwise(points):
        assert less.max_extra_forwards < more.max_extra_forwards
        assert more.plan.cost.energy_j < less.plan.cost.energy_j
    free = make_plan(PROFILE, asked).plan
    assert points[-1].plan.cost.energy_j <= free.cost.energy_j * (1 + 1e-4)
    tight = make_plan(PROFILE, replace(asked, max_extra_forwards=points[0].max_extra_forwards))
    assert points[0].plan.cost.energy_j <= tight.plan.cost.energy_j * (1 + 1e-4)


@pytest.fixture(scope="module")
def plans():
    return make_frontier(PROFILE, request("auto"), 12)


@pytest.fixture
def stored_path(plans, tmp_path):
    return write_frontier(plans, tmp_path / "frontier.csv")


def test_both_files_hold_times_energies_and_bounds(plans, stored_path):
    text = stored_path.with_suffix(".csv").read_bytes().decode()
    assert "\r" not in text
    rows = list(csv.reader(text.splitlines()))
    assert tuple(rows[0]) == CSV_COLUMNS
    found = [[float(cell) for cell in row] for row in rows[1:]]
    assert found == [
        [p.cost.iteration_time_s, p.cost.energy_j, p.energy_lower_bound_j, p.cost.mean_power_w]
        for p in plans
    ]
    # The header of the plans has the same figures.
    header = json.loads(stored_path.read_text().splitlines()[0])
    baseline = plans[0].baseline.cost.iteration_time_s, plans[0].baseline.cost.energy_j
    assert [*map(list, zip(*found, strict=True))] == [header.pop(name) for name in CSV_COLUMNS]
    assert header == {
        "format": "envpipe-frontier/1",
        "baseline": dict(zip(CSV_COLUMNS, baseline, strict=False)),
        "profile_sha256": PROFILE.sha256,
    }


def test_a_straggler_gets_the_slowest_plan_that_just_meets_it(plans, stored_path):
    stored = read_frontier(stored_path)
    assert stored.baseline_s == plans[0].baseline.cost.iteration_time_s
    for index, plan in enumerate(plans):
        exact_s = plan.cost.iteration_time_s
        found = stored.plan_for(exact_s, PROFILE)
        assert found.cost == plan.cost
        assert found.schedule == plan.schedule
        assert found.energy_lower_bound_j == plan.energy_lower_bound_j
        if index:
            assert stored.plan_for(exact_s - 1e-6, PROFILE).cost == plans[index - 1].cost
    assert stored.plan_for(1e9, PROFILE).cost == plans[-1].cost


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda header: header.update(format="envpipe-frontier/9"), "stored frontier"),
        (lambda header: header["iteration_time_s"].reverse(), "iteration_time_s"),
        (lambda header: header["iteration_time_s"].pop(), "iteration_time_s"),
        (lambda header: header.update(baseline=3), "baseline"),
        (lambda header: header.pop("baseline"), "baseline"),
        *[
            (
                lambda header, time_s=bad: header["baseline"].update(iteration_time_s=time_s),
                "baseline",
            )
            for bad in ("9", None, 0, -0.5, float("inf"), float("nan"))
        ],
    ],
)
def test_a_broken_header_is_named(stored_path, change, said):
    first, rest = stored_path.read_text().split("\n", 1)
    header = json.loads(first)
    change(header)
    stored_path.write_text(json.dumps(header) + "\n" + rest)
    with pytest.raises(PlanError, match=said):
        read_frontier(stored_path)


@pytest.mark.parametrize("text", ["", "not json", "[]\n{}\n"])
def test_what_is_no_frontier_is_refused(stored_path, text):
    header = json.loads(stored_path.read_text().splitlines()[0]) | {"iteration_time_s": []}
    stored_path.write_text(json.dumps(header) + "\n")
    with pytest.raises(PlanError, match="not a stored frontier with plans"):
        read_frontier(stored_path)
    stored_path.write_text(text)
    with pytest.raises(PlanError, match=r"frontier\.jsonl.* Give the \.jsonl file"):
        read_frontier(stored_path)


@pytest.mark.parametrize("line", ["{", "3", '{"format": "envpipe-plan/1"}'])
def test_a_broken_plan_is_found_when_it_is_asked_for(stored_path, plans, line):
    header, *rest = stored_path.read_text().splitlines()
    stored_path.write_text("\n".join([header, line, *rest[1:]]) + "\n")
    stored = read_frontier(stored_path)
    with pytest.raises(PlanError, match=r"frontier\.jsonl"):
        stored.plan_for(plans[0].cost.iteration_time_s, PROFILE)
    assert stored.plan_for(1e9, PROFILE).cost == plans[-1].cost


@on_request("CORE")
@pytest.mark.parametrize(
    ("schedule", "wish"),
    [
        ("1f1b", {"min_dwell_s": 0.3}),
        ("auto", {"change_time_s": 0.01}),
        ("1f1b", {"change_time_s": 0.01}),
        ("auto", {"min_dwell_s": 0.3}),
    ],
)
def test_deadlines_without_a_plan_are_left_out_of_a_frontier(schedule, wish):
    """The highest clock is not the fastest of the forward, so clocks must change to be fastest."""
    rows = {"forward": {1410: 0.100, 1395: 0.0995}, "backward": {1410: 0.200, 1395: 0.202}}
    profile = make_profile(
        [
            (stage, Kind(kind), ProfileRow(clock, time_s, 300 * time_s * clock / 1410))
            for stage in range(2)
            for kind, times in rows.items()
            for clock, time_s in times.items()
        ],
        source="made for a test",
    )
    wishes = dict(wish)
    change_time_s = wishes.pop("change_time_s", 0.0)
    conditions = Conditions((60.0, 60.0), change_time_s=change_time_s)
    asked = PlanRequest(8, schedule, "optimal", conditions=conditions, **wishes)
    plans = make_frontier(profile, asked, 12)
    assert plans
    for faster, slower in pairwise(plans):
        assert faster.cost.energy_j > slower.cost.energy_j
