"""EnvPipe's reconfiguring in training: what an iteration measures moves the next one's clocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.plan import Plan
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import critical_path
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.policies.reconfigure import (
    Ended,
    Ladders,
    ReconfigurePolicy,
    lower,
    step,
)
from envpipe_megatron.tuning.commands import Clocked, Command, Run, Window

#: The end must be seen in this many iterations in a row: one iteration's waits are noisy.
_CONFIRMATIONS = 2
#: A wait shorter than this share of the shortest unit is no bubble worth a clock.
_LEAST_BUBBLE = 0.01


def no_bubble_threshold_s(schedule: Schedule, window: Window) -> float:
    """Return the longest receive wait that still counts as none, from iterations at full clock.

    Somewhere in such a pipeline an input is always there before it is needed; that receive's wait
    is pure overhead. The threshold is its median plus what it varies by.
    """
    receives = schedule.receives.copy()
    receives[:, 0] = False  # waits for the pipeline to fill
    if not receives.any():
        return 0.0  # a single stage never waits
    waits_s = window.waits_s[:, receives]
    median_s = np.median(waits_s, axis=0)
    least = int(median_s.argmin())
    deviation_s = np.median(np.abs(waits_s[:, least] - median_s[least]))
    timed = zip(window.stages, ~schedule.combined, strict=True)
    shortest_s = min(np.nanmin(stage.unit_s[:, units]) for stage, units in timed)
    return float(median_s[least] + 4 * 1.4826 * deviation_s + _LEAST_BUBBLE * shortest_s)


def reconfigured(
    plan: Plan,
    policy: ReconfigurePolicy,
    own: Schedule,
    clocks_mhz: Sequence[Iterable[int]],
    first: Window,
) -> Run[tuple[Plan, int, Ended]]:
    """Run a policy's steps on measured waits until one of its ends, and nothing can be lowered.

    Units rise through all clocks that the GPUs of their stage have, also through those that were
    not profiled: waits show enough of them. Where an end is seen, measured times of units say who
    has slack, the profile how much longer these take at lower clocks; a unit that then turns up on
    the path is raised as any.

    Args:
        plan: what is reconfigured.
        policy: what a step raises, and how many steps there are at most.
        own: the order that the warm-up ran at full clock.
        clocks_mhz: for each stage, all that its GPUs have.
        first: the warm-up.

    Returns:
        The reconfigured plan, how many steps raised a clock, and why the loop ended.
    """
    threshold_s, schedule = no_bubble_threshold_s(own, first), plan.schedule
    ladders = Ladders(schedule, plan.profile, clocks_mhz)
    frequency_mhz = plan.frequency_mhz.copy()
    steps, ended, lowered = 0, Ended.STEP_LIMIT, dict[int, int]()
    #: What units took in each of the last iterations, which all showed an end.
    times_s: list[FloatArray] = []
    for _ in range(policy.max_steps):
        clocked = Clocked(schedule, schedule.pair_clocks(frequency_mhz))
        window = yield Command(Phase.RECONFIGURE, 1, orders=(clocked,))
        if not window.whole:
            continue
        waits_s, clocks = window.waits_s[0].ravel(), frequency_mhz.ravel().tolist()
        path = critical_path(schedule, waits_s.tolist(), threshold_s)
        taken = step(schedule, clocks, path, policy, ladders)
        changes = taken.raised
        steps += bool(changes)
        times_s = [*times_s, _busy_s(window, threshold_s)] if taken.ended else []
        if taken.ended and len(times_s) == _CONFIRMATIONS:
            # The least of them: a hiccup of one unit would look like slack of all others.
            least_s = np.min(times_s, axis=0)
            changes = lower(plan, clocks, least_s, threshold_s, ladders, lowered)
            if not changes:
                ended = taken.ended
                break
            lowered |= changes
            times_s = []
        for node, target in changes.items():
            frequency_mhz.flat[node] = target
    reconfigured = replace(
        plan,
        policy=f"{plan.policy}-{policy.name}",
        frequency_mhz=frequency_mhz,
        profile=replace(plan.profile, interpolates=True),
    )
    return reconfigured, steps, ended


def _busy_s(window: Window, threshold_s: float) -> FloatArray:
    """Return times of units, with waits that are no bubble, [num_stages, units_per_stage].

    Medians over replicas.
    """
    busy_s = [
        stage.unit_s + np.where(stage.waits_s[:, 0] <= threshold_s, stage.waits_s[:, 0], 0.0)
        for stage in window.stages
    ]
    return np.median(busy_s, axis=1)
