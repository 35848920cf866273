"""Reads the options of a job, from flags or by name and value; no framework, no torch.

EnvPipe's environment variables ENVPIPE_TYPE, ENVPIPE_SCHEDULING and ENVPIPE_RECONFIGURE stand for
the options of those names where these are not given.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from envpipe_megatron.core.plan import read_plan
from envpipe_megatron.core.profile import read_profile
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.integrations.options import (
    OPTIONS,
    Options,
    add_arguments,
    flag_of,
)
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.policies.problem import PlannerError
from envpipe_megatron.policies.request import BY_MEMORY, check_request
from envpipe_megatron.policies.schedules import SCHEDULES

#: Says an option in an error, by its name: as a flag, or `str` as a setting.
Named = Callable[[str], str]
#: Types that a job without a pipeline may have.
_WITHOUT_PIPELINE = ("baseline", "uniform")
#: The names of a request's parts, where options have others.
_PLANNED_BY = {"policy": "type", "schedule": "scheduling"}


class OptionError(EnvPipeError):
    """An option of EnvPipe that is wrong, or does not go with another."""


def read_options(
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    *,
    num_stages: int,
    save_folder: str | Path | None = None,
    on_gpu: bool,
    named: Named = flag_of,
) -> Options:
    """Check the options against each other, and fill in what was not given.

    Args:
        args: has what `options.add_arguments` added, parsed.
        environment: environment variables; by default this process's.
        num_stages: p.
        save_folder: where the job keeps its checkpoints, if it does.
        on_gpu: whether memory can be measured.
        named: how errors name options.

    Raises OptionError for an option that is wrong, or does not go with another.
    """
    variables = os.environ if environment is None else environment
    given = {name: _read(args, name, variables, named) for name in OPTIONS}
    policy = _chosen(given, variables, "type")
    if given["type"] is None and num_stages == 1 and policy not in _WITHOUT_PIPELINE:
        policy = "uniform"  # a site's variable is for its pipelines
    if policy is None and given["reconfigure"] in ("greedy", "balanced"):
        policy = "envelope"
    policy = policy or "optimal"
    # Of a variable that does not go with the flags, the flags win.
    has_plan = given["plan"] is not None
    fits = {} if has_plan else variables
    scheduling = _chosen(given, fits, "scheduling")
    of_others = "auto" if policy != "optimal" else "1f1b" if given["objective"] == Goal.TIME else ""
    if given["scheduling"] is None and scheduling == of_others:
        scheduling = None
    reconfigure = _chosen(given, fits, "reconfigure")
    if given["reconfigure"] is None and policy != "envelope":
        reconfigure = None
    if reconfigure == "optimal":
        if policy not in ("envelope", "optimal"):
            raise OptionError(
                f"{named('reconfigure')} optimal does not go with {named('type')} {policy}",
                remedy=f"Use {named('type')} optimal.",
            )
        policy, reconfigure = "optimal", "default"
    scheduling = scheduling or _usual("scheduling", policy)
    if has_plan:
        reconfigure = reconfigure or "default"
    elif on_gpu and "max_in_flight" in SCHEDULES[scheduling].takes:
        given["max_in_flight"] = given["max_in_flight"] or BY_MEMORY
    if given["output"] is None and save_folder is not None:
        given["output"] = Path(save_folder) / "envpipe"
    given |= {
        "type": policy,
        "scheduling": scheduling,
        "reconfigure": reconfigure or _usual("reconfigure", policy),
    }
    options = Options(**given)
    _check(options, num_stages, on_gpu=on_gpu, named=named)
    return options


def _read(args: argparse.Namespace, name: str, variables: Mapping[str, str], named: Named) -> Any:
    """One option as it was given; an OptionError if it is wrong by itself."""
    option, value = OPTIONS[name], getattr(args, f"envpipe_{name}")
    if option.least is not None and not option.least <= (value or 0.0) < math.inf:
        raise OptionError(f"{named(name)} is at least {option.least}, and finite", value=value)
    if option.is_file and value is not None and _reads_files(variables) and not value.is_file():
        raise OptionError(f"The file of {named(name)} is not there", value=str(value))
    try:
        return option.read(value)
    except ValueError as error:
        raise OptionError(f"{named(name)} is {error}", value=value) from None


def _chosen(given: Mapping[str, Any], variables: Mapping[str, str], name: str) -> str | None:
    """Return what is given of an option, or else its variable."""
    variable, choices = f"ENVPIPE_{name.upper()}", OPTIONS[name].flag["choices"]
    value = given[name] or variables.get(variable, "").lower() or None
    if value is not None and value not in choices:
        raise OptionError(
            f"The value of the environment variable {variable} is not a valid choice",
            value=value,
            remedy=f"Use {', '.join(choices)}.",
        )
    return value


def _usual(name: str, policy: str) -> str:
    usual = OPTIONS[name].with_type or {}
    return usual.get(policy, usual[None])


def prepare_files(options: Options, num_stages: int, named: Named = flag_of) -> None:
    """Make the output folder, and read what files are given, before anything is built.

    Only rank 0 reads: files may lie on its node only. Raises EnvPipeError if something else has
    the folder's name, the profile that is asked for has no folder, or a file is damaged or of
    another number of stages. A folder that cannot be made otherwise costs its files only.
    """
    if options.output is not None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if options.profile_only or isinstance(error, FileExistsError | NotADirectoryError):
                raise OptionError(
                    f"There can be no output folder: {error.strerror}",
                    value=str(options.output),
                    remedy=f"Give another one by {named('output')}.",
                ) from error
    if options.profile is None or not _reads_files(os.environ):
        return
    profile = read_profile(options.profile)
    if profile.num_stages != num_stages:
        raise OptionError(
            f"The profile has {profile.num_stages} stages and this job {num_stages}",
            value=str(options.profile),
            remedy="Give the profile of this model on as many stages.",
        )
    if options.plan is not None:
        read_plan(options.plan, profile)


def _check(options: Options, num_stages: int, *, on_gpu: bool, named: Named) -> None:
    limit, by_file = options.max_in_flight, options.profile is not None
    if isinstance(limit, tuple) and len(limit) != num_stages:
        raise OptionError(
            f"{named('max_in_flight')} is one number, or one for each of {num_stages} stages",
            value=limit,
        )
    goal, price = options.objective, options.energy_price or options.gpu_price
    prices = f"{named('energy_price')} or {named('gpu_price')}"
    files = f"{named('profile')}, {named('profile_only')} and {named('plan')}"
    of_plans = goal not in (None, Goal.ENERGY)
    for wrong, what, remedy in (
        (
            num_stages == 1
            and (options.type not in _WITHOUT_PIPELINE or options.profile_only or by_file),
            "Without a pipeline there is nothing to profile and plan: the job has one clock",
            f"Use {named('type')} uniform or baseline, without {files}.",
        ),
        (
            num_stages == 1 and of_plans,
            f"{named('objective')} {goal} needs a pipeline: without one the job has one clock",
            "Leave it out.",
        ),
        (
            goal == Goal.COST and not price,
            f"{named('objective')} cost needs a price above 0",
            f"Give {prices}, or both.",
        ),
        (
            price and goal != Goal.COST,
            f"Prices are for {named('objective')} cost",
            f"Give that too, or leave {prices} out.",
        ),
        (
            of_plans and not options.closed_loop,
            f"{named('objective')} {goal} is for plans that the job makes, and looks after",
            f"Use {named('type')} optimal, without {named('sweep')}, {named('profile_only')} and "
            f"{named('plan')}.",
        ),
        (
            goal == Goal.TIME and (options.scheduling == "1f1b" or by_file),
            f"{named('objective')} time looks for another order than {named('scheduling')} 1f1b, "
            "the framework's own, by what units take in this job",
            f"Leave out {named('scheduling')} 1f1b and {named('profile')}, or use another goal.",
        ),
        (
            limit == BY_MEMORY and not on_gpu,
            f"{named('max_in_flight')} memory needs GPUs, whose memory can be measured",
            "Give a number of microbatches.",
        ),
        (
            options.plan is not None and not by_file,
            f"{named('plan')} needs the profile that prices it",
            f"Give {named('profile')} too.",
        ),
        (
            options.plan is not None and (limit is not None or options.reconfigure != "default"),
            f"{named('plan')} runs as it stands, with its own microbatches in flight and clocks",
            f"Leave out {named('max_in_flight')} and {named('reconfigure')}.",
        ),
        (
            options.sweep and (options.type == "baseline" or by_file),
            f"{named('sweep')} measures clocks first, to plan",
            f"Use another type than baseline, without {named('profile')} and {named('plan')}.",
        ),
        (
            options.profile_only and (by_file or options.output is None),
            f"{named('profile_only')} measures a profile and writes it",
            f"Give {named('output')}, and no {named('profile')}.",
        ),
        (
            options.type == "baseline" and (options.profile_only or by_file),
            f"{named('type')} baseline only measures: it makes no profile, and runs no plan",
            f"Use another type with {files}.",
        ),
        (
            options.gpu_control == "none" and (options.profile_only or options.require_control),
            f"{named('gpu_control')} none changes no clock",
            f"Leave it out with {named('profile_only')} and {named('require_control')}.",
        ),
        (
            options.gpu_control == "emulated" and on_gpu,
            f"{named('gpu_control')} emulated is for jobs without GPUs",
            "Use dry_run, which logs what would be done.",
        ),
    ):
        if wrong:
            raise OptionError(what, remedy=remedy)
    try:
        check_request(
            options.request(num_microbatches=1),
            named=lambda part: named(_PLANNED_BY.get(part, part)),
        )
    except PlannerError as error:
        raise OptionError(str(error)) from None


def _reads_files(variables: Mapping[str, str]) -> bool:
    return variables.get("RANK", "0") == "0"


def plain_names(settings: Mapping[str, object]) -> dict[str, object]:
    """The same settings by the one name that each has here; two names are an OptionError."""
    named: dict[str, object] = {}
    for given, value in settings.items():
        name = str(given).replace("-", "_")
        name = "reconfigure" if name == "reconfig" else name  # as EnvPipe itself calls it
        if name in named:
            raise OptionError("An option is given twice", value=given, remedy="Give it once.")
        named[name] = value
    return named


def merged(block: Mapping[str, object], call: Mapping[str, object]) -> dict[str, object]:
    """Settings of a file, and those of a call, which go before them.

    A type in the call drops the file's order, reconfiguring and objective: they may not go with it.
    """
    below, above = plain_names(block), plain_names(call)
    if above.get("type") is not None:
        of_type = {name for name, option in OPTIONS.items() if option.with_type}
        of_type |= {"objective", "energy_price", "gpu_price"}
        below = {name: value for name, value in below.items() if name not in of_type}
    return {**below, **above}


def read_settings(
    settings: Mapping[str, object],
    without: Sequence[str] = (),
    *,
    num_stages: int,
    on_gpu: bool,
    scheduling: str | None = None,
) -> Options:
    """Make of settings what the same flags would be: {"type": "uniform"} is --envpipe-type uniform.

    Args:
        settings, without: as `parse_settings` takes them.
        num_stages: p.
        on_gpu: whether memory can be measured.
        scheduling: the framework's only one, if it is.

    Raises EnvPipeError, with the settings' names, as `read_options` and `prepare_files` do.
    """
    parsed = parse_settings(settings, without)
    parsed.envpipe_scheduling = scheduling or parsed.envpipe_scheduling
    options = read_options(parsed, num_stages=num_stages, on_gpu=on_gpu, named=str)
    prepare_files(options, num_stages, named=str)
    return options


def parse_settings(
    settings: Mapping[str, object], without: Sequence[str] = ()
) -> argparse.Namespace:
    """Parse settings as the same flags would be; what goes with what is not looked at.

    Args:
        settings: option names without `--envpipe-`, with underscores or dashes; `reconfig` stands
            for `reconfigure`. Values are words, numbers, paths, truth values for flags without a
            value, lists for one number per stage; None is as if the name were not there.
        without: options that the framework does not have.

    Raises OptionError, with the settings' names.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_arguments(parser.add_argument_group())
    known = sorted(OPTIONS.keys() - {*without})
    words: list[str] = []
    for name, value in plain_names(settings).items():
        if name not in known:
            raise OptionError(
                "No such option of EnvPipe here",
                value=name,
                remedy=f"There are {', '.join(known)}.",
            )
        if value is None:
            continue
        is_switch = "action" in OPTIONS[name].flag
        if isinstance(value, bool) is not is_switch:
            kind = "true or false" if is_switch else "a value"
            raise OptionError(f"The option {name} takes {kind}", value=value)
        if not is_switch:
            parts = value if isinstance(value, (list, tuple)) else [value]
            words.append(f"{flag_of(name)}={','.join(map(str, parts))}")
        elif value:
            words.append(flag_of(name))
    try:
        return parser.parse_args(words)
    except argparse.ArgumentError as error:
        error.argument_name = {flag_of(name): name for name in known}[error.argument_name or ""]
        raise OptionError(str(error)) from None
