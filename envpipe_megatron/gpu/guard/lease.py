"""Leases: who may have locked the clock of which GPU, written where everybody finds it.

A lease is a file, one for each GPU. The rule that makes clocks come back: **it is there from before
the first lock until after a reset that follows the last moment at which its rank could lock.** So a
GPU without a lease has no lock of ours, and a lease that nobody looks after says what to undo.

A guard holds a `flock` on its lease as long as it lives; the kernel drops the `flock` however the
guard dies, so "file-locked" means that somebody looks after the lease, in every PID namespace. A
lease that is not file-locked is stale: its guard died. Its rank may live on; then the rank itself
ends the lease (see `hold`), and nobody else may take it before.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Self

from envpipe_megatron.gpu.base import Gpu, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.lease_file import (
    LEASE_SUFFIX,
    PATH_BACKENDS,
    LeaseFile,
    LeaseRecord,
    lease_content,
    lease_name,
    new_lease_folder,
    opened_folder,
    opened_lease_folders,
    printable,
)
from envpipe_megatron.gpu.guard.messages import ProcessIdentity

_LOG = logging.getLogger(__name__)

OpenGpu = Callable[[GpuAddress], Gpu]

_PATIENCE_S = 60.0  # longer than the requests of a dead process last
_LOOK_S = 0.2  # longer than a reader's shared file lock lasts
_POLL_S = 0.02


class LeaseHeldError(GpuError):
    """A job holds the GPU."""


# --- taking, listing, undoing --------------------------------------------------------------------


class Lease:
    """A lease that this process holds; `take` makes it."""

    def __init__(self, file: LeaseFile) -> None:
        self.path = file.path
        self._file = file

    @classmethod
    def take(
        cls,
        address: GpuAddress,
        job: str,
        *,
        rank: ProcessIdentity | None,
        open_gpu: OpenGpu,
        patience_s: float = _PATIENCE_S,
    ) -> Self:
        """Take the lease of a GPU; undo a stale one first.

        Waits up to `patience_s` while its guard, or somebody else, undoes an old one, or resets the
        GPU. Raises LeaseHeldError if a live job holds it or another user's stale lease is in the
        way, LeaseFolderError if the folder is missing or unsafe, GpuError if the file there is no
        lease, or its GPU could not be reset (the file then stays).
        """
        name = lease_name(address)
        home = new_lease_folder()
        with opened_folder(home, create=True):
            pass
        while True:
            with opened_lease_folders() as folders:
                for path, folder in folders:
                    _clear_the_way(folder, path / name, rank, open_gpu, patience_s)
            with opened_folder(home) as folder:
                content = lease_content(address, job, rank)
                file = LeaseFile.create(folder, home / name, content)
            if file is not None:
                return cls(file)

    def release(self) -> None:
        """Delete the lease. The GPU must have been reset, with nobody left who could lock it.

        Raises LeaseFolderError if the file could not be deleted.
        """
        with closing(self._file):
            self._file.unlink()

    def abandon(self) -> None:
        """Leave the lease for others to undo."""
        self._file.close()


def list_leases() -> list[LeaseRecord]:
    """Return all leases of this machine that concern this process, by name.

    Files that are no leases are left out. Raises LeaseFolderError if a folder is unsafe.
    """
    found = []
    with opened_lease_folders() as folders:
        for path, folder in folders:
            names = [entry.name for entry in os.scandir(folder)]
            for name in sorted(name for name in names if name.endswith(LEASE_SUFFIX)):
                try:
                    record = _look_at(folder, path / name)
                except (GpuError, OSError):
                    continue
                if record is not None:
                    found.append(record)
    return found


def undo_lease(
    record: LeaseRecord, open_gpu: OpenGpu, *, gave_up: bool = False, late: bool = True
) -> bool:
    """Undo a stale lease: reset the GPU, then delete the file; return whether the lease is gone.

    The GPU is reset twice, `late_request_s` apart, if the back end's requests outlive their
    process, unless there can be none (not `late`). If its rank lives, the GPU is reset and the
    lease stays, as the rank may lock again, unless it `gave_up`. Also False if somebody else has
    the lease, or is just undoing it. Raises GpuError if the GPU could not be reset, or the lease is
    another user's; the lease then stays.
    """
    with opened_folder(record.path.parent) as folder:
        file = _open_and_lock(folder, record.path)
        if file is None:
            return False
        with closing(file):
            now = file.read()
            if now is None:
                return False
            if (now.job, now.address, now.guard) != (record.job, record.address, record.guard):
                return False
            _refuse_strangers(now)
            if _live_elsewhere(now) is not None:
                return False
            stays = now.rank_is_alive() and not gave_up
            bring_back(now.address, open_gpu, late=late and not stays)
            if not stays:
                file.unlink()
            return not stays


def undo_dead_ranks(job: str, open_gpu: OpenGpu) -> bool:
    """Undo the leases of a job's ranks that have died together with their guards.

    Only this user's leases are looked at. One that cannot be undone is logged, and stays. Returns
    whether the job had any lease before.
    """
    leases = [r for r in list_leases() if r.job == printable(job) and r.uid == os.geteuid()]
    for record in leases:
        if not record.live and not record.rank_is_alive():
            _LOG.warning("%s: its rank and its guard have died", record.address.uid)
            try:
                undo_lease(record, open_gpu)
            except (GpuError, OSError) as error:
                _LOG.error("%s: not reset: %s", record.address.uid, error)
    return bool(leases)


# --- inside --------------------------------------------------------------------------------------


def _look_at(folder: int, path: Path) -> LeaseRecord | None:
    file = LeaseFile.open(folder, path)
    if file is None:
        return None
    with closing(file):
        record = file.read(live=not file.try_lock(shared=True))
    if record is not None and record.guard.is_alive() is False:
        record = replace(record, live=False)  # file-locked by another process
    return record


def _clear_the_way(
    folder: int,
    path: Path,
    rank: ProcessIdentity | None,
    open_gpu: OpenGpu,
    patience_s: float,
) -> None:
    """Return when there is no such lease; undo a stale one."""
    start_s = time.monotonic()
    while (file := LeaseFile.open(folder, path)) is not None:
        with closing(file):
            taken = file.try_lock()
            if taken and not file.is_current():
                continue
            record = file.read()
            if not taken:
                if time.monotonic() - start_s < _worth_waiting_s(record, patience_s):
                    time.sleep(_POLL_S)
                    continue
                if record is None:
                    raise GpuError(
                        "Another process holds an empty lease file locked",
                        value=str(path),
                        remedy="Delete it",
                    )
                if record.guard.is_alive() is not False:
                    raise _held(record, "holds the GPU")
                # Undoing does not last this long, and whoever may read a lease can file-lock it.
            if record is not None:
                if record.rank_is_alive() and record.rank != rank:
                    raise _held(record, "still uses, without a guard,")
                _refuse_strangers(record)
                if (live := _live_elsewhere(record)) is not None:
                    raise _held(live, "holds the GPU")
                # A command has ended its own requests; a rank's guard may have been killed in one.
                late = rank is not None or record.rank is not None
                bring_back(record.address, open_gpu, late=late)
            # An empty one was cut short before its guard promised anything to a rank.
            file.unlink()


def _live_elsewhere(record: LeaseRecord) -> LeaseRecord | None:
    """Return a live lease of the same GPU in another folder.

    A stale one is ignored: its owner may have put it there; it says nothing about the clock.
    """
    others = (other for other in list_leases() if other.path != record.path)
    return next((o for o in others if o.live and o.path.name == record.path.name), None)


def bring_back(address: GpuAddress, open_gpu: OpenGpu, *, late: bool) -> None:
    """Reset a GPU; if who set it was killed (`late`), again after requests under way have ended."""
    gpu = open_gpu(address)
    gpu.reset_frequency()
    if late and gpu.late_request_s > 0:
        time.sleep(gpu.late_request_s)
        gpu.reset_frequency()


def _worth_waiting_s(record: LeaseRecord | None, patience_s: float) -> float:
    """How long to wait for a file-locked lease, s: long if its end is near."""
    being_written = record is None
    being_undone = record is not None and (
        record.guard.is_alive() is False
        or record.rank is None  # a reset, which ends by itself
        or record.rank.is_alive() is False
    )
    return max(patience_s if being_written or being_undone else 0.0, _LOOK_S)


def _open_and_lock(folder: int, path: Path) -> LeaseFile | None:
    """Open a lease and file-lock it; None if there is none or another process has locked it."""
    start_s = time.monotonic()
    while (file := LeaseFile.open(folder, path)) is not None:
        if file.try_lock() and file.is_current():
            return file
        file.close()
        if time.monotonic() - start_s >= _LOOK_S:
            break
        time.sleep(_POLL_S)
    return None


def _refuse_strangers(record: LeaseRecord) -> None:
    """Refuse to undo what another user wrote, unless root can do so without trusting it."""
    if record.uid == os.geteuid():
        return
    # An emulated GPU's address is a path, and root must not write where another user says.
    if os.geteuid() == 0 and record.address.backend not in PATH_BACKENDS:
        return
    raise _held(record, "is another user's and left a stale lease on")


def _held(record: LeaseRecord, what: str) -> LeaseHeldError:
    return LeaseHeldError(
        f"job {record.job} (guard {record.guard.pid}, uid {record.uid}) {what} "
        f"{record.address.uid}",
        remedy="Wait for that job or end it; if its processes are gone, let its user or root run "
        "`envpipe clocks reset`. Ranks of one job need a GPU each",
    )
