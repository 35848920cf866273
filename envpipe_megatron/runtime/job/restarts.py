"""The output folder of a job: files for people, and what its next start finds there."""

from __future__ import annotations

import logging
import math
import os
import pickle
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import IO, Any

from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.files import boot_id, is_of_this_job, lock_file
from envpipe_megatron.formats.energy import append_line
from envpipe_megatron.formats.job_file import JobKeys, StoredJob, read_job
from envpipe_megatron.formats.steps import BaselineEnergy
from envpipe_megatron.gpu.base import Gpu, PowerState
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.job.options import PROFILE_FILE, JobOptions
from envpipe_megatron.runtime.writer import Writer

logger = logging.getLogger(__name__)

JOB_FILE = "job.json"
#: Locked by the planning rank of the job that writes to the folder.
_LOCK_FILE = ".lock"
#: Files of another job that are put aside.
_KEPT = re.compile(r"profile\.(csv|json)|job\.json|plan(-m\d+)?\.json")
#: Looks at a lock of this job's own, in 95 s: NFS keeps one of a node that died for 90 s.
_OWN_LOCK_LOOKS, _LOOK_S = 190, 0.5


def plan_file(batch: str) -> str:
    """Name the file of a batch's plan; the batch of full size has an empty name."""
    return f"plan-{batch}.json" if batch else "plan.json"


def job_keys(options: JobOptions, num_stages: int, num_replicas: int, gpu: Gpu) -> JobKeys:
    """Return all that a profile, a baseline and a clock for the whole job rest on."""
    clocks, power = gpu.supported_frequencies_mhz, PowerState()
    if options.changes_only_order:  # units are profiled at no other
        clocks = (max(clocks),)
    with suppress(Exception):  # a driver may fail in any way; who needs it says so
        power = gpu.power_state()
    return {
        "units": {
            **(options.fingerprint or {}),
            "envpipe_num_stages": num_stages,
            "envpipe_num_chunks": options.num_chunks,
            "envpipe_clocks_mhz": [max(clocks), min(clocks)],
            "envpipe_num_clocks": len(clocks),
            "envpipe_clock_backend": gpu.address.backend,
            "envpipe_power_limit_w": power.power_limit_w,
            "envpipe_power_profiles": power.enforced_profiles,
        },
        "steps": {
            "num_microbatches": options.num_microbatches,
            "group_size": options.group_size,
            "num_replicas": num_replicas,
            "one_clock_slowdown_percent": options.slowdown_percent if options.one_clock else None,
        },
    }


class JobFolder:
    """The files of a job, and what an earlier start left among them; no path, no files.

    Every rank of the job makes one, together, and appends lines to the files of its node. Only the
    planning rank writes profile, plan and `job.json`. A folder that cannot be read or written ends
    no training, nor holds it up: once a job has begun, all is written by the rank's `Writer`.

    Where another live job writes to the path, this one has `<path>.2` or the next that is free, and
    no files where that cannot be made: it would put the other job's aside, or write over them. A
    lock that an earlier start of this job left on a node that died is waited for, then passed over.

    Args:
        given: files that the user gave, which stay as they are.
    """

    def __init__(
        self, path: Path | None, collectives: Collectives, given: Collection[Path] = ()
    ) -> None:
        self._collectives = collectives
        #: Its lock ends with the process, however that ends, and is no child's.
        self._lock: IO[str] | None = None
        #: Where the files are, and what the bill says of that.
        self.path, self.notes = path, tuple[str, ...]()
        looks, taken = _OWN_LOCK_LOOKS, None
        while path is not None and taken is None:
            looks -= 1  # an exchange a look: ranks that wait for longer give the planning one up
            taken = collectives.agreed(partial(self._take, path, looks > 0))
        if taken is not None:
            self.path, self.notes = taken
        with suppress(OSError):  # what cannot be written is logged
            if self.path is not None:  # nodes may have disks of their own
                self.path.mkdir(parents=True, exist_ok=True)
        #: Names of the user's files that are here; found now, since a disk may hang later.
        self._given: Collection[str] = ()
        with suppress(OSError):  # the working folder may be gone
            own = self.path and os.path.realpath(self.path)
            self._given = {file.name for file in given if os.path.realpath(file.parent) == own}
        self.node = socket.gethostname()
        here = {(self.node, boot_id())}
        nodes = here.union(*collectives.by_stage(here, lambda found: here.union(*found)))
        # Cloned images, and containers, may have one name on several nodes.
        if [name for name, _ in nodes].count(self.node) > 1:
            self.node = f"{self.node}-{boot_id()[:8]}"
        # Ranks of one node may append to one file; nodes that do lose each other's lines on NFS.
        self._of_node = "" if len(nodes) == 1 else "-" + re.sub(r"[^\w.-]", "_", self.node)
        #: What an earlier start left that still holds, the same on every rank.
        self.found = StoredJob()
        #: When this start began; empty if no later start can continue it.
        self.started = ""
        #: What `job.json` is to say; None if it is not kept, and on all ranks but the planning one.
        self._job: StoredJob | None = None
        self._keys: JobKeys = {}
        self._writer = Writer()
        #: Renames another job's files, once, before the first of this one's; False if that failed.
        self._make_way: Callable[[], bool] = lambda: True

    def close(self) -> None:
        """Write what is left, and let another job write to the folder."""
        self._writer.close()
        if self._lock is not None:
            with suppress(OSError):  # only here NFS says that its disk was full at the start
                self._lock.close()

    def resume(self, options: JobOptions, num_stages: int, gpu: Gpu, *, keeps: bool = True) -> None:
        """Find what an earlier start left that still holds; every rank calls it.

        Where the stored job is another one, of another version or damaged, the job starts over,
        with a warning, and the stored one is kept under other names. A job that may be lowered
        touches nothing until it has something to keep: what is stored may be of the lower level.
        One that never `keeps` anything leaves it as it is.
        """
        if self.path is None or options.fingerprint is None:
            return
        path, num_replicas = self.path / JOB_FILE, self._collectives.num_replicas

        def look() -> tuple[StoredJob, str]:
            found, keys = StoredJob(), job_keys(options, num_stages, num_replicas, gpu)
            try:
                found = read_job(path, keys) if keeps else found
            except Exception as error:  # a kept file may fail in any way, and the job must start
                why = error if isinstance(error, EnvPipeError) else repr(error)
                self._make_way = cache(partial(_set_aside, path.parent, self._given, why))
            now = datetime.now(UTC)
            for before in found.starts[-1:]:  # of a node whose clock may be hours ahead
                now = max(now, datetime.fromisoformat(before) + timedelta(milliseconds=1))
            started = now.isoformat(timespec="milliseconds")
            if keeps:
                self._job, self._keys = replace(found, starts=(*found.starts, started)), keys
                if found.starts or not options.may_be_lowered:
                    self.keep()
            return found, started

        self.found, self.started = self._collectives.agreed(look)

    def run_label(self, run: str) -> dict[str, str]:
        """Return what lines of logs have as their `run`: no other start has the same.

        A later start's comes later in alphabetical order, by which readers know the last one.

        After a restart, iterations since the last checkpoint run once more, and are billed twice.
        """
        label = f"{run} {self.started}".strip()
        return {"run": label} if label else {}

    def append(self, name: str, entry: dict[str, Any], most: float = math.inf) -> None:
        """Append an object to `<name>.jsonl` or `<name>-<node>.jsonl`; `most` as `Writer.put`."""
        if self.path is not None:
            path = self.path / f"{name}{self._of_node}.jsonl"
            self._writer.put(name, partial(append_line, path, entry), most)

    def keep_profile(self, profile: Profile) -> None:
        """Keep the profile that was measured, even if no plan can be made from it."""
        self._write(PROFILE_FILE, profile.write)
        self.keep(profile=profile)

    def write_plan(self, plan: Plan, batch: str = "") -> None:
        """Write the plan of a batch, for people."""
        self._write(plan_file(batch), plan.write)

    def keep(self, **changes: Any) -> None:
        """Have `job.json` say other things, by the names of `StoredJob`, if it is kept."""
        if self._job is not None:
            self._job = replace(self._job, **changes)
            self._write(JOB_FILE, partial(self._job.write, keys=self._keys))

    def keep_baselines(self, baselines: Mapping[str, BaselineEnergy]) -> None:
        """Keep those of all batches; one without energies is measured again by each start."""
        whole = {
            batch: replace(baseline, own=None)
            for batch, baseline in baselines.items()
            if all(step.energy_j for step in (baseline.mean, *baseline.by_stage))
        }
        if self._job is not None and whole != self._job.baselines:
            self.keep(baselines=whole)

    def forget_profile(self) -> None:
        """Have a profile measured: an earlier start's is of no use. Every rank calls it."""
        if self.found.profile is not None:
            self.found = replace(self.found, profile=None)
            self.keep(profile=None)

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        """Have the planning rank write a file, once another job's has made way."""
        path = self.path and self.path / name
        if path is None or name in self._given or not self._collectives.is_planner:
            return
        try:  # a copy is written: what writing works out must not be added to what is being sent
            copied = pickle.dumps(write)
        except Exception:  # no memory, say
            logger.exception("%s could not be written, training goes on", path)
            return
        self._writer.put(name, lambda: self._make_way() and pickle.loads(copied)(path))

    def _take(self, path: Path, waits: bool) -> tuple[Path | None, tuple[str, ...]] | None:
        """Lock the first folder that no live job writes to; it, and what is to be said of it.

        None, after a moment, if a start of this job has it and is waited for.
        """
        for number in count(1):
            own = path if number == 1 else Path(f"{path}.{number}")
            lock, where = own / _LOCK_FILE, f"files of this one are in {own}"
            try:
                own.mkdir(parents=True, exist_ok=True)
                if not waits and is_of_this_job(lock, elsewhere=True):
                    logger.warning("%s is of a node that died: this start takes its folder", lock)
                    lock.unlink()  # the lock goes with it
                self._lock = lock_file(lock)
            except BlockingIOError:
                if waits and is_of_this_job(lock):
                    time.sleep(_LOOK_S)
                    return None
                continue
            except OSError as error:  # a first one that cannot be locked is taken all the same
                where = f"this one leaves no files: {error}"
            if number == 1:
                return path, ()
            note = f"Another job writes to {path}: {where}"
            logger.warning(note)
            return own if self._lock else None, (note,)
        raise AssertionError


def _set_aside(folder: Path, given: Collection[str], why: object) -> bool:
    """Rename a job's files but those that the user gave, so that others may have their names.

    False if that failed; OSError if the folder cannot be looked at.
    """
    why = f"The job starts over: {why}".rstrip(".")
    found = (path for path in folder.glob("*.*") if _KEPT.fullmatch(path.name))
    files = [path for path in found if path.name not in given]
    number = next(n for n in count(1) if not any(folder.glob(f"*.old{n}.*")))
    kept = []
    try:
        # The job file comes last: as long as it is there, the others pass for no new job's.
        for path in sorted(files, reverse=True):
            kept.append(path.rename(path.with_suffix(f".old{number}{path.suffix}")).name)
    except OSError as error:
        logger.warning("%s. Its files stay as they are: %s", why, error)
        return False
    logger.warning("%s. Put aside: %s", why, ", ".join(kept) or "nothing")
    return True
