"""The closed loop of reconfiguring: what an iteration measures moves the next one's clocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
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
    Step,
    lower,
    step,
)
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import (
    IterationOrder,
    PhaseRun,
    iterations,
    whole,
)
from envpipe_megatron.runtime.going_on import by_planner

#: The end must be seen in this many iterations in a row: one iteration's waits are noisy.
_CONFIRMATIONS = 2
#: A wait shorter than this share of the shortest unit is no bubble worth a clock.
_LEAST_BUBBLE = 0.01


def no_bubble_threshold_s(
    waits_s: Sequence[FloatArray] | FloatArray, shortest_unit_s: float
) -> float:
    """The longest receive wait that still counts as none, from measured iterations.

    Somewhere in a pipeline at full clock an input is always there before it is needed; that
    receive's wait is pure overhead. The threshold is its median plus what it varies by. Waits are
    those of all units that receive, for each iteration.
    """
    waits = np.array(waits_s)
    median = np.median(waits, axis=0)
    least = int(median.argmin())
    deviation = np.median(np.abs(waits[:, least] - median[least]))
    return float(median[least] + 4 * 1.4826 * deviation + _LEAST_BUBBLE * shortest_unit_s)


def measured_threshold_s(
    schedule: Schedule, records: Sequence[StageRecord], collectives: Collectives
) -> float:
    """`no_bubble_threshold_s` of a pipeline's iterations at full clock; every rank calls it."""
    own_waits_s = np.array([record.receive_wait_s for record in records])
    timed = ~schedule.combined[collectives.stage]
    shortest_s = min(float(record.unit_time_s[timed].min()) for record in records)
    by_stage = collectives.medians(own_waits_s)
    shortest = collectives.to_planner(shortest_s, min)
    receives = schedule.receives.copy()
    receives[:, 0] = False  # waits for the pipeline to fill

    def threshold_s() -> float:
        waits_s = [stage[:, mask] for stage, mask in zip(by_stage, receives, strict=True)]
        return no_bubble_threshold_s(np.concatenate(waits_s, axis=1), min(shortest))

    return by_planner(collectives, threshold_s)


def reconfigure_online(
    plan: Plan,
    policy: ReconfigurePolicy,
    threshold_s: float,
    clocks_mhz: Sequence[Iterable[int]],
    collectives: Collectives,
    print_grid: Callable[[str], None],
) -> PhaseRun[tuple[Plan, int, Ended]]:
    """Run a policy's steps on measured waits until one of its ends, and nothing can be lowered.

    Units rise through all clocks that the GPUs of their stage have, also through those that were
    not profiled: waits tell enough of them. Where an end is seen, measured times of units say who
    has slack, the profile how much longer these take at lower clocks; a unit that then turns up on
    the path is raised as any. `print_grid` is called on the planner for each iteration.

    Returns:
        the reconfigured plan, the number of steps that raised a clock, and why the loop ended.
    """
    schedule, shape = plan.schedule, plan.frequency_mhz.shape
    frequency = plan.frequency_mhz.ravel().copy()

    @functools.cache
    def ladders() -> Ladders:
        return Ladders(schedule, plan.profile, clocks_mhz)

    def look(iteration: int, waits_s: Sequence[FloatArray]) -> tuple[dict[int, int], Ended | None]:
        waits = np.concatenate(waits_s)
        path = critical_path(schedule, waits.tolist(), threshold_s)
        taken = step(schedule, frequency.tolist(), path, policy, ladders())
        text = grid(schedule, frequency.tolist(), waits, taken)
        print_grid(f"Reconfigure step {iteration}\n{text}")
        return taken.raised, taken.ended

    def slower(times_s: Sequence[Sequence[FloatArray]]) -> dict[int, int]:
        # The least of them: a hiccup of one unit would look like slack of all others.
        least_s = np.min(times_s, axis=0)
        return lower(plan, frequency.tolist(), least_s, threshold_s, ladders(), lowered)

    def made() -> Plan:
        return replace(
            plan,
            policy=f"{plan.policy}-{policy.name}",
            frequency_mhz=frequency.reshape(shape),
            profile=replace(plan.profile, interpolates=True),
        )

    steps, ended = 0, Ended.STEP_LIMIT
    lowered: dict[int, int] = {}
    #: What units took in each of the last iterations, which all showed an end; on the planner.
    times_s: list[list[FloatArray]] = []
    for iteration in range(policy.max_steps):
        clocks = schedule.pair_clocks(frequency.reshape(shape))
        order = IterationOrder(Phase.RECONFIGURE, schedule, clocks)
        (record,) = yield from whole(functools.partial(iterations, order), collectives)
        # The hiccup of one replica must not look like a bubble.
        waits_s = collectives.medians(record.receive_wait_s)
        changes, why = by_planner(collectives, functools.partial(look, iteration, waits_s))
        steps += bool(changes)
        times_s = [*times_s, collectives.medians(_busy_s(record, threshold_s))] if why else []
        if why and len(times_s) == _CONFIRMATIONS:
            changes = by_planner(collectives, functools.partial(slower, times_s))
            if not changes:
                ended = why
                break
            lowered |= changes
            times_s = []
        for node, target in changes.items():
            frequency[node] = target
    return by_planner(collectives, made), steps, ended


def _busy_s(record: StageRecord, threshold_s: float) -> FloatArray:
    """[units_per_stage] times of units, each with the wait before it where that is no bubble."""
    wait_s = record.receive_wait_s
    return record.unit_time_s + np.where(wait_s <= threshold_s, wait_s, 0.0)


def grid(
    schedule: Schedule, frequency_mhz: Sequence[int], receive_wait_s: FloatArray, taken: Step
) -> str:
    """EnvPipe's grid: unit, frequency in MHz, wait in ms; `[ ]` on the critical path."""
    on_path = set(taken.path)
    lines = []
    for stage, order in enumerate(schedule.stages):
        cells = []
        for position, unit in enumerate(order):
            node = stage * schedule.units_per_stage + position
            text = (
                f"{unit.label(schedule.num_chunks)} {frequency_mhz[node]} "
                f"{1e3 * receive_wait_s[node]:.1f}"
            )
            cells.append(f"[{text}]" if node in on_path else text)
        lines.append(f"Stage {stage} | " + " ".join(cells))
    return "\n".join(lines)
