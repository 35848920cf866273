"""Lower bounds on the energy of an iteration that anybody can check.

**For an order.** Price every dependency with a flow: 1 J/s enters where the iteration ends, runs
back through the dependencies of each unit to its start, and is never lost on the way. Whatever the
frequencies are, the iteration is at least as long as every path, so its energy is at least

    sum over units of min over choices (cost + price of the unit's time x time)
    + price of each dependency x latency + price of each tail x tail
    + (waiting power - total price) x iteration time,

which is smallest at the deadline or at the fastest iteration (Lagrangian duality; the dual of the
linear program is a flow). Any flow gives a valid bound; the linear program's own gives the best.
The bound is computed from the flow with a few additions, and so does not rest on a solver's
tolerances, nor on its having finished.

**For all orders.** Whatever its order, a stage cannot start before one forward has passed all
stages before it, and a backward must pass them after its last unit; in between it runs all of its
own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from envpipe_megatron.longest_path import latency_by_node
from envpipe_megatron.policies.choices import Choices
from envpipe_megatron.policies.linear_program import LinearProgramError, Relaxed, node_keys
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.timeline import Timeline

FloatArray = NDArray[np.float64]


def energy_lower_bound_j(
    schedule: Schedule,
    choices: Choices,
    latency_s: float | tuple[float, ...],
    tail_s: FloatArray,
    deadline_s: float,
    relaxed: Relaxed,
) -> float:
    """What no frequencies on this order can go below, J; time and memory are linear in its units.

    Args:
        schedule: the order of units.
        choices: what each unit can run at.
        latency_s: p2p latency, as `Timeline` takes it.
        tail_s: [num_stages] the time after each stage's last unit.
        deadline_s: the iteration takes no longer.
        relaxed: a solution whose duals say how a unit's price divides over what it waits for. They
            need not be exact.
    """
    key = node_keys(schedule)
    latency = latency_by_node(schedule, latency_s)
    price, cross_price = price_flow(schedule, relaxed)
    total = 0.0
    for index, unit in enumerate(choices.units):
        prices, count = np.unique(price[key == index], return_counts=True)
        least = (unit.cost_j[:, None] + unit.time_s[:, None] * prices).min(axis=0)
        total += float(np.dot(count, least))
    total += float(np.dot(cross_price, latency))
    total += float(np.dot(relaxed.deadline_dual, tail_s))
    fastest_s = np.array([unit.time_s[0] for unit in choices.units])[key]
    shape = (schedule.num_stages, schedule.units_per_stage)
    fastest = Timeline(schedule, fastest_s.reshape(shape), latency_s, tail_s)
    remaining = choices.waiting_power_w - float(relaxed.deadline_dual.sum())
    return total + min(remaining * deadline_s, remaining * fastest.iteration_time_s)


def price_flow(schedule: Schedule, relaxed: Relaxed) -> tuple[FloatArray, FloatArray]:
    """Price of each node's time, and of its cross dependency, J/s; nothing is lost between them.

    From the end back: a node's price is what arrived from the nodes behind it, and goes on to the
    nodes before it in proportion to the solution's duals.
    """
    width = schedule.units_per_stage
    cross = schedule.cross_dependency.tolist()
    same_dual, cross_dual = relaxed.same_stage_dual.tolist(), relaxed.cross_dual.tolist()
    price = [0.0] * schedule.num_units
    cross_price = [0.0] * schedule.num_units
    for stage, dual in enumerate(relaxed.deadline_dual.tolist()):
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
            both = same_dual[node] + cross_dual[node]
            share = cross_dual[node] / both if both > 0.0 else 0.0
        if source >= 0:
            cross_price[node] = share * arrived
            price[source] += cross_price[node]
        if node % width:
            price[node - 1] += arrived - cross_price[node]
    return np.array(price), np.array(cross_price)


def any_order_lower_bound_j(
    choices: Choices,
    num_stages: int,
    num_microbatches: int,
    latency_s: float | tuple[float, ...],
    tail_s: FloatArray,
    deadline_s: float,
) -> float:
    """What no order of a pipeline without chunks can go below at a deadline, J.

    A linear program of a handful of variables: for each stage and kind one unit that stands at the
    ends of the longest chain, and the mean of the others.

    Raises:
        LinearProgramError: no order meets the deadline.
    """
    others = num_microbatches - 1
    hulls = [(u.time_s[u.hull], u.cost_j[u.hull]) for u in choices.units]
    # Columns: for each stage and kind the segments of the end unit, then those of the others' mean.
    cost: list[float] = []
    upper: list[float] = []
    of_end: list[tuple[int, int]] = []
    of_others: list[tuple[int, int]] = []
    for multiple, at in ((1, of_end), (others, of_others)):
        for time_s, cost_j in hulls:
            at.append((len(cost), len(cost) + len(time_s) - 1))
            upper.extend(np.diff(time_s))
            cost.extend(multiple * np.diff(cost_j) / np.diff(time_s))
    hops = np.broadcast_to(np.asarray(latency_s, dtype=np.float64), (num_stages - 1,))
    rows, limits = [], []
    for stage in range(num_stages):
        way_s = float(hops[:stage].sum())
        forwards = [2 * before for before in range(stage)]
        for passed, beside_s in (
            (forwards, way_s + tail_s[stage]),  # in, all units of the stage, its tail
            ([*forwards, *(f + 1 for f in forwards)], 2 * way_s + tail_s[0]),  # in, all units, out
        ):
            row = np.zeros(len(cost) + 1)
            row[-1] = -1.0  # the iteration
            chain_s = float(beside_s)
            for kind in (*passed, 2 * stage, 2 * stage + 1):
                row[slice(*of_end[kind])] = 1.0
                chain_s += float(hulls[kind][0][0])
            for kind in (2 * stage, 2 * stage + 1):
                row[slice(*of_others[kind])] = others
                chain_s += others * float(hulls[kind][0][0])
            rows.append(row)
            limits.append(-chain_s)
    solved = linprog(
        [*cost, choices.waiting_power_w],
        A_ub=np.array(rows),
        b_ub=limits,
        bounds=[*((0.0, width) for width in upper), (0.0, deadline_s)],
    )
    if solved.status != 0:
        raise LinearProgramError(
            f"No order of units meets this deadline (s): {solved.message}",
            value=deadline_s,
            remedy="Allow more time.",
        )
    fastest = sum(num_microbatches * float(cost_j[0]) for _, cost_j in hulls)
    return fastest + float(solved.fun)
