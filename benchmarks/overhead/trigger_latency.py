"""How soon after a unit's end the clock request for the next unit reaches the back end.

A training thread launches units as fast as it can; behind each it asks for another clock of a dry
run, which notes the instant of its lock. On a GPU, CUDA events say when units ended. To bring them
to the host's clock: an event recorded on an idle stream ends after its recording was called and
before a query finds it ended, which bounds the difference of the two clocks on both sides. The
tightest bounds of many, before and after, give the difference, its drift and the error. Without a
GPU, a second process ends the units and notes when it did.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import multiprocessing
import os
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.null_gpu import NullGpu
from envpipe_megatron.core.orders import builders
from envpipe_megatron.gpu.clock import controller as clock_controller
from envpipe_megatron.gpu.clock.completion import Completion
from envpipe_megatron.gpu.clock.controller import ClockController, spread
from envpipe_megatron.runtime.execution import executor as executor_module
from envpipe_megatron.runtime.execution.executor import CudaExecutor

#: A stage alone runs a forward and a backward of each.
MICROBATCHES = 8
UNITS = 2 * MICROBATCHES
CLOCKS_MHZ = tuple(range(1980, 330, -15))
CALIBRATION_EVENTS = 200
WARM_UP_ITERATIONS = 4
INTERVALS_S = (5e-3, 5e-4, 1e-4)


class StampingGpu(NullGpu):
    """It notes the instant of each lock (ns) and its clock."""

    def __init__(self) -> None:
        super().__init__(CLOCKS_MHZ)
        self.entered: list[tuple[int, int]] = []

    def _lock(self, frequency_mhz: int) -> None:
        self.entered.append((time.monotonic_ns(), frequency_mhz))
        super()._lock(frequency_mhz)


def measure(device: CudaDevice | StandIn, interval_s: float, seconds: float) -> dict[str, Any]:
    """Run units for some time at one switch interval.

    Gives times in microseconds: `trigger_us` from a unit's end to the lock, and `cost_us`, what the
    training thread pays a unit.
    """
    clock_controller.SWITCH_INTERVAL_S = interval_s
    gpu = StampingGpu()
    device.begin()
    clock = ClockController(gpu, on_start=executor_module.same_device())
    ends_ns: list[float] = []
    requests: list[tuple[int, int]] = []  # unit, clock
    costs_ns: list[int] = []
    stop_ns, iteration = time.monotonic_ns() + int(seconds * 1e9), 0
    now = time.perf_counter_ns
    while time.monotonic_ns() < stop_ns:
        device.begin_iteration()
        for position in range(UNITS):
            before = now()
            device.begin_unit()
            begun = now()
            device.launch(position)
            launched = now()
            unit = iteration * UNITS + position
            frequency = CLOCKS_MHZ[unit % len(CLOCKS_MHZ)]
            clock.request(frequency, device.end_unit())
            asked = now()
            requests.append((unit, frequency))
            if iteration >= WARM_UP_ITERATIONS:
                costs_ns.append(begun - before + asked - launched)
        ends_ns += device.end_iteration()
        iteration += 1
    clock.wait_idle()
    clock.close()
    to_host, error_ns = device.finish()
    latencies_ns = [
        entered_ns - to_host(ends_ns[unit])
        for unit, entered_ns in _matched(requests, gpu.entered)
        if unit >= WARM_UP_ITERATIONS * UNITS
    ]
    return {
        "units": len(ends_ns),
        "coalesced": clock.coalesced,
        "trigger_us": _us(latencies_ns),
        "clock_error_us": error_ns / 1e3,
        "cost_us": _us(costs_ns),
    }


def _matched(
    requests: list[tuple[int, int]], entered: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Unit and lock's instant of each request that was applied.

    They are applied in order, some are dropped as stale, and neighbours ask for different clocks.
    """
    found = []
    rest = iter(requests)
    for entered_ns, frequency in entered:
        for unit, wanted in rest:
            if wanted == frequency:
                found.append((unit, entered_ns))
                break
    return found


def _us(values_ns: Iterable[float]) -> dict[str, float | int]:
    return {
        name: value if name == "count" else round(value / 1e3, 2)
        for name, value in spread(values_ns).items()
    }


class CudaDevice:
    """The current GPU, running the layers of a GPT under the runtime's own executor.

    Kinds: `gpt`, whose units the GPU takes longer for than the host; `small`, whose kernels are so
    short that the GPU waits for launches all the time; `python`, as `gpt`, but the training thread
    burns bytecode between launches, as long as the GPU computes.
    """

    def __init__(self, kind: str) -> None:
        hidden, sequence, layers = (512, 256, 20) if kind == "small" else (4096, 2048, 2)
        # Layers of many small launches, as frameworks make them.
        made = (
            nn.TransformerEncoderLayer(hidden, hidden // 128, 4 * hidden, 0.0, norm_first=True)
            for _ in range(layers)
        )
        self._layers = nn.ModuleList(made).cuda().bfloat16()
        self._input = torch.randn(
            sequence, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        self._schedule = builders.one_f_one_b(1, MICROBATCHES)
        self._executor = CudaExecutor()
        self._completions: list[Any] = []
        self._busy_s = 0.0
        for _ in range(3):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            for position in range(UNITS):
                self.launch(position)
            torch.cuda.synchronize()
        if kind == "python":
            # Less than the GPU takes: how far ahead the launches are changes from unit to unit.
            self._busy_s = 0.9 * (time.perf_counter() - begin_s) / UNITS

    def begin(self) -> None:
        """Calibrate the GPU's clock a first time."""
        torch.cuda.synchronize()
        self._base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        self._base.record()
        self._base.synchronize()
        self._before = self._offset_bounds_ns()

    def begin_iteration(self) -> None:
        """As the interpreter does."""
        self._completions = []
        self._executor.begin_iteration(self._schedule, 0)

    def begin_unit(self) -> None:
        """As the interpreter does."""
        self._executor.begin_unit()

    def launch(self, position: int) -> None:
        """A forward or the backward of it."""
        begin_s = time.perf_counter()
        if position % 2 == 0:
            hidden = self._input
            for layer in self._layers:
                hidden = layer(hidden)
            self._output = hidden.float().mean()
        else:
            self._output.backward()  # type: ignore[no-untyped-call]  # torch's
            self._layers.zero_grad()
        _burn_until(begin_s + self._busy_s)

    def end_unit(self) -> Completion:
        """As the interpreter does."""
        completion = self._executor.end_unit()
        self._completions.append(completion)
        return completion

    def end_iteration(self) -> list[float]:
        """As the interpreter does, and keep the ends."""
        self._executor.end_iteration()()
        return [1e6 * self._base.elapsed_time(event) for event in self._completions]

    def finish(self) -> tuple[Callable[[float], float], float]:
        """Calibrate again, and draw the line between both."""
        torch.cuda.synchronize()
        (at_0, low_0, high_0), (at_1, low_1, high_1) = self._before, self._offset_bounds_ns()
        middle_0, middle_1 = (low_0 + high_0) / 2, (low_1 + high_1) / 2
        drift = (middle_1 - middle_0) / (at_1 - at_0)
        error_ns = max(high_0 - low_0, high_1 - low_1) / 2
        return lambda at_ns: at_ns + middle_0 + drift * (at_ns - at_0), error_ns

    def _offset_bounds_ns(self) -> tuple[float, float, float]:
        """Instant on the GPU's clock, and bounds of what it is behind the host's there, ns."""
        low, high, at_ns = -math.inf, math.inf, 0.0
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        for _ in range(CALIBRATION_EVENTS):
            before_ns = time.monotonic_ns()
            event.record()
            while not event.query():  # type: ignore[no-untyped-call]  # torch's
                pass
            after_ns = time.monotonic_ns()
            at_ns = 1e6 * self._base.elapsed_time(event)
            low, high = max(low, before_ns - at_ns), min(high, after_ns - at_ns)
        return at_ns, low, high


class StandIn:
    """Without a GPU: a second process that ends units in order, each a few ms after the last."""

    MOST_UNITS = 100_000
    UNIT_S = 4e-3

    def __init__(self) -> None:
        self.ends = mmap.mmap(-1, 8 * self.MOST_UNITS)
        to_device, self._launches = os.pipe()
        self.ended, from_device = os.pipe()
        context = multiprocessing.get_context("fork")
        arguments = (self.ends, to_device, from_device, self.UNIT_S, self._launches)
        self._process = context.Process(target=_end_units, args=arguments, daemon=True)
        self._process.start()
        os.close(to_device)
        os.close(from_device)
        self._count = 0

    def begin(self) -> None:
        """Nothing to calibrate: both processes read one clock."""

    def begin_iteration(self) -> None:
        """Note which unit is the first."""
        self._first = self._count

    def begin_unit(self) -> None:
        """Nothing to record."""

    def launch(self, position: int) -> None:
        """Bytecode and short C calls, for less than the unit will take."""
        _burn_until(time.perf_counter() + 0.9 * self.UNIT_S)

    def end_unit(self) -> Completion:
        """Hand the unit over."""
        os.write(self._launches, b"u")
        self._count += 1
        return _Ended(self, self._count - 1)

    def end_iteration(self) -> list[float]:
        """Wait for the last unit, burning."""
        while not _Ended(self, self._count - 1).query():
            _burn_until(0.0)
        return [float(self.end_ns(unit)) for unit in range(self._first, self._count)]

    def end_ns(self, unit: int) -> int:
        """When the unit ended, 0 if it has not."""
        return int(struct.unpack_from("q", self.ends, 8 * unit)[0])

    def finish(self) -> tuple[Callable[[float], float], float]:
        """One clock, no error."""
        os.close(self._launches)
        self._process.join()
        return lambda at_ns: at_ns, 0.0


class _Ended:
    def __init__(self, device: StandIn, unit: int) -> None:
        self._device, self._unit = device, unit

    def synchronize(self) -> None:
        while not self.query():
            os.read(self._device.ended, 1)

    def query(self) -> bool:
        return self._device.end_ns(self._unit) != 0


def _end_units(ends: mmap.mmap, launches: int, ended: int, unit_s: float, other_end: int) -> None:
    os.close(other_end)
    os.set_blocking(ended, False)
    unit = 0
    while os.read(launches, 1):
        time.sleep(unit_s)
        struct.pack_into("q", ends, 8 * unit, time.monotonic_ns())
        unit += 1
        with contextlib.suppress(BlockingIOError):  # the pipe is full: nobody sleeps
            os.write(ended, b"e")


def _burn_until(end_s: float) -> None:
    """Bytecode and short C calls that never give up the interpreter, up to an instant or once."""
    numbers = [3.0, 1.0, 2.0]
    while True:
        for number in range(60):
            numbers[number % 3] = math.sqrt(number) + len(numbers)
        if time.perf_counter() >= end_s:
            return


def compare(kinds: Iterable[str], seconds: float) -> dict[str, Any]:
    """Measure each kind of training thread of `CudaDevice` at each switch interval."""
    results: dict[str, Any] = {}
    for kind in kinds:
        device = CudaDevice(kind)
        for interval_s in INTERVALS_S:
            name = f"{kind}, switch interval {1e3 * interval_s:g} ms"
            results[name] = measure(device, interval_s, seconds)
    return results
