"""Iterations as the phases of a session decide: what every stage runs, and how often."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.collectives import Collectives
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.tuning.commands import Parking

T = TypeVar("T")

#: Iterations that did not run whole are repeated until they have been run so often.
MOST_TRIES = 3


@dataclass(frozen=True)
class IterationOrder:
    """One iteration: the schedule, the frequency of each unit of each stage, and where to park.

    Attributes:
        times_units: whether each unit is timed. Where not, an earlier iteration lends its times to
            them, if units and messages are the framework's and no thread waits for a unit's end.
        lowest_mhz: the lowest clock of any replica's unit, where replicas run several orders.
    """

    phase: Phase
    schedule: Schedule
    frequency_mhz: NDArray[np.int64]
    parking: Parking | None = None
    times_units: bool = True
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
