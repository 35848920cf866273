"""Independent models that the core is held against: slow, obvious, and sharing no code with it."""

from dataclasses import replace
from functools import reduce

import numpy as np

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.profile import make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Placement, Schedule

F, B = Kind.FORWARD, Kind.BACKWARD
I, W = Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT  # noqa: E741 - as units are written


PLACEMENTS = (Placement.LOOPED, Placement.V)


def units_of(num_microbatches, num_chunks, split=False):
    return [
        Unit(kind, m, c)
        for kind in ((F, I, W) if split else (F, B))
        for c in range(num_chunks)
        for m in range(num_microbatches)
    ]


def way_of(num_stages, num_chunks, placement):
    """(stage, chunk) in the order in which a microbatch passes them forwards."""
    there = list(range(num_stages))
    back = there[::-1] if placement == "v" else there
    return [(s, c) for c in range(num_chunks) for s in (back if c % 2 else there)]


def needs(num_stages, num_chunks, stage, unit, placement="looped"):
    """Return what must be done before a unit, as (stage, unit), by the definition of pipelining."""
    kind, m, c = unit.kind, unit.microbatch, unit.chunk
    if kind is W:
        return [(stage, Unit(I, m, c))]
    way = way_of(num_stages, num_chunks, placement)
    at = way.index((stage, c)) + (-1 if kind is F else 1)
    own = [] if kind is F else [(stage, Unit(F, m, c))]
    if not 0 <= at < len(way):
        return own
    return [*own, (way[at][0], Unit(kind, m, way[at][1]))]


def run_naively(orders, num_chunks, placement="looped"):
    """Let every stage run its next unit whenever that is ready; returns where each stage stops."""
    position = [0] * len(orders)
    done = set()
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            unit = order[position[stage]]
            if all(need in done for need in needs(len(orders), num_chunks, stage, unit, placement)):
                done.add((stage, unit))
                position[stage] += 1
                progress = True
    return position


def random_orders(
    rng, num_stages, num_microbatches, num_chunks=1, *, split=False, placement="looped"
):
    """Orders that can run, any of them: units are taken at random among those that are ready."""
    orders = [[] for _ in range(num_stages)]
    left = [units_of(num_microbatches, num_chunks, split) for _ in range(num_stages)]
    done = set()
    while any(left):
        ready = [
            (stage, unit)
            for stage, units in enumerate(left)
            for unit in units
            if all(need in done for need in needs(num_stages, num_chunks, stage, unit, placement))
        ]
        stage, unit = rng.choice(ready)
        orders[stage].append(unit)
        left[stage].remove(unit)
        done.add((stage, unit))
    return tuple(tuple(order) for order in orders)


def random_schedule(
    rng,
    max_stages=4,
    max_microbatches=4,
    max_chunks=2,
    *,
    num_stages=None,
    num_microbatches=None,
    split=None,
):
    """Any order of a job that may be given in part, its backwards split or not."""
    num_stages = num_stages or rng.randint(1, max_stages)
    num_microbatches = num_microbatches or rng.randint(1, max_microbatches)
    num_chunks = rng.randint(1, max_chunks)
    split, placement = rng.random() < 0.4 if split is None else split, rng.choice(PLACEMENTS)
    orders = random_orders(
        rng, num_stages, num_microbatches, num_chunks, split=split, placement=placement
    )
    return Schedule("random", num_microbatches, num_chunks, orders, placement)


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


def naive_steps(orders, num_chunks, duration, latency, placement="looped"):
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
                for source, needed in needs(stages, num_chunks, stage, unit, placement):
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


def parse(text):
    """`F0 F1 B0` as units; `F0.1` with chunks."""
    units = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        kind = {"F": F, "B": B, "I": I, "W": W}[word[0]]
        units.append(Unit(kind, int(microbatch), int(chunk or 0)))
    return tuple(units)


def parse_stages(*orders):
    return tuple(parse(order) for order in orders)


def profile_of(table, **options):
    """A profile from {(stage, kind): {frequency_mhz: (time_s, energy_j)}}."""
    rows = [
        (stage, kind, ProfileRow(frequency, time_s, energy_j))
        for (stage, kind), curve in table.items()
        for frequency, (time_s, energy_j) in curve.items()
    ]
    return make_profile(rows, source="made for a test", **options)


def for_chunks(rng, profile, num_chunks):
    """A profile for as many chunks: all alike, or each with times and powers of its own."""
    if num_chunks == 1 or rng.random() < 0.5:
        return profile.for_chunks(num_chunks)
    rows = []
    for stage, kinds in enumerate(profile.rows):
        for kind, listed in kinds.items():
            for chunk in range(num_chunks):
                slow, hungry = rng.uniform(0.2, 1), rng.uniform(0.8, 1.2)
                rows += [
                    (
                        stage * num_chunks + chunk,
                        kind,
                        replace(r, time_s=slow * r.time_s, energy_j=slow * hungry * r.energy_j),
                    )
                    for r in listed
                ]
    return make_profile(rows, source="made for a test", listed_chunks=num_chunks)


def rows_of(profile, stage, unit):
    """The rows of a unit of a stage."""
    if profile.listed_chunks > 1:
        return profile.rows[stage * profile.listed_chunks + unit.chunk][unit.kind]
    return profile.rows[stage][unit.kind]


def with_rows(profile, change):
    """The profile with each of its rows changed."""
    return replace(
        profile,
        rows=tuple(
            {kind: tuple(map(change, rows)) for kind, rows in kinds.items()}
            for kinds in profile.rows
        ),
    )


def uniform_profile(num_stages, curve, *, backward=2.0, slowness=None, **options):
    """All stages alike: a backward takes `backward` times a forward; `slowness` by stage."""
    slow = slowness or [1.0] * num_stages
    return profile_of(
        {
            (stage, kind): {
                f: (time * weight * slow[stage], energy * weight * slow[stage])
                for f, (time, energy) in curve.items()
            }
            for stage in range(num_stages)
            for kind, weight in ((F, 1.0), (B, backward))
        },
        **options,
    )


def like_a_gpu(num_stages, clocks):
    """A forward takes 50 ms at the first clock; power falls with the cube of the clock."""
    curve = {}
    for clock in clocks:
        share = clock / clocks[0]
        curve[clock] = 0.05 / share, 0.05 / share * (120 + 180 * share**3)
    return uniform_profile(num_stages, curve)


#: Two stages: a forward at 1200 MHz on stage 1 takes 1 s and 11 J.
PROFILE = profile_of(
    {
        (0, F): {1200: (1.0, 10.0), 900: (1.5, 7.0)},
        (0, B): {1200: (2.0, 24.0), 900: (3.0, 15.0)},
        (1, F): {1200: (1.0, 11.0), 900: (1.6, 7.5)},
        (1, B): {1200: (2.0, 25.0), 900: (3.1, 15.5)},
    }
)
#: Waiting power (W) of its stages by clock.
WAIT_CURVES = ({1200: 60.0, 900: 30.0, 300: 10.0}, {1200: 50.0, 600: 20.0})
