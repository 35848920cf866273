"""A lower bound on the energy of an iteration over all orders of its units.

A stage cannot start before one forward has passed all stages before it, and a backward must pass
them after its last one; in between it runs all its units, except gradients of weights that may come
last. Whichever microbatches these are, they take no less than the fastest of their stage.
A solver prices these chains; any prices give a valid bound, checked by additions (weak duality).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.kinds import SPLIT, WHOLE
from envpipe_megatron.core.profile import Profile
from envpipe_megatron.core.timeline import RELATIVE_TOLERANCE
from envpipe_megatron.policies.optimal.linear_program import LinearProgramError, make_choices


@dataclass(frozen=True)
class AnyOrder:
    """Bounds on all orders of a pipeline.

    Args:
        energy_lower_bound_j: no order takes less.
        price_w: what a second less for all units would cost.
        time_s: [num_stages, num_chunks, kinds] how long units take on average where it is reached.
    """

    energy_lower_bound_j: float
    price_w: float
    time_s: FloatArray


def any_order(
    profile: Profile,
    conditions: Conditions,
    num_microbatches: int,
    deadline_s: float,
    floor_w: FloatArray,
    *,
    num_chunks: int = 1,
    split: bool = False,
) -> AnyOrder:
    """Return a lower bound on the energy of all orders of a pipeline that meet a deadline.

    Of orders whose backwards are `split` all, or none. A linear program of a handful of variables:
    for each stage and kind, of its first chunk, the fastest unit, which is at the ends of the
    longest chain, and the mean of the others. Even unsolved, it gives a lower bound.
    LinearProgramError: no order meets the deadline.

    `floor_w`, [num_stages], is the least power at which one GPU of a stage can wait.
    """
    choices = make_choices(profile, floor_w, conditions.gpus_by_stage)
    num_stages, tail_s = profile.num_stages, conditions.tail_by_stage_s
    kinds = SPLIT if split else WHOLE
    parts = profile.listed_chunks
    units = np.array(choices.units, dtype=object).reshape(num_stages, parts, -1)
    units = units[:, :, [profile.kinds.index(kind) for kind in kinds]]
    # Columns: the segments of all first units, then those of the others' mean.
    cost: list[float] = []
    upper: list[float] = []
    fastest_j = 0.0
    first: dict[tuple[int, int], tuple[slice, float]] = {}
    others: dict[int, list[tuple[int, slice, int, float]]] = {s: [] for s in range(num_stages)}
    mean = np.empty(units.shape, dtype=object)
    for (stage, part, kind), unit in np.ndenumerate(units):
        time_s, cost_j = unit.time_s[unit.hull], unit.cost_j[unit.hull]
        count = num_microbatches * num_chunks // parts
        fastest_j += count * float(cost_j[0])
        counts = ((count, False),) if part else ((1, True), (count - 1, False))[:count]
        for multiple, is_first in counts:
            columns = slice(len(cost), len(cost) + len(time_s) - 1)
            cost.extend(multiple * np.diff(cost_j) / np.diff(time_s))
            upper.extend(np.diff(time_s))
            if is_first:
                first[stage, kind] = columns, float(time_s[0])
            others[stage].append((kind, columns, multiple, multiple * float(time_s[0])))
            mean[stage, part, kind] = columns
    hops = np.array(conditions.latency_s)
    rows, chains_s = [], []
    for stage in range(num_stages):
        way_s = float(hops[:stage].sum())
        passed = [(before, 0) for before in range(stage)]
        out = [(before, 1) for before in range(stage)]
        # In, all units of the stage, its tail; and in, all but what may come last, out.
        last = [(0, 2)] if split else []
        for beside, most, chain_s in (
            (passed, len(kinds), way_s + tail_s[stage]),
            ([*passed, *out, *last], 2, 2 * way_s + tail_s[0]),
        ):
            row = np.zeros(len(cost))
            for columns, time_s in (first[at] for at in beside):
                row[columns] += 1.0
                chain_s += time_s
            for kind, columns, multiple, time_s in others[stage]:
                if kind < most:
                    row[columns] += multiple
                    chain_s += time_s
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
    price_w, longer_s = np.zeros(len(rows)), np.zeros(len(cost))
    if solved.status == 0:
        price_w = np.maximum(-solved.ineqlin.marginals, 0.0)
        longer_s = solved.x[:-1]
    remaining_w = choices.waiting_power_w - float(price_w.sum())
    bound_j = (
        fastest_j
        + float(price_w @ chain)
        + float(np.minimum(0.0, cost + price_w @ stretched) @ upper)
        + min(remaining_w * fastest_s, remaining_w * latest_s)
    )
    time_s = np.array(
        [
            unit.time_s[0] + longer_s[own].sum()
            for unit, own in zip(units.flat, mean.flat, strict=True)
        ]
    )
    by_chunk_s = np.repeat(time_s.reshape(units.shape), num_chunks // parts, axis=1)
    return AnyOrder(bound_j, float(price_w.sum()), by_chunk_s)
