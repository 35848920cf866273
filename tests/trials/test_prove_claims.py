"""Claims of made-up rounds, the constant clock, and what a line says."""

import numpy as np
import pytest
from presets import preset_profile
from trials_helpers import turn

from envpipe_megatron import __version__
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.report.page.document import page_text
from envpipe_megatron.report.summary import Section
from envpipe_megatron.trials.claims import claims_of, difference
from envpipe_megatron.trials.machine import Machine
from envpipe_megatron.trials.results import line_to_paste
from envpipe_megatron.trials.settings import ARMS, ORDER_ARMS, constant_plan

#: Time and energy of each arm over those of stock in the same round.
RATIOS = {
    "stock": (1.0, 1.0),
    "relock": (1.002, 1.0),
    "constant": (1.12, 0.86),
    "envelope": (1.001, 0.9),
    "optimal": (1.0, 0.85),
}
ORDER_RATIOS = {
    "stock": (1.0, 1.0), "1f1b": (1.004, 1.0), "whole": (0.96, 0.98), "split": (0.92, 0.96),
}  # fmt: skip
LATENCY = [{"frequency_change_s": 0.01}, {"frequency_change_s": 0.012}]


def rounds(count, jitter=0.0, ratios=RATIOS):
    """Rounds of which each is a tenth slower and hungrier than the one before, for all arms."""
    return [
        turn(arm, n, 1.1**n * time, 100 * 1.1**n * (energy + jitter * (-1) ** n * (arm != "stock")))
        for n in range(count)
        for arm, (time, energy) in ratios.items()
    ]


def claims(turns, latency=LATENCY, arms=ARMS, emulated=False):
    found = claims_of(turns, arms, latency, emulated=emulated)
    return {claim.name: claim for claim in found}


def test_what_drifts_over_rounds_falls_out():
    value, interval = difference(rounds(4), "optimal", "stock", "saving")
    assert value == pytest.approx(15)
    assert interval == pytest.approx((15, 15))
    assert difference(rounds(4), "constant", "stock", "slowdown")[0] == pytest.approx(12)


def test_an_interval_is_students_of_the_differences_by_round():
    # 16 % and 14 % in turns: mean 15, standard deviation of four 2/sqrt(3), t of 3 degrees 3.182.
    half = 3.1824463 * (2 / 3**0.5) / 4**0.5
    value, interval = difference(rounds(4, jitter=0.01), "optimal", "stock", "saving")
    assert value == pytest.approx(15)
    assert interval == pytest.approx((15 - half, 15 + half), rel=1e-6)


def test_claims_hold_where_their_intervals_say_so():
    found = claims(rounds(4))
    assert all(claim.holds for claim in found.values())
    assert found["clock_change"].value == 0.012
    assert found["constant_slower_than_optimal"].value == pytest.approx(12)
    # The same means, but rounds that differ by more than they save.
    shaky = claims(rounds(4, jitter=0.2))
    assert shaky["optimal_saving"].value == pytest.approx(15)
    assert shaky["optimal_saving"].holds is False
    assert claims(rounds(2), [{"frequency_change_s": None}])["clock_change"].holds is False


@pytest.mark.parametrize(
    ("arm", "time", "energy", "broken"),
    [
        ("relock", 1.02, 1.0, {"relock_slowdown"}),
        ("optimal", 1.02, 0.85, {"optimal_slowdown"}),
        ("optimal", 1.0, 1.01, {"optimal_saving"}),
        ("envelope", 1.02, 1.01, {"envelope_slowdown", "envelope_saving"}),
        ("constant", 1.0, 0.86, {"constant_slowdown", "constant_slower_than_optimal"}),
        ("1f1b", 1.02, 1.0, {"1f1b_slowdown"}),
        ("whole", 1.001, 0.98, {"whole_speedup"}),
        ("split", 0.92, 1.01, {"split_saving"}),
    ],
)
def test_each_claim_can_fail(arm, time, energy, broken):
    ratios, arms = (RATIOS, ARMS) if arm in RATIOS else (ORDER_RATIOS, ORDER_ARMS)
    found = claims(rounds(3, ratios={**ratios, arm: (time, energy)}), arms=arms)
    assert {name for name, claim in found.items() if not claim.holds} == broken


def test_one_bit_of_one_loss_or_weight_is_said():
    turns = rounds(2)
    turns[7] = turn("envelope", 1, 1.0, 90.0, losses=[[4.0, 3.5], [3.0, np.nextafter(2.5, 3)]])
    assert claims(turns)["losses_equal"].holds is False
    assert claims(turns)["weights_equal"].holds is True
    turns = rounds(2)
    same = turns[3]["stages"][0]
    turns[3]["stages"] = [same, {**same, "weights_sha256": "b"}]
    assert claims(turns)["weights_equal"].holds is False


def test_that_losses_are_equal_names_arms_with_split_backwards():
    turns = rounds(2)
    assert "split" not in claims(turns)["losses_equal"].says
    splits = [{**each, "split": each["arm"] == "optimal"} for each in turns]
    says = claims(splits)["losses_equal"].says
    assert says.endswith("equal to the last bit; backwards are split in optimal")


def test_orders_are_held_against_stock_where_no_clock_was_changed():
    found = claims(rounds(3, ratios=ORDER_RATIOS), latency=None, arms=ORDER_ARMS)
    assert all(claim.holds for claim in found.values())
    values = {name: claim.value for name, claim in found.items() if claim.unit == "%"}
    assert values == pytest.approx({
        "1f1b_slowdown": 0.4, "whole_saving": 2, "whole_speedup": 4, "split_saving": 4,
        "split_speedup": 8,
    })  # fmt: skip


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rounds_show_nothing(count):
    found = claims(rounds(count))
    assert found["optimal_saving"].holds is None
    assert "two metered rounds" in found["optimal_saving"].says
    assert found["losses_equal"].holds is (True if count else None)


def test_an_arm_whose_control_ended_shows_nothing():
    turns = rounds(2)
    lost = {**turns[4]["stages"][0], "clocks": {"error": "the guard is gone"}}
    turns[4] = turn("optimal", 0, 1.0, 85.0, stages=[lost, lost])
    found = claims(turns)
    assert found["optimal_saving"].holds is None
    assert "the guard is gone" in found["optimal_saving"].says
    assert found["envelope_saving"].holds is True
    turns = rounds(2)
    turns[9] = turn("optimal", 1, 1.0, 85.0, failure="no plan could be made")
    found = claims(turns)
    assert found["constant_slower_than_optimal"].holds is None
    assert "no plan could be made" in found["optimal_slowdown"].says


def line(turns, arms, missing="", emulated=False):
    machine = Machine(emulated, ("A100", "A100"), (), missing, {})
    return line_to_paste(claims_of(turns, arms, LATENCY, emulated=emulated), machine, turns)


PROOF = f"envpipe prove {__version__}, 2 x A100, 3 rounds: "


@pytest.mark.parametrize(("emulated", "mark"), [(False, ""), (True, "[emulated] ")])
def test_the_line_says_what_each_arm_takes_and_what_is_emulated(emulated, mark):
    assert line(rounds(3), ARMS, emulated=emulated) == (
        f"{mark}{PROOF}optimal takes 15.00 +- 0.00 % "
        "less energy, and 0.00 +- 0.00 % less time, within noise; envelope takes 10.00 +- 0.00 % "
        "less energy, and 0.10 +- 0.00 % more time; constant takes 14.00 +- 0.00 % less energy, "
        "and 12.00 +- 0.00 % more time; relock takes 0.20 +- 0.00 % more time; losses equal to the "
        "last bit"
    )


@pytest.mark.parametrize(("emulated", "mark"), [(False, ""), (True, "emulated, ")])
def test_the_line_of_orders_says_that_no_clock_was_changed(emulated, mark):
    turns = rounds(3, ratios=ORDER_RATIOS)
    assert line(turns, ORDER_ARMS, "no rights", emulated) == (
        f"[{mark}no clock was changed] {PROOF}split "
        "takes 4.00 +- 0.00 % less energy, and 8.00 +- 0.00 % less time; whole takes 2.00 +- 0.00 "
        "% less energy, and 4.00 +- 0.00 % less time; 1f1b takes 0.40 +- 0.00 % more time; losses "
        "equal to the last bit"
    )


def test_the_line_says_what_is_worse_and_nothing_of_an_arm_that_did_not_run_as_planned():
    turns = rounds(3, ratios={**ORDER_RATIOS, "whole": (1.01, 1.02)})
    turns[3]["failure"] = "no memory"
    assert claims(turns, arms=ORDER_ARMS)["split_speedup"].value is None
    said = line(turns, ORDER_ARMS, "no rights")
    assert ": whole takes 2.00 +- 0.00 % more energy, and 1.00 +- 0.00 % more time; 1f1b" in said
    assert "split" not in said


def test_sentences_of_a_table_are_broken_into_lines_and_figures_are_not():
    section = Section("Claims", ("", "value", "claim"), (("a", "1", "b" * 50), ("c", "2", "d")))
    page = page_text("A page", (), (section,), "prove")
    assert page.count('<td data-name="claim" class="words">') == 2
    assert page.count('<th class="words">claim</th>') == page.count('class="words"') - 2 == 1


TIMES_S = {Kind.FORWARD: 0.05, Kind.BACKWARD: 0.1}


def test_the_constant_clock_is_a_lower_one_even_if_the_highest_is_nearer():
    profile = preset_profile("a100-sxm", 2, TIMES_S, [570])
    request = PlanRequest(4, schedule="auto", policy="optimal", blocking_power_w=83.6)
    assert set(constant_plan(make_plan(profile, request).plan).frequency_mhz.ravel()) == {570}


def test_the_constant_clock_is_the_one_nearest_in_energy():
    profile = preset_profile("a100-sxm", 4, TIMES_S, range(700, 1400, 15))
    request = PlanRequest(8, schedule="auto", policy="optimal", blocking_power_w=83.6)
    optimal = make_plan(profile, request).plan
    constant = constant_plan(optimal)
    clocks = np.unique(constant.frequency_mhz)
    assert len(clocks) == 1
    assert constant.schedule == optimal.baseline.schedule
    wanted_j, off_j = optimal.cost.energy_j, abs(constant.cost.energy_j - optimal.cost.energy_j)
    for clock in set(profile.clocks_mhz(0)) - set(clocks) - {1410}:
        other = Plan(
            "uniform", constant.schedule, np.full_like(constant.frequency_mhz, clock),
            constant.profile, constant.conditions,
        )  # fmt: skip
        assert abs(other.cost.energy_j - wanted_j) >= off_j or clock < clocks[0]
    assert constant.cost.iteration_time_s > optimal.cost.iteration_time_s
