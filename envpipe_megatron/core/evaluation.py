"""Time and energy of one iteration of any plan: the one evaluator of all planners."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.conditions import Conditions
from envpipe_megatron.core.profile import Profile, at_any_clock
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import LongestPath, Timeline
from envpipe_megatron.errors import EnvPipeError


class PlanError(EnvPipeError):
    """A plan that is not readable, does not fit its profile, or cannot run."""


@dataclass(frozen=True)
class Evaluation:
    """One iteration of a plan.

    Args:
        timeline: has the durations that late clocks leave the units; tails included.
        unit_energy_j: [num_stages, units_per_stage] energy of each unit on one GPU.
        energy_by_stage_j: [num_stages] energy of units, waiting and clock changes on all GPUs of
            each stage.
        clock_changes: [num_stages] changes of clock on one GPU of each stage, the one into the next
            iteration included.
    """

    timeline: Timeline
    unit_energy_j: FloatArray
    energy_by_stage_j: FloatArray
    clock_changes: IntArray


def evaluate(
    schedule: Schedule,
    frequency_mhz: IntArray,
    profile: Profile,
    conditions: Conditions,
    park_mhz: IntArray | None = None,
) -> Evaluation:
    """Return time and energy of one iteration in steady state, each iteration like the next.

    A stage's energy is that of its units plus that of waiting through the rest of the iteration,
    for as many GPUs as it has.

    *Late clocks.* A unit's clock is requested when the unit before it on its stage has ended, if it
    differs from the clock requested last, and runs `change_time_s` later. A unit that starts `d`
    before that, at a clock that gives it t_old and e_old instead of t_new and e_new, runs at the
    old clock only if d >= t_old, and otherwise takes `d + (1 - d/t_old) t_new` and `d/t_old e_old
    + (1 - d/t_old) e_new`. The old clock is the last one whose change has arrived; a request that
    has not arrived when the next one is made is dropped. Where the old clock was not profiled for
    the unit, `profile.at_any_clock` says what it takes. The first unit's clock was requested at the
    end of the last iteration and is never late. A late unit is thus always a convex mixture of
    profiled points of its part and kind, or takes more, so a lower bound over their convex hull
    holds for it too.

    *Waiting* is billed at the clock that was requested for the unit that follows, from the moment
    of the request; the wait after the last unit, tail included, at the clock of the first unit.

    *Parking.* Where `park_mhz` is above 0, the clock is lowered to that value as soon as the unit
    before has ended, and raised so that the unit's clock runs when the unit starts: it is never
    late. The wait less two changes is billed at the parked clock, the changes at the unit's clock.
    Parking at a stage's first unit takes its wait and the wait after the stage's last unit as the
    one bubble that they are in steady state.

    *Changes* of clock are counted around the iteration, from each clock asked for to the next,
    parked ones among them.

    Args:
        frequency_mhz: [num_stages, units_per_stage].
        profile: has the schedule's number of chunks.
        park_mhz: [num_stages, units_per_stage] the clock to park at in the wait before a unit, 0
            for none. Needs waiting power by clock.

    Raises:
        PlanError: parking in a wait that two changes of clock fill, or without a curve of waiting
            power.
        ProfileError: a frequency that was not profiled.
    """
    if park_mhz is not None and not park_mhz.any():
        park_mhz = None
    if park_mhz is not None and conditions.wait_power_w is None:
        raise PlanError(
            "'park_mhz' needs the waiting power by clock: without it parking saves nothing",
            remedy="Give wait_power_w, or plan without parking.",
        )
    if conditions.change_time_s:
        time_s, energy_j = _durations_with_late_clocks(schedule, frequency_mhz, profile, conditions)
    else:
        time_s, energy_j = profile.lookup(schedule, frequency_mhz)
    timeline = Timeline(schedule, time_s, conditions.latency_s, conditions.tail_by_stage_s)
    asked_mhz = clock_requests(frequency_mhz, park_mhz)
    changes = np.count_nonzero(asked_mhz != np.roll(asked_mhz, 1, axis=1), axis=1)
    if conditions.wait_power_w is None:  # then the total wait is enough
        wait_s = timeline.iteration_time_s - timeline.duration_s.sum(axis=1)
        waiting_j = np.array(conditions.blocking_power_w) * wait_s
    else:
        waiting_j = waiting_energy_j(timeline, frequency_mhz, conditions, park_mhz).sum(axis=1)
    by_stage_j = energy_j.sum(axis=1) + waiting_j + conditions.change_energy_j * changes
    return Evaluation(timeline, energy_j, conditions.gpus_by_stage * by_stage_j, changes)


def waiting_energy_j(
    timeline: Timeline,
    frequency_mhz: IntArray,
    conditions: Conditions,
    park_mhz: IntArray | None = None,
) -> FloatArray:
    """Return [num_stages, units_per_stage] the energy, J, of one GPU in the wait before each unit.

    Waits are `Timeline.wait_s`, and priced as `evaluate` says; PlanError as there.
    """
    wait_s = timeline.wait_s
    power_w = conditions.waiting_power_w(frequency_mhz)
    waiting_j: FloatArray = power_w * wait_s
    if park_mhz is not None:
        parked = park_mhz > 0
        parked_s = np.where(parked, wait_s - 2 * conditions.change_time_s, 0.0)
        short = np.flatnonzero(parked & (parked_s <= 0)).tolist()
        if short:
            raise PlanError(
                f"'park_mhz' parks before {timeline.schedule.describe(short[0])}, where two "
                "changes of clock do not fit into the wait (s)",
                value=float(wait_s.ravel()[short[0]]),
                remedy="Park only in waits longer than two changes.",
            )
        waiting_j += (conditions.waiting_power_w(park_mhz) - power_w) * parked_s
    return waiting_j


def clock_requests(frequency_mhz: IntArray, park_mhz: IntArray | None) -> IntArray:
    """Return [num_stages, 2 * units_per_stage] the clocks asked for before each unit, MHz.

    First that of the wait, which is the unit's own where nothing parks in it, then the unit's.
    """
    in_wait_mhz = frequency_mhz
    if park_mhz is not None:
        in_wait_mhz = np.where(park_mhz > 0, park_mhz, frequency_mhz)
    return np.stack([in_wait_mhz, frequency_mhz], axis=2).reshape(len(frequency_mhz), -1)


def _durations_with_late_clocks(
    schedule: Schedule,
    frequency_mhz: IntArray,
    profile: Profile,
    conditions: Conditions,
) -> tuple[FloatArray, FloatArray]:
    """Return [num_stages, units_per_stage] times and energies of units where clocks come late.

    Starts decide who is late and durations decide starts: one pass, each unit after those it
    depends on. Parking needs no word here: a wait that two changes fit into hides one.
    """
    shape, width = frequency_mhz.shape, schedule.units_per_stage
    times, energies = profile.lookup(schedule, frequency_mhz)
    path = LongestPath(schedule, times.ravel().tolist(), conditions.latency_s)
    time_s, end_s = path.duration_s, path.end_s
    energy_j: list[float] = energies.ravel().tolist()
    wanted: list[int] = frequency_mhz.ravel().tolist()
    keys: list[int] = profile.keys(schedule).ravel().tolist()
    change_s = conditions.change_time_s
    running = [wanted[stage * width] for stage in range(schedule.num_stages)]
    requested = running.copy()
    arrival_s = [0.0] * schedule.num_stages  # of the clock requested last

    @cache
    def at_clock(key: int, frequency_mhz: int) -> tuple[float, float]:
        unit_s, unit_j = at_any_clock(profile.curves[key], frequency_mhz)
        return float(unit_s), float(unit_j)

    for node in path.order:
        stage = node // width
        start_s = path.start_s(node)
        clock = wanted[node]
        if arrival_s[stage] <= end_s[node - 1]:
            running[stage] = requested[stage]
        if clock != requested[stage]:  # never of a first unit
            requested[stage], arrival_s[stage] = clock, end_s[node - 1] + change_s
        late_s = arrival_s[stage] - start_s
        if late_s > 0 and running[stage] != clock:
            old_s, old_j = at_clock(keys[node], running[stage])
            old_share = min(1.0, late_s / old_s)
            time_s[node] = old_share * old_s + (1 - old_share) * time_s[node]
            energy_j[node] = old_share * old_j + (1 - old_share) * energy_j[node]
        end_s[node] = start_s + time_s[node]
    return np.array(time_s).reshape(shape), np.array(energy_j).reshape(shape)
