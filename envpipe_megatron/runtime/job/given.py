"""What users give of a job's options: their flags, help and ranges, and what they go with.

Command lines, settings by name, errors and docs/lookup/options.md follow from it. `JobOptions`
adds what the framework says of the job. No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.fields import AMOUNT, PERCENT, Number, Option, option, options_in
from envpipe_megatron.formats.wishes import NO_WISHES, Wishes, read_power_budget
from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.policies.request import BY_MEMORY, POLICIES
from envpipe_megatron.policies.schedules import SCHEDULES

#: What a closed loop may cost in time before clocks go up; one clock for a job, nothing.
CLOSED_LOOP_SLOWDOWN_PERCENT = 0.5


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


@dataclass(frozen=True)
class Rule:
    """What an option goes with. A term is an option that is given, or `a pipeline`, or `GPUs`.

    `type optimal` is an option that has this value, `gpu_control none|dry_run` one of several; of
    terms with `or` between them one must hold.

    Args:
        of: the option, or its values, that the rule is for.
        why: what it does, after "it".
        needs: terms that must all hold.
        without: terms none of which may hold.
    """

    of: str
    why: str
    needs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """What users ask of a job.

    None as the level is the highest that the job can have; as the objective, what clocks allow; as
    the limit of microbatches in flight it is no limit; as the slowdown, what is usual; as a file,
    folder or preset, none. An order or reconfiguring that is empty becomes what goes with the type.
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
        _in_flight,
        usual="memory on GPUs",
        metavar="N[,N...]|memory",
    )
    baseline_steps: int = option(
        "Steps in the framework's own order at the highest clock, which savings are "
        "measured against; the first does not count.",
        Number(True, True, least=2),
        10,
    )
    profile_steps: int = option(
        "Steps measured at each clock while profiling, at least; short ones are repeated "
        "for a second.",
        Number(True, True, least=1),
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
        usual=f"{CLOSED_LOOP_SLOWDOWN_PERCENT}, with one clock 0",
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
        _preset,
        usual="auto",
        metavar="PRESET",
    )
    output: Path | None = option(
        "Folder for profile, plan, energy log, summary and what a restart reads.",
        Path,
        usual="'envpipe' in the folder of --save, else nothing is written",
        metavar="DIR",
    )


OPTIONS: Mapping[str, Option] = options_in(GivenOptions)
_ONLY_PLANS = ("sweep", "profile_only", "plan")
#: What options go with, in the order in which it is checked.
RULES = (
    Rule("type envelope|optimal", "plans for stages", ("a pipeline",)),
    Rule(
        "type baseline",
        "only measures: it makes no profile, and runs no plan",
        without=("profile", *_ONLY_PLANS),
    ),
    Rule(
        "objective time|cost|edp",
        "is for plans that the job makes, and looks after",
        ("a pipeline", "type optimal"),
        _ONLY_PLANS,
    ),
    Rule("objective cost", "goes by prices", ("energy_price or gpu_price",)),
    Rule(
        "objective time",
        "looks for another order than the framework's own, by what units take in this job",
        without=("scheduling 1f1b", "profile"),
    ),
    Rule("energy_price", "is for plans of least cost", ("objective cost",)),
    Rule("gpu_price", "is for plans of least cost", ("objective cost",)),
    Rule(f"max_in_flight {BY_MEMORY}", "is by what memory is measured to be", ("GPUs",)),
    Rule("profile", "is of stages", ("a pipeline",)),
    Rule(
        "plan",
        "runs as it is, by the profile that prices it",
        ("profile",),
        ("max_in_flight", "reconfigure greedy|balanced"),
    ),
    Rule(
        "profile_only", "measures a profile and writes it", ("a pipeline", "output"), ("profile",)
    ),
    Rule("sweep", "measures clocks first, to plan", without=("profile",)),
    Rule(
        "power_budget",
        "is kept by clocks that the job chooses as it trains",
        without=(
            "level observe",
            "type baseline|envelope",
            "objective time",
            "gpu_control none|dry_run",
            *_ONLY_PLANS,
        ),
    ),
    Rule("gpu_control none", "changes no clock", without=("profile_only", "require_control")),
    Rule("gpu_control emulated", "is for jobs without GPUs", without=("GPUs",)),
)
