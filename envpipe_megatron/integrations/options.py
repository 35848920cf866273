"""The options of a job, checked against each other; free of frameworks and torch.

EnvPipe's environment variables ENVPIPE_TYPE, ENVPIPE_SCHEDULING and ENVPIPE_RECONFIGURE stand for
the options of those names where these are not given.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.emulated.presets import load_preset
from envpipe_megatron.policies.planner import (
    BY_MEMORY,
    LIMITED_SCHEDULES,
    POLICIES,
    SCHEDULE_ALIASES,
    SCHEDULES,
    PlannerError,
    PlanRequest,
    check_request,
)

TYPES = POLICIES
#: Not those that the framework's own options decide.
SCHEDULINGS = tuple(
    name for name in (*SCHEDULES, *SCHEDULE_ALIASES) if name not in ("gpipe", "interleaved")
)
RECONFIGURES = ("default", "greedy", "balanced", "optimal")

#: What a type goes with where the user does not say; others go with 1F1B. EnvPipe in full is the
#: default: its clocks follow what is measured in each iteration, so a profile that errs costs no
#: time.
_GOES_WITH = {
    "envelope": ("ours", "balanced"),
    "optimal": ("auto", "default"),
}


class OptionError(EnvPipeError):
    """An option of EnvPipe that is wrong, or does not go with another."""


@dataclass(frozen=True)
class Options:
    """What the user asked for, with what goes without saying filled in.

    Args:
        policy: one of `TYPES`.
        scheduling: one of `SCHEDULINGS`.
        reconfigure: default, greedy or balanced.
        max_in_flight: most microbatches in flight, one number or one for each stage; `memory`: what
            fits beside the rest; None for no limit.
        baseline_steps: measured iterations of the framework's own order at the highest clock.
        profile_steps: measured iterations at each clock.
        profile_file: used in place of the online profile.
        plan_file: run as it stands.
        profile_only: end the job when the profile is written.
        gpu_control: one of `gpu.control.CHOICES`.
        require_control: whether a job that may not change clocks is an error.
        min_dwell_s: least time between two changes of a clock.
        output_dir: where profile, plan and energy log go; None for nowhere.
        gpu_preset: whose clocks are profiled, and which GPU is emulated where there is none; None
            for what the GPU itself says.
    """

    policy: str
    scheduling: str
    reconfigure: str
    max_in_flight: int | tuple[int, ...] | str | None
    baseline_steps: int
    profile_steps: int
    profile_file: Path | None
    plan_file: Path | None
    profile_only: bool
    gpu_control: str
    require_control: bool
    min_dwell_s: float
    output_dir: Path | None
    gpu_preset: str | None

    def request(self, num_microbatches: int) -> PlanRequest:
        """What to plan."""
        return PlanRequest(
            num_microbatches,
            schedule=self.scheduling,
            policy=self.policy,
            reconfigure=self.reconfigure,
            max_in_flight=self.max_in_flight,
            min_dwell_s=self.min_dwell_s if self.policy == "optimal" else 0.0,
        )


def read_options(
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    *,
    num_stages: int,
    save_folder: str | Path | None = None,
    on_gpu: bool,
) -> Options:
    """Check the options against each other, and fill in what was not given.

    Args:
        args: has what `flags.add_arguments` added, parsed.
        environment: by default this process's.
        num_stages: p.
        save_folder: where the job keeps its checkpoints, if it does.
        on_gpu: whether the job runs on GPUs, whose memory can be measured.

    Raises:
        OptionError: an option that is wrong, or does not go with another.
    """
    variables = os.environ if environment is None else environment
    policy = _chosen(args.envpipe_type, variables, "ENVPIPE_TYPE", TYPES) or "envelope"
    # Of a variable that does not go with the flags, the flags win.
    fits = variables if args.envpipe_plan is None else {}
    scheduling = _chosen(args.envpipe_scheduling, fits, "ENVPIPE_SCHEDULING", SCHEDULINGS)
    if args.envpipe_scheduling is None and scheduling == "auto" and policy != "optimal":
        scheduling = None
    reconfigure = _chosen(args.envpipe_reconfigure, fits, "ENVPIPE_RECONFIGURE", RECONFIGURES)
    if args.envpipe_reconfigure is None and policy != "envelope":
        reconfigure = None
    if reconfigure == "optimal":
        if policy not in ("envelope", "optimal"):
            raise OptionError(
                f"--envpipe-reconfigure optimal does not go with --envpipe-type {policy}",
                remedy="Use --envpipe-type optimal.",
            )
        policy, reconfigure = "optimal", "default"
    usual_scheduling, usual_reconfigure = _GOES_WITH.get(policy, ("1f1b", "default"))
    scheduling = scheduling or usual_scheduling
    limited = scheduling in (*LIMITED_SCHEDULES, *SCHEDULE_ALIASES)
    if args.envpipe_plan is not None:
        if reconfigure not in (None, "default") or args.envpipe_max_in_flight is not None:
            raise OptionError(
                "A plan is run as it stands: with its microbatches in flight and its clocks",
                value=str(args.envpipe_plan),
                remedy="Give --envpipe-plan without --envpipe-max-in-flight and "
                "--envpipe-reconfigure, or let the job plan.",
            )
        usual_reconfigure, limited = "default", False
    output_dir = args.envpipe_output
    if output_dir is None and save_folder is not None:
        output_dir = Path(save_folder) / "envpipe"
    options = Options(
        policy=policy,
        scheduling=scheduling,
        reconfigure=reconfigure or usual_reconfigure,
        max_in_flight=_max_in_flight(
            args.envpipe_max_in_flight, BY_MEMORY if limited and on_gpu else None
        ),
        baseline_steps=args.envpipe_baseline_steps,
        profile_steps=args.envpipe_profile_steps,
        profile_file=_existing("--envpipe-profile", args.envpipe_profile, variables),
        plan_file=_existing("--envpipe-plan", args.envpipe_plan, variables),
        profile_only=args.envpipe_profile_only,
        gpu_control=args.envpipe_gpu_control,
        require_control=args.envpipe_require_control,
        min_dwell_s=args.envpipe_min_dwell_ms / 1e3,
        output_dir=output_dir,
        gpu_preset=_preset(args.envpipe_gpu),
    )
    _check(options, num_stages, on_gpu=on_gpu)
    return options


def make_output_folder(options: Options) -> None:
    """Make it before anything is built.

    Raises:
        OptionError: there can be none.
    """
    if options.output_dir is None:
        return
    try:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"There can be no output folder: {error.strerror}",
            value=str(options.output_dir),
            remedy="Give another one by --envpipe-output.",
        ) from error


def prepare_files(options: Options, num_stages: int) -> None:
    """Make the output folder, and read what files are given, before anything is built.

    Rank 0 alone reads: files may lie on its node alone.

    Raises:
        EnvPipeError: there can be no folder; a file is damaged, or of another number of stages.
    """
    make_output_folder(options)
    if os.environ.get("RANK", "0") == "0":
        check_files(options, num_stages)


def check_files(options: Options, num_stages: int) -> None:
    """Read the files that the job is given before anything is built.

    Raises:
        EnvPipeError: one is damaged, or of another number of stages.
    """
    if options.profile_file is None:
        return
    profile = read_profile(options.profile_file)
    if profile.num_stages != num_stages:
        raise OptionError(
            f"The profile has {profile.num_stages} stages and this job {num_stages}",
            value=str(options.profile_file),
            remedy="Give the profile of this model on as many stages.",
        )
    if options.plan_file is not None:
        read_plan(options.plan_file, profile)


def _check(options: Options, num_stages: int, *, on_gpu: bool) -> None:
    try:
        check_request(options.request(num_microbatches=1))
    except PlannerError as error:  # it names the options of `envpipe plan`
        text = str(error)
        for option, name in (
            ("--policy", "--envpipe-type"),
            ("--schedule", "--envpipe-scheduling"),
            ("--reconfigure", "--envpipe-reconfigure"),
        ):
            text = text.replace(option, name)
        raise OptionError(text) from None
    if isinstance(options.max_in_flight, tuple) and len(options.max_in_flight) != num_stages:
        raise OptionError(
            f"--envpipe-max-in-flight is one number, or one for each of {num_stages} stages",
            value=options.max_in_flight,
        )
    if options.max_in_flight == BY_MEMORY and not on_gpu:
        raise OptionError(
            "--envpipe-max-in-flight memory needs GPUs, whose memory can be measured",
            remedy="Give a number of microbatches.",
        )
    if options.plan_file and not options.profile_file:
        raise OptionError(
            "--envpipe-plan needs the profile that prices it",
            value=str(options.plan_file),
            remedy="Give --envpipe-profile too.",
        )
    if options.profile_only and (options.profile_file or options.output_dir is None):
        raise OptionError(
            "--envpipe-profile-only measures a profile and writes it",
            remedy="Give --envpipe-output, and no --envpipe-profile.",
        )
    if options.policy == "baseline" and (options.profile_only or options.profile_file):
        raise OptionError(
            "--envpipe-type baseline measures alone: it makes no profile, and runs no plan",
            remedy="Use another type with --envpipe-profile, -profile-only and -plan.",
        )
    if options.gpu_control == "none" and (
        options.profile_only or options.profile_file or options.require_control
    ):
        raise OptionError(
            "--envpipe-gpu-control none only measures, in the framework's own order",
            remedy="Leave it out with --envpipe-profile, -profile-only, -plan and "
            "-require-control; dry_run runs a plan and changes no clock.",
        )
    if options.gpu_control == "emulated" and on_gpu:
        raise OptionError(
            "--envpipe-gpu-control emulated is for jobs without GPUs",
            remedy="Use dry_run, which logs what would be done.",
        )
    for name, value, least in (
        ("--envpipe-baseline-steps", options.baseline_steps, 2),
        ("--envpipe-profile-steps", options.profile_steps, 1),
        ("--envpipe-min-dwell-ms", options.min_dwell_s * 1e3, 0),
    ):
        if not least <= value < math.inf:
            raise OptionError(f"{name} is at least {least}, and finite", value=value)


def _chosen(
    given: str | None, variables: Mapping[str, str], name: str, choices: tuple[str, ...]
) -> str | None:
    value = given if given is not None else variables.get(name) or None
    if value is not None and value not in choices:
        raise OptionError(
            f"The environment variable {name} is none of its option's choices",
            value=value,
            remedy=f"Use {', '.join(choices)}.",
        )
    return value


def _preset(given: str) -> str | None:
    """The preset, in whatever case EnvPipe's users wrote it; a path stays as it is."""
    if given == "auto":
        return None
    name = given if given.endswith(".toml") else given.lower()
    load_preset(name)
    return name


def _max_in_flight(
    given: str | None, unless_given: str | None
) -> int | tuple[int, ...] | str | None:
    if given is None or given == BY_MEMORY:
        return given or unless_given
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise OptionError(
            "--envpipe-max-in-flight is a number of microbatches, one for each stage, or 'memory'",
            value=given,
        )
    return numbers if len(numbers) > 1 else numbers[0]


def _existing(name: str, path: Path | None, variables: Mapping[str, str]) -> Path | None:
    """A file that is there on the node of rank 0, which alone reads it."""
    if path is not None and variables.get("RANK", "0") == "0" and not path.is_file():
        raise OptionError(f"The file of {name} is not there", value=str(path))
    return path
