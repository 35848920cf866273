"""The job file: what fits is read, what does not is refused by name, and no kill leaves half."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from kept_job import BASELINE, KEYS, STEP, job_folder, kept_job, of_units, planned, profiled

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.steps import BaselineEnergy
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.job.restarts.job_file import JobKeys, StoredJob, read_job

pytestmark = pytest.mark.usefixtures("written_at_once")


@pytest.fixture
def path(tmp_path) -> Path:
    return kept_job(tmp_path) / "job.json"


def test_what_was_kept_is_found_again(path):
    job = read_job(path, of_units(stages=(1, 2)))  # JSON knows no tuples
    assert (job.keys, job.changed) == (KEYS, ())
    assert job.phases_done == ("warm-up", "profile", "plan", "reconfigure")
    assert (job.profile.to_csv(), job.profile.sidecar) == (profiled().to_csv(), profiled().sidecar)
    assert job.profile.sha256 == profiled().sha256
    assert job.plans[""].to_json() == planned().to_json()
    assert job.baselines == {"": BASELINE}  # one GPU's own is nobody else's
    assert (job.reconfigure_steps, job.reconfigure_ended) == (12, Ended.ENVELOPE)
    assert len(job.starts) == 1
    assert read_job(path.with_name("elsewhere"), KEYS) == StoredJob(KEYS)
    # Whole numbers, and steps of which there was one.
    exact = replace(STEP, time_s=1, time_uncertainty_s=None, metering_uncertainty_j=0)
    whole = replace(job, plans={}, baselines={"m3": BaselineEnergy(exact, (exact,))})
    whole.write(path)
    assert read_job(path, KEYS) == whole


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
def test_another_job_is_told_from_this_one(path, change, shown):
    with pytest.raises(EnvPipeError, match=shown):
        read_job(path, of_units(**change))
    fewer = {key: value for key, value in KEYS["profile"].items() if key != "gpu"}
    now: JobKeys = {**KEYS, "profile": fewer, "plan": {}}
    with pytest.raises(EnvPipeError, match="gpu was 'NVIDIA H200' and is now not given; num"):
        read_job(path, now)


def damage(job: Path, how: str, rng: random.Random) -> None:
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
    elif how == "no object":
        job.write_text("[]")
    elif how == "folder":
        job.unlink()
        job.mkdir()


@pytest.mark.parametrize("how", ["cut", "noise", "no field", "other types", "no object", "folder"])
@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_job_starts_over_and_is_kept(path, caplog, how, seed):
    damage(path, how, random.Random(f"{how} {seed}"))
    damaged = {each.name for each in path.parent.iterdir()}
    with pytest.raises(EnvPipeError, match=r"job\.json"):
        read_job(path, KEYS)
    assert job_folder(path.parent).found == StoredJob(KEYS)
    assert caplog.text.count("starts over") == 1
    assert {each.name.replace(".old1", "") for each in path.parent.iterdir()} >= damaged
    assert read_job(path, KEYS).phases_done == ()


def test_the_file_of_another_version_is_refused_by_its_format(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "envpipe-job/3"}))
    with pytest.raises(EnvPipeError, match="It must be 'envpipe-job/4'"):
        read_job(path, KEYS)
