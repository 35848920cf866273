"""The closed loop of reconfiguring: each iteration's measured waits raise the next one's clocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from envpipe_megatron.energy_file import Phase
from envpipe_megatron.plan import Plan
from envpipe_megatron.policies.reconfigure import Ended, Ladders, ReconfigurePolicy, Step, step
from envpipe_megatron.runtime.collectives import Collectives
from envpipe_megatron.runtime.executor import FloatArray
from envpipe_megatron.runtime.orders import IterationOrder, PhaseRun
from envpipe_megatron.schedule import Schedule
from envpipe_megatron.timeline import critical_path

#: The end must be seen in this many iterations in a row: one iteration's waits are noisy.
_CONFIRMATIONS = 2
#: A wait shorter than this share of the shortest unit is no bubble worth a clock.
_LEAST_BUBBLE = 0.01


def no_bubble_threshold_s(waits_s: Sequence[FloatArray], shortest_unit_s: float) -> float:
    """The longest receive wait that still counts as none, from measured iterations.

    Somewhere in a pipeline at full clock an input is always there before it is asked for; that
    receive's wait is pure overhead. The threshold is its median plus what it varies by.

    Args:
        waits_s: for each iteration, the waits of all units that receive.
        shortest_unit_s: the shortest unit of the pipeline.
    """
    waits = np.array(waits_s)
    median = np.median(waits, axis=0)
    least = int(median.argmin())
    deviation = np.median(np.abs(waits[:, least] - median[least]))
    return float(median[least] + 4 * 1.4826 * deviation + _LEAST_BUBBLE * shortest_unit_s)


class OnlineReconfigurer:
    """Runs a policy's steps on measured waits until one of its ends.

    Args:
        plan: the plan to start from; every rank has the same.
        policy: greedy or balanced.
        threshold_s: from `no_bubble_threshold_s`.
        clocks_mhz: for each stage, those of all its GPUs: units rise through clocks that were not
            profiled too, of which waits tell enough.
        collectives: to the other ranks.
        print_grid: told of every look, as text.
    """

    def __init__(
        self,
        plan: Plan,
        policy: ReconfigurePolicy,
        threshold_s: float,
        clocks_mhz: Sequence[Iterable[int]],
        collectives: Collectives,
        print_grid: Callable[[str], None],
    ) -> None:
        self._plan = replace(plan, profile=replace(plan.profile, interpolates=True))
        self._policy = policy
        self._clocks_mhz = clocks_mhz
        self._threshold_s = threshold_s
        self._collectives = collectives
        self._print_grid = print_grid

    def run(self) -> PhaseRun[tuple[Plan, int, Ended]]:
        """The reconfigured plan, the steps that raised something, and why the loop ended."""
        schedule = self._plan.schedule
        ladders = Ladders(schedule, self._plan.profile, self._clocks_mhz)
        shape = self._plan.frequency_mhz.shape
        frequency = self._plan.frequency_mhz.ravel().copy()
        steps = seen = 0
        ended = Ended.STEP_LIMIT
        for iteration in range(self._policy.max_steps):
            record = yield IterationOrder(Phase.RECONFIGURE, schedule, frequency.reshape(shape))
            by_stage = self._collectives.gather_by_stage(record.receive_wait_s)
            waits = np.concatenate([np.mean(replicas, axis=0) for replicas in by_stage])
            path = critical_path(schedule, waits.tolist(), self._threshold_s)
            taken = step(schedule, frequency.tolist(), path, self._policy, ladders)
            self._print_grid(
                f"Reconfigure step {iteration}\n" + grid(schedule, frequency.tolist(), waits, taken)
            )
            seen = seen + 1 if taken.ended else 0
            if taken.ended and seen == _CONFIRMATIONS:
                ended = taken.ended
                break
            for node, target in taken.raised.items():
                frequency[node] = target
            steps += bool(taken.raised)
        plan = replace(
            self._plan,
            policy=f"{self._plan.policy}-{self._policy.name}",
            frequency_mhz=frequency.reshape(shape),
        )
        return plan, steps, ended


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
