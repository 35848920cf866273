"""Times of units in both orders: what those of 1F1B predict of EnvPipe's, and whether they change.

Each rank of a ratio's job keeps when its units began and ended (`entry.Recorder`); `median_times`
is what stays of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from benchmarks.megatron_lm.models import ENVPIPE, IN_PLACE, ONE_F_ONE_B
from envpipe_megatron.core.arrays import FloatArray, IntArray
from envpipe_megatron.core.schedule import Schedule
from envpipe_megatron.core.timeline import Timeline


def median_times(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Medians over iterations, of ranks that are the stages of one pipeline; None if none is known.

    An iteration lasts from its first unit's start to its last unit's end, over all stages; starts
    and ends of units count from there.
    """
    count = min((len(rank["times"]) for rank in ranks), default=0)
    if not count:
        return None
    columns = [zip(*rank["times"][:count], strict=True) for rank in ranks]
    begins_s, starts_s, ends_s = (np.array(each) for each in zip(*columns, strict=True))
    starts_s, ends_s = (begins_s[:, :, None] + each for each in (starts_s, ends_s))
    zero_s = starts_s.min(axis=(0, 2))[None, :, None]
    return {
        "iterations": count,
        "iteration_s": float(np.median((ends_s - zero_s).max(axis=(0, 2)))),
        "units": [rank["executed"] for rank in ranks],
        "start_s": np.median(starts_s - zero_s, axis=1).round(7).tolist(),
        "end_s": np.median(ends_s - zero_s, axis=1).round(7).tolist(),
        "unit_s": np.median(ends_s - starts_s, axis=1).round(7).tolist(),
    }


def prediction_rows(
    times: dict[str, dict[str, Any]], schedules: dict[str, Schedule]
) -> list[dict[str, Any]]:
    """Each arm's iteration as the times of 1F1B's units predict it, beside what was measured.

    A unit takes the median of its kind on its stage, of 1F1B with backwards split in place if the
    arm splits them, and a message what 1F1B's took.
    """
    latency_s = latencies_s(schedules[ONE_F_ONE_B], times[ONE_F_ONE_B])
    rows = []
    for arm, schedule in schedules.items():
        source = IN_PLACE if schedule.split else ONE_F_ONE_B
        if source not in times:
            continue
        kind_s = kind_times_s(schedules[source], times[source])
        unit_s = np.take_along_axis(kind_s, _kinds(schedule), axis=1)
        predicted_s = Timeline(schedule, unit_s, latency_s).iteration_time_s
        measured_s = times[arm]["iteration_s"]
        rows.append(
            {
                "order": arm,
                "iterations": times[arm]["iterations"],
                "planned order": times[arm]["units"] == schedule.labels(),
                "measured (s)": measured_s,
                "predicted (s)": predicted_s,
                "error (%)": 100 * (predicted_s / measured_s - 1),
                "messages (us)": ", ".join(f"{1e6 * hop_s:.0f}" for hop_s in latency_s),
            }
        )
    return rows


def unit_rows(
    times: dict[str, dict[str, Any]], schedules: dict[str, Schedule]
) -> list[dict[str, Any]]:
    """How long forwards and backwards of each stage take in both orders."""
    plain, own = (kind_times_s(schedules[arm], times[arm]) for arm in (ONE_F_ONE_B, ENVPIPE))
    return [
        {
            "stage": stage,
            **{
                column: value
                for kind, one_s, other_s in zip(("F", "B"), plain[stage], own[stage], strict=True)
                for column, value in (
                    (f"{kind}, 1F1B (ms)", 1e3 * one_s),
                    (f"{kind}, EnvPipe (ms)", 1e3 * other_s),
                    (f"{kind} longer (%)", 100 * (other_s / one_s - 1)),
                )
            },
        }
        for stage in range(len(plain))
    ]


def kind_times_s(schedule: Schedule, times: dict[str, Any]) -> FloatArray:
    """[num_stages, num_kinds] the median unit of each kind."""
    unit_s, kinds = np.array(times["unit_s"]), range(len(schedule.unit_kinds))
    return np.array(
        [
            [median(units_s[of == kind]) for kind in kinds]
            for units_s, of in zip(unit_s, _kinds(schedule), strict=True)
        ]
    )


def _kinds(schedule: Schedule) -> IntArray:
    """[num_stages, units_per_stage] the place of each unit's kind among the schedule's."""
    return schedule.places.astype(np.int64) // (schedule.num_microbatches * schedule.num_chunks)


def latencies_s(schedule: Schedule, times: dict[str, Any]) -> list[float]:
    """How long after a unit's end the unit that waits for its message begins, for each boundary.

    The least of each direction, and the mean of both, in which what clocks differ by is no more.
    """
    shape = schedule.num_stages, schedule.units_per_stage
    start_s, end_s = np.array(times["start_s"]), np.array(times["end_s"]).ravel()
    source = schedule.cross_dependency.reshape(shape)
    hop_s = np.where(source >= 0, start_s - end_s[source], np.inf)
    forward_s = np.where(schedule.is_backward, np.inf, hop_s).min(axis=1)[1:]
    backward_s = np.where(schedule.is_backward, hop_s, np.inf).min(axis=1)[:-1]
    return [
        max(0.0, float(one + other) / 2) for one, other in zip(forward_s, backward_s, strict=True)
    ]
