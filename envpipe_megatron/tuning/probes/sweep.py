"""The sweep: what units cost at each clock, seen before the first plan is made.

All units run at one clock after the other, from the highest downwards, until every stage is past
the bottom of its energy valley. Such iterations show the energy of all kinds of units together.
Then each kind but one runs at these clocks by itself, and all others at the highest: that keeps
them apart. Still lower clocks, which pay in place of waiting only, are seen by units that have time
for them. Clocks between are fitted, so that few are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from envpipe_megatron.core.arrays import IntArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.tuning.command_maker import CommandMaker
from envpipe_megatron.tuning.commands import Clocked, Run, Window
from envpipe_megatron.tuning.measured.store import Store
from envpipe_megatron.tuning.probes.probe import Look, probe, probe_clocks_mhz

#: From one clock to the next, as a share of the highest. On emulated A100 and A40, plans of such a
#: sweep save what plans of all clocks do, to 0.1 points; with a tenth, to 0.8.
_STEP = 0.075
#: So many times as long is looked where a counter said nothing: a pause, or a slow counter, leaves
#: fewer than two refreshes to see.
_LONGER = (1, 2, 4)


class SweepError(EnvPipeError):
    """A sweep that cannot be made or read."""


def sweep_probe(
    own: Schedule, store: Store, steps_at_clock: Callable[[float], int]
) -> Iterator[Look]:
    """Look at units of all kinds, then of each kind, then at lower clocks by those with time.

    Args:
        own: the order that runs.
        store: what is known of its units.
        steps_at_clock: returns how many iterations of a length in s are measured at each clock.
    """
    keys, top_mhz = store.keys(own), int(store.clocks_mhz[-1])

    def look(clocks_mhz: IntArray, what: str) -> Look:
        count = steps_at_clock(store.iteration_s(own, clocks_mhz))
        clocked = Clocked(own, clocks_mhz)
        return Look(clocked, count, f"profile: {what}", settle=1)

    def look_at(name: str, kinds: Sequence[Kind], clock_mhz: int) -> Look:
        places = [store.kinds.index(kind) for kind in kinds]
        there = (keys >= 0) & np.isin(keys % len(store.kinds), places)
        clocks_mhz = own.pair_clocks(np.where(there, clock_mhz, top_mhz))
        return look(clocks_mhz, f"each {name} at {clock_mhz} MHz")

    # Sums of meters know no lower clocks.
    known = store.clocks_mhz[store.clocks_mhz >= store.powers.nodes_mhz[0]].astype(int).tolist()
    left = [top_mhz, *probe_clocks_mhz(known, _STEP)]
    seen: list[int] = []
    while left and (len(seen) < 2 or store.valley_mhz(waiting=False) <= seen[-1]):
        seen.append(left.pop(0))
        yield look_at("unit", store.kinds, seen[-1])
    for kind in store.kinds[:-1]:
        for clock_mhz in seen[1:]:
            yield look_at(kind, (kind,), clock_mhz)
    while left and store.valley_mhz(waiting=True) <= seen[-1]:
        seen.append(left.pop(0))
        clocks_mhz = probe(own, store, seen[-1], at_cost=False)
        if (clocks_mhz == top_mhz).all():
            return
        yield look(clocks_mhz, f"units that have time at {seen[-1]} MHz")


def measured_profile(store: Store, looks: Iterator[Look], first: Window) -> Run[Profile]:
    """Run looks, and return the profile that they make.

    Args:
        store: empty.
        looks: of a probe.
        first: iterations of the store's order at the highest clock.

    Raises SweepError if the counters of a stage fail.
    """
    commands = CommandMaker(store)
    commands.learn(store.at_top(store.schedule), first)
    for look in looks:
        commands.note(look.note)
        for longer in _LONGER:
            # Waiting for the counter, so that what it has seen of a short window is there.
            count = longer * look.iterations
            window = yield commands.metered(Phase.PROFILE, look.clocked, count, look.settle)
            if all(report.metered for report in window.stages):
                break
        for stage, report in enumerate(window.stages):
            if not report.metered:
                raise SweepError(
                    f"Stage {stage}: The energy counter failed while profiling: it said nothing",
                    remedy="Look at the driver's log. Steps that are short want more of them at "
                    "each clock; a profile by file needs no counter.",
                )
        commands.learn(look.clocked, window)
    store.align()
    return store.profile(careful=False)
