"""What levels would save in a job, by its iterations at full clock."""

import pytest
from run_made import BACKWARD_S, FORWARD_S, iterations, profile

from envpipe_megatron.cli.jobs import report_facts
from envpipe_megatron.cli.jobs.report_facts import predict
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.report.facts import find_bubbles

STAGES, MICROBATCHES = 3, 6
ROWS = [(1410, FORWARD_S, 3.0), (1200, 1.1 * FORWARD_S, 2.4), (900, 1.4 * FORWARD_S, 2.1)]


@pytest.fixture(scope="module")
def bubbles():
    return find_bubbles(iterations(STAGES, MICROBATCHES), STAGES)


def saved(predicted):
    return {one.level: one.saving_percent for one in predicted.levels}


def test_each_level_saves_more_than_the_one_below(bubbles):
    predicted = predict(bubbles, None, "NVIDIA A100-SXM4-80GB")
    by_level = saved(predicted)
    assert list(by_level) == ["uniform", "units", "order"]
    assert by_level["uniform"] == 0.0  # at a lower clock the path through all stages is longer
    assert 3 < by_level["units"] <= by_level["order"] + 1e-6
    assert max(one.slowdown_percent for one in predicted.levels) <= 1e-6
    assert "a100-sxm (fitted to measurements)" in predicted.assumed[0]
    assert len(predicted.waiting_power_w) == STAGES
    assert not predicted.lacking


def test_one_clock_saves_where_a_lower_one_is_as_fast(bubbles):
    capped = [(1500, FORWARD_S, 4.0), *ROWS]
    predicted = predict(bubbles, profile(STAGES, capped), "a GPU")
    assert saved(predicted)["uniform"] > 0


def test_the_jobs_own_profile_comes_before_a_model(bubbles):
    predicted = predict(bubbles, profile(STAGES, ROWS), "a GPU")
    assert "own profile" in predicted.assumed[0]
    assert "waiting takes no power" in predicted.assumed
    assert saved(predicted)["units"] > 0
    assert predicted.waiting_power_w is None


def test_a_profile_of_other_stages_is_not_taken(bubbles):
    predicted = predict(bubbles, profile(STAGES + 1, ROWS), "NVIDIA A40")
    assert "the model a40" in predicted.assumed[0]


def test_a_level_without_a_plan_is_named_and_others_stay(bubbles, monkeypatch):
    def refusing(own, request):
        if request.order is None:
            raise EnvPipeError("no such order")
        return make_plan(own, request)

    monkeypatch.setattr(report_facts, "make_plan", refusing)
    predicted = predict(bubbles, None, "NVIDIA A40")
    assert list(saved(predicted)) == ["uniform", "units"]
    assert predicted.lacking == ("order: no such order",)


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


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "NVIDIA RTX 6000 Ada Generation"])
def test_a_gpu_without_a_model_gets_no_prediction(bubbles, name):
    predicted = predict(bubbles, None, name)
    assert not predicted.levels
    assert name in predicted.lacking[0]


def test_backwards_take_twice_the_time(bubbles):
    assert bubbles.unit_s.sum() == pytest.approx(STAGES * MICROBATCHES * (FORWARD_S + BACKWARD_S))
