"""The options of a job, as its session runs with them: what users give, and its framework's part.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.request import PlanRequest
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.runtime.job.given import CLOSED_LOOP_SLOWDOWN_PERCENT, GivenOptions, Level

PROFILE_FILE = "profile.csv"
#: Of a shorter step, no more are measured than of this one, s.
_LEAST_STEP_S = 1e-3
#: Names of the framework's own order, of one chunk and of several.
OWN_ORDERS = ("1f1b", "interleaved")
#: Values of options that are not given, by type; `None`: with the other types.
_WITH_TYPE: Mapping[str, Mapping[str | None, str]] = {
    "scheduling": {"envelope": "ours", "optimal": "auto", None: "1f1b"},
    "reconfigure": {"envelope": "balanced", None: "default"},
}


def plan_file(batch: str) -> str:
    """Name the file of a batch's plan; the batch of full size has an empty name."""
    return f"plan-{batch}.json" if batch else "plan.json"


@dataclass(frozen=True, kw_only=True)
class JobOptions(GivenOptions):
    """What a job is asked for, checked, and what its framework says of it.

    Args:
        num_microbatches: M of a batch of full size.
        num_chunks: of each stage.
        group_size: as for `PlanRequest`.
        runs_units: whether the framework runs units and sends messages itself; at level `order` in
            any order of whole backwards that is planned.
        why_whole: why backwards are not split; empty if units run that are a part of one.
        window_s: least time at each clock of a sweep, s: ten refreshes of a counter that refreshes
            every 100 ms.
        labels: for each line of the energy log, beside the rank's own.
        sidecar: facts for that of the online profile.
        fingerprint: what units cost rests on (model, sizes of its parts and of microbatches, GPU,
            versions), of JSON's types. With it, profile, plan and baseline are kept in the output
            folder for the next start, which uses what still holds: see `restarts`.
    """

    num_microbatches: int = 1
    num_chunks: int = 1
    group_size: int | None = None
    runs_units: bool = False
    why_whole: str = "its framework runs whole ones"
    window_s: float = 1.0
    labels: Mapping[str, object] = field(default_factory=dict)
    sidecar: Sidecar = field(default_factory=Sidecar)
    fingerprint: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, usual in _WITH_TYPE.items():
            given = getattr(self, name) or usual.get(self.type, usual[None])
            object.__setattr__(self, name, given)

    @property
    def one_clock(self) -> bool:
        """True if the whole job gets one clock, found in training, in place of a plan."""
        return self.level is Level.UNIFORM and self.type != "baseline"

    @property
    def closed_loop(self) -> bool:
        """True if plans are corrected as long as the job runs."""
        as_it_stands = self.sweep or self.profile_only or self.plan is not None or self.one_clock
        return self.type == "optimal" and not as_it_stands

    @property
    def keeps_power(self) -> bool:
        """True if the job can keep a power budget."""
        chooses = self.one_clock or (self.closed_loop and not self.changes_only_order)
        return chooses and self.gpu_control not in ("none", "dry_run")

    @property
    def changes_only_order(self) -> bool:
        """True if the job runs the order that takes least time, and changes no clock."""
        return self.closed_loop and self.objective == Goal.TIME

    @property
    def reorders(self) -> bool:
        """True if the framework runs its units itself, in any order that is planned for it."""
        return self.runs_units and self.level in (None, Level.ORDER)

    @property
    def may_be_lowered(self) -> bool:
        """True if the job may turn out to need a lower level, and is then made again."""
        return self.level is Level.ORDER and not self.runs_units

    @property
    def may_split(self) -> bool:
        """True if orders may come that split backwards: the best, one by name, or one by file."""
        named = SCHEDULES[self.scheduling].splits
        return not self.why_whole and (named is not False or self.plan is not None)

    @property
    def slowdown_percent(self) -> float:
        """Return how much longer steps may last than the framework's own at the highest clocks."""
        usual = 0.0 if self.one_clock else CLOSED_LOOP_SLOWDOWN_PERCENT
        return usual if self.max_slowdown is None else self.max_slowdown

    @property
    def min_dwell_s(self) -> float:
        """Return the least time between two changes of a GPU's clock, s."""
        return self.min_dwell_ms / 1e3

    def steps_at_clock(self, step_s: float) -> int:
        """Return how many steps of a length are measured at each clock of a sweep."""
        return max(self.profile_steps, math.ceil(self.window_s / max(step_s, _LEAST_STEP_S)))

    @property
    def goal(self) -> Objective:
        """Return what is planned for."""
        return Objective(
            self.objective or Goal.ENERGY, energy_price=self.energy_price, gpu_price=self.gpu_price
        )

    def request(self) -> PlanRequest:
        """Make the request to plan."""
        return PlanRequest(
            self.num_microbatches,
            schedule=self.scheduling,
            policy=self.type,
            reconfigure=self.reconfigure,
            num_chunks=self.num_chunks,
            group_size=self.group_size,
            max_in_flight=self.max_in_flight,
            min_dwell_s=self.min_dwell_s if self.type == "optimal" else 0.0,
            objective=self.goal,
        )

    def why_whole_at(self, level: Level, of_model: str) -> str:
        """Return why backwards are whole at a level, empty if they may be in two parts.

        `of_model` is what the model has against parts, if anything.
        """
        if level is not Level.ORDER:
            return f"its level is {level}"
        if self.split == "off":
            return "--envpipe-split off"
        if self.self_check == "off":
            return (
                "--envpipe-self-check off leaves out what shows that splitting them changes no bit"
            )
        return of_model

    def only_measures(self, *own_orders: str) -> bool:
        """True if the job keeps the framework's order at the highest clocks, or at what there is.

        That order has one of these names, or one of Megatron's.
        """
        known = self.scheduling in (*OWN_ORDERS, *own_orders)
        return self.type == "baseline" and known and self.plan is None

    def at(self, level: Level) -> JobOptions:
        """Return the options at a level, without what that does not have: an order, or clocks."""
        if level is Level.ORDER:
            return replace(self, level=level)
        # What is planned for is the framework's order, by any name that options have for it.
        kept = replace(self, level=level, scheduling="1f1b", max_in_flight=None)
        if level is Level.OBSERVE:
            return kept.measuring()
        if kept.one_clock:
            kept = replace(kept.measuring(), type="uniform")
        return kept

    def measuring(self) -> JobOptions:
        """Return the options of a job that runs the framework's order at baseline clocks."""
        return replace(
            self,
            type="baseline",
            scheduling="interleaved" if self.num_chunks > 1 else "1f1b",
            reconfigure="default",
            objective=None,
            energy_price=0.0,
            gpu_price=0.0,
            max_in_flight=None,
            profile=None,
            plan=None,
        )

    def without_control(self) -> JobOptions:
        """Return the options of the same job at the clocks that there are.

        A plan by file runs in its order, and a closed loop that plans orders looks for the shortest
        one. All else is the framework's own order, and measured.
        """
        if self.plan is not None:
            return self
        if not self.closed_loop or self.scheduling in OWN_ORDERS:
            return self.measuring()
        return replace(self, objective=Goal.TIME, energy_price=0.0, gpu_price=0.0, profile=None)

    def in_words(self, order: str, clocks: str) -> str:
        """Say what the job does, in the framework's `order` or one that is planned, at `clocks`."""
        slower = f"at most {self.slowdown_percent:g} % slower"
        if self.one_clock:
            return f"one clock of least energy for the whole job, {slower}"
        if self.plan is not None:
            return f"the plan {self.plan}"
        if self.changes_only_order:
            return (
                f"order {order}, the shortest that is found, at {clocks}, where it is faster than "
                "the framework's"
            )
        if self.closed_loop:
            return (
                f"order {order}, plans of least {self.objective or Goal.ENERGY}, corrected as the "
                f"job runs, {slower}"
            )
        return f"type {self.type}, order {order}, reconfigure {self.reconfigure}"

    def order_in_words(self, asked: JobOptions) -> str:
        """Say what runs without control, in place of what was asked for."""
        if self.only_measures():
            return "the framework's order at baseline clocks"
        if not self.closed_loop:
            return "the plan's order, and clocks stay as they are"
        instead = "" if asked.changes_only_order else f" in place of least {asked.goal.goal}"
        return f"the shortest order{instead}, and clocks stay as they are"
