"""Probes: generators that say which iterations to run next, so that the store learns unit times.

`first_probe` is what a job without a profile begins with; another package can put its own there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import added_functions
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.measured.store import Store

#: Entry points of packages that add a probe: functions of the order that runs and the store, which
#: yield looks; the store has what a look measured when the next one is asked for.
_GROUP = "envpipe_megatron.probes"


@dataclass(frozen=True)
class Look:
    """Iterations by which to learn what units take.

    Attributes:
        clocked: the order and its clocks, of the framework's kinds of units.
        iterations: how many are measured, one at least.
        note: what the log says.
        settle: how many run before, and are not.
    """

    clocked: Clocked
    iterations: int
    note: str
    settle: int = 0


def first_probe(own: Schedule, store: Store, usual: Iterator[Look]) -> Iterator[Look]:
    """Return what a job without a profile looks at its clocks by, in the order `own`.

    That is the probe of an installed package, if one adds it, or else the usual one. Raises
    EnvPipeError if several do, or it cannot be imported.
    """
    added = added_functions(_GROUP, known=())
    if len(added) > 1:
        raise EnvPipeError(
            f"Several installed packages add an entry point of {_GROUP}",
            value=sorted(added),
            remedy="Remove all but one of them.",
        )
    for make in added.values():
        return _checked(make(own, store), own, store)
    return usual


def _checked(looks: Iterator[Look], own: Schedule, store: Store) -> Iterator[Look]:
    """Yield looks of another package; EnvPipeError for an order or clocks that the job lacks."""
    for look in looks:
        clocks_mhz = look.clocked.frequency_mhz
        shape = own.num_stages, own.units_per_stage
        if look.clocked.schedule.stages != own.stages or clocks_mhz.shape != shape:
            raise EnvPipeError(
                "A probe looks at another order than the one that runs, or has no clock for each "
                "unit",
                value=(look.clocked.schedule.name, clocks_mhz.shape),
                remedy=f"Look at '{own.name}', with clocks of shape {shape}.",
            )
        lacking = np.setdiff1d(clocks_mhz, store.clocks_mhz)
        if lacking.size:
            raise EnvPipeError(
                "A probe looks at clocks (MHz) that plans may not use",
                value=lacking.tolist(),
                remedy="Take clocks of `store.clocks_mhz`.",
            )
        yield look
