"""The folder of leases: where it is, who may own it, and safe access to its files.

Everything is done relative to an opened folder, and no link is ever followed: in a folder that all
users share, a name may mean another file than a moment ago.

`ENVPIPE_LEASE_DIR` names the folder. By default, it is `/run/envpipe/leases` if root has made that
(a job of root, or systemd-tmpfiles), because a job then sees the leases of every user, and
otherwise a folder of the user's own in `/tmp`. Not in TMPDIR: batch systems give each job another
one, and the next job must find the lease.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envpipe_megatron.gpu.base import SAFE_UID, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.messages import ProcessIdentity

_FORMAT = "envpipe-lease/1"
LEASE_SUFFIX = ".json"

PATH_BACKENDS = ("emulated", "dry_run")
"""Back ends whose addresses are their user's own, not the UUIDs of real GPUs."""

LEASE_DIR_VARIABLE = "ENVPIPE_LEASE_DIR"
SHARED_FOLDER = Path("/run/envpipe/leases")
OWN_FOLDERS = Path("/tmp")
_OWN_PREFIX = "envpipe-leases-"
_MAX_BYTES = 64 * 1024
_MAX_PID = 2**31 - 1


class LeaseFolderError(GpuError):
    """The folder of leases is missing, or somebody could tamper with it."""


def new_lease_folder() -> Path:
    """Return the folder in which this process's leases belong."""
    given = os.environ.get(LEASE_DIR_VARIABLE)
    if given:
        return Path(given).absolute()
    # `Path.is_dir` raises where a user may not even look.
    if os.path.isdir(SHARED_FOLDER) or (  # noqa: PTH112
        os.geteuid() == 0 and os.access(SHARED_FOLDER.parents[1], os.W_OK)
    ):
        return SHARED_FOLDER
    return OWN_FOLDERS / f"{_OWN_PREFIX}{os.geteuid()}"


@contextmanager
def opened_lease_folders() -> Iterator[list[tuple[Path, int]]]:
    """Open every folder that may hold leases relevant to this process.

    These are the folder for new leases, this user's own folder (in use before root made the shared
    one) and, for root, the own folders of all users. Anybody may make a folder with such a name in
    `/tmp`, so an unsafe one is left out. Raises LeaseFolderError if the folder for new leases is
    unsafe.
    """
    first = new_lease_folder()
    others: list[Path] = []
    if not os.environ.get(LEASE_DIR_VARIABLE):
        user = "*" if os.geteuid() == 0 else str(os.geteuid())
        others = [path for path in OWN_FOLDERS.glob(f"{_OWN_PREFIX}{user}") if path != first]
    with ExitStack() as stack:
        found = []
        if os.path.lexists(first):
            found.append((first, stack.enter_context(opened_folder(first))))
        for path in others:
            with suppress(LeaseFolderError):
                found.append((path, stack.enter_context(opened_folder(path))))
        yield found


@contextmanager
def opened_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open a folder of leases with which nobody else can tamper; gives its descriptor.

    `create` makes it if it is missing, open to all users and sticky unless it is this user's own;
    its parent must exist, except that of `SHARED_FOLDER`. Raises LeaseFolderError if it is missing,
    no folder, or a link; if it belongs to another user (unless root looks at that user's own
    folder), or others may write to it and it is not sticky.
    """
    if create:
        _make(path)
    remedy = f"Make it a folder with mode 1777, or set {LEASE_DIR_VARIABLE}"
    with _reported("The folder of leases cannot be used", path, remedy):
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        _refuse_unsafe(path, os.fstat(folder))
        yield folder
    finally:
        os.close(folder)


def _make(path: Path) -> None:
    remedy = f"Make it with mode 1777, or set {LEASE_DIR_VARIABLE}"
    with _reported("The folder of leases cannot be made", path, remedy):
        if path == SHARED_FOLDER:
            with suppress(FileExistsError):
                path.parent.mkdir(mode=0o700)
                path.parent.chmod(0o755)
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            return
    # Just made by this process; mkdir's mode was cut by the umask.
    path.chmod(0o755 if _owner_by_name(path) is not None else 0o1777)


def _owner_by_name(path: Path) -> int | None:
    """Return the uid whose own folder this is, by its name; None for a shared one."""
    own = re.fullmatch(rf"{re.escape(_OWN_PREFIX)}([0-9]+)", path.name)
    return int(own[1]) if own and path.parent == OWN_FOLDERS else None


def _refuse_unsafe(path: Path, status: os.stat_result) -> None:
    trusted: set[int | None] = {0, os.geteuid()}
    if os.geteuid() == 0:
        trusted.add(_owner_by_name(path))
    if status.st_uid not in trusted:
        raise LeaseFolderError(
            f"The folder of leases {path} belongs to a stranger, who could delete leases",
            value=f"uid {status.st_uid}",
            remedy=f"Let root make {SHARED_FOLDER} with mode 1777, or set {LEASE_DIR_VARIABLE}",
        )
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise LeaseFolderError(
            f"Others may delete leases in {path}: it is writable for them and not sticky",
            value=stat.filemode(status.st_mode),
            remedy=f"chmod +t {path}",
        )


class LeaseFile:
    """An opened file in a folder of leases; keeps a copy of the folder's descriptor.

    Its `flock` belongs to this opened file: it ends with `close` or with the process.
    """

    def __init__(self, folder: int, path: Path, descriptor: int) -> None:
        self.path = path
        self._folder = os.dup(folder)
        self._descriptor = descriptor

    @classmethod
    def create(cls, folder: int, path: Path, content: bytes) -> "LeaseFile | None":
        """Create, lock and write a file; return None if another process was faster.

        Raises LeaseFolderError if it cannot be written.
        """
        remedy = f"Make room there, or set {LEASE_DIR_VARIABLE} to another folder"
        with _reported("A lease cannot be written", path, remedy):
            # An existing file is never opened for writing: in a sticky folder, the kernel refuses
            # another user's file with another error (fs.protected_regular).
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
            try:
                file = cls(folder, path, os.open(path.name, flags, 0o644, dir_fd=folder))
            except FileExistsError:
                return None
            try:
                # Whatever the umask: other users must see who holds the GPU.
                os.fchmod(file._descriptor, 0o644)
                # Another process that finds it before it is locked takes it for cut short.
                if file.try_lock() and file.is_current():
                    if os.write(file._descriptor, content) == len(content):
                        return file
                    raise OSError(errno.ENOSPC, "no space for a whole lease")
            except BaseException:
                file.unlink()
                file.close()
                raise
            file.close()
            return None

    @classmethod
    def open(cls, folder: int, path: Path) -> "LeaseFile | None":
        """Open a file for reading; return None if there is none.

        Raises LeaseFolderError if it cannot be read, or is not a regular file.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with _reported("A lease cannot be read", path, "Let its owner or root delete it"):
            try:
                if stat.S_ISREG(os.lstat(path.name, dir_fd=folder).st_mode):
                    descriptor = os.open(path.name, flags, dir_fd=folder)
                    if stat.S_ISREG(os.fstat(descriptor).st_mode):
                        return cls(folder, path, descriptor)
                    os.close(descriptor)
            except FileNotFoundError:
                return None
        raise LeaseFolderError(
            "Something that is not a regular file lies among the leases",
            value=str(path),
            remedy="Find out who put it there, and delete it",
        )

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take the lock; return False if another opened file has it.

        With `shared`, to see whether it is taken, two readers at the same time do not exclude each
        other. Raises LeaseFolderError if the file system has no such locks, as NFS has none for a
        file opened for reading.
        """
        remedy = f"Set {LEASE_DIR_VARIABLE} to a folder on a disk of this machine"
        with _reported("A lease file cannot be locked", self.path, remedy):
            try:
                kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
                fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def is_current(self) -> bool:
        """Return whether the name still means this file in its folder."""
        try:
            there = os.lstat(self.path.name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(self._descriptor))

    def unlink(self) -> None:
        """Delete the file if the name still means it; LeaseFolderError if that fails."""
        if self.is_current():
            remedy = "Let its owner or root delete it"
            with _reported("A lease could not be deleted", self.path, remedy):
                os.unlink(self.path.name, dir_fd=self._folder)

    def close(self) -> None:
        """Unlock and close it."""
        # Unlocked explicitly: a child forked meanwhile shares the opened file, and would keep the
        # lock as long as it lives.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        os.close(self._folder)

    def read(self, *, live: bool = False) -> "LeaseRecord | None":
        """Return what the lease says; None if its writing was cut short.

        Raises GpuError if it is something else.
        """
        try:
            document = json.loads(os.pread(self._descriptor, _MAX_BYTES, 0))
        except ValueError:
            return None
        except RecursionError as error:
            raise GpuError("Not a lease: nested too deeply", value=str(self.path)) from error
        try:
            if document["format"] != _FORMAT:
                raise GpuError(
                    "A lease of an unknown format",
                    value=document["format"],
                    remedy=f"Another version made {self.path}: undo it with that version",
                )
            address = document["address"]
            record = LeaseRecord(
                path=self.path,
                address=GpuAddress(str(address["backend"]), str(address["uid"])),
                job=printable(str(document["job"])),
                uid=os.fstat(self._descriptor).st_uid,  # the 'uid' field could be forged
                guard=_identity(document["guard"]),
                rank=None if document["rank"] is None else _identity(document["rank"]),
                live=live,
            )
            named = lease_name(record.address)
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise GpuError(
                f"A lease lacks a field or has a wrong one: {error}", value=str(self.path)
            ) from error
        if named != self.path.name:
            raise GpuError("A lease for another GPU than its name says", value=str(self.path))
        return record


@contextmanager
def _reported(what: str, path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LeaseFolderError(
            f"{what}: {error.strerror}", value=str(path), remedy=remedy
        ) from error


# --- what a lease says ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The content of a lease, and whether its guard lives.

    Attributes:
        uid: the user who made the file.
        guard: the process that looks, or looked, after it.
        rank: the process that may lock the clock; None for `envpipe clocks reset`.
        live: whether its guard lives.
    """

    path: Path
    address: GpuAddress
    job: str
    uid: int
    guard: ProcessIdentity
    rank: ProcessIdentity | None
    live: bool

    def rank_is_alive(self) -> bool:
        """Return whether the rank is known to live: it may lock the clock at any moment.

        A rank in a PID namespace that cannot be seen from here counts as ended. If it lives, it
        notices within milliseconds that its guard has died.
        """
        return self.rank is not None and self.rank.is_alive() is True


def lease_name(address: GpuAddress) -> str:
    """Return the name of a GPU's lease: the same for all back ends of a real GPU.

    Raises GpuError for a malformed uid.
    """
    if address.backend in PATH_BACKENDS:
        digest = hashlib.sha256(address.uid.encode()).hexdigest()[:24]
        return f"{address.backend}-{digest}{LEASE_SUFFIX}"
    if not SAFE_UID.fullmatch(address.uid):
        raise GpuError("Not the UUID of a GPU", value=address.uid)
    return address.uid + LEASE_SUFFIX


def lease_content(address: GpuAddress, job: str, rank: ProcessIdentity | None) -> bytes:
    """The content of a lease that this process looks after."""
    document = {
        "format": _FORMAT,
        "address": asdict(address),
        "job": job,
        "uid": os.geteuid(),
        "guard": asdict(ProcessIdentity.own()),
        "rank": None if rank is None else asdict(rank),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return json.dumps(document).encode() + b"\n"


def printable(name: str) -> str:
    """Return the name of a job without what could harm the terminal on which it is shown."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _identity(document: Any) -> ProcessIdentity:
    pid = int(document["pid"])
    if not 0 < pid <= _MAX_PID:
        raise ValueError(f"no process has the number {pid}")
    return ProcessIdentity(pid, int(document["start_ticks"]), int(document["pid_namespace"]))
