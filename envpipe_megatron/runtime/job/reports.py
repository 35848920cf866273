"""A rank's report of a window: times, and how its GPU spent them at which clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.core.kinds import Kind
from envpipe_megatron.formats.steps import HELD_UP
from envpipe_megatron.runtime.energy.meter import EnergyMeter, MeterError
from envpipe_megatron.runtime.execution.executor import StageRecord
from envpipe_megatron.runtime.execution.orders import IterationOrder
from envpipe_megatron.runtime.job.parts import PhaseParts
from envpipe_megatron.tuning.commands import Command, Report
from envpipe_megatron.tuning.measured.meters import TAIL, WAITING, Stretch, meter_sums

#: A step that lasts this many times as long as its like holds something that is no training.
_PAUSED = 2.0
_UNKNOWN = math.nan, math.nan


def make_report(
    job: PhaseParts,
    records: Sequence[StageRecord],
    order: IterationOrder,
    command: Command,
    kinds: Sequence[Kind],
    nodes_mhz: FloatArray,
) -> Report:
    """Return this rank's report of a command's iterations, which ran one after the other.

    Args:
        job: this rank's parts.
        records: what was measured, one iteration at least.
        order: what they ran.
        command: says what is known of late clocks and tails, and whether to wait for the counter,
            where it has not seen all of them.
        kinds: those that are distinguished.
        nodes_mhz: as `meter_sums` takes them.
    """
    clocks_mhz: list[int] = order.frequency_mhz[job.stage].tolist()
    parked, tail_s = order.parked(job.stage), command.tail_s[job.stage] if command.tail_s else 0.0
    # Of each unit, the place of its kind; below zero if it takes no time.
    places = order.schedule.unit_keys(1, kinds)[job.stage] - len(kinds) * job.stage
    meter = job.meter
    begins_s = np.array([record.begin_s for record in records])
    ends_s = np.array([record.end_s[-1] for record in records])
    steps_s = np.append(np.diff(begins_s), np.nan)
    steps_s[:-1][[not _follows(*both) for both in pairwise(records)]] = np.nan
    steps_s[[not record.whole for record in records]] = np.nan
    if np.isfinite(steps_s).any():
        steps_s[steps_s > _PAUSED * np.nanmedian(steps_s)] = np.nan
    stretches: list[Stretch] = []
    for record, step_s in zip(records, steps_s.tolist(), strict=True):
        until_s = record.begin_s + step_s
        if not record.whole:
            break
        stretches += _stretches(
            record, clocks_mhz, places.tolist(), parked, command.late_s, tail_s, until_s
        )
        if math.isnan(step_s):
            break
    begin_s = records[0].begin_s
    if command.metered and meter.last_refresh_s < begins_s[-1] + ends_s[-1]:
        meter.catch_up()
    sums = meter_sums(begin_s, stretches, *meter.refreshes(begin_s), nodes_mhz, len(kinds))
    unit_s = [record.unit_time_s for record in records if record.whole]
    return Report(
        unit_s=np.median(unit_s or [np.full(len(clocks_mhz), np.nan)], axis=0)[np.newaxis],
        ends_s=ends_s[np.newaxis],
        gaps_s=(steps_s - ends_s)[np.newaxis],
        steps_s=steps_s[np.newaxis],
        waits_s=np.array([[record.receive_wait_s for record in records]]),
        meter=sums,
        power_w=np.array([_power_w(meter, begins_s, ends_s, steps_s)]),
        problems=job.clock.problems(),
        lost=job.clock.error is not None,
    )


def _power_w(
    meter: EnergyMeter, begins_s: FloatArray, ends_s: FloatArray, steps_s: FloatArray
) -> tuple[float, float]:
    """Return the mean power in steps that were not held up, and its uncertainty; NaN: unknown."""
    if np.isfinite(steps_s).any():
        usual = steps_s <= HELD_UP * np.nanmedian(steps_s)
        # Those that follow each other are metered together; the last one is never known.
        spans = begins_s[np.flatnonzero(np.diff(usual, prepend=False))].reshape(-1, 2)
    else:  # something lies behind each iteration
        spans = np.stack([begins_s, begins_s + ends_s], axis=1)
    try:
        windows = [meter.window(*span) for span in spans.tolist()]
    except MeterError:
        return _UNKNOWN
    time_s = float(np.diff(spans).sum())
    energy_j = math.fsum(window.energy_j for window in windows)
    return energy_j / time_s, math.hypot(*(window.uncertainty_j for window in windows)) / time_s


def _follows(record: StageRecord, after: StageRecord) -> bool:
    """True if one iteration came right after another: none of another batch, and no pause."""
    return record.followed and (record.number is None or after.number in (None, record.number + 1))


def _stretches(
    record: StageRecord,
    clocks_mhz: Sequence[int],
    kinds: Sequence[int],
    parked: Mapping[int, tuple[int, float]],
    late_s: float,
    tail_s: float,
    until_s: float,
) -> list[Stretch]:
    """List how a stage spent an iteration up to the next one's begin, NaN if that is unknown."""
    spent: list[Stretch] = []
    running = coming = float(clocks_mhz[0])
    last_s = arrives_s = record.begin_s

    def ask(clock_mhz: float) -> None:
        nonlocal coming, arrives_s
        if clock_mhz != coming:
            coming, arrives_s = float(clock_mhz), last_s + late_s

    def spend(end_s: float, kind: int) -> None:
        nonlocal running, last_s
        if running != coming and arrives_s < end_s:
            if arrives_s > last_s:
                spent.append(Stretch(arrives_s, kind, running))
            running = coming
        spent.append(Stretch(end_s, kind, running))
        last_s = end_s

    starts_s, ends_s = record.begin_s + record.start_s, record.begin_s + record.end_s
    units = zip(starts_s.tolist(), ends_s.tolist(), clocks_mhz, kinds, strict=True)
    for position, (start_s, end_s, clock, kind) in enumerate(units):
        if position in parked and start_s > last_s:
            park_mhz, own_after_s = parked[position]
            ask(park_mhz)
            spend(min(last_s + own_after_s, start_s), WAITING)
        ask(clock)
        if start_s > last_s:
            spend(start_s, WAITING)
        if kind >= 0 and end_s > last_s:
            spend(end_s, kind)
    if until_s > last_s:  # not of the last iteration, whose step is not known
        ask(clocks_mhz[0])
        if tail_s:
            spend(min(last_s + tail_s, until_s), TAIL)
        if until_s > last_s:
            spend(until_s, WAITING)
    return spent
