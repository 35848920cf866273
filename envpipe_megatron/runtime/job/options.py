"""The options of a job, from what users give to what its session runs: one dataclass.

Each field that users give says its flag, help and range, and what it goes with: command lines,
settings by name, errors and docs/lookup/options.md follow from it. The framework's part of a job
fills in the others. No torch.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.fields import AMOUNT, PERCENT, Number
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes, read_power_budget
from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.request import BY_MEMORY, POLICIES, PlanRequest
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.tuning.probes.sweep import ProfilerSettings

PROFILE_FILE = "profile.csv"
#: Names of the framework's own order, of one chunk and of several.
OWN_ORDERS = ("1f1b", "interleaved")
#: What a closed loop may cost in time before clocks go up; one clock for a job, nothing.
CLOSED_LOOP_SLOWDOWN_PERCENT = 0.5


def plan_file(batch: str) -> str:
    """Name the file of a batch's plan; the batch of full size has an empty name."""
    return f"plan-{batch}.json" if batch else "plan.json"


class Level(enum.IntEnum):
    """What EnvPipe changes in a job; each level has all of the one below."""

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


@dataclass(frozen=True)
class Rule:
    """What an option goes with. A term is an option that is given, or `a pipeline`, or `GPUs`.

    `type optimal` is an option that has this value, `gpu_control none|dry_run` one of several; of
    terms with `or` between them one must hold.

    Args:
        why: what the option does, after "it".
        when: values of the option that the rule is for, all but the default if empty.
        needs: terms that must all hold.
        without: terms none of which may hold.
    """

    why: str
    when: str = ""
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """How users give a field of `JobOptions`, which has the option's name.

    Args:
        help: what it does.
        flag: keywords of argparse.
        usual: the default in words, where it is no value.
        read: makes the field of what argparse has parsed. Its ValueError says what that must be.
        least: of its range, which is finite.
        is_file: whether it names a file that must be there.
        of_levels: whether only frameworks have it that have more than one level.
        rules: what it goes with.
    """

    help: str
    flag: Mapping[str, Any]
    usual: str = ""
    read: Callable[[Any], Any] = lambda given: given
    least: float | None = None
    is_file: bool = False
    of_levels: bool = False
    rules: tuple[Rule, ...] = ()


def _option(help_text: str, default: Any = None, **given: Any) -> Any:
    """Make a field, of what `Option` takes and keywords of argparse."""
    about = {key: given.pop(key) for key in Option.__annotations__ if key in given}
    if "usual" not in about and default is not None and "action" not in given:
        about["usual"] = f"{default:g}" if isinstance(default, float) else str(default)
    return field(default=default, metadata={"option": Option(help_text, given, **about)})


def _number(number: Number) -> Callable[[str], float]:
    """Make a reader for argparse: an error names the unit. The range is checked with the rest."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            wanted = number.wanted(text)
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return read


def _preset(given: str) -> str | None:
    """Return the preset, whose name users write in any case; a path stays as it is."""
    if given == "auto":
        return None
    name = given if given.endswith(".toml") else given.lower()
    load_preset(name)
    return name


def _in_flight(given: str) -> int | tuple[int, ...] | str:
    if given == BY_MEMORY:
        return given
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError("a number of microbatches, one for each stage, or 'memory'")
    return numbers if len(numbers) > 1 else numbers[0]


#: Values of options that are not given, by type; `None`: with the other types.
_WITH_TYPE: Mapping[str, Mapping[str | None, str]] = {
    "scheduling": {"envelope": "ours", "optimal": "auto", None: "1f1b"},
    "reconfigure": {"envelope": "balanced", None: "default"},
}
_ONLY_PLANS = ("sweep", "profile_only", "plan")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job is asked for, checked, and below that what its framework says of it.

    None as the level is the highest that the job can have; as the objective, what clocks allow; as
    the limit of microbatches in flight it is no limit; as the slowdown, what is usual; as a file,
    folder or preset, none. An order or reconfiguring that is empty becomes what goes with the type.

    Args:
        num_microbatches: M of a batch of full size.
        num_chunks: of each stage.
        group_size: as for `PlanRequest`.
        runs_units: whether the framework runs units and sends messages itself; at level `order` in
            any order of whole backwards that is planned.
        why_whole: why backwards are not split; empty if units run that are a part of one.
        window_s: least time at each clock of a sweep, s.
        labels: for each line of the energy log, beside the rank's own.
        sidecar: facts for that of the online profile.
        fingerprint: what units cost rests on (model, sizes of its parts and of microbatches, GPU,
            versions), of JSON's types. With it, profile, plan and baseline are kept in the output
            folder for the next start, which uses what still holds: see `restarts`.
    """

    level: Level | None = _option(
        f"How much is changed. {'; '.join(f'{level}: {what}' for level, what in LEVELS.items())}; "
        "auto: the highest of these that the job can have.",
        usual="auto",
        choices=("auto", *map(str, Level)),
        read=lambda word: None if word == "auto" else Level[word.upper()],
        of_levels=True,
    )
    self_check: str = _option(
        "Before level order, train one iteration by the framework's own order, that again, "
        "and EnvPipe's, from the same state; if losses or gradients differ, go on with whole "
        "backwards, or at level units. auto: before backwards are split, and for what no test of "
        "EnvPipe's has seen; off: neither, so backwards are whole, and such jobs get level units; "
        "always: for every job.",
        "auto",
        choices=("off", "auto", "always"),
        of_levels=True,
    )
    type: str = _option(
        "How clocks are chosen. baseline: measure, at the highest clock; uniform: each stage at "
        "its optimal clock; envelope: highest on the outer envelope, optimal inside; optimal: "
        "least energy by a linear program, corrected as long as the job runs.",
        "optimal",
        usual="$ENVPIPE_TYPE, else optimal, without a pipeline uniform",
        type=str.lower,
        choices=POLICIES,
        rules=(
            Rule("plans for stages", "envelope|optimal", needs=("a pipeline",)),
            Rule(
                "only measures: it makes no profile, and runs no plan",
                "baseline",
                without=("profile", *_ONLY_PLANS),
            ),
        ),
    )
    objective: str | None = _option(
        "With type optimal, what plans make least: energy, in the framework's own time; time: the "
        "shortest order, at the highest clock; cost, by the prices below; edp, energy times time.",
        usual="energy where clocks may be changed, else time",
        choices=tuple(goal.value for goal in Goal),
        rules=(
            Rule(
                "is for plans that the job makes, and looks after",
                "time|cost|edp",
                needs=("a pipeline", "type optimal"),
                without=_ONLY_PLANS,
            ),
            Rule("goes by prices", "cost", needs=("energy_price or gpu_price",)),
            Rule(
                "looks for another order than the framework's own, by what units take in this job",
                "time",
                without=("scheduling 1f1b", "profile"),
            ),
        ),
    )
    energy_price: float = _option(
        "With objective cost: price of a kWh.",
        0.0,
        type=_number(AMOUNT),
        metavar="X",
        least=0,
        rules=(Rule("is for plans of least cost", needs=("objective cost",)),),
    )
    gpu_price: float = _option(
        "With objective cost: price of a GPU for an hour, in the same currency.",
        0.0,
        type=_number(AMOUNT),
        metavar="X",
        least=0,
        rules=(Rule("is for plans of least cost", needs=("objective cost",)),),
    )
    scheduling: str = _option(
        "Order of forwards and backwards. 1f1b: the framework's own; ours or envpipe: EnvPipe's; "
        "zb-h1 and zb-h2: with backwards in two parts; auto: planned together with the clocks, "
        "with type optimal.",
        "",
        usual="$ENVPIPE_SCHEDULING, else auto with type optimal, ours with envelope, 1f1b with "
        "the others",
        type=str.lower,
        choices=tuple(name for name, row in SCHEDULES.items() if row.in_jobs),
    )
    split: str = _option(
        "Whether orders may run a backward in two parts, the gradients of its input and of "
        "its weights, where the framework can: auto measures what they take and plans with that; "
        "off: backwards are whole.",
        "auto",
        choices=("auto", "off"),
        of_levels=True,
    )
    reconfigure: str = _option(
        "With type envelope, which greedy and balanced imply, adjust clocks from "
        "measured iterations; default: do not; optimal: the same as type optimal.",
        "",
        usual="$ENVPIPE_RECONFIGURE, else balanced with type envelope",
        type=str.lower,
        choices=("default", "greedy", "balanced", "optimal"),
    )
    max_in_flight: int | tuple[int, ...] | str | None = _option(
        "Most microbatches whose activations a stage holds in another order than 1f1b, one number "
        "or one for each stage; memory: as many as fit, by what the first steps measure.",
        usual="memory on GPUs",
        metavar="N[,N...]|memory",
        read=_in_flight,
        rules=(Rule("is by what memory is measured to be", BY_MEMORY, needs=("GPUs",)),),
    )
    baseline_steps: int = _option(
        "Steps in the framework's own order at the highest clock, which savings are "
        "measured against; the first does not count.",
        10,
        type=int,
        metavar="N",
        least=2,
    )
    profile_steps: int = _option(
        "Steps measured at each clock while profiling, at least; short ones are repeated "
        "for a second.",
        5,
        type=int,
        metavar="N",
        least=1,
    )
    profile: Path | None = _option(
        "A profile CSV, instead of profiling.",
        type=Path,
        metavar="FILE",
        is_file=True,
        rules=(Rule("is of stages", needs=("a pipeline",)),),
    )
    plan: Path | None = _option(
        "A plan JSON to run as it is, with any type and order; needs the profile that prices it.",
        type=Path,
        metavar="FILE",
        is_file=True,
        rules=(
            Rule(
                "runs as it is, by the profile that prices it",
                needs=("profile",),
                without=("max_in_flight", "reconfigure greedy|balanced"),
            ),
        ),
    )
    profile_only: bool = _option(
        "End the job when the profile is written.",
        False,
        action="store_true",
        rules=(
            Rule(
                "measures a profile and writes it",
                needs=("a pipeline", "output"),
                without=("profile",),
            ),
        ),
    )
    sweep: bool = _option(
        "With type optimal: sweep clocks before planning, as the other types do, and "
        "leave the plan as it is.",
        False,
        action="store_true",
        rules=(Rule("measures clocks first, to plan", without=("profile",)),),
    )
    max_slowdown: float | None = _option(
        "How much longer steps may take than at full clock, before clocks go up; where the whole "
        "job has one clock, it is found for this, and 0 is what cannot be measured.",
        usual=f"{CLOSED_LOOP_SLOWDOWN_PERCENT}, with one clock 0",
        type=_number(PERCENT),
        metavar="PERCENT",
        least=0,
    )
    power_budget: Wishes = _option(
        "Most that a GPU may draw, as the mean over an iteration and all GPUs: W, or a share of "
        "what it takes in the framework's order at the highest clocks. Steps get no longer than it "
        "takes to keep that; it may be changed while the job runs.",
        NO_WISHES,
        usual="none",
        metavar="W|PERCENT%",
        read=read_power_budget,
        rules=(
            Rule(
                "is kept by clocks that the job chooses as it trains",
                without=(
                    "level observe",
                    "type baseline|envelope",
                    "objective time",
                    "gpu_control none|dry_run",
                    *_ONLY_PLANS,
                ),
            ),
        ),
    )
    gpu_control: str = _option(
        "What changes clocks; auto: the first that is allowed; dry_run: log what "
        "would be done; none: nothing does, as where nothing is allowed.",
        "auto",
        choices=GPU_CONTROLS,
        rules=(
            Rule("changes no clock", "none", without=("profile_only", "require_control")),
            Rule("is for jobs without GPUs", "emulated", without=("GPUs",)),
        ),
    )
    require_control: bool = _option(
        "Refuse to train where clocks may not be changed.", False, action="store_true"
    )
    channel: str = _option(
        "What carries messages between GPUs. auto: one-sided copies where two stages reach each "
        "other's memory, else NCCL's receives; receives: these everywhere.",
        "auto",
        choices=CARRIERS,
    )
    min_dwell_ms: float = _option(
        "Least time between two changes of a GPU's clock.",
        0.0,
        type=_number(replace(AMOUNT, unit="ms", mistaken=(("ms", 1), ("s", 1e3)))),
        metavar="X",
        least=0,
    )
    gpu: str | None = _option(
        "The kind of GPU whose range of clocks is profiled, such as v100; auto: "
        "by the name of the GPU. Without a GPU: the kind that is emulated.",
        usual="auto",
        metavar="PRESET",
        read=_preset,
    )
    output: Path | None = _option(
        "Folder for profile, plan, energy log, summary and what a restart reads.",
        usual="'envpipe' in the folder of --save, else nothing is written",
        type=Path,
        metavar="DIR",
    )

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

    @property
    def profiler(self) -> ProfilerSettings:
        """Return how long to stay at each clock of a sweep."""
        return ProfilerSettings(measured_iterations=self.profile_steps, min_window_s=self.window_s)

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

    def measures_alone(self, *own_orders: str) -> bool:
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
        if self.measures_alone():
            return "the framework's order at baseline clocks"
        if not self.closed_loop:
            return "the plan's order, and clocks stay as they are"
        instead = "" if asked.changes_only_order else f" in place of least {asked.goal.goal}"
        return f"the shortest order{instead}, and clocks stay as they are"


#: Of each field that users give, how.
OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata["option"] for each in fields(JobOptions) if each.metadata
}
