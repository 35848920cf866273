"""Leases: which process may have locked the clock of which GPU, written where everybody finds it.

A lease is a file, one for each GPU. The rule that makes clocks come back: **it is there from before
the first lock until after a reset that follows the last.** Only the guard that made it locks its
GPU. So a GPU without a lease has no lock of ours, and a lease whose guard has died is *stale*: it
says what to undo, nobody can lock by it any more, and anybody of its user may undo it at any time.

A guard holds a `flock` on its lease as long as it lives; the kernel drops the `flock` however the
guard dies, which is seen in every PID namespace. Who undoes a lease holds it meanwhile.
"""

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.lease_file import (
    LEASE_DIR_VARIABLE,
    LEASE_SUFFIX,
    PATH_BACKENDS,
    LeaseFolderError,
    LeaseRecord,
    lease_content,
    lease_folders,
    lease_name,
    parse_lease,
    reported,
)
from envpipe_megatron.gpu.guard.messages import ProcessIdentity

_LOG = logging.getLogger(__name__)

OpenGpu = Callable[[GpuAddress], Gpu]

_PATIENCE_S = 60.0  # longer than the requests of a dead process last
_LOOK_S = 0.2  # longer than a reader's shared file lock lasts
_POLL_S = 0.02
_MAX_BYTES = 64 * 1024
_YOUNG_S = 3600.0


class Lease:
    """An opened lease; `take` makes one that this process holds.

    Its `flock` belongs to this opened file: it ends with `close` or with the process.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(
        cls,
        address: GpuAddress,
        job: str,
        *,
        rank: ProcessIdentity | None,
        open_gpu: OpenGpu,
        clocks_mhz: Sequence[int] = (),
    ) -> Self:
        """Take the lease of a GPU; undo a stale one first.

        Waits up to a minute while its guard, or somebody else, undoes an old one, or resets the
        GPU. Raises LeaseFolderError if the folder is missing or unsafe, GpuError if a live job
        holds it, another user's stale lease is in the way, the file there is no lease, or its GPU
        could not be reset (the file then stays). `clocks_mhz` are for its mark.
        """
        content = lease_content(address, job, rank, clocks_mhz)
        paths = [folder / lease_name(address) for folder in lease_folders(create=True)]
        lease = None
        while lease is None:
            for path in paths:
                _clear_the_way(path, open_gpu)
            lease = cls._create(paths[0], content)
        return lease

    @classmethod
    def _create(cls, path: Path, content: bytes) -> Self | None:
        """Create, lock and write a file; return None if another process was faster."""
        remedy = f"Make room there, or set {LEASE_DIR_VARIABLE} to another folder"
        with reported("A lease cannot be written", path, remedy):
            # An existing file is never opened for writing: in a sticky folder, the kernel refuses
            # another user's file with another error (fs.protected_regular).
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                lease = cls(path, os.open(path, flags, 0o644))
            except FileExistsError:
                return None
            try:
                # For any umask: other users must see who holds the GPU.
                os.fchmod(lease._descriptor, 0o644)
                # Another process that finds it before it is locked takes it for cut short.
                if lease.lock(0.0) and lease.is_current():
                    if os.write(lease._descriptor, content) == len(content):
                        return lease
                    raise OSError(errno.ENOSPC, "no space for a whole lease")
            except BaseException:
                lease.release()
                raise
            lease.close()
            return None

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """Open a file for reading; return None if there is none.

        Raises LeaseFolderError if it cannot be read, or is not a regular file.
        """
        with reported("A lease cannot be read", path, "Let its owner or root delete it"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return None
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return cls(path, descriptor)
        os.close(descriptor)
        raise LeaseFolderError(
            "Something that is not a regular file lies among the leases",
            value=str(path),
            remedy="Find out who put it there, and delete it",
        )

    def lock(self, wait_s: float = _LOOK_S, *, shared: bool = False) -> bool:
        """Take the `flock`; return False if another opened file has it all the time.

        With `shared`, to see whether it is taken, two readers at the same time do not exclude each
        other. Raises LeaseFolderError if the file system has no such locks, as NFS has none for a
        file opened for reading.
        """
        remedy = f"Set {LEASE_DIR_VARIABLE} to a folder on a disk of this machine"
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        until_s = time.monotonic() + wait_s
        with reported("A lease file cannot be locked", self.path, remedy):
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
                    return True
                if time.monotonic() >= until_s:
                    return False
                time.sleep(_POLL_S)

    def is_current(self) -> bool:
        """Return whether the name still means this file in its folder."""
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def keep(self) -> bool:
        """Return whether its name still means it, and have clean-ups of old files find it young."""
        if time.time() - os.fstat(self._descriptor).st_mtime > _YOUNG_S:
            os.utime(self._descriptor)
        return self.is_current()

    def read(self) -> LeaseRecord | None:
        """Return what the lease says, by `parse_lease`, whether its guard lives or not."""
        content = os.pread(self._descriptor, _MAX_BYTES, 0)
        return parse_lease(content, self.path, os.fstat(self._descriptor).st_uid)

    def undo(self, open_gpu: OpenGpu) -> None:
        """Reset the GPU of a stale lease that this process has locked, and delete the file.

        The GPU is reset twice, `late_request_s` apart, since a rank's guard may have been killed in
        a request. Raises GpuError if the GPU could not be reset, a job holds it by a lease in
        another folder, or this lease is another user's; it then stays.
        """
        record = self.read()
        if record is not None:  # else its guard had not promised anything to a rank yet
            _refuse_strangers(record)
            # A stale lease elsewhere is ignored: its owner may have put it there.
            for other in list_leases():
                if other.live and other.path.name == self.path.name and other.path != self.path:
                    raise _held(other, "holds the GPU")
            gpu = open_gpu(record.address)
            gpu.reset_frequency()
            if record.rank is not None and gpu.late_request_s > 0:
                time.sleep(gpu.late_request_s)
                gpu.reset_frequency()
        self.unlink()

    def release(self) -> None:
        """Delete the lease. The GPU must have been reset, with nobody left who could lock it.

        Raises LeaseFolderError if the file could not be deleted.
        """
        with closing(self):
            self.unlink()

    def unlink(self) -> None:
        """Delete the file if the name still means it; LeaseFolderError if that fails."""
        remedy = "Let its owner or root delete it"
        with (
            reported("A lease could not be deleted", self.path, remedy),
            suppress(FileNotFoundError),
        ):
            # Where root deletes, the folder's owner may put another in its place meanwhile.
            folder = os.open(self.path.parent, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                there = os.lstat(self.path.name, dir_fd=folder)
                if os.path.samestat(there, os.fstat(self._descriptor)):
                    os.unlink(self.path.name, dir_fd=folder)
            finally:
                os.close(folder)

    def close(self) -> None:
        """Leave it for others to undo."""
        # Unlocked explicitly: a child forked meanwhile shares the opened file, and would keep the
        # lock as long as it lives.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def list_leases() -> list[LeaseRecord]:
    """Return all leases of this machine that concern this process, by name.

    Files that are no leases are left out. Raises LeaseFolderError if a folder is unsafe, or cannot
    be listed.
    """
    found, paths = [], list[Path]()
    for folder in lease_folders():
        with reported("Leases cannot be listed", folder, f"chmod +r {folder}"):
            paths += sorted(folder.iterdir())
    for path in paths:
        with suppress(GpuError, OSError):
            lease = Lease.open(path) if path.suffix == LEASE_SUFFIX else None
            if lease is None:
                continue
            with closing(lease):
                live = not lease.lock(0.0, shared=True)
                record = lease.read()
            if record is not None:  # another process than its guard may have locked it
                live = live and record.guard.is_alive() is not False
                found.append(replace(record, live=live))
    return found


def undo_lease(record: LeaseRecord, open_gpu: OpenGpu) -> bool:
    """Undo a stale lease; return whether this process did.

    It did not if its guard lives, or somebody else has undone it or is just doing that. Raises
    GpuError as `Lease.undo`.
    """
    lease = Lease.open(record.path)
    if lease is None:
        return False
    with closing(lease):
        if not lease.lock() or not lease.is_current():
            return False
        lease.undo(open_gpu)
        return True


def undo_stale_leases(first: GpuAddress, open_gpu: OpenGpu, said: set[str]) -> None:
    """Undo this user's stale leases, once; what fails is logged, if it was not `said` before.

    That of the GPU `first` comes first: the driver of another one may hang.
    """
    failures = set()
    try:
        stale = [r for r in list_leases() if not r.live and r.uid == os.geteuid()]
    except (GpuError, OSError) as error:
        stale, failures = [], {f"Leases cannot be seen: {error}"}
    for record in sorted(stale, key=lambda record: record.address != first):
        try:
            if undo_lease(record, open_gpu):
                _LOG.warning("%s: reset, since its guard had died", record.address.uid)
        except Exception as error:  # a driver may fail in any way
            failures.add(f"{record.address.uid}: not reset: {error}")
    for failure in failures - said:  # each time, it would fill a disk
        _LOG.error("%s", failure)
    said.clear()
    said.update(failures)


def _clear_the_way(path: Path, open_gpu: OpenGpu) -> None:
    """Return when there is no such lease; undo a stale one."""
    start_s = time.monotonic()
    while (lease := Lease.open(path)) is not None:
        with closing(lease):
            if not lease.lock():
                record = lease.read()
                if time.monotonic() - start_s < _worth_waiting_s(record):
                    continue
                if record is None:
                    raise GpuError("An empty lease is locked", value=str(path), remedy="Delete it")
                if record.guard.is_alive() is not False:
                    raise _held(record, "holds the GPU")
                # Undoing does not last this long, and whoever may read a lease can lock it.
            if lease.is_current():
                lease.undo(open_gpu)


def _worth_waiting_s(record: LeaseRecord | None) -> float:
    """Return how long to wait for a locked lease, s: long if its end is near."""
    being_written = record is None
    being_undone = record is not None and (
        record.guard.is_alive() is False
        or record.rank is None  # a reset, which ends by itself
        or record.rank.is_alive() is False
    )
    return _PATIENCE_S if being_written or being_undone else 0.0


def _refuse_strangers(record: LeaseRecord) -> None:
    """Refuse to undo what another user wrote, unless root can do so without trusting it."""
    if record.uid == os.geteuid():
        return
    # An emulated GPU's address is a path, and root must not write where another user says.
    if os.geteuid() == 0 and record.address.backend not in PATH_BACKENDS:
        return
    raise _held(record, "is another user's and left a stale lease on")


def _held(record: LeaseRecord, what: str) -> GpuError:
    return GpuError(
        f"job {record.job} (guard {record.guard.pid}, uid {record.uid}) {what} "
        f"{record.address.uid}",
        remedy="Wait for that job or end it; if its processes are gone, let its user or root run "
        "`envpipe clocks reset`. Ranks of one job need a GPU each",
    )
