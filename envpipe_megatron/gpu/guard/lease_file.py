"""The folders of leases: where they are, who may own them; and what a lease says.

No link is ever followed: in a folder that all users share, anybody may put one. A folder of root's
or of this user's own is in nobody else's hand. Another user's, which root looks at, may be any
other at the next moment: root takes nothing from it but a stale lease by its proper name.

`ENVPIPE_LEASE_DIR` names the folder. By default, it is `/run/envpipe/leases` if root has made that
(a job of root, or systemd-tmpfiles), because a job then sees the leases of every user, and
otherwise a folder of the user's own in `/tmp`. Not in TMPDIR: batch systems give each job another
one, and the next job must find the lease.
"""

import hashlib
import json
import os
import pwd
import re
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envpipe_megatron.gpu.base import SAFE_UID, GpuAddress, GpuError
from envpipe_megatron.gpu.guard.messages import ProcessIdentity
from envpipe_megatron.gpu.site import is_of_root

_FORMAT = "envpipe-lease/1"
LEASE_SUFFIX = ".json"

JOB_NAME_VARIABLE = "ENVPIPE_JOB_NAME"
"""Names the job for people; `envpipe launch` sets it."""

PATH_BACKENDS = ("emulated", "dry_run")
"""Back ends whose addresses are their user's own, not the UUIDs of real GPUs."""

LEASE_DIR_VARIABLE = "ENVPIPE_LEASE_DIR"
SHARED_FOLDER = Path("/run/envpipe/leases")
OWN_FOLDERS = Path("/tmp")
_OWN_PREFIX = "envpipe-leases-"
_MAX_PID = 2**31 - 1
_TEXTS = "host", "job", "job_name", "slurm_job_id", "created"
_CLOCKS = "highest_mhz", "lowest_mhz"


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


def lease_folders(*, create: bool = False) -> list[Path]:
    """Return the folders that may hold leases relevant to this process, the one for new ones first.

    The others are this user's own folder (in use before root made the shared one) and, for root,
    the own folders of all users. Anybody may make a folder with such a name in `/tmp`, so an unsafe
    one is left out. `create` makes the first if it is missing. Raises LeaseFolderError if the
    folder for new leases is unsafe or cannot be made: it is no folder, or a link; it belongs to
    another user; others may write to it and it is not sticky.
    """
    first = new_lease_folder()
    if create:
        _make(first)
    found = []
    if os.path.lexists(first):
        _refuse_unsafe(first)
        found.append(first)
    if not os.environ.get(LEASE_DIR_VARIABLE):
        user = "*" if os.geteuid() == 0 else str(os.geteuid())
        for path in OWN_FOLDERS.glob(f"{_OWN_PREFIX}{user}"):
            if path != first:
                with suppress(LeaseFolderError):
                    _refuse_unsafe(path)
                    found.append(path)
    return found


def _make(path: Path) -> None:
    """Make a folder, open to all users and sticky unless it is this user's own.

    Its parent must exist, except that of `SHARED_FOLDER`.
    """
    remedy = f"Make it with mode 1777, or set {LEASE_DIR_VARIABLE}"
    with reported("The folder of leases cannot be made", path, remedy):
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


def _refuse_unsafe(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise LeaseFolderError(
            "The folder of leases cannot be used: it is none",
            value=str(path),
            remedy=f"Make it a folder with mode 1777, or set {LEASE_DIR_VARIABLE}",
        )
    owner, trusted = _owner_by_name(path), {0, os.geteuid()}
    if owner is not None and os.geteuid() == 0:
        trusted.add(owner)
    if status.st_uid not in trusted and not (owner is None and is_of_root(status)):
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


@contextmanager
def reported(what: str, path: Path, remedy: str) -> Iterator[None]:
    """Raise an OSError as a LeaseFolderError."""
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
        rank: the process for which it locks the clock; None for `envpipe clocks reset`.
        said: what the file says of the job for people, clocks and when it was made.
        live: whether its guard lives.
    """

    path: Path
    address: GpuAddress
    job: str
    uid: int
    guard: ProcessIdentity
    rank: ProcessIdentity | None
    said: Mapping[str, str | int | None]
    live: bool = False

    @property
    def mark(self) -> dict[str, str | int | None]:
        """The user who slows the GPU, the job, between which clocks, and since when.

        As in docs/schemas/clocks.json, without `live`. A server may be asked for the user's name,
        and may hang: no guard calls this.
        """
        user = str(self.uid)
        with suppress(KeyError):
            user = pwd.getpwuid(self.uid).pw_name
        return {"user": user, "uid": self.uid, "pid": (self.rank or self.guard).pid, **self.said}


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


def lease_content(
    address: GpuAddress, job: str, rank: ProcessIdentity | None, clocks_mhz: Sequence[int]
) -> bytes:
    """Return the content of a lease that this process looks after; see docs/schemas/lease.json."""
    slurm_job_id = os.environ.get("SLURM_JOB_ID", "")
    name = os.environ.get(JOB_NAME_VARIABLE, "")
    if name in ("", slurm_job_id):  # `envpipe launch` was given none
        name = os.environ.get("SLURM_JOB_NAME", name)
    document = {
        "format": _FORMAT,
        "address": asdict(address),
        "job": job,
        "uid": os.geteuid(),
        "guard": asdict(ProcessIdentity.own()),
        "rank": None if rank is None else asdict(rank),
        "host": socket.gethostname(),
        "job_name": name,
        "slurm_job_id": slurm_job_id,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **dict(zip(_CLOCKS, clocks_mhz, strict=False)),
    }
    return json.dumps(document).encode() + b"\n"


def parse_lease(content: bytes, path: Path, uid: int) -> LeaseRecord | None:
    """Return what a lease says; None if its writing was cut short.

    `uid` is the file's owner, since the field of that name could be forged. Raises GpuError if it
    is something else.
    """
    try:
        document = json.loads(content)
        if document["format"] != _FORMAT:
            raise GpuError(
                "A lease of an unknown format",
                value=document["format"],
                remedy=f"Another version made {path}: undo it with that version",
            )
        address = document["address"]
        record = LeaseRecord(
            path=path,
            address=GpuAddress(str(address["backend"]), str(address["uid"])),
            job=printable(str(document["job"])),
            uid=uid,
            guard=_identity(document["guard"]),
            rank=None if document["rank"] is None else _identity(document["rank"]),
            said=_said(document),
        )
        named = lease_name(record.address)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise GpuError(
            f"A lease lacks a field or has a wrong one: {error}", value=str(path)
        ) from error
    if named != path.name:
        raise GpuError("A lease for another GPU than its name says", value=str(path))
    return record


def printable(name: str) -> str:
    """Return the name of a job without what could harm the terminal on which it is shown."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def _said(document: dict[str, Any]) -> dict[str, str | int | None]:
    """Return a record's `said`: nothing is undone by it, so anything may be wrong or missing."""
    texts = {name: printable(str(document.get(name, ""))) for name in _TEXTS}
    clocks = {name: document.get(name) for name in _CLOCKS}
    numbers = {name: mhz if isinstance(mhz, int) else None for name, mhz in clocks.items()}
    return {**texts, **numbers}


def _identity(document: Any) -> ProcessIdentity:
    pid = int(document["pid"])
    if not 0 < pid <= _MAX_PID:
        raise ValueError(f"no process has the number {pid}")
    return ProcessIdentity(pid, int(document["start_ticks"]), int(document["pid_namespace"]))
