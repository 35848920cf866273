"""A folder of a job that has come to its steady phase, for tests of what another start finds."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.formats.job_file import JobKeys
from envpipe_megatron.formats.steps import BaselineEnergy, StepEnergy
from envpipe_megatron.policies.planner import make_plan
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.job import restarts
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.restarts import JobFolder

KEYS: JobKeys = {
    "units": {"hidden_size": 2048, "stages": [1, 2], "gpu": "NVIDIA H200", "recompute": None},
    "steps": {"num_microbatches": 4, "group_size": None, "num_replicas": 1},
}
#: Those of a job whose units cost something else.
OTHER: JobKeys = {"units": {"other": 1}, "steps": {}}
STEP = StepEnergy(9, 0.6, 0.01, 210.5, 0.4)
BASELINE = BaselineEnergy(STEP, (STEP, replace(STEP, energy_j=190.0)))


def alone() -> Collectives:
    """Of one rank, which plans."""
    group: Any = SimpleNamespace(leads=True, gather=lambda own: [own], broadcast=lambda own: own)
    return Collectives(0, group, [], 1)


@cache
def profiled(watts: float = 100.0) -> Profile:
    rows = [
        (stage, kind, ProfileRow(f, 1410 / f, watts * f / 1e3))
        for stage in range(2)
        for kind in WHOLE
        for f in (1410, 1200, 990)
    ]
    return make_profile(rows, source="made for a test")


@cache
def planned() -> Plan:
    return make_plan(profiled(), PlanRequest(4, "envpipe", "envelope")).plan


def of_units(**change: object) -> JobKeys:
    """The keys of a job whose units rest on other facts."""
    return {**KEYS, "units": {**KEYS["units"], **change}}


def job_folder(path: Path | None, keys: JobKeys = KEYS, **given: Any) -> JobFolder:
    """The folder of a job that is started, as one rank alone sees it.

    Args:
        keys: in place of those that come from the options.
        given: other options.
    """
    options = JobOptions(fingerprint={}, **given)  # type: ignore[arg-type]
    made: Any = JobFolder(path, alone(), options.files)
    with patch.object(restarts, "job_keys", lambda *arguments: keys):
        made.resume(options, 2, None)
    return made  # type: ignore[no-any-return]


def kept_job(path: Path) -> Path:
    """Leave a whole job in a folder."""
    folder = job_folder(path)
    folder.keep_profile(profiled())
    folder.write_plan(planned())
    folder.keep_baselines({"": replace(BASELINE, own=STEP)})
    return path
