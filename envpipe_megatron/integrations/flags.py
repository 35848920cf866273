"""The options of a job as a group of command-line flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from envpipe_megatron.gpu.control import CHOICES as GPU_CONTROLS
from envpipe_megatron.integrations.options import RECONFIGURES, SCHEDULINGS, TYPES


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that go with --envpipe."""
    group.add_argument(
        "--envpipe-type",
        choices=TYPES,
        help="baseline: measure, at the highest clock; uniform: each stage at its optimal clock; "
        "envelope: highest on the outer envelope, optimal inside; optimal: least energy by a "
        "linear program. Default: $ENVPIPE_TYPE, else envelope.",
    )
    group.add_argument(
        "--envpipe-scheduling",
        choices=SCHEDULINGS,
        help="Order of forwards and backwards: 1f1b; ours or envpipe: EnvPipe's; auto: planned "
        "together with the clocks, with type optimal. Default: $ENVPIPE_SCHEDULING, else ours with "
        "type envelope, auto with optimal, 1f1b with the others.",
    )
    group.add_argument(
        "--envpipe-reconfigure",
        choices=RECONFIGURES,
        help="With type envelope, adjust clocks from measured iterations: greedy, balanced; "
        "default: do not; optimal: the same as type optimal. Default: $ENVPIPE_RECONFIGURE, else "
        "balanced with type envelope.",
    )
    group.add_argument(
        "--envpipe-max-in-flight",
        metavar="N[,N...]|memory",
        help="Most microbatches whose activations a stage holds, one number or one for each stage; "
        "memory (default on GPUs): as many as fit, by what the first steps measure.",
    )
    group.add_argument(
        "--envpipe-baseline-steps",
        type=int,
        default=10,
        metavar="N",
        help="Steps in the framework's own order at the highest clock, which savings are measured "
        "against. Default: 10.",
    )
    group.add_argument(
        "--envpipe-profile-steps",
        type=int,
        default=5,
        metavar="N",
        help="Steps measured at each clock while profiling, at least; short ones are repeated for "
        "a second. Default: 5.",
    )
    group.add_argument(
        "--envpipe-profile", type=Path, metavar="FILE", help="A profile CSV, instead of profiling."
    )
    group.add_argument(
        "--envpipe-plan",
        type=Path,
        metavar="FILE",
        help="A plan JSON to run as it stands, whatever type and order; needs the profile that "
        "prices it.",
    )
    group.add_argument(
        "--envpipe-profile-only",
        action="store_true",
        help="End the job when the profile is written.",
    )
    group.add_argument(
        "--envpipe-gpu-control",
        choices=GPU_CONTROLS,
        default="auto",
        help="What changes clocks; auto (default): the first that is allowed; dry_run: log what "
        "would be done; none: only measure.",
    )
    group.add_argument(
        "--envpipe-require-control",
        action="store_true",
        help="Refuse to train where clocks may not be changed, instead of measuring alone.",
    )
    group.add_argument(
        "--envpipe-min-dwell-ms",
        type=float,
        default=0.0,
        metavar="X",
        help="Least time between two changes of a GPU's clock. Default: 0.",
    )
    group.add_argument(
        "--envpipe-gpu",
        default="auto",
        metavar="PRESET",
        help="The kind of GPU whose range of clocks is profiled, such as v100; auto (default): by "
        "the name of the GPU. Without a GPU: the kind that is emulated.",
    )
    group.add_argument(
        "--envpipe-output",
        type=Path,
        metavar="DIR",
        help="Folder for profile, plan, energy log and summary. Default: 'envpipe' in the folder "
        "of --save, else nothing is written.",
    )
