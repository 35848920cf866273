"""Which level a job gets, by what its arguments ask for; free of frameworks.

A framework's integration has a table of `Limit`s. `decide` is a pure function of arguments and
table. Where the user names no level it gives the highest that can be had, and never fails.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.job.options import Level as Level

Asks = Callable[[argparse.Namespace], bool]


class LevelError(EnvPipeError):
    """A level that the user names and this job cannot have."""


@dataclass(frozen=True)
class Limit:
    """A feature of a framework, and the highest level that a job with it can have.

    Args:
        feature: its name, as users write it.
        asks: whether a job's arguments ask for it.
        highest: `Level.ORDER` if a self-check of the job's own first iteration must hold for that.
        reason: what stands against the levels above, or wants the check.
    """

    feature: str
    asks: Asks
    highest: Level
    reason: str

    def __str__(self) -> str:
        return f"{self.feature} ({self.reason})"


def stands_against(feature: str, highest: Level, reason: str) -> Limit:
    """A limit that a job is known to have, whatever its arguments."""
    return Limit(feature, lambda args: True, highest, reason)


def limits_where(highest: Level, *rows: tuple[object, str, str]) -> list[Limit]:
    """Limits of a level that a job is known to have; of each whether it has, feature and reason."""
    return [stands_against(feature, highest, reason) for has, feature, reason in rows if has]


@dataclass(frozen=True)
class Decision:
    """The level of a job, and for each level above it what stands against that one.

    `to_check` are the features for which level `order` depends on a self-check; none below it.
    """

    level: Level
    against: Mapping[Level, tuple[Limit, ...]]
    to_check: tuple[Limit, ...] = ()

    @property
    def tells_units(self) -> bool:
        """True if the job has more than whole steps: its units are seen, one by one."""
        return self.level is not Level.UNIFORM and not self.against.get(Level.UNITS)

    def __str__(self) -> str:
        """The level, and what stands against the next one."""
        said = [f"level {self.level}"]
        if self.to_check:
            features = ", ".join(limit.feature for limit in self.to_check)
            said.append(f"if a self-check holds, for {features}")
        for above, limits in list(self.against.items())[:1]:
            said.append(f"against {above}: {_text(limits)}" if limits else "no more was asked for")
        return "; ".join(said)


def decide(
    args: argparse.Namespace,
    limits: Iterable[Limit],
    asked: Level | None = None,
    *,
    checks: bool = True,
) -> Decision:
    """Give a job the level that it asks for, or by default the highest that it can have.

    Without `checks`, what wants a self-check stands against level `order`. Raises LevelError if the
    job asks for more than it can have, with what stands against it by name.
    """
    most = Level.ORDER if checks else Level.UNITS
    asked_for = [
        replace(limit, highest=min(limit.highest, most)) for limit in limits if limit.asks(args)
    ]
    highest = min((limit.highest for limit in asked_for), default=Level.ORDER)
    level = highest if asked is None else asked
    against = {
        above: tuple(limit for limit in asked_for if limit.highest < above) for above in Level
    }
    if level > highest:
        raise LevelError(
            f"Level {level} cannot be had with: {_text(against[level])}",
            remedy=f"Leave these out, or give --envpipe-level {highest}.",
        )
    return Decision(
        level,
        {above: found for above, found in against.items() if above > level},
        tuple(asked_for) if level is Level.ORDER else (),
    )


def _text(limits: Iterable[Limit]) -> str:
    return ", ".join(map(str, limits))


def on(*names: str) -> Asks:
    """Whether one of the arguments is there and set; versions do not have the same ones."""
    return lambda args: any(getattr(args, name, None) for name in names)


def above_one(*names: str) -> Asks:
    """Whether one of the arguments is there and above 1."""
    return lambda args: any((getattr(args, name, None) or 1) > 1 for name in names)


def any_of(*several: Asks) -> Asks:
    """Whether one of several questions is answered by yes."""
    return lambda args: any(asks(args) for asks in several)


class RefusedError(EnvPipeError):
    """A feature of the framework that does not run under EnvPipe."""


def frees_while_training() -> bool:
    """Whether torch's allocator may give memory back at any time.

    That waits for all that the device does, and so for a posted receive whose sender may be waiting
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


#: What no framework may ask of torch, and whether the environment does.
FREES_WHILE_TRAINING = "garbage_collection_threshold in PYTORCH_CUDA_ALLOC_CONF"
