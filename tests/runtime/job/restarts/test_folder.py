"""The output folder: what another start finds, keeps and sets aside, and each node's own files."""

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_gpu import FakeGpu
from kept_job import (
    BASELINE,
    KEYS,
    OTHER,
    STEP,
    alone,
    job_folder,
    kept_job,
    of_units,
    planned,
    profiled,
)
from locked_file import locked_file

from envpipe_megatron.formats import job_file
from envpipe_megatron.formats.bill import Bill
from envpipe_megatron.formats.energy import read_energy_logs
from envpipe_megatron.formats.job_file import StoredJob, read_job
from envpipe_megatron.formats.steps import BaselineEnergy
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.runtime.job import restarts
from envpipe_megatron.runtime.job.options import JobOptions, Level
from envpipe_megatron.runtime.job.restarts import JobFolder

pytestmark = pytest.mark.usefixtures("written_at_once")
GREEDY = JobOptions(num_microbatches=4, type="envelope", reconfigure="greedy", baseline_steps=3)


def stored(folder: Path) -> StoredJob:
    return read_job(folder / "job.json", KEYS)


@pytest.fixture
def whole(tmp_path) -> Path:
    return kept_job(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def resumed(config: JobOptions, power_limit_w: float | None = None, **gpu: Any) -> JobFolder:
    folder = JobFolder(config.output, alone())
    folder.resume(config, 2, FakeGpu(power_limit_w=power_limit_w, **gpu))
    return folder


def test_what_was_measured_for_the_least_time_is_of_one_clock_and_of_no_other_objective(tmp_path):
    for goal, clocks in (("time", [1400, 1400]), ("energy", [1400, 1000])):
        asked = JobOptions(num_microbatches=4, objective=goal)
        config = replace(asked, baseline_steps=3, output=tmp_path, fingerprint={})
        assert resumed(config).found.starts == ()
        assert len(resumed(config).found.starts) == 1
        units = json.loads((tmp_path / "job.json").read_text())["units"]
        assert units["envpipe_clocks_mhz"] == clocks


def test_keys_have_all_that_profile_and_baseline_rest_on(tmp_path):
    config = replace(GREEDY, output=tmp_path, fingerprint={"layers": 24})
    made, again = resumed(config, 400.0), resumed(config, 400.0)
    job = json.loads((tmp_path / "job.json").read_text())
    assert job["units"] == {
        "layers": 24,
        "envpipe_num_stages": 2,
        "envpipe_num_chunks": 1,
        "envpipe_clocks_mhz": [1400, 1000],
        "envpipe_num_clocks": 5,
        "envpipe_clock_backend": "fake",
        "envpipe_power_limit_w": 400.0,
        "envpipe_power_profiles": [],
    }
    assert job["steps"] == {
        "num_microbatches": 4,
        "group_size": None,
        "num_replicas": 1,
        "one_clock_slowdown_percent": None,
    }
    assert job["starts"] == [made.started, again.started]
    assert made.found.starts == ()
    assert again.found == StoredJob((made.started,))
    for error in (GpuError("of a test"), AttributeError("of a driver's library")):
        resumed(config, error=error)
        units = json.loads((tmp_path / "job.json").read_text())["units"]
        assert units["envpipe_power_limit_w"] is None


def test_a_start_on_a_node_whose_clock_is_behind_is_the_last_one_all_the_same(whole):
    """Readers take the last label for the last start's."""
    job = stored(whole)
    ahead = "2199-01-01T00:00:00.000+00:00"
    replace(job, starts=(ahead,)).write(whole / "job.json", KEYS)
    assert job_folder(whole).started == "2199-01-01T00:00:00.001+00:00"


@pytest.mark.parametrize("lacks", ["output", "fingerprint"])
def test_without_a_folder_or_a_fingerprint_nothing_is_looked_for_or_kept(tmp_path, lacks):
    given = {"output": tmp_path, "fingerprint": {"layers": 24}, lacks: None}
    folder = resumed(replace(GREEDY, **given))
    assert folder.found == StoredJob()
    assert folder.run_label("mine") == {"run": "mine"}
    folder.keep_profile(profiled())
    folder.keep_baselines({"": BASELINE})
    left = {"profile.csv", "profile.json"} if lacks == "fingerprint" else set()
    assert set(files(tmp_path)) == left


def test_a_job_that_keeps_nothing_has_a_start_of_its_own_and_leaves_what_is_stored(whole):
    before = files(whole)
    folder = JobFolder(whole, alone())
    config = replace(GREEDY, baseline_steps=3, output=whole, fingerprint={"a": 1})
    folder.resume(config, 2, FakeGpu(), keeps=False)
    assert folder.found == StoredJob()
    assert folder.run_label("mine") == {"run": f"mine {folder.started}"}
    assert datetime.fromisoformat(folder.started).tzinfo is not None
    folder.keep_baselines({"": BASELINE})
    folder.close()
    assert files(whole) == before


def test_every_rank_gets_what_the_planner_found(whole):
    before = files(whole)
    config = replace(GREEDY, baseline_steps=3, output=whole, fingerprint={"a": 1})
    for found in (stored(whole), StoredJob(("first",)), StoredJob()):
        folder = JobFolder(whole, alone())
        folder._collectives.agreed = lambda look, found=found: (found, "now")  # type: ignore[method-assign]
        folder.resume(config, 2, None)  # type: ignore[arg-type]
        assert folder.found is found
        assert folder.run_label("") == {"run": "now"}
        assert folder.run_label("mine") == {"run": "mine now"}
    assert files(whole) == before


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ({"num_microbatches": 8}, "num_microbatches was 4 and is now 8"),
        ({"num_replicas": 2}, "num_replicas was 1 and is now 2"),
        ({}, "group_size was nothing and is now not"),
    ],
)
def test_a_profile_is_kept_where_units_cost_the_same(whole, caplog, steps, shown):
    change = {**KEYS, "steps": steps}
    job_folder(whole).keep(one_clock_mhz=1200)
    before = files(whole)
    again = job_folder(whole, change)
    assert again.found.phases_done == ("profile",)
    assert again.found.profile.to_csv() == profiled().to_csv()
    (record,) = caplog.records
    assert "Of it, profile is kept" in record.message
    assert shown in record.message
    after = files(whole)
    assert after.pop("job.json") != before.pop("job.json")
    assert after == before
    # It is this job from now on, without a word.
    assert job_folder(whole, change).found.phases_done == ("profile",)
    assert len(caplog.records) == 1


def test_another_start_needs_none_of_the_files_for_people(whole):
    for name in ("profile.csv", "profile.json"):
        (whole / name).unlink()
    (whole / "plan.json").write_text("no plan")
    found = job_folder(whole).found
    assert found.phases_done == ("warm-up", "profile")
    assert found.profile.to_csv() == profiled().to_csv()


def test_another_job_starts_over_and_nothing_is_overwritten(whole, caplog):
    before = files(whole)
    now = of_units(hidden_size=1)
    assert job_folder(whole, now).found.starts == ()
    assert caplog.text.count("starts over") == 1
    after = files(whole)
    new = json.loads(after.pop("job.json"))
    assert ({"units": new["units"], "steps": new["steps"]}, new["profile"]) == (now, None)
    assert after == {name.replace(".", ".old1."): content for name, content in before.items()}
    # The first job comes back: the second is kept beside it.
    job_folder(whole)
    assert {name: c for name, c in files(whole).items() if "old1" in name} == after
    assert json.loads(files(whole)["job.old2.json"]) == new


def test_kept_files_may_fail_in_any_way(whole, monkeypatch):
    def fail(*arguments: Any) -> Any:
        raise OverflowError("of a test")

    monkeypatch.setattr(job_file, "profile_of_json", fail)
    assert job_folder(whole).found == StoredJob()
    assert (whole / "profile.old1.csv").exists()


def test_a_folder_that_cannot_be_looked_at_ends_no_training(whole, monkeypatch, caplog):
    """As one below a folder that this user may not pass through, or of a stale NFS handle."""
    before = files(whole)

    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as closed:
        for name in ("exists", "glob"):
            closed.setattr(Path, name, refuse)
        folder = job_folder(whole)
    assert folder.found == StoredJob()
    assert "could not be written, and is tried again. Training goes on" in caplog.text
    assert files(whole) == before
    folder.keep(one_clock_mhz=1200)
    assert stored(whole).phases_done == ("one clock",)
    assert {name.replace(".old1", "") for name in files(whole)} == set(before)


def test_setting_aside_takes_up_where_it_was_killed(whole, monkeypatch):
    """The job file goes last, so what is left is set aside by the next start."""
    before, renamed, rename = files(whole), [], Path.rename

    def noted(path: Path, target: Path) -> Path:
        renamed.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", noted)
    (whole / "profile.csv").rename(whole / "profile.old1.csv")
    job_folder(whole, OTHER)
    assert renamed[1:] == ["profile.old2.json", "plan.old2.json", "job.old2.json"]
    assert files(whole)["profile.old1.csv"] == before["profile.csv"]


def test_files_that_somebody_gave_stay_where_they_are(whole):
    before = files(whole)
    given = {"profile": whole / "profile.csv", "plan": whole / "plan.json"}
    assert job_folder(whole, OTHER, **given).found == StoredJob()
    for name in ("profile.csv", "plan.json"):
        assert files(whole)[name] == before[name]
    assert files(whole)["job.old1.json"] == before["job.json"]


def test_a_folder_whose_files_cannot_be_set_aside_keeps_them(whole, monkeypatch, caplog):
    before = files(whole)

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    folder = job_folder(whole, OTHER)
    folder.keep_baselines({"": BASELINE})
    assert files(whole) == before
    assert "Its files stay as they are" in caplog.text


def test_a_profile_of_no_use_is_forgotten(whole):
    """But not one that this start has measured."""
    folder = job_folder(whole)
    folder.forget_profile()
    job = stored(whole)
    assert job == StoredJob(job.starts, baselines={"": BASELINE})
    assert folder.found == replace(job, starts=job.starts[:1])
    again = job_folder(whole)
    again.keep_profile(profiled(watts=120.0))
    again.forget_profile()
    assert stored(whole).phases_done == ("warm-up", "profile")


@pytest.mark.parametrize("energy_j", [None, 0.0])
def test_a_baseline_without_energies_is_measured_anew(tmp_path, energy_j):
    """Kept, it would be taken for damage, and all the rest set aside with it."""
    folder = job_folder(tmp_path)
    unmetered = replace(STEP, energy_j=energy_j)
    for mean, stage in ((STEP, unmetered), (unmetered, STEP)):
        folder.keep_baselines({"": BaselineEnergy(mean, (STEP, stage))})
    assert stored(tmp_path).baselines == {}
    folder.keep_baselines({"": BASELINE, "m3": BASELINE})
    assert stored(tmp_path).baselines == {"": BASELINE, "m3": BASELINE}
    later = BaselineEnergy(replace(STEP, energy_j=1.0), (STEP,))
    folder.keep_baselines({"m3": later})  # the other one did not hold
    assert stored(tmp_path).baselines == {"m3": later}


def test_a_plan_that_the_user_gave_is_copied_unless_it_is_there(tmp_path):
    for source in (tmp_path / "plan.json", tmp_path / "mine.json"):
        assert not (tmp_path / "plan.json").exists()
        job_folder(tmp_path, plan=source).write_plan(planned())
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("by", [Path, os.path.relpath])
def test_a_profile_that_the_user_gave_is_not_written_over(whole, by):
    """A closed loop keeps what it has learned since, but not in that file."""
    before = files(whole)
    folder = job_folder(whole, profile=Path(by(whole / "profile.csv")))
    folder.keep_profile(profiled(watts=120.0))
    after = files(whole)
    assert [after[name] for name in ("profile.csv", "profile.json")] == [
        before[name] for name in ("profile.csv", "profile.json")
    ]
    assert stored(whole).profile.to_csv() == profiled(watts=120.0).to_csv()


def test_what_could_not_be_written_is_kept_once_it_can_be(tmp_path, caplog):
    for name in ("profile.csv", "plan.json"):
        (tmp_path / name).mkdir()  # as little to be written as a file on a full disk
    folder = job_folder(tmp_path)
    folder.keep_profile(profiled())
    folder.write_plan(planned())
    assert "profile.csv could not be written" in caplog.text
    assert stored(tmp_path).phases_done == ("profile",)
    for name in ("profile.csv", "plan.json"):
        (tmp_path / name).rmdir()
    folder.keep(one_clock_mhz=1200)  # all is tried again
    assert (tmp_path / "profile.csv").read_text() == profiled().to_csv()
    assert (tmp_path / "plan.json").exists()


def test_a_job_file_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    gone = tmp_path / "gone"
    folder = job_folder(gone)
    shutil.rmtree(gone)
    folder.keep_baselines({"": BASELINE})
    assert f"{gone}/job.json could not be written" in caplog.text
    caplog.clear()
    job_folder(tmp_path, of_units(type=object()))  # of none of JSON's types
    assert caplog.text.count("A file could not be written") == 1


def test_of_two_live_jobs_with_a_folder_the_second_has_one_of_its_own(tmp_path, caplog):
    own = tmp_path / "out"
    own.mkdir()
    with locked_file(own / ".lock"):
        second = job_folder(own)
        assert second.path == tmp_path / "out.2"
        second.append("energy", {"energy_j": 1.0})
        assert {*files(second.path)} == {"job.json", "energy.jsonl"}
        assert files(own) == {}
        why = f"Another job writes to {own}: files of this one are in {second.path}"
        assert (why in caplog.text, second.notes) == (True, (why,))
    second.close()
    assert job_folder(own).path == own


def test_beside_a_live_job_where_no_folder_can_be_made_no_files_are_left(
    whole, monkeypatch, caplog
):
    """Its files would be put aside, or written over."""
    before, mkdir = files(whole), Path.mkdir

    def refuse_others(path: Path, *arguments: Any, **named: Any) -> None:
        if path != whole:
            raise PermissionError(13, "Permission denied")
        mkdir(path, *arguments, **named)

    with locked_file(whole / ".lock"):
        monkeypatch.setattr(Path, "mkdir", refuse_others)
        second = job_folder(whole, OTHER)
        second.keep_baselines({"": BASELINE})
        second.append("energy", {"energy_j": 1.0})
    assert files(whole) == before
    assert (second.path, second.found) == (None, StoredJob())
    why = f"Another job writes to {whole}: this one leaves no files: [Errno 13] Permission denied"
    assert second.notes == (why,)
    assert why in caplog.text


def test_a_lock_that_cannot_be_written_as_it_is_closed_ends_no_job(tmp_path, monkeypatch):
    """As on NFS, which says only then that the disk was full."""
    full = OSError(errno.EDQUOT, "Disk quota exceeded")
    monkeypatch.setattr(restarts, "lock_file", lambda path: Mock(close=Mock(side_effect=full)))
    job_folder(tmp_path).close()


@pytest.mark.parametrize(
    ("holder", "ends", "taken", "looks"),
    [
        pytest.param({"job": "8"}, False, False, 0, id="another job's"),
        pytest.param({"job": "8", "boot": "1"}, False, False, 0, id="another job's elsewhere"),
        pytest.param({"job": ""}, False, False, 0, id="nobody knows whose"),
        pytest.param(None, False, False, 0, id="nothing is known of it"),
        pytest.param({}, False, False, 3, id="this job's that lives"),
        pytest.param({}, True, True, 2, id="this job's that is ending"),
        pytest.param({"boot": "1"}, True, True, 2, id="this job's that a dead node left"),
        pytest.param({"boot": "1"}, False, True, 3, id="one that a dead node left for ever"),
    ],
)
def test_a_lock_that_a_dead_node_left_costs_no_folder(
    tmp_path, monkeypatch, caplog, holder, ends, taken, looks
):
    """As a file server keeps one, some for a while, whose client has lost its power."""
    own, lock, slept = tmp_path / "out", tmp_path / "out" / ".lock", []
    own.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(restarts, "_OWN_LOCK_LOOKS", 4)
    with ExitStack() as held:
        held.enter_context(locked_file(lock))
        job, boot = lock.read_text().split("\n")
        assert (job, boot) == ("7", Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        record = {"job": job, "boot": boot, **(holder or {})}
        lock.write_text("" if holder is None else "\n".join(record.values()))

        def sleep(time_s: float) -> None:
            slept.append(time_s)
            if ends and len(slept) == looks:
                held.close()

        monkeypatch.setattr(restarts, "time", SimpleNamespace(sleep=sleep))
        second = job_folder(own)
        assert second.path == (own if taken else tmp_path / "out.2")
        assert len(slept) == looks
        assert ("of a node that died" in caplog.text) is (taken and not ends)
        assert second.notes == (
            () if taken else (f"Another job writes to {own}: files of this one are in {own}.2",)
        )
        with pytest.raises(AssertionError), locked_file(lock):  # by a lock that holds
            pass


class Nodes:
    """Collectives of ranks on nodes of these names and boots, one stage each."""

    def __init__(self, *places: tuple[str, str]) -> None:
        self.places = places

    def agreed(self, make: Callable[[], Path]) -> Path:
        return make()

    def by_stage(self, own: set[tuple[str, str]], merge: object) -> list[set[tuple[str, str]]]:
        assert own <= {*self.places}
        return [{place} for place in self.places]


def of_node(monkeypatch, folder: Path | None, node: str, *nodes: str, boot: str = "") -> JobFolder:
    """On a node of a name and boot, of those that are listed: `name` or `name boot`."""
    monkeypatch.setattr(socket, "gethostname", lambda: node)
    monkeypatch.setattr(restarts, "boot_id", lambda: boot)
    places = [(each.partition(" ")[0], each.partition(" ")[2]) for each in nodes]
    return JobFolder(folder, Nodes(*places))  # type: ignore[arg-type]


def test_several_nodes_have_a_file_each_and_one_bill(monkeypatch, tmp_path):
    for number, node in enumerate(("n1", "n2", "n1")):
        of_node(monkeypatch, tmp_path, node, "n1", "n2", "n1").append(
            "energy",
            {"node": node, "rank": number, "phase": "steady", "energy_j": 5.0, "duration_s": 1.0},
        )
    logs = sorted(tmp_path.glob("energy*.jsonl"))
    assert [path.name for path in logs] == ["energy-n1.jsonl", "energy-n2.jsonl"]
    assert [len(path.read_text().splitlines()) for path in logs] == [2, 1]
    assert Bill(read_energy_logs(logs).lines).total().energy_j == 15.0
    of_node(monkeypatch, tmp_path, "a/b", "a/b", "n2").append("clocks", {})
    of_node(monkeypatch, tmp_path, "n1", "n1", "n1").append("clocks", {})
    names = sorted(path.name for path in tmp_path.glob("clocks*"))
    assert names == ["clocks-a_b.jsonl", "clocks.jsonl"]


def test_nodes_of_one_name_have_a_file_each(monkeypatch, tmp_path):
    """Cloned images, say. On NFS, two that append to one file lose each other's lines."""
    nodes = ("host 11111111-a", "host 22222222-b", "other 33333333-c")
    folders = [of_node(monkeypatch, tmp_path, *each.split()[:1], *nodes, boot=each.split()[1])
               for each in nodes]  # fmt: skip
    for folder in folders:
        folder.append("energy", {})
        folder.close()
    assert [folder.node for folder in folders] == ["host-11111111", "host-22222222", "other"]
    assert sorted(path.name for path in tmp_path.glob("energy*")) == sorted(
        f"energy-{folder.node}.jsonl" for folder in folders
    )


def test_what_may_be_lowered_leaves_another_jobs_files_until_it_keeps_something(whole, caplog):
    """They may be those of the lower level, by which the job goes on then."""
    before, now = files(whole), of_units(keeps_order=False)
    folder = job_folder(whole, now, level=Level.ORDER)
    assert folder.found == StoredJob()
    assert files(whole) == before
    assert job_folder(whole).found.phases_done == job_folder(whole).found.phases_done != ()
    folder = job_folder(whole, now, level=Level.ORDER)
    folder.keep(one_clock_mhz=1200)
    after = files(whole)
    assert json.loads(after.pop("job.json"))["units"] == now["units"]
    assert {name for name in after if "old1" not in name} == set()
    assert caplog.text.count("starts over") == 1


def test_what_may_be_lowered_leaves_an_empty_folder_empty(tmp_path):
    job_folder(tmp_path, level=Level.ORDER)
    assert not files(tmp_path)


def test_what_is_written_does_not_change_meanwhile(tmp_path):
    """Ranks send each other plans while a thread writes them."""
    folder = job_folder(tmp_path)
    plan = planned.__wrapped__()  # nobody has looked at it
    before = [list(vars(each)) for each in (plan, plan.schedule, plan.profile)]
    folder.write_plan(plan)
    folder.close()
    assert (tmp_path / "plan.json").exists()
    assert [list(vars(each)) for each in (plan, plan.schedule, plan.profile)] == before


def test_a_working_folder_that_is_gone_ends_no_job(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    folder = JobFolder(Path("out"), alone(), {tmp_path / "profile.csv"})
    folder.append("loop", {})
    folder.close()
