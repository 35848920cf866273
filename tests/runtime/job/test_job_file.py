"""The job file: what fits is gone on with, what does not is kept, and no kill leaves half of it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import multiprocessing as mp
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from envpipe_megatron.core import builders
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, ProfileRow, make_profile
from envpipe_megatron.core.schedule import Kind
from envpipe_megatron.policies.planner import PlanRequest, make_plan
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.energy.steps import BaselineEnergy, StepEnergy
from envpipe_megatron.runtime.job.job_file import (
    JobFileError,
    JobKeeper,
    StoredJob,
    read_job,
    set_aside,
    write_job,
)

FINGERPRINT = {"hidden_size": 2048, "stages": [1, 2], "gpu": "NVIDIA H200", "recompute": None}
STEP = StepEnergy(9, 0.6, 0.01, 210.5, 0.4)
BASELINE = BaselineEnergy(STEP, (STEP, replace(STEP, energy_j=190.0)))


def profiled(watts: float = 100.0) -> Profile:
    rows = [
        (stage, kind, ProfileRow(f, 1410 / f, watts * f / 1e3))
        for stage in range(2)
        for kind in Kind
        for f in (1410, 1200, 990)
    ]
    return make_profile(rows, source="made for a test")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


@pytest.fixture(scope="module")
def plan(profile) -> Plan:
    return make_plan(profile, PlanRequest(4, "envpipe", "envelope")).plan


@pytest.fixture
def folder(tmp_path, profile, plan) -> Path:
    """A folder with a job that has come to its steady phase."""
    keeper = JobKeeper(tmp_path, FINGERPRINT)
    profile.write(tmp_path / "profile.csv")
    keeper.keep_profile(profile)
    plan.write(tmp_path / "plan.json")
    keeper.keep_plan(plan, 12, Ended.ENVELOPE)
    keeper.keep_baseline(replace(BASELINE, own=STEP))
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_kept_is_found_again(folder):
    job = read_job(folder, FINGERPRINT)
    assert job.phases_done == ("warm-up", "profile", "plan", "reconfigure")
    assert set(job.profile) == {"profile.csv", "profile.json"}
    assert set(job.plan) == {"plan.json"}
    assert job.baseline == BASELINE  # one GPU's own is nobody else's
    assert (job.reconfigure_steps, job.reconfigure_ended) == (12, Ended.ENVELOPE)
    assert len(job.starts) == 1
    before = files(folder)
    keeper = JobKeeper(folder, {**FINGERPRINT, "stages": (1, 2)})  # JSON knows no tuples
    assert keeper.found == job
    assert keeper.job.starts[:1] == job.starts
    assert keeper.job.starts[1] > job.starts[0]
    after = files(folder)
    assert {**after, "job.json": b""} == {**before, "job.json": b""}


def test_an_empty_folder_holds_no_job(tmp_path):
    assert read_job(tmp_path, FINGERPRINT) is None
    assert JobKeeper(tmp_path, FINGERPRINT).found is None
    assert read_job(tmp_path, FINGERPRINT).phases_done == ()


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"hidden_size": 4096}, "hidden_size was 2048 and is now 4096"),
        ({"gpu": "NVIDIA A100"}, "gpu was 'NVIDIA H200' and is now 'NVIDIA A100'"),
        ({"stages": [1, 3]}, "stages was 1, 2 and is now 1, 3"),
        ({"swiglu": None}, "swiglu was not told and is now nothing"),
        (
            {"recompute": "full", "hidden_size": 1},
            "hidden_size was 2048 and is now 1; recompute was nothing and is now 'full'",
        ),
    ],
)
def test_another_job_is_told_from_this_one_and_kept(folder, caplog, change, shown):
    now = {**FINGERPRINT, **change}
    with pytest.raises(JobFileError, match=shown):
        read_job(folder, now)
    before = files(folder)
    with caplog.at_level(logging.WARNING):
        keeper = JobKeeper(folder, now)
    assert keeper.found is None
    assert keeper.job.phases_done == ()
    assert caplog.text.count("starts over") == 1
    after = files(folder)
    new = json.loads(after.pop("job.json"))
    assert new["fingerprint"] == now
    assert after == {name.replace(".", ".old1."): content for name, content in before.items()}
    # The first job comes back: the second is kept beside it, and nothing is overwritten.
    JobKeeper(folder, FINGERPRINT)
    assert {name: c for name, c in files(folder).items() if "old1" in name} == after
    assert json.loads(files(folder)["job.old2.json"]) == new


def test_a_missing_key_is_another_job_too(folder):
    fewer = {key: value for key, value in FINGERPRINT.items() if key != "gpu"}
    with pytest.raises(JobFileError, match="gpu was 'NVIDIA H200' and is now not told"):
        read_job(folder, fewer)


def damage(folder: Path, how: str, rng: random.Random) -> None:
    job = folder / "job.json"
    content = job.read_bytes()
    data = json.loads(content)
    if how == "cut":
        job.write_bytes(content[: rng.randrange(len(content) - 2)])
    elif how == "noise":
        at = rng.randrange(len(content))
        job.write_bytes(content[:at] + rng.randbytes(8) + content[at + 8 :])
    elif how == "no field":
        del data[rng.choice(sorted(data))]
        job.write_text(json.dumps(data))
    elif how == "other types":
        data[rng.choice(sorted(data))] = rng.choice([7, "x", [1], {"a": 1}, True])
        job.write_text(json.dumps(data))
    elif how == "format":
        data["format"] = "envpipe-job/2"
        job.write_text(json.dumps(data))
    elif how == "baseline":
        name = rng.choice(sorted(data["baseline"]["mean"]))
        data["baseline"]["mean"][name] = rng.choice([-1.0, float("nan"), None, "1", True])
        job.write_text(json.dumps(data))
    elif how == "gone":
        (folder / rng.choice(["profile.csv", "profile.json", "plan.json"])).unlink()
    elif how == "changed":
        with (folder / rng.choice(["profile.csv", "profile.json", "plan.json"])).open("a") as file:
            file.write("\n")
    elif how == "outside":
        data["plan"] = {"../plan.json": data["plan"]["plan.json"]}
        job.write_text(json.dumps(data))
    elif how == "folder":
        job.unlink()
        job.mkdir()


@pytest.mark.parametrize(
    "how",
    [
        "cut",
        "noise",
        "no field",
        "other types",
        "format",
        "baseline",
        "gone",
        "changed",
        "outside",
        "folder",
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_a_damaged_job_starts_over_and_is_kept(folder, caplog, how, seed):
    before = files(folder)
    damage(folder, how, random.Random(f"{how} {seed}"))
    damaged = {path.name for path in folder.iterdir()}
    try:
        job = read_job(folder, FINGERPRINT)
    except (JobFileError, OSError):
        with caplog.at_level(logging.WARNING):
            keeper = JobKeeper(folder, FINGERPRINT)
        assert keeper.found is None
        assert keeper.job.phases_done == ()
        assert caplog.text.count("starts over") == 1
        assert {name.replace(".old1", "") for name in files_and_folders(folder)} >= damaged
        assert read_job(folder, FINGERPRINT).phases_done == ()
    else:
        # Noise may hit what is only told, and a few values pass for others of their kind.
        assert how in ("noise", "other types", "baseline", "no field")
        assert job.fingerprint == FINGERPRINT
        for name in {**job.profile, **job.plan}:
            assert (folder / name).read_bytes() == before[name]


def files_and_folders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "keeps_plan"), [("profile.csv", True), ("profile.csv", False), ("plan.json", True)]
)
def test_files_that_cannot_be_read_as_what_they_were_start_over(folder, name, keeps_plan):
    """Their digests are right: another version of the package wrote them."""
    text = "stage,instruction,frequency,time\n0,forward,1410,1.0\n"
    job = read_job(folder, FINGERPRINT)
    (folder / name).write_text(text)
    part = "plan" if name == "plan.json" else "profile"
    digests = {**getattr(job, part), name: hashlib.sha256(text.encode()).hexdigest()}
    write_job(folder, replace(job, **{"plan": job.plan if keeps_plan else {}, part: digests}))
    with pytest.raises(JobFileError, match="cannot be read"):
        read_job(folder, FINGERPRINT)


@pytest.mark.parametrize(
    ("part", "name", "value", "why"),
    [
        (None, "format", "envpipe-job/2", "its format is 'envpipe-job/2', not 'envpipe-job/1'"),
        ("mean", "time_s", True, "'time_s' of its baseline is True"),
        ("mean", "time_s", "1", "'time_s' of its baseline is '1'"),
        ("mean", "time_s", -0.5, "'time_s' of its baseline is -0.5"),
        ("mean", "time_s", math.inf, "'time_s' of its baseline is inf"),
        ("mean", "energy_j", None, "'energy_j' of its baseline is None"),
        ("mean", "time_s", 0.0, "its baseline takes nothing"),
        ("mean", "energy_j", 0.0, "its baseline takes nothing"),
        (None, "profile", {"profile.json": "0"}, "its profile is not profile.csv"),
        (None, "plan", {"other.json": "0"}, "its plan is not plan.json"),
        (None, "plan", {"sub/plan.json": "0"}, "'sub/plan.json' is no file of its folder"),
    ],
)
def test_a_value_that_cannot_be_is_named(folder, part, name, value, why):
    data = json.loads((folder / "job.json").read_text())
    (data["baseline"][part] if part else data)[name] = value
    (folder / "job.json").write_text(json.dumps(data))
    with pytest.raises(JobFileError) as error:
        read_job(folder, FINGERPRINT)
    assert str(error.value) == f"{folder}/job.json is damaged: ValueError: {why}"


def test_a_baseline_that_is_certain_and_whole_numbers_are_read(folder):
    exact = replace(STEP, time_s=1, time_uncertainty_s=0.0, metering_uncertainty_j=0)
    stored = replace(read_job(folder, FINGERPRINT), baseline=BaselineEnergy(exact, (exact,)))
    write_job(folder, stored)
    assert read_job(folder, FINGERPRINT) == stored


@pytest.mark.parametrize("energy_j", [None, 0.0])
def test_a_baseline_without_energies_is_measured_anew(tmp_path, energy_j):
    """Kept, it would be taken for damage, and all the rest set aside with it."""
    keeper = JobKeeper(tmp_path, FINGERPRINT)
    unmetered = replace(STEP, energy_j=energy_j)
    keeper.keep_baseline(BaselineEnergy(STEP, (STEP, unmetered)))
    keeper.keep_baseline(BaselineEnergy(unmetered, (STEP, STEP)))
    assert read_job(tmp_path, FINGERPRINT) == keeper.job
    assert keeper.job.baseline is None
    keeper.keep_baseline(BASELINE)
    assert read_job(tmp_path, FINGERPRINT).baseline == BASELINE


def test_what_is_kept_is_not_kept_again(folder, profile, plan):
    keeper = JobKeeper(folder, FINGERPRINT)
    first = keeper.job
    keeper.keep_baseline(BaselineEnergy(replace(STEP, energy_j=1.0), ()))
    assert keeper.job == first
    keeper.keep_profile(profile)
    keeper.keep_plan(plan, 3, None)
    once = keeper.job
    assert once == replace(first, reconfigure_steps=3, reconfigure_ended=None)
    for name in ("profile.json", "plan.json"):
        (folder / name).write_text("{}")
    keeper.keep_profile(profile)
    keeper.keep_plan(plan, 4, Ended.ENVELOPE)
    assert keeper.job == once


@pytest.mark.parametrize("text", [None, "{"])
def test_a_plan_that_was_not_written_whole_is_not_kept(tmp_path, plan, text):
    keeper = JobKeeper(tmp_path, FINGERPRINT)
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    keeper.keep_plan(plan, 1, None)
    assert keeper.job.plan == {}


def test_a_profile_of_no_use_is_forgotten_with_its_plan(folder):
    """But not one that this start has measured."""
    keeper = JobKeeper(folder, FINGERPRINT)
    keeper.forget_profile()
    job = read_job(folder, FINGERPRINT)
    assert job == StoredJob(FINGERPRINT, keeper.job.starts, baseline=BASELINE)
    measured = profiled(watts=120.0)
    measured.write(folder / "profile.csv")
    keeper.keep_profile(measured)
    keeper.forget_profile()
    assert read_job(folder, FINGERPRINT).phases_done == ("warm-up", "profile")


def test_a_new_jobs_profile_is_not_forgotten(tmp_path, profile):
    keeper = JobKeeper(tmp_path, FINGERPRINT)
    profile.write(tmp_path / "profile.csv")
    keeper.keep_profile(profile)
    keeper.forget_profile()
    assert keeper.job.phases_done == ("profile",)


def test_a_plan_by_a_given_profile_is_found_again(tmp_path, profile, plan):
    (tmp_path / "given").mkdir()
    given = tmp_path / "given" / "mine.csv"
    profile.write(given)
    keeper = JobKeeper(tmp_path, FINGERPRINT, given)
    plan.write(tmp_path / "plan.json")
    keeper.keep_plan(plan, 2, None)
    again = JobKeeper(tmp_path, FINGERPRINT, given)
    assert (again.found.phases_done, again.found.reconfigure_steps) == (("plan",), 2)
    again.forget_profile()  # which is none of its own
    assert again.job.phases_done == ("plan",)


def test_files_that_somebody_gave_stay_where_they_are(folder, profile, plan):
    before = files(folder)
    given = folder / "profile.csv", folder / "plan.json"
    keeper = JobKeeper(folder, {"other": 1}, *given)
    assert keeper.found is None
    for name in ("profile.csv", "profile.json", "plan.json"):
        assert files(folder)[name] == before[name]
    assert files(folder)["job.old1.json"] == before["job.json"]


def test_nothing_is_kept_of_files_that_could_not_be_written(tmp_path, profile, plan):
    """An older job's files stand in their place."""
    (tmp_path / "profile.csv").write_text("an older one")
    plan.write(tmp_path / "plan.json")
    schedule = builders.one_f_one_b(2, 4)
    other = Plan(
        "baseline",
        schedule,
        schedule.is_backward * 0 + 1410,
        profile,
        Conditions((0.0, 0.0)),
    )
    keeper = JobKeeper(tmp_path, FINGERPRINT)
    keeper.keep_profile(profile)
    keeper.keep_plan(other, 0, None)
    assert read_job(tmp_path, FINGERPRINT).phases_done == ()


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    gone = tmp_path / "gone"  # as little to be written as on a full disk
    keeper = JobKeeper(gone, FINGERPRINT)
    keeper.keep_baseline(BASELINE)
    assert caplog.text.count("could not be written") == 1
    assert not gone.exists()


def test_a_folder_whose_files_cannot_be_set_aside_keeps_them(folder, monkeypatch, caplog):
    before = files(folder)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    keeper = JobKeeper(folder, {"other": 1})
    keeper.keep_baseline(BASELINE)
    assert keeper.found is None
    assert files(folder) == before
    assert "Its files stay as they are" in caplog.text


def test_facts_that_are_none_of_jsons_end_no_training(tmp_path, caplog):
    JobKeeper(tmp_path, {**FINGERPRINT, "type": object()})
    assert "training goes on" in caplog.text


def test_setting_aside_takes_up_where_it_was_killed(folder):
    """The job file goes last, so what is left is set aside by the next start."""
    before = files(folder)
    (folder / "profile.csv").rename(folder / "profile.old1.csv")
    JobKeeper(folder, FINGERPRINT)
    left = files(folder)
    assert left["profile.old1.csv"] == before["profile.csv"]
    assert left["plan.old2.json"] == before["plan.json"]
    assert left["job.old2.json"] == before["job.json"]
    assert set_aside(folder) == [folder / "job.old3.json"]


def test_the_job_file_is_set_aside_last(folder):
    names = ["profile.old1.csv", "profile.old1.json", "plan.old1.json", "job.old1.json"]
    assert set_aside(folder) == [folder / name for name in names]


def write_for_ever(folder: Path, begun: object) -> None:
    for count in range(10**9):
        write_job(folder, StoredJob(FINGERPRINT, tuple(["start"] * (count % 500))))
        if count == 3:
            begun.set()  # type: ignore[attr-defined]


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    """At any point: the old job or the new one, and the next writer is not in the way of it."""
    context = mp.get_context("forkserver")
    rng = random.Random(1)
    for _ in range(12):
        begun = context.Event()
        writer = context.Process(target=write_for_ever, args=(tmp_path, begun))
        writer.start()
        assert begun.wait(60)
        for _ in range(rng.randrange(3000)):
            tmp_path.stat()  # a random while
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        job = read_job(tmp_path, FINGERPRINT)
        assert job.starts == ("start",) * len(job.starts)
        assert JobKeeper(tmp_path, FINGERPRINT).found == job
