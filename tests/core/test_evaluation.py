"""The evaluator: what each condition is worth, by hand, and what no condition may break."""

import json
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from core_cases import (
    PROFILE,
    WAIT_CURVES,
    B,
    F,
    for_chunks,
    needs,
    profile_of,
    random_schedule,
    rows_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.evaluation import PlanError, evaluate
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward
from envpipe_megatron.core.timeline import latency_by_node

SCHEDULE = builders.one_f_one_b(2, 2)
#: Stage 0: F0 0-1, F1 1-2.5, B0 4-7, B1 7-9.  Stage 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7.
FREQUENCY = np.array([[1200, 900, 900, 1200], [1200, 1200, 1200, 1200]])
#: Stage 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9.  Stage 1 as above.
MAXIMUM = np.full((2, 4), 1200)
PLAIN = Conditions((40.0, 50.0))
UNITS_J = np.array([10 + 7 + 15 + 24.0, 11 + 25 + 11 + 25])


def evaluated(frequency=FREQUENCY, park=None, profile=PROFILE, **conditions):
    return evaluate(SCHEDULE, frequency, profile, replace(PLAIN, **conditions), park)


def parking(**at):
    """Clocks to park at: `parking(s0u2=300)` before the third unit of stage 0."""
    park = np.zeros((2, 4), dtype=np.int64)
    for place, clock in at.items():
        park[int(place[1]), int(place[3])] = clock
    return park


def test_without_conditions():
    result = evaluated()
    assert result.timeline.iteration_time_s == 9.0
    assert result.unit_energy_j.sum(axis=1).tolist() == UNITS_J.tolist()
    assert result.energy_by_stage_j.tolist() == [UNITS_J[0] + 40 * 1.5, UNITS_J[1] + 50 * 3]
    assert result.clock_changes.tolist() == [2, 0]


def test_the_iteration_lasts_until_the_last_tail_ends():
    # Stage 0 ends its units at 9, stage 1 at 7.
    result = evaluated(tail_time_s=(0.5, 3.0))
    assert result.timeline.iteration_time_s == 10.0
    assert result.timeline.end_s.max() == 9.0
    assert result.energy_by_stage_j.tolist() == [UNITS_J[0] + 40 * 2.5, UNITS_J[1] + 50 * 4]


def test_energies_count_for_each_gpu_of_a_stage():
    plain = evaluated(change_energy_j=0.25).energy_by_stage_j
    several = evaluated(gpus_per_stage=(2, 4), change_energy_j=0.25)
    assert several.energy_by_stage_j.tolist() == [2 * plain[0], 4 * plain[1]]
    assert several.timeline.iteration_time_s == 9.0


def test_a_wait_runs_at_the_clock_of_the_unit_after_it():
    # Stage 0 waits 1.5 s before B0 at 900 MHz; stage 1 a second before F0 and two at the end.
    result = evaluated(wait_power_w=WAIT_CURVES)
    assert result.energy_by_stage_j.tolist() == [UNITS_J[0] + 30 * 1.5, UNITS_J[1] + 50 * 3]


class TestClockChanges:
    def test_each_costs_its_energy(self):
        plain, dear = evaluated(), evaluated(change_energy_j=0.25)
        assert (dear.energy_by_stage_j - plain.energy_by_stage_j).tolist() == [0.5, 0.0]

    @pytest.mark.parametrize(
        ("clocks", "changes"),
        [
            ([1200, 1200, 1200, 1200], 0),
            ([1200, 900, 1200, 900], 4),
            ([900, 1200, 1200, 1200], 2),  # one of them into the next iteration
            ([1200, 1200, 1200, 900], 2),
        ],
    )
    def test_are_counted_around_the_iteration(self, clocks, changes):
        assert evaluated(np.array([clocks, MAXIMUM[1]])).clock_changes.tolist() == [changes, 0]


class TestLateClock:
    def test_an_old_clock_that_was_not_profiled_for_the_unit_is_worked_out(self):
        # F1 at 1000 MHz would take 1.4 s and 8 J; half of that passes before 900 MHz comes. A
        # backward at 900 MHz, below all that is known, would take 1 / 0.9 of that at 1000.
        profile = profile_of(
            {(0, F): {1200: (1.0, 10.0), 900: (1.6, 7.0)}, (0, B): {1000: (2.0, 20.0)}}
        )
        frequency = np.array([[900, 1000, 900, 1000]])
        conditions = Conditions((40.0,), change_time_s=0.7)
        result = evaluate(builders.one_f_one_b(1, 2), frequency, profile, conditions)
        late = 0.7 / (2 / 0.9)
        backward_s, backward_j = 0.7 + (1 - late) * 2, late * (20 / 0.9) + (1 - late) * 20
        assert result.timeline.duration_s[0] == pytest.approx(
            [1.6, backward_s, 0.7 + 0.5 * 1.6, backward_s]
        )
        assert result.unit_energy_j[0] == pytest.approx(
            [7, backward_j, 0.5 * 8 + 0.5 * 7, backward_j]
        )


class TestParking:
    def test_saves_the_difference_in_waiting_power(self):
        # 1.5 s before B0 at 10 W instead of 30; F1 and B0 now each stand beside the parked clock.
        plain = evaluated(wait_power_w=WAIT_CURVES, change_energy_j=0.25)
        parked = evaluated(park=parking(s0u2=300), wait_power_w=WAIT_CURVES, change_energy_j=0.25)
        saved = plain.energy_by_stage_j - parked.energy_by_stage_j
        assert saved == pytest.approx([20 * 1.5 - 2 * 0.25, 0])
        assert parked.clock_changes.tolist() == [4, 0]
        assert parked.timeline.iteration_time_s == 9.0

    @pytest.mark.parametrize(
        ("clocks", "park_mhz", "changes"),
        [
            ([1200, 1200, 900, 900], 300, 3),  # 1200 300 900 1200
            ([1200, 1200, 900, 900], 1200, 2),  # stays, then 900 in time
            ([1200, 1200, 900, 900], 900, 2),  # the parked clock is the unit's
            ([1200, 1200, 1200, 1200], 300, 2),
        ],
    )
    def test_changes_go_through_the_parked_clock(self, clocks, park_mhz, changes):
        frequency = MAXIMUM.copy()
        frequency[0] = clocks
        result = evaluated(frequency, parking(s0u2=park_mhz), wait_power_w=WAIT_CURVES)
        assert result.clock_changes[0] == changes

    def test_a_parked_unit_is_never_late(self):
        # B0 waits 2 s, and B1 follows it at the same clock without a wait.
        frequency = MAXIMUM.copy()
        frequency[0] = [1200, 1200, 900, 900]
        options = {"wait_power_w": WAIT_CURVES, "change_time_s": 0.9}
        result = evaluated(frequency, parking(s0u2=300), **options)
        assert result.unit_energy_j[0].tolist() == [10, 10, 15, 15]
        assert result.timeline.end_s[0].tolist() == [1, 2, 7, 10]

    @pytest.mark.parametrize(
        ("place", "change_s"), [("s0u1", 0.0), ("s0u3", 0.5), ("s0u3", 0.6), ("s1u0", 1.5)]
    )
    def test_is_refused_where_two_changes_do_not_fit(self, place, change_s):
        park = parking(**{place: 300})
        unit = {"s0u1": "F1 on stage 0", "s0u3": "B1 on stage 0", "s1u0": "F0 on stage 1"}[place]
        with pytest.raises(PlanError, match=f"park_mhz.*{unit}"):
            evaluated(MAXIMUM, park, wait_power_w=WAIT_CURVES, change_time_s=change_s)

    def test_needs_waiting_power_by_clock(self):
        with pytest.raises(PlanError, match="wait_power_w"):
            evaluated(park=parking(s0u2=300))


def random_case(seed):
    """A schedule with random clocks, and a profile whose forwards and backwards differ in them."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    stages = schedule.num_stages

    def curve():
        clocks = rng.sample(range(600, 1500, 15), rng.randint(1, 4))
        return {f: (rng.uniform(0.5, 2), rng.uniform(5, 20)) for f in clocks}

    sides = [(stage, kind) for stage in range(stages) for kind in (F, B)]
    profile = profile_of({side: curve() for side in sides})
    profile = for_chunks(rng, profile, schedule.num_chunks)
    if schedule.split:
        profile = profile.with_split_backwards(SplitBackward(rng.uniform(0.2, 0.8), 0.1))
    frequency = np.array(
        [
            [rng.choice(rows_of(profile, stage, unit)).frequency_mhz for unit in order]
            for stage, order in enumerate(schedule.stages)
        ]
    )
    latency = tuple(rng.choice([0.0, rng.uniform(0, 1)]) for _ in range(stages - 1))
    conditions = Conditions(tuple(rng.uniform(0, 99) for _ in range(stages)), latency)
    return rng, schedule, profile, frequency, conditions


SEEDS = st.integers(0, 2**32)


@settings(max_examples=examples(60), deadline=None)
@given(SEEDS)
def test_changes_that_take_nothing_change_nothing(seed):
    """Also with waiting power that does not depend on the clock: then it is the blocking power."""
    rng, schedule, profile, frequency, conditions = random_case(seed)
    plain = evaluate(schedule, frequency, profile, conditions)
    flat = tuple({rng.randint(300, 2000): power} for power in conditions.blocking_power_w)
    instant = replace(conditions, wait_power_w=flat, change_time_s=1e-300)
    for other in (replace(conditions, wait_power_w=flat), instant):
        result = evaluate(schedule, frequency, profile, other)
        assert result.timeline.iteration_time_s == pytest.approx(plain.timeline.iteration_time_s)
        assert result.energy_by_stage_j == pytest.approx(plain.energy_by_stage_j)
        assert result.clock_changes.tolist() == plain.clock_changes.tolist()


def clocks_over_time(schedule, frequency, profile, change_s, latency_s):
    """(start, end, share of work done at each clock) of each unit, by the clock's own history.

    A stage keeps what it asked for and when; its clock at an instant is the last one that arrived
    by then without having been superseded on the way.
    """
    latency = latency_by_node(schedule, latency_s)
    times, done = {}, {}
    asked = [[(-1e9, int(row[0]))] for row in frequency]

    def clock_at(stage, instant):
        history = asked[stage]
        arrived = [
            clock
            for index, (when, clock) in enumerate(history)
            if when + change_s <= instant
            and not any(when < later < when + change_s for later, _ in history[index + 1 :])
        ]
        return arrived[-1]

    def duration(stage, unit, clock):
        rows = sorted(rows_of(profile, stage, unit), key=lambda row: row.frequency_mhz)
        slower = max(1.0, rows[0].frequency_mhz / clock)
        return slower * np.interp(clock, [r.frequency_mhz for r in rows], [r.time_s for r in rows])

    for node in schedule.topological_order:
        stage, position = divmod(node, schedule.units_per_stage)
        unit, clock = schedule.unit_at(node), int(frequency[stage, position])
        before = done.get((stage, position - 1), 0.0)
        start = before
        for source in needs(
            schedule.num_stages, schedule.num_chunks, stage, unit, schedule.placement
        ):
            place = (source[0], schedule.stages[source[0]].index(source[1]))
            if place[0] != stage or schedule.num_stages == 1:
                start = max(start, done[place] + latency[node])
        if clock != asked[stage][-1][1]:
            asked[stage].append((before, clock))
        arrival = asked[stage][-1][0] + change_s
        old = clock_at(stage, start)
        work_at_old = min(1.0, max(0.0, arrival - start) / duration(stage, unit, old))
        if old == clock:
            work_at_old = 0.0
        end = start + work_at_old * duration(stage, unit, old)
        end += (1 - work_at_old) * duration(stage, unit, clock)
        times[stage, position], done[stage, position] = (start, end), end
    return times


@settings(max_examples=examples(150), deadline=None)
@given(SEEDS)
def test_late_clocks_follow_the_history_of_the_stages_clock(seed):
    rng, schedule, profile, frequency, conditions = random_case(seed)
    conditions = replace(conditions, change_time_s=rng.choice([0.05, 0.3, 1.0, 3.0]))
    timeline = evaluate(schedule, frequency, profile, conditions).timeline
    expected = clocks_over_time(
        schedule, frequency, profile, conditions.change_time_s, conditions.latency_s
    )
    for (stage, position), (start, end) in expected.items():
        assert timeline.start_s[stage, position] == pytest.approx(start)
        assert timeline.end_s[stage, position] == pytest.approx(end)


MEASURED = profile_of(
    {
        (0, F): {1200: (1.0, 10.0), 900: (1.6, 7.0), 800: (2.0, 6.5)},
        (0, B): {1200: (2.0, 24.0), 900: (3.0, 15.0)},
    }
)
BETWEEN = replace(MEASURED, interpolates=True)
ONE_STAGE = builders.one_f_one_b(1, 1)


def plan_at(forward_mhz, backward_mhz, profile=BETWEEN):
    frequency = np.array([[forward_mhz, backward_mhz]])
    return Plan("mine", ONE_STAGE, frequency, profile, Conditions((40.0,)))


def units_at(forward_mhz, backward_mhz, profile=BETWEEN):
    time_s, energy_j = profile.lookup(ONE_STAGE, np.array([[forward_mhz, backward_mhz]]))
    return *time_s[0], *energy_j[0]


def test_time_and_energy_are_linear_in_the_clock():
    assert units_at(1100, 1000) == pytest.approx((1.0 + 0.6 / 3, 2.0 + 2 / 3, 9.0, 18.0))
    assert units_at(850, 900)[0] == pytest.approx(1.8)


def test_a_profiled_clock_takes_what_was_measured():
    for clocks in product((1200, 900, 800), (1200, 900)):
        assert units_at(*clocks) == units_at(*clocks, MEASURED)


@pytest.mark.parametrize(
    ("clocks", "profile", "shown"),
    [
        ((1100, 1200), MEASURED, "1100"),
        ((1230, 1200), BETWEEN, "1230"),
        ((790, 1200), BETWEEN, "790"),
        ((800, 850), BETWEEN, "850"),  # its backward was measured down to 900 MHz alone
    ],
)
def test_nothing_is_made_up_unasked_or_beyond_what_was_measured(clocks, profile, shown):
    with pytest.raises(ProfileError, match=rf"{shown}.*Profiled there: 1200, 900"):
        units_at(*clocks, profile)


@pytest.mark.parametrize("clocks", [(1100, 1200), (1200, 1100), (850, 900)])
def test_a_plan_between_clocks_is_read_with_the_measured_profile(clocks, tmp_path):
    path = tmp_path / "plan.json"
    plan_at(*clocks).write(path)
    assert json.loads(path.read_text())["interpolated"] is True
    again = read_plan(path, MEASURED)
    assert again.cost == plan_at(*clocks).cost
    assert again.to_json() == plan_at(*clocks).to_json()


@pytest.mark.parametrize(
    ("says", "error", "shown"), [(None, ProfileError, "1100"), ("yes", PlanError, "interpolated")]
)
def test_a_plan_file_must_say_so(says, error, shown, tmp_path):
    data = plan_at(1100, 1200).to_json() | {"interpolated": says}
    if says is None:
        del data["interpolated"]  # a slip of the pen is not priced
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(error, match=shown):
        read_plan(path, MEASURED)
