"""The policies that give every unit its frequency by a rule (Choi et al., ATC'23, section 4).

A policy is a function of a schedule and a profile that returns a frequency in MHz for each unit,
[num_stages, units_per_stage], each of them profiled. Another package adds its own by an entry point
of the group `envpipe_megatron.policies`, as `added_functions` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.plan import max_frequencies
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError


def uniform(schedule: Schedule, profile: Profile) -> IntArray:
    """Return all units at their stage's optimal frequency; ProfileError if a stage has none."""
    optimal = np.array(profile.optimal_frequency_mhz, dtype=np.int64)[:, None]
    return np.repeat(optimal, schedule.units_per_stage, axis=1)


def envelope(schedule: Schedule, profile: Profile) -> IntArray:
    """Return maximum clocks on the outer envelope, optimal ones inside; errors as `uniform`."""
    on_envelope = np.isin(np.arange(schedule.num_units), list(schedule.outer_envelope))
    return np.where(
        on_envelope.reshape(schedule.is_backward.shape),
        max_frequencies(schedule, profile),
        uniform(schedule, profile),
    )


def added_functions(group: str, known: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Return functions of installed packages by name; each is imported when it is called.

    A package adds one by an entry point in its `pyproject.toml`, after which commands and the
    options of a job take its name. None can replace a `known` one.

        [project.entry-points."envpipe_megatron.schedules"]
        mine = "my_package.orders:mine"
    """
    found = entry_points(group=group)
    return {entry.name: partial(_call, entry) for entry in found if entry.name not in known}


def _call(entry: EntryPoint, *arguments: Any) -> Any:
    try:
        function = entry.load()
    except Exception as error:
        raise EnvPipeError(
            f"'{entry.name}' of {entry.group} cannot be imported: {error}",
            value=entry.value,
            remedy="Fix or remove the package that adds it.",
        ) from error
    return function(*arguments)


_OWN = {"baseline": max_frequencies, "uniform": uniform, "envelope": envelope}
#: By name, our own and those that packages add.
POLICIES: dict[str, Callable[[Schedule, Profile], IntArray]] = {
    **_OWN,
    **added_functions("envpipe_megatron.policies", _OWN),
}
