"""What whoever pays reads: amounts, their intervals, money, CO2, and where they are from."""

from dataclasses import replace
from math import inf, nan

import pytest
from energy_lines import bill, job, window

from envpipe_megatron.formats.account import Tariff, account_lines
from envpipe_megatron.formats.steps import Comparison

#: A step takes 100 J and 0.5 s on each of 4 GPUs; baselines expect 125 J and 0.4 s.
STEPS = Comparison(0.5, 100.0, 20.0, 0.5, 25.0, 0.5, iterations=9_000)


NO_TARIFF = Tariff()


def lines_of(tariff=NO_TARIFF, compared=STEPS, tokens=None):
    made = bill(job(tokens_per_iteration=tokens), *(window(gpu, 0, 100.0) for gpu in range(4)))
    return list(account_lines(made, tariff, {"": compared}))


def test_what_was_saved_is_what_baselines_expect_in_place_of_all_steps():
    told, saved, total = lines_of(tokens=1_000)
    assert told.startswith("against the job's own baseline: a step takes 500 ms (25.00 +- 0.98 %")
    # 9,000 steps of 4 GPUs, 25 J each; half of its interval is 1.96 * 0.5 % * 125 / 100 * 125 J.
    assert saved == (
        "in 9000 such steps: 250 +- 15 Wh less energy, 900 +- 28 s more time; "
        "2.5 tokens a joule, 2 before"
    )
    assert total == (
        "energy of 4 GPUs: 400 J, 0.1111 Wh, 50.0 W each on average; measured by the GPUs' counters"
    )


def test_money_and_co2_only_where_the_user_knows_them():
    _, saved, total = lines_of(Tariff(0.5, 400.0))
    assert "Wh less energy (cost 0.125 at 0.5 a kWh, 100 g of CO2 at 400 g a kWh), " in saved
    assert "; cost 5.556e-05 at 0.5 a kWh, 0.04444 g of CO2 at 400 g a kWh; " in total
    assert not any(word in line for line in lines_of() for word in ("cost", "CO2"))
    assert lines_of(Tariff(None, 400.0))[2].count("cost") == 0


@pytest.mark.parametrize(
    ("compared", "said"),
    [
        (Comparison(0.5, 100.0, -25.0, None, -20.0, None, 36), "in 36 such steps: 0.8 Wh more "
         "energy, 4.5 s less time"),
        (Comparison(0.5, None, None, None, 0.0, None, 36), "in 36 such steps: 0 s less time"),
        (Comparison(0.5, None, None, None, -2e-14, None, 36), "in 36 such steps: 0 s less time"),
        (Comparison(0.5, 100.0, None, None, 25.0, None, 36), "in 36 such steps: 3.6 s more time"),
        # A counter that stood still: what was expected does not follow from a step of 0 J.
        (Comparison(0.5, 0.0, 100.0, None, 0.0, None, 36), "in 36 such steps: 0 s less time"),
        (Comparison(0.5, 100.0, -25.0, inf, -20.0, nan, 36), "in 36 such steps: 0.8 Wh more "
         "energy, 4.5 s less time"),
    ],
)  # fmt: skip
def test_more_energy_unknown_energy_and_no_interval(compared, said):
    assert lines_of(compared=compared)[1].startswith(said)


@pytest.mark.parametrize(
    "unknown",
    [{"iterations": 0}, {"slowdown_percent": None}, {"time_s": 0.0, "slowdown_percent": -100.0}],
)
def test_what_is_not_known_is_not_counted(unknown):
    assert len(lines_of(compared=replace(STEPS, **unknown))) == 2


def test_emulated_joules_and_the_first_start_are_named():
    starts = ("2026-11-29T21:40:05.123+00:00", "my job 2026-11-29T20:01:05+00:00", "")
    lines = (
        {**window(0, n, run=run), "gpu": "NVIDIA A100 SXM (emulated)"}
        for n, run in enumerate(starts)
    )
    (line,) = account_lines(bill(*lines), NO_TARIFF, {}, " in training")
    assert line.startswith("energy of 1 GPUs in training: ")
    assert line.endswith("; emulated: no GPU was used, since 2026-11-29 20:01 UTC")


def test_a_tariff_of_the_environment(caplog):
    variables = {"ENVPIPE_PRICE": "0.25", "ENVPIPE_GRID_INTENSITY": "300"}
    assert Tariff.of_environment(variables) == Tariff(0.25, 300.0)
    assert Tariff.of_environment(variables, 0.4) == Tariff(0.4, 300.0)
    assert Tariff.of_environment({"ENVPIPE_PRICE": ""}) == NO_TARIFF
    assert not caplog.records
    wrong = {"ENVPIPE_PRICE": "cheap", "ENVPIPE_GRID_INTENSITY": "-1"}
    assert Tariff.of_environment(wrong) == NO_TARIFF
    assert [record.args[0] for record in caplog.records] == list(wrong)


def test_a_bill_without_lines_is_of_nothing():
    assert list(account_lines(bill(), NO_TARIFF, {})) == [
        "energy of 0 GPUs: 0 J, 0 Wh, 0.0 W each on average"
    ]
