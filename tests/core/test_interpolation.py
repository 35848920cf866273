"""Between profiled clocks: units are mixtures of the neighbouring rows, and no file has them."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from core_cases import B, F, profile_of

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan, PlanError, read_plan
from envpipe_megatron.core.profile_rows import ProfileError

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
