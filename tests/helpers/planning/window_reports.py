"""Reports of windows without waits and powers."""

import numpy as np

from envpipe_megatron.core.arrays import FloatArray
from envpipe_megatron.tuning.commands import Report, Window
from envpipe_megatron.tuning.measured.powers import Sums
from envpipe_megatron.tuning.measured.store import Store


def report_of(
    unit_s: FloatArray, ends_s: FloatArray, steps_s: FloatArray, meter: Sums | None = None
) -> Report:
    """A report of some replicas whose units never waited; by default no meter saw them."""
    replicas, iterations = ends_s.shape
    waits_s = np.zeros((replicas, iterations, unit_s.shape[1]))
    power_w = np.full((replicas, 2), np.nan)
    meter = np.zeros((3, 3)) if meter is None else meter
    return Report(unit_s, ends_s, steps_s, waits_s, meter, power_w)


def iteration(store: Store, unit_s: FloatArray) -> Window:
    """One iteration of one replica, [num_stages, units_per_stage], that nothing followed."""
    unknown, meter = np.full((1, 1), np.nan), np.zeros_like(store.powers.sums[0])
    return Window(
        tuple(
            report_of(row[np.newaxis], np.full((1, 1), row.sum()), unknown, meter) for row in unit_s
        )
    )
