"""A `Probe` says which iterations to run next, so that the store learns what units take.

`first_probe` is what a job without a profile begins with; another package can put its own there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.policies.frequencies import added_functions
from envpipe_megatron.tuning.commands import Clocked
from envpipe_megatron.tuning.measured.store import Store

#: Entry points of packages that add a probe: each makes one for the order that runs.
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


class Probe(Protocol):
    """Proposes what to look at; one is made for each time that clocks are to be looked at."""

    def next(self, store: Store) -> Look | None:
        """The next look, from what was measured so far; None if enough was seen."""


def first_probe(own: Schedule, usual: Probe) -> Probe:
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
        return _Checked(make(own), own)
    return usual


@dataclass(frozen=True)
class _Checked:
    """A probe of another package, of which nothing runs that the job has no memory or clock for."""

    probe: Probe
    own: Schedule

    def next(self, store: Store) -> Look | None:
        """The probe's next look; EnvPipeError if it is not of the order and clocks of the job."""
        look = self.probe.next(store)
        if look is None:
            return None
        own, clocks_mhz = self.own, look.clocked.frequency_mhz
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
        return look
