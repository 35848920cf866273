"""What a unit costs at level `units`, in turns within one process, on one GPU.

    ENVPIPE_FORBID_CLOCK_CONTROL=1 python -m benchmarks.gpu.unit_cost [--queues 1]

Units that the GPU bounds, and that the host bounds, run alone, with the calls that time them, with
a request for another clock at each, and with the energy counter read beside that. Where the GPU
bounds them it spins: products take power, and with it the clock wanders by more than what is looked
for. In each, copies on a second stream lie beside the work, as what tensor and context parallel
ranks send each other does. Other units are a transformer layer's forward and backward, behind which
the host's caches are cold: there, what the calls take of the host by its clock says more than how
long turns are. With waits the host waits for the device behind each unit, as in Megatron's 1F1B. No
clock is changed: requests end at a GPU that does nothing. Without a GPU it rehearses on the CPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from scipy.stats import bootstrap

from benchmarks.outputs import leave, make_console, make_table, output_option
from envpipe_megatron.core.orders import builders
from envpipe_megatron.formats.energy import Phase
from envpipe_megatron.gpu.backends.nvml import NvmlGpu
from envpipe_megatron.gpu.base import Gpu, GpuAddress
from envpipe_megatron.gpu.emulated.emulated_gpu import EmulatedGpu
from envpipe_megatron.gpu.registry import open_gpu, uid_of_cuda_device
from envpipe_megatron.integrations.layer_profile.rank_gpu import now_s
from envpipe_megatron.runtime.clocks.rank_clock import RankClock
from envpipe_megatron.runtime.energy.meter import EnergyMeter
from envpipe_megatron.runtime.execution.executor import CudaExecutor, Executor, StageRecord
from envpipe_megatron.runtime.execution.stage_run import IterationOrder, StageRun
from host_executor import HostExecutor  # of tests/helpers

UNITS = 32
#: Pieces of a unit, and cycles that the GPU spins in each: 2 ms at 2 GHz, or next to none; or how
#: wide a layer is.
_LAYER = "a layer"
_BOUND = {"GPU": (8, 500_000), "host": (60, 1), _LAYER: (1, 2048)}
#: On the CPU, the size of matrices whose products stand for spinning.
_BOUND_ON_CPU = {"GPU": (8, 128), "host": (600, 16), _LAYER: (1, 64)}
#: So few tokens that the host bounds a layer; and on the CPU.
_TOKENS, _TOKENS_ON_CPU = 256, 8
_COPIED = 256
ALONE, TIMED, BY_GUARD = "alone", "timed", "clocks by the guard"
#: As by the guard, and the energy counter is read, apart or not.
COUNTED = {"by the guard, counter apart": True, "by the guard, counter by a thread": False}
_COUNTED_TURNS = 4
MODES = (ALONE, TIMED, BY_GUARD, *COUNTED)


class Work:
    """A unit: pieces one after another, and a copy on another stream beside each."""

    def __init__(self, bound: str) -> None:
        on_gpu = torch.cuda.is_available()
        self._pieces, amount = (_BOUND if on_gpu else _BOUND_ON_CPU)[bound]
        self._copied = torch.zeros(_COPIED, _COPIED, device="cuda" if on_gpu else "cpu")
        self._beside: Any = None
        self._work: Callable[[], Any]
        if bound == _LAYER:
            self._work = _layer(amount, self._copied.device)
        elif on_gpu:
            cuda: Any = torch.cuda
            # No public function keeps a GPU busy for so long.
            self._work, self._beside = partial(cuda._sleep, amount), cuda.Stream()
        else:
            factor = torch.zeros(amount, amount)
            self._work = partial(factor.mm, factor)

    def run(self) -> None:
        """Hand it over to the device."""
        for _ in range(self._pieces):
            self._work()
            if self._beside is not None:
                self._beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._beside):
                    self._copied.clone()
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)


def _layer(width: int, device: torch.device) -> Callable[[], None]:
    """Runs a transformer layer forwards and backwards."""
    options: Any = {"device": device, "dtype": torch.bfloat16}
    layer = torch.nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, batch_first=True, **options
    )
    count = _TOKENS if device.type == "cuda" else _TOKENS_ON_CPU
    tokens = torch.zeros(1, count, width, **options)
    return lambda: layer(tokens).sum().backward()


class Bench:
    """Turns of one kind of units."""

    def __init__(self, bound: str, *, waits: bool) -> None:
        self._work, self._waits = Work(bound), waits
        on_gpu = torch.cuda.is_available()
        self._executor: Executor = CudaExecutor() if on_gpu else HostExecutor()
        self._folder = tempfile.TemporaryDirectory()
        gpu = _dry_gpu(Path(self._folder.name))
        clocks_mhz = gpu.supported_frequencies_mhz[:8]
        self._clock = RankClock(gpu, guarded=True)
        schedule = builders.one_f_one_b(1, UNITS // 2)
        frequency_mhz = np.resize(np.array(clocks_mhz), (1, UNITS))
        self._order = IterationOrder(Phase.STEADY, schedule, frequency_mhz)
        self._late: StageRecord | None = None
        #: What calls took of the host, by mode, of each unit.
        self.calls_s: dict[str, list[float]] = {mode: [] for mode in MODES}

    def turn_s(self, mode: str, iterations: int) -> float:
        """Seconds for each unit; some refreshes of the counter, where it is read."""
        counts = mode in COUNTED
        iterations *= _COUNTED_TURNS if counts else 1
        with _counter_read(COUNTED[mode]) if counts else contextlib.nullcontext():
            begin_s = now_s()
            for _ in range(iterations):
                self._iterate(mode)
            return (now_s() - begin_s) / (iterations * UNITS)

    def close(self) -> None:
        """End the guard."""
        self._clock.close()
        self._folder.cleanup()

    def _iterate(self, mode: str) -> None:
        if mode == ALONE:
            for _ in range(UNITS):
                self._work.run()
                if self._waits:
                    now_s()
            return
        request = self._clock.request if mode != TIMED else lambda frequency_mhz, later: None
        run = StageRun(self._order, 0, self._executor, request)
        run.begin()
        while run.next_unit is not None:
            calls_s = _time_s(run.begin_unit)
            self._work.run()
            calls_s += _time_s(run.end_unit)
            self.calls_s[mode].append(calls_s)
            if self._waits:
                now_s()
        if self._late is not None:
            _ = self._late.end_s  # an iteration's times are read behind the next one's units
        self._late = run.end()


def _time_s(call: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    call()
    return time.perf_counter() - begin_s


def measure(bound: str, *, waits: bool, rounds: int, turn_iterations: int) -> list[dict[str, Any]]:
    """For each way, what it adds to a unit alone: the median of pairs of turns, and its error."""
    bench = Bench(bound, waits=waits)
    for mode in MODES:  # loads, and allocates
        bench.turn_s(mode, 1)
    turns: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        for mode in MODES[:: 1 if number % 2 else -1]:
            turns[mode].append(bench.turn_s(mode, turn_iterations))
    bench.close()
    rows = []
    for mode in MODES[1:]:
        more_us = [
            1e6 * (own - alone) for own, alone in zip(turns[mode], turns[ALONE], strict=True)
        ]
        rows.append(
            {
                "bound by": bound,
                "waits": waits,
                "unit": mode,
                "alone_ms": 1e3 * statistics.median(turns[ALONE]),
                "calls_us": 1e6 * statistics.median(bench.calls_s[mode]),
                "more_us": statistics.median(more_us),
                "standard_error_us": bootstrap((more_us,), np.median).standard_error,
            }
        )
    return rows


def _uid() -> str:
    return uid_of_cuda_device(str(torch.cuda.get_device_properties(0).uuid))


def _dry_gpu(folder: Path) -> Gpu:
    """One whose clock stays as it is; without a GPU, an emulated one in a folder."""
    if torch.cuda.is_available():
        return open_gpu(GpuAddress("dry_run", _uid()))
    return EmulatedGpu.create("h100", 0, folder)


@contextlib.contextmanager
def _counter_read(apart: bool) -> Iterator[None]:
    """Read the GPU's energy counter as often as a job does."""
    if not torch.cuda.is_available():
        yield
        return
    gpu = NvmlGpu(_uid())
    gpu.read_apart = apart
    with contextlib.closing(EnergyMeter(gpu)):
        yield


@click.command(help=__doc__)
@click.option("--queues", type=click.IntRange(1, 32), help="Hardware queues; torch's by default.")
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True)
@click.option("--turn-iterations", type=click.IntRange(1), default=1, show_default=True)
@output_option("unit_cost")
def main(queues: int | None, rounds: int, turn_iterations: int, output: Path) -> None:
    """Measure, print, and leave rows."""
    if queues is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)  # before CUDA is initialised
    rows = [
        {"queues": queues, **row}
        for bound in _BOUND
        for waits in (False, True)
        for row in measure(bound, waits=waits, rounds=rounds, turn_iterations=turn_iterations)
    ]
    make_console().print(make_table("What a unit costs", rows))
    on_gpu = torch.cuda.is_available()
    gpus = f"1 {torch.cuda.get_device_name()}" if on_gpu else ""
    leave(output, "GPUs" if on_gpu else "CPU", {"unit_cost": rows}, gpus=gpus)


if __name__ == "__main__":
    main()
