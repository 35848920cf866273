"""How a unit's time passes: on a GPU (`CudaExecutor`), or on an emulated one (`EmulatedExecutor`).

The interpreter calls an executor when a unit's input has arrived and when its work was handed to
the device; the executor knows when the device began and ended it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.presets import times_by_kind_s
from envpipe_megatron.runtime.channel.collectives import Collectives

#: Two refreshes of an energy counter.
METER_MARGIN_S = 0.2

#: How long clocks of host and device are taken to keep step, s: some microseconds a second apart.
_SEEN_FOR_S = 30.0

#: How often one who waits for the device looks, s.
_LOOK_S = 5e-5

#: Of the tags of what the hosts of a pipeline send each other, those of emulated units begin here.
_FIRST_TAG = 100

#: True once the device has come to something; returns at once.
Passed = Callable[[], bool]


def always() -> bool:
    """True of what the device need not come to."""
    return True


def wait_for(passed: Passed, check: Callable[[], object] = always) -> None:
    """Return when the device has come to something; raise what `check` raises meanwhile."""
    while not passed():
        check()
        time.sleep(_LOOK_S)


@dataclass(frozen=True)
class StageRecord:
    """Measurements of one stage in one iteration; arrays are [units_per_stage].

    Attributes:
        start_s: of each unit, after the start of the iteration, as `end_s`.
        begin_s: start of the iteration on the time base of the GPU's meter.
        iteration_time_s: from there to the end of this stage, on emulated GPUs of the slowest one.
        number: of the iteration; None if nobody counts them.
        followed: whether the next iteration follows at once: False before what is no training.
        whole: whether all of its units ran, as far as is known; else times of units mean nothing.
    """

    start_s: FloatArray
    end_s: FloatArray
    begin_s: float
    iteration_time_s: float
    number: int | None = None
    followed: bool = True
    whole: bool = True

    @property
    def unit_time_s(self) -> FloatArray:
        """Return how long each unit took, [units_per_stage]."""
        return self.end_s - self.start_s

    @property
    def receive_wait_s(self) -> FloatArray:
        """Return each unit's wait for its input since the unit before, [units_per_stage]."""
        return self.start_s - np.concatenate(([0.0], self.end_s[:-1]))

    def with_units_of(self, like: StageRecord) -> StageRecord:
        """Return the same iteration, timed at begin and end only, with the units of another."""
        share = float(self.end_s[-1] / (like.end_s[-1] or 1.0))
        return replace(self, start_s=share * like.start_s, end_s=share * like.end_s)


def late_record(read: Callable[[], StageRecord], number: int | None, *, whole: bool) -> StageRecord:
    """Make a record that is read, once, when one of its times is first asked for."""
    record = object.__new__(_LateRecord)
    record.__dict__.update(_read=read, number=number, whole=whole)
    return record


class _LateRecord(StageRecord):
    def __getattr__(self, name: str) -> Any:
        """Read a time that is not there yet."""
        if "_read" not in self.__dict__ or name.startswith("_"):
            raise AttributeError(name)
        self.__dict__.update({**self._read().__dict__, "number": self.number, "whole": self.whole})
        del self.__dict__["_read"]
        return getattr(self, name)


class Executor(Protocol):
    """Times units; one iteration is begin_iteration, units, end_iteration.

    Nothing is waited for, unless one says otherwise.
    """

    def begin_iteration(self, schedule: Schedule, stage: int) -> None:
        """Start an iteration; all stages of the pipeline do so together."""

    def begin_unit(self) -> Passed:
        """Begin a unit, its input is there or comes in stream order; returns what is true then."""

    def end_unit(self) -> Passed:
        """End a unit, whose work was handed over; returns what becomes true when it has ended."""

    def in_wait(self, after_s: float) -> float:
        """Return `after_s` past the last unit's end by the host's clock, inf where that means none.

        Called between two requests, for the clock of a wait and for the next unit's.
        """

    def end_iteration(self, check: Callable[[], object]) -> Callable[[], StageRecord]:
        """End the iteration; what is returned waits for its last unit and reads all times.

        It is to be called before the iteration after the next one begins. While it waits, it calls
        `check`, which raises an error if the device will never come there.
        """

    def now_s(self) -> float:
        """Return the present instant on the time base of the GPU's meter, outside an iteration."""

    def idle(self, time_s: float) -> None:
        """Let this time pass on the meter's time base, outside an iteration."""
        return

    def wait_no_more(self) -> None:
        """Read times of an iteration that has ended without any wait from now on."""
        return


class CudaExecutor(Executor):
    """CUDA events around each unit; the host waits when it reads them, if at all.

    At a unit the host's caches are cold, and each call of Python's costs a microsecond or more:
    what runs there makes few.
    Events are used again in every third iteration: times are to be read before the iteration after
    the next begins.
    """

    def __init__(self) -> None:
        self._lists: deque[list[torch.cuda.Event]] = deque([[], [], []])
        self._look_after_s = _SEEN_FOR_S
        #: When the host saw which event pass: it counts from there to others on its own clock.
        self._seen_s, self._seen = -math.inf, self._new_event()

    def begin_iteration(self, schedule: Schedule, stage: int) -> None:
        """Record the iteration's start on the current stream, which all its units run on."""
        self._lists.rotate()
        self._events = self._lists[0]
        while len(self._events) < 1 + 2 * schedule.units_per_stage:
            self._events.append(self._new_event())
        self._free = iter(self._events)
        self._stream = torch.cuda.current_stream()  # looking it up costs as much as recording
        self._begin = next(self._free)
        self._begin.record(self._stream)
        self._starts: list[torch.cuda.Event] = []
        self._ends: list[torch.cuda.Event] = []

    def begin_unit(self) -> Passed:
        """Record the start after the receive that the stream waits for."""
        event = next(self._free)
        event.record(self._stream)
        self._starts.append(event)
        return event.query

    def end_unit(self) -> Passed:
        """Record the end."""
        event = next(self._free)
        event.record(self._stream)
        self._ends.append(event)
        return event.query

    def in_wait(self, after_s: float) -> float:
        """Take the host's clock, which starts when the end was seen."""
        return after_s

    def end_iteration(self, check: Callable[[], object]) -> Callable[[], StageRecord]:
        """Reads the events, once the last unit has ended.

        The optimizer has mostly stepped since, or the next iteration's units have been handed over,
        and so has the last unit ended. Then the host waits for nothing, which would take away its
        lead, except for a look at the clock twice a minute.
        """
        recorded, begin, starts, ends = self._events, self._begin, self._starts, self._ends

        def read() -> StageRecord:
            if not ends[-1].query():  # type: ignore[no-untyped-call]  # torch's
                self._see(recorded, 2 * len(ends), check)
            elif time.monotonic() - self._seen_s > self._look_after_s:
                coming = range(1 + len(self._starts) + len(self._ends))
                first = next((at for at in coming if not self._events[at].query()), None)  # type: ignore[no-untyped-call]
                self._see(self._events, first, check)
            begin_s = self._seen_s - begin.elapsed_time(self._seen) / 1e3
            starts_s, ends_s = (
                np.array([begin.elapsed_time(event) for event in events]) / 1e3
                for events in (starts, ends)
            )
            return StageRecord(starts_s, ends_s, begin_s, float(ends_s[-1]))

        return read

    def _see(
        self, events: list[torch.cuda.Event], at: int | None, check: Callable[[], object]
    ) -> None:
        """Wait for an event, or for what the stream holds, and keep when the host saw it pass."""
        if at is None:
            self._seen = self._new_event()  # the one before may be of an iteration not read yet
            self._seen.record(self._stream)
        else:  # it is kept, and the one before may be recorded in its place, an iteration later
            events[at], self._seen = self._seen, events[at]
        wait_for(self._seen.query, check)
        self._seen_s = time.monotonic()

    def now_s(self) -> float:
        """Return the host's monotonic clock, which the meters of real GPUs use."""
        return time.monotonic()

    def idle(self, time_s: float) -> None:
        """Sleep."""
        time.sleep(time_s)

    def wait_no_more(self) -> None:
        """Look at no clock any more."""
        self._look_after_s = math.inf

    def _new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's


class EmulatedExecutor(Executor):
    """Times units by an emulated GPU; messages take no emulated time.

    The real computation runs, and the remainder of a unit's time is waited. The *emulated* clock is
    exact: a unit starts at the later of its stage's last end and the emulated instant at which its
    input was sent, and takes what the GPU's model says, so an iteration equals the longest path on
    any host. The *wall* clock follows by sleeping until each unit's emulated end; it is late by
    what the host is too slow for.

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
        width, kinds = schedule.units_per_stage, tuple(Kind)
        sources, takers = (
            nodes.reshape(-1, width)[stage].tolist()
            for nodes in (schedule.cross_dependency, schedule.cross_successor)
        )
        #: For each unit, whether it runs as one with the next, and what it costs as: of units that
        #: run as one, the last costs what all do. Then the stage that sends its input, and the one
        #: that needs its output, or -1, with the place there of the unit that does.
        self._units = [
            (unit.combined, kinds[priced], source // width, *divmod(taker, width))
            for unit, priced, source, taker in zip(
                schedule.stages[stage], schedule.priced_kinds[stage], sources, takers, strict=True
            )
        ]
        #: Where to the present unit says when it ended, and by which tag: the receiver's place.
        self._outputs = list[tuple[int, int]]()
        #: Start and end of each unit so far, after the iteration's begin.
        self._times_s: list[tuple[float, float]] = []
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
        self._ready_s = self._begin_s
        place = len(self._times_s)
        _, _, source, *_ = self._units[place]
        if source >= 0:
            with self._collectives.names_the_loss(f"its neighbour, stage {source}"):
                self._ready_s = self._collectives.pipeline.receive(source, _FIRST_TAG + place)
        if self._wait_ends_s < math.inf:
            self._gpu.advance_to(min(self._wait_ends_s, self._ready_s))
            self._wait_ends_s = math.inf
        return always

    def end_unit(self) -> Passed:
        """Take the unit's modelled time after its real computation, and sleep until its end."""
        self._settle_clock()
        combined, priced, _, taker, place = self._units[len(self._times_s)]
        if taker >= 0:
            self._outputs.append((taker, _FIRST_TAG + place))
        start_s, end_s = self._gpu.run_unit(
            priced.value, self._time_at_max_s[priced], self._ready_s
        )
        self._times_s.append((start_s - self._begin_s, end_s - self._begin_s))
        if combined:
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
        self._wait_ends_s = self._begin_s + self._times_s[-1][1] + after_s
        return math.inf

    def end_iteration(self, check: Callable[[], object]) -> Callable[[], StageRecord]:
        """End the iteration on all stages when the slowest has ended; all is known at once."""
        # The request after the last unit belongs to its end.
        self._settle_clock()
        # What has followed the units since, such as an optimizer, is not the iteration's.
        begin_s = self._begin_s
        end_s = self._collectives.latest(begin_s + self._times_s[-1][1])
        self._gpu.advance_to(end_s)
        starts_s, ends_s = np.array(self._times_s).T
        record = StageRecord(starts_s, ends_s, begin_s, end_s - begin_s)
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
