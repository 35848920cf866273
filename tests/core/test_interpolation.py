"""Between measured clocks: rows are mixtures of their neighbours, and stand in no file."""

import json
from dataclasses import replace

import numpy as np
import pytest
from core_cases import B, F, profile_of

from envpipe_megatron import builders
from envpipe_megatron.conditions import Conditions
from envpipe_megatron.interpolation import interpolated
from envpipe_megatron.plan import Plan, PlanError, read_plan
from envpipe_megatron.policies.optimal import Optimizer
from envpipe_megatron.policies.reconfigure import Ladders
from envpipe_megatron.profile import ProfileError, read_profile

MEASURED = profile_of(
    {
        (0, F): {1200: (1.0, 10.0), 900: (1.6, 7.0), 800: (2.0, 6.5)},
        (0, B): {1200: (2.0, 24.0), 900: (3.0, 15.0)},
    }
)
DENSE = interpolated(MEASURED, [(1230, 1200, 1100, 850, 770)])
ONE_STAGE = builders.one_f_one_b(1, 1)


def plan_at(forward_mhz, backward_mhz, profile=DENSE):
    frequency = np.array([[forward_mhz, backward_mhz]])
    return Plan("mine", ONE_STAGE, frequency, profile, Conditions((40.0,)))


def test_a_row_between_is_linear_in_the_clock():
    row = DENSE.row(0, F, 1100)
    assert (row.time_s, row.energy_j) == pytest.approx((1.0 + 0.6 / 3, 10.0 - 3.0 / 3))
    assert DENSE.row(0, F, 850).time_s == pytest.approx(1.8)
    assert (row.interpolated, row.energy_uncertainty_j) == (True, None)


def test_nothing_is_made_up_outside_of_what_was_measured():
    assert [row.frequency_mhz for row in DENSE.rows[0][F]] == [1200, 1100, 900, 850, 800]
    # The backward was measured down to 900 MHz alone.
    assert [row.frequency_mhz for row in DENSE.rows[0][B]] == [1200, 1100, 900]
    for old in (row for rows in MEASURED.rows[0].values() for row in rows):
        assert old in [row for rows in DENSE.rows[0].values() for row in rows]


def test_reconfiguring_steps_through_them():
    ladders = Ladders(ONE_STAGE, DENSE)
    assert [ladders.next_above(0, mhz, 30) for mhz in (800, 850, 900, 1100)] == [
        850, 900, 1100, 1200,
    ]  # fmt: skip


def test_the_profile_stays_that_of_its_file(tmp_path):
    DENSE.write(tmp_path / "profile.csv")
    assert DENSE.to_csv() == MEASURED.to_csv()
    assert read_profile(tmp_path / "profile.csv").sha256 == DENSE.sha256


def test_a_chunk_of_an_interpolated_row_is_one_too():
    chunk = DENSE.for_chunks(2).row(0, F, 1100)
    assert chunk == replace(DENSE.row(0, F, 1100), time_s=0.6, energy_j=4.5)


@pytest.mark.parametrize("clocks", [(1100, 1200), (1200, 1100), (850, 900)])
def test_a_plan_between_clocks_is_read_with_the_measured_profile(clocks, tmp_path):
    path = tmp_path / "plan.json"
    plan_at(*clocks).write(path)
    assert json.loads(path.read_text())["interpolated"] is True
    again = read_plan(path, MEASURED)
    assert again.cost == plan_at(*clocks).cost
    assert again.to_json() == plan_at(*clocks).to_json()


def test_a_plan_of_measured_clocks_does_not_speak_of_it():
    assert "interpolated" not in plan_at(800, 900).to_json()


@pytest.mark.parametrize(
    ("clocks", "says", "error", "shown"),
    [
        ((1100, 1200), None, ProfileError, "1100"),  # else a slip would be priced
        ((1230, 1200), True, ProfileError, "1230"),
        ((1200, 850), True, ProfileError, "850"),
        ((1100, 1200), "yes", PlanError, "interpolated"),
    ],
)
def test_clocks_are_not_priced_unasked_or_beyond_what_was_measured(
    clocks, says, error, shown, tmp_path
):
    data = plan_at(1100, 1200).to_json()
    data |= {"frequency_mhz": [list(clocks)], "interpolated": says}
    if says is None:
        del data["interpolated"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(error, match=shown):
        read_plan(path, MEASURED)


def test_a_lower_bound_of_the_measured_profile_holds_between_its_clocks():
    conditions = Conditions((40.0,))
    optimizer = Optimizer(ONE_STAGE, MEASURED, conditions)
    for forward_mhz in (1200, 1100, 900, 850, 800):
        for backward_mhz in (1200, 1100, 900):
            cost = plan_at(forward_mhz, backward_mhz).cost
            bound_j = optimizer.plan(cost.iteration_time_s).energy_lower_bound_j
            assert cost.energy_j >= bound_j * (1 - 1e-9)
