"""Iterations, as the phases of a session decide them, and one stage's units in one of them.

A phase yields an `IterationOrder`; our loop (`execute`), which carries messages too, or a framework
calls a `StageRun` of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from envpipe_megatron.core.kinds import Kind, Unit
from envpipe_megatron.core.kinds import unit as make_unit
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.carrier import StageSpecs
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.channel.p2p import P2PChannel
from envpipe_megatron.runtime.execution.executor import (
    Executor,
    Passed,
    StageRecord,
    always,
    late_record,
    wait_for,
)
from envpipe_megatron.tuning.commands import Parking

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Iterations that did not run whole are repeated until they have been run so often.
MOST_TRIES = 3


@dataclass(frozen=True)
class IterationOrder:
    """One iteration: the schedule, the frequency of each unit of each stage, and where to park.

    Attributes:
        times_units: whether each unit is timed. Where not, an earlier iteration lends its times to
            them, if units and messages are the framework's and no thread waits for a unit's end.
        watched: whether the memory that units hold is looked at.
        lowest_mhz: the lowest clock of any replica's unit, where replicas run several orders.
    """

    phase: Phase
    schedule: Schedule
    frequency_mhz: NDArray[np.int64]
    parking: Parking | None = None
    times_units: bool = True
    watched: bool = False
    lowest_mhz: int | None = None

    @property
    def slowest_mhz(self) -> int:
        """Return the lowest clock of any unit, in any replica."""
        own_mhz = int(self.frequency_mhz.min())
        return min(own_mhz, self.lowest_mhz or own_mhz)

    def parked(self, stage: int) -> dict[int, tuple[int, float]]:
        """Return `Parking.of_stage`; empty without parking."""
        return {} if self.parking is None else self.parking.of_stage(stage)


#: A phase is a generator: it yields what the next iteration runs, is sent what this stage measured
#: in it, and returns what it found. All ranks run the same phases in step.
PhaseRun = Generator[IterationOrder, StageRecord, T]


def iterations(order: IterationOrder, count: int = 1) -> PhaseRun[list[StageRecord]]:
    """Run an order `count` times; return the records."""
    records = []
    for _ in range(count):
        records.append((yield order))
    return records


def whole(
    run: Callable[[], PhaseRun[list[StageRecord]]], collectives: Collectives
) -> PhaseRun[list[StageRecord]]:
    """Run iterations, `MOST_TRIES` times while some did not run whole; the records."""
    for _ in range(MOST_TRIES):
        records = yield from run()
        if collectives.on_all(all(record.whole for record in records)):
            break
    return records


def constant_order(phase: Phase, schedule: Schedule, frequency_mhz: int) -> IterationOrder:
    """Return an order of which all units run at one frequency."""
    frequencies_mhz = np.full(schedule.is_backward.shape, frequency_mhz, dtype=np.int64)
    return IterationOrder(phase, schedule, frequencies_mhz)


class StageRun:
    """Times each unit, and requests the next one's clock for when it ends.

    The calls are `begin`, for each unit `begin_unit` and `end_unit`, and `end`.

    Args:
        request: requests a clock in MHz for when the last unit has ended, or some s later, or
            when the next begins: what it returns then is called there.
        check: called while the last unit is waited for; raises what will never let it end.
        like: an iteration whose units' times are this one's too, of which begin and end only are
            timed: where the framework carries the messages, nothing parks and nobody waits for a
            unit. None to time each unit.
    """

    def __init__(
        self,
        order: IterationOrder,
        stage: int,
        executor: Executor,
        request: Callable[[int, float | None], Callable[[], None] | None],
        check: Callable[[], object] = always,
        like: StageRecord | None = None,
    ) -> None:
        self.order, self.stage = order, stage
        self.units = order.schedule.stages[stage]
        self.frequencies_mhz: list[int] = order.frequency_mhz[stage].tolist()
        #: Called with each unit that has ended, and when all have.
        self.unit_ended: Callable[[Unit], None] | None = None
        self.all_ended: Callable[[], None] = lambda: None
        #: Whether all units ran, as far as is known, and did the work that the phase is about.
        self.whole = self.same_work = True
        self._ended = 0
        self._executor = executor
        self._request = request
        self._check = check
        self._like = like
        self._parked = order.parked(stage)
        #: To be called when the next unit begins.
        self._on_begin: Callable[[], None] | None = None
        self._last_end: Passed = always

    @property
    def next_unit(self) -> Unit | None:
        """Return the unit that begins next, or has begun; None after the last."""
        return self.units[self._ended] if self._ended < len(self.units) else None

    @property
    def times_units(self) -> bool:
        """True if each unit is timed."""
        return self._like is None

    @property
    def executed(self) -> list[str]:
        """Return the units that have ended, as plans write them."""
        chunks = self.order.schedule.num_chunks
        return [unit.label(chunks) for unit in self.units[: self._ended]]

    def begin(self) -> None:
        """Begin the iteration; all stages of the pipeline do so together."""
        self._executor.begin_iteration(self.order.schedule, self.stage)

    def begin_unit(self) -> Passed:
        """Begin the next unit, as `Executor.begin_unit` does.

        Raises CollectivesError if time is emulated and a neighbour is gone or silent.
        """
        if self._like is not None and self._ended:
            return always
        began = self._executor.begin_unit()
        if self._on_begin is not None:
            self._on_begin()
            self._on_begin = None
        return began

    def end_unit(self) -> None:
        """End the unit, whose work was handed over."""
        unit = self.units[self._ended]
        self._ended += 1
        if self._like is None or self._ended == len(self.units):
            self._last_end = self._executor.end_unit()
        # The wait before a unit runs at that unit's clock, or at a lower one for most of it; after
        # the last comes the next iteration's first, which mostly is the same as this one's.
        following = self._ended % len(self.units)
        delay_s = None
        if following and following in self._parked:  # what lies between iterations is no wait
            park_mhz, own_after_s = self._parked[following]
            self._request(park_mhz, None)
            delay_s = self._executor.in_wait(own_after_s)
        self._on_begin = self._request(self.frequencies_mhz[following], delay_s)
        if self.unit_ended is not None:
            self.unit_ended(unit)
        if self._ended == len(self.units):
            self.all_ended()

    @property
    def has_ended(self) -> bool:
        """True if the device has ended all units; nothing is waited for."""
        return self.next_unit is None and self._last_end()

    def end(self, number: int | None = None) -> StageRecord:
        """Return the times of this iteration; the first that is asked for waits for the last unit.

        That raises what `check` does.
        """
        read, like = self._executor.end_iteration(self._check), self._like
        own = read if like is None else lambda: read().with_units_of(like)
        return late_record(own, number, whole=self.whole)


class StageWork(Protocol):
    """Work that a training framework does for one unit of this stage.

    A framework that runs no split backwards leaves `weight_gradient` out.
    """

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward; `inputs` is None on the first chunk of the first stage."""

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a whole backward, or its first part, for an `INPUT_GRADIENT`.

        `gradients` is None on the last chunk of the last stage.
        """

    def weight_gradient(self, unit: Unit) -> None:
        """Run the second part of a backward."""
        raise TypeError(f"{type(self).__name__} has no backwards in two parts, as {unit} is of")

    def sent(self, unit: Unit) -> None:
        """Free what only the unit's output needed: it is in the channel."""
        return


def execute(
    work: StageWork,
    run: StageRun,
    channel: P2PChannel,
    specs: StageSpecs,
    unit_ended: Callable[[Unit], None] | None = None,
) -> None:
    """Execute one stage's units once, and carry their messages; `run.end` returns the times.

    Args:
        specs: what messages carry.
        unit_ended: called with each unit once its output is in the channel and its memory freed.

    Raises ChannelError if a neighbour is gone or silent.
    """
    schedule = run.order.schedule
    receives: list[bool] = schedule.receives[run.stage].tolist()
    #: By position, the unit whose output leaves then: of units that run as one, at their end.
    sent_at = {
        position + unit.combined: unit
        for position, unit in enumerate(run.units)
        if schedule.sends[run.stage, position]
    }
    #: The gradients of a whole backward among split ones, which runs where its `W` is listed.
    whole: list[list[torch.Tensor] | None] = []
    has_last_input = always
    channel.begin_step(schedule, specs)
    run.begin()
    for position, unit in enumerate(run.units):
        inputs = channel.receive(unit) if receives[position] else None
        began = run.begin_unit()
        if inputs is not None:
            has_last_input = began
        outputs: list[torch.Tensor] = []
        if unit.combined:
            whole.append(inputs)
        elif whole:
            backward = make_unit(Kind.BACKWARD, unit.microbatch, unit.chunk)
            outputs = work.backward(backward, whole.pop())
        elif unit.kind is Kind.WEIGHT_GRADIENT:
            work.weight_gradient(unit)
        else:
            run_unit = work.forward if unit.kind is Kind.FORWARD else work.backward
            outputs = run_unit(unit, inputs)
        run.end_unit()
        if position in sent_at:
            channel.send(sent_at[position], outputs)
        del inputs, outputs  # they would take memory from the next unit
        work.sent(unit)
        if unit_ended is not None:
            unit_ended(unit)
    if channel.lets_go:
        wait_for(has_last_input, channel.check)
    channel.end_step()


class Rehearsal:
    """A stage's work in an order, until it raises an error: then its messages carry zeros.

    So no neighbour waits for what never comes.

    Args:
        order: to be tried.
        specs: what its messages carry.
    """

    def __init__(self, order: Schedule, specs: StageSpecs) -> None:
        self.order = order
        #: What ended the work, in a line; None if nothing did.
        self.error: str | None = None
        self._specs = specs
        self._work: StageWork | None = None

    def of(self, work: StageWork, drop: Callable[[], object]) -> Rehearsal:
        """Return the work as it is to be executed; `drop` frees what it holds after an error."""
        self._work, self._drop = work, drop
        return self

    def forward(self, unit: Unit, inputs: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a forward."""
        outputs = self._run(lambda work: work.forward(unit, inputs))
        return self._zeros(Kind.FORWARD) if outputs is None else outputs

    def backward(self, unit: Unit, gradients: list[torch.Tensor] | None) -> list[torch.Tensor]:
        """Run a backward, or its first part."""
        outputs = self._run(lambda work: work.backward(unit, gradients))
        return self._zeros(Kind.BACKWARD) if outputs is None else outputs

    def weight_gradient(self, unit: Unit) -> None:
        """Run the second part of a backward."""
        self._run(lambda work: work.weight_gradient(unit))

    def sent(self, unit: Unit) -> None:
        """Note that the unit's output is in the channel."""
        self._run(lambda work: work.sent(unit))

    def _run(self, run: Callable[[StageWork], T]) -> T | None:
        if self._work is not None:
            try:
                return run(self._work)
            except Exception as error:
                logger.warning("Order %s is not tried to its end", self.order.name, exc_info=True)
                self.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
                self._work = None
                self._drop()  # messages, and the framework's runs, need the memory
        return None

    def _zeros(self, kind: Kind) -> list[torch.Tensor]:
        return self._specs.sends[kind].make(torch.zeros)
