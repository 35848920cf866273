"""Jobs that are started again: what was measured is used, and every joule is billed once."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import step_ranks
from memory_folder import memory_folder
from plain_stages import MICROBATCHES
from rank_pool import RankPool

from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.formats.job_file import StoredJob, read_job

pytestmark = pytest.mark.xdist_group("pipeline")

#: Steps that take a job of three stages well into its steady phase.
ENOUGH = 28


def stored(folder: Path) -> tuple[Path, StoredJob]:
    """The job file of the last start, and what is in it."""
    path = folder / "output" / "job.json"
    return path, read_job(path, keys_of(path))


def keys_of(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    return {part: data[part] for part in ("units", "steps")}


def lines(folder: Path) -> list[dict[str, object]]:
    text = (folder / "output" / "energy.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines() if line]


@pytest.fixture(scope="module")
def first_start(three_ranks) -> Iterator[tuple[Path, Any]]:
    """A job that has come to its steady phase, and what its ranks said."""
    with memory_folder() as folder:
        yield folder, three_ranks.run(step_ranks.start_job, folder, ENOUGH)


@pytest.fixture
def finished(first_start, tmp_path) -> Any:
    """Such a job in a folder of this test alone."""
    shutil.copytree(first_start[0], tmp_path, dirs_exist_ok=True)
    return first_start[1]


def test_a_finished_job_goes_on_in_its_steady_phase(three_ranks, finished, tmp_path):
    phases = list(dict.fromkeys(finished[0]["phases"]))
    assert phases == ["warm-up", "profile", "reconfigure", "steady"]
    output = tmp_path / "output"
    kept = {"profile.csv": (output / "profile.csv").read_bytes()}
    # From its last checkpoint: some iterations run once more.
    again = three_ranks.run(step_ranks.start_job, tmp_path, 6, 20)
    for before, after in zip(finished, again, strict=True):
        assert after["phases"][:2] == ["warm-up"] * 2
        assert "profile" not in after["phases"]
        assert after["profile"] == before["profile"]
        assert after["baseline"].mean == before["baseline"].mean
        assert after["baseline"].own is None
    assert any("resumed: warm-up, profile of" in said for said in again[0]["said"])
    assert {name: (output / name).read_bytes() for name in kept} == kept
    assert len(json.loads((output / "job.json").read_text())["starts"]) == 2
    # The bill has both starts, with the framework's own numbers, and nothing twice.
    logs = read_energy_logs([output / "energy.jsonl"])
    assert logs.repeated == 0
    assert len({window.run for window in logs.windows}) == 2
    total_j = sum(rank["logged_j"] for start in (finished, again) for rank in start)
    assert Bill(logs.lines).total().energy_j == pytest.approx(total_j)
    runs = {line["run"]: [] for line in lines(tmp_path)}
    for line in lines(tmp_path):
        runs[line["run"]].append((line["first_iteration"], line["last_iteration"]))
    numbers = [(min(a for a, _ in r), max(b for _, b in r)) for r in runs.values()]
    assert numbers == [(0, ENOUGH - 1), (20, 25)]


def test_jobs_killed_anywhere_go_on_from_what_they_had(tmp_path):
    """A rank kills itself in a random unit; the job is started again until it is steady."""
    rng = random.Random(0)
    profiles, baselines = [], []
    done: list[str] = []
    planner = None
    for start in range(3):
        last = start == 2
        victim = rng.randrange(3)
        steps = ENOUGH if last else rng.choice([2, 6, 12, 20, ENOUGH])
        unit = f"{rng.choice('FB')}{rng.randrange(MICROBATCHES)}"
        killed = None if last else (victim, rng.randrange(steps), unit)
        with RankPool(3) as pool:
            pool.start(step_ranks.start_job, tmp_path, steps, 0, killed)
            outcomes = pool.outcomes(ranks=[r for r in range(3) if killed is None or r != victim])
        if killed is None:
            assert all(worked for worked, _ in outcomes.values()), outcomes
            planner = outcomes[0][1]
        else:
            assert not any(worked for worked, _ in outcomes.values())
        job = json.loads((tmp_path / "output" / "job.json").read_text())
        _, found = stored(tmp_path)
        assert set(done) <= set(found.phases_done)  # nothing is lost
        done = [*found.phases_done]
        assert len(job["starts"]) == start + 1
        for kept, part in ((profiles, "profile"), (baselines, "baselines")):
            if job[part]:
                kept.append(json.dumps(job[part]))
    # What was once measured or planned is what every later start used.
    assert len(set(profiles)) == len(set(baselines)) == 1
    assert planner is not None
    assert planner["phases"][-1] == "steady"
    assert done == ["warm-up", "profile"]
    assert not list((tmp_path / "output").glob("*.old*"))
    logs = read_energy_logs([tmp_path / "output" / "energy.jsonl"])
    assert logs.repeated == 0
    starts = Counter(window.run for window in logs.windows)
    assert set(starts) <= set(job["starts"])


def test_a_baseline_that_the_warm_up_contradicts_is_measured_again(three_ranks, finished, tmp_path):
    """It was taken on an overloaded host; what a step saves of it is nobody's saving."""
    path, job = stored(tmp_path)
    mean = replace(job.baselines[""].mean, time_s=6.7, time_uncertainty_s=5.7, energy_j=2000.0)
    replace(job, baselines={"": replace(job.baselines[""], mean=mean)}).write(path, keys_of(path))
    ranks = three_ranks.run(step_ranks.start_job, tmp_path, 10)
    for before, told in zip(finished, ranks, strict=True):
        assert told["phases"][:6] == ["warm-up"] * (2 + 4)
        assert "profile" not in told["phases"]
        measured = told["baseline"].mean.time_s
        assert measured == pytest.approx(before["baseline"].mean.time_s, rel=0.02)
    (said,) = (text for text in ranks[0]["said"] if "is not used" in text)
    assert "the baseline of an earlier start is not used: a step takes 1." in said
    assert "% against its 6.7 s" in said
    kept = json.loads(path.read_text())["baselines"][""]["mean"]
    assert kept["time_s"] == pytest.approx(measured)


def test_another_request_is_planned_with_what_is_known(three_ranks, finished, tmp_path):
    output = tmp_path / "output"
    before = (output / "profile.csv").read_bytes()
    again = three_ranks.run(step_ranks.start_job, tmp_path, 8, 0, None, "default")
    for first, told in zip(finished, again, strict=True):
        assert told["phases"][:2] == ["warm-up"] * 2  # its baseline is the same
        assert "profile" not in told["phases"]
        assert told["profile"] == first["profile"]
        assert told["plan"]["policy"] == "envelope"
    assert (output / "profile.csv").read_bytes() == before
    assert not list(output.glob("*.old*"))
    assert stored(tmp_path)[1].phases_done == ("warm-up", "profile")
