"""The flags of a job, as argparse takes them; no framework, no torch. `options` reads them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.channel_model import CARRIERS
from envpipe_megatron.core.fields import AMOUNT, PERCENT, Number
from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.integrations.levels import AUTO, Level
from envpipe_megatron.policies.request import POLICIES
from envpipe_megatron.policies.schedules import SCHEDULES

TYPES = POLICIES
SCHEDULINGS = tuple(name for name, row in SCHEDULES.items() if row.in_jobs)
SELF_CHECKS = ("off", "auto", "always")
RECONFIGURES = ("default", "greedy", "balanced", "optimal")


def _number(number: Number) -> Callable[[str], float]:
    """Make a reader for argparse: an error names the unit. `options` checks the range."""

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            wanted = number.wanted(text)
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}") from None

    return read


#: Each option by its name without `--envpipe-`, as argparse takes it.
FLAGS: dict[str, dict[str, Any]] = {
    "level": {
        "choices": (AUTO, *map(str, Level)),
        "default": AUTO,
        "help": "observe: only measure; uniform: one clock for the whole job; units: a clock for "
        "each forward and backward, in the framework's order; order: EnvPipe's order too; auto "
        "(default): the highest of these that the job can have.",
    },
    "self-check": {
        "choices": SELF_CHECKS,
        "default": "auto",
        "help": "Before level order, train one iteration by the framework's own order, that again, "
        "and EnvPipe's, from the same state, and go on at level units if losses or gradients "
        "differ; auto (default): for what no test of EnvPipe's has seen, which gets level units "
        "with off; always: for every job.",
    },
    "type": {
        "type": str.lower,
        "choices": TYPES,
        "help": "baseline: measure, at the highest clock; uniform: each stage at its optimal "
        "clock, without a pipeline the whole job; envelope: highest on the outer envelope, optimal "
        "inside; optimal: least energy by a linear program, corrected as long as the job runs. "
        "Default: $ENVPIPE_TYPE, else optimal, without a pipeline uniform.",
    },
    "scheduling": {
        "type": str.lower,
        "choices": SCHEDULINGS,
        "help": "Order of forwards and backwards: 1f1b; ours or envpipe: EnvPipe's; auto: planned "
        "together with the clocks, with type optimal. Default: $ENVPIPE_SCHEDULING, else auto with "
        "type optimal, ours with envelope, 1f1b with the others.",
    },
    "reconfigure": {
        "type": str.lower,
        "choices": RECONFIGURES,
        "help": "With type envelope, which greedy and balanced stand for, adjust clocks from "
        "measured iterations; default: do not; optimal: the same as type optimal. Default: "
        "$ENVPIPE_RECONFIGURE, else balanced with type envelope.",
    },
    "max-in-flight": {
        "metavar": "N[,N...]|memory",
        "help": "Most microbatches whose activations a stage holds, one number or one for each "
        "stage; memory (default on GPUs): as many as fit, by what the first steps measure.",
    },
    "baseline-steps": {
        "type": int,
        "default": 10,
        "metavar": "N",
        "help": "Steps in the framework's own order at the highest clock, which savings are "
        "measured against. Default: 10.",
    },
    "profile-steps": {
        "type": int,
        "default": 5,
        "metavar": "N",
        "help": "Steps measured at each clock while profiling, at least; short ones are repeated "
        "for a second. Default: 5.",
    },
    "profile": {
        "type": Path,
        "metavar": "FILE",
        "help": "A profile CSV, instead of profiling.",
    },
    "plan": {
        "type": Path,
        "metavar": "FILE",
        "help": "A plan JSON to run as it stands, whatever type and order; needs the profile that "
        "prices it.",
    },
    "profile-only": {
        "action": "store_true",
        "help": "End the job when the profile is written.",
    },
    "sweep": {
        "action": "store_true",
        "help": "With type optimal: measure all clocks before planning, as the other types do, and "
        "leave the plan as it is.",
    },
    "max-slowdown": {
        "type": _number(PERCENT),
        "metavar": "PERCENT",
        "help": "How much longer steps may take than at full clock, where the whole job has one "
        "clock (default 0: what cannot be measured), and with type optimal (0.5), before clocks go "
        "up.",
    },
    "gpu-control": {
        "choices": GPU_CONTROLS,
        "default": "auto",
        "help": "What changes clocks; auto (default): the first that is allowed; dry_run: log what "
        "would be done; none: only measure.",
    },
    "require-control": {
        "action": "store_true",
        "help": "Refuse to train where clocks may not be changed, instead of measuring alone.",
    },
    "channel": {
        "choices": CARRIERS,
        "default": "auto",
        "help": "What carries messages between GPUs; auto (default): one-sided copies where two "
        "stages reach each other's memory, else NCCL's receives, posted when their unit begins; "
        "receives: such receives everywhere; posted: receives posted ahead.",
    },
    "min-dwell-ms": {
        "type": _number(replace(AMOUNT, unit="ms", mistaken=(("ms", 1), ("s", 1e3)))),
        "default": 0.0,
        "metavar": "X",
        "help": "Least time between two changes of a GPU's clock. Default: 0.",
    },
    "gpu": {
        "default": "auto",
        "metavar": "PRESET",
        "help": "The kind of GPU whose range of clocks is profiled, such as v100; auto (default): "
        "by the name of the GPU. Without a GPU: the kind that is emulated.",
    },
    "output": {
        "type": Path,
        "metavar": "DIR",
        "help": "Folder for profile, plan, energy log and summary. Default: 'envpipe' in the "
        "folder of --save, else nothing is written.",
    },
}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that go with --envpipe to a framework's command line."""
    for name, keywords in FLAGS.items():
        group.add_argument(f"--envpipe-{name}", **keywords)
