"""Decides the level of a job by the limits that it has; free of frameworks.

A framework's integration has a table of `ArgumentLimit`s, and may see others as a job runs. Where
the user names no level, `decide` gives the highest that can be had, and never fails. Versions of
frameworks that EnvPipe was tried with are here too; those of Megatron are the patches'.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.job.options import JobOptions
from envpipe_megatron.runtime.job.options import Level as Level

#: From the first that was tested, below the next minor one: parts of its engine may change.
DEEPSPEED = "deepspeed>=0.19.6,<0.20"
#: As DEEPSPEED: the modules of a model may change. 5.0, 5.8, 5.16 and 5.24 were tested.
TRANSFORMERS = "transformers>=5.0,<5.25"
#: Says of a job's arguments whether they ask for something.
Predicate = Callable[[argparse.Namespace], bool]


class JobError(EnvPipeError):
    """A job that cannot run as it is asked to, or not under EnvPipe at all."""


@dataclass(frozen=True)
class Limit:
    """A feature of a job, and the highest level that a job with it can have.

    Args:
        feature: its name, as users write it.
        highest: `Level.ORDER` if a self-check of the job's own first iteration must hold for that.
        reason: why no level above can be had, or why the check is needed.
    """

    feature: str
    highest: Level
    reason: str

    def __str__(self) -> str:
        return f"{self.feature} ({self.reason})"


@dataclass(frozen=True)
class ArgumentLimit(Limit):
    """A row of a framework's table: the limit of a job whose arguments ask for the feature."""

    asks: Predicate


def why_whole_at(options: JobOptions, level: Level, of_model: str) -> str:
    """Return why backwards are whole at a level, empty if they may be in two parts.

    `of_model` is what the model has against parts, if anything.
    """
    if level is not Level.ORDER:
        return f"its level is {level}"
    if options.split == "off":
        return "--envpipe-split off"
    if options.self_check == "off":
        return "--envpipe-self-check off leaves out what shows that splitting them changes no bit"
    return of_model


def limits_of_arguments(args: argparse.Namespace, table: Iterable[ArgumentLimit]) -> list[Limit]:
    """Return the limits by those rows of a table that a job's arguments ask for."""
    return [Limit(row.feature, row.highest, row.reason) for row in table if row.asks(args)]


def limits_where(highest: Level, *rows: tuple[object, str, str]) -> list[Limit]:
    """Return limits of a level, of rows (does the job have it, feature, reason)."""
    return [Limit(feature, highest, reason) for has, feature, reason in rows if has]


@dataclass(frozen=True)
class Decision:
    """The level of a job, and for each level above it the limits that rule that one out.

    `to_check` are the features for which level `order` depends on a self-check; none below it.
    """

    level: Level
    against: Mapping[Level, tuple[Limit, ...]]
    to_check: tuple[Limit, ...] = ()

    @property
    def sees_units(self) -> bool:
        """True if the units of a step are seen one by one; False if it is measured as one."""
        return self.level is not Level.UNIFORM and not self.against.get(Level.UNITS)

    def __str__(self) -> str:
        """Return the level, and what rules out the next one."""
        said = [f"level {self.level}"]
        if self.to_check:
            features = ", ".join(limit.feature for limit in self.to_check)
            said.append(f"if a self-check holds, for {features}")
        for above, limits in list(self.against.items())[:1]:
            said.append(f"against {above}: {_text(limits)}" if limits else "no more was asked for")
        return "; ".join(said)


def decide(
    limits: Iterable[Limit],
    asked: Level | None = None,
    *,
    checks: bool = True,
) -> Decision:
    """Return the level that is asked for, or by default the highest that limits leave.

    Without `checks`, what needs a self-check rules out level `order`. Raises JobError if more is
    asked for than limits leave; it names them.
    """
    most = Level.ORDER if checks else Level.UNITS
    capped = [replace(limit, highest=min(limit.highest, most)) for limit in limits]
    highest = min((limit.highest for limit in capped), default=Level.ORDER)
    level = highest if asked is None else asked
    against = {above: tuple(limit for limit in capped if limit.highest < above) for above in Level}
    if level > highest:
        raise JobError(
            f"Level {level} cannot be had with: {_text(against[level])}",
            remedy=f"Leave these out, or give --envpipe-level {highest}.",
        )
    return Decision(
        level,
        {above: found for above, found in against.items() if above > level},
        tuple(capped) if level is Level.ORDER else (),
    )


def _text(limits: Iterable[Limit]) -> str:
    return ", ".join(map(str, limits))


def on(*names: str) -> Predicate:
    """Return whether one of the arguments exists and is set; versions have different ones."""
    return lambda args: any(getattr(args, name, None) for name in names)


def above_one(*names: str) -> Predicate:
    """Return whether one of the arguments exists and is above 1."""
    return lambda args: any((getattr(args, name, None) or 1) > 1 for name in names)


def any_of(*several: Predicate) -> Predicate:
    """Return whether arguments ask for one of several things."""
    return lambda args: any(asks(args) for asks in several)


def frees_while_training() -> bool:
    """Return whether torch's allocator may give memory back at any time.

    That waits for all work of the device, and so for a posted receive whose sender may be waiting
    for this stage: both would hang.
    """
    settings = [
        setting.partition(":")
        for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        for setting in os.environ.get(variable, "").split(",")
    ]
    return any(
        name.strip() == "garbage_collection_threshold" and value.strip() not in ("", "0", "0.0")
        for name, _, value in settings
    )


#: Names what `frees_while_training` finds, for users.
FREES_WHILE_TRAINING = "garbage_collection_threshold in PYTORCH_CUDA_ALLOC_CONF"


def is_tested(version: str, wanted: str) -> bool:
    """Return whether a version is in DEEPSPEED or TRANSFORMERS; no prerelease of an end is."""
    from packaging.requirements import Requirement  # commands that ask for none start without it

    return Requirement(wanted).specifier.contains(version, prereleases=True)


def check_tested(version: str, wanted: str, instead: str = "") -> None:
    """Refuse by a JobError a version that EnvPipe was not tried with."""
    if not is_tested(version, wanted):
        raise JobError(
            f"EnvPipe was not tried with this version of {wanted.partition('>')[0]}",
            value=version,
            remedy=f"Install {wanted}{instead}.",
        )


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
