"""The power of a plan's GPUs over an iteration, and the most that they take in any window of time.

In steady state every iteration is like the next, so windows go on into the next one.
"""

from __future__ import annotations

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.evaluation import waiting_energy_j
from envpipe_megatron.core.plan import Plan


def peak_power_w(plan: Plan, window_s: float, stages: slice = slice(None)) -> float:
    """The largest mean power, W, of all GPUs of some stages in any window of a length, s.

    A unit takes its mean power from start to end, and so does a wait, parked or not; what changes
    of clock take is spread over the iteration. Over a whole iteration that adds up to the plan's
    energy.
    """
    at_s, used_j = _energy_over_time(plan, stages)
    iteration_s, iteration_j = float(at_s[-1]), float(used_j[-1])
    whole, rest_s = divmod(window_s, iteration_s)
    # What a window holds is linear in its begin, but where its begin or its end meets a corner.
    begin_s = np.concatenate([at_s, (at_s - rest_s) % iteration_s])
    end_s = begin_s + rest_s
    over = end_s > iteration_s
    until_j = np.interp(end_s - over * iteration_s, at_s, used_j) + over * iteration_j
    most_j = float((until_j - np.interp(begin_s, at_s, used_j)).max())
    return (whole * iteration_j + most_j) / window_s


def _energy_over_time(plan: Plan, stages: slice) -> tuple[FloatArray, FloatArray]:
    """[n] times from 0 to the iteration's end, and the energy that was used until then, J."""
    timeline, conditions = plan.timeline, plan.conditions
    iteration_s = timeline.iteration_time_s
    start_s, end_s = timeline.start_s, timeline.end_s
    unit_j = plan.evaluation.unit_energy_j
    waiting_j = waiting_energy_j(timeline, plan.frequency_mhz, conditions, plan.park_mhz)
    changes_w = conditions.change_energy_j * plan.evaluation.clock_changes / iteration_s
    curves = []
    for stage in range(plan.schedule.num_stages)[stages]:
        # Start and end of each unit; the first wait lies at both ends of the iteration.
        corner_s = np.column_stack([start_s[stage], end_s[stage]]).ravel()
        step_j = np.column_stack([waiting_j[stage], unit_j[stage]]).ravel()
        wait_s = float(timeline.wait_s[stage, 0])
        share = corner_s[0] / wait_s if wait_s > 0 else 0.0
        after_j = (1 - share) * step_j[0]
        step_j[0] *= share
        corner_s = np.concatenate([[0.0], corner_s, [iteration_s]])
        used_j = np.concatenate([[0.0], np.cumsum(step_j), [step_j.sum() + after_j]])
        used_j += changes_w[stage] * corner_s
        curves.append((corner_s, conditions.gpus_by_stage[stage] * used_j))
    at_s = np.unique(np.concatenate([corner_s for corner_s, _ in curves]))
    return at_s, sum(np.interp(at_s, corner_s, used_j) for corner_s, used_j in curves)
