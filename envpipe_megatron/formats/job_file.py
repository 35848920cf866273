"""`job.json`: all that a start reads of what an earlier start of the job left in its folder.

```json
{
 "format": "envpipe-job/5", "sha256": "of the rest",
 "units": {"hidden_size": 2048, "...": 0}, "steps": {"num_microbatches": 24, "...": 0},
 "starts": ["2026-05-04T10:11:12.345+00:00"],
 "profile": {"rows": [[0, "forward", 1410, 0.1, 35.0, 0.2], "..."], "listed_chunks": 1,
             "sidecar": {"...": 0}},
 "baselines": {"": {"mean": {"iterations": 9, "time_s": 0.6, "time_uncertainty_s": 0.001,
                             "energy_j": 210.0, "metering_uncertainty_j": 0.4},
                    "by_stage": ["..."], "own": null}},
 "one_clock_mhz": null
}
```

What units cost rests on what lies under `units`: model, sizes, GPU; and so all else does. What a
step takes rests on `steps` besides: how many microbatches and replicas there are. Baselines have
the names of their batches: empty is the full one, `m24` one of 24 microbatches. Plans are made
again, from the profile. The file is replaced as a whole: a kill leaves the old one or the new one.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from envpipe_megatron.core.fields import read_json
from envpipe_megatron.core.profile import Profile, profile_of_json
from envpipe_megatron.errors import EnvPipeError, plain
from envpipe_megatron.files import replace_files
from envpipe_megatron.formats.steps import BaselineEnergy, StepEnergy

logger = logging.getLogger(__name__)

JOB_FORMAT = "envpipe-job/5"
#: Facts of JSON's types, by the names under which the file has them.
JobKeys: TypeAlias = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class StoredJob:
    """Results of an earlier start that still hold, as `job.json` has it."""

    starts: tuple[str, ...] = ()
    profile: Profile | None = None
    baselines: Mapping[str, BaselineEnergy] = field(default_factory=dict)
    one_clock_mhz: int | None = None

    @property
    def phases_done(self) -> tuple[str, ...]:
        """Return the phases that need not be run again."""
        done = {
            "warm-up": self.baselines,
            "profile": self.profile,
            "one clock": self.one_clock_mhz,
        }
        return tuple(phase for phase, result in done.items() if result)

    def write(self, path: Path, keys: JobKeys) -> None:
        """Replace a job file (OSError); a kill at any point leaves the old or the new one."""
        data = {
            "format": JOB_FORMAT,
            **keys,
            "starts": self.starts,
            "profile": self.profile and self.profile.to_json(),
            "baselines": {batch: asdict(known) for batch, known in self.baselines.items()},
            "one_clock_mhz": self.one_clock_mhz,
        }
        data["sha256"] = _digest(data)
        lines = (f' "{name}": {json.dumps(value)}' for name, value in data.items())
        replace_files({path: ["{\n", ",\n".join(lines), "\n}\n"]})


def read_job(path: Path, keys: JobKeys) -> StoredJob:
    """Read what a job file has that still holds by these keys: nothing if there is no such file.

    Where only `steps` differ, the log says how. Raises EnvPipeError if the file is of another job
    (naming what differs) or version, or damaged.
    """
    if not path.exists():
        return StoredJob()
    fields = read_json(path, "Job file")
    fields.check_format(JOB_FORMAT)
    data, now = fields.data, json.loads(json.dumps(keys))
    if data.pop("sha256", None) != _digest(data):
        raise EnvPipeError(f"{path} is damaged")
    units, steps = (_changes(data[part], now[part]) for part in ("units", "steps"))
    if units:
        raise EnvPipeError(f"{path} is of another job: {'; '.join(units + steps)}")
    profile = profile_of_json(data["profile"], path) if data["profile"] else None
    job = StoredJob(tuple(data["starts"]), profile)
    if not steps:
        baselines = {
            batch: BaselineEnergy(
                StepEnergy(**known["mean"]),
                tuple(StepEnergy(**stage) for stage in known["by_stage"]),
            )
            for batch, known in data["baselines"].items()
        }
        return replace(job, baselines=baselines, one_clock_mhz=data["one_clock_mhz"])
    left = ", ".join(job.phases_done) or "nothing"
    logger.warning("The job has changed: %s. Of it, %s is kept", "; ".join(steps), left)
    return job


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    def shown(facts: Mapping[str, Any], name: str) -> str:
        return plain(facts[name]) if name in facts else "not given"

    return [
        f"{name} was {shown(before, name)} and is now {shown(now, name)}"
        for name in sorted({*before, *now})
        if (name in before, before.get(name)) != (name in now, now.get(name))
    ]
