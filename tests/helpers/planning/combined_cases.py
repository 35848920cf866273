"""Combined units by their definition: slow, and sharing no code with the core."""

import itertools
import random
from dataclasses import replace
from functools import reduce

import numpy as np
from core_cases import B, F, needs

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow

CLOCKS_MHZ = (1410, 1200, 900)


def combined_profile(seed=0, stages=2, chunks=2, clocks_mhz=CLOCKS_MHZ):
    """Rows of forwards, backwards and pairs of each chunk, none like another."""
    rng = random.Random(seed)
    rows = []
    for stage, chunk in itertools.product(range(stages), range(chunks)):
        for kind, work in ((F, 1.0), (B, 2.0), (Kind.COMBINED, 2.5)):
            part = stage * chunks + chunk
            base = work * rng.uniform(0.7, 1.4)
            for clock in clocks_mhz:
                time_s = base * (0.3 + 0.7 * 1410 / clock)
                energy_j = time_s * (60 + 240 * (clock / 1410) ** 2)
                rows.append((part, kind, ProfileRow(clock, time_s, energy_j)))
    return make_profile(rows, source="made for a test", listed_chunks=chunks)


def paired(orders, at):
    """The orders with the forwards at (stage, position) combined."""
    return tuple(
        tuple(replace(u, combined=(stage, i) in at) for i, u in enumerate(order))
        for stage, order in enumerate(orders)
    )


def steps_of(orders):
    """For each stage its steps: one unit, or the two of a pair."""
    steps = []
    for order in orders:
        own = []
        for at, unit in enumerate(order):
            if at and order[at - 1].combined:
                own[-1] += (unit,)
            else:
                own.append((unit,))
        steps.append(own)
    return steps


def naive_steps(orders, num_chunks, duration, latency):
    """(start, end) of each (stage, step): begun when all inputs are there, all outputs at its end.

    None if stages wait in circles. Durations of steps may be arrays, of many iterations at once.
    """
    stages, steps = len(orders), steps_of(orders)
    of_unit = {
        (stage, replace(unit, combined=False)): (stage, number)
        for stage, own in enumerate(steps)
        for number, step in enumerate(own)
        for unit in step
    }
    known = {}
    left = {(stage, number) for stage, own in enumerate(steps) for number in range(len(own))}
    while left:
        ready = []
        for stage, number in left:
            arrivals = [] if number == 0 else [((stage, number - 1), 0.0)]
            for unit in steps[stage][number]:
                for source, needed in needs(stages, num_chunks, stage, unit):
                    if source == stage:
                        continue  # the order puts it before
                    hop = max(latency, default=0.0)
                    if abs(source - stage) == 1 and needed.chunk == unit.chunk:
                        hop = latency[min(source, stage)]
                    arrivals.append((of_unit[source, needed], hop))
            if all(at in known for at, _ in arrivals):
                ready.append(((stage, number), arrivals))
        if not ready:
            return None
        for at, arrivals in ready:
            start = reduce(np.maximum, [known[source][1] + hop for source, hop in arrivals], 0.0)
            known[at] = (start, start + duration[at])
            left.remove(at)
    return known
