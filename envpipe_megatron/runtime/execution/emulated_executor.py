"""Units on an emulated GPU: the real computation runs, and the remainder of its time is waited.

The *emulated* clock is exact: a unit starts at the later of its stage's last end and the emulated
instant at which its input was sent, and takes what the GPU's model says, so an iteration equals the
longest path on any host. The *wall* clock follows by sleeping until each unit's emulated
end; it is late by what the host is too slow for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
import torch.distributed as dist

from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.presets import times_by_kind_s
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.executor import (
    Executor,
    Passed,
    StageRecord,
    always,
    make_record,
)

#: Beyond the tags of what else the hosts of a pipeline send each other.
_FIRST_TAG = 100


class EmulatedExecutor(Executor):
    """Times units by an emulated GPU; messages take no emulated time.

    The stages send each other when their units end, in emulated time, over the host group of their
    pipeline: neither the channel nor a framework's own messages carry any of it.

    Args:
        time_at_max_s: time of one forward and one backward of this stage at the maximum clock; what
            others take follows (`times_by_kind_s`).
        settle_clock: returns when every clock request that is due has reached the GPU. A real GPU
            gets them in its own time; here they must be in before the unit's time is modelled, or
            emulated time would depend on how the host schedules processes.
    """

    def __init__(
        self,
        gpu: EmulatedGpu,
        time_at_max_s: Mapping[Kind, float],
        collectives: Collectives,
        settle_clock: Callable[[], None],
    ) -> None:
        self._gpu = gpu
        self._time_at_max_s = times_by_kind_s(time_at_max_s)
        self._collectives = collectives
        self._settle_clock = settle_clock
        #: Until when a parked wait lasts at most, in emulated time.
        self._wait_ends_s = math.inf

    def begin_iteration(self, schedule: Schedule, stage: int) -> None:
        """Bring the emulated GPUs of the pipeline to one instant, and tie it to the wall clock."""
        width = schedule.units_per_stage
        self._units = schedule.stages[stage]
        self._prices = [tuple(Kind)[place] for place in schedule.priced_kinds[stage]]
        successors = schedule.cross_successor.reshape(-1, width)[stage]
        #: For each unit, the stage that sends its input and the one that needs its output, or -1;
        #: and the tags of both, each the receiving unit's own.
        self._sources = (schedule.cross_dependency.reshape(-1, width)[stage] // width).tolist()
        self._destinations = (successors // width).tolist()
        self._tags = (_FIRST_TAG + schedule.places[stage]).tolist()
        self._output_tags = (_FIRST_TAG + schedule.places.ravel()[successors]).tolist()
        #: Where to and by which tag the present unit says when it ended.
        self._outputs = list[tuple[int, int]]()
        self._starts: list[float] = []
        self._ends: list[float] = []
        #: Sends under way, and what they send.
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._begin_s = self._collectives.latest(self.now_s())
        self._gpu.advance_to(self._begin_s)
        self._anchor_s = time.monotonic() - self._begin_s
        self._gpu.anchor(self._anchor_s)

    def begin_unit(self) -> Passed:
        """Note that the input is there and the real computation starts.

        Raises CollectivesError if the stage that sends the input is gone or silent.
        """
        position = len(self._ends)
        self._ready_s = self._begin_s
        source = self._sources[position]
        if source >= 0:
            with self._collectives.names_the_loss(f"its neighbour, stage {source}"):
                self._ready_s = self._collectives.pipeline.receive(source, self._tags[position])
        if self._wait_ends_s < math.inf:
            self._gpu.advance_to(min(self._wait_ends_s, self._ready_s))
            self._wait_ends_s = math.inf
        return always

    def end_unit(self) -> Passed:
        """Take the unit's modelled time after its real computation, and sleep until its end."""
        self._settle_clock()
        position = len(self._ends)
        unit, destination = self._units[position], self._destinations[position]
        if destination >= 0:
            self._outputs.append((destination, self._output_tags[position]))
        priced = self._prices[position]  # of units that run as one, the last is priced for all
        start_s, end_s = self._gpu.run_unit(
            priced.value, self._time_at_max_s[priced], self._ready_s
        )
        self._starts.append(start_s - self._begin_s)
        self._ends.append(end_s - self._begin_s)
        if unit.combined:
            return always
        remaining_s = self._anchor_s + end_s - time.monotonic()
        if remaining_s > 0:
            time.sleep(remaining_s)  # the emulated GPU computes; nothing could end this early
        while self._outputs:
            output = self._outputs.pop(0)
            with suppress(RuntimeError):  # who sends the output finds out that the stage is gone
                self._sent += self._collectives.pipeline.send(end_s, *output)
        return always  # the sleep is over: so is the unit

    def in_wait(self, after_s: float) -> float:
        """Do it in emulated time, to which `begin_unit` brings the GPU."""
        self._settle_clock()  # the wait's own clock is set where the wait begins
        self._wait_ends_s = self._begin_s + self._ends[-1] + after_s
        return math.inf

    def end_iteration(self, check: Callable[[], object]) -> Callable[[], StageRecord]:
        """End the iteration on all stages when the slowest has ended; all is known at once."""
        # The request after the last unit belongs to its end.
        self._settle_clock()
        # What has followed the units since, such as an optimizer, is not the iteration's.
        end_s = self._collectives.latest(self._begin_s + self._ends[-1])
        self._gpu.advance_to(end_s)
        begin_s = self._begin_s
        record = make_record(self._starts, self._ends, begin_s, end_s - begin_s)
        return lambda: record

    def now_s(self) -> float:
        """Return where this GPU's committed work ends: only units take emulated time."""
        return self._gpu.committed_end_s()

    def idle(self, time_s: float) -> None:
        """Have the emulated GPU idle, which a meter sees; the host does not sleep."""
        self._settle_clock()
        end_s = self._gpu.committed_end_s() + time_s
        self._gpu.advance_to(end_s)
        self._gpu.anchor(time.monotonic() - end_s)
