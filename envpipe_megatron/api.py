"""The planner for Python programs; docs/lookup/python.md shows it at work.

These names, their arguments and their results stay the same within a major version. Modules behind
them may move.
"""

from envpipe_megatron.core.conditions import Conditions, known_conditions, make_conditions
from envpipe_megatron.core.kinds import Kind, Unit, parse_unit
from envpipe_megatron.core.plan import Cost, Plan, read_order, read_plan, saving_uncertainty_percent
from envpipe_megatron.core.profile import Profile, make_profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileRow, SplitBackward
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.frontier import read_frontier, write_frontier
from envpipe_megatron.formats.torch_csv import read_torch_csv, torch_csv
from envpipe_megatron.policies.objective import Goal, Objective, peak_power_w
from envpipe_megatron.policies.planner import (
    Planned,
    build_schedule,
    make_frontier,
    make_memory_frontier,
    make_plan,
)
from envpipe_megatron.policies.request import PlanRequest

__all__ = [
    "Conditions",
    "Cost",
    "EnvPipeError",
    "Goal",
    "Kind",
    "Objective",
    "Placement",
    "Plan",
    "PlanRequest",
    "Planned",
    "Profile",
    "ProfileRow",
    "Schedule",
    "Sidecar",
    "SplitBackward",
    "Timeline",
    "Unit",
    "build_schedule",
    "known_conditions",
    "make_conditions",
    "make_frontier",
    "make_memory_frontier",
    "make_plan",
    "make_profile",
    "parse_unit",
    "peak_power_w",
    "read_frontier",
    "read_order",
    "read_plan",
    "read_profile",
    "read_torch_csv",
    "saving_uncertainty_percent",
    "torch_csv",
    "write_frontier",
]
