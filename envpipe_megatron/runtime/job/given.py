"""What users give of a job's options: their flags, help and ranges, and what they go with.

Command lines, settings by name, errors and docs/lookup/options.md follow from it. `JobOptions`
adds what the framework says of the job. No torch.
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
    """How users give a field of `GivenOptions`, which has the option's name.

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


_ONLY_PLANS = ("sweep", "profile_only", "plan")


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """What users ask of a job.

    None as the level is the highest that the job can have; as the objective, what clocks allow; as
    the limit of microbatches in flight it is no limit; as the slowdown, what is usual; as a file,
    folder or preset, none. An order or reconfiguring that is empty becomes what goes with the type.
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


#: Of each option, how users give it.
OPTIONS: Mapping[str, Option] = {
    each.name: each.metadata["option"] for each in fields(GivenOptions)
}
