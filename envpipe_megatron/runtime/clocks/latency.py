"""How long a change of clock takes on a GPU: the call, the settling, the first kernel after it.

No trustworthy table of these times exists; they differ by GPU, by clock and by direction. So short
kernels run back to back while the clock is changed under them: the instant from which on they take
as long as they do in the end is when the new clock runs. What the driver says of the clock is
looked at meanwhile, and told apart.
"""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from envpipe_megatron.errors import EnvPipeError
from envpipe_megatron.gpu.base import Gpu, nearest_frequencies
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.guard.client import GuardEvent, hold_gpu
from envpipe_megatron.runtime.clocks.controller import spread

#: Kernels of one trace, and of them those that run before the change.
KERNELS = 100
LEAD = 10

#: How long a clock may take to settle, s.
LONGEST_S = 2.0

#: So many kernels in a row take the new time before the clock counts as settled.
_STEADY_KERNELS = 5

#: A kernel takes the new time when it is this close to it, as a share of the whole difference, or
#: of the time where the difference is small.
_CLOSE_OF_DIFFERENCE = 0.25
_CLOSE_OF_TIME = 0.01

#: Kernel times of two clocks that differ by less than this share cannot be told apart.
_VISIBLE = 0.03

#: The driver may show a clock one step of its table off.
_STEP_MHZ = 15


class ClockLatencyError(EnvPipeError):
    """The latency of this GPU's clock cannot be measured."""


@dataclass(frozen=True)
class Trace:
    """Kernels run back to back around a call; all instants in s on one time base.

    Args:
        called_s: when the call began.
        returned_s: when it returned.
        kernels_s: start and end of each kernel.
        looks: what the driver said of the clock after the call: when it had said it, and MHz.
    """

    called_s: float
    returned_s: float
    kernels_s: Sequence[tuple[float, float]]
    looks: Sequence[tuple[float, int]]


class KernelTimer(Protocol):
    """Runs short kernels of equal work, whose time follows the SM clock."""

    def trace(self, call: Callable[[], None], look: Callable[[], int]) -> Trace:
        """Run `KERNELS` kernels, and call when `LEAD` of them have ended."""


@dataclass(frozen=True)
class Change:
    """One change of clock; times in s, None where it could not be seen.

    Args:
        call_s: how long the call took.
        settling_s: from the call until kernels took the new time; at most one kernel too long.
        shown_s: from the call until the driver said that the new clock runs.
        first_kernel_ratio: time of the first kernel that began after the call had returned, over
            the time that kernels take at the new clock.
    """

    call_s: float
    settling_s: float | None
    shown_s: float | None
    first_kernel_ratio: float


def measure_changes(
    gpu: Gpu,
    timer: KernelTimer,
    clocks_mhz: Sequence[int],
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
    lock: Callable[[int], None] | None = None,
) -> dict[tuple[int, int], list[Change]]:
    """Change the clock between every two of some clocks, down and up; it is reset at the end.

    Args:
        gpu: whose clock is changed; held by the caller.
        timer: runs kernels on that GPU.
        clocks_mhz: at least two supported clocks.
        repeats: changes for each ordered pair.
        say: told of progress.
        lock: locks the clock, by default the GPU's own `lock_frequency`.

    Returns:
        the changes of each pair (from, to) in MHz.

    Raises:
        GpuError: the back end failed or refused; the clock is reset all the same.
        ClockLatencyError: fewer than two different clocks, or one that the GPU does not support.
    """
    clocks = _checked(gpu, clocks_mhz)
    change = partial(_change, gpu, timer, lock or gpu.lock_frequency, _seen)
    begin = partial(_change, gpu, timer, lock or gpu.lock_frequency, _shown)
    changes: dict[tuple[int, int], list[Change]] = {}
    try:
        for high, low in itertools.combinations(clocks, 2):
            say(f"between {high} and {low} MHz")
            begin(high)  # from wherever it is: kernels need not show a change
            down, up = changes.setdefault((high, low), []), changes.setdefault((low, high), [])
            for _ in range(repeats):
                down.append(change(low))
                up.append(change(high))
    finally:
        gpu.reset_frequency()
    return changes


def _checked(gpu: Gpu, clocks_mhz: Sequence[int]) -> list[int]:
    """The clocks, highest first, each once."""
    clocks = sorted(set(clocks_mhz), reverse=True)
    if len(clocks) < 2:
        raise ClockLatencyError(
            "A change of clock needs two different clocks",
            value=list(clocks_mhz),
            remedy="Name two or more.",
        )
    for clock in clocks:
        if clock not in gpu.supported_frequencies_mhz:
            near = nearest_frequencies(clock, gpu.supported_frequencies_mhz)
            raise ClockLatencyError(
                f"{gpu.name} cannot run at this SM clock in MHz",
                value=clock,
                remedy=f"Nearest supported: {', '.join(map(str, near))}.",
            )
    return clocks


def _seen(change: Change) -> bool:
    return change.settling_s is not None and change.shown_s is not None


def _shown(change: Change) -> bool:
    return change.shown_s is not None


def _change(
    gpu: Gpu,
    timer: KernelTimer,
    lock: Callable[[int], None],
    enough: Callable[[Change], bool],
    to_mhz: int,
) -> Change:
    """Change the clock once and watch until enough was seen, at most `LONGEST_S`."""

    def look() -> int:
        return gpu.observed_frequency_mhz

    traces = [timer.trace(lambda: lock(to_mhz), look)]
    while True:
        traces.append(timer.trace(lambda: None, look))
        change = analyse(traces, to_mhz)
        watched_s = traces[-1].kernels_s[-1][1] - traces[0].called_s
        if enough(change) or watched_s > LONGEST_S:
            return change


def measure_guarded(
    gpu: Gpu,
    timer: KernelTimer,
    clocks_mhz: Sequence[int],
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> dict[tuple[int, int], list[Change]]:
    """As `measure_changes`, while a guard looks after the GPU: the clock comes back in any case.

    Raises:
        LeaseHeldError: a job holds the GPU.
        GuardError: there can be no guard, or it did not bring the clock back.
        ClockLatencyError: the guard ended in the middle.
    """
    _checked(gpu, clocks_mhz)  # before a guard is started for it
    ended = threading.Event()
    locking = threading.Lock()

    def on_event(event: GuardEvent) -> None:
        if event is not GuardEvent.WAS_RESET:
            with locking:  # when this returns, nothing is locked any more
                ended.set()

    def lock(frequency_mhz: int) -> None:
        with locking:
            if ended.is_set():
                raise ClockLatencyError(
                    "The guard has ended, so no clock is locked any more",
                    remedy="Measure again.",
                )
            gpu.lock_frequency(frequency_mhz)

    hold = hold_gpu(gpu.address, f"measure-latency-{os.getpid()}", on_event=on_event)
    try:
        return measure_changes(gpu, timer, clocks_mhz, repeats, say, lock)
    finally:
        hold.release()


def analyse(traces: Sequence[Trace], to_mhz: int) -> Change:
    """What traces say of a change: the call is the first one's, the last tell the new clock.

    Args:
        traces: around the change, and what ran after it, in order.
        to_mhz: the new clock.
    """
    called_s, returned_s = traces[0].called_s, traces[0].returned_s
    kernels = [kernel for trace in traces for kernel in trace.kernels_s]
    before_s = [end - start for start, end in kernels if end <= called_s]
    steady_s = statistics.median(end - start for start, end in traces[-1].kernels_s)
    first_s = next(end - start for start, end in kernels if start >= returned_s)
    looks = (look for trace in traces for look in trace.looks)
    shown_s = next((at_s for at_s, mhz in looks if abs(mhz - to_mhz) <= _STEP_MHZ), None)
    settled_s = _settled_s(
        [kernel for kernel in kernels if kernel[1] > called_s],
        statistics.median(before_s) if before_s else steady_s,
        steady_s,
    )
    return Change(
        call_s=returned_s - called_s,
        settling_s=None if settled_s is None else max(0.0, settled_s - called_s),
        shown_s=None if shown_s is None else shown_s - called_s,
        first_kernel_ratio=first_s / steady_s,
    )


def _settled_s(
    kernels: Sequence[tuple[float, float]], before_s: float, steady_s: float
) -> float | None:
    """Start of the first of some kernels in a row that take the steady time."""
    difference_s = abs(before_s - steady_s)
    if difference_s < _VISIBLE * steady_s:
        return None
    close_s = max(_CLOSE_OF_DIFFERENCE * difference_s, _CLOSE_OF_TIME * steady_s)
    run = 0
    for number, (start_s, end_s) in enumerate(kernels):
        run = run + 1 if abs(end_s - start_s - steady_s) <= close_s else 0
        if run == _STEADY_KERNELS:
            return kernels[number - run + 1][0]
    return None


@dataclass(frozen=True)
class ClockLatency:
    """The latency of a GPU's clock, for a file and for planning.

    Args:
        gpu: the product's name.
        changes: for each pair `from_mhz`, `to_mhz`, and of `call_s`, `settling_s`, `shown_s` and
            `first_kernel_ratio` the median, 99th percentile, maximum and count.
        frequency_change_s: for the sidecar of a profile: the median settling of the slowest pair,
            None where no change was seen.
    """

    gpu: str
    changes: list[dict[str, Any]]
    frequency_change_s: float | None

    def to_json(self) -> dict[str, Any]:
        """As a file holds it."""
        return {"format": "envpipe-clock-latency/1", **asdict(self)}


def summarise(gpu: Gpu, changes: dict[tuple[int, int], list[Change]]) -> ClockLatency:
    """Medians and 99th percentiles of measured changes."""
    rows: list[dict[str, Any]] = []
    for (from_mhz, to_mhz), measured in changes.items():
        row: dict[str, Any] = {"from_mhz": from_mhz, "to_mhz": to_mhz}
        for name in ("call_s", "settling_s", "shown_s", "first_kernel_ratio"):
            values = [getattr(change, name) for change in measured]
            row[name] = spread(value for value in values if value is not None)
        rows.append(row)
    settled = [row["settling_s"]["median"] for row in rows if row["settling_s"]["count"]]
    return ClockLatency(gpu.name, rows, max(settled, default=None))


class EmulatedKernelTimer:
    """Short units of an emulated GPU, in its virtual time; calls take none of that.

    Args:
        gpu: the GPU; it does nothing else meanwhile.
        kernel_s: how long a kernel takes at the maximum clock.
    """

    def __init__(self, gpu: EmulatedGpu, kernel_s: float = 2e-4) -> None:
        self._gpu = gpu
        self._kernel_s = kernel_s
        gpu.anchor(None)  # the wall clock means nothing here

    def trace(self, call: Callable[[], None], look: Callable[[], int]) -> Trace:
        """Run the kernels one by one, looking at the clock after each."""
        kernels = [self._run() for _ in range(LEAD)]
        called_s = self._gpu.committed_end_s()
        call()
        looks = []
        for _ in range(KERNELS - LEAD):
            kernels.append(self._run())
            looks.append((kernels[-1][1], look()))
        return Trace(called_s, called_s, kernels, looks)

    def _run(self) -> tuple[float, float]:
        run = self._gpu.run_unit("forward", self._kernel_s, ready_s=0.0)
        return run.start_s, run.end_s


class CudaKernelTimer:
    """Kernels of the present CUDA device that spin for a number of SM cycles.

    They draw little power, so no power cap hides what the clock does. CUDA events say when they
    ran, on the GPU's clock; an event on an idle stream, which ends between two readings of the
    host's clock, ties the two together.
    """

    #: 0.15 ms at 2 GHz.
    _CYCLES = 300_000
    _TIES = 50

    def __init__(self) -> None:
        import torch  # the rest of this module needs none

        self._cuda = torch.cuda
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        self._events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            for _ in range(KERNELS + 1)
        ]
        self._spin(self._events)  # loads the kernel
        torch.cuda.synchronize()

    def trace(self, call: Callable[[], None], look: Callable[[], int]) -> Trace:
        """Launch all kernels, call while they run, and look at the clock until they have ended."""
        self._cuda.synchronize()
        self._base.record()
        behind_s = self._host_minus_gpu_s()
        self._spin(self._events)
        self._events[LEAD].synchronize()
        called_s = time.monotonic()
        call()
        returned_s = time.monotonic()
        looks = []
        last_ended: Callable[[], bool] = self._events[-1].query
        while not last_ended():
            mhz = look()
            looks.append((time.monotonic(), mhz))
        instants_s = [behind_s + self._base.elapsed_time(event) / 1e3 for event in self._events]
        return Trace(called_s, returned_s, list(itertools.pairwise(instants_s)), looks)

    def _spin(self, events: list[Any]) -> None:
        spin: Callable[[int], None] = self._cuda._sleep
        for event in events[:-1]:
            event.record()
            spin(self._CYCLES)
        events[-1].record()

    def _host_minus_gpu_s(self) -> float:
        """What to add to the time since `_base` for the host's clock: the middle of its bounds."""
        low_s, high_s, event = float("-inf"), float("inf"), self._events[0]
        ended: Callable[[], bool] = event.query
        for _ in range(self._TIES):
            before_s = time.monotonic()
            event.record()
            while not ended():
                pass
            after_s = time.monotonic()
            gpu_s = self._base.elapsed_time(event) / 1e3
            low_s, high_s = max(low_s, before_s - gpu_s), min(high_s, after_s - gpu_s)
        return (low_s + high_s) / 2
