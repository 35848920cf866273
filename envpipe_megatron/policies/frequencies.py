"""The policies that give every unit its frequency by a rule (Choi et al., ATC'23, section 4).

A policy is a function of a schedule and a profile that returns a frequency in MHz for each unit,
[num_stages, units_per_stage], each of them profiled. Another package adds its own by an entry point
of the group `envpipe_megatron.policies`; see `policies.registry`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.plan import max_frequencies
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.policies.registry import Registry

Frequencies = IntArray


def uniform(schedule: Schedule, profile: Profile) -> Frequencies:
    """All units at their stage's optimal frequency; ProfileError if a stage has none."""
    optimal = np.array(profile.optimal_frequency_mhz, dtype=np.int64)[:, None]
    return np.repeat(optimal, schedule.units_per_stage, axis=1)


def envelope(schedule: Schedule, profile: Profile) -> Frequencies:
    """Maximum frequency on the outer envelope, optimal frequency inside it; errors as `uniform`."""
    on_envelope = np.isin(np.arange(schedule.num_units), list(schedule.outer_envelope))
    return np.where(
        on_envelope.reshape(schedule.is_backward.shape),
        max_frequencies(schedule, profile),
        uniform(schedule, profile),
    )


POLICIES: Registry[Callable[[Schedule, Profile], Frequencies]] = Registry(
    "envpipe_megatron.policies",
    {"baseline": max_frequencies, "uniform": uniform, "envelope": envelope},
)
