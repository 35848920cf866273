"""Plans: a frequency for each unit of a schedule, what that costs, and the file they stand in.

Iteration energy is the sum of unit energies plus, over stages, blocking power x (iteration time -
busy time). It is never taken from a file: whoever reads a plan recomputes it from the profile.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron import __version__, builders
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.profile import Profile
from envpipe_megatron.schedule import Schedule, ScheduleError, parse_unit
from envpipe_megatron.timeline import Timeline

PLAN_FORMAT = "envpipe-plan/1"
#: A stored figure further than this from the recomputed one was not made by the plan and profile.
_STORED_TOLERANCE = 1e-6
_MAX_FREQUENCY_MHZ = 1_000_000

logger = logging.getLogger(__name__)


class PlanError(EnvPipeError):
    """A plan that is not readable, or does not fit its profile."""


@dataclass(frozen=True)
class Cost:
    """What one iteration takes."""

    iteration_time_s: float
    energy_j: float

    def saving_percent(self, baseline: Cost) -> float:
        """Energy saved against a baseline."""
        return 100.0 * (1.0 - self.energy_j / baseline.energy_j)

    def slowdown_percent(self, baseline: Cost) -> float:
        """Time lost against a baseline."""
        return 100.0 * (self.iteration_time_s / baseline.iteration_time_s - 1.0)


@dataclass(frozen=True)
class Plan:
    """A schedule with a frequency for each unit, and the profile that prices it.

    Args:
        policy: how the plan was made.
        schedule: the order of units.
        frequency_mhz: [num_stages, units_per_stage].
        profile: time and energy of units, already for the schedule's number of chunks.
        blocking_power_w: for each stage, the power of a GPU that waits in a receive.
        latency_s: p2p latency for each boundary; 0 changes nothing.

    Raises:
        PlanError: shapes that do not fit, or powers that are not.
        ProfileError: a frequency that was not profiled.
    """

    policy: str
    schedule: Schedule
    frequency_mhz: NDArray[np.int64]
    profile: Profile
    blocking_power_w: tuple[float, ...]
    latency_s: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        check_stages(self.profile, self.schedule.num_stages)
        if self.profile.sidecar.num_chunks != self.schedule.num_chunks:
            raise PlanError(
                f"The schedule has {self.schedule.num_chunks} chunks a stage, the profile another "
                "number",
                value=self.profile.sidecar.num_chunks,
                remedy="Divide the profile with for_chunks first.",
            )
        shape = (self.schedule.num_stages, self.schedule.units_per_stage)
        if self.frequency_mhz.shape != shape:
            raise PlanError(
                "A plan needs one frequency for each unit of each stage",
                value=self.frequency_mhz.shape,
                remedy=f"The schedule is {shape}.",
            )
        powers = self.blocking_power_w
        if len(powers) != shape[0] or not all(math.isfinite(p) and p >= 0 for p in powers):
            raise PlanError(
                "Blocking power must be one number of watts, zero or more, for each stage",
                value=powers,
            )

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of each unit under the plan."""
        return Timeline(self.schedule, self._unit_costs[0], self.latency_s)

    @cached_property
    def cost(self) -> Cost:
        """Iteration time and energy."""
        time_s, energy_j = self._unit_costs
        iteration_s = self.timeline.iteration_time_s
        waiting_s = iteration_s - time_s.sum(axis=1)
        waiting_j = np.dot(self.blocking_power_w, waiting_s)
        return Cost(iteration_s, float(energy_j.sum() + waiting_j))

    @cached_property
    def energy_by_stage_j(self) -> NDArray[np.float64]:
        """[num_stages] energy of one GPU of each stage in one iteration."""
        time_s, energy_j = self._unit_costs
        waiting_s = self.timeline.iteration_time_s - time_s.sum(axis=1)
        total_j: NDArray[np.float64] = (
            energy_j.sum(axis=1) + np.asarray(self.blocking_power_w) * waiting_s
        )
        return total_j

    @cached_property
    def baseline(self) -> Plan:
        """All units at the maximum clock in the framework's own order."""
        schedule = framework_schedule(self.schedule)
        frequency = max_frequencies(schedule, self.profile)
        return Plan(
            "baseline", schedule, frequency, self.profile, self.blocking_power_w, self.latency_s
        )

    @cached_property
    def _unit_costs(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.profile.lookup(self.frequency_mhz, self.schedule.is_backward)

    def to_json(self) -> dict[str, Any]:
        """The plan as its file holds it."""
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "policy": self.policy,
            "schedule_name": self.schedule.name,
            "num_stages": self.schedule.num_stages,
            "num_microbatches": self.schedule.num_microbatches,
            "num_chunks": self.schedule.num_chunks,
            "schedule": self.schedule.labels(),
            "frequency_mhz": self.frequency_mhz.tolist(),
            "blocking_power_w": list(self.blocking_power_w),
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
        if np.any(self.latency_s):
            data["p2p_latency_s"] = np.broadcast_to(
                self.latency_s, (self.schedule.num_stages - 1,)
            ).tolist()
        return data

    def write(self, path: Path) -> None:
        """Write the plan's JSON, one line a stage."""
        lines = []
        for name, value in self.to_json().items():
            text = json.dumps(value)
            if name in ("schedule", "frequency_mhz"):
                text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "]"
            lines.append(f" {json.dumps(name)}: {text}")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def framework_schedule(schedule: Schedule) -> Schedule:
    """The order that Megatron itself would run for the same job.

    Where Megatron runs no such job (chunks, and microbatches that do not fill the pipeline), the
    schedule itself.
    """
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    if schedule.forward_only:
        return builders.forward_only(stages, microbatches, schedule.num_chunks)
    if schedule.num_chunks > 1:
        fits = microbatches % stages == 0
        return builders.interleaved(stages, microbatches, schedule.num_chunks) if fits else schedule
    return builders.one_f_one_b(stages, microbatches)


def max_frequencies(schedule: Schedule, profile: Profile) -> NDArray[np.int64]:
    """[num_stages, units_per_stage] the highest profiled frequency of each unit."""
    top = np.array([[rows[0].frequency_mhz for rows in kinds.values()] for kinds in profile.rows])
    return np.where(schedule.is_backward, top[:, 1:], top[:, :1]).astype(np.int64)


def check_stages(profile: Profile, num_stages: int) -> None:
    """Refuse a profile of another pipeline.

    Raises:
        PlanError: the profile has another number of stages.
    """
    if profile.num_stages != num_stages:
        raise PlanError(
            f"The plan has {num_stages} stages but profile {profile.source} has another number",
            value=profile.num_stages,
            remedy="Use the profile of the same pipeline, or plan again.",
        )


def read_plan(path: Path, profile: Profile) -> Plan:
    """Read a plan's JSON and price it with a profile.

    A plan made from another profile is priced with the given one, with a warning.

    Raises:
        PlanError: naming the field that is wrong, or figures that the very profile it was made from
            does not give.
        ScheduleError: an order that cannot run.
        ProfileError: a frequency that was not profiled.
    """
    data = _read_object(path)
    fields = _Fields(data, path)
    if data.get("format") != PLAN_FORMAT:
        raise fields.wrong("format", f"It must be '{PLAN_FORMAT}'.")
    num_stages = fields.count("num_stages")
    check_stages(profile, num_stages)
    num_microbatches, num_chunks = fields.count("num_microbatches"), fields.count("num_chunks", 1)
    orders = fields.rows("schedule", num_stages)
    if num_microbatches * num_chunks > max(map(len, orders)):
        raise fields.wrong("num_microbatches", "The schedule lists fewer units than that needs.")
    try:
        schedule = Schedule(
            fields.text("schedule_name"),
            num_microbatches,
            num_chunks,
            tuple(tuple(parse_unit(text) for text in order) for order in orders),
        )
    except ScheduleError as error:
        raise PlanError(f"{path}: field 'schedule': {error}") from error
    frequency = fields.rows("frequency_mhz", num_stages)
    if any(
        len(row) != schedule.units_per_stage
        or not all(type(f) is int and 0 < f < _MAX_FREQUENCY_MHZ for f in row)
        for row in frequency
    ):
        raise fields.wrong(
            "frequency_mhz", f"Each stage needs {schedule.units_per_stage} whole numbers of MHz."
        )
    plan = Plan(
        fields.text("policy"),
        schedule,
        np.array(frequency, dtype=np.int64),
        profile.for_chunks(num_chunks),
        fields.numbers("blocking_power_w", num_stages),
        fields.numbers("p2p_latency_s", num_stages - 1) if "p2p_latency_s" in data else 0.0,
    )
    _compare_with_stored(plan, fields)
    return plan


def _compare_with_stored(plan: Plan, fields: _Fields) -> None:
    for name, value in vars(plan.cost).items():
        stored = fields.data.get(name)
        if isinstance(stored, int | float) and math.isclose(
            stored, value, rel_tol=_STORED_TOLERANCE
        ):
            continue
        if fields.data.get("profile_sha256") == plan.profile.sha256:
            raise fields.wrong(name, f"The plan and its profile give {value}; make the plan again.")
        logger.warning(
            "%s was made from another profile: %s is %.6g here, %s in the file",
            fields.path, name, value, stored,
        )  # fmt: skip


@dataclass(frozen=True)
class _Fields:
    """Checked access to the fields of one plan file."""

    data: dict[str, Any]
    path: Path

    def wrong(self, name: str, remedy: str) -> PlanError:
        """The error for one field."""
        value = self.data.get(name)
        shown = value if len(repr(value)) < 80 else f"{repr(value)[:77]}..."
        return PlanError(f"{self.path}: field '{name}' is wrong", value=shown, remedy=remedy)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.data.get(name, default)
        if type(value) is not int or value < 1:
            raise self.wrong(name, "It must be a positive whole number.")
        return value

    def text(self, name: str) -> str:
        value = self.data.get(name, "custom")
        if not isinstance(value, str):
            raise self.wrong(name, "It must be a text.")
        return value

    def rows(self, name: str, num_rows: int) -> list[list[Any]]:
        value = self.data.get(name)
        if (
            not isinstance(value, list)
            or len(value) != num_rows
            or not all(isinstance(row, list) for row in value)
        ):
            raise self.wrong(name, f"It must be {num_rows} lists, one a stage.")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self.data.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(type(x) in (int, float) and 0 <= x < 1e300 for x in value)
        ):
            raise self.wrong(name, f"It must be a list of {length} numbers, zero or more.")
        return tuple(float(x) for x in value)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"Plan {path} is not readable JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"Plan {path} is not a JSON object", value=type(data).__name__)
    return data


def blocking_powers(power_w: float | Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Blocking power for each stage from one number or one for each stage.

    Raises:
        PlanError: neither.
    """
    given = tuple(np.atleast_1d(np.asarray(power_w, dtype=np.float64)).tolist())
    if len(given) not in (1, num_stages):
        raise PlanError(
            "Blocking power must be one number of watts, or one for each stage",
            value=power_w,
            remedy=f"The pipeline has {num_stages} stages.",
        )
    return given * num_stages if len(given) == 1 else given
