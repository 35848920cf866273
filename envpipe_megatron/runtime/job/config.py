"""A job's request to EnvPipe: read once from flags or settings, and passed through unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.objective import SHORTEST, Goal
from envpipe_megatron.policies.request import PlanRequest, check_request
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.tuning.probes.sweep import ProfilerSettings

#: Names of the framework's own order, of one chunk and of several.
OWN_ORDERS = ("1f1b", "interleaved")


class SessionError(EnvPipeError):
    """A job that changes shape, or one that EnvPipe cannot run."""


@dataclass(frozen=True)
class SessionConfig:
    """A job's request to EnvPipe, whose options were checked; PlannerError for a wrong `request`.

    Args:
        request: its number of microbatches and blocking power are replaced by the job's own.
        warmup_iterations: number in the framework's order at maximum clock; the first is ignored.
        plan_file: a plan to run as it stands; needs the profile file that prices it.
        closed_loop: the optimal policy measures a few clocks in place of a sweep, plans beside
            training, and corrects its plan as long as the job runs; see `tuning.controller`.
        may_be_lowered: whether the job may turn out to need a lower level, and is then made again.
        max_slowdown_percent: by how much steps of a closed loop may last longer than the
            framework's own at the highest clocks before clocks go up.
        one_clock_slowdown_percent: instead of a plan, one clock for all units, found in training:
            that of least energy of those by which steps last no longer than this allows.
        gpu_preset: the kind of GPU whose range of clocks is profiled; by default this GPU's.
        require_control: whether a GPU that cannot be held is an error; by default it is only read.
        reorders: whether a framework that runs its units itself runs any order of whole backwards
            that is planned; its messages never wait for one another.
        splits: whether units run that are only a part of a backward.
        why_whole: why not, where they do not.
        labels: labels for each line of the energy log, beside the rank's own.
        facts: facts for the sidecar of the online profile.
        fingerprint: what units cost rests on (model, sizes of its parts and of microbatches, GPU,
            versions), of JSON's types. With it, profile, plan and baseline are kept in the output
            folder for the next start, which uses what still holds: see `job_file.JobKeys`.
    """

    request: PlanRequest
    warmup_iterations: int = 3
    profiler: ProfilerSettings = field(default_factory=ProfilerSettings)
    profile_file: Path | None = None
    plan_file: Path | None = None
    output_dir: Path | None = None
    min_dwell_s: float = 0.0
    closed_loop: bool = False
    may_be_lowered: bool = False
    max_slowdown_percent: float = 0.5
    one_clock_slowdown_percent: float | None = None
    gpu_preset: str | None = None
    require_control: bool = False
    reorders: bool = False
    splits: bool = False
    why_whole: str = "its framework runs whole ones"
    labels: Mapping[str, object] = field(default_factory=dict)
    facts: Sidecar = field(default_factory=Sidecar)
    fingerprint: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_request(self.request)

    @property
    def may_split(self) -> bool:
        """True if orders may come that split backwards: the best, one by name, or one by file."""
        named = SCHEDULES[self.request.schedule].splits
        return self.splits and (named is not False or self.plan_file is not None)

    @property
    def changes_only_order(self) -> bool:
        """True if the job runs the order that takes least time, and changes no clock."""
        return self.closed_loop and self.request.objective.goal == Goal.TIME

    def measures_alone(self, *own_orders: str) -> bool:
        """True if the job keeps the framework's order at the highest clocks, or at what there is.

        That order has one of these names, or one of Megatron's.
        """
        known = self.request.schedule in (*OWN_ORDERS, *own_orders)
        return self.request.policy == "baseline" and known and self.plan_file is None

    def order_in_words(self, asked: SessionConfig) -> str:
        """Say what runs without control, in place of what was asked for."""
        if self.measures_alone():
            return "the framework's order at baseline clocks"
        order = "the plan's order"
        if self.closed_loop:
            goal = asked.request.objective.goal
            order = "the shortest order" + f" in place of least {goal}" * (goal != Goal.TIME)
        return f"{order}, and clocks stay as they are"

    def without_control(self) -> SessionConfig:
        """The same job at the clocks that there are.

        A plan by file runs in its order, and a closed loop that plans orders looks for the shortest
        one. All else is the framework's own order, and measured.
        """
        if self.plan_file is not None:
            return self
        chunks, request = self.request.num_chunks, replace(self.request, objective=SHORTEST)
        looks = self.closed_loop and self.request.schedule not in OWN_ORDERS
        if not looks:
            own = "interleaved" if chunks > 1 else "1f1b"
            request = PlanRequest(self.request.num_microbatches, own, num_chunks=chunks)
        measured = replace(self, profile_file=None, one_clock_slowdown_percent=None)
        return replace(measured, request=request, closed_loop=looks)
