"""`job.json`: what a job has measured and decided, for when it is started again.

```json
{
 "format": "envpipe-job/4", "sha256": "of the rest",
 "keys": {"profile": {"hidden_size": 2048, "...": 0}, "plan": {"policy": "envelope", "...": 0}},
 "starts": ["2026-05-04T10:11:12.345+00:00"],
 "phases_done": ["warm-up", "profile", "reconfigure"],
 "profile": {"rows": [[0, "forward", 1410, 0.1, 35.0, 0.2], "..."], "listed_chunks": 1,
             "sidecar": {"...": 0}},
 "plans": {"": {"format": "envpipe-plan/1", "...": 0}},
 "baselines": {"": {"mean": {"iterations": 9, "time_s": 0.6, "time_uncertainty_s": 0.001,
                             "energy_j": 210.0, "metering_uncertainty_j": 0.4},
                    "by_stage": ["..."], "own": null}},
 "reconfigure_steps": 12, "reconfigure_ended": "...", "one_clock_mhz": null
}
```

Plans and baselines have the names of their batches: empty is the full one, `m24` one of 24
microbatches. The file is all that a start reads, and is replaced as a whole: a kill leaves the old
one or the new one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from envpipe_megatron.core.fields import Fields, read_json
from envpipe_megatron.core.plan import Plan, plan_of_fields
from envpipe_megatron.core.profile import Profile, profile_of_json, read_profile
from envpipe_megatron.errors import EnvPipeError, plain
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.steps import BaselineEnergy, StepEnergy
from envpipe_megatron.policies.reconfigure import Ended

_JOB_FORMAT = "envpipe-job/4"
JOB_FILE, PROFILE_FILE = "job.json", "profile.csv"

#: Facts that must be the same for what an earlier start left to hold, of JSON's types. `profile`:
#: what units cost rests on, and so everything: model, sizes, GPU. `plan`: what a step takes and all
#: that is planned rest on besides: how many microbatches and replicas there are, what is asked for.
JobKeys: TypeAlias = Mapping[str, Mapping[str, Any]]


def plan_file(batch: str) -> str:
    """Name the file of a batch's plan; the batch of full size has an empty name."""
    return f"plan-{batch}.json" if batch else "plan.json"


@dataclass(frozen=True)
class StoredJob:
    """A job as an earlier start left it.

    Args:
        keys: what it rests on.
        starts: each in UTC by ISO 8601.
        profile: None without one of its own.
        plans: that of each batch, once reconfiguring has ended.
        baselines: by batch, without this GPU's own.
        reconfigure_steps: those that raised a clock, of the last plan.
        one_clock_mhz: the clock that was found for the whole job, if it has one.
        changed: which facts were others before, in words, where that left the profile; not stored.
    """

    keys: JobKeys = field(default_factory=dict)
    starts: tuple[str, ...] = ()
    profile: Profile | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
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
            "plan": self.plans,
            "reconfigure": self.reconfigure_ended,
            "one clock": self.one_clock_mhz,
        }
        return tuple(phase for phase, result in done.items() if result)

    def write(self, path: Path) -> None:
        """Replace a job file (OSError); a kill at any point leaves the old or the new one."""
        data = {
            "format": _JOB_FORMAT,
            **vars(self),
            "phases_done": self.phases_done,
            "profile": self.profile and self.profile.to_json(),
            "plans": {batch: plan.to_json() for batch, plan in self.plans.items()},
            "baselines": {batch: asdict(known) for batch, known in self.baselines.items()},
        }
        del data["changed"]
        data["sha256"] = _digest(data)
        lines = (f' "{name}": {json.dumps(value)}' for name, value in data.items())
        replace_files({path: ["{\n", ",\n".join(lines), "\n}\n"]})


def read_job(path: Path, keys: JobKeys, profile_file: Path | None = None) -> StoredJob:
    """Read what a job file has that still holds by these keys: nothing if there is no such file.

    A job that did not make its own profile has it in `profile_file`.

    Raises EnvPipeError if it is of another job (naming what differs) or version, or damaged.
    """
    if not path.exists():
        return StoredJob(keys)
    fields = read_json(path, "Job file")
    fields.check_format(_JOB_FORMAT)
    data = fields.data
    if data.pop("sha256", None) != _digest(data):
        raise EnvPipeError(f"{path} is damaged")
    now = json.loads(json.dumps(keys))
    of_profile, of_plan = (_changes(data["keys"][part], now[part]) for part in ("profile", "plan"))
    if of_profile:
        raise EnvPipeError(f"{path} is of another job: {'; '.join(of_profile + of_plan)}")
    profile = profile_of_json(data["profile"], path) if data["profile"] else None
    job = StoredJob(now, tuple(data["starts"]), profile, changed=tuple(of_plan))
    if of_plan:
        return job
    if profile_file and data["plans"]:
        profile = read_profile(profile_file)
    ended = data["reconfigure_ended"]
    return replace(
        job,
        plans={
            batch: plan_of_fields(Fields(plan, path), profile)
            for batch, plan in data["plans"].items()
            if profile is not None
        },
        baselines={
            batch: BaselineEnergy(
                StepEnergy(**known["mean"]), tuple(StepEnergy(**each) for each in known["by_stage"])
            )
            for batch, known in data["baselines"].items()
        },
        reconfigure_steps=data["reconfigure_steps"],
        reconfigure_ended=ended and Ended(ended),
        one_clock_mhz=data["one_clock_mhz"],
    )


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} was {_shown(before, name)} and is now {_shown(now, name)}"
        for name in sorted({*before, *now})
        if (name in before, before.get(name)) != (name in now, now.get(name))
    ]


def _shown(facts: Mapping[str, Any], name: str) -> str:
    return plain(facts[name]) if name in facts else "not given"
