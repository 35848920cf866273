"""`job.json`: what a job has measured and decided, for when it is started again.

```json
{"format": "envpipe-job/2",
 "keys": {"profile": {"hidden_size": 2048, "...": 0}, "steps": {"num_microbatches": 8, "...": 0},
          "plan": {"policy": "envelope", "...": 0}},
 "starts": ["2026-05-04T10:11:12.345+00:00"], "phases_done": ["warm-up", "profile", "reconfigure"],
 "profile": {"profile.csv": "<sha256>", "profile.json": "<sha256>"},
 "plan": {"plan.json": "<sha256>"},
 "baseline": {"mean": {"iterations": 9, "time_s": 0.6, "time_uncertainty_s": 0.001,
                       "energy_j": 210.0, "metering_uncertainty_j": 0.4}, "by_stage": ["..."]},
 "other_baselines": {}, "reconfigure": {"steps": 12, "ended": "..."}, "one_clock_mhz": null}
```

Batches of another size than the full one (`m24`: of 24 microbatches) have a `plan-m24.json` beside
`plan.json`, and a baseline among `other_baselines`. What holds for another start, `JobKeys` says.

It stands in the output folder, beside the files it names, and is replaced as a whole: a kill leaves
the old one or the new one. `folder` reads and writes it, on one rank of the job.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError, plain
from envpipe_megatron.files import replace_files
from envpipe_megatron.policies.reconfigure import Ended
from envpipe_megatron.runtime.energy.steps import BaselineEnergy, StepEnergy

_JOB_FORMAT = "envpipe-job/2"
JOB_FILE = "job.json"
PROFILE_FILE = "profile.csv"
_PLAN_FILES = re.compile(r"plan(-m\d+)?\.json")


class JobFileError(EnvPipeError):
    """A stored job that this start cannot continue."""


def plan_file(batch: str) -> str:
    """Where the plan of a batch is: of that of full size, whose name is empty, in `plan.json`."""
    return f"plan-{batch}.json" if batch else "plan.json"


def plan_files(folder: Path) -> list[Path]:
    """All plans in a folder."""
    return [path for path in sorted(folder.glob("plan*.json")) if _PLAN_FILES.fullmatch(path.name)]


@dataclass(frozen=True)
class JobKeys:
    """Facts that must be the same for what an earlier start left to hold, of JSON's types.

    Args:
        profile: what units cost rests on, and so everything: model, sizes, GPU.
        steps: what a step takes rests on besides, and so baselines and plans: how many microbatches
            and replicas there are.
        plan: what plans, and the clock of a whole job, rest on besides: what was asked for.
    """

    profile: Mapping[str, Any]
    steps: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredJob:
    """A job as an earlier start left it.

    Args:
        keys: what it rests on.
        starts: each in UTC by ISO 8601.
        profile: SHA-256 of each of the profile's files, by name in the folder; empty without one.
        plan: the same of the plan of each batch, once reconfiguring has ended.
        baselines: by batch, without this GPU's own.
        reconfigure_steps: those that raised a clock, of the last plan.
        one_clock_mhz: the clock that was found for the whole job, if it has one.
        changed: which facts were others before, in words, where that left the profile; not stored.
    """

    keys: JobKeys
    starts: tuple[str, ...] = ()
    profile: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, BaselineEnergy] = field(default_factory=dict)
    reconfigure_steps: int = 0
    reconfigure_ended: Ended | None = None
    one_clock_mhz: int | None = None
    changed: tuple[str, ...] = ()

    @property
    def phases_done(self) -> tuple[str, ...]:
        """The phases that need not be run again."""
        done = {
            "warm-up": self.baselines,
            "profile": self.profile,
            "plan": self.plan,
            "reconfigure": self.reconfigure_ended,
            "one clock": self.one_clock_mhz,
        }
        return tuple(phase for phase, result in done.items() if result)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON data."""
        others = {batch: asdict(replace(b, own=None)) for batch, b in self.baselines.items()}
        for measured in others.values():
            del measured["own"]
        full = others.pop("", None)
        return {
            "format": _JOB_FORMAT,
            "keys": asdict(self.keys),
            "starts": list(self.starts),
            "phases_done": list(self.phases_done),
            "profile": dict(self.profile),
            "plan": dict(self.plan),
            "baseline": full,
            "other_baselines": others,
            "reconfigure": {"steps": self.reconfigure_steps, "ended": self.reconfigure_ended},
            "one_clock_mhz": self.one_clock_mhz,
        }


def read_job(folder: Path, keys: JobKeys, profile_file: Path | None = None) -> StoredJob | None:
    """Read what a folder holds of a job that still holds by these keys; None if there is no job.

    A job that did not make its own profile has it in `profile_file`.

    Raises:
        EnvPipeError: it is another job (naming what differs), damaged, or a file that it names is
            gone, changed or cannot be read.
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
    now = JobKeys(**json.loads(json.dumps(asdict(keys))))
    of_profile = _changes(job.keys.profile, now.profile)
    of_steps = _changes(job.keys.steps, now.steps)
    changed = (*of_profile, *of_steps, *_changes(job.keys.plan, now.plan))
    if of_profile:
        raise JobFileError(f"{path} is of another job: {'; '.join(changed)}")
    if changed:
        baselines = {} if of_steps else job.baselines
        job = StoredJob(now, job.starts, job.profile, baselines=baselines, changed=changed)
    for name, kept in {**job.profile, **job.plan}.items():
        if digest(folder / name) != kept:
            raise JobFileError(f"{folder / name} is gone, or not the one that {path} names")
    if job.profile or job.plan:
        profile = read_profile(profile_file or folder / PROFILE_FILE)
        for name in job.plan:
            read_plan(folder / name, profile)
    return job


def write_job(folder: Path, job: StoredJob) -> None:
    """Replace the folder's job (OSError); a kill at any point leaves the old or the new one."""
    replace_files({folder / JOB_FILE: [json.dumps(job.to_json(), indent=1), "\n"]})


def digest(path: Path) -> str:
    """SHA-256 of a file; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _parse(data: Any) -> StoredJob:
    """A job from its JSON; one of Python's own errors if it is something else."""
    if data["format"] != _JOB_FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {_JOB_FORMAT!r}")
    baselines = {"": data["baseline"], **data.get("other_baselines", {})}
    ended = data["reconfigure"]
    clock = data["one_clock_mhz"]
    return StoredJob(
        keys=JobKeys(**{part: dict(facts) for part, facts in data["keys"].items()}),
        starts=tuple(str(start) for start in data["starts"]),
        profile=_files(data, "profile", PROFILE_FILE),
        plan=_files(data, "plan", None),
        baselines={
            batch: BaselineEnergy(_step(measured["mean"]), tuple(map(_step, measured["by_stage"])))
            for batch, measured in baselines.items()
            if measured is not None
        },
        reconfigure_steps=int(ended["steps"]),
        reconfigure_ended=None if ended["ended"] is None else Ended(ended["ended"]),
        one_clock_mhz=None if clock is None else int(clock),
    )


def _files(data: Mapping[str, Any], part: str, needed: str | None) -> dict[str, str]:
    files = {name: str(kept) for name, kept in data[part].items()}
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no file of its folder")
    if files and needed and needed not in files:
        raise ValueError(f"its {part} is not {needed}")
    return files


def _step(data: dict[str, Any]) -> StepEnergy:
    step = StepEnergy(**data)
    for name, value in data.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"'{name}' of its baseline is {value!r}")
    if not step.time_s or not step.energy_j:
        raise ValueError("its baseline takes nothing")
    return step


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {_shown(before, name)} and is now {_shown(now, name)}"
        for name in sorted({*before, *now})
        if (name in before, before.get(name)) != (name in now, now.get(name))
    ]


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return plain(facts[name]) if name in facts else "not given"
