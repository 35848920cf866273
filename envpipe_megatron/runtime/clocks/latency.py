"""How long a change of clock takes on a GPU: the call, and the settling.

No trustworthy table of these times exists; they differ by GPU, by clock and by direction. So short
kernels run back to back while the clock is changed under them: the instant from which on they take
as long as they do in the end is when the new clock runs.

`envpipe clocks measure-latency` and `envpipe prove` call `measure_latency`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, nearest_frequencies
from envpipe_megatron.gpu.clock.controller import spread
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu

#: Shares of the highest clock that are measured where no clocks are named.
_USUAL_SHARES = (1.0, 0.75, 0.5)
#: Kernels of one trace, and of them those that run before the change.
KERNELS = 100
LEAD = 10
#: How long a clock may take to settle, s.
LONGEST_S = 2.0
#: As many kernels in a row take the new time before the clock counts as settled.
_STEADY_KERNELS = 5
#: A kernel takes the new time when it is this close to it, as a share of the whole difference, or
#: of the time if the difference is small.
_CLOSE_OF_DIFFERENCE = 0.25
_CLOSE_OF_TIME = 0.01
#: Kernel times of two clocks that differ by less than this share look alike.
_VISIBLE = 0.03

#: When the driver was called, and when it returned, on the monotonic clock, s.
Instants = tuple[float, float]


@dataclass(frozen=True)
class Trace:
    """Kernels run back to back around a call; all instants on one time base.

    `kernels_s` has start and end of each.
    """

    called_s: float
    returned_s: float
    kernels_s: Sequence[tuple[float, float]]


def measure_latency(
    gpu: Gpu,
    clocks_mhz: Sequence[int] | None,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Change the clock between every two of some clocks, down and up, for a profile's sidecar.

    Clocks are set as a job's, by a guard, so the clock is reset at the end in any case. Raises
    GpuError if a clock is not supported, a job holds the GPU, or there can be no guard;
    EnvPipeError for fewer than two clocks, a back end that fails, or a guard that has ended.

    Args:
        gpu: an emulated one, or the present CUDA device.
        clocks_mhz: None for those near all, 3/4 and 1/2 of the highest.
        repeats: changes for each ordered pair.
        say: gets a line of progress for each pair.

    Returns:
        what a file of format `envpipe-clock-latency/1` holds: `changes` has for each pair the
            `spread` of each value of `analyse`, `frequency_change_s` the median settling of the
            slowest pair, None if no change was seen.
    """
    # It imports torch, which takes long: commands that only name this module do without.
    from envpipe_megatron.runtime.clocks.rank_clock import RankClock

    if clocks_mhz is None:
        known_mhz = gpu.supported_frequencies_mhz
        wanted_mhz = (round(share * max(known_mhz)) for share in _USUAL_SHARES)
        clocks_mhz = [nearest_frequencies(mhz, known_mhz)[-1] for mhz in wanted_mhz]
    clocks = sorted(set(clocks_mhz), reverse=True)
    if len(clocks) < 2:
        raise EnvPipeError(
            "A change of clock needs two different clocks",
            value=list(clocks_mhz),
            remedy="Name two or more.",
        )
    for mhz in clocks:
        gpu.check_supported(mhz)
    timer = EmulatedKernelTimer(gpu) if isinstance(gpu, EmulatedGpu) else CudaKernelTimer()

    def check() -> None:
        if clock.error is not None:
            raise EnvPipeError(
                f"The clock of {gpu.name} cannot be changed any more: {clock.error}",
                remedy="Measure again.",
            )

    def lock(frequency_mhz: int) -> Instants:
        clock.request(frequency_mhz)
        clock.wait_idle()
        check()
        return clock.page.last_call_s

    def change(to_mhz: int) -> dict[str, float | None]:
        """Change the clock and watch until it was seen to settle, at most `LONGEST_S`."""
        traces = [timer.trace(lambda: lock(to_mhz))]
        while True:
            traces.append(timer.trace(lambda: clock.page.last_call_s))
            found = analyse(traces)
            watched_s = traces[-1].kernels_s[-1][1] - traces[0].called_s
            if watched_s > LONGEST_S or found["settling_s"] is not None:
                return found

    changes: dict[tuple[int, int], list[dict[str, float | None]]] = {}
    clock = RankClock(gpu)
    try:
        for high, low in itertools.combinations(clocks, 2):
            say(f"between {high} and {low} MHz")
            both = [(change(low), change(high)) for _ in range(1 + repeats)]
            # The first one is from wherever the clock was.
            changes[high, low], changes[low, high] = map(list, zip(*both[1:], strict=True))
    finally:
        clock.close()
    check()
    return summarise(gpu.name, changes)


def analyse(traces: Sequence[Trace]) -> dict[str, float | None]:
    """Analyse a change: the first trace has the call, the last shows the new clock.

    Returns:
        `call_s`, how long the call took; `settling_s`, from the call until kernels took the new
            time, at most one kernel too long, None if it was not seen.
    """
    called_s = traces[0].called_s
    starts_s, ends_s = np.array([kernel for trace in traces for kernel in trace.kernels_s]).T
    times_s = ends_s - starts_s
    steady_s = float(np.median(times_s[-len(traces[-1].kernels_s) :]))
    before, after = ends_s <= called_s, ends_s > called_s
    before_s = float(np.median(times_s[before])) if before.any() else steady_s
    settled_s = _settled_s(starts_s[after], times_s[after], before_s, steady_s)
    return {
        "call_s": traces[0].returned_s - called_s,
        "settling_s": None if settled_s is None else max(0.0, settled_s - called_s),
    }


def _settled_s(
    starts_s: NDArray[np.float64], times_s: NDArray[np.float64], before_s: float, steady_s: float
) -> float | None:
    """Start of the first of some kernels in a row that take the steady time."""
    difference_s = abs(before_s - steady_s)
    if difference_s < _VISIBLE * steady_s or len(times_s) < _STEADY_KERNELS:
        return None
    close_s = max(_CLOSE_OF_DIFFERENCE * difference_s, _CLOSE_OF_TIME * steady_s)
    close = np.abs(times_s - steady_s) <= close_s
    steady = np.lib.stride_tricks.sliding_window_view(close, _STEADY_KERNELS).all(axis=1)
    return float(starts_s[steady.argmax()]) if steady.any() else None


def summarise(
    gpu: str, changes: dict[tuple[int, int], list[dict[str, float | None]]]
) -> dict[str, Any]:
    """Return the result of `measure_latency`, from the values of each pair's changes."""
    rows: list[dict[str, Any]] = []
    for (from_mhz, to_mhz), found in changes.items():
        row: dict[str, Any] = {"from_mhz": from_mhz, "to_mhz": to_mhz}
        for name in found[0]:
            row[name] = spread(value for one in found if (value := one[name]) is not None)
        rows.append(row)
    settled_s = [row["settling_s"]["median"] for row in rows if row["settling_s"]["count"]]
    return {
        "format": "envpipe-clock-latency/1",
        "gpu": gpu,
        "changes": rows,
        "frequency_change_s": max(settled_s, default=None),
    }


class EmulatedKernelTimer:
    """Short units of an emulated GPU, in its virtual time; calls take none of that."""

    _KERNEL_S = 2e-4

    def __init__(self, gpu: EmulatedGpu) -> None:
        self._gpu = gpu
        gpu.anchor(None)  # the wall clock means nothing here

    def trace(self, call: Callable[[], Instants]) -> Trace:
        """Run `KERNELS` kernels one by one, and call when `LEAD` of them have ended."""
        before = [self._run() for _ in range(LEAD)]
        called_s = self._gpu.committed_end_s()
        call()
        return Trace(called_s, called_s, before + [self._run() for _ in range(KERNELS - LEAD)])

    def _run(self) -> tuple[float, float]:
        return self._gpu.run_unit("forward", self._KERNEL_S, ready_s=0.0)


class CudaKernelTimer:
    """Kernels of the present CUDA device that spin for a number of SM cycles.

    They draw little power, so no power cap hides what the clock does. CUDA events say when they
    ran, counted from an event on the idle stream whose end the host sees within microseconds.
    """

    #: 0.15 ms at 2 GHz.
    _CYCLES = 300_000

    def __init__(self) -> None:
        import torch  # the rest of this module needs none

        self._cuda: Any = torch.cuda
        self._beside = self._cuda.Stream()
        self._base = self._cuda.Event(enable_timing=True)
        self._events = [self._cuda.Event(enable_timing=True) for _ in range(KERNELS + 1)]
        self._spin()  # loads the kernel

    def trace(self, call: Callable[[], Instants]) -> Trace:
        """Launch all kernels, call while they run, and wait until they have ended."""
        self._cuda.synchronize()
        self._base.record()
        while not self._base.query():
            pass
        base_s = time.monotonic()
        self._spin()
        self._events[LEAD].synchronize()
        with self._cuda.stream(self._beside):  # the call comes after what the stream holds
            called_s, returned_s = call()
        self._events[-1].synchronize()
        instants_s = [base_s + self._base.elapsed_time(event) / 1e3 for event in self._events]
        return Trace(called_s, returned_s, list(itertools.pairwise(instants_s)))

    def _spin(self) -> None:
        for event in self._events[:-1]:
            event.record()
            self._cuda._sleep(self._CYCLES)
        self._events[-1].record()
