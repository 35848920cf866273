"""Reads the options of a job, from flags or by name and value; no framework, no torch.

EnvPipe's environment variables ENVPIPE_TYPE, ENVPIPE_SCHEDULING and ENVPIPE_RECONFIGURE count where
the options of those names are not given.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envpipe_megatron.core.plan import read_with_profile
from envpipe_megatron.integrations.levels import JobError
from envpipe_megatron.policies.objective import Goal
from envpipe_megatron.policies.request import BY_MEMORY
from envpipe_megatron.policies.schedules import SCHEDULES
from envpipe_megatron.runtime.job.options import OPTIONS, JobOptions

#: Writes an option's name for an error: as a flag, or by `str` as a setting.
Named = Callable[[str], str]
#: Options only for frameworks that have more than one level.
OF_LEVELS = tuple(name for name, option in OPTIONS.items() if option.of_levels)
_OF_VARIABLES = ("type", "scheduling", "reconfigure")
_DEFAULTS = vars(JobOptions())


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--envpipe-{name.replace('_', '-')}"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that go with --envpipe to a framework's command line, as texts."""
    for name, option in OPTIONS.items():
        usual = f" Default: {option.usual}." if option.usual else ""
        help_text = (option.help + usual).replace("%", "%%")
        takes: dict[str, Any] = {"action": "store_true"}
        if option.read is not None:
            takes = {"metavar": option.metavar or f"{{{','.join(option.words)}}}"}
        group.add_argument(flag_of(name), default=None, help=help_text, **takes)


def flags_given(args: argparse.Namespace) -> dict[str, object]:
    """Return by name the flags that were given, of those that `add_arguments` added."""
    flags = {name: getattr(args, f"envpipe_{name}") for name in OPTIONS}
    return {name: value for name, value in flags.items() if value is not None}


def read_settings(
    settings: Mapping[str, object], without: Sequence[str] = (), *, num_stages: int, on_gpu: bool
) -> JobOptions:
    """Return the options of settings: {"type": "uniform"} is --envpipe-type uniform.

    It takes the arguments of `read_options` and `prepare_files`, and raises their errors.
    """
    options = read_options(settings, without, num_stages=num_stages, on_gpu=on_gpu)
    return prepare_files(options, num_stages, str)


def read_options(
    settings: Mapping[str, object],
    without: Sequence[str] = (),
    *,
    num_stages: int,
    on_gpu: bool,
    save_folder: object = None,
    named: Named = str,
) -> JobOptions:
    """Read options, check them against each other, and fill in what was not given.

    Args:
        settings, without: as `read_values` takes them.
        num_stages: p.
        on_gpu: whether memory can be measured.
        save_folder: where the job keeps its checkpoints, if it does.
        named: how errors name options.

    Raises JobError for an option that is wrong, or does not go with another.
    """
    given = read_values(settings, without, named)
    options = JobOptions(**_with_variables(given, num_stages, named))
    if on_gpu and options.plan is None and "max_in_flight" in SCHEDULES[options.scheduling].takes:
        options = replace(options, max_in_flight=options.max_in_flight or BY_MEMORY)
    save = "" if save_folder is None else str(save_folder)
    if options.output is None and save and "://" not in save:  # an object store has no folder
        options = replace(options, output=Path(save) / "envpipe")
    with suppress(OSError):  # the working folder may be gone; scripts may change it later
        files = {name: getattr(options, name) for name in ("output", "profile", "plan")}
        absolute = {name: path.absolute() for name, path in files.items() if path is not None}
        options = replace(options, **absolute)
    limit = options.max_in_flight
    if isinstance(limit, tuple) and len(limit) != num_stages:
        which = f"one number, or one for each of {num_stages} stages"
        raise JobError(f"{named('max_in_flight')} is {which}", value=limit)
    _check_rules(options, {"a pipeline": num_stages > 1, "GPUs": on_gpu}, named)
    return options


def read_values(
    settings: Mapping[str, object], without: Sequence[str] = (), named: Named = str
) -> dict[str, Any]:
    """Return the options that settings give, each read by itself.

    Args:
        settings: option names without `--envpipe-`, with underscores or dashes; `reconfig` is
            `reconfigure`. Values are words, numbers, paths, truth values for flags without a
            value, lists for one number per stage; None is as if the name were not there.
        without: options that the framework does not have.
        named: how errors name options.

    Raises JobError for a name that is no option, or a value that it cannot have.
    """
    known = sorted(OPTIONS.keys() - {*without})
    values = {}
    for name, value in plain_names(settings).items():
        if name not in known:
            raise JobError(
                "No such option of EnvPipe here",
                value=name,
                remedy=f"There are {', '.join(known)}.",
            )
        option = OPTIONS[name]
        is_switch = option.read is None
        if value is not None and isinstance(value, bool) is not is_switch:
            kind = "true or false" if is_switch else "a value"
            raise JobError(f"The option {name} takes {kind}", value=value)
        if value is None or value is False:
            continue
        try:
            values[name] = option.value_of(value)
        except ValueError as error:
            raise JobError(f"{named(name)} is {error}", value=value) from None
    return values


def _variable(name: str) -> str:
    return f"ENVPIPE_{name.upper()}"


def by_variables() -> bool:
    """Return whether this rank's environment sets options; another rank's may not."""
    return any(os.environ.get(_variable(name)) for name in _OF_VARIABLES)


def _with_variables(given: Mapping[str, Any], num_stages: int, named: Named) -> dict[str, Any]:
    """Fill in options from variables, and those that follow from type and reconfiguring.

    A variable that does not go with what is given does not count.
    """
    names = ("type",) if "plan" in given else _OF_VARIABLES
    texts = {name: os.environ.get(_variable(name)) or None for name in names if name not in given}
    filled = read_values(texts, named=lambda name: f"The environment variable {_variable(name)}")
    if num_stages == 1 and filled.get("type", "optimal") not in ("baseline", "uniform"):
        filled["type"] = "uniform"  # a site's variable is for its pipelines
    if "type" not in filled and given.get("reconfigure") in ("greedy", "balanced"):
        filled["type"] = "envelope"
    policy = given.get("type") or filled.get("type", "optimal")
    time = given.get("objective") == Goal.TIME
    unfit = "auto" if policy != "optimal" else "1f1b" if time else ""
    if filled.get("scheduling") == unfit:
        del filled["scheduling"]
    if "plan" in given or policy != "envelope":
        filled["reconfigure"] = "default"
    whole = {**filled, **given}
    if whole.get("reconfigure") == "optimal":
        if policy not in ("envelope", "optimal"):
            raise JobError(
                f"{named('reconfigure')} optimal does not go with {named('type')} {policy}",
                remedy=f"Use {named('type')} optimal.",
            )
        whole |= {"type": "optimal", "reconfigure": "default"}
    return whole


@dataclass(frozen=True)
class Rule:
    """Conditions of an option. A term is an option that is given, or `a pipeline`, or `GPUs`.

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


_ONLY_PLANS = ("sweep", "profile_only", "plan")
_LIMITED = "|".join(
    name for name, row in SCHEDULES.items() if row.in_jobs and "max_in_flight" in row.takes
)
#: What options go with, in the order in which it is checked.
RULES = (
    Rule("type envelope|optimal", "plans for stages", ("a pipeline",)),
    Rule("reconfigure greedy|balanced", "adjusts the clocks of envelopes", ("type envelope",)),
    Rule("scheduling auto", "is planned together with the clocks", ("type optimal",)),
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
    Rule(
        "max_in_flight",
        "limits other orders than the framework's",
        (f"scheduling {_LIMITED}",),
    ),
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
    Rule("gpu_control none", "changes no clock", without=("profile_only",)),
    Rule("gpu_control none|dry_run", "changes no clock", without=("require_control",)),
    Rule("gpu_control emulated", "is for jobs without GPUs", without=("GPUs",)),
)


def _check_rules(options: JobOptions, facts: Mapping[str, bool], named: Named) -> None:
    """Refuse by a JobError options that do not go together, by their rules."""

    def holds(term: str) -> bool:
        if " or " in term:
            return any(map(holds, term.split(" or ")))
        name, _, values = term.partition(" ")
        if term in facts:
            return facts[term]
        value = getattr(options, name)
        return str(value) in values.split("|") if values else value != _DEFAULTS[name]

    def said(term: str) -> str:
        words = term.replace("|", " or ").split(" ")
        return term if term in facts else " ".join(named(w) if w in OPTIONS else w for w in words)

    def given(term: str) -> str:
        name, _, values = term.partition(" ")
        return said(f"{name} {getattr(options, name)}" if values else name)

    for rule in RULES:
        if not holds(rule.of):
            continue
        own = given(rule.of)
        for term in rule.needs:
            if not holds(term):
                instead = "." if term in facts else f", or use {said(term)}."
                what = f"{own} needs {said(term)}: it {rule.why}"
                raise JobError(what, remedy=f"Leave it out{instead}")
        for term in filter(holds, rule.without):
            what = f"{own} does not go with {given(term)}: it {rule.why}"
            left = "it" if term in facts else "one of them"
            raise JobError(what, remedy=f"Leave {left} out.")


def prepare_files(options: JobOptions, num_stages: int, named: Named = flag_of) -> JobOptions:
    """Make the output folder, and return options with what files are given read.

    It is called before anything is built. Only rank 0 reads: files may lie on its node only.
    Raises EnvPipeError if something else has the folder's name, the profile that is asked for has
    no folder, or a file is damaged or of another number of stages. A folder that cannot be made
    otherwise costs its files only.
    """
    if options.output is not None:
        try:
            # What a link points to may have gone, as with a disk that is cleaned.
            Path(os.path.realpath(options.output)).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            # The last is of a character that no name can have.
            wrong = FileExistsError | NotADirectoryError | ValueError
            if options.profile_only or isinstance(error, wrong):
                raise JobError(
                    f"There can be no output folder: {getattr(error, 'strerror', error)}",
                    value=str(options.output),
                    remedy=f"Give another one by {named('output')}.",
                ) from error
    if options.profile is None or os.environ.get("RANK", "0") != "0":
        return options
    read = read_with_profile(options.plan, options.profile, num_stages)
    return replace(options, files_read=read)


def plain_names(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings by the one name that each has here; two names are a JobError."""
    named: dict[str, object] = {}
    for given, value in settings.items():
        name = str(given).replace("-", "_")
        name = "reconfigure" if name == "reconfig" else name  # as EnvPipe itself calls it
        if name in named:
            raise JobError("An option is given twice", value=given, remedy="Give it once.")
        named[name] = value
    return named


def merged(block: Mapping[str, object], call: Mapping[str, object]) -> dict[str, object]:
    """Return settings of a file and of a call, which win.

    A type in the call drops the file's order, reconfiguring and objective: they may not go with it.
    """
    below, above = plain_names(block), plain_names(call)
    if above.get("type") is not None:
        for name in (*_OF_VARIABLES, "objective", "energy_price", "gpu_price"):
            below.pop(name, None)
    return {**below, **above}


def divided(arguments: Sequence[str], *more: str) -> tuple[dict[str, object], list[str]]:
    """Return EnvPipe's settings by name, and what else a command line has.

    Flags that `more` names are the framework's, though they may begin as EnvPipe's do.

    Raises JobError for an option that EnvPipe does not have, or a value that it cannot have.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    add_arguments(parser.add_argument_group())
    try:
        found, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise JobError(str(error)) from None
    prefix = flag_of("")
    unknown = [word for word in rest if word.startswith(prefix) and not word.startswith(more)]
    if unknown:
        names = ", ".join(flag_of(name).removeprefix(prefix) for name in OPTIONS)
        raise JobError("No such option of EnvPipe", value=unknown, remedy=f"There are {names}.")
    settings = flags_given(found)
    read_values(settings, named=flag_of)
    return settings, rest
