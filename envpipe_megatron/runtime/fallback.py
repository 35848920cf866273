"""Failures of EnvPipe that must not stop training.

If a part fails on one rank only, all ranks must know, or they would wait for each other. So each
rank tries its part, the ranks agree on the outcome, and all of them raise `DegradedError`, which
`phases.run_phases` turns into the framework's own order at the highest clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.runtime.channel.collectives import Collectives

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Longest text of an error: notes go through the sockets of agents.
_MOST_CHARACTERS = 1000


class DegradedError(EnvPipeError):
    """A part of EnvPipe has failed, on all ranks alike: training goes on without it."""


def in_words(error: Exception) -> str:
    """Return an error's text, for a note; the stack of one that is not EnvPipe's is logged."""
    if isinstance(error, EnvPipeError):
        text = str(error)
    else:
        logger.error("A fault of EnvPipe's, please report it", exc_info=error)
        text = f"{type(error).__name__}: {error}"
    return text[:_MOST_CHARACTERS]


def _tried(make: Callable[[], T]) -> tuple[list[T], str | None]:
    """Return [what `make` returned] and None, or [] and the text of its error."""
    try:
        return [make()], None
    except Exception as error:
        return [], in_words(error)


def by_planner(collectives: Collectives, make: Callable[[], T]) -> T:
    """Return what the planner makes, on every rank; DegradedError if it fails, for any reason."""
    made, failure = collectives.from_planner(_tried(make) if collectives.is_planner else None)
    if failure is not None:
        raise DegradedError(failure)
    return made[0]


def on_every_rank(collectives: Collectives, make: Callable[[], T]) -> T:
    """Return what this rank makes, once every rank has; DegradedError on all if one fails."""
    made, failure = _tried(make)
    first = collectives.first(failure)
    if first is not None:
        stage, text = first
        raise DegradedError(f"Stage {stage}: {text}")
    return made[0]
