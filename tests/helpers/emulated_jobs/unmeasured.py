"""Orders by file for runs whose clocks stay as they are, with a profile that nobody measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from presets import preset_profile

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import WHOLE, Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.profile_rows import SplitBackward
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.frequencies import envelope
from envpipe_megatron.policies.problem import order_limits

PRESET = "h200"


def stepped_order(
    num_stages: int, num_microbatches: int, capacity: int | None, *, step: int = 1
) -> Schedule:
    """EnvPipe's order, each stage `step` extra forwards above the next where that is possible."""
    limits = order_limits(
        builders.one_f_one_b(num_stages, num_microbatches), channel_capacity=capacity
    )
    times_s = [float(step)] * num_stages, [1.0] * num_stages
    wanted = builders.envpipe_extra_forwards(*times_s, limits.most)
    return builders.envpipe(num_stages, num_microbatches, limits.fit(wanted))


def another_each_unit(schedule: Schedule, profile: Profile) -> IntArray:
    """Clocks that change at every unit, in MHz, [num_stages, units_per_stage]."""
    clocks_mhz = [row.frequency_mhz for row in profile.rows[0][Kind.FORWARD]]
    return np.resize(np.array(clocks_mhz, dtype=np.int64), schedule.is_backward.shape)


def write_unmeasured_plan(
    schedule: Schedule,
    folder: Path,
    frequencies: Callable[[Schedule, Profile], IntArray] = envelope,
) -> tuple[Path, Path]:
    """Write profile.csv and plan.json of an order; by default its inner units ask for clocks."""
    profile_file, plan_file = folder / "profile.csv", folder / "plan.json"
    clocks_mhz = load_preset(PRESET).supported_frequencies_mhz[6:60:6]
    pairs = [Kind.COMBINED] if schedule.combined.any() and not schedule.split else []
    times_s = dict.fromkeys([*WHOLE, *pairs], 0.01)
    chunks = schedule.num_chunks
    parts = preset_profile(PRESET, schedule.num_stages * chunks, times_s, clocks_mhz)
    if schedule.split:
        parts = replace(parts.with_split_backwards(SplitBackward(0.5, 0.0)), assumed=None)
    replace(parts, listed_chunks=chunks, sidecar=Sidecar(num_chunks=chunks)).write(profile_file)
    profile = read_profile(profile_file)
    conditions = Conditions((0.0,) * schedule.num_stages)
    plan = Plan("envelope", schedule, frequencies(schedule, profile), profile, conditions)
    plan.write(plan_file)
    return profile_file, plan_file
