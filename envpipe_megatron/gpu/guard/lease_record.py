"""What a lease file says: a JSON object that names a GPU, its job, and the processes behind it."""

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envpipe_megatron.gpu.base import GpuAddress, GpuError
from envpipe_megatron.gpu.guard.lease_folder import LeaseFile
from envpipe_megatron.gpu.guard.process_identity import ProcessIdentity

FORMAT = "envpipe-lease/1"
LEASE_SUFFIX = ".json"

PATH_BACKENDS = ("emulated", "dry_run")
"""Back ends whose addresses are their user's own, not the UUIDs of real GPUs."""

_MAX_PID = 2**31 - 1
_REAL_UID = re.compile(r"GPU-[0-9A-Za-z-]{1,64}")


class LeaseFileError(GpuError):
    """A lease is not one, or of a format that this version does not know."""


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What a lease says, and what is true of it.

    Attributes:
        path: its file.
        address: the GPU.
        job: the job's name.
        uid: who made the file.
        guard: the process that looks, or looked, after it.
        rank: the process that may lock the clock; None where the guard cannot see it.
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

        Of a rank in a PID namespace that cannot be seen from here nothing is known. Its own watcher
        notices the guard's death within milliseconds; it counts as ended here.
        """
        return self.rank is not None and self.rank.is_alive() is True


def printable(name: str) -> str:
    """Return the name of a job without what could harm the terminal of whoever reads of it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def lease_name(address: GpuAddress) -> str:
    """Return the name of a GPU's lease: the same for all back ends of a real GPU.

    Raises:
        GpuError: the uid is not one.
    """
    if address.backend in PATH_BACKENDS:
        digest = hashlib.sha256(address.uid.encode()).hexdigest()[:24]
        return f"{address.backend}-{digest}{LEASE_SUFFIX}"
    if not _REAL_UID.fullmatch(address.uid):
        raise GpuError("Not the UUID of a GPU", value=address.uid)
    return address.uid + LEASE_SUFFIX


def lease_content(address: GpuAddress, job: str, rank: ProcessIdentity | None) -> bytes:
    """Return the content of a lease that this process looks after."""
    guard = ProcessIdentity.of(os.getpid())
    assert guard is not None, "/proc shows this process"
    document = {
        "format": FORMAT,
        "address": asdict(address),
        "job": job,
        "uid": os.geteuid(),
        "guard": asdict(guard),
        "rank": None if rank is None else asdict(rank),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return json.dumps(document).encode() + b"\n"


def read_lease(file: LeaseFile, path: Path, *, live: bool = False) -> LeaseRecord | None:
    """Return what a lease file says; None where its writing was cut short.

    Raises:
        LeaseFileError: it is something else.
    """
    try:
        document = json.loads(file.read())
    except ValueError:
        return None
    except RecursionError as error:
        raise LeaseFileError("Not a lease: nested too deeply", value=str(path)) from error
    try:
        if document["format"] != FORMAT:
            raise LeaseFileError(
                "A lease of an unknown format",
                value=document["format"],
                remedy=f"Another version made {path}: undo it with that version",
            )
        record = LeaseRecord(
            path=path,
            address=GpuAddress(
                str(document["address"]["backend"]), str(document["address"]["uid"])
            ),
            job=printable(str(document["job"])),
            uid=file.owner_uid(),  # what it says itself, anybody could write
            guard=_identity(document["guard"]),
            rank=None if document["rank"] is None else _identity(document["rank"]),
            live=live,
        )
        named = lease_name(record.address)
    except (LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LeaseFileError(
            f"A lease lacks a field or has a wrong one: {error}", value=str(path)
        ) from error
    if named != path.name:
        raise LeaseFileError("A lease for another GPU than its name says", value=str(path))
    return record


def _identity(document: Any) -> ProcessIdentity:
    pid = int(document["pid"])
    if not 0 < pid <= _MAX_PID:
        raise ValueError(f"no process has the number {pid}")
    return ProcessIdentity(pid, int(document["start_ticks"]), int(document["pid_namespace"]))
