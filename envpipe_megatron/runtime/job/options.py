"""The options of a job: what users give, with flags, help and ranges, and its framework's part.

Command lines, settings by name and docs/lookup/options.md follow from the fields that `option`
makes; `integrations.options` reads them, and has the rules of what goes together. No torch.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.fields import AMOUNT, PERCENT, Number, Option, option, options_in
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.sidecar import Sidecar, sidecar_path
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes, read_power_budget
from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.gpu.presets import read_preset_name
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.request import POLICIES, PlanRequest, read_in_flight
from envpipe_megatron.policies.schedules import SCHEDULES

PROFILE_FILE = "profile.csv"
#: Of a shorter step, no more are measured than of this one, s.
_LEAST_STEP_S = 1e-3
#: What a closed loop may cost in time before clocks go up; one clock for a job, nothing.
_CLOSED_LOOP_SLOWDOWN_PERCENT = 0.5
#: Names of the framework's own order, of one chunk and of several.
OWN_ORDERS = ("1f1b", "interleaved")
#: Values of options that are not given, by type; `None`: with the other types.
_WITH_TYPE: Mapping[str, Mapping[str | None, str]] = {
    "scheduling": {"envelope": "ours", "optimal": "auto", None: "1f1b"},
    "reconfigure": {"envelope": "balanced", None: "default"},
}


class Level(enum.IntEnum):
    """Changes that EnvPipe makes in a job; each level has all of the one below."""

    #: Nothing: a bill, a timeline, bubbles.
    OBSERVE = 0
    #: One clock for the whole job, found while it trains.
    UNIFORM = 1
    #: A clock for each unit; the framework's own order and messages.
    UNITS = 2
    #: EnvPipe's order, and a clock for each unit.
    ORDER = 3

    def __str__(self) -> str:
        """Return the name as users write it."""
        return self.name.lower()


#: What each level does, in words.
LEVELS: Mapping[Level, str] = {
    Level.OBSERVE: "only measure",
    Level.UNIFORM: "one clock for the whole job",
    Level.UNITS: "a clock for each forward and backward, in the framework's order",
    Level.ORDER: "a clock for each forward and backward, in EnvPipe's order",
}


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of a job as users give them, checked, and what its framework says of it.

    Of the first, None as the level is the highest that the job can have; as the objective, what
    clocks allow; as the limit of microbatches in flight it is no limit; as the slowdown, what is
    usual; as a file, folder or preset, none. An order or reconfiguring that is empty becomes what
    goes with the type.

    Args:
        num_microbatches: M of a batch of full size.
        num_chunks: of each stage.
        group_size: as for `PlanRequest`.
        runs_units: whether the framework runs units and sends messages itself; at level `order` in
            any order of whole backwards that is planned.
        why_whole: why backwards are not split; empty if units run that are a part of one.
        window_s: least time at each clock of a sweep, s: ten refreshes of a counter that refreshes
            every 100 ms.
        run: a name for the lines of logs, where several jobs share a folder.
        sidecar: facts for that of the online profile.
        fingerprint: what units cost rests on (model, sizes of its parts and of microbatches, GPU,
            versions), of JSON's types. With it, profile, plan and baseline are kept in the output
            folder for the next start, which uses what still holds: see `restarts`.
        files_read: what is in `profile` and `plan`, where this process has read them.
        unused_files: files that the user gave and the job, since its level is lower, does not use.
    """

    level: Level | None = option(
        f"How much is changed. {'; '.join(f'{level}: {what}' for level, what in LEVELS.items())}; "
        "auto: the highest of these that the job can have.",
        {"auto": None, **{str(level): level for level in Level}},
        usual="auto",
        of_levels=True,
    )
    self_check: str = option(
        "Before level order, train one iteration by the framework's own order, that again, "
        "and EnvPipe's, from the same state; if losses or gradients differ, go on with whole "
        "backwards, or at level units. auto: before backwards are split, and for what no test of "
        "EnvPipe's has seen; off: neither, so backwards are whole, and such jobs get level units; "
        "always: for every job.",
        ("off", "auto", "always"),
        "auto",
        of_levels=True,
    )
    type: str = option(
        "How clocks are chosen. baseline: measure, at the highest clock; uniform: each stage at "
        "its optimal clock; envelope: highest on the outer envelope, optimal inside; optimal: "
        "least energy by a linear program, corrected as long as the job runs.",
        POLICIES,
        "optimal",
        usual="$ENVPIPE_TYPE, else optimal, without a pipeline uniform",
    )
    objective: str | None = option(
        "With type optimal, what plans make least: energy, in the framework's own time; time: the "
        "shortest order, at the highest clock; cost, by the prices below; edp, energy times time.",
        tuple(goal.value for goal in Goal),
        usual="energy where clocks may be changed, else time",
    )
    energy_price: float = option("With objective cost: price of a kWh.", AMOUNT, 0.0)
    gpu_price: float = option(
        "With objective cost: price of a GPU for an hour, in the same currency.", AMOUNT, 0.0
    )
    scheduling: str = option(
        "Order of forwards and backwards. 1f1b: the framework's own; ours or envpipe: EnvPipe's; "
        "zb-h1 and zb-h2: with backwards in two parts; auto: planned together with the clocks, "
        "with type optimal.",
        tuple(name for name, row in SCHEDULES.items() if row.in_jobs),
        "",
        usual="$ENVPIPE_SCHEDULING, else auto with type optimal, ours with envelope, 1f1b with "
        "the others",
    )
    split: str = option(
        "Whether orders may run a backward in two parts, the gradients of its input and of "
        "its weights, where the framework can: auto measures what they take and plans with that; "
        "off: backwards are whole.",
        ("auto", "off"),
        "auto",
        of_levels=True,
    )
    reconfigure: str = option(
        "With type envelope, which greedy and balanced imply, adjust clocks from "
        "measured iterations; default: do not; optimal: the same as type optimal.",
        ("default", "greedy", "balanced", "optimal"),
        "",
        usual="$ENVPIPE_RECONFIGURE, else balanced with type envelope",
    )
    max_in_flight: int | tuple[int, ...] | str | None = option(
        "Most microbatches whose activations a stage holds in another order than 1f1b, one number "
        "or one for each stage; memory: as many as fit, by what the first steps measure.",
        read_in_flight,
        usual="memory on GPUs",
        metavar="N[,N...]|memory",
    )
    baseline_steps: int = option(
        "Steps in the framework's own order at the highest clock, which savings are "
        "measured against; the first does not count.",
        Number(whole=True, positive=True, least=2),
        10,
    )
    profile_steps: int = option(
        "Steps measured at each clock while profiling, at least; short ones are repeated "
        "for a second.",
        Number(whole=True, positive=True, least=1),
        5,
    )
    profile: Path | None = option("A profile CSV, instead of profiling.", Path, metavar="FILE")
    plan: Path | None = option(
        "A plan JSON to run as it is, with any type and order; needs the profile that prices it.",
        Path,
        metavar="FILE",
    )
    profile_only: bool = option("End the job when the profile is written.", default=False)
    sweep: bool = option(
        "With type optimal: sweep clocks before planning, as the other types do, and "
        "leave the plan as it is.",
        default=False,
    )
    max_slowdown: float | None = option(
        "How much longer steps may take than at full clock, before clocks go up; where the whole "
        "job has one clock, it is found for this, and 0 is what cannot be measured.",
        PERCENT,
        usual=f"{_CLOSED_LOOP_SLOWDOWN_PERCENT}, with one clock 0",
        metavar="PERCENT",
    )
    power_budget: Wishes = option(
        "Most that a GPU may draw, as the mean over an iteration and all GPUs: W, or a share of "
        "what it takes in the framework's order at the highest clocks. Steps get no longer than it "
        "takes to keep that; it may be changed while the job runs.",
        read_power_budget,
        NO_WISHES,
        usual="none",
        metavar="W|PERCENT%",
    )
    gpu_control: str = option(
        "What changes clocks; auto: the first that is allowed; dry_run: log what "
        "would be done; none: nothing does, as where nothing is allowed.",
        GPU_CONTROLS,
        "auto",
    )
    require_control: bool = option(
        "Refuse to train where clocks may not be changed.", default=False
    )
    channel: str = option(
        "What carries messages between GPUs. auto: one-sided copies where two stages reach each "
        "other's memory, else NCCL's receives; receives: these everywhere.",
        CARRIERS,
        "auto",
    )
    min_dwell_ms: float = option(
        "Least time between two changes of a GPU's clock.",
        replace(AMOUNT, unit="ms", mistaken=(("ms", 1), ("s", 1e3))),
        0.0,
    )
    gpu: str | None = option(
        "The kind of GPU whose range of clocks is profiled, such as v100; auto: "
        "by the name of the GPU. Without a GPU: the kind that is emulated.",
        read_preset_name,
        usual="auto",
        metavar="PRESET",
    )
    output: Path | None = option(
        "Folder for profile, plan, energy log, summary and what a restart reads.",
        Path,
        usual="'envpipe' in the folder of --save, else nothing is written",
        metavar="DIR",
    )
    num_microbatches: int = 1
    num_chunks: int = 1
    group_size: int | None = None
    runs_units: bool = False
    why_whole: str = "its framework runs whole ones"
    window_s: float = 1.0
    run: str = ""
    sidecar: Sidecar = field(default_factory=Sidecar)
    fingerprint: Mapping[str, Any] | None = None
    files_read: tuple[Profile, Plan | None] | None = field(default=None, repr=False, compare=False)
    unused_files: frozenset[Path] = frozenset()

    def __post_init__(self) -> None:
        for name, usual in _WITH_TYPE.items():
            given = getattr(self, name) or usual.get(self.type, usual[None])
            object.__setattr__(self, name, given)

    @property
    def files(self) -> frozenset[Path]:
        """Return the files that the user gave."""
        used = self.plan, self.profile, self.profile and sidecar_path(self.profile)
        return self.unused_files | {file for file in used if file is not None}

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
        usual = 0.0 if self.one_clock else _CLOSED_LOOP_SLOWDOWN_PERCENT
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


#: The options that users give, by the name of the field.
OPTIONS: Mapping[str, Option] = options_in(JobOptions)
