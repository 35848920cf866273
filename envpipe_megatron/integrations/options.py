"""The options of a job, each a field that says its flag, help, default and what goes with it.

`add_arguments` makes flags of them, and `settings` takes them by name and value; `reading` checks
both ways' against each other. No framework, no torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.fields import AMOUNT, PERCENT, Number
from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.gpu.presets import load_preset
from envpipe_megatron.integrations.levels import AUTO, Level
from envpipe_megatron.policies.objective import Goal, Objective
from envpipe_megatron.policies.request import BY_MEMORY, POLICIES, PlanRequest
from envpipe_megatron.policies.schedules import SCHEDULES

TYPES = POLICIES
SCHEDULINGS = tuple(name for name, row in SCHEDULES.items() if row.in_jobs)
SELF_CHECKS = ("off", "auto", "always")
RECONFIGURES = ("default", "greedy", "balanced", "optimal")


@dataclass(frozen=True)
class Option:
    """How users give a field of `Options`, which has the option's name.

    Args:
        flag: keywords of argparse.
        read: makes the field of what argparse has parsed. Its ValueError says what that must be.
        least: of its range, which is finite.
        is_file: whether it names a file that must be there.
        with_type: what it is by default with a type, and with the others (None).
    """

    flag: Mapping[str, Any]
    read: Callable[[Any], Any] = lambda given: given
    least: float | None = None
    is_file: bool = False
    with_type: Mapping[str | None, str] | None = None


def _option(help_text: str, **given: Any) -> Any:
    """Make a field, of what `Option` takes and keywords of argparse."""
    about = {key: given.pop(key) for key in Option.__annotations__ if key in given}
    return field(metadata={"option": Option({**given, "help": help_text}, **about)})


def _number(number: Number) -> Callable[[str], float]:
    """Make a reader for argparse: an error names the unit. `reading` checks the range."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            wanted = number.wanted(text)
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return read


def _preset(given: str) -> str | None:
    """The preset, whose name users write in any case; a path stays as it is."""
    if given == "auto":
        return None
    name = given if given.endswith(".toml") else given.lower()
    load_preset(name)
    return name


def _in_flight(given: str | None) -> int | tuple[int, ...] | str | None:
    if given is None or given == BY_MEMORY:
        return given
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError("a number of microbatches, one for each stage, or 'memory'")
    return numbers if len(numbers) > 1 else numbers[0]


@dataclass(frozen=True)
class Options:
    """The options of a job, checked, with defaults filled in.

    None as the level is the highest that the job can have; as the objective, what clocks allow; as
    the limit of microbatches in flight it is no limit; as the slowdown, what is usual; as a file,
    folder or preset, none.
    """

    level: Level | None = _option(
        "observe: only measure; uniform: one clock for the whole job; units: a clock for "
        "each forward and backward, in the framework's order; order: EnvPipe's order too; auto "
        "(default): the highest of these that the job can have.",
        choices=(AUTO, *map(str, Level)),
        default=AUTO,
        read=lambda word: None if word == AUTO else Level[word.upper()],
    )
    self_check: str = _option(
        "Before level order, train one iteration by the framework's own order, that again, "
        "and EnvPipe's, from the same state; if losses or gradients differ, go on with whole "
        "backwards, or at level units. auto (default): before backwards are split, and for what no "
        "test of EnvPipe's has seen; off: neither, so backwards are whole, and such jobs get level "
        "units; always: for every job.",
        choices=SELF_CHECKS,
        default="auto",
    )
    type: str = _option(
        "baseline: measure, at the highest clock; uniform: each stage at its optimal "
        "clock, without a pipeline the whole job; envelope: highest on the outer envelope, optimal "
        "inside; optimal: least energy by a linear program, corrected as long as the job runs. "
        "Default: $ENVPIPE_TYPE, else optimal, without a pipeline uniform.",
        type=str.lower,
        choices=TYPES,
    )
    objective: str | None = _option(
        "With type optimal, what plans make least: energy, in the framework's own time; time: the "
        "shortest order, at the highest clock; cost, by the prices below; edp, energy times time. "
        "Default: energy where clocks may be changed, else time.",
        choices=tuple(goal.value for goal in Goal),
    )
    energy_price: float = _option(
        "With objective cost: price of a kWh. Default: 0.",
        type=_number(AMOUNT),
        default=0.0,
        metavar="X",
        least=0,
    )
    gpu_price: float = _option(
        "With objective cost: price of a GPU for an hour. Default: 0.",
        type=_number(AMOUNT),
        default=0.0,
        metavar="X",
        least=0,
    )
    scheduling: str = _option(
        "Order of forwards and backwards: 1f1b; ours or envpipe: EnvPipe's; zb-h1 and zb-h2: "
        "with backwards in two parts; auto: planned together with the clocks, with type optimal. "
        "Default: $ENVPIPE_SCHEDULING, else auto with type optimal, ours with envelope, 1f1b with "
        "the others.",
        type=str.lower,
        choices=SCHEDULINGS,
        with_type={"envelope": "ours", "optimal": "auto", None: "1f1b"},
    )
    split: str = _option(
        "Whether orders may run a backward in two parts, the gradients of its input and of "
        "its weights, where the framework can: auto (default) measures what they take and plans "
        "with that; off: backwards are whole.",
        choices=("auto", "off"),
        default="auto",
    )
    reconfigure: str = _option(
        "With type envelope, which greedy and balanced stand for, adjust clocks from "
        "measured iterations; default: do not; optimal: the same as type optimal. Default: "
        "$ENVPIPE_RECONFIGURE, else balanced with type envelope.",
        type=str.lower,
        choices=RECONFIGURES,
        with_type={"envelope": "balanced", None: "default"},
    )
    max_in_flight: int | tuple[int, ...] | str | None = _option(
        "Most microbatches whose activations a stage holds, one number or one for each "
        "stage; memory (default on GPUs): as many as fit, by what the first steps measure.",
        metavar="N[,N...]|memory",
        read=_in_flight,
    )
    baseline_steps: int = _option(
        "Steps in the framework's own order at the highest clock, which savings are "
        "measured against. Default: 10.",
        type=int,
        default=10,
        metavar="N",
        least=2,
    )
    profile_steps: int = _option(
        "Steps measured at each clock while profiling, at least; short ones are repeated "
        "for a second. Default: 5.",
        type=int,
        default=5,
        metavar="N",
        least=1,
    )
    profile: Path | None = _option(
        "A profile CSV, instead of profiling.",
        type=Path,
        metavar="FILE",
        is_file=True,
    )
    plan: Path | None = _option(
        "A plan JSON to run as it stands, whatever type and order; needs the profile that "
        "prices it.",
        type=Path,
        metavar="FILE",
        is_file=True,
    )
    profile_only: bool = _option(
        "End the job when the profile is written.",
        action="store_true",
    )
    sweep: bool = _option(
        "With type optimal: sweep clocks before planning, as the other types do, and "
        "leave the plan as it is.",
        action="store_true",
    )
    max_slowdown: float | None = _option(
        "How much longer steps may take than at full clock, where the whole job has one "
        "clock (default 0: what cannot be measured), and with type optimal (0.5), before clocks go "
        "up.",
        type=_number(PERCENT),
        metavar="PERCENT",
        least=0,
    )
    gpu_control: str = _option(
        "What changes clocks; auto (default): the first that is allowed; dry_run: log what "
        "would be done; none: nothing does, as where nothing is allowed.",
        choices=GPU_CONTROLS,
        default="auto",
    )
    require_control: bool = _option(
        "Refuse to train where clocks may not be changed.",
        action="store_true",
    )
    channel: str = _option(
        "What carries messages between GPUs; auto (default): one-sided copies where two "
        "stages reach each other's memory, else NCCL's receives; receives: these everywhere.",
        choices=CARRIERS,
        default="auto",
    )
    min_dwell_ms: float = _option(
        "Least time between two changes of a GPU's clock. Default: 0.",
        type=_number(replace(AMOUNT, unit="ms", mistaken=(("ms", 1), ("s", 1e3)))),
        default=0.0,
        metavar="X",
        least=0,
    )
    gpu: str | None = _option(
        "The kind of GPU whose range of clocks is profiled, such as v100; auto (default): "
        "by the name of the GPU. Without a GPU: the kind that is emulated.",
        default="auto",
        metavar="PRESET",
        read=_preset,
    )
    output: Path | None = _option(
        "Folder for profile, plan, energy log and summary. Default: 'envpipe' in the "
        "folder of --save, else nothing is written.",
        type=Path,
        metavar="DIR",
    )

    @property
    def closed_loop(self) -> bool:
        """True if plans are corrected as long as the job runs."""
        as_it_stands = self.sweep or self.profile_only or self.plan is not None
        return self.type == "optimal" and not as_it_stands

    def request(
        self, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
    ) -> PlanRequest:
        """Make the request to plan, in chunks and groups as `PlanRequest` takes them."""
        return PlanRequest(
            num_microbatches,
            schedule=self.scheduling,
            policy=self.type,
            reconfigure=self.reconfigure,
            num_chunks=num_chunks,
            group_size=group_size,
            max_in_flight=self.max_in_flight,
            min_dwell_s=self.min_dwell_ms / 1e3 if self.type == "optimal" else 0.0,
            objective=Objective(
                self.objective or Goal.ENERGY,
                energy_price=self.energy_price,
                gpu_price=self.gpu_price,
            ),
        )


#: Options that go with frameworks only that have more than one level.
OF_LEVELS = ("level", "self_check", "split")
OPTIONS: Mapping[str, Option] = {each.name: each.metadata["option"] for each in fields(Options)}


def flag_of(name: str) -> str:
    """The flag of an option."""
    return f"--envpipe-{name.replace('_', '-')}"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that go with --envpipe to a framework's command line."""
    for name, option in OPTIONS.items():
        group.add_argument(flag_of(name), **option.flag)
