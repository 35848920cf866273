"""The job file: what fits is gone on with, what does not is kept, and no kill leaves half of it."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing as mp
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from envpipe_megatron import builders
from envpipe_megatron.conditions import Conditions
from envpipe_megatron.plan import Plan
from envpipe_megatron.policies.planner import PlanRequest, make_plan
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.profile import Profile, ProfileRow, make_profile
from envpipe_megatron.runtime.interval_energy import BaselineEnergy, StepEnergy
from envpipe_megatron.runtime.job_file import (
    JobFileError,
    JobKeeper,
    StoredJob,
    read_job,
    set_aside,
    write_job,
)
from envpipe_megatron.schedule import Kind

FINGERPRINT = {"hidden_size": 2048, "stages": [1, 2], "gpu": "NVIDIA H200", "recompute": None}
STEP = StepEnergy(9, 0.6, 0.01, 210.5, 0.4)
BASELINE = BaselineEnergy(STEP, (STEP, replace(STEP, energy_j=190.0)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    rows = [
        (stage, kind, ProfileRow(f, 1410 / f, f / 1e3))
        for stage in range(2)
        for kind in Kind
        for f in (1410, 1200, 990)
    ]
    return make_profile(rows, source="made for a test")


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


def test_files_that_cannot_be_read_as_what_they_were_start_over(folder, profile):
    """Their digests are right: another version of the package wrote them."""
    text = "stage,instruction,frequency,time\n0,forward,1410,1.0\n"
    (folder / "profile.csv").write_text(text)
    job = read_job_unchecked(folder)
    digest = hashlib.sha256(text.encode()).hexdigest()
    write_job(folder, replace(job, profile={**job.profile, "profile.csv": digest}))
    with pytest.raises(JobFileError, match="cannot be read"):
        read_job(folder, FINGERPRINT)


def read_job_unchecked(folder: Path) -> StoredJob:
    data = json.loads((folder / "job.json").read_text())
    return StoredJob(data["fingerprint"], tuple(data["starts"]), data["profile"], data["plan"])


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
