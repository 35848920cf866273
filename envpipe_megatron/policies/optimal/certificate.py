"""A lower bound on the energy of an iteration in some order, which is checked by additions.

Price every dependency with a flow: 1 J/s enters where the iteration ends, runs
back through the dependencies of each unit to its start, and is never lost on the way. Whatever the
frequencies are, the iteration is at least as long as every path, so its energy is at least

    sum over units of min over choices (cost + price of the unit's time x time)
    + price of each dependency x latency + price of each tail x tail
    + (waiting power - total price) x iteration time,

which is smallest at the deadline or at the fastest iteration (Lagrangian duality; the dual of the
linear program is a flow). Any flow gives a valid bound; the linear program's own gives the best.
The bound is computed from the flow with a few additions, and so does not rest on a solver's
tolerances, nor on its having finished.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline, latency_by_node
from envpipe_megatron.policies.optimal.choices import Choices, node_keys


@dataclass(frozen=True)
class Prices:
    """Division of a unit's price over what it waits for: a solution's duals, or any guess.

    Args:
        same_stage_w: [num_units] what a second later end of the unit before on the same stage costs
            through this unit, J/s; not negative, as the others.
        cross_w: [num_units] the same for the unit on the neighbour stage that feeds it.
        deadline_w: [num_stages] the same for each stage's last unit and the deadline.
    """

    same_stage_w: FloatArray
    cross_w: FloatArray
    deadline_w: FloatArray


def energy_lower_bound_j(
    schedule: Schedule,
    choices: Choices,
    conditions: Conditions,
    deadline_s: float,
    prices: Prices,
) -> float:
    """Return the least energy, J, of any frequencies on this order; linear in its units.

    The prices need not be exact.
    """
    key = node_keys(schedule, choices)
    latency_s, tail_s = conditions.latency_s, conditions.tail_by_stage_s
    price, cross_price = price_flow(schedule, prices)
    total = 0.0
    for index, unit in enumerate(choices.units):
        values, count = np.unique(price[key == index], return_counts=True)
        least = (unit.cost_j[:, None] + unit.time_s[:, None] * values).min(axis=0)
        total += float(np.dot(count, least))
    total += float(np.dot(cross_price, latency_by_node(schedule, latency_s)))
    total += float(np.dot(prices.deadline_w, tail_s))
    fastest_s = np.array([unit.time_s[0] for unit in choices.units])[key]
    shape = (schedule.num_stages, schedule.units_per_stage)
    fastest = Timeline(schedule, fastest_s.reshape(shape), latency_s, tail_s)
    remaining = choices.waiting_power_w - float(prices.deadline_w.sum())
    return total + min(remaining * deadline_s, remaining * fastest.iteration_time_s)


def price_flow(schedule: Schedule, prices: Prices) -> tuple[FloatArray, FloatArray]:
    """Price of each node's time, and of its cross dependency, J/s; nothing is lost between them.

    From the end back: a node's price is what arrived from the nodes after it, and goes on to the
    nodes before it in proportion to theirs.
    """
    width = schedule.units_per_stage
    cross = schedule.cross_dependency.tolist()
    same_w, cross_w = prices.same_stage_w.tolist(), prices.cross_w.tolist()
    price = [0.0] * schedule.num_units
    cross_price = [0.0] * schedule.num_units
    for stage, dual in enumerate(prices.deadline_w.tolist()):
        price[(stage + 1) * width - 1] = dual
    for node in reversed(schedule.topological_order):
        arrived = price[node]
        if arrived == 0.0:
            continue
        source = cross[node]
        if source < 0:
            share = 0.0
        elif node % width == 0:
            share = 1.0
        else:
            both = same_w[node] + cross_w[node]
            share = cross_w[node] / both if both > 0.0 else 0.0
        if source >= 0:
            cross_price[node] = share * arrived
            price[source] += cross_price[node]
        if node % width:
            price[node - 1] += arrived - cross_price[node]
    return np.array(price), np.array(cross_price)
