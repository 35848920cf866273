"""The level of a job: the highest that is left, and a job that goes on at a lower one."""

import argparse
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from leveled_jobs import begin, given, jobs_are_faked

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.integrations import leveled
from envpipe_megatron.integrations.framework_units import SeenUnit
from envpipe_megatron.integrations.hooking import replaced
from envpipe_megatron.integrations.levels import (
    ArgumentLimit,
    JobError,
    Level,
    Limit,
    decide,
    limits_of_arguments,
    on,
)
from envpipe_megatron.runtime.channel.collectives import CollectivesError

DRAWS = Limit("random numbers", Level.UNITS, "drawn in order")
GRAPHS = Limit("graphs", Level.UNIFORM, "no host")
LEFT = Limit("its own schedule", Level.OBSERVE, "it was set later")
FILES = {"plan": Path("plan.json"), "profile": Path("profile.csv")}


def test_a_limit_that_shows_makes_the_job_again_at_its_level():
    job, made, said = begin(options=given(**FILES))
    assert job.lower([DRAWS])
    first, second = made
    assert (first.level, second.level, job.level) == (Level.ORDER, Level.UNITS, Level.UNITS)
    assert (first.closed, second.closed) == (True, False)
    assert job.job is second.session
    # A profile is still of these units, and a plan perhaps of another order.
    assert (second.options.plan, second.options.profile) == (None, FILES["profile"])
    assert second.session.state.notes == ("random numbers (drawn in order)",)
    assert said[0] == "level order; active"
    assert said[1].startswith("the plan plan.json is not run")
    assert said[2] == "level units; against order: random numbers (drawn in order); active"


def test_a_profile_that_was_read_is_not_read_again():
    """Its file may have been deleted since, or damaged: no error of it ends training."""
    job, made, _ = begin(options=given(**FILES))
    made[0].session.state.given = "profile", "plan"
    assert job.lower([DRAWS])
    assert made[1].session.state.given == ("profile", None)


@pytest.mark.parametrize(("limit", "requires"), [(GRAPHS, True), (LEFT, False)])
def test_what_a_level_below_units_cannot_have_ends_no_training(limit, requires, monkeypatch):
    """But who only wants a profile gets an error in the end."""
    job, made, said = begin(options=given(**FILES, profile_only=True, require_control=True))
    assert job.lower([DRAWS, limit])
    asked = made[-1].options
    assert (asked.plan, asked.profile, asked.profile_only) == (None, None, False)
    assert asked.files == {Path("plan.json"), Path("profile.csv"), Path("profile.json")}
    assert asked.require_control is requires
    assert said[-2].startswith("no profile is used or written")
    monkeypatch.setattr(leveled, "end_of_job", lambda *_: ["a bill"])
    with pytest.raises(JobError, match="before every stage was profiled"):
        job.end()
    assert (said[-1], made[-1].closed) == ("a bill", True)
    job.end()


def test_a_job_for_its_profile_only_has_one_in_the_end(monkeypatch):
    monkeypatch.setattr(leveled, "end_of_job", lambda *_: [])
    job, made, _ = begin(options=given(profile_only=True))
    made[0].session.state.profile = "profile"
    job.end()
    assert made[0].closed


def test_a_limit_above_the_jobs_level_changes_nothing():
    job, made, _ = begin(limits=[GRAPHS])
    assert not job.lower([DRAWS])
    assert not job.lower([])
    assert len(made) == 1
    assert not made[0].closed


def test_before_the_first_step_a_level_that_was_named_is_an_error():
    job, made, _ = begin(options=given(level=Level.ORDER))
    with pytest.raises(JobError, match="drawn in order"):
        job.lower([DRAWS], Level.ORDER)
    assert made[0].closed
    assert leveled.LeveledJob._with_gpu is not job  # or the next job of a notebook had no EnvPipe


def test_a_job_whose_gpu_is_gone_trains_without_envpipe():
    job, made, said = begin()
    job.options = replace(job.options, gpu_control="none")
    assert job.lower([DRAWS])
    assert (job.job, made[0].closed) == (None, True)
    for call in (job.begin_step, job.end_step, job.pause):
        call()
    assert (job.phase, job.report().line(), said) == ("framework", "", ["level order; active"])
    assert not job.lower([GRAPHS])
    job.end()


def test_a_line_that_a_function_of_the_users_cannot_say_is_logged(caplog):
    framework = Mock(num_microbatches=4, bill={})
    with jobs_are_faked():
        job = leveled.LeveledJob(given(), framework, Mock(side_effect=OSError("a full disk")))
    job.say("steady")
    assert [text.split(": ")[1] for text in caplog.messages] == ["level order; active", "steady"]


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_that_failed_is_waited_for_where_another_begins_and_not_at_the_end(
    ends, monkeypatch
):
    """Its peers may be gone, and the clock is to come back."""
    job, (made,), _ = begin()
    order = builders.one_f_one_b(1, 1)
    run = made.session.open_iteration.return_value
    run.configure_mock(units=order.stages[0], next_unit=None, whole=True)
    job.begin_step(0)
    job.follow(order, Mock()).begin(SeenUnit(Kind.FORWARD))
    job.fail()
    assert (run.whole, job.in_step, run.end_unit.called) == (False, False, False)
    made.session.highest_clock.assert_called_once()
    if ends:
        monkeypatch.setattr(leveled, "end_of_job", lambda *_: [])
        job.end()
    else:
        job.begin_step(1)
        made.session.pause.assert_called_once()
    assert run.end_unit.called is not ends
    made.session.end_step.assert_not_called()


def test_a_job_that_cannot_bill_gives_back_what_it_has_all_the_same(monkeypatch):
    job, (made,), _ = begin()
    gone = Mock(side_effect=CollectivesError("a rank is gone"))
    monkeypatch.setattr(leveled, "end_of_job", gone)
    with pytest.raises(CollectivesError):
        job.end()
    assert made.closed
    job.begin_step(1)  # a schedule that was attached is the framework's again
    made.session.begin_step.assert_not_called()


def test_a_bill_that_fails_ends_no_job(monkeypatch, caplog):
    """Megatron saves its last checkpoint behind the end of training."""
    job, (made,), _ = begin()
    monkeypatch.setattr(leveled, "end_of_job", Mock(side_effect=ZeroDivisionError("no steps")))
    job.end()
    assert made.closed
    assert "The bill could not be made" in caplog.text
    job.begin_step(1)  # a schedule that was attached is the framework's again
    made.session.begin_step.assert_not_called()


# Which level, and what hooks put back -------------------------------------------------------------


EXPERTS = ArgumentLimit("experts", Level.ORDER, "not proven", on("experts"))
VISION = ArgumentLimit("vision", Level.ORDER, "not proven", on("vision"))
CAPTURED = ArgumentLimit("graphs", Level.UNITS, "captured", on("graphs"))
ONE_GRAPH = ArgumentLimit("one graph", Level.UNIFORM, "no host", on("one_graph"))
LIMITS = (EXPERTS, VISION, CAPTURED, ONE_GRAPH)


def asking(names):
    return argparse.Namespace(**dict.fromkeys(names.split(), True))


@pytest.mark.parametrize(
    ("asked", "checks", "said"),
    [
        ("vision experts", True, "level order; if a self-check holds, for experts, vision"),
        (
            "experts graphs",
            False,
            "level units; against order: experts (not proven), graphs (captured)",
        ),
        ("experts graphs one_graph", True, "level uniform; against units: one graph (no host)"),
    ],
)
def test_the_highest_that_is_left_and_what_stands_against_the_next(asked, checks, said):
    """What is decided of Megatron's own table, `test_megatron_lm_limits` has in any combination."""
    assert str(decide(limits_of_arguments(asking(asked), LIMITS), checks=checks)) == said


def test_names_of_objects_classes_and_modules_are_replaced_and_put_back():
    class Stage(torch.nn.Module):
        def forward(self):
            return "own"

    stage = Stage()
    stage.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    before = dict(vars(stage)), [*stage.layers]
    with replaced(stage, forward=lambda: "other", layers=torch.nn.ModuleList()):
        assert (stage.forward(), len(stage.layers)) == ("other", 0)
        with replaced(Stage, forward=lambda stage: "of all"):
            assert Stage()() == "of all"
    assert (dict(vars(stage)), [*stage.layers], stage.forward()) == (*before, "own")
