"""What stands in for CUDA where there is none: the host's own time."""

import time
from itertools import pairwise

import numpy as np

from envpipe_megatron.runtime.clocks.latency import KERNELS, LEAD, Trace
from envpipe_megatron.runtime.execution.executor import Executor, StageRecord, always


def make_record(starts_s, ends_s, begin_s, iteration_time_s):
    """Make a record from starts and ends relative to the start of the iteration."""
    return StageRecord(np.array(starts_s), np.array(ends_s), begin_s, iteration_time_s)


class HostExecutor(Executor):
    """Units whose work is over when its Python is; a wait for a meter lasts."""

    def begin_iteration(self, schedule, stage):
        self._begin_s = time.monotonic()
        self._starts, self._ends = [], []

    def begin_unit(self):
        self._starts.append(time.monotonic() - self._begin_s)
        return always

    def end_unit(self):
        self._ends.append(time.monotonic() - self._begin_s)
        return always

    def in_wait(self, after_s):
        return after_s

    def end_iteration(self, check):
        times_s = self._starts, self._ends, self._begin_s, self._ends[-1]
        return lambda: make_record(*times_s)

    def now_s(self):
        return time.monotonic()

    def idle(self, time_s):
        time.sleep(time_s)


class HostKernelTimer:
    """Kernels that take no time."""

    def trace(self, call):
        instants_s = [time.monotonic() for _ in range(LEAD)]
        called_s, returned_s = call()
        instants_s += [time.monotonic() for _ in range(KERNELS - LEAD)]
        return Trace(called_s, returned_s, list(pairwise(instants_s)))
