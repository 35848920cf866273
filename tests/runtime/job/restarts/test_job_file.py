"""The job file: what fits is read, what does not is refused by name, and no kill leaves half."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kept_job import BASELINE, KEYS, STEP, job_folder, kept_job

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.energy.steps import BaselineEnergy
from envpipe_megatron.runtime.job.restarts.job_file import (
    JobFileError,
    JobKeys,
    StoredJob,
    read_job,
    write_job,
)

pytestmark = pytest.mark.usefixtures("written_at_once")


@pytest.fixture
def folder(tmp_path) -> Path:
    return kept_job(tmp_path)


def of_units(**change: object) -> JobKeys:
    """The keys of a job whose units rest on other facts."""
    return replace(KEYS, profile={**KEYS.profile, **change})


def test_what_was_kept_is_found_again(folder):
    job = read_job(folder, of_units(stages=(1, 2)))  # JSON knows no tuples
    assert (job.keys, job.changed) == (KEYS, ())
    assert job.phases_done == ("warm-up", "profile", "plan", "reconfigure")
    assert (set(job.profile), set(job.plan)) == ({"profile.csv", "profile.json"}, {"plan.json"})
    assert job.baselines == {"": BASELINE}  # one GPU's own is nobody else's
    assert (job.reconfigure_steps, job.reconfigure_ended) == (12, Ended.ENVELOPE)
    assert len(job.starts) == 1
    assert read_job(folder / "elsewhere", KEYS) is None
    exact = replace(STEP, time_s=1, time_uncertainty_s=0.0, metering_uncertainty_j=0)
    whole = replace(
        job, baselines={"": BaselineEnergy(exact, (exact,))}
    )  # whole numbers, and certain
    write_job(folder, whole)
    assert read_job(folder, KEYS) == whole


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"hidden_size": 4096}, "hidden_size was 2048 and is now 4096"),
        ({"gpu": "NVIDIA A100"}, "gpu was 'NVIDIA H200' and is now 'NVIDIA A100'"),
        ({"stages": [1, 3]}, "stages was 1, 2 and is now 1, 3"),
        ({"swiglu": None}, "swiglu was not given and is now nothing"),
        (
            {"recompute": "full", "hidden_size": 1},
            "hidden_size was 2048 and is now 1; recompute was nothing and is now 'full'",
        ),
    ],
)
def test_another_job_is_told_from_this_one(folder, change, shown):
    with pytest.raises(JobFileError, match=shown):
        read_job(folder, of_units(**change))
    fewer = {key: value for key, value in KEYS.profile.items() if key != "gpu"}
    with pytest.raises(JobFileError, match="gpu was 'NVIDIA H200' and is now not given; policy"):
        read_job(folder, JobKeys(fewer, KEYS.steps))


def damage(folder: Path, how: str, rng: random.Random) -> None:
    job = folder / "job.json"
    content = job.read_bytes()
    data = json.loads(content)
    named = folder / rng.choice(["profile.csv", "profile.json", "plan.json"])
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
    elif how == "gone":
        named.unlink()
    elif how == "changed":
        named.write_text(named.read_text() + "\n")
    elif how == "folder":
        job.unlink()
        job.mkdir()


@pytest.mark.parametrize(
    "how", ["cut", "noise", "no field", "other types", "gone", "changed", "folder"]
)
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_job_starts_over_and_is_kept(folder, caplog, how, seed):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder, how, random.Random(f"{how} {seed}"))
    damaged = {path.name for path in folder.iterdir()}
    try:
        job = read_job(folder, KEYS)
    except (JobFileError, OSError):
        assert job_folder(folder).found is None
        assert caplog.text.count("starts over") == 1
        assert {path.name.replace(".old1", "") for path in folder.iterdir()} >= damaged
        assert read_job(folder, KEYS).phases_done == ()
    else:
        # Noise may hit what is only told, and a few values pass for others of their kind.
        assert how in ("noise", "other types", "no field")
        assert job.keys == KEYS
        for name in {**job.profile, **job.plan}:
            assert (folder / name).read_bytes() == before[name]


@pytest.mark.parametrize(
    ("name", "keeps_plan"), [("profile.csv", True), ("profile.csv", False), ("plan.json", True)]
)
def test_files_that_cannot_be_read_as_what_they_were_are_refused(folder, name, keeps_plan):
    """Their digests are right: another version of the package wrote them."""
    text = "stage,instruction,frequency,time\n0,forward,1410,1.0\n"
    job = read_job(folder, KEYS)
    (folder / name).write_text(text)
    part = "plan" if name == "plan.json" else "profile"
    digests = {**getattr(job, part), name: hashlib.sha256(text.encode()).hexdigest()}
    write_job(folder, replace(job, **{"plan": job.plan if keeps_plan else {}, part: digests}))
    with pytest.raises(EnvPipeError, match=name):
        read_job(folder, KEYS)


@pytest.mark.parametrize(
    ("part", "name", "value", "why"),
    [
        (None, "format", "envpipe-job/1", "its format is 'envpipe-job/1', not 'envpipe-job/2'"),
        ("mean", "time_s", True, "'time_s' of its baseline is True"),
        ("mean", "time_s", "1", "'time_s' of its baseline is '1'"),
        ("mean", "time_s", -0.5, "'time_s' of its baseline is -0.5"),
        ("mean", "time_s", math.inf, "'time_s' of its baseline is inf"),
        ("mean", "energy_j", None, "'energy_j' of its baseline is None"),
        ("mean", "time_s", 0.0, "its baseline takes nothing"),
        (None, "profile", {"profile.json": "0"}, "its profile is not profile.csv"),
        (None, "plan", {"../plan.json": "0"}, "'../plan.json' is no file of its folder"),
    ],
)
def test_a_value_that_cannot_be_is_named(folder, part, name, value, why):
    data = json.loads((folder / "job.json").read_text())
    (data["baseline"][part] if part else data)[name] = value
    (folder / "job.json").write_text(json.dumps(data))
    with pytest.raises(JobFileError) as error:
        read_job(folder, KEYS)
    assert str(error.value) == f"{folder}/job.json is damaged: ValueError: {why}"


#: As `write_job` does, in a process that need not import torch.
WRITER = """
import json, sys
from pathlib import Path
from envpipe_megatron.files import replace_files
job = json.loads(sys.argv[2])
for count in range(10**9):
    job["starts"] = ["start"] * (count % 500)
    replace_files({Path(sys.argv[1]): [json.dumps(job)]})
    if count == 3:
        print(flush=True)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    """At any point: the old job or the new one, and the next writer is not in the way of it."""
    empty = json.dumps(StoredJob(KEYS).to_json())
    rng = random.Random(1)
    for _ in range(6):
        command = [sys.executable, "-c", WRITER, str(tmp_path / "job.json"), empty]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"\n"
            for _ in range(rng.randrange(3000)):
                tmp_path.stat()  # a random while
            writer.kill()
        job = read_job(tmp_path, KEYS)
        assert job.starts == ("start",) * len(job.starts)
        assert job_folder(tmp_path).found == job
