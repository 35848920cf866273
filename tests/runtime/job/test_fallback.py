"""Nothing that EnvPipe does by itself ends a training, whatever of it fails, and on which rank."""

import json

import memory_ranks
import pytest
import session_ranks
from on_request import on_request
from presets import preset_profile
from rank_pool import RankFailedError
from session_ranks import Fault

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.presets import load_preset

pytestmark = pytest.mark.xdist_group("pipeline")

ENVELOPE = {"type": "envelope", "reconfigure": "balanced"}


def phases(told):
    return list(told.readings_by_phase)


def stored(root):
    return json.loads((root / "job.json").read_text())


def check_own_order(told, text):
    """The framework's order goes on on every rank; it is said once, and stands in the bill."""
    for one in told:
        assert one.phase == "steady"
        assert one.peak_in_flight == ()
        assert one.notes == told[0].notes
    (note,) = (
        each for each in told[0].notes if not each.startswith("Memory is known to hold at most ")
    )
    assert note.startswith("The framework's own order, at the highest clock: ")
    assert text in note
    assert told[0].said.count(note) == 1
    assert told[0].bill.count(note) == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.target.rpartition(".")[2], marks=marks)
        for fault, marks in (
            (Fault("runtime.job.online.make_report", victim=1, call=3), ()),
            (
                Fault("runtime.memory.peak.peaks_bytes", victim=None),
                on_request("PIPELINE"),
            ),
            (Fault("tuning.sweep.step", call=2), on_request("PIPELINE")),
        )
    ],
)
def test_what_fails_leaves_the_frameworks_order(three_ranks, tmp_path, fault):
    """Of each part, the tests of that part have all that may fail in it."""
    told = three_ranks.run(session_ranks.train_with_faults, tmp_path, ENVELOPE, (fault,))
    check_own_order(told, "of a test")
    assert not (tmp_path / "plan.json").exists()


@on_request("PIPELINE")
def test_what_is_not_needed_for_a_plan_may_fail(three_ranks, tmp_path):
    faults = (
        Fault("core.plan.Plan.write"),
        Fault("core.profile.Profile.write", error=MemoryError),
        Fault("runtime.memory.peak.bytes_by_chunk", victim=1),
    )
    for one in three_ranks.run(session_ranks.train_with_faults, tmp_path, ENVELOPE, faults):
        assert one.phase == "steady"
        assert one.peak_in_flight != ()


def test_no_start_meets_the_same_failure_for_ever(three_ranks, tmp_path):
    fault = Fault("runtime.job.phases.plan_online", error=MemoryError)
    run = three_ranks.run
    check_own_order(
        run(session_ranks.train_with_faults, tmp_path, ENVELOPE, (fault,)), "MemoryError"
    )
    assert stored(tmp_path)["profile"]  # the next start may have more memory
    again = run(session_ranks.train_with_faults, tmp_path, ENVELOPE, (fault,))
    check_own_order(again, "MemoryError")
    assert phases(again[0]) == ["warm-up", "steady"]
    assert not stored(tmp_path)["profile"]  # or it was the profile, which is measured anew
    last = run(session_ranks.train_with_faults, tmp_path, ENVELOPE)
    assert phases(last[0]) == ["warm-up", "profile", "reconfigure", "steady"]
    assert stored(tmp_path)["profile"]


def test_what_the_user_gave_ends_no_training_that_is_under_way(three_ranks, tmp_path):
    """What is wrong with it is said before the first iteration, or else the own order goes on."""
    given = tmp_path / "given.csv"
    clocks = sorted(load_preset("a100-sxm").supported_frequencies_mhz[::40])[:-1]
    preset_profile("a100-sxm", 3, memory_ranks.TIMES, clocks).write(given)
    wrong = Fault("runtime.job.phases.plan_online", error=EnvPipeError)
    plenty = (10**9,) * 3
    told = three_ranks.run(
        session_ranks.train_with_faults, tmp_path, ENVELOPE, (wrong,), plenty, given
    )
    check_own_order(told, "of a test")
    preset_profile("a100-sxm", 2, memory_ranks.TIMES, clocks).write(given)
    with pytest.raises(RankFailedError, match=r"3 stages, and profile .* has 2"):
        three_ranks.run(session_ranks.train_with_faults, tmp_path, ENVELOPE, (), plenty, given)
