"""The schedule that a framework ran a step by, from what was seen of it. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence

from envpipe_megatron.core.kinds import WHOLE
from envpipe_megatron.core.orders import builders
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError


class OrderError(EnvPipeError):
    """A step whose order of units EnvPipe cannot plan for."""


def recognized(letters: Sequence[str], num_microbatches: int) -> Schedule:
    """The schedule that a recorded step was run by, from a stage's letters, such as `FFBFBB`.

    Raises OrderError for another number of units, and for orders other than 1F1B and GPipe.
    """
    for stage, seen in enumerate(letters):
        counts = {kind.value: seen.count(kind.letter) for kind in WHOLE}
        if set(counts.values()) != {num_microbatches}:
            reported = " and ".join(f"{count} {kind}s" for kind, count in counts.items())
            raise OrderError(
                f"Stage {stage} reported {reported}; {num_microbatches} microbatches need "
                f"{num_microbatches} of each",
                remedy="Call instruction() for every forward and backward, and give the right "
                "num_microbatches.",
            )
    for builder in (builders.one_f_one_b, builders.gpipe):
        known = builder(len(letters), num_microbatches)
        if [_letters(known, stage) for stage in range(len(letters))] == list(letters):
            return known
    raise OrderError(
        "The order of the first step is none that EnvPipe can plan without changing it",
        value=dict(enumerate(letters)),
        remedy="Run 1F1B or GPipe, one chunk a stage, with whole backwards; or let EnvPipe "
        "execute the order (docs/integration.md).",
    )


def _letters(schedule: Schedule, stage: int) -> str:
    return "".join(unit.kind.letter for unit in schedule.stages[stage])
