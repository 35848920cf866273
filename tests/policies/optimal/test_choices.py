"""Which frequencies a planner looks at, and what it is told they cost."""

import random

import numpy as np
from core_cases import B, F, profile_of
from hypothesis import given, settings
from hypothesis import strategies as st
from on_request import examples
from planning_cases import random_job

from envpipe_megatron.policies.optimal.linear_program import make_choices

SEEDS = st.integers(0, 2**32)
FIXED = settings(max_examples=examples(60), deadline=None, derandomize=True)


def choices_of(forward, backward=None, waiting_power_w=0.0, gpus=1):
    """Of a single stage, from {frequency_mhz: (time_s, energy_j)}."""
    profile = profile_of({(0, F): forward, (0, B): backward or forward})
    return make_choices(profile, np.array([waiting_power_w]), np.array([gpus]))


def table(unit):
    return list(
        zip(unit.frequency_mhz.tolist(), unit.time_s.tolist(), unit.cost_j.tolist(), strict=True)
    )


def test_a_clock_that_another_beats_in_time_and_cost_is_no_choice():
    curve = {
        1500: (1.2, 30.0),  # the highest, yet slower and dearer than 1400
        1400: (1.0, 20.0),
        1200: (1.5, 12.0),
        1000: (1.5, 14.0),  # as slow as 1200 and dearer
        800: (2.0, 9.0),
        600: (3.0, 9.0),  # slower, saves nothing
    }
    forward, _ = choices_of(curve).units
    assert table(forward) == [(1400, 1.0, 20.0), (1200, 1.5, 12.0), (800, 2.0, 9.0)]


@FIXED
@given(SEEDS)
def test_the_hull_is_convex_and_below_every_choice(seed):
    job = random_job(random.Random(seed), max_frequencies=8)
    choices = make_choices(
        job.profile, np.array(job.conditions.blocking_power_w), job.conditions.gpus_by_stage
    )
    for unit in choices.units:
        assert unit.hull[0] == 0
        assert unit.hull[-1] == len(unit.time_s) - 1
        time_s, cost_j = unit.time_s[unit.hull], unit.cost_j[unit.hull]
        assert np.all(np.diff(np.diff(cost_j) / np.diff(time_s)) > 0)
        below = np.interp(unit.time_s, time_s, cost_j)
        assert np.all(below <= unit.cost_j + 1e-9 * np.abs(unit.cost_j))
