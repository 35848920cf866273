"""What stands in for CUDA where GPUs are those of the fake NVML library: the host's own time."""

from __future__ import annotations

import time
from itertools import pairwise

from envpipe_megatron.runtime.clocks.latency import KERNELS, LEAD, Trace
from envpipe_megatron.runtime.execution.completion import Done
from envpipe_megatron.runtime.execution.executor import make_record


class HostExecutor:
    """Units run on the host, one after the other."""

    def begin_iteration(self, schedule, stage):
        self._begin_s = time.monotonic()
        self._starts_s, self._ends_s = [], []

    def begin_unit(self):
        self._starts_s.append(time.monotonic() - self._begin_s)
        return Done()

    def end_unit(self):
        self._ends_s.append(time.monotonic() - self._begin_s)
        return Done()

    def in_wait(self, after_s):
        return Done()

    def end_iteration(self):
        wall_s = time.monotonic() - self._begin_s
        record = make_record(self._starts_s, self._ends_s, self._begin_s, self._ends_s[-1], wall_s)
        return lambda: record

    def now_s(self):
        return time.monotonic()

    meet = now_s

    def wait_for_messages(self):
        pass

    def idle(self, time_s):
        time.sleep(time_s)

    def wait_no_more(self):
        pass


class HostKernelTimer:
    """Kernels that take no time."""

    def trace(self, call, look):
        instants_s = [time.monotonic() for _ in range(LEAD)]
        called_s = time.monotonic()
        call()
        returned_s = time.monotonic()
        looks = [(time.monotonic(), look())]
        instants_s += [time.monotonic() for _ in range(KERNELS - LEAD)]
        return Trace(called_s, returned_s, list(pairwise(instants_s)), looks)
