"""The options of a job: what becomes of its flags; no framework, no torch.

`flags` says what there is and adds them to a framework's command line, `settings` takes them by
name and value, and `read_options` checks both ways' against each other. EnvPipe's environment
variables ENVPIPE_TYPE, ENVPIPE_SCHEDULING and ENVPIPE_RECONFIGURE stand for the options of those
names where these are not given.
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
from envpipe_megatron.integrations.flags import RECONFIGURES, SCHEDULINGS, TYPES
from envpipe_megatron.integrations.levels import AUTO, Level
from envpipe_megatron.policies.problem import PlannerError
from envpipe_megatron.policies.request import BY_MEMORY, PlanRequest, check_request
from envpipe_megatron.policies.schedules import SCHEDULES

#: What a type goes with if the user does not say; others go with 1F1B. The closed loop of optimal
#: plans is the default: it follows what is measured, so what errs costs next to no time.
_GOES_WITH = {
    "envelope": ("ours", "balanced"),
    "optimal": ("auto", "default"),
}
#: Types that a job without a pipeline may have.
_WITHOUT_PIPELINE = ("baseline", "uniform")


class OptionError(EnvPipeError):
    """An option of EnvPipe that is wrong, or does not go with another."""


@dataclass(frozen=True)
class Options:
    """The options of `flags.FLAGS`, checked, with defaults filled in.

    `policy` is the type. None as the level is the highest that the job can have; as the limit of
    microbatches in flight it is no limit; as the slowdown, what is usual; as a file, folder or
    preset, none.
    """

    level: Level | None
    self_check: str
    policy: str
    scheduling: str
    reconfigure: str
    max_in_flight: int | tuple[int, ...] | str | None
    baseline_steps: int
    profile_steps: int
    profile_file: Path | None
    plan_file: Path | None
    profile_only: bool
    sweep: bool
    max_slowdown_percent: float | None
    gpu_control: str
    require_control: bool
    channel: str
    min_dwell_s: float
    output_dir: Path | None
    gpu_preset: str | None

    @property
    def closed_loop(self) -> bool:
        """Whether plans are corrected as long as the job runs."""
        as_it_stands = self.sweep or self.profile_only or self.plan_file is not None
        return self.policy == "optimal" and not as_it_stands

    def request(
        self, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None
    ) -> PlanRequest:
        """What to plan, in chunks and groups as `PlanRequest` takes them."""
        return PlanRequest(
            num_microbatches,
            schedule=self.scheduling,
            policy=self.policy,
            reconfigure=self.reconfigure,
            num_chunks=num_chunks,
            group_size=group_size,
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
        environment: environment variables; by default this process's.
        num_stages: p.
        save_folder: where the job keeps its checkpoints, if it does.
        on_gpu: whether memory can be measured.

    Raises OptionError for an option that is wrong, or does not go with another.
    """
    variables = os.environ if environment is None else environment
    policy = _chosen(args.envpipe_type, variables, "ENVPIPE_TYPE", TYPES)
    if args.envpipe_type is None and num_stages == 1 and policy not in _WITHOUT_PIPELINE:
        policy = "uniform"  # a site's variable is for its pipelines
    if policy is None and args.envpipe_reconfigure in ("greedy", "balanced"):
        policy = "envelope"
    policy = policy or "optimal"
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
    limited = "max_in_flight" in SCHEDULES[scheduling].takes
    if args.envpipe_plan is not None:
        if reconfigure not in (None, "default") or args.envpipe_max_in_flight is not None:
            limited_by_user = args.envpipe_max_in_flight is not None
            other = "max-in-flight" if limited_by_user else f"reconfigure {reconfigure}"
            raise OptionError(
                f"--envpipe-plan cannot be combined with --envpipe-{other}: a plan is run as it "
                "stands, with its own microbatches in flight and clocks",
                value=str(args.envpipe_plan),
                remedy="Leave one of them out.",
            )
        usual_reconfigure, limited = "default", False
    output_dir = args.envpipe_output
    if output_dir is None and save_folder is not None:
        output_dir = Path(save_folder) / "envpipe"
    options = Options(
        level=None if args.envpipe_level == AUTO else Level[args.envpipe_level.upper()],
        self_check=args.envpipe_self_check,
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
        sweep=args.envpipe_sweep,
        max_slowdown_percent=args.envpipe_max_slowdown,
        gpu_control=args.envpipe_gpu_control,
        require_control=args.envpipe_require_control,
        channel=args.envpipe_channel,
        min_dwell_s=args.envpipe_min_dwell_ms / 1e3,
        output_dir=output_dir,
        gpu_preset=_preset(args.envpipe_gpu),
    )
    _check(options, num_stages, on_gpu=on_gpu)
    return options


def prepare_files(options: Options, num_stages: int) -> None:
    """Make the output folder, and read what files are given, before anything is built.

    Only rank 0 reads: files may lie on its node only. Raises EnvPipeError if something else has
    the folder's name, the profile that is asked for has no folder, or a file is damaged or of
    another number of stages. A folder that cannot be made otherwise costs its files only.
    """
    if options.output_dir is not None:
        try:
            options.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if options.profile_only or isinstance(error, FileExistsError | NotADirectoryError):
                raise OptionError(
                    f"There can be no output folder: {error.strerror}",
                    value=str(options.output_dir),
                    remedy="Give another one by --envpipe-output.",
                ) from error
    if options.profile_file is None or not _reads_files(os.environ):
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
        check_request(options.request(num_microbatches=1), of_job=True)
    except PlannerError as error:  # it names the options of `envpipe plan`
        text = str(error)
        for option, name in (
            ("--policy", "--envpipe-type"),
            ("--schedule", "--envpipe-scheduling"),
            ("--reconfigure", "--envpipe-reconfigure"),
            ("--max-in-flight", "--envpipe-max-in-flight"),
        ):
            text = text.replace(option, name)
        raise OptionError(text) from None
    limit, by_file = options.max_in_flight, options.profile_file is not None
    if isinstance(limit, tuple) and len(limit) != num_stages:
        raise OptionError(
            f"--envpipe-max-in-flight is one number, or one for each of {num_stages} stages",
            value=limit,
        )
    for wrong, what, remedy in (
        (
            limit == BY_MEMORY and not on_gpu,
            "--envpipe-max-in-flight memory needs GPUs, whose memory can be measured",
            "Give a number of microbatches.",
        ),
        (
            options.plan_file is not None and not by_file,
            "--envpipe-plan needs the profile that prices it",
            "Give --envpipe-profile too.",
        ),
        (
            options.sweep and (options.policy == "baseline" or by_file),
            "--envpipe-sweep measures all clocks, to plan",
            "Use another type than baseline, without --envpipe-profile and -plan.",
        ),
        (
            options.profile_only and (by_file or options.output_dir is None),
            "--envpipe-profile-only measures a profile and writes it",
            "Give --envpipe-output, and no --envpipe-profile.",
        ),
        (
            options.policy == "baseline" and (options.profile_only or by_file),
            "--envpipe-type baseline measures alone: it makes no profile, and runs no plan",
            "Use another type with --envpipe-profile, -profile-only and -plan.",
        ),
        (
            options.gpu_control == "none"
            and (options.profile_only or by_file or options.require_control),
            "--envpipe-gpu-control none only measures, in the framework's own order",
            "Leave it out with --envpipe-profile, -profile-only, -plan and -require-control; "
            "dry_run runs a plan and changes no clock.",
        ),
        (
            num_stages == 1
            and (options.policy not in _WITHOUT_PIPELINE or options.profile_only or by_file),
            "Without a pipeline there is nothing to profile and plan: the job has one clock",
            "Use --envpipe-type uniform or baseline, without --envpipe-profile, -profile-only and "
            "-plan.",
        ),
        (
            options.gpu_control == "emulated" and on_gpu,
            "--envpipe-gpu-control emulated is for jobs without GPUs",
            "Use dry_run, which logs what would be done.",
        ),
    ):
        if wrong:
            raise OptionError(what, remedy=remedy)
    for name, value, least in (
        ("--envpipe-baseline-steps", options.baseline_steps, 2),
        ("--envpipe-profile-steps", options.profile_steps, 1),
        ("--envpipe-max-slowdown", options.max_slowdown_percent or 0.0, 0),
        ("--envpipe-min-dwell-ms", options.min_dwell_s * 1e3, 0),
    ):
        if not least <= value < math.inf:
            raise OptionError(f"{name} is at least {least}, and finite", value=value)


def _chosen(
    given: str | None, variables: Mapping[str, str], name: str, choices: tuple[str, ...]
) -> str | None:
    value = (variables.get(name, "") if given is None else given).lower() or None
    if value is not None and value not in choices:
        raise OptionError(
            f"The value of the environment variable {name} is not a valid choice",
            value=value,
            remedy=f"Use {', '.join(choices)}.",
        )
    return value


def _preset(given: str) -> str | None:
    """The preset, whose name users write in any case; a path stays as it is."""
    if given == "auto":
        return None
    name = given if given.endswith(".toml") else given.lower()
    load_preset(name)
    return name


def _max_in_flight(given: str | None, default: str | None) -> int | tuple[int, ...] | str | None:
    if given is None or given == BY_MEMORY:
        return given or default
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


def _reads_files(variables: Mapping[str, str]) -> bool:
    return variables.get("RANK", "0") == "0"


def _existing(name: str, path: Path | None, variables: Mapping[str, str]) -> Path | None:
    if path is not None and _reads_files(variables) and not path.is_file():
        raise OptionError(f"The file of {name} is not there", value=str(path))
    return path
