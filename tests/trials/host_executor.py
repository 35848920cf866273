"""What stands in for CUDA where GPUs are those of the fake NVML library: the host's own time."""

import time
from itertools import pairwise

from benchmarks.overhead import host
from envpipe_megatron.runtime.clocks.latency import KERNELS, LEAD, Trace


class HostExecutor(host.HostExecutor):
    """Units run on the host, one after the other; a wait for a meter lasts."""

    def in_wait(self, after_s):
        return after_s

    def idle(self, time_s):
        time.sleep(time_s)


class HostKernelTimer:
    """Kernels that take no time."""

    def trace(self, call):
        instants_s = [time.monotonic() for _ in range(LEAD)]
        called_s, returned_s = call()
        instants_s += [time.monotonic() for _ in range(KERNELS - LEAD)]
        return Trace(called_s, returned_s, list(pairwise(instants_s)))
