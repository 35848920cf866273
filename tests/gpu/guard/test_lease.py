"""Leases: one holder, found by everybody, undone by whoever may; nothing planted is followed."""

import errno
import fcntl
import json
import os
import pwd
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from lease_helpers import (
    REAL,
    FakeGpu,
    dead,
    folder,
    gpu,
    left_by_a_dead_guard,
    take,
    undo_stale,
)
from open_files import open_files

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.guard import lease as lease_module
from envpipe_megatron.gpu.guard.lease import (
    Lease,
    list_leases,
    undo_lease,
    undo_stale_leases,
)
from envpipe_megatron.gpu.guard.lease_file import (
    LeaseFolderError,
    LeaseRecord,
    lease_name,
)
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.registry import open_gpu

__all__ = ["folder", "gpu"]

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/schemas/lease.json").read_text())


# --- taking and releasing ------------------------------------------------------------------------


def test_a_lease_says_who_holds_the_gpu_and_goes_with_its_release(folder, gpu, monkeypatch):
    before = open_files(folder)
    umask = os.umask(0o077)
    for name in ("ENVPIPE_JOB_NAME", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, f"{name} \x1b")  # which harms no terminal
    lease = take(gpu.address, "my job \x1b[2J\ud800", clocks_mhz=(1410, 750))
    os.umask(umask)
    (record,) = list_leases()
    assert record == LeaseRecord(
        path=folder / lease_name(gpu.address),
        address=gpu.address,
        job="my job ?[2J?",
        uid=os.geteuid(),
        guard=ProcessIdentity.own(),
        rank=ProcessIdentity.own(),
        live=True,
        said={
            "host": socket.gethostname(),
            "job": "my job ?[2J?",
            "job_name": "ENVPIPE_JOB_NAME ?",
            "slurm_job_id": "SLURM_JOB_ID ?",
            "created": record.mark["created"],
            "highest_mhz": 1410,
            "lowest_mhz": 750,
        },
    )
    user = {"user": pwd.getpwuid(os.geteuid()).pw_name, "uid": os.geteuid(), "pid": os.getpid()}
    assert record.mark == user | record.said
    document = json.loads(lease.path.read_text())
    assert document["created"] == record.mark["created"]
    Draft202012Validator(SCHEMA).validate(document)
    assert document.keys() == SCHEMA["properties"].keys()
    assert (document["format"], document["uid"]) == ("envpipe-lease/1", os.geteuid())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["created"])
    assert lease.path.stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o7777 == 0o1777
    lease.release()
    assert list_leases() == []
    assert list(folder.iterdir()) == []
    assert open_files(folder) <= before


def test_a_gpu_has_one_holder_whatever_the_back_end(gpu):
    lease = take(REAL, "first")
    said = rf"job first \(guard {os.getpid()}, uid {os.geteuid()}\) holds the GPU {REAL.uid}"
    with pytest.raises(GpuError, match=f"{said}.*need a GPU each"):
        take(GpuAddress("zeusd", REAL.uid), "second")
    other = take(gpu.address, "second")
    lease.release()
    take(GpuAddress("zeusd", REAL.uid), "second").release()
    other.release()


@pytest.mark.parametrize("uid", ["GPU-../x", "/etc", "", "GPU-a/b", "0000:1b:00.0"])
def test_no_uid_leads_out_of_the_folder(uid):
    with pytest.raises(GpuError, match="Not the UUID"):
        take(GpuAddress("nvml", uid))
    assert "/" not in lease_name(GpuAddress("emulated", uid))


def test_takers_exclude_each_other(gpu):
    """Each opens the file anew, as processes do."""
    holders, taken = [], []

    def contend(_):
        while len(taken) < 300:
            list_leases()  # a mere look takes nothing from anybody
            with suppress(GpuError):
                lease = take(gpu.address)
                holders.append(lease)
                assert holders == [lease]
                taken.append(holders.pop())
                lease.release()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(contend, range(3)))
    assert list_leases() == []


@pytest.mark.parametrize(
    ("given", "slurm", "named"),
    [("mine", "batch", "mine"), ("4711", "batch", "batch"), ("4711", None, "4711")],
)
def test_a_name_that_was_given_counts_before_slurms(gpu, monkeypatch, given, slurm, named):
    """Without one, `envpipe launch` gives the job's number in SLURM."""
    monkeypatch.setenv("ENVPIPE_JOB_NAME", given)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.delenv("SLURM_JOB_NAME", raising=False)
    if slurm:
        monkeypatch.setenv("SLURM_JOB_NAME", slurm)
    lease = take(gpu.address)
    assert [record.mark["job_name"] for record in list_leases()] == [named]
    lease.release()


# --- stale leases --------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", [None, "1410", [1410], {}, 1e3])
def test_a_lease_is_undone_whatever_its_mark_says(gpu, clock, monkeypatch):
    """Earlier versions wrote none of it, and anybody may write anything; nobody is named by it."""
    monkeypatch.setattr(pwd, "getpwuid", None)  # as a server that hangs
    path = left_by_a_dead_guard(gpu.address, dead()).path
    document = json.loads(path.read_text())
    for name in ("host", "job_name", "slurm_job_id"):
        del document[name]
    path.write_text(json.dumps(document if clock is None else {**document, "lowest_mhz": clock}))
    (record,) = list_leases()
    assert (record.said["host"], record.said["lowest_mhz"]) == ("", None)
    gpu.lock_frequency(1200)
    assert undo_stale(open_gpu) == [gpu.address]
    assert gpu.requested_frequency_mhz is None


@pytest.mark.parametrize("undo", ["by anybody", "by who takes it"])
def test_a_stale_lease_is_undone_though_its_rank_lives(gpu, undo):
    """Only its guard, which has died, could lock for it."""
    left_by_a_dead_guard(gpu.address, ProcessIdentity.own())
    gpu.lock_frequency(1200)
    if undo == "by anybody":
        assert undo_stale(open_gpu) == [gpu.address]
    else:
        take(gpu.address, "next", rank=dead()).release()
    assert gpu.requested_frequency_mhz is None
    assert list_leases() == []


def test_stale_leases_are_looked_for_and_each_failure_is_said_once(gpu, folder, caplog):
    """A guard that says it at each look would fill a disk."""
    live = take(REAL)
    left_by_a_dead_guard(gpu.address, dead())
    said: set[str] = set()
    for _ in range(3):
        undo_stale_leases(REAL, FakeGpu(failures=1), said)
    assert caplog.text.count(f"{gpu.address.uid}: not reset: the driver is busy") == 1
    folder.chmod(0o777)
    for _ in range(2):
        undo_stale_leases(REAL, FakeGpu(failures=1), said)
    folder.chmod(0o1777)
    assert caplog.text.count("Leases cannot be seen") == 1
    undo_stale_leases(REAL, FakeGpu(failures=1), said)
    assert caplog.text.count("not reset") == 2, "it is news again"
    undo_stale_leases(REAL, open_gpu, said)
    assert ([record.address for record in list_leases()], said) == ([REAL], set())
    live.release()


@pytest.mark.parametrize("namespace", [None, 1])
def test_a_lease_lives_as_long_as_it_is_locked(gpu, namespace):
    """Test it with a guard that can be seen from here, and one that cannot."""
    lease = take(gpu.address)
    if namespace:
        document = json.loads(lease.path.read_text())
        document["guard"]["pid_namespace"] = document["rank"]["pid_namespace"] = namespace
        lease.path.write_text(json.dumps(document))
    assert list_leases()[0].live
    lease.close()
    assert not list_leases()[0].live
    taken = take(gpu.address)
    assert (list_leases()[0].guard, list_leases()[0].live) == (ProcessIdentity.own(), True)
    taken.release()


def test_the_stale_lease_of_ones_own_gpu_is_undone_first(gpu):
    """The driver of another may hang."""
    for address in (gpu.address, REAL):
        left_by_a_dead_guard(address, dead())
    for own in (gpu.address, REAL):
        opened = []
        undo_stale_leases(own, lambda address: opened.append(address), set())  # noqa: B023
        assert opened[0] == own
    assert undo_stale(FakeGpu()) == [REAL, gpu.address]


def test_requests_of_the_dead_that_may_be_under_way_are_waited_for(gpu, monkeypatch):
    left_by_a_dead_guard(gpu.address, dead())
    fake, resets = FakeGpu(), []
    fake.late_request_s = 7.0
    clock = Clock(monkeypatch, lambda: resets.append(fake.resets))
    assert undo_stale(fake) == [gpu.address]
    assert (resets, fake.resets, clock.now_s) == ([1], 2, 1007.0)


@pytest.mark.parametrize("content", [b"", b'{"format": "envpipe-le'])
def test_a_lease_that_was_cut_short_is_in_nobodys_way(folder, gpu, content):
    take(gpu.address).release()
    (folder / lease_name(gpu.address)).write_bytes(content)
    assert list_leases() == []
    take(gpu.address).release()


def test_whoever_keeps_a_dead_guards_lease_locked_does_not_keep_the_clock_locked(gpu):
    record = left_by_a_dead_guard(gpu.address, dead())
    gpu.lock_frequency(1200)
    with record.path.open() as file:  # any user may read it, which is enough to lock it
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not list_leases()[0].live
        take(gpu.address).release()
    assert gpu.requested_frequency_mhz is None


def test_where_leases_cannot_be_locked_this_is_said(gpu, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EBADF, "Bad file descriptor")  # as on NFS for one opened for reading

    lease = take(gpu.address)
    monkeypatch.setattr(lease_module.fcntl, "flock", flock)
    with pytest.raises(LeaseFolderError, match=r"cannot be locked.*disk of this machine"):
        take(gpu.address)
    monkeypatch.undo()
    lease.release()


def test_no_room_for_a_whole_lease(folder, gpu, monkeypatch):
    before = open_files(folder)
    monkeypatch.setattr(lease_module.os, "write", lambda descriptor, content: len(content) - 1)
    with pytest.raises(LeaseFolderError, match="cannot be written: no space for a whole lease"):
        take(gpu.address)
    assert list(folder.iterdir()) == []
    assert open_files(folder) <= before


def test_a_folder_that_is_swapped_while_a_lease_is_deleted_costs_nobody_elses(
    folder, gpu, monkeypatch, tmp_path
):
    lease, aside = take(gpu.address), tmp_path / "aside"
    others = tmp_path / "others"
    others.mkdir()
    (others / lease.path.name).write_text("another user's")
    same = os.path.samestat

    def swapped(*stats):
        if not aside.exists():
            folder.rename(aside)
            folder.symlink_to(others)
        return same(*stats)

    monkeypatch.setattr(os.path, "samestat", swapped)
    lease.release()
    assert (others / lease.path.name).exists()
    assert not (aside / lease.path.name).exists()


def test_a_lease_that_cannot_be_deleted_is_left_for_others_to_undo(folder, gpu, monkeypatch):
    before = open_files(folder)
    lease = take(gpu.address)

    def unlink(path, *, dir_fd):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(lease_module.os, "unlink", unlink)
    with pytest.raises(LeaseFolderError, match=r"could not be deleted: Operation.*owner or root"):
        lease.release()
    assert open_files(folder) <= before
    (record,) = list_leases()
    with pytest.raises(LeaseFolderError, match="could not be deleted"):
        undo_lease(record, open_gpu)
    assert [record.live for record in list_leases()] == [False]


class Clock:
    """Time that passes while somebody sleeps, and what happens meanwhile."""

    def __init__(self, monkeypatch, meanwhile=lambda: None):
        self.now_s, self._meanwhile = 1000.0, meanwhile
        monkeypatch.setattr(lease_module, "time", self)

    def monotonic(self):
        return self.now_s

    def sleep(self, time_s):
        self.now_s += time_s
        self._meanwhile()


@pytest.mark.parametrize(
    ("guard", "rank", "waits_s", "error"),
    [
        pytest.param({}, {}, 0.2, GpuError, id="a job that lives"),
        pytest.param({}, {"start_ticks": 1}, 5.0, GpuError, id="its rank has ended"),
        pytest.param({"start_ticks": 1}, None, 5.0, None, id="somebody undoes it"),
        pytest.param({}, None, 5.0, GpuError, id="somebody resets the GPU"),
        pytest.param({"pid_namespace": 1}, {}, 0.2, GpuError, id="a guard out of sight"),
        pytest.param(None, None, 5.0, GpuError, id="being written"),
    ],
)
def test_how_long_a_lease_that_is_locked_is_waited_for(
    gpu, monkeypatch, guard, rank, waits_s, error
):
    lease = take(gpu.address)
    document = json.loads(lease.path.read_text())
    document["guard"] = {**document["guard"], **(guard or {})}
    document["rank"] = None if rank is None else {**document["rank"], **rank}
    lease.path.write_text("" if guard is None else json.dumps(document))
    clock, begin_s, later = Clock(monkeypatch), 1000.0, dead()
    monkeypatch.setattr(lease_module, "_PATIENCE_S", 5.0)
    if error is None:
        take(gpu.address, rank=later).release()
    else:
        with pytest.raises(error):
            take(gpu.address, rank=later)
    assert clock.now_s - begin_s == pytest.approx(waits_s, abs=0.25)
    monkeypatch.undo()
    lease.release()


def test_an_empty_lease_is_never_taken_for_stale_at_once(folder, gpu, monkeypatch):
    """A mere look locks it for a moment."""
    take(gpu.address).release()
    path = folder / lease_name(gpu.address)
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        clock = Clock(monkeypatch)
        with pytest.raises(GpuError, match=f"An empty lease is locked.*{path.name}"):
            take(gpu.address)
        assert clock.now_s == pytest.approx(1000.2, abs=0.03)
        Clock(monkeypatch, looking.close)
        take(gpu.address).release()


@pytest.mark.parametrize("who", ["looks at it", "deletes it"])
def test_a_lease_that_somebody_finds_before_its_maker_has_locked_it_is_made_anew(
    folder, gpu, monkeypatch, who
):
    """Who finds it without lock and content takes it for one cut short."""
    looking, lock = [], Lease.lock

    def late(file, *more):
        monkeypatch.setattr(Lease, "lock", lock)
        if who == "deletes it":
            file.path.unlink()
        else:
            looking.append(file.path.open())
            fcntl.flock(looking[0], fcntl.LOCK_SH)
        return lock(file, *more)

    monkeypatch.setattr(Lease, "lock", late)
    Clock(monkeypatch, lambda: looking[0].close())
    lease = take(gpu.address)
    assert [record.live for record in list_leases()] == [True]
    lease.release()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "envpipe-lease/2"},
        {"address": "x"},
        {"rank": "me"},
        {"guard": {"pid": 2147483648}},
        {"guard": {"pid": -1}},
        {"guard": {"start_ticks": 1e400}},
        {"address": {"backend": "nvml", "uid": "GPU-of-another-name"}},
        pytest.param("[" * 60_000, id="deep"),
    ],
)
def test_whatever_somebody_writes_into_a_lease_nothing_is_done_and_others_are_found(
    folder, gpu, change
):
    lease = take(gpu.address)
    path, content = folder / lease_name(REAL), change
    if not isinstance(change, str):
        document = {**json.loads(lease.path.read_text()), "address": asdict(REAL)}
        if isinstance(change.get("guard"), dict):
            change = {"guard": {**document["guard"], **change["guard"]}}
        content = json.dumps({**document, **change})
    path.write_text(content)
    assert [record.address for record in list_leases()] == [gpu.address]
    fake = FakeGpu()
    with pytest.raises(GpuError):
        take(REAL, open_gpu=fake)
    assert undo_stale(fake) == []
    assert (path.read_text(), fake.resets) == (content, 0)
    lease.release()
