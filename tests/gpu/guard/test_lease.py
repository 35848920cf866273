"""Leases: one holder, found by everybody, undone by whoever may; nothing planted is followed."""

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from stale_leases import undo_stale

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard import lease as lease_module
from envpipe_megatron.gpu.guard import lease_file
from envpipe_megatron.gpu.guard.lease import (
    Lease,
    LeaseHeldError,
    list_leases,
    undo_lease,
)
from envpipe_megatron.gpu.guard.lease_file import (
    LEASE_DIR_VARIABLE,
    LeaseFolderError,
    LeaseRecord,
    lease_name,
    new_lease_folder,
    opened_lease_folders,
)
from envpipe_megatron.gpu.guard.process_identity import ProcessIdentity
from envpipe_megatron.gpu.opening import open_gpu

REAL = GpuAddress("nvml", "GPU-11111111-2222-3333-4444-555555555555")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "leases"
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(path))
    return path


@pytest.fixture
def gpu(tmp_path):
    return EmulatedGpu.create("a100-sxm", 0, tmp_path / "node")


class FakeGpu:
    """Counts resets; fails as often as told."""

    late_request_s = 0.0

    def __init__(self, failures=0):
        self.resets, self.failures = 0, failures

    def __call__(self, address):  # opens itself
        return self

    def reset_frequency(self):
        if self.failures:
            self.failures -= 1
            raise GpuError("the driver is busy")
        self.resets += 1


def me():
    return ProcessIdentity.of(os.getpid())


def open_files():
    return set(Path("/proc/self/fd").iterdir())


def dead():
    process = subprocess.Popen(["sleep", "60"])
    identity = ProcessIdentity.of(process.pid)
    process.kill()
    process.wait()
    return identity


def take(address, job="job", rank=None, open_gpu=open_gpu, patience_s=0.0):
    return Lease.take(address, job, rank=rank or me(), open_gpu=open_gpu, patience_s=patience_s)


def left_by_a_dead_guard(address, rank, job="dead job"):
    """A lease whose guard has died; its rank may live."""

    def guard():
        Lease.take(address, job, rank=rank, open_gpu=FakeGpu())
        os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=guard)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (record,) = [r for r in list_leases() if r.address == address]
    return record


# --- taking and releasing ------------------------------------------------------------------------


def test_a_lease_says_who_holds_the_gpu_and_goes_with_its_release(folder, gpu):
    before = open_files()
    lease = take(gpu.address, "my job")
    (record,) = list_leases()
    assert record == LeaseRecord(
        path=folder / lease_name(gpu.address),
        address=gpu.address,
        job="my job",
        uid=os.geteuid(),
        guard=me(),
        rank=me(),
        live=True,
    )
    document = json.loads(lease.path.read_text())
    assert (document["format"], document["uid"]) == ("envpipe-lease/1", os.geteuid())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", document["created"])
    assert lease.path.stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o7777 == 0o1777
    lease.release()
    assert list_leases() == []
    assert list(folder.iterdir()) == []
    assert open_files() <= before


@pytest.mark.parametrize("umask", [0o077, 0])
def test_modes_do_not_depend_on_the_umask(folder, gpu, umask):
    before = os.umask(umask)
    try:
        lease = take(gpu.address)
    finally:
        os.umask(before)
    assert lease.path.stat().st_mode & 0o777 == 0o644
    assert folder.stat().st_mode & 0o7777 == 0o1777
    lease.release()


def test_a_gpu_has_one_holder_whatever_the_back_end(gpu):
    lease = take(REAL, "first")
    said = rf"job first \(guard {os.getpid()}, uid {os.geteuid()}\) holds the GPU {REAL.uid}"
    with pytest.raises(LeaseHeldError, match=said):
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


def _contend(address, results, wins, stop):
    while not stop.is_set():
        try:
            lease = take(address)
        except LeaseHeldError:
            continue
        with wins.get_lock():
            wins.value += 1
            alone = wins.value - results.value == 1
        if not alone:
            os._exit(1)
        with wins.get_lock():
            results.value += 1
        lease.release()


def test_takers_exclude_each_other(gpu):
    context = multiprocessing.get_context("fork")
    ended, begun, stop = context.Value("i", 0), context.Value("i", 0), context.Event()
    processes = [
        context.Process(target=_contend, args=(gpu.address, ended, begun, stop)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    while begun.value < 300 and all(process.is_alive() for process in processes):
        list_leases()  # a mere look takes nothing from anybody
    stop.set()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert list_leases() == []


def test_whoever_is_second_finds_the_first_however_close(gpu, monkeypatch):
    create, first = lease_file.LeaseFile.create, []

    def late(*arguments):
        monkeypatch.setattr(lease_file.LeaseFile, "create", create)
        first.append(take(gpu.address, "first"))
        return create(*arguments)

    monkeypatch.setattr(lease_file.LeaseFile, "create", late)
    with pytest.raises(LeaseHeldError, match="job first"):
        take(gpu.address, "second")
    first[0].release()


# --- stale leases --------------------------------------------------------------------------------


def test_a_stale_lease_is_reset_before_it_is_taken_over(gpu):
    left_by_a_dead_guard(gpu.address, dead())
    gpu.lock_frequency(1200)
    lease = take(gpu.address, "next")
    assert gpu.requested_frequency_mhz is None
    (record,) = list_leases()
    assert (record.job, record.live) == ("next", True)
    lease.release()


def test_a_lease_whose_gpu_cannot_be_reset_is_kept(gpu):
    left_by_a_dead_guard(gpu.address, dead())
    with pytest.raises(GpuError, match="driver is busy"):
        take(gpu.address, "next", open_gpu=FakeGpu(failures=1))
    with pytest.raises(GpuError, match="driver is busy"):
        undo_stale(FakeGpu(failures=1))
    (record,) = list_leases()
    assert record.job == "dead job"
    assert undo_stale(open_gpu) == [gpu.address]


def test_while_its_rank_lives_a_stale_lease_stays_and_its_gpu_is_reset(gpu):
    rank = subprocess.Popen(["sleep", "60"])
    record = left_by_a_dead_guard(gpu.address, ProcessIdentity.of(rank.pid))
    assert not record.live
    gpu.lock_frequency(1200)
    assert undo_stale(open_gpu) == []
    assert gpu.requested_frequency_mhz is None  # though the rank may lock it again
    once = FakeGpu()
    once.late_request_s = 1e-3
    assert undo_stale(once) == []
    assert once.resets == 1  # no request of the dead is under way
    with pytest.raises(LeaseHeldError, match="still uses, without a guard, the GPU"):
        take(gpu.address, "next")
    assert undo_lease(record, once, gave_up=True)  # it said that it will not
    assert (once.resets, list_leases()) == (2, [])
    left_by_a_dead_guard(gpu.address, ProcessIdentity.of(rank.pid))
    rank.kill()
    rank.wait()
    assert undo_stale(open_gpu) == [gpu.address]
    assert list_leases() == []


def test_the_lease_of_another_job_in_its_place_is_not_undone(gpu):
    former = left_by_a_dead_guard(gpu.address, dead(), "former")
    former.path.unlink()
    left_by_a_dead_guard(gpu.address, dead(), "later")
    fake = FakeGpu()
    assert not undo_lease(former, fake)
    assert (fake.resets, [record.job for record in list_leases()]) == (0, ["later"])


def test_a_lease_that_goes_while_leases_are_listed_is_none(gpu, monkeypatch):
    lease, open_file = take(gpu.address), lease_file.LeaseFile.open

    def late(folder, name):
        lease.path.unlink()
        return open_file(folder, name)

    monkeypatch.setattr(lease_file.LeaseFile, "open", late)
    assert list_leases() == []
    monkeypatch.undo()


@pytest.mark.parametrize("namespace", [None, 1])
def test_a_lease_lives_as_long_as_it_is_locked(gpu, namespace):
    """Whether its guard can be seen from here or not."""
    lease = take(gpu.address)
    if namespace:
        document = json.loads(lease.path.read_text())
        document["guard"]["pid_namespace"] = document["rank"]["pid_namespace"] = namespace
        lease.path.write_text(json.dumps(document))
    assert list_leases()[0].live
    lease.abandon()
    assert not list_leases()[0].live
    taken = take(gpu.address)
    assert (list_leases()[0].guard, list_leases()[0].live) == (me(), True)
    taken.release()


def test_a_rank_that_nobody_can_see_is_not_waited_for(gpu):
    Lease.take(gpu.address, "job", rank=None, open_gpu=open_gpu).abandon()
    (record,) = list_leases()
    assert (record.rank, record.rank_is_alive()) == (None, False)
    assert undo_stale(open_gpu) == [gpu.address]


def test_a_lease_that_is_being_written_is_not_undone(gpu):
    record = left_by_a_dead_guard(gpu.address, dead())
    record.path.write_bytes(b"")
    assert not undo_lease(record, open_gpu)
    assert record.path.exists()


def test_live_leases_are_left_alone(gpu):
    lease = take(gpu.address)
    gpu.lock_frequency(1200)
    (record,) = list_leases()
    assert undo_stale(open_gpu) == []
    assert not undo_lease(record, open_gpu)
    assert gpu.requested_frequency_mhz == 1200
    lease.release()


def test_requests_of_the_dead_that_may_be_under_way_are_waited_for(gpu, monkeypatch):
    left_by_a_dead_guard(gpu.address, dead())
    fake, resets = FakeGpu(), []
    fake.late_request_s = 7.0
    clock = Clock(monkeypatch, lambda: resets.append(fake.resets))
    assert undo_stale(fake) == [gpu.address]
    assert (resets, fake.resets, clock.now_s) == ([1], 2, 1007.0)


def test_other_gpus_that_are_held_keep_no_lease_from_being_undone(gpu):
    lease = take(gpu.address)
    left_by_a_dead_guard(REAL, dead())
    assert undo_stale(FakeGpu()) == [REAL]
    left_by_a_dead_guard(REAL, dead())
    take(REAL, open_gpu=FakeGpu()).release()
    lease.release()


def test_a_rank_that_takes_its_own_lease_again_has_no_late_requests(gpu):
    fake = FakeGpu()
    fake.late_request_s = 1e-3
    left_by_a_dead_guard(gpu.address, me())
    take(gpu.address, rank=me(), open_gpu=fake).release()
    assert fake.resets == 1
    left_by_a_dead_guard(gpu.address, dead())
    take(gpu.address, rank=me(), open_gpu=fake).release()
    assert fake.resets == 3


@pytest.mark.parametrize("content", [b"", b'{"format": "envpipe-le'])
def test_a_lease_that_was_cut_short_is_in_nobodys_way(folder, gpu, content):
    take(gpu.address).release()
    (folder / lease_name(gpu.address)).write_bytes(content)
    assert list_leases() == []
    take(gpu.address).release()


def test_a_lease_of_a_later_version_is_not_deleted(folder, gpu):
    take(gpu.address).release()
    path = folder / lease_name(gpu.address)
    path.write_text('{"format": "envpipe-lease/2"}')
    with pytest.raises(GpuError, match=r"unknown format.*envpipe-lease/2"):
        take(gpu.address)
    assert path.exists()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("[" * 60_000, id="deep"),
        '{"pid": 1e400}',
        '{"pid": 2147483648}',
        '{"pid": -1}',
        '{"start_ticks": 1e400}',
    ],
)
def test_whatever_somebody_writes_into_a_lease_the_others_are_found(folder, gpu, content):
    lease = take(gpu.address)
    if content.startswith("{"):
        document = json.loads(lease.path.read_text())
        guard = {**document["guard"], **json.loads(content)}
        address = {"backend": REAL.backend, "uid": REAL.uid}
        content = json.dumps({**document, "address": address, "guard": guard})
    (folder / lease_name(REAL)).write_text(content)
    assert [record.address for record in list_leases()] == [gpu.address]
    with pytest.raises(GpuError):
        take(REAL)
    lease.release()


def test_a_jobs_name_harms_no_terminal(gpu):
    lease = take(gpu.address, "job \x1b[2J\ud800")
    assert list_leases()[0].job == "job ?[2J?"
    lease.release()


def test_whoever_keeps_a_dead_guards_lease_locked_does_not_keep_the_clock_locked(gpu):
    record = left_by_a_dead_guard(gpu.address, dead())
    gpu.lock_frequency(1200)
    with record.path.open() as file:  # any user may read it, which is enough to lock it
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not list_leases()[0].live
        take(gpu.address, patience_s=0.01).release()
    assert gpu.requested_frequency_mhz is None


def test_where_leases_cannot_be_locked_this_is_said(gpu, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.EBADF, "Bad file descriptor")  # as on NFS for one opened for reading

    lease = take(gpu.address)
    monkeypatch.setattr(lease_file.fcntl, "flock", flock)
    with pytest.raises(LeaseFolderError, match=r"cannot be locked.*disk of this machine"):
        take(gpu.address)
    monkeypatch.undo()
    lease.release()


@pytest.mark.parametrize("pid", [1, 2**31 - 1])
def test_every_number_that_a_process_may_have_is_one(gpu, pid):
    lease = take(gpu.address)
    document = json.loads(lease.path.read_text())
    document["guard"]["pid"] = pid
    lease.path.write_text(json.dumps(document))
    assert [record.guard.pid for record in list_leases()] == [pid]
    lease.release()


@pytest.mark.parametrize(
    "change", [{"address": "x"}, {"guard": 3}, {"rank": []}, {"rank": "me"}, {"job": None}]
)
def test_wrong_fields_are_named_and_nothing_is_done(folder, gpu, change):
    lease = take(gpu.address)
    document = json.loads(lease.path.read_text())
    lease.release()
    path = folder / lease_name(gpu.address)
    path.write_text(json.dumps({**document, **change}))
    if "job" in change:  # any text is a name
        assert list_leases()[0].job == "None"
        return
    with pytest.raises(GpuError):
        take(gpu.address)
    assert path.exists()


@pytest.mark.parametrize("fits", [None, 1])
def test_no_room_for_a_lease(folder, gpu, monkeypatch, fits):
    def full(descriptor, content):
        if fits is None:
            raise OSError(28, "No space left on device")
        return len(content) - fits

    before = open_files()
    monkeypatch.setattr(lease_file.os, "write", full)
    said = "No space left on device" if fits is None else "no space for a whole lease"
    with pytest.raises(LeaseFolderError, match=f"cannot be written: {said}"):
        take(gpu.address)
    assert list(folder.iterdir()) == []
    assert open_files() <= before


def test_a_lease_that_cannot_be_deleted_is_left_for_others_to_undo(gpu, monkeypatch):
    before = open_files()
    lease = take(gpu.address)

    def unlink(name, dir_fd):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(lease_file.os, "unlink", unlink)
    with pytest.raises(LeaseFolderError, match=r"could not be deleted: Operation.*owner or root"):
        lease.release()
    assert open_files() <= before
    (record,) = list_leases()
    with pytest.raises(LeaseFolderError, match="could not be deleted"):
        undo_lease(record, open_gpu, gave_up=True)
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
        pytest.param({}, {}, 0.2, LeaseHeldError, id="a job that lives"),
        pytest.param({}, {"start_ticks": 1}, 5.0, LeaseHeldError, id="its rank has ended"),
        pytest.param({"start_ticks": 1}, None, 5.0, None, id="somebody undoes it"),
        pytest.param({"pid_namespace": 1}, {}, 0.2, LeaseHeldError, id="a guard out of sight"),
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
    if error is None:
        take(gpu.address, rank=later, patience_s=5.0).release()
    else:
        with pytest.raises(error):
            take(gpu.address, rank=later, patience_s=5.0)
    assert clock.now_s - begin_s == pytest.approx(waits_s, abs=0.03)
    monkeypatch.undo()
    lease.release()


def test_a_lease_that_is_released_meanwhile_is_taken(gpu, monkeypatch):
    lease = take(gpu.address, rank=dead())
    Clock(monkeypatch, lease.release)
    take(gpu.address, patience_s=1.0).release()


def test_an_empty_lease_is_never_taken_for_stale_at_once(folder, gpu, monkeypatch):
    """A mere look locks it for a moment."""
    take(gpu.address).release()
    path = folder / lease_name(gpu.address)
    path.touch()
    with path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        clock = Clock(monkeypatch)
        with pytest.raises(GpuError, match=f"locked that is empty.*{path.name}"):
            take(gpu.address, patience_s=0.0)
        assert clock.now_s == pytest.approx(1000.2, abs=0.03)
        Clock(monkeypatch, looking.close)
        take(gpu.address, patience_s=0.0).release()


def test_who_undoes_a_lease_waits_for_those_who_look_at_it(gpu, monkeypatch):
    record = left_by_a_dead_guard(gpu.address, dead())
    fake = FakeGpu()
    with record.path.open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        clock = Clock(monkeypatch)
        assert not undo_lease(record, fake)
        assert clock.now_s == pytest.approx(1000.2, abs=0.03)
        Clock(monkeypatch, looking.close)
        assert undo_lease(record, fake)
    assert (fake.resets, list_leases()) == (1, [])


def test_a_lease_that_somebody_locks_before_its_maker_is_made_anew(folder, gpu, monkeypatch):
    take(gpu.address).release()
    looking = []

    def look():
        looking.append((folder / lease_name(gpu.address)).open())
        fcntl.flock(looking[0], fcntl.LOCK_SH)

    before_the_next_lock(monkeypatch, look)
    Clock(monkeypatch, lambda: looking[0].close())
    lease = take(gpu.address)
    assert [record.live for record in list_leases()] == [True]
    lease.release()


def before_the_next_lock(monkeypatch, do):
    """Do something between the opening of a lease and its lock."""
    try_lock = lease_file.LeaseFile.try_lock

    def late(file):
        monkeypatch.setattr(lease_file.LeaseFile, "try_lock", try_lock)
        do()
        return try_lock(file)

    monkeypatch.setattr(lease_file.LeaseFile, "try_lock", late)


def test_a_lease_that_somebody_deleted_before_it_was_locked_is_made_anew(gpu, monkeypatch):
    """Who finds it without lock and content takes it for one cut short."""
    before_the_next_lock(monkeypatch, lambda: [p.unlink() for p in new_lease_folder().iterdir()])
    lease = take(gpu.address)
    assert [record.address for record in list_leases() if record.live] == [gpu.address]
    lease.release()


def test_a_lease_that_is_released_while_it_is_looked_at_is_in_nobodys_way(gpu, monkeypatch):
    before_the_next_lock(monkeypatch, take(gpu.address).release)
    fake = FakeGpu()
    take(gpu.address, rank=dead(), open_gpu=fake).release()
    assert fake.resets == 0


# --- whom to trust -------------------------------------------------------------------------------


def test_a_planted_link_is_not_followed(folder, gpu, tmp_path):
    take(gpu.address).release()
    treasure = tmp_path / "treasure"
    treasure.write_text("gold")
    (folder / lease_name(gpu.address)).symlink_to(treasure)
    with pytest.raises(LeaseFolderError, match="not a regular file"):
        take(gpu.address)
    assert list_leases() == []
    assert undo_stale(open_gpu) == []
    assert treasure.read_text() == "gold"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_blocks_nobody(folder, gpu, make):
    take(gpu.address).release()
    make(folder / lease_name(gpu.address))
    with pytest.raises(LeaseFolderError, match="not a regular file"):
        take(gpu.address)
    assert list_leases() == []


@pytest.mark.parametrize(("make", "said"), [(os.mkfifo, "not a regular"), (None, "cannot be read")])
def test_what_takes_a_leases_place_in_the_last_moment_is_not_opened(
    folder, gpu, tmp_path, monkeypatch, make, said
):
    take(gpu.address).release()
    plain = Path(__file__).stat()
    make = make or (lambda path: path.symlink_to(__file__))
    make(folder / lease_name(gpu.address))
    monkeypatch.setattr(lease_file.os, "lstat", lambda *_, **__: plain)
    before = open_files()
    with pytest.raises(LeaseFolderError, match=said):
        take(gpu.address)
    assert open_files() <= before


def test_a_folder_that_is_none_is_refused(folder, gpu):
    folder.write_text("")
    with pytest.raises(LeaseFolderError, match="cannot be used: Not a directory"):
        list_leases()


def test_a_folder_that_cannot_be_made_is_said(folder, gpu, monkeypatch):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(folder / "deeper"))
    with pytest.raises(LeaseFolderError, match=f"cannot be made: No such file.*{folder}/deeper"):
        take(gpu.address)


def test_looking_and_releasing_make_no_folder(folder, gpu):
    assert list_leases() == []
    assert not folder.exists()
    lease = take(gpu.address)
    shutil.rmtree(folder)
    lease.release()
    assert not folder.exists()


def test_a_link_in_place_of_the_folder_is_refused(folder, gpu, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    for attempt in (lambda: take(gpu.address), list_leases):
        with pytest.raises(LeaseFolderError, match="cannot be used"):
            attempt()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_in_which_others_may_delete_is_refused(folder, gpu, mode):
    folder.mkdir()
    folder.chmod(mode)
    for attempt in (lambda: take(gpu.address), list_leases, lambda: undo_stale(open_gpu)):
        with pytest.raises(LeaseFolderError, match=r"not sticky.*chmod \+t"):
            attempt()


@needs_root
def test_a_strangers_folder_is_refused(folder, gpu):
    folder.mkdir()
    folder.chmod(0o1777)
    os.chown(folder, 12345, 12345)
    with pytest.raises(LeaseFolderError, match=r"stranger.*12345"):
        take(gpu.address)


@pytest.mark.skipif(os.geteuid() == 0, reason="root's folder is trusted by everybody")
def test_a_strangers_folder_is_refused_by_any_user(folder, gpu, monkeypatch):
    take(gpu.address).release()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(LeaseFolderError, match="stranger"):
        take(gpu.address)


@needs_root
def test_root_does_not_write_where_another_users_lease_says(folder, gpu):
    record = left_by_a_dead_guard(gpu.address, dead(), "planted")
    os.chown(record.path, 12345, 12345)
    gpu.lock_frequency(1200)
    for attempt in (lambda: undo_stale(open_gpu), lambda: take(gpu.address)):
        with pytest.raises(GpuError, match="another user"):
            attempt()
    assert gpu.requested_frequency_mhz == 1200


@needs_root
def test_root_undoes_other_users_leases_of_real_gpus(folder):
    record = left_by_a_dead_guard(REAL, dead())
    os.chown(record.path, 12345, 12345)
    fake = FakeGpu()
    assert undo_stale(fake) == [REAL]
    assert fake.resets == 1


def test_another_users_stale_lease_is_in_the_way(folder, gpu, monkeypatch):
    record = left_by_a_dead_guard(REAL, dead())
    monkeypatch.setattr(lease_module.os, "geteuid", lambda: 4321)
    monkeypatch.setattr(lease_file, "_refuse_unsafe", lambda path, status: None)
    fake = FakeGpu()
    with pytest.raises(LeaseHeldError, match=r"dead job.*another user.*root run"):
        take(REAL, open_gpu=fake)
    assert fake.resets == 0
    assert record.path.exists()


def test_a_lease_under_another_gpus_name_is_ignored(folder, gpu):
    record = left_by_a_dead_guard(gpu.address, dead())
    record.path.rename(folder / lease_name(REAL))
    fake = FakeGpu()
    assert undo_stale(fake) == []
    assert fake.resets == 0


# --- where leases lie ----------------------------------------------------------------------------


def folders():
    with opened_lease_folders() as found:
        return [path for path, _ in found]


@pytest.fixture
def defaults(tmp_path, monkeypatch):
    """Without the variable: stand-ins for /run/envpipe/leases, not made, and /tmp."""
    monkeypatch.delenv(LEASE_DIR_VARIABLE)
    shared, own = tmp_path / "run" / "envpipe" / "leases", tmp_path / "tmp"
    own.mkdir()
    shared.parents[1].mkdir()
    monkeypatch.setattr(lease_file, "SHARED_FOLDER", shared)
    monkeypatch.setattr(lease_file, "OWN_FOLDERS", own)
    return shared, own


def be(monkeypatch, uid):
    monkeypatch.setattr(lease_file.os, "geteuid", lambda: uid)


def test_folders_without_the_variable(defaults, monkeypatch):
    shared, own = defaults
    me, other = os.geteuid(), os.geteuid() + 1
    monkeypatch.setattr(lease_file.os, "access", lambda *_: False)
    assert new_lease_folder() == own / f"envpipe-leases-{me}"
    (own / f"envpipe-leases-{me}").mkdir()
    (own / f"envpipe-leases-{other}").mkdir()
    if me != 0:  # root looks at all
        assert folders() == [own / f"envpipe-leases-{me}"]
        shared.mkdir(parents=True)  # root did; what lies in the own one is still found
        assert folders() == [shared, own / f"envpipe-leases-{me}"]


@needs_root
def test_a_users_folders(defaults, monkeypatch):
    """Those that root has made are trusted by everybody."""
    shared, own = defaults
    be(monkeypatch, 2000)
    theirs = own / "envpipe-leases-2000"
    for path in (theirs, own / "envpipe-leases-2001"):
        path.mkdir()
    assert new_lease_folder() == theirs
    assert folders() == [theirs]
    shared.mkdir(parents=True)
    assert new_lease_folder() == shared
    assert folders() == [shared, theirs]
    os.chown(theirs, 1, 1)
    assert folders() == [shared]
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(own / "envpipe-leases-2001"))
    os.chown(theirs, 2000, 2000)
    assert folders() == [own / "envpipe-leases-2001"]


@needs_root
def test_root_finds_the_folders_of_all_users(defaults, monkeypatch):
    shared, own = defaults
    assert new_lease_folder() == shared
    assert folders() == []
    theirs = own / "envpipe-leases-2000"
    theirs.mkdir()
    os.chown(theirs, 2000, 2000)
    shared.mkdir(parents=True)
    assert folders() == [shared, theirs]


@needs_root
def test_a_user_cannot_keep_root_from_leases_by_a_folder_of_such_a_name(defaults):
    shared, own = defaults
    lease = take(REAL)
    for name in ("envpipe-leases-x", "envpipe-leases-0", "envpipe-leases-77"):
        (own / name).mkdir()
        os.chown(own / name, 12345, 12345)
    (own / "envpipe-leases-5").symlink_to(own)
    assert folders() == [shared]
    assert [record.address for record in list_leases()] == [REAL]
    lease.release()


@needs_root
@pytest.mark.parametrize("planted_first", [True, False])
def test_a_stale_lease_beside_a_live_one_resets_nothing(defaults, planted_first):
    """Any user may write one, and wait for root to undo it while a job holds the GPU."""
    _, own = defaults
    record = left_by_a_dead_guard(REAL, dead(), "planted")
    planted = record.path.read_bytes()
    record.path.unlink()
    lease = take(REAL, "live")
    (own / "envpipe-leases-0").mkdir()
    there = own / "envpipe-leases-0" / lease.path.name
    if planted_first:
        lease.path.rename(there)
        lease.path.write_bytes(planted)
    else:
        there.write_bytes(planted)
    fake = FakeGpu()
    assert undo_stale(fake) == []
    with pytest.raises(LeaseHeldError, match="job live"):
        take(REAL, "next", open_gpu=fake)
    assert fake.resets == 0


@needs_root
def test_stale_leases_of_one_gpu_in_two_folders_are_both_undone(defaults):
    _, own = defaults
    record = left_by_a_dead_guard(REAL, dead())
    (own / "envpipe-leases-0").mkdir()
    shutil.copy(record.path, own / "envpipe-leases-0")
    assert undo_stale(FakeGpu()) == [REAL, REAL]
    assert list_leases() == []


@pytest.mark.parametrize("umask", [0o077, 0])
def test_whoever_makes_the_shared_folder_others_can_use_it(defaults, umask, monkeypatch):
    shared, own = defaults
    before = os.umask(umask)
    chmod, at_first = Path.chmod, []

    def note(path, mode):
        at_first.append(path.stat().st_mode & 0o7777)
        chmod(path, mode)

    monkeypatch.setattr(Path, "chmod", note)
    try:
        with lease_file.opened_folder(shared, create=True):
            pass
        with lease_file.opened_folder(own / f"envpipe-leases-{os.geteuid()}", create=True):
            pass
    finally:
        os.umask(before)
    modes = [p.stat().st_mode & 0o7777 for p in (shared.parent, shared, next(own.iterdir()))]
    assert modes == [0o755, 0o1777, 0o755]
    assert at_first == [0o700] * 3  # nobody puts anything there before it is sticky


def test_a_shared_folder_that_cannot_be_reached_is_none(defaults):
    shared, own = defaults
    shared.mkdir(parents=True)
    shared.parent.chmod(0)
    before = os.geteuid()
    try:
        if before == 0:  # who may look everywhere
            os.seteuid(12345)
        assert new_lease_folder() == own / f"envpipe-leases-{os.geteuid()}"
    finally:
        os.seteuid(before)
        shared.parent.chmod(0o755)


def test_leases_made_before_root_made_the_shared_folder_count(defaults, gpu, monkeypatch):
    shared, own = defaults
    monkeypatch.setattr(lease_file.os, "access", lambda *_: False)
    first = take(gpu.address)
    assert first.path.parent == own / f"envpipe-leases-{os.geteuid()}"
    shared.mkdir(parents=True)
    shared.chmod(0o1777)
    with pytest.raises(LeaseHeldError):
        take(gpu.address)
    first.release()
