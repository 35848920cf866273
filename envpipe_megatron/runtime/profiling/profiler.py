"""The online profile: what forwards and backwards of each stage cost at each clock.

It is measured while training goes on, in two sweeps from the highest clock downwards. The first
runs forwards and backwards at the same clock, so no clock changes inside an iteration and unit
times are clean; it gives times, and the sum of forward and backward energy. The second leaves
backwards at the maximum and varies forwards alone, which tells the two energies apart. There the
clock changes at every unit and settles some milliseconds late, so units start at the wrong clock;
their times against the first sweep's tell by how much, and the energies are corrected.

Only the difference of energy between clocks can be told apart, not its level: every stage runs as
many forwards as backwards, so a constant moved from one to the other changes no iteration's energy.
The level at the maximum clock is split as if both drew the same power.

Virtual stages (chunks) are profiled one by one where the order has them. Their times are measured;
of their energies the meter knows the sum alone, and all chunks' units of a kind are taken to draw
the same power: the stage's mean energy of that kind is shared by time. Combined units count among
the backwards in this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.core.profile import Profile, make_profile
from envpipe_megatron.core.profile_rows import ProfileRow
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.sidecar import Sidecar
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.runtime.channel.collectives import SUM, Collectives
from envpipe_megatron.runtime.clocks.served import Clock
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.energy.split import (
    Measured,
    Split,
    error_of_sum,
    mean_without_outliers,
    split_energies,
)
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import (
    IterationOrder,
    PhaseRun,
    Stretches,
    constant_order,
    ends_and_gaps_s,
)
from envpipe_megatron.runtime.going_on import GoesOnError, by_planner, on_every_rank
from envpipe_megatron.runtime.profiling.wait_power import WaitPower
from envpipe_megatron.tuning.commands import tail_times_s

#: A sweep ends after this many rises of energy in a row: lower clocks are past the valley.
_RISES_TO_STOP = 5
#: Energies of stretches shorter than this scatter by the meter's refreshes, not by the GPU.
_BLOCK_REFRESHES = 5


class ProfilerError(GoesOnError):
    """A sweep that cannot be made or read."""


@dataclass(frozen=True)
class ProfilerSettings:
    """How long to stay at each clock.

    Args:
        settle_iterations: run and not measured after each change of the sweep's clock; one at
            least, in which the window before is closed too, or a ProfilerError is raised.
        measured_iterations: averaged at each clock, at least.
        measured_split_iterations: the same in the second sweep.
        min_window_s: iterations are added until they last so long: ten refreshes of a counter that
            refreshes every 100 ms.
    """

    settle_iterations: int = 1
    measured_iterations: int = 5
    measured_split_iterations: int = 3
    min_window_s: float = 1.0

    def __post_init__(self) -> None:
        if min(self.settle_iterations, self.measured_iterations) < 1:
            raise ProfilerError(
                "A clock needs at least one iteration to settle and one to be measured",
                value=(self.settle_iterations, self.measured_iterations),
            )


def profiled_kinds(schedule: Schedule) -> tuple[Kind, ...]:
    """The kinds that the profile of an order that a framework runs has rows of.

    Where backwards are split, whole ones are among them only if the order has some; a profile takes
    those of the others as one part behind the other.
    """
    priced = {list(Kind)[place] for place in np.unique(schedule.priced_kinds)}
    return tuple(kind for kind in Kind if kind in priced and kind is not Kind.NOTHING)


@dataclass
class _Point:
    """Measured iterations at one setting of clocks."""

    order: IterationOrder
    stage: int
    average: Callable[[FloatArray], float]
    records: list[StageRecord]

    def read(self, meter: EnergyMeter, wait_power: WaitPower) -> Measured:
        """Unit times, and the energy of a pair: NaN if the meter failed."""
        kinds = profiled_kinds(self.order.schedule)
        part_s, units_s, alone = self._times_s(kinds)
        pairs = alone * len(self.records)
        begin_s, end_s = self.records[0].begin_s, self.records[-1].end_of_iteration_s
        if meter.last_refresh_s < end_s:
            meter.catch_up()
        try:
            energies_j = [
                meter.energy_j(record.begin_s, record.end_of_iteration_s)
                - self._waiting_j(record, wait_power)
                for record in self.records
            ]
            metered_j = meter.window(begin_s, end_s).uncertainty_j
        except MeterError:
            energies_j, metered_j = [math.nan] * len(self.records), math.nan
        block_s = _BLOCK_REFRESHES * meter.refresh_s
        durations_s = [record.iteration_time_s for record in self.records]
        scatter_j = error_of_sum(energies_j, durations_s, block_s)
        forward_s, backward_s = (units_s / alone).tolist()
        return Measured(
            forward_s,
            backward_s,
            sum(energies_j) / pairs,
            math.hypot(metered_j, scatter_j) / pairs,
            (part_s / [forward_s, *[backward_s] * (len(kinds) - 1)]).tolist(),
        )

    def _times_s(self, kinds: Sequence[Kind]) -> tuple[FloatArray, FloatArray, int]:
        """[chunks, kinds] means, times of forwards and of all else, and how many forwards."""
        schedule, chunks = self.order.schedule, self.order.schedule.num_chunks
        priced = (*kinds, Kind.NOTHING)
        keys = schedule.unit_keys(chunks, priced)[self.stage]
        keys = keys - len(priced) * chunks * self.stage
        times = np.array([record.unit_time_s for record in self.records])
        part_s = np.zeros((chunks, len(priced)))
        for key in np.unique(keys):
            part_s.flat[key] = self.average(times[:, keys == key].ravel())
        count = np.bincount(keys, minlength=part_s.size).reshape(part_s.shape)
        part_s, count = part_s[:, :-1], count[:, :-1]
        units_s = (count * part_s).sum(axis=0)
        for pair, units, alone in zip(part_s[:, 2:], count[:, 2:], part_s[:, :2], strict=True):
            pair[units == 0] = alone.sum()  # no pair: as if one followed the other
        whole_s = np.array([units_s[0], units_s[1:].sum()])
        return part_s, whole_s, int(count[:, 0].sum())

    def _waiting_j(self, record: StageRecord, wait_power: WaitPower) -> float:
        """A wait runs at the clock of the unit after it; the last, at that of the first unit."""
        clocks = self.order.frequency_mhz[self.stage].tolist()
        waits = [*record.receive_wait_s.tolist(), record.iteration_time_s - record.end_s[-1]]
        return float(
            sum(
                wait_s * wait_power.at(clock)
                for wait_s, clock in zip(waits, [*clocks, clocks[0]], strict=True)
            )
        )


@dataclass(frozen=True)
class _Parts:
    """Measurements of a stage's replicas, added up but for the last two.

    Args:
        rows: for each part, kind and clock, time in s, energy in J and its variance in J^2.
        power_w: waiting power, at each clock at which it was measured.
        tail_s: one number; none if no iteration followed another.
        late_s: how late changes of the clock are, at most.
        told_apart: whether the sweeps tell forwards from backwards, on all replicas.
    """

    rows: FloatArray
    power_w: FloatArray
    tail_s: FloatArray
    late_s: float
    told_apart: bool


class OnlineProfiler:
    """Profiles a pipeline that trains by the framework's own order, which is the schedule.

    Clocks to sweep, at least two, come highest first and are the same on every rank. `progress` is
    called with a line for each.
    """

    def __init__(
        self,
        schedule: Schedule,
        clocks_mhz: Sequence[int],
        stage: int,
        clock: Clock,
        meter: EnergyMeter,
        wait_power: WaitPower,
        collectives: Collectives,
        settings: ProfilerSettings,
        progress: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._clocks = list(clocks_mhz)
        self._stage = stage
        self._clock = clock
        self._meter = meter
        self._wait_power = wait_power
        self._collectives = collectives
        self._settings = settings
        self._progress = progress
        self._stretches = Stretches(settings.settle_iterations, settings.min_window_s, collectives)
        #: What a stage's profile has rows of: chunk, kind, and the kind that shares its energy.
        self._listed = [
            (chunk, kind, Kind.FORWARD if kind is Kind.FORWARD else Kind.BACKWARD)
            for chunk in range(schedule.num_chunks)
            for kind in profiled_kinds(schedule)
        ]
        #: For each point: ends of the last units, and gaps to the next iterations.
        self._tails: list[tuple[FloatArray, FloatArray]] = []

    def run(self, sidecar: Sidecar) -> PhaseRun[Profile]:
        """Sweep; the profile of the whole pipeline, on every rank.

        Raises GoesOnError on all ranks if a meter or the control of a clock failed on one.
        """
        clocks = self._clocks
        together = yield from self._sweep(
            [(f, f) for f in clocks], self._settings.measured_iterations, stop_early=True
        )
        clocks = clocks[: len(together)]
        top = clocks[0]
        # Here no unit is an outlier: those that started at the wrong clock are in the energy too.
        apart = yield from self._sweep(
            [(f, top) for f in clocks[1:]],
            self._settings.measured_split_iterations,
            average=lambda times: float(np.mean(times)),
        )
        split = on_every_rank(self._collectives, lambda: split_energies(clocks, together, apart))
        tails = self._collectives.in_pipeline(
            tuple(np.concatenate(of_points) for of_points in zip(*self._tails, strict=True))
        )
        own = on_every_rank(self._collectives, lambda: self._own(split, together, tails))
        stages = self._collectives.to_planner(own, _added)
        # One rank's arithmetic for all, so that every rank plans from the same bits.
        return by_planner(self._collectives, lambda: self._merge(split, stages, sidecar))

    def _sweep(
        self,
        clocks: Sequence[tuple[int, int]],
        measured: int,
        *,
        stop_early: bool = False,
        average: Callable[[FloatArray], float] = mean_without_outliers,
    ) -> PhaseRun[list[Measured]]:
        points: list[Measured] = []
        open_point: _Point | None = None
        for index, (forward_mhz, backward_mhz) in enumerate([*clocks, clocks[-1]]):
            order = constant_order(Phase.PROFILE, self._schedule, forward_mhz, backward_mhz)
            # These iterations let the new clock settle, and the counter pass the window before.
            yield from self._stretches.settle(order)
            if open_point is not None:
                points.append(self._read(open_point))
                if stop_early and self._all_past_valley(points):
                    break
            if index == len(clocks):
                break
            self._progress(
                f"profile: forward {forward_mhz} MHz, backward {backward_mhz} MHz "
                f"({index + 1} of at most {len(clocks)})"
            )
            records = yield from self._stretches.measure(order, measured)
            open_point = _Point(order, self._stage, average, records)
        return points

    def _read(self, point: _Point) -> Measured:
        """Return what was measured; raise on every rank if one's clock or meter is wrong."""

        def read() -> Measured:
            if self._clock.error is not None:  # one clock's time and energy would pass for many's
                raise ProfilerError(f"Clock control ended while profiling: {self._clock.error}")
            self._tails.append(ends_and_gaps_s(point.records))
            measured = point.read(self._meter, self._wait_power)
            if not 0 < measured.pair_j < math.inf:
                raise ProfilerError(
                    "The energy counter failed while profiling: energy of one forward and "
                    "backward (J)",
                    value=measured.pair_j,
                    remedy="Give a profile by file, or profile for longer at each clock.",
                )
            return measured

        return on_every_rank(self._collectives, read)

    def _all_past_valley(self, points: Sequence[Measured]) -> bool:
        """True if every stage has seen enough rises of energy in a row, now or before."""
        rises, past = 0, False
        for before, after in pairwise(points):
            rises = rises + 1 if after.pair_j > before.pair_j else 0
            past = past or rises >= _RISES_TO_STOP
        return self._collectives.on_all(past)

    def _own(
        self, split: Split, together: Sequence[Measured], tails: Sequence[tuple[FloatArray, ...]]
    ) -> _Parts:
        ends_s, gaps_s = zip(*tails, strict=True)
        own_tail_s = tail_times_s(ends_s, gaps_s)[[self._stage]] if ends_s[0].size else np.empty(0)
        kinds = profiled_kinds(self._schedule)
        rows = [
            (
                share * row.time_s,
                share * row.energy_j,
                (share * (row.energy_uncertainty_j or 0.0)) ** 2,
            )
            for (chunk, kind, whole) in self._listed
            for at in [kinds.index(kind)]
            for row, m in zip(split.rows[whole], together, strict=True)
            for share in [m.part_share[chunk][at]]
        ]
        return _Parts(
            np.array(rows),
            np.array([self._wait_power.at(clock) for clock in self._wait_power.power_w]),
            own_tail_s,
            split.late_s,
            split.told_apart,
        )

    def _merge(self, split: Split, stages: Sequence[_Parts], sidecar: Sidecar) -> Profile:
        """The profile of the whole pipeline; all of its ranks have measured at the same clocks."""
        replicas = self._collectives.num_replicas
        num_chunks = self._schedule.num_chunks
        units = [
            (chunk, kind, row.frequency_mhz)
            for chunk, kind, whole in self._listed
            for row in split.rows[whole]
        ]
        rows = []
        for stage, parts in enumerate(stages):
            if not parts.told_apart:
                self._progress(
                    f"profile: stage {stage}'s forwards and backwards cannot be distinguished by "
                    "their energy; the energy of both is shared by time, and plans can save less. "
                    "Larger microbatches, or more iterations at each clock, help"
                )
            for (chunk, kind, frequency), (time_s, energy_j, variance) in zip(
                units, (parts.rows / replicas).tolist(), strict=True
            ):
                error_j = math.sqrt(variance / replicas)  # of the mean of replicas
                row = ProfileRow(frequency, time_s, energy_j, error_j)
                rows.append((stage * num_chunks + chunk, kind, row))
        waits_mhz = list(self._wait_power.power_w)
        facts = {
            "num_chunks": num_chunks,
            "wait_power_w": tuple(
                dict(zip(waits_mhz, (parts.power_w / replicas).tolist(), strict=True))
                for parts in stages
            ),
            "frequency_change_s": max(parts.late_s for parts in stages),
            # None if no iteration followed another.
            "tail_time_s": tuple(t / replicas for parts in stages for t in parts.tail_s.tolist())
            or None,
        }
        full = Sidecar(**{**vars(sidecar), **facts})
        return make_profile(
            rows, source="the online profile", sidecar=full, listed_chunks=num_chunks
        )


def _added(replicas: Sequence[_Parts]) -> _Parts:
    return _Parts(
        SUM([parts.rows for parts in replicas]),
        SUM([parts.power_w for parts in replicas]),
        SUM([parts.tail_s for parts in replicas]),
        max(parts.late_s for parts in replicas),
        all(parts.told_apart for parts in replicas),
    )
