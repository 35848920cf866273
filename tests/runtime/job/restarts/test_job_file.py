"""The job file: what fits is read, what does not is refused by name, and no kill leaves half."""

import json
import random
from pathlib import Path

import pytest
from kept_job import BASELINE, KEYS, job_folder, kept_job, of_units, profiled

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.job_file import JobKeys, StoredJob, read_job

pytestmark = pytest.mark.usefixtures("written_at_once")


@pytest.fixture
def path(tmp_path) -> Path:
    return kept_job(tmp_path) / "job.json"


def test_what_was_kept_is_found_again(path):
    job = read_job(path, of_units(stages=(1, 2)))  # JSON knows no tuples
    assert job.phases_done == ("warm-up", "profile")
    assert (job.profile.to_csv(), job.profile.sidecar) == (profiled().to_csv(), profiled().sidecar)
    assert job.profile.sha256 == profiled().sha256
    assert job.baselines == {"": BASELINE}  # one GPU's own is nobody else's
    assert len(job.starts) == 1
    assert read_job(path.with_name("elsewhere"), KEYS) == StoredJob()


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
    fewer = {key: value for key, value in KEYS["units"].items() if key != "gpu"}
    now: JobKeys = {**KEYS, "units": fewer, "steps": {}}
    with pytest.raises(EnvPipeError, match="gpu was 'NVIDIA H200' and is now not given; group"):
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
    assert job_folder(path.parent).found == StoredJob()
    assert caplog.text.count("starts over") == 1
    assert {each.name.replace(".old1", "") for each in path.parent.iterdir()} >= damaged
    assert read_job(path, KEYS).phases_done == ()


#: What `job.json` was before its fourth and its fifth version, and what no version ever was.
BEFORE = {
    "envpipe-job/3": {"format": "envpipe-job/3", "keys": {}, "starts": [], "plan": None},
    "envpipe-job/4": {
        "format": "envpipe-job/4",
        "sha256": "0",
        "keys": KEYS,
        "starts": ["2026-05-04T10:11:12.345+00:00"],
        "phases_done": ["warm-up"],
    },
    "none": {"name": "somebody's"},
}


@pytest.mark.parametrize("version", BEFORE)
def test_the_file_of_another_version_is_refused_by_its_format_and_kept(path, caplog, version):
    path.write_text(json.dumps(BEFORE[version]))
    with pytest.raises(EnvPipeError, match="It must be 'envpipe-job/5'"):
        read_job(path, KEYS)
    folder = job_folder(path.parent)
    assert folder.found == StoredJob()
    folder.keep(one_clock_mhz=1200)
    assert "The job starts over" in caplog.text
    assert "It must be 'envpipe-job/5'. Put aside: " in caplog.text
    assert json.loads(path.with_name("job.old1.json").read_text()) == BEFORE[version]
    assert read_job(path, KEYS).one_clock_mhz == 1200
