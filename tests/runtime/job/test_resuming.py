"""What a start of a job takes from an earlier one, what it keeps, and what tells jobs apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGpu

from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.planner import PlanRequest
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.energy.steps import BaselineEnergy, StepEnergy
from envpipe_megatron.runtime.job.context import (
    Job,
    SessionConfig,
    SessionError,
    SessionState,
)
from envpipe_megatron.runtime.job.job_file import StoredJob
from envpipe_megatron.runtime.job.resuming import Resumed, resume

GREEDY = PlanRequest(4, "envpipe", "envelope", "greedy", blocking_power_w=80.0, channel_capacity=9)
STEP = StepEnergy(9, 0.6, 0.01, 210.5, 0.4)
BASELINE = BaselineEnergy(STEP, (STEP,))
HERE = SimpleNamespace(agreed=lambda look: look())
WHOLE = StoredJob(
    {},
    ("first", "second"),
    {"profile.csv": "1"},
    {"plan.json": "2"},
    BASELINE,
    5,
    Ended.ENVELOPE,
)


def resumed(config: SessionConfig, collectives: Any = HERE) -> Resumed:
    channel: Any = SimpleNamespace(capacity=3)
    return resume(config, {"layers": 24}, 2, channel, FakeGpu(), collectives)


def found_by(config: SessionConfig, found: StoredJob | None) -> Resumed:
    """What a rank makes of a job file that another one has read."""
    return resumed(config, SimpleNamespace(agreed=lambda look: (found, "now")))


def test_a_jobs_fingerprint_has_all_that_profile_and_plan_rest_on(tmp_path):
    given = tmp_path / "given.csv"
    given.write_text("mine")
    made, again = (
        resumed(SessionConfig(GREEDY, output_dir=tmp_path, profile_file=given)) for _ in range(2)
    )
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["fingerprint"] == {
        "layers": 24,
        "envpipe_schedule": "envpipe",
        "envpipe_policy": "envelope",
        "envpipe_reconfigure": "greedy",
        "envpipe_num_chunks": 1,
        "envpipe_max_extra_forwards": None,
        "envpipe_max_in_flight": None,
        "envpipe_max_warmup_step": None,
        "envpipe_deadline_factor": 1.0,
        "envpipe_min_dwell_s": 0.0,
        "envpipe_park": False,
        "envpipe_num_stages": 2,
        "envpipe_channel_capacity": 3,
        "envpipe_clocks_mhz": [1400, 1000],
        "envpipe_num_clocks": 5,
        "envpipe_clock_backend": "fake",
        "envpipe_profile_sha256": hashlib.sha256(b"mine").hexdigest(),
        "envpipe_plan_sha256": None,
    }
    assert job["starts"] == [made.started, again.started]
    assert (made.found, made.baseline) == (None, None)
    assert again.found == StoredJob(job["fingerprint"], (made.started,))
    assert made.keeper is not None
    given.unlink()  # whoever needs it says so
    resumed(SessionConfig(GREEDY, output_dir=tmp_path, profile_file=given))
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["fingerprint"]["envpipe_profile_sha256"] is None


def test_without_a_folder_nothing_is_looked_for_or_kept():
    config = SessionConfig(GREEDY)
    made = resumed(config)
    assert made == Resumed(config)
    assert made.labels({"run": "mine"}) == {"run": "mine"}
    made.keep(SessionState(), Phase.STEADY, BASELINE)


def test_what_was_found_is_not_made_again(tmp_path):
    config = SessionConfig(GREEDY, warmup_iterations=5, output_dir=tmp_path)
    kept = {"profile_file": tmp_path / "profile.csv", "plan_file": tmp_path / "plan.json"}
    made = found_by(config, WHOLE)
    assert made == Resumed(replace(config, warmup_iterations=2, **kept), WHOLE, "now", None)
    assert made.baseline == BASELINE
    default = replace(config, request=PlanRequest(4))
    assert found_by(default, WHOLE).config.warmup_iterations == 1
    shortest = replace(default, warmup_iterations=1)
    assert found_by(shortest, WHOLE).config.warmup_iterations == 1
    bare = StoredJob({}, ("first",))
    assert found_by(config, bare).config == config
    assert found_by(config, None).config == config
    own = replace(config, profile_file=Path("mine.csv"), plan_file=Path("mine.json"))
    assert found_by(own, WHOLE).config == replace(own, warmup_iterations=2)


def test_each_start_has_a_run_of_its_own(tmp_path):
    made = found_by(SessionConfig(GREEDY, output_dir=tmp_path), None)
    assert made.labels({"rank": 3}) == {"rank": 3, "run": "now"}
    assert made.labels({"run": "mine"}) == {"run": "mine now"}


def test_what_need_not_be_done_again_is_told(tmp_path):
    config = SessionConfig(GREEDY, output_dir=tmp_path)
    for found, steps, ended, text in (
        (
            WHOLE,
            5,
            Ended.ENVELOPE,
            ["resumed: warm-up, profile, plan, reconfigure of the job started first are done"],
        ),
        (StoredJob({}, ("first",), reconfigure_steps=5), 0, None, []),
        (None, 0, None, []),
    ):
        state, said = SessionState(), []
        found_by(config, found).tell(state, said.append)
        assert (state.reconfigure_steps, state.reconfigure_ended, said) == (steps, ended, text)


class Keeper:
    """Notes what it is to keep."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep_profile(self, *what: Any) -> None:
        self.kept.append(("profile", *what))

    def keep_plan(self, *what: Any) -> None:
        self.kept.append(("plan", *what))

    def keep_baseline(self, *what: Any) -> None:
        self.kept.append(("baseline", *what))

    def forget_profile(self) -> None:
        self.kept.append("forgotten")


PROFILE, PLAN, FILE = ("profile", "its profile"), ("plan", "its plan", 3, None), Path("a file")


@pytest.mark.parametrize(
    ("files", "found", "phase", "state", "baseline", "kept"),
    [
        ({}, None, Phase.STEADY, {}, None, []),
        ({}, None, Phase.WARMUP, {}, BASELINE, [("baseline", BASELINE)]),
        ({}, None, Phase.RECONFIGURE, {"profile": "its profile", "plan": "its plan"}, None,
         [PROFILE]),
        ({}, None, Phase.STEADY, {"profile": "its profile", "plan": "its plan"}, None,
         [PROFILE, PLAN]),
        ({}, None, Phase.STEADY, {"profile": "its profile"}, None, [PROFILE]),
        # The user's own are not kept; those of an earlier start are.
        ({"profile_file": FILE}, None, Phase.STEADY,
         {"profile": "its profile", "plan": "its plan"}, None, [PLAN]),
        ({"profile_file": FILE, "plan_file": FILE}, None, Phase.STEADY,
         {"profile": "its profile", "plan": "its plan"}, None, []),
        ({"profile_file": FILE, "plan_file": FILE}, replace(WHOLE, plan={}), Phase.STEADY,
         {"plan": "its plan"}, None, []),
        ({"profile_file": FILE, "plan_file": FILE}, WHOLE, Phase.STEADY,
         {"plan": "its plan"}, None, [PLAN]),
        # A profile of an earlier start that makes no plan is measured anew by the next one.
        ({"profile_file": FILE}, WHOLE, Phase.STEADY, {}, None, ["forgotten"]),
        ({"profile_file": FILE}, WHOLE, Phase.RECONFIGURE, {}, None, []),
    ],
)  # fmt: skip
def test_what_is_new_is_kept(files, found, phase, state, baseline, kept):
    keeper: Any = Keeper()
    made = Resumed(SessionConfig(GREEDY, **files), found, "now", keeper)
    made.keep(SessionState(reconfigure_steps=3, **state), phase, baseline)
    assert keeper.kept == kept


def test_what_cannot_be_kept_ends_no_training(caplog):
    keeper: Any = SimpleNamespace()
    Resumed(SessionConfig(GREEDY), None, "now", keeper).keep(SessionState(), Phase.WARMUP, BASELINE)
    assert "What was found is not kept for another start" in caplog.text


@pytest.mark.parametrize(("request_", "least"), [(PlanRequest(4), 1), (GREEDY, 2)])
def test_the_shortest_warm_up(request_, least):
    assert SessionConfig(request_, warmup_iterations=least).warmup_iterations == least
    with pytest.raises(SessionError, match=f"at least {least} iteration"):
        SessionConfig(request_, warmup_iterations=least - 1)


@pytest.mark.parametrize(
    ("stored", "profile", "plan"),
    [
        (None, False, False),
        (StoredJob({}), False, False),
        (replace(WHOLE, plan={}), True, False),
        (replace(WHOLE, profile={}), False, True),
    ],
)
def test_whose_profile_and_plan_a_job_has(stored, profile, plan):
    """An earlier start's, or the user's."""
    job = object.__new__(Job)
    object.__setattr__(job, "stored", stored)
    assert (job.keeps_profile, job.keeps_plan) == (profile, plan)


def test_a_job_of_weeks_does_not_grow():
    state = SessionState()
    state.iterations.extend([(Phase.STEADY, 1.0, 1.0)] * 10_001)
    assert len(state.iterations) == 10_000
