"""Plans: a frequency for each unit of a schedule, what that costs, and their file.

Readers of a plan recompute time and energy from the profile, under the conditions in
the plan.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from envpipe_megatron import __version__
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions, conditions_to_json, read_conditions
from envpipe_megatron.core.evaluation import Evaluation, evaluate
from envpipe_megatron.core.evaluation import PlanError as PlanError
from envpipe_megatron.core.fields import (
    AMOUNT,
    COUNT,
    FLAG,
    FREQUENCY,
    MAX_FREQUENCY_MHZ,
    TEXT,
    Fields,
    Number,
    many,
    of_type,
    read_json,
)
from envpipe_megatron.core.kinds import SPLIT, Kind, ScheduleError, Unit, marked_grid, parse_unit
from envpipe_megatron.core.orders.builders import framework_schedule
from envpipe_megatron.core.profile import Profile, read_profile
from envpipe_megatron.core.profile_rows import ProfileError, SplitBackward
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.timeline import Timeline
from envpipe_megatron.files import replace_files

PLAN_FORMAT = "envpipe-plan/1"
#: A stored figure further than this from the recomputed one was not made by the plan and profile;
#: a lower bound may be as far above the energy, by a solver's tolerances.
_STORED_TOLERANCE = 1e-6
_PARK = Number(whole=True, below=MAX_FREQUENCY_MHZ)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cost:
    """Time and energy of one iteration."""

    iteration_time_s: float
    energy_j: float

    @property
    def mean_power_w(self) -> float:
        """Mean power of all GPUs over the iteration."""
        return self.energy_j / self.iteration_time_s

    def saving_percent(self, baseline: Cost) -> float:
        """Return the energy saved against a baseline."""
        return 100.0 * (1.0 - self.energy_j / baseline.energy_j)

    def slowdown_percent(self, baseline: Cost) -> float:
        """Return the time lost against a baseline."""
        return 100.0 * (self.iteration_time_s / baseline.iteration_time_s - 1.0)


@dataclass(frozen=True)
class Plan:
    """A schedule with a frequency for each unit, and the profile that prices it.

    Args:
        policy: how the plan was made.
        frequency_mhz: [num_stages, units_per_stage]; a pair runs at its backward's.
        profile: already for the schedule's number of chunks.
        park_mhz: as `evaluation.evaluate` takes it.
        energy_lower_bound_j: certificate that no plan of this schedule, profile and conditions is
            as fast and takes less.
        objective: what was asked for beside the least energy; kept for readers.

    Raises PlanError if shapes do not fit; once it is evaluated, as `evaluation.evaluate` does.
    """

    policy: str
    schedule: Schedule
    frequency_mhz: IntArray
    profile: Profile
    conditions: Conditions
    _: KW_ONLY
    park_mhz: IntArray | None = None
    energy_lower_bound_j: float | None = None
    objective: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_stages(self.profile, self.schedule.num_stages)
        if self.profile.sidecar.num_chunks != self.schedule.num_chunks:
            raise PlanError(
                f"The schedule has {self.schedule.num_chunks} chunks a stage, and the profile has "
                f"{self.profile.sidecar.num_chunks}",
                remedy="Divide the profile with for_chunks first.",
            )
        shape = (self.schedule.num_stages, self.schedule.units_per_stage)
        for name, clocks in (("frequency_mhz", self.frequency_mhz), ("park_mhz", self.park_mhz)):
            if clocks is not None and (clocks.shape != shape or clocks.min() < 0):
                raise PlanError(
                    f"'{name}' needs one clock, of 0 or more, for each unit of each stage",
                    value=clocks.shape,
                    remedy=f"The schedule is {shape[0]} x {shape[1]}.",
                )
        object.__setattr__(self, "frequency_mhz", self.schedule.pair_clocks(self.frequency_mhz))
        if self.conditions.num_stages != shape[0]:
            raise PlanError(
                f"The plan has {shape[0]} stages, and its conditions have "
                f"{self.conditions.num_stages}",
            )
        bound_j = self.energy_lower_bound_j
        if bound_j is not None and not 0 < bound_j < math.inf:
            raise PlanError("'energy_lower_bound_j' is not an energy", value=bound_j)

    @cached_property
    def evaluation(self) -> Evaluation:
        """One iteration of the plan."""
        return evaluate(
            self.schedule, self.frequency_mhz, self.profile, self.conditions, self.park_mhz
        )

    @property
    def timeline(self) -> Timeline:
        """Start and end of each unit under the plan, and the iteration with its tails."""
        return self.evaluation.timeline

    @cached_property
    def cost(self) -> Cost:
        """Iteration time and energy, over all GPUs that the conditions give the stages."""
        return Cost(self.timeline.iteration_time_s, float(self.energy_by_stage_j.sum()))

    @property
    def energy_by_stage_j(self) -> FloatArray:
        """[num_stages] energy of each stage in one iteration, on all of its GPUs."""
        return self.evaluation.energy_by_stage_j

    @property
    def gap_percent(self) -> float | None:
        """Distance of the energy above its lower bound, in percent; None without a bound."""
        if self.energy_lower_bound_j is None:
            return None
        return 100.0 * (self.cost.energy_j / self.energy_lower_bound_j - 1.0)

    @cached_property
    def baseline(self) -> Plan:
        """All units at the maximum clock in the framework's own order, with the same conditions."""
        schedule = framework_schedule(self.schedule, self.conditions.group_size)
        frequency = max_frequencies(schedule, self.profile)
        return Plan("baseline", schedule, frequency, self.profile, self.conditions)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as its file holds it."""
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "policy": self.policy,
            "schedule_name": self.schedule.name,
            "num_stages": self.schedule.num_stages,
            "num_microbatches": self.schedule.num_microbatches,
            "num_chunks": self.schedule.num_chunks,
            "schedule": self.schedule.labels(),
            "frequency_mhz": self.frequency_mhz.tolist(),
            "blocking_power_w": list(self.conditions.blocking_power_w),
            **conditions_to_json(self.conditions),
            "iteration_time_s": self.cost.iteration_time_s,
            "energy_j": self.cost.energy_j,
            "peak_in_flight": list(self.schedule.peak_in_flight),
            "baseline": {
                "schedule": self.baseline.schedule.name,
                "iteration_time_s": self.baseline.cost.iteration_time_s,
                "energy_j": self.baseline.cost.energy_j,
            },
            "profile_sha256": self.profile.sha256,
            "created_by": f"envpipe {__version__}",
        }
        if self.park_mhz is not None and self.park_mhz.any():
            data["park_mhz"] = self.park_mhz.tolist()
        if self.schedule.placement is not Placement.LOOPED:
            data["placement"] = self.schedule.placement.value
        if self.schedule.split and self.profile.assumed is not None:
            data["assumed_split"] = vars(self.profile.assumed)
        if self.profile.interpolates:
            data["interpolated"] = True
        if self.objective is not None:
            data["objective"] = dict(self.objective)
        if self.energy_lower_bound_j is not None:
            data["energy_lower_bound_j"] = self.energy_lower_bound_j
        return data

    def write(self, path: Path) -> None:
        """Write the plan's JSON, one line per stage."""
        lines = []
        for name, value in self.to_json().items():
            text = json.dumps(value)
            if name in ("schedule", "frequency_mhz", "park_mhz"):
                text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "]"
            lines.append(f" {json.dumps(name)}: {text}")
        replace_files({path: ["{\n", ",\n".join(lines), "\n}\n"]})


def max_frequencies(schedule: Schedule, profile: Profile) -> IntArray:
    """Return [num_stages, units_per_stage] the highest profiled frequency of each unit."""
    top = [rows[0].frequency_mhz for kinds in profile.rows for rows in kinds.values()]
    return np.array(top, dtype=np.int64)[profile.keys(schedule)]


def one_clock_plans(plan: Plan) -> list[Plan]:
    """Return the order at one clock for all units: of each that all stages were profiled at.

    The highest clock first.
    """
    profile = plan.profile
    by_stage = (set(profile.clocks_mhz(stage)) for stage in range(profile.num_stages))
    return [
        replace(plan, policy="uniform", frequency_mhz=np.full_like(plan.frequency_mhz, clock))
        for clock in sorted(set.intersection(*by_stage), reverse=True)
    ]


def check_stages(profile: Profile, num_stages: int) -> None:
    """Refuse (PlanError) a profile of another number of stages."""
    if profile.num_stages != num_stages:
        raise PlanError(
            f"The profile {profile.source} has {profile.num_stages} stages, and the pipeline "
            f"{num_stages}",
            remedy="Use the profile of this model on as many stages, or plan again.",
        )


def read_with_profile(
    plan: Path | None, profile: Path, num_stages: int
) -> tuple[Profile, Plan | None]:
    """Read a profile of this many stages, and a plan where there is one, priced with it.

    Raises what `read_profile`, `check_stages` and `read_plan` do.
    """
    read = read_profile(profile)
    check_stages(read, num_stages)
    return read, None if plan is None else read_plan(plan, read)


def read_plan(path: Path, profile: Profile) -> Plan:
    """Read a plan's JSON and price it with a profile.

    A plan made from another profile is priced with the given one, with a warning. PlanError names
    the field that is wrong, or figures that the very profile it was made from does not give;
    ProfileError a frequency that was not profiled.
    """
    return plan_of_fields(read_json(path, "Plan", PlanError), profile)


def read_order(path: Path) -> Schedule:
    """Return the order of a plan's JSON, which takes no profile; PlanError as `read_plan`."""
    return read_order_and_groups(path)[0]


def read_order_and_groups(path: Path) -> tuple[Schedule, int | None]:
    """Return the same, and the group size of the framework's own order where the plan has it."""
    fields = read_json(path, "Plan", PlanError)
    return _read_schedule(fields), fields.read("group_size", COUNT, None)


def _read_schedule(fields: Fields) -> Schedule:
    fields.check_format(PLAN_FORMAT)
    num_stages = fields.read("num_stages", COUNT)
    num_microbatches = fields.read("num_microbatches", COUNT)
    num_chunks = fields.read("num_chunks", COUNT, 1)
    orders = fields.read("schedule", many(of_type(list, "a list"), num_stages))
    if num_microbatches * num_chunks > max(map(len, orders)):
        raise fields.wrong("num_microbatches", "The schedule lists fewer units than that needs.")
    try:
        return Schedule(
            fields.read("schedule_name", TEXT, "custom"),
            num_microbatches,
            num_chunks,
            _read_units(orders),
            fields.read("placement", _placement, Placement.LOOPED),
        )
    except ScheduleError as error:
        raise PlanError(f"{fields.path}: field 'schedule': {error}") from error


def _read_units(orders: Sequence[Sequence[str]]) -> tuple[tuple[Unit, ...], ...]:
    """Return the units of each stage; ScheduleError marks one that is not readable."""
    units: list[list[Unit]] = [[] for _ in orders]
    for stage, order in enumerate(orders):
        try:
            for text in order:
                units[stage].append(parse_unit(text))
        except ScheduleError as error:
            grid = marked_grid(orders, [(stage, len(units[stage]))])
            raise ScheduleError(f"{error}\n{grid}") from error
    return tuple(map(tuple, units))


def plan_of_fields(fields: Fields, profile: Profile) -> Plan:
    """Read a plan as `read_plan` does, from its fields."""
    schedule = _read_schedule(fields)

    def clocks(name: str, clock: Number) -> IntArray:
        by_stage = many(many(clock, schedule.units_per_stage), schedule.num_stages)
        return np.array(fields.read(name, by_stage), dtype=np.int64)

    profile = replace(profile, interpolates=fields.read("interpolated", FLAG, False))
    if schedule.split and Kind.INPUT_GRADIENT not in profile.kinds:
        profile = profile.with_split_backwards(fields.read("assumed_split", _assumed_split))
    plan = Plan(
        fields.read("policy", TEXT, "custom"),
        schedule,
        clocks("frequency_mhz", FREQUENCY),
        profile.for_chunks(schedule.num_chunks),
        read_conditions(fields, schedule.num_stages),
        park_mhz=clocks("park_mhz", _PARK) if "park_mhz" in fields.data else None,
        energy_lower_bound_j=fields.read("energy_lower_bound_j", AMOUNT, None),
        objective=fields.read("objective", of_type(dict, "an object"), None),
    )
    return _compare_with_stored(plan, fields)


def _placement(value: Any) -> Placement:
    if value not in list(Placement):
        raise ValueError(f"one of {', '.join(Placement)}")
    return Placement(value)


def _assumed_split(value: Any) -> SplitBackward:
    try:
        return SplitBackward(**{name: AMOUNT(share) for name, share in value.items()})
    except (AttributeError, TypeError, ProfileError):
        raise ValueError("an object of input_share and overhead") from None


def _compare_with_stored(plan: Plan, fields: Fields) -> Plan:
    """Return the plan, without its bound if that was proved for another profile."""
    own_profile = fields.data.get("profile_sha256") == plan.profile.sha256
    try:
        cost = plan.cost
    except PlanError as error:  # evaluation refuses only parking
        raise PlanError(f"{fields.path}: field 'park_mhz': {error}") from error
    for name, value in vars(cost).items():
        stored = fields.data.get(name)
        with suppress(ValueError):
            if math.isclose(AMOUNT(stored), value, rel_tol=_STORED_TOLERANCE):
                continue
        if own_profile:
            raise fields.wrong(name, f"The plan and its profile give {value}; make the plan again.")
        logger.warning(
            "%s was made from another profile: %s is %.6g here, %s in the file",
            fields.path, name, value, stored,
        )  # fmt: skip
    bound_j = plan.energy_lower_bound_j
    if bound_j is None:
        return plan
    if not own_profile:
        logger.warning("%s: its lower bound is of another profile and is left out", fields.path)
        return replace(plan, energy_lower_bound_j=None)
    if bound_j > cost.energy_j * (1 + _STORED_TOLERANCE):
        raise fields.wrong(
            "energy_lower_bound_j",
            f"The plan itself takes {cost.energy_j} J; make the plan again.",
        )
    return plan


#: Half of the 95 % interval of a normal distribution, in standard deviations.
NORMAL_95 = 1.96


def saving_uncertainty_percent(plan: Plan) -> float | None:
    """Return the saving's standard uncertainty, in points, from that of the profile's energies.

    Linear: the saving changes with a row's energy by how many units the row prices, in the plan
    and in the baseline. Late clocks count as the clocks that come. None if a row that is used has
    no uncertainty, or no row an energy.
    """
    profile, base_j = plan.profile, plan.baseline.cost.energy_j
    if not base_j:
        return None
    shares = ((plan, 1.0), (plan.baseline, -plan.cost.energy_j / base_j))
    keys = [(profile.keys(each.schedule), each.frequency_mhz, share) for each, share in shares]
    parts = [(part, *of) for part, kinds in enumerate(profile.rows) for of in kinds.items()]
    errors_j: dict[tuple[int, Kind, int], float] = defaultdict(float)
    for key, (part, kind, rows) in enumerate(parts):
        clocks, gpus = profile.curves[key][0], plan.conditions.gpus_by_stage
        # Both parts of a backward that were priced by assumption share its row's error.
        measured = Kind.BACKWARD if profile.assumed and kind in SPLIT[1:] else kind
        for row, at in zip(reversed(rows), np.eye(len(clocks)), strict=True):
            # Units that the row prices; between two clocks, a share of a unit.
            uses = [share * np.interp(mhz[of == key], clocks, at).sum() for of, mhz, share in keys]
            if kind is Kind.NOTHING or not any(uses):
                continue
            if row.energy_uncertainty_j is None:
                return None
            error_j = sum(uses) * gpus[part // profile.listed_chunks] * row.energy_uncertainty_j
            errors_j[part, measured, row.frequency_mhz] += error_j
    return 100 * math.hypot(*errors_j.values()) / base_j
