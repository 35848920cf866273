"""The time of an iteration that is best for an objective, of one order.

The least energy E of an order is convex in the time T of its iteration: it is the optimum of a
linear program, and T stands on its right side. Each solution's prices give a straight line that E
nowhere goes below. Every goal is least at an end of a straight piece, and limits cut pieces where
they cross them; so the best point on the highest lines found so far is easily had, it is as good as
any can be, and a solution there shows whether E is that low (Kelley's cutting planes in one
dimension). Some five to ten solutions do.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from envpipe_megatron.core.plan import Cost
from envpipe_megatron.policies.objectives.objective import Goal, Objective
from envpipe_megatron.policies.optimal.optimizer import Optimizer

#: Energies, and times, that are as close as this are not told apart: rounding loses more.
_CLOSE = 1e-4
_MOST_SOLUTIONS = 40

Line = tuple[float, float, float]  #: at a time, s: an energy, J, and its slope, W


def best_time_s(objective: Objective, optimizer: Optimizer, longest_s: float) -> float | None:
    """The iteration time for which an order is to be planned, if units ran between profiled clocks.

    None if that keeps the limits at no time up to the cheapest. LinearProgramError: the order takes
    longer than `longest_s` at any clocks.
    """
    if objective.goal == Goal.ENERGY:
        return longest_s
    num_gpus = int(optimizer.conditions.gpus_by_stage.sum())
    limits = objective.limits(optimizer.schedule.num_stages)
    fastest_s = optimizer.fastest_s
    line, energy_j = _line(optimizer, fastest_s)
    if objective.goal == Goal.TIME and all(a * fastest_s + b * energy_j <= c for a, b, c in limits):
        return min(longest_s, fastest_s)
    latest_s = min(longest_s, optimizer.cheapest_s())
    lines = [line, _line(optimizer, latest_s)[0]]
    time_s = latest_s
    for _ in range(_MOST_SOLUTIONS):
        corners = list(_corners(sorted(lines)))
        within = list(_within(corners, limits))
        if not within:
            return None
        best = min(within, key=lambda cost: objective.score(cost, num_gpus))
        time_s = best.iteration_time_s
        if any(abs(time_s - known_s) <= _CLOSE * _CLOSE * time_s for known_s, _, _ in lines):
            break
        line, energy_j = _line(optimizer, time_s)
        lines.append(line)
        if energy_j <= best.energy_j * (1 + _CLOSE):
            break
    return time_s


def _line(optimizer: Optimizer, time_s: float) -> tuple[Line, float]:
    relaxed = optimizer.relaxed(time_s)
    return (time_s, relaxed.lower_bound_j, relaxed.slope_w), relaxed.cost_j


def _corners(lines: list[Line]) -> Iterator[Cost]:
    """Where the highest of some lines of rising slopes bend, and both ends."""
    time_s, energy_j, _ = lines[0]
    yield Cost(time_s, energy_j)
    for (t0, e0, w0), (t1, e1, w1) in pairwise(lines):
        if w0 < w1:
            met_s = (e1 - w1 * t1 - e0 + w0 * t0) / (w0 - w1)
            if t0 < met_s < t1:
                yield Cost(met_s, e0 + w0 * (met_s - t0))
        yield Cost(t1, e1)


def _within(corners: list[Cost], limits: list[tuple[float, float, float]]) -> Iterator[Cost]:
    """Both ends of what limits leave of each straight piece between corners."""
    for start, end in pairwise(corners):
        first, last = 0.0, 1.0  # shares of the way from start to end
        for a, b, c in limits:
            over, over_end = (a * at.iteration_time_s + b * at.energy_j - c for at in (start, end))
            if over > 0 and over_end > 0:
                first, last = 1.0, 0.0
            elif over > 0:
                first = max(first, over / (over - over_end))
            elif over_end > 0:
                last = min(last, over / (over - over_end))
        if first <= last:
            for share in (first, last):
                yield Cost(
                    (1 - share) * start.iteration_time_s + share * end.iteration_time_s,
                    (1 - share) * start.energy_j + share * end.energy_j,
                )
