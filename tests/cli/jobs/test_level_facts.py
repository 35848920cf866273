"""What levels would save in a job that was only watched."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "report"))

from run_made import BACKWARD_S, FORWARD_S, iterations, profile

from envpipe_megatron.cli.jobs.level_facts import predict
from envpipe_megatron.report.bubbles import find_bubbles

STAGES, MICROBATCHES = 3, 6
ROWS = [(1410, FORWARD_S, 3.0), (1200, 1.1 * FORWARD_S, 2.4), (900, 1.4 * FORWARD_S, 2.1)]


@pytest.fixture(scope="module")
def bubbles():
    return find_bubbles(iterations(STAGES, MICROBATCHES))


def saved(predicted):
    return {one.level: one.saving_percent for one in predicted.levels}


def test_each_level_saves_more_than_the_one_below(bubbles):
    predicted = predict(bubbles, None, "NVIDIA A100-SXM4-80GB")
    by_level = saved(predicted)
    assert list(by_level) == ["uniform", "units", "order"]
    assert 0 <= by_level["uniform"] < by_level["units"] <= by_level["order"] + 1e-6
    assert by_level["units"] > 3
    slower = [one.slowdown_percent for one in predicted.levels]
    assert slower[0] <= 1.0 + 1e-6
    assert max(slower[1:]) <= 1e-6
    assert "a100-sxm (fitted to measurements)" in predicted.assumed[0]
    assert len(predicted.waiting_power_w) == STAGES


def test_the_jobs_own_profile_comes_before_a_model(bubbles):
    predicted = predict(bubbles, profile(STAGES, ROWS), "NVIDIA A100-SXM4-80GB")
    assert "own profile" in predicted.assumed[0]
    assert saved(predicted)["units"] > 0
    assert predicted.waiting_power_w is None


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA A100 SXM (emulated)", "a100-sxm"),
    ],
)
def test_the_model_is_that_of_the_chip(bubbles, name, model):
    assert f"the model {model} (" in predict(bubbles, None, name).assumed[0]


def test_a_gpu_without_a_model_gets_no_prediction(bubbles):
    assert predict(bubbles, None, "AMD Instinct MI300X") is None


def test_backwards_take_twice_the_time(bubbles):
    assert bubbles.unit_s.sum() == pytest.approx(STAGES * MICROBATCHES * (FORWARD_S + BACKWARD_S))
