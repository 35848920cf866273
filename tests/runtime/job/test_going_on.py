"""Nothing that EnvPipe does by itself ends a training, whatever of it fails, and on which rank."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import going_on_ranks
import pytest
from going_on_ranks import Fault
from rank_pool import RankFailedError

from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.planner import PlannerError
from envpipe_megatron.runtime.going_on import GoesOnError, by_planner_in_time

pytestmark = pytest.mark.xdist_group("pipeline")

ENVELOPE = {"schedule": "envpipe", "policy": "envelope", "reconfigure": "balanced"}
OPTIMAL = {"schedule": "auto", "policy": "optimal"}


def phases(told):
    return list(told.readings_by_phase)


def stored(root):
    return json.loads((root / "job.json").read_text())


def check_own_order(told, text):
    """The framework's order goes on on every rank; it is said once, and stands in the bill."""
    for one in told:
        assert one.phase == "steady"
        assert one.peak_in_flight == ()
        assert len(one.notes) == 1
        assert one.notes == told[0].notes
        assert one.notes[0].startswith("The framework's own order, at the highest clock: ")
        assert text in one.notes[0]
    assert told[0].said.count(told[0].notes[0]) == 1
    assert told[0].bill.count(told[0].notes[0]) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault("runtime.job.planning:make_plan", error=MemoryError),
        Fault("runtime.job.planning:make_plan", error=PlannerError),
        Fault("runtime.job.planning:known_conditions", error=RecursionError),
        Fault("runtime.job.planning:in_flight_limit"),
        Fault("runtime.job.planning:_check"),
        Fault("runtime.memory.peak:StageMemory.predicted_peak_bytes", victim=1),
        Fault("runtime.memory.peak:StageMemory.predicted_peak_bytes", victim=None),
        Fault("runtime.job.phases:sweep_range", victim=1),
        Fault("runtime.profiling.profiler:split_energies", victim=2),
        Fault("runtime.profiling.profiler:make_profile", error=EnvPipeError),
        Fault("runtime.profiling.profiler:_Point.read", victim=1, call=3),
        Fault("runtime.job.reconfigurer:no_bubble_threshold_s"),
        Fault("runtime.job.reconfigurer:step", call=2),
        Fault("runtime.job.reconfigurer:grid", error=MemoryError),
        Fault("runtime.job.reconfigurer:replace", error=EnvPipeError),
    ],
    ids=lambda fault: f"{fault.target.split(':')[1]} {fault.error.__name__} on {fault.victim}",
)
def test_what_fails_leaves_the_frameworks_order(three_ranks, tmp_path, fault):
    told = three_ranks.run(going_on_ranks.train, tmp_path, ENVELOPE, (fault,))
    check_own_order(told, "of a test")
    assert not stored(tmp_path)["plan"]
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("core.plan:Plan.write"),
        Fault("core.profile:Profile.write"),
        Fault("runtime.job.job_file:JobKeeper.keep_plan", error=MemoryError),
        Fault("runtime.memory.peak:activation_bytes", victim=1),
    ],
    ids=lambda fault: fault.target,
)
def test_what_is_not_needed_for_a_plan_may_fail(three_ranks, tmp_path, fault):
    for one in three_ranks.run(going_on_ranks.train, tmp_path, ENVELOPE, (fault,)):
        assert one.phase == "steady"
        assert one.peak_in_flight != ()


def test_planning_that_never_ends_is_left_behind():
    ended, looks = threading.Event(), []
    collectives = SimpleNamespace(is_planner=True, agreed=lambda make: looks.append(0) or make())
    with pytest.raises(GoesOnError, match="longer than"):
        by_planner_in_time(collectives, ended.wait, longest_s=0.05, look_s=0.01)
    assert len(looks) > 1  # the others heard of it meanwhile
    ended.set()
    assert by_planner_in_time(collectives, ended.wait, longest_s=60.0) is True


def test_a_solver_may_fail_anywhere(three_ranks, tmp_path):
    def train(number, at_call):
        root = tmp_path / str(number)
        return three_ranks.run(
            going_on_ranks.train_with_a_solver_that_fails, root, OPTIMAL, at_call
        )

    clean = train(0, 0)
    calls = clean[0][1]
    assert clean[0][0].peak_in_flight != ()
    assert calls > 100
    rng = random.Random(0)
    for number in range(1, 5):
        told = [one for one, _ in train(number, rng.randint(1, calls))]
        check_own_order(told, "MemoryError: of a test")


def test_no_start_meets_the_same_failure_for_ever(three_ranks, tmp_path):
    fault = Fault("runtime.job.planning:make_plan", error=MemoryError)
    run = three_ranks.run
    check_own_order(run(going_on_ranks.train, tmp_path, ENVELOPE, (fault,)), "MemoryError")
    assert stored(tmp_path)["profile"]  # the next start may have more memory
    again = run(going_on_ranks.train, tmp_path, ENVELOPE, (fault,))
    check_own_order(again, "MemoryError")
    assert phases(again[0]) == ["warm-up", "steady"]
    assert not stored(tmp_path)["profile"]  # or it was the profile, which is measured anew
    last = run(going_on_ranks.train, tmp_path, ENVELOPE)
    assert phases(last[0]) == ["warm-up", "profile", "reconfigure", "steady"]
    assert stored(tmp_path)["profile"]
    assert stored(tmp_path)["plan"]


@pytest.mark.parametrize("fault", ["runtime.job.planning:_read", None], ids=["order", "memory"])
def test_a_kept_plan_that_does_not_run_any_more_is_made_anew(three_ranks, tmp_path, fault):
    plenty, less = (10**9,) * 3, (78_000, 75_000, 72_000)
    run = three_ranks.run
    first = run(going_on_ranks.train, tmp_path, ENVELOPE, (), plenty)
    assert first[0].peak_in_flight[0] > 3
    before = stored(tmp_path)["plan"]
    faults = () if fault is None else (Fault(fault),)
    again = run(going_on_ranks.train, tmp_path, ENVELOPE, faults, plenty if fault else less)
    assert phases(again[0]) == ["warm-up", "reconfigure", "steady"]
    assert again[0].peak_in_flight != ()
    if fault is None:
        assert again[0].peak_in_flight < first[0].peak_in_flight
        assert stored(tmp_path)["plan"] != before
    assert any("made anew" in said for said in again[0].said)
    last = run(going_on_ranks.train, tmp_path, ENVELOPE, (), plenty if fault else less)
    assert phases(last[0]) == ["warm-up", "steady"]
    assert last[0].peak_in_flight == again[0].peak_in_flight


def test_kept_files_that_cannot_be_read_start_over(three_ranks, tmp_path):
    three_ranks.run(going_on_ranks.train, tmp_path, ENVELOPE)
    fault = Fault("runtime.job.job_file:read_profile", error=OverflowError)
    told = three_ranks.run(going_on_ranks.train, tmp_path, ENVELOPE, (fault,))
    assert phases(told[0]) == ["warm-up", "profile", "reconfigure", "steady"]
    assert (tmp_path / "profile.old1.csv").exists()


def test_what_the_user_gave_is_refused(three_ranks, tmp_path):
    """Whoever named a profile is told what is wrong with it; a fault of ours is none of its."""
    three_ranks.run(going_on_ranks.train, tmp_path / "measured", ENVELOPE)
    profile = read_profile(tmp_path / "measured" / "profile.csv")
    given = tmp_path / "given.csv"
    replace(profile, source="").write(given)
    bug = Fault("runtime.job.planning:make_plan")
    told = three_ranks.run(
        going_on_ranks.train, tmp_path / "bug", ENVELOPE, (bug,), (10**9,) * 3, given
    )
    check_own_order(told, "ZeroDivisionError")
    wrong = Fault("runtime.job.planning:make_plan", error=PlannerError)
    with pytest.raises(RankFailedError, match="PlannerError: of a test"):
        three_ranks.run(
            going_on_ranks.train, tmp_path / "wrong", ENVELOPE, (wrong,), (10**9,) * 3, given
        )
