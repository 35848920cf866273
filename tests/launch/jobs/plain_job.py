"""The job that `trained_rank` trains, and a plan for it under which clocks change all the time."""

from pathlib import Path

import numpy as np
from presets import preset_profile

from envpipe_megatron.core.conditions import make_conditions
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.gpu.presets import load_preset

PRESET = "a100-sxm"
MICROBATCHES = 4
WARMUP_ITERATIONS = 3
TIMES_S = {Kind.FORWARD: 0.01, Kind.BACKWARD: 0.02}
#: A unit's clock is never that of the unit before it, and never the highest.
PLANNED_MHZ = (1200, 1110)


def write_plan(folder: Path, num_stages: int) -> None:
    """Leave `profile.csv` and `plan.json` for the ranks of a job."""
    profile = preset_profile(PRESET, num_stages, TIMES_S, PLANNED_MHZ)
    schedule = builders.one_f_one_b(num_stages, MICROBATCHES)
    position = np.arange(schedule.units_per_stage)
    frequency_mhz = np.tile(np.take(PLANNED_MHZ, position % 2), (num_stages, 1))
    conditions = make_conditions(profile, blocking_power_w=load_preset(PRESET).wait_power_w)
    profile.write(folder / "profile.csv")
    Plan("uniform", schedule, frequency_mhz, profile, conditions).write(folder / "plan.json")
