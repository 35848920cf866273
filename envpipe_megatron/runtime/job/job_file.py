"""`job.json`: what a job has measured and decided, for when it is started again.

```json
{"format": "envpipe-job/1", "fingerprint": {"hidden_size": 2048, "...": 0},
 "starts": ["2026-05-04T10:11:12.345+00:00"], "phases_done": ["warm-up", "profile", "reconfigure"],
 "profile": {"profile.csv": "<sha256>", "profile.json": "<sha256>"},
 "plan": {"plan.json": "<sha256>"},
 "baseline": {"mean": {"iterations": 9, "time_s": 0.6, "time_uncertainty_s": 0.001,
                       "energy_j": 210.0, "metering_uncertainty_j": 0.4}, "by_stage": ["..."]},
 "reconfigure": {"steps": 12, "ended": "..."}}
```

It stands in the output folder, beside the files it names. One rank reads and writes it, for all.
It is replaced as a whole: whoever is killed leaves the old one or the new one. Files that it names
are not written again, and where it does not fit they are kept under other names.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envpipe_megatron.core.plan import Plan, read_plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.sidecar import sidecar_path
from envpipe_megatron.errors import EnvPipeError, plain
from envpipe_megatron.files import replace_files
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.energy.steps import BaselineEnergy, StepEnergy

logger = logging.getLogger(__name__)

JOB_FORMAT = "envpipe-job/1"
JOB_FILE = "job.json"
PROFILE_FILE = "profile.csv"
PLAN_FILE = "plan.json"


class JobFileError(EnvPipeError):
    """A stored job that cannot be gone on with."""


@dataclass(frozen=True)
class StoredJob:
    """What an earlier start of a job left.

    Args:
        fingerprint: what must be the same for all of it to hold, of JSON's types.
        starts: when the job was started, each in UTC by ISO 8601.
        profile: SHA-256 of each of the profile's files, by name in the folder; empty without one.
        plan: the same of the plan, once reconfiguring has ended.
        baseline: without this GPU's own.
        reconfigure_steps: how many steps raised a clock.
        reconfigure_ended: why reconfiguring ended; None where it did not.
    """

    fingerprint: Mapping[str, Any]
    starts: tuple[str, ...] = ()
    profile: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, str] = field(default_factory=dict)
    baseline: BaselineEnergy | None = None
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None

    @property
    def phases_done(self) -> tuple[str, ...]:
        """The phases that need not be run again."""
        done = {
            "warm-up": self.baseline,
            "profile": self.profile,
            "plan": self.plan,
            "reconfigure": self.reconfigure_ended,
        }
        return tuple(phase for phase, result in done.items() if result)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON data."""
        baseline = self.baseline
        return {
            "format": JOB_FORMAT,
            "fingerprint": dict(self.fingerprint),
            "starts": list(self.starts),
            "phases_done": list(self.phases_done),
            "profile": dict(self.profile),
            "plan": dict(self.plan),
            "baseline": baseline
            and {
                "mean": asdict(baseline.mean),
                "by_stage": [asdict(stage) for stage in baseline.by_stage],
            },
            "reconfigure": {"steps": self.reconfigure_steps, "ended": self.reconfigure_ended},
        }


def read_job(
    folder: Path, fingerprint: Mapping[str, Any], profile_file: Path | None = None
) -> StoredJob | None:
    """Read the job that a folder holds; None where there is none.

    Args:
        folder: of the job.
        fingerprint: what it must have been.
        profile_file: the profile, where the job has one that it did not make.

    Raises:
        JobFileError: it is another job (naming what differs), damaged, or a file that it names is
            gone or not the one it was.
        OSError: it cannot be read.
    """
    path = folder / JOB_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        job = _parse(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise JobFileError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    wanted = json.loads(json.dumps(dict(fingerprint)))
    differing = sorted(
        key
        for key in {*wanted, *job.fingerprint}
        if (key in wanted, wanted.get(key)) != (key in job.fingerprint, job.fingerprint.get(key))
    )
    if differing:
        shown = "; ".join(
            f"{key} was {_shown(job.fingerprint, key)} and is now {_shown(wanted, key)}"
            for key in differing
        )
        raise JobFileError(f"{path} is of another job: {shown}")
    for name, digest in {**job.profile, **job.plan}.items():
        if _digest(folder / name) != digest:
            raise JobFileError(f"{folder / name} is gone, or not the one that {path} tells of")
    try:
        if job.profile or job.plan:
            profile = read_profile(profile_file or folder / PROFILE_FILE)
            if job.plan:
                read_plan(folder / PLAN_FILE, profile)
    except EnvPipeError as error:
        raise JobFileError(f"What {path} names cannot be read: {error}") from error
    return job


def write_job(folder: Path, job: StoredJob) -> None:
    """Replace the folder's job; a kill at any point leaves the old one or the new one.

    Raises:
        OSError: the disk is full, or the folder cannot be written.
    """
    replace_files({folder / JOB_FILE: [json.dumps(job.to_json(), indent=1), "\n"]})


def set_aside(folder: Path, given: Collection[Path | None] = ()) -> list[Path]:
    """Keep a job's files under other names, so that another job may have theirs.

    Args:
        folder: of the job.
        given: files that somebody gave the job, which stay.

    Returns:
        the new names.

    Raises:
        OSError: the folder cannot be written.
    """
    profile = folder / PROFILE_FILE
    # The job file comes last: as long as it is there, the others do not pass for a new job's.
    files = [folder / PLAN_FILE, folder / JOB_FILE]
    if profile not in given:
        files = [profile, sidecar_path(profile), *files]
    files = [path for path in files if path not in given]
    number = 1
    while any(_aside(path, number).exists() for path in files):
        number += 1
    kept = []
    for path in files:
        if path.exists():
            kept.append(path.rename(_aside(path, number)))
    return kept


class JobKeeper:
    """Keeps a folder's job file up to date while the job runs; on one rank of the job.

    A folder that cannot be written ends the keeping, not the training.

    Args:
        folder: of the job.
        fingerprint: see `StoredJob`.
        profile_file: given to the job, which then makes none.
        plan_file: the same.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: Mapping[str, Any],
        profile_file: Path | None = None,
        plan_file: Path | None = None,
    ) -> None:
        self._folder = folder
        self._given = (profile_file, plan_file)
        self._writable = True
        self._profile_written = self._plan_written = False
        #: What an earlier start left, None if there is nothing to go on with.
        self.found: StoredJob | None = None
        try:
            self.found = read_job(folder, fingerprint, profile_file)
        except Exception as error:  # a kept file may fail in any way, and the job must start
            self._start_over(error)
        self.job = self.found or StoredJob(fingerprint)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._put(replace(self.job, starts=(*self.job.starts, now)))

    def keep_profile(self, profile: Profile) -> None:
        """The profile has been written."""
        if self._profile_written:
            return
        self._profile_written = True
        path = self._folder / PROFILE_FILE
        digests = {file.name: _digest(file) for file in (path, sidecar_path(path))}
        if digests[path.name] == profile.sha256:  # else there was no room for it
            self._put(replace(self.job, profile=digests))

    def keep_plan(self, plan: Plan, steps: int, ended: Ended | None) -> None:
        """The plan has been written, and nothing will change it."""
        if self._plan_written:
            return
        self._plan_written = True
        path = self._folder / PLAN_FILE
        try:
            written = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return
        if written != json.loads(json.dumps(plan.to_json())):
            return  # an older one, which the disk had no room to replace
        digests = {PLAN_FILE: _digest(path)}
        self._put(replace(self.job, plan=digests, reconfigure_steps=steps, reconfigure_ended=ended))

    def forget_profile(self) -> None:
        """Let the next start measure a profile, where an earlier start's was of no use."""
        if self.found is not None and self.job.profile == self.found.profile != {}:
            forgotten = replace(
                self.job, profile={}, plan={}, reconfigure_steps=0, reconfigure_ended=None
            )
            self._put(forgotten)

    def keep_baseline(self, baseline: BaselineEnergy) -> None:
        """The baseline has been measured; one without energies is measured anew by each start."""
        steps = (baseline.mean, *baseline.by_stage)
        if self.job.baseline is None and all(step.energy_j for step in steps):
            self._put(replace(self.job, baseline=replace(baseline, own=None)))

    def _put(self, job: StoredJob) -> None:
        self.job = job
        if not self._writable:
            return
        try:
            write_job(self._folder, job)
        except Exception as error:  # of a disk, or of facts that are none of JSON's
            logger.error(
                "%s could not be written, training goes on; started again, the job begins anew: %s",
                self._folder / JOB_FILE,
                error,
            )
            self._writable = False

    def _start_over(self, reason: Exception) -> None:
        try:
            kept = set_aside(self._folder, self._given)
        except OSError as error:
            self._writable = False
            logger.warning("The job starts over: %s. Its files stay as they are: %s", reason, error)
            return
        names = ", ".join(path.name for path in kept)
        logger.warning("The job starts over: %s. What it had is kept as %s", reason, names)


def _parse(data: Any) -> StoredJob:
    """A job from its JSON.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is something else.
    """
    if data["format"] != JOB_FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {JOB_FORMAT!r}")
    baseline = data["baseline"]
    ended = data["reconfigure"]
    files = {
        part: {_file_name(name): str(digest) for name, digest in data[part].items()}
        for part in ("profile", "plan")
    }
    if files["profile"] and PROFILE_FILE not in files["profile"]:
        raise ValueError(f"its profile is not {PROFILE_FILE}")
    if files["plan"] and PLAN_FILE not in files["plan"]:
        raise ValueError(f"its plan is not {PLAN_FILE}")
    return StoredJob(
        fingerprint=dict(data["fingerprint"]),
        starts=tuple(str(start) for start in data["starts"]),
        profile=files["profile"],
        plan=files["plan"],
        baseline=baseline
        and BaselineEnergy(
            _step(baseline["mean"]), tuple(_step(stage) for stage in baseline["by_stage"])
        ),
        reconfigure_steps=int(ended["steps"]),
        reconfigure_ended=None if ended["ended"] is None else Ended(ended["ended"]),
    )


def _step(data: dict[str, Any]) -> StepEnergy:
    step = StepEnergy(**data)
    for name, value in data.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"'{name}' of its baseline is {value!r}")
    if not step.time_s or not step.energy_j:
        raise ValueError("its baseline takes nothing")
    return step


def _file_name(name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file of its folder")
    return name


def _digest(path: Path) -> str:
    """SHA-256 of a file; of none, nothing that a file has."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.old{number}{path.suffix}")


def _shown(fingerprint: Mapping[str, Any], key: str) -> str:
    return plain(fingerprint[key]) if key in fingerprint else "not told"
