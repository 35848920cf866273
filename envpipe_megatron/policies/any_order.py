"""A lower bound on the energy of an iteration in whatever order its units run.

A stage cannot start before one forward has passed all stages before it, and a backward must pass
them after its last unit; in between it runs all its units. A solver prices these chains; any
prices give a valid bound, checked by additions (weak duality).
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.optimal.choices import Choices
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError


def any_order_lower_bound_j(
    choices: Choices,
    num_stages: int,
    num_microbatches: int,
    latency_s: float | tuple[float, ...],
    tail_s: FloatArray,
    deadline_s: float,
) -> float:
    """Energy, J, below which no order of a pipeline without chunks can go at a deadline.

    A linear program of a handful of variables: for each stage and kind one unit that stands at the
    ends of the longest chain, and the mean of the others. Even unsolved, it gives a lower bound.
    Raises LinearProgramError if no order meets the deadline.
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
    rows, chains_s = [], []
    for stage in range(num_stages):
        way_s = float(hops[:stage].sum())
        forwards = [2 * before for before in range(stage)]
        for passed, beside_s in (
            (forwards, way_s + tail_s[stage]),  # in, all units of the stage, its tail
            ([*forwards, *(f + 1 for f in forwards)], 2 * way_s + tail_s[0]),  # in, all units, out
        ):
            row = np.zeros(len(cost))
            chain_s = float(beside_s)
            for kind in (*passed, 2 * stage, 2 * stage + 1):
                row[slice(*of_end[kind])] = 1.0
                chain_s += float(hulls[kind][0][0])
            for kind in (2 * stage, 2 * stage + 1):
                row[slice(*of_others[kind])] = others
                chain_s += others * float(hulls[kind][0][0])
            rows.append(row)
            chains_s.append(chain_s)
    stretched, chain = np.array(rows), np.array(chains_s)
    fastest_s = float(chain.max())
    if deadline_s < fastest_s * (1 - RELATIVE_TOLERANCE):
        raise LinearProgramError(
            "No order of units meets this deadline (s)",
            value=deadline_s,
            remedy=f"Allow {fastest_s:.6g} s or more.",
        )
    latest_s = max(deadline_s, fastest_s)
    solved = linprog(
        [*cost, choices.waiting_power_w],
        A_ub=np.column_stack([stretched, -np.ones(len(rows))]),
        b_ub=-chain,
        bounds=[*((0.0, width) for width in upper), (0.0, latest_s)],
    )
    price_w = np.zeros(len(rows))
    if solved.status == 0:
        price_w = np.maximum(-solved.ineqlin.marginals, 0.0)
    remaining_w = choices.waiting_power_w - float(price_w.sum())
    fastest_j = sum(num_microbatches * float(cost_j[0]) for _, cost_j in hulls)
    return (
        fastest_j
        + float(price_w @ chain)
        + float(np.minimum(0.0, cost + price_w @ stretched) @ upper)
        + min(remaining_w * fastest_s, remaining_w * latest_s)
    )
