"""Small random jobs for planners, and brute force over their frequencies and orders.

Brute force tries every assignment of frequencies at once, one numpy array a unit, and shares no
code with the planners that it checks.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from core_cases import (
    B,
    F,
    I,
    W,
    naive_steps,
    profile_of,
    rows_of,
    run_naively,
    steps_of,
    units_of,
)

from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.schedule import Placement, Schedule
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE


@dataclass(frozen=True)
class Job:
    """The inputs of a planner beside the order."""

    profile: Profile
    num_microbatches: int
    conditions: Conditions

    @property
    def num_stages(self):
        return self.profile.num_stages


def random_curve(rng, clocks, work):
    """{frequency_mhz: (time_s, energy_j)}: a valley, or times and energies without any order."""
    if rng.random() < 0.3:
        return {f: (work * rng.uniform(0.5, 2), work * rng.uniform(5, 200)) for f in clocks}
    bound, static_w = rng.uniform(0, 0.6), rng.uniform(10, 120)
    exponent = rng.uniform(1.5, 3)
    curve = {}
    for f in clocks:
        share = f / 2000
        time_s = work * (bound + (1 - bound) / share) * rng.uniform(1, 1.05)
        curve[f] = (time_s, time_s * (static_w + 250 * share**exponent))
    return curve


def random_profile(rng, num_stages, max_frequencies=4, **options):
    """Each kind of a stage lists one clock in common with the other, and at least two."""
    scale = rng.choice([1.0, 1.0, 1e-3, 50.0])
    table = {}
    for stage in range(num_stages):
        clocks = rng.sample(range(400, 2000, 15), max_frequencies)
        for kind, weight in ((F, 1.0), (B, rng.uniform(1, 2.5))):
            listed = [clocks[0], *rng.sample(clocks[1:], rng.randint(1, max_frequencies - 1))]
            work = scale * weight * rng.uniform(0.7, 1.5)
            table[stage, kind] = random_curve(rng, listed, work)
    return profile_of(table, **options)


def random_split_profile(rng, num_stages):
    """Parts of backwards at clocks of their own, that take any share of what the whole takes."""
    table = {}
    for stage in range(num_stages):
        for kind, weight in ((F, 1.0), (B, 2.0), (I, rng.uniform(0.4, 1.4)), (W, 1.0)):
            clocks = rng.sample(range(400, 2000, 400), 2)
            table[stage, kind] = random_curve(rng, clocks, weight * rng.uniform(0.7, 1.5))
    return profile_of(table)


def random_conditions(rng, profile):
    """Everything around the units but clock changes and waiting power by clock."""
    stages = profile.num_stages
    unit_s = profile.rows[0][F][0].time_s
    power_w = rng.choice([0.0, 60.0, 120.0])
    return Conditions(
        tuple(power_w * rng.choice([1, rng.uniform(0.3, 1.5)]) for _ in range(stages)),
        tuple(rng.choice([0.0, rng.uniform(0, 0.5) * unit_s]) for _ in range(stages - 1)),
        tuple(rng.uniform(0, 2) * unit_s for _ in range(stages)) if rng.random() < 0.4 else None,
        tuple(rng.choice([1, 2, 8]) for _ in range(stages)) if rng.random() < 0.4 else None,
    )


def random_job(rng, stages=(2, 3), max_microbatches=6, max_frequencies=4):
    profile = random_profile(rng, rng.choice(stages), max_frequencies)
    return Job(profile, rng.randint(1, max_microbatches), random_conditions(rng, profile))


@dataclass(frozen=True)
class Everything:
    """Every assignment of frequencies to an order: time and energy of each, [assignments]."""

    iteration_time_s: np.ndarray
    energy_j: np.ndarray

    def least_energy_j(self, deadline_s):
        """Inf where none meets the deadline."""
        in_time = self.iteration_time_s <= deadline_s * (1 + RELATIVE_TOLERANCE)
        return float(np.min(self.energy_j, where=in_time, initial=np.inf))


def try_everything(schedule, profile, conditions, max_assignments=600_000):
    stages = schedule.num_stages
    powers_w, gpus = conditions.blocking_power_w, conditions.gpus_by_stage
    latency_s = np.broadcast_to(conditions.latency_s, (stages - 1,))
    steps = steps_of(schedule.stages)
    nodes = [(stage, number) for stage, own in enumerate(steps) for number in range(len(own))]
    rows = [rows_of(profile, stage, priced(*steps[stage][n])) for stage, n in nodes]
    shape = tuple(len(choices) for choices in rows)
    assert np.prod(shape) <= max_assignments
    duration = {}
    energy_j, waiting_w = np.zeros(shape), float(np.dot(powers_w, gpus))
    for axis, (node, choices) in enumerate(zip(nodes, rows, strict=True)):
        along = [-1 if other == axis else 1 for other in range(len(shape))]
        time_s = np.array([row.time_s for row in choices])
        costs = np.array([row.energy_j for row in choices]) - powers_w[node[0]] * time_s
        duration[node] = time_s.reshape(along)
        energy_j = energy_j + (gpus[node[0]] * costs).reshape(along)
    ran = naive_steps(schedule.stages, schedule.num_chunks, duration, latency_s, schedule.placement)
    iteration_s = np.zeros(shape)
    for stage, tail_s in enumerate(conditions.tail_by_stage_s):
        iteration_s = np.maximum(iteration_s, ran[stage, len(steps[stage]) - 1][1] + tail_s)
    energy_j = energy_j + waiting_w * iteration_s
    return Everything(iteration_s.ravel(), energy_j.ravel())


def priced(first, *second):
    """The unit, or what two units that run as one step are priced as."""
    if not second:
        return first
    return Unit(Kind.COMBINED if first.kind is F else B, first.microbatch, second[0].chunk)


def every_mixture(schedule):
    """A split order with any of its backwards whole whose parts stand next to each other."""
    pairs = [
        (stage, at)
        for stage, order in enumerate(schedule.stages)
        for at, (own, following) in enumerate(itertools.pairwise(order))
        if own.kind is I and following == replace(own, kind=W)
    ]
    for chosen in itertools.product((False, True), repeat=len(pairs)):
        whole = set(itertools.compress(pairs, chosen))
        yield replace(
            schedule,
            stages=tuple(
                tuple(replace(own, combined=(stage, at) in whole) for at, own in enumerate(order))
                for stage, order in enumerate(schedule.stages)
            ),
        )


def every_schedule(
    num_stages, num_microbatches, num_chunks=1, *, split=False, placement=Placement.LOOPED
):
    """Every order that can run, up to the names of microbatches."""
    units = units_of(num_microbatches, num_chunks, split)
    of_a_stage = list(orders_of_a_stage(units))
    named = [
        order
        for order in of_a_stage
        if [u.microbatch for u in order if (u.kind, u.chunk) == (F, 0)]
        == list(range(num_microbatches))
    ]
    for orders in itertools.product(named, *[of_a_stage] * (num_stages - 1)):
        if run_naively(orders, num_chunks, placement) == [len(units)] * num_stages:
            yield Schedule("any", num_microbatches, num_chunks, orders, placement)


def orders_of_a_stage(units, begun=()):
    """Every order in which each unit comes after what its own stage makes for it."""
    if len(begun) == len(units):
        yield begun
    for unit in units:
        own = [u for u in units if (u.microbatch, u.chunk) == (unit.microbatch, unit.chunk)]
        if unit not in begun and set(own[: own.index(unit)]) <= set(begun):
            yield from orders_of_a_stage(units, (*begun, unit))
