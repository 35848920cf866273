"""Folders of leases: where they are, who is trusted with them; nothing planted is followed."""

import os
import shutil
from pathlib import Path

import pytest
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

from envpipe_megatron.gpu import site
from envpipe_megatron.gpu.base import GpuError
from envpipe_megatron.gpu.guard import lease as lease_module
from envpipe_megatron.gpu.guard import lease_file
from envpipe_megatron.gpu.guard.lease import list_leases
from envpipe_megatron.gpu.guard.lease_file import (
    LEASE_DIR_VARIABLE,
    LeaseFolderError,
    lease_folders,
    lease_name,
    new_lease_folder,
)
from envpipe_megatron.gpu.registry import open_gpu

__all__ = ["folder", "gpu"]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(__file__)])
def test_what_is_no_file_is_not_opened_and_blocks_nobody(folder, gpu, make):
    take(gpu.address).release()
    make(folder / lease_name(gpu.address))
    with pytest.raises(LeaseFolderError, match=r"not a regular file|symbolic links"):
        take(gpu.address)
    assert list_leases() == []
    assert undo_stale(open_gpu) == []


@pytest.mark.parametrize(
    "make", [lambda path: path.write_text(""), lambda path: path.symlink_to(path.parent)]
)
def test_what_is_no_folder_is_refused(folder, gpu, make):
    make(folder)
    for attempt in (lambda: take(gpu.address), list_leases):
        with pytest.raises(LeaseFolderError, match="cannot be used: it is none"):
            attempt()


def test_a_folder_that_cannot_be_made_is_said(folder, gpu, monkeypatch):
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(folder / "deeper"))
    with pytest.raises(LeaseFolderError, match=f"cannot be made: No such file.*{folder}/deeper"):
        take(gpu.address)


def test_a_folder_that_cannot_be_listed_is_said(folder, gpu, monkeypatch):
    left_by_a_dead_guard(gpu.address, None)

    def none(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", none)
    for attempt in (lambda: take(gpu.address), list_leases):  # a GpuError ends no training
        with pytest.raises(LeaseFolderError, match=f"cannot be listed: Permission.*{folder}"):
            attempt()


def test_looking_and_releasing_make_no_folder(folder, gpu):
    assert list_leases() == []
    assert not folder.exists()
    lease = take(gpu.address)
    shutil.rmtree(folder)
    lease.release()
    assert not folder.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_in_which_others_may_delete_is_refused(folder, gpu, mode):
    folder.mkdir()
    folder.chmod(mode)
    for attempt in (lambda: take(gpu.address), list_leases, lambda: undo_stale(open_gpu)):
        with pytest.raises(LeaseFolderError, match=r"not sticky.*chmod \+t"):
            attempt()


def test_a_strangers_folder_is_refused(folder, gpu, monkeypatch):
    take(gpu.address).release()
    if os.geteuid() == 0:  # whose folder is trusted by everybody
        os.chown(folder, 12345, 12345)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(LeaseFolderError, match="stranger"):
        take(gpu.address)


@needs_root
@pytest.mark.parametrize("inside", [True, False])
def test_in_a_user_namespace_the_folder_of_the_machines_root_is_trusted(
    folder, gpu, monkeypatch, inside
):
    """It shows as nobody's, as where it is mounted into a rootless container."""
    monkeypatch.setattr(site, "in_user_namespace", lambda: inside)
    monkeypatch.setattr(lease_file, "OWN_FOLDERS", folder.parent)
    folder.mkdir()
    folder.chmod(0o1777)
    of_a_user = folder.parent / "envpipe-leases-54321"
    of_a_user.mkdir(mode=0o700)
    for path in (folder, of_a_user):
        os.chown(path, 65534, 65534)
    if inside:
        take(gpu.address).release()
    else:
        with pytest.raises(LeaseFolderError, match="stranger"):
            take(gpu.address)
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(of_a_user))
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
    monkeypatch.setattr(lease_file, "_refuse_unsafe", lambda path: None)
    fake = FakeGpu()
    with pytest.raises(GpuError, match=r"dead job.*another user.*root run"):
        take(REAL, open_gpu=fake)
    assert fake.resets == 0
    assert record.path.exists()


# --- where leases lie ----------------------------------------------------------------------------


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


@needs_root
def test_a_users_folders(defaults, monkeypatch):
    """Those that root has made are trusted by everybody."""
    shared, own = defaults
    theirs = own / "envpipe-leases-2000"
    for path in (theirs, own / "envpipe-leases-2001"):
        path.mkdir()
    assert {*lease_folders()} == {*own.iterdir()}, "root looks at all, as an epilogue must"
    be(monkeypatch, 2000)
    assert new_lease_folder() == theirs
    assert lease_folders() == [theirs]
    shared.mkdir(parents=True)
    assert new_lease_folder() == shared
    assert lease_folders() == [shared, theirs]
    os.chown(theirs, 1, 1)
    assert lease_folders() == [shared]
    monkeypatch.setenv(LEASE_DIR_VARIABLE, str(own / "envpipe-leases-2001"))
    os.chown(theirs, 2000, 2000)
    assert lease_folders() == [own / "envpipe-leases-2001"]


@needs_root
def test_a_user_cannot_keep_root_from_leases_by_a_folder_of_such_a_name(defaults):
    shared, own = defaults
    lease = take(REAL)
    for name in ("envpipe-leases-x", "envpipe-leases-0", "envpipe-leases-77"):
        (own / name).mkdir()
        os.chown(own / name, 12345, 12345)
    (own / "envpipe-leases-5").symlink_to(own)
    assert lease_folders() == [shared]
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
    for attempt in (lambda: undo_stale(fake), lambda: take(REAL, "next", open_gpu=fake)):
        with pytest.raises(GpuError, match="job live"):
            attempt()
    assert fake.resets == 0


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
        for path in (shared, own / f"envpipe-leases-{os.geteuid()}"):
            monkeypatch.setattr(lease_file, "new_lease_folder", lambda path=path: path)
            lease_folders(create=True)
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
    with pytest.raises(GpuError):
        take(gpu.address)
    first.release()
